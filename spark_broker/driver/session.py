"""The Spark session that brokers run in: what it needs, set where the user did not, refused where it cannot work."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_broker.driver.executors import expected_executors, is_local, is_loopback, local_slots
from spark_broker.errors import UnsupportedSparkError

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MEMORY_LIMIT = "spark.executor.pyspark.memory"


@dataclass(frozen=True)
class _Rule:
    """A setting under which brokers cannot run: `breaks(value)` says so, `why` says why."""

    name: str
    default: str
    breaks: Callable[[str], bool]
    why: str


def _is_true(value: str) -> bool:
    return value.strip().lower() == "true"


_RULES = (
    _Rule(
        MEMORY_LIMIT,
        "",
        bool,
        "it limits the address space of Python workers, and a broker's memory maps count against it",
    ),
    _Rule(
        "spark.dynamicAllocation.enabled",
        "false",
        _is_true,
        "Spark would start no executors until a job waits, and brokers wait for executors",
    ),
)


def configure_spark(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Set on a session's builder what brokers need and nobody should have to type.

    What the user set, on the builder or with `spark-submit --conf`, stays. Raises UnsupportedSparkError where that
    cannot work.
    """
    explicit = {**submitted_settings(), **{k: str(v) for k, v in builder._options.items()}}
    check_settings(explicit.get)
    master = explicit.get("spark.master", "")
    if is_loopback(master):
        # Read by the JVM when it starts. Under spark-submit it runs already, and the caller's environment counts.
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
        # PySpark's driver takes the workers' interpreter from here and not from spark.pyspark.python.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in _settings(master).items():
        if name not in explicit:
            builder = builder.config(name, value)
    return builder


def check_settings(get: Callable[[str, str], str]) -> None:
    """Raise UnsupportedSparkError for a setting under which brokers cannot run. `get(name, default)`."""
    for rule in _RULES:
        value = get(rule.name, rule.default)
        if rule.breaks(value):
            raise UnsupportedSparkError(f"{rule.name} = {value} does not work with brokers: {rule.why}")


def check_session(spark: object) -> None:
    """Raise UnsupportedSparkError where this session cannot host brokers; warn of what will be felt."""
    from pyspark.sql import SparkSession

    if not isinstance(spark, SparkSession):
        kind = type(spark)
        if kind.__module__.startswith("pyspark.sql.connect"):
            raise UnsupportedSparkError("a Spark Connect session cannot host brokers: it has no SparkContext")
        raise UnsupportedSparkError(f"{kind.__module__}.{kind.__qualname__} is not a SparkSession")
    sc = spark.sparkContext
    conf: SparkConf = sc.getConf()
    check_settings(lambda name, default: conf.get(name, default) or default)
    if not is_local(sc.master) and conf.get("spark.deploy.maxExecutorRetries") != "-1":
        logger.warning(
            "spark.deploy.maxExecutorRetries is not -1: a standalone master ends the application after ten lost "
            "executors. Build the session with configure_spark()."
        )


def check_room(spark: SparkSession, brokers: int) -> None:
    """Warn where the brokers share one executor, and where no query fits beside them."""
    sc = spark.sparkContext
    if is_local(sc.master):
        logger.warning("%s has one executor: all %d brokers share it and fail together with it", sc.master, brokers)
        if local_slots(sc) < 2:
            logger.warning("%s has one task slot, which the brokers take: no query can run. Use local[2].", sc.master)
        return
    conf = sc.getConf()
    task_cpus, cores = int(conf.get("spark.task.cpus", "1") or 1), _executor_cores(sc.master or "", conf)
    if cores is not None and cores <= task_cpus and (expected_executors(sc) or brokers) <= brokers:
        logger.warning(
            "executors have %d core(s), which a broker takes: no query can run. Try local-cluster[%d,2,1024].",
            cores,
            brokers,
        )


def _executor_cores(master: str, conf: SparkConf) -> int | None:
    if master.startswith("local-cluster["):
        return int(master.removeprefix("local-cluster[").split(",")[1])
    cores = conf.get("spark.executor.cores")
    return int(cores) if cores else None


def _settings(master: str) -> dict[str, str]:
    settings = {
        "spark.speculation": "false",
        "spark.dynamicAllocation.enabled": "false",
        # A standalone master removes an application after ten lost executors; a cluster that heals loses more in time.
        "spark.deploy.maxExecutorRetries": "-1",
        "spark.ui.showConsoleProgress": "false",  # the brokers' jobs never end: the bar would be all there is to see
        "spark.log.level": "WARN",
        "spark.pyspark.python": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "spark.databricks.delta.snapshotPartitions": "2",
    }
    if is_loopback(master):
        # The host's name may resolve to an address that executors cannot reach.
        settings |= {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
        settings |= {"spark.executorEnv.SPARK_LOCAL_IP": LOOPBACK}
        settings |= _package_path()
    return settings


def _package_path() -> dict[str, str]:
    """Where workers on this machine find this package, when it runs from a checkout that is not installed."""
    root = Path(__file__).resolve().parent.parent.parent
    if root.name in ("site-packages", "dist-packages"):
        return {}
    given = os.environ.get("PYTHONPATH", "")
    return {"spark.executorEnv.PYTHONPATH": os.pathsep.join(p for p in (str(root), given) if p)}


def submitted_settings() -> dict[str, str]:
    """What spark-submit was given; where Python starts the JVM itself, what PYSPARK_SUBMIT_ARGS says."""
    if _submitted_jvm() is None:
        return _given_settings(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    from pyspark import SparkConf

    return dict(SparkConf().getAll())


def _given_settings(arguments: str) -> dict[str, str]:
    """The settings in a command line of spark-submit."""
    words = shlex.split(arguments)
    pairs = list(itertools.pairwise(words))
    settings = dict(value.partition("=")[::2] for name, value in pairs if name in ("--conf", "-c"))
    masters = [value for name, value in pairs if name == "--master"]
    return {**settings, "spark.master": masters[-1]} if masters else settings


def quiet_spark() -> None:
    """Under spark-submit: warnings only, from before the session on. Elsewhere Spark logs as its shell does.

    Of single tasks, errors only: for a task whose worker died Spark prints a page, and the launcher says it in a line.
    """
    jvm = _submitted_jvm()
    if jvm is None:
        return
    # spark-submit leaves its logging to be set up again by whoever logs first, which would undo what is set here.
    jvm.org.apache.spark.SparkConf().log()
    log4j, levels = jvm.org.apache.logging.log4j.core.config.Configurator, jvm.org.apache.logging.log4j.Level
    log4j.setRootLevel(levels.WARN)
    log4j.setLevel("org.apache.spark.scheduler.TaskSetManager", levels.ERROR)


class _SignalForwarder:
    """A Java SignalHandler that calls Python."""

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal

    def handle(self, signal: object) -> None:
        """Called by the JVM, on a thread of its own."""
        del signal
        self._on_signal()

    class Java:
        implements = ("sun.misc.SignalHandler",)


def forward_jvm_signals(on_signal: Callable[[], None]) -> None:
    """Under spark-submit: call `on_signal` for SIGINT and SIGTERM to the JVM, which then do not end it.

    spark-submit's pid is the JVM's, and a terminal sends Ctrl-C to both. The JVM would end every executor at once,
    while brokers still hand over. (A JVM that Python starts ignores SIGINT from the start.)
    """
    jvm = _submitted_jvm()
    if jvm is None:
        return
    from pyspark import SparkContext
    from pyspark.java_gateway import ensure_callback_server_started

    ensure_callback_server_started(SparkContext._gateway)  # type: ignore[no-untyped-call]
    for name in ("INT", "TERM"):
        jvm.sun.misc.Signal.handle(jvm.sun.misc.Signal(name), _SignalForwarder(on_signal))


def _submitted_jvm() -> Any:
    """The JVM that spark-submit started; None where Python starts it, or has."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    from pyspark import SparkContext

    SparkContext._ensure_initialized()
    return SparkContext._jvm
