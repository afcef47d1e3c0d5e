"""What `configure_spark` sets, keeps and refuses. No JVM is started: a builder only holds options until it is used."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from spark_broker.driver import session
from spark_broker.driver.session import check_session, configure_spark
from spark_broker.errors import MissingDependencyError, UnsupportedSparkError


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither spark-submit's environment nor what configure_spark puts into it outlives a test."""
    for name in ("PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS", "SPARK_LOCAL_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setattr(session, "existing_context", lambda: None)


def configured(**settings: str) -> dict[str, str]:
    builder = SparkSession.Builder()
    for name, value in settings.items():
        builder = builder.config(name.replace("_", "."), value)
    return {name: str(value) for name, value in configure_spark(builder)._options.items()}


def test_it_sets_what_brokers_need() -> None:
    options = configured(spark_master="local-cluster[3,2,1024]")

    assert options["spark.speculation"] == "false"
    assert options["spark.dynamicAllocation.enabled"] == "false"
    assert options["spark.deploy.maxExecutorRetries"] == "-1"
    assert options["spark.databricks.delta.snapshotPartitions"] == "2"
    assert options["spark.driver.bindAddress"] == options["spark.driver.host"] == "127.0.0.1"


def test_unix_sockets_are_for_one_machine_with_the_usual_temporary_directory() -> None:
    name = "spark.python.unix.domain.socket.enabled"
    assert configured(spark_master="local[2]")[name] == "true"
    assert configured(spark_master="local-cluster[3,2,1024]")[name] == "true"
    assert name not in configured(spark_master="spark://host:7077")
    assert name not in configured(spark_master="yarn")
    elsewhere = {"spark_driver_extraJavaOptions": "-Xss4m -Djava.io.tmpdir=/a/long/name"}
    assert name not in configured(spark_master="local[2]", **elsewhere)


def test_it_keeps_what_the_user_set() -> None:
    options = configured(
        spark_master="local[2]",
        spark_driver_host="10.0.0.7",
        spark_ui_showConsoleProgress="true",
        spark_speculation="true",
    )

    assert options["spark.driver.host"] == "10.0.0.7"
    assert options["spark.ui.showConsoleProgress"] == "true"
    assert options["spark.speculation"] == "true"


def test_it_keeps_what_the_command_line_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYSPARK_SUBMIT_ARGS",
        "--master 'local-cluster[3,2,1024]' --conf spark.speculation=true -c 'a.b=c d' pyspark-shell",
    )

    options = configured()

    assert "spark.speculation" not in options
    assert options["spark.driver.host"] == "127.0.0.1"


def test_addresses_of_a_real_cluster_are_left_alone() -> None:
    assert "spark.driver.host" not in configured(spark_master="spark://head:7077")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark_executor_pyspark_memory", "1g"),
        ("spark_dynamicAllocation_enabled", "true"),
        ("spark_excludeOnFailure_enabled", "true"),
    ],
)
def test_it_refuses_settings_under_which_brokers_cannot_run(name: str, value: str) -> None:
    with pytest.raises(UnsupportedSparkError, match=name.replace("_", r"\.")):
        configured(**{name: value})


def test_a_missing_java_is_said_before_spark_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "existing_context", lambda: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")

    with pytest.raises(MissingDependencyError, match="Spark needs Java 17 or newer, and there is none on the PATH"):
        configured(spark_master="local[2]")
    configured(spark_remote="sc://somewhere")  # whose Java is elsewhere


class Context:
    """The part of an existing context that the checks use."""

    def __init__(self, **conf: str) -> None:
        self.master = "local-cluster[3,2,1024]"
        self._conf = {name.replace("_", "."): value for name, value in conf.items()}

    def getConf(self) -> dict[str, str]:
        return self._conf


def test_settings_that_an_existing_session_does_not_take_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "existing_context", lambda: Context(spark_executor_memory="1g"))

    configured(spark_master="local-cluster[3,2,1024]", spark_executor_memory="2g", spark_sql_ansi_enabled="true")

    (line,) = [record.getMessage() for record in caplog.records]
    assert "spark.deploy.maxExecutorRetries = -1" in line
    assert "spark.executor.memory = 2g" in line
    assert "spark.speculation" not in line  # false is Spark's default
    assert "spark.sql.ansi.enabled" not in line  # getOrCreate sets it


def test_nothing_is_said_of_an_existing_session_that_was_built_for_brokers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    existing = Context()
    existing._conf = {**configured(spark_master=existing.master)}
    monkeypatch.setattr(session, "existing_context", lambda: existing)

    configured(spark_master=existing.master)

    assert caplog.records == []


def test_a_connect_session_cannot_host_brokers() -> None:
    connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})

    with pytest.raises(UnsupportedSparkError, match="Connect"):
        check_session(connect())


def test_what_is_no_session_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedSparkError, match="str is not a SparkSession"):
        check_session("local[2]")
