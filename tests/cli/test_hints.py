"""A newcomer's first mistakes. The message says where the mistake is, the hint what to do in that case."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from spark_broker.cli import installed
from spark_broker.client.admin import Admin
from spark_broker.client.producer import Producer
from spark_broker.client.record_builder import to_bytes, to_timestamp_us
from spark_broker.config import load_cluster_settings
from spark_broker.driver import room, session
from spark_broker.errors import (
    ClusterStartError,
    InvalidConfigError,
    InvalidDataError,
    InvalidReplicationFactorError,
    InvalidTimestampError,
    MissingDependencyError,
    SchemaMismatchError,
    SparkBrokerError,
    UnknownTopicOrPartitionError,
    UnsupportedSparkError,
)
from spark_broker.pages import page
from spark_broker.protocol.schema import conform
from spark_broker.spark.options import parse_options
from spark_broker.spark.write_options import parse_write_options
from tests.cli.conftest import Run
from tests.cli.test_produce_consume import TYPED
from tests.client.fake_broker import FakeCluster

if TYPE_CHECKING:
    from pyspark import SparkContext


def test_a_hint_of_the_place_takes_the_place_of_the_types() -> None:
    assert str(InvalidDataError("no", hint="Do this.")) == "[INVALID_DATA] no -> Do this."
    assert str(InvalidDataError("no")).endswith(InvalidDataError.hint)
    assert SparkBrokerError.hint in str(SparkBrokerError())


def test_an_int_as_value_is_told_how_to_become_bytes() -> None:
    with pytest.raises(InvalidDataError, match=r"value is int; .* -> Encode it \(`str\(x\)`"):
        to_bytes(5, "value")


def test_a_timestamp_before_1970_is_told_from_when_on_times_can_be() -> None:
    with pytest.raises(InvalidTimestampError, match=r"timestamp 1969-12-31 .* is before 1970 -> Give a time from"):
        to_timestamp_us(datetime(1969, 12, 31, tzinfo=UTC))


def test_milliseconds_as_a_timestamp_are_told_how_to_become_a_datetime() -> None:
    with pytest.raises(InvalidDataError, match=r"timestamp is int; .* -> For milliseconds since 1970: datetime\."):
        to_timestamp_us(1_500_000_000_000)


def test_a_replication_factor_of_zero_is_not_told_to_lower_it() -> None:
    assert "from 1 to the number of live brokers" in str(InvalidReplicationFactorError("replication factor 0"))


def test_a_partition_that_is_not_there_is_looked_for_with_describe(cluster: FakeCluster) -> None:
    cluster.create("t", 2)
    with (
        Producer(cluster.bootstrap) as producer,
        pytest.raises(UnknownTopicOrPartitionError, match=r"partitions 0 to 1.*topics describe NAME"),
    ):
        producer.send("t", b"x", partition=99).result()


def test_a_missing_java_is_told_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAVA_HOME", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependencyError, match=r"Java 17 or newer.* -> Install a JDK.*`make setup`"):
        session.check_java()


def test_a_value_of_a_wrong_type_is_named_by_column_and_row(cluster: FakeCluster) -> None:
    cluster.create("t", schema=TYPED)
    rows = [{"dest": "SEA", "delay": 1}, {"dest": "LAX", "delay": "late"}]
    with (
        Producer(cluster.bootstrap) as producer,
        pytest.raises(SchemaMismatchError, match=r"column 'delay' \(int16\), row 1: 'late' does not fit") as refused,
    ):
        producer.append("t", rows).result()
    assert "evolve" not in str(refused.value)
    assert "topics describe" in refused.value.hint


def test_a_value_that_a_cast_would_lose_is_named_by_column_and_row() -> None:
    batch = pa.record_batch({"delay": pa.array([*range(1000), 40_000, 50_000], pa.int32())})
    with pytest.raises(SchemaMismatchError, match="'delay' is int32 and row 1000 does not fit the topic's int16"):
        conform(batch, TYPED)


def test_a_null_where_none_may_be_is_named_by_column_and_row() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    with pytest.raises(SchemaMismatchError, match=r"column 'id' .* has 1 nulls, the first in row 2"):
        conform(pa.record_batch({"id": pa.array([1, 2, None])}), schema)


def test_a_row_that_is_no_dict_is_named_by_its_number(cluster: FakeCluster) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap) as producer, pytest.raises(InvalidDataError, match="row 1 is int, not a dict"):
        producer.append("t", [{"value": b"x"}, 7]).result()


def test_a_bad_line_of_json_is_named_by_its_number(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", schema=TYPED)
    lines = b'{"dest":"SEA"}\n\n{"dest":"LAX","delay":"late"}\n{"dest":"JFK"}\n'
    ended = run("produce", "t", stdin=lines)
    assert ended.status == 1
    assert ended.err.startswith("error: [INVALID_DATA] line 3 is no JSON object of the topic's columns: ")
    assert "delay (int16), at (timestamp[us, tz=UTC])" in ended.err
    assert [row["dest"] for row in cluster.rows("t", 0)] == ["SEA"]


def test_a_line_without_its_separator_is_named_by_its_number(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    ended = run("produce", "t", "--key-separator", ":", stdin=b"a:1\nno key\n")
    assert "line 2: ':' is not in 'no key'" in ended.err


def test_a_command_without_a_cluster_is_told_how_to_name_one(run: Run) -> None:
    assert " -> Give --bootstrap-server, set SPARK_BROKER_BOOTSTRAP_SERVERS, or start" in run("topics", "list").err


def test_the_description_of_no_error_promises_what_is_not_there() -> None:
    from spark_broker.errors import ERRORS

    assert [kind for kind in ERRORS.values() if "evolve" in kind.hint] == []


HAS_PAGE = re.compile(r"docs/([a-z-]+)\.md")


@pytest.mark.parametrize(
    "options",
    [
        {"subscribe": "t", "startingOfsets": "earliest"},
        {"subscribe": "t", "startingOffsets": "latest"},
        {"subscribe": "t", "assign": "{}"},
        {"subscribe": "t", "failOnDataLoss": "perhaps"},
        {"subscribePattern": "("},
        {"subscribe": "t", "maxTriggerDelay": "soon"},
        {"subscribe": "t", "group": " "},
    ],
)
def test_options_of_a_read_that_cannot_be_are_told_of_the_page_of_dataframes(options: dict[str, str]) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        parse_options({"bootstrap.servers": "localhost:1", **options})
    assert HAS_PAGE.findall(refused.value.hint) == ["dataframes"]


@pytest.mark.parametrize("options", [{"topik": "t"}, {"txnAppId": "a"}, {"topic": " "}, {"topic.partitions": "3"}])
def test_options_of_a_write_that_cannot_be_are_told_of_the_page_of_dataframes(options: dict[str, str]) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        parse_write_options({"bootstrap.servers": "localhost:1", **options})
    assert HAS_PAGE.findall(refused.value.hint) == ["dataframes"]


def test_a_setting_of_a_client_is_told_of_the_page_of_settings() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        parse_options({"bootstrap.servers": "localhost:1", "subscribe": "t", "kafka.fetch.max.bytes": "many"})
    assert HAS_PAGE.findall(refused.value.hint) == ["configuration"]


class Slots:
    """A Spark context with this master, as far as the checks look."""

    def __init__(self, master: str, **settings: str) -> None:
        self.master = master
        self._settings = {name.replace("_", "."): value for name, value in settings.items()}

    def getConf(self) -> Any:
        return SimpleNamespace(get=self._settings.get)


def test_too_few_slots_are_told_to_give_more_and_not_to_use_another_builder() -> None:
    with pytest.raises(UnsupportedSparkError) as refused:
        room.check_slots(cast("SparkContext", Slots("spark://m:7077")), [1, 1, 1], 3)
    assert refused.value.hint.startswith("Give the executors one core more")
    assert "configure_spark" not in str(refused.value)


def test_too_few_executors_are_told_which_settings_give_more() -> None:
    with pytest.raises(ClusterStartError) as refused:
        room.check_settings_for_room(cast("SparkContext", Slots("local-cluster[2,2,1024]")), 3)
    assert "spark.executor.instances" in refused.value.hint
    assert "log" not in refused.value.hint


def test_a_session_of_another_kind_is_told_which_one_to_give() -> None:
    with pytest.raises(UnsupportedSparkError, match=r"builtins.str is not a SparkSession -> Give the session that"):
        session.check_session("local[2]")


def test_a_file_of_settings_that_is_not_there_is_told_to_name_another(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="does not exist -> Give the path of a TOML file"):
        load_cluster_settings(tmp_path / "nosuch.toml")


def test_the_hint_of_every_error_names_pages_that_exist_and_the_command_that_shows_them() -> None:
    from spark_broker.errors import ERRORS

    pages = {name for kind in ERRORS.values() for name in HAS_PAGE.findall(kind.hint)}
    assert pages
    for kind in ERRORS.values():
        for name in HAS_PAGE.findall(kind.hint):
            assert page(name) in kind.hint, kind
            assert installed.page_file(name).is_file()


def test_a_topic_created_with_a_replication_factor_of_zero_is_refused_before_anything_is_asked(
    cluster: FakeCluster, run: Run
) -> None:
    ended = run("topics", "create", "t", "--replication-factor", 0)
    assert ended.status == 2
    assert "--replication-factor" in ended.err
    with Admin(cluster.bootstrap) as admin:
        assert list(admin.list_topics()) == []
