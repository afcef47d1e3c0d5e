"""The Spark session that brokers run in: sets what the user has not set, and refuses settings that cannot work."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_broker.driver.master import is_local, is_loopback, local_cluster
from spark_broker.driver.work_folders import use_own_folder
from spark_broker.errors import MissingDependencyError, UnsupportedSparkError
from spark_broker.pages import page

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
JAVA_HINT = "Install a JDK, or set JAVA_HOME to one; in a checkout, `make setup` finds or installs one."
MEMORY_LIMIT = "spark.executor.pyspark.memory"
_JAVA_STARTS_S = 0.1
"""How often an interrupted start looks whether Java has started."""


@dataclass(frozen=True)
class _Rule:
    """A setting with which brokers cannot run if `breaks(value)` is true, for the reason `why`."""

    name: str
    default: str
    breaks: Callable[[str], bool]
    why: str


_DEFAULTS = {
    "spark.speculation": "false",
    "spark.dynamicAllocation.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""Spark's own defaults of the settings that we set."""

UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"

_SET_LATER = ("spark.sql.", "spark.databricks.", "spark.log.level", UNIX_SOCKETS)
"""Settings that `getOrCreate` does set on an existing session, that matter only when a session begins, or that only
make it faster."""

_JAVA_OPTIONS = ("spark.driver.extraJavaOptions", "spark.driver.defaultJavaOptions", "spark.executor.extraJavaOptions")


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
    *(
        _Rule(
            name,
            "false",
            _is_true,
            "Spark would keep the tasks that brokers need away from an executor that they are on",
        )
        for name in ("spark.excludeOnFailure.enabled", "spark.excludeOnFailure.application.enabled")
    ),
)


def configure_spark(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Set on a session's builder the settings that brokers need.

    A setting of the user, on the builder or with `spark-submit --conf`, stays. Raises UnsupportedSparkError where it
    cannot work, and MissingDependencyError where Java is missing. A session that exists already keeps its settings:
    those that are not in force there are logged.
    """
    explicit = {**submitted_settings(), **{k: str(v) for k, v in builder._options.items()}}
    check_settings(explicit.get)
    master = explicit.get("spark.master", "")
    existing = existing_context()
    if existing is not None:
        _warn_of_what_is_not_in_force(existing, explicit)
    elif "spark.remote" not in explicit:
        check_java()
    if is_loopback(master):
        # The JVM reads this when it starts. Under spark-submit it runs already, and the caller's environment counts.
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
        # PySpark's driver takes the workers' interpreter from here and not from spark.pyspark.python.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if local_cluster(master) is not None and existing is None and _submitted_jvm() is None:
        use_own_folder()
    for name, value in _settings(master).items():
        if name not in explicit and not (name == UNIX_SOCKETS and _moves_temporary_files(explicit)):
            builder = builder.config(name, value)
    return builder


def _moves_temporary_files(explicit: Mapping[str, str]) -> bool:
    """Whether Java's temporary directory is another than the usual one. Sockets are made there, and the name of a
    socket may have 107 bytes."""
    given = [explicit.get(name, "") for name in _JAVA_OPTIONS] + [os.environ.get("JAVA_TOOL_OPTIONS", "")]
    return any("java.io.tmpdir" in options for options in given)


def check_java() -> None:
    """Raise MissingDependencyError where Spark would find no Java, neither in JAVA_HOME nor on the PATH."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return  # under spark-submit Java runs already
    home = os.environ.get("JAVA_HOME")
    if not (home and Path(home, "bin", "java").exists()) and shutil.which("java") is None:
        raise MissingDependencyError("Spark needs Java 17 or newer, and there is none on the PATH", hint=JAVA_HINT)


def existing_context() -> SparkContext | None:
    """The Spark context that this process has, if any."""
    from pyspark import SparkContext

    return SparkContext._active_spark_context


def _warn_of_what_is_not_in_force(sc: SparkContext, explicit: Mapping[str, str]) -> None:
    """Log the settings that are not in force: a builder cannot change those of an existing context, and is silent."""
    conf = sc.getConf()
    wanted = {**_settings(sc.master or ""), **explicit}
    ignored = {name: value for name, value in wanted.items() if conf.get(name, _DEFAULTS.get(name)) != value}
    fixed = [f"{name} = {value}" for name, value in sorted(ignored.items()) if not name.startswith(_SET_LATER)]
    if fixed:
        logger.warning(
            "this process has a Spark session already, and a session keeps its settings. Not in force: %s. "
            "Stop it first (spark.stop()) and build it anew",
            ", ".join(fixed),
        )


def check_settings(get: Callable[[str, str], str]) -> None:
    """Raise UnsupportedSparkError for a setting under which brokers cannot run. `get(name, default)`."""
    for rule in _RULES:
        value = get(rule.name, rule.default)
        if rule.breaks(value):
            raise UnsupportedSparkError(
                f"{rule.name} = {value} does not work with brokers: {rule.why}",
                hint=f"Leave it out, or set it as configure_spark() does. Which settings, and why: {page('hosting')}.",
            )


def check_session(spark: object) -> None:
    """Raise UnsupportedSparkError where this session cannot host brokers; warn of a setting that will do harm later."""
    from pyspark.sql import SparkSession

    if not isinstance(spark, SparkSession):
        kind = type(spark)
        if kind.__module__.startswith("pyspark.sql.connect"):
            raise UnsupportedSparkError(
                "a Spark Connect session cannot host brokers: it has no SparkContext",
                hint="Start the brokers in another application; this session can read and write topics.",
            )
        raise UnsupportedSparkError(
            f"{kind.__module__}.{kind.__qualname__} is not a SparkSession",
            hint="Give the session that `configure_spark(SparkSession.builder).getOrCreate()` returns.",
        )
    sc = spark.sparkContext
    conf: SparkConf = sc.getConf()
    check_settings(lambda name, default: conf.get(name, default) or default)
    if not is_local(sc.master) and conf.get("spark.deploy.maxExecutorRetries") != "-1":
        logger.warning(
            "spark.deploy.maxExecutorRetries is not -1: a standalone master ends the application after ten lost "
            "executors. Build the session with configure_spark()."
        )


def _settings(master: str) -> dict[str, str]:
    settings = {
        "spark.speculation": "false",
        "spark.dynamicAllocation.enabled": "false",
        # A standalone master removes an application after ten lost executors; a cluster that heals loses more in time.
        "spark.deploy.maxExecutorRetries": "-1",
        "spark.ui.showConsoleProgress": "false",  # the brokers' jobs never end, and neither would the bar
        "spark.log.level": "WARN",
        "spark.pyspark.python": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "spark.databricks.delta.snapshotPartitions": "2",
    }
    if is_loopback(master):
        # The host's name may resolve to an address that executors cannot reach.
        settings |= {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
        settings |= {"spark.executorEnv.SPARK_LOCAL_IP": LOOPBACK}
        settings |= _package_path()
        # Over TCP, a task's first rows wait 40 ms for an acknowledgement that the other side delays. Elsewhere the
        # directories of executors may have names that are too long for such sockets.
        settings |= {UNIX_SOCKETS: "true"}
    return settings


def _package_path() -> dict[str, str]:
    """Where workers on this machine find this package, when it runs from a checkout that is not installed."""
    root = Path(__file__).resolve().parent.parent.parent
    if root.name in ("site-packages", "dist-packages"):
        return {}
    given = os.environ.get("PYTHONPATH", "")
    return {"spark.executorEnv.PYTHONPATH": os.pathsep.join(p for p in (str(root), given) if p)}


def submitted_settings() -> dict[str, str]:
    """The settings that spark-submit was given; those of PYSPARK_SUBMIT_ARGS where Python starts the JVM itself."""
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
    """Under spark-submit, let Spark log only warnings, even before the session. Elsewhere it logs as its shell does.

    Single tasks log only errors: for a dead worker, Spark's warning is a page of text and the launcher's is one line.
    """
    jvm = _submitted_jvm()
    if jvm is None:
        return
    # Under spark-submit the first class that logs sets the logging up again, which would undo what is set here.
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


@contextmanager
def interruptible_start() -> Iterator[None]:
    """While a session starts, and from then on: let SIGINT raise KeyboardInterrupt, and nobody log pages of it."""
    logging.getLogger().addFilter(_is_no_interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        _silence_java()
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # PySpark has set its own.


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """py4j logs a KeyboardInterrupt, with its traceback, before it hands it on.

    It also logs the call with which PySpark's handler comes into another one: that cancels jobs before it raises.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, KeyboardInterrupt) and "reentrant call" not in str(error and error.__context__)


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt, once Java has started: PySpark would leave behind a JVM that never ends."""
    from pyspark import SparkContext

    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, _JAVA_STARTS_S)


def _silence_java() -> None:
    """A JVM that ends in the middle of a session's start would log where it was. One that has ended logs nothing."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    if SparkContext._jvm is not None:
        with suppress(Py4JError, OSError):
            log4j = SparkContext._jvm.org.apache.logging.log4j
            log4j.core.config.Configurator.setRootLevel(log4j.Level.OFF)


def ignore_jvm_interrupts() -> None:
    """Under spark-submit: let the JVM ignore SIGINT, and what it starts from now on, as a JVM does that Python starts.

    A terminal sends Ctrl-C to them all. It would end the JVM, its executors, and the processes that plan a stream.
    """
    jvm = _submitted_jvm()
    if jvm is not None:
        jvm.sun.misc.Signal.handle(jvm.sun.misc.Signal("INT"), jvm.sun.misc.SignalHandler.SIG_IGN)


def forward_jvm_signals(on_signal: Callable[[], None], names: Sequence[str] = ("INT", "TERM")) -> None:
    """Under spark-submit: call `on_signal` for these signals to the JVM, which then do not end it.

    spark-submit's pid is the JVM's, and a terminal sends Ctrl-C to both. The JVM would end every executor at once,
    while brokers still hand over. (A JVM that Python starts ignores SIGINT from the start.)
    """
    jvm = _submitted_jvm()
    if jvm is None:
        return
    from pyspark import SparkContext
    from pyspark.java_gateway import ensure_callback_server_started

    ensure_callback_server_started(SparkContext._gateway)  # type: ignore[no-untyped-call]
    for name in names:
        jvm.sun.misc.Signal.handle(jvm.sun.misc.Signal(name), _SignalForwarder(on_signal))


def _submitted_jvm() -> Any:
    """The JVM that spark-submit started; None where Python starts the JVM, or has started it."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    from pyspark import SparkContext

    SparkContext._ensure_initialized()
    return SparkContext._jvm
