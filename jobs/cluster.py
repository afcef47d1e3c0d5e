"""The cluster application: brokers on Spark's executors, until a signal stops it.

    spark-submit jobs/cluster.py --brokers 3 --config conf/cluster.toml

Ends in order on SIGINT and SIGTERM: leaders hand over, logs are synced, executors are given back.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

# Runs from a checkout, too: spark-submit puts the script's own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spark_broker.broker.log_format import formatter
from spark_broker.cli.main import INTERRUPTED
from spark_broker.config import LOG_LEVELS, ClusterSettings, load_cluster_settings
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.driver.directories import lasting_metadata_dir
from spark_broker.driver.metadata_claim import Owner, check_claim_of
from spark_broker.driver.session import (
    configure_spark,
    forward_jvm_signals,
    interruptible_start,
    quiet_spark,
    submitted_settings,
)
from spark_broker.driver.view import COLUMNS, ClusterStatus, table_rows
from spark_broker.errors import ClosedError, ClusterStartError, SparkBrokerError
from spark_broker.setting_values import named_once
from spark_broker.spark.delta_session import configure_delta_where_there
from spark_broker.spark.spark_failures import of_spark, root_cause, said

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("spark_broker.jobs.cluster")

POLL_S = 0.2

RENEW_S = 2.0
"""How often the ready file is compared with the brokers that are live."""

GIVEN_UP = ("JAVA_GATEWAY_EXITED", "stopped SparkContext")
"""Java has refused its options, or no master answers. Java, or Spark's log, has said so before."""

WIDTH = 120
"""The width of a table that is not printed on a terminal."""

CORES, MEMORY_MB = 2, 1024
"""The cores and memory of an executor where no master is given: one core for the broker, one for queries."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run a spark-broker cluster on Spark executors.")
    parser.add_argument("--brokers", type=int, default=3, metavar="N", help="brokers to start (default 3)")
    parser.add_argument("--config", metavar="FILE", help="settings, as in conf/cluster.toml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="a setting; not with --config"
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help="log.dirs, where the settings have none: the data is kept there"
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="level of the logs (the setting log.level)")
    parser.add_argument(
        "--take-over", action="store_true", help="start though another cluster that lives uses the directories; end it"
    )
    parser.add_argument(
        "--accept-older-metadata",
        action="store_true",
        help="start though metadata.dir lacks what brokers have seen (`spark-broker docs backup`)",
    )
    parser.add_argument("--master", help="Spark master (default: what spark-submit has, else local-cluster)")
    parser.add_argument("--executors", type=int, metavar="N", help="executors of a local-cluster (default: brokers)")
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="PATH",
        help="written, as JSON, once all brokers are live, and again when one of them has another address",
    )
    parser.add_argument("--run-seconds", type=float, metavar="S", help="stop after this long (default: run on)")
    options = parser.parse_args(given)
    if options.config and options.settings:
        parser.error("give --config or --set, not both")
    if any("=" not in setting for setting in options.settings):
        parser.error("--set takes NAME=VALUE")
    return options


def main(given: list[str] | None = None) -> int:
    """Run the cluster; returns the exit status."""
    options = arguments(given)
    try:
        settings = load_settings(options)
        log(settings.cluster.controller_log_level, settings.cluster.log_format)
        metadata_dir = lasting_metadata_dir(settings.cluster)
        if metadata_dir is not None and not options.take_over:
            check_claim_of(metadata_dir)  # The controller would raise the same error, but after Spark has started.
        if options.ready_file:
            check_ready_file(options.ready_file)
        with session(options, settings) as spark:
            stop = stop_on_signals()
            with started(spark, options, settings, stop) as cluster:
                show(cluster)
                ready = None
                if options.ready_file:
                    ready = ReadyFile(options.ready_file, temporary=not settings.cluster.log_dirs)
                    ready.write(cluster)
                run(cluster, stop, options.run_seconds, ready)
                print("stopping: brokers hand over and sync ...", flush=True)
    except SparkBrokerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before there is a session
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except of_spark() as error:
        print(f"error: {why(error)}", file=sys.stderr)
        return 1
    finally:
        if options.ready_file:
            remove_ready_file(options.ready_file)
    print("stopped", flush=True)
    return 0


def why(error: Exception) -> str:
    """What an exception of Spark's says, in a line. That of a start that was given up says only where it was."""
    text = (said(error) + root_cause(error)).partition(" This stopped SparkContext was created at:")[0]
    return f"{text} The reason is above." if any(name in text for name in GIVEN_UP) else text


def load_settings(options: argparse.Namespace) -> ClusterSettings:
    """The settings of the file or of the command line. Raises InvalidConfigError."""
    named = ((name, value) for name, _, value in (setting.partition("=") for setting in options.settings))
    settings = load_cluster_settings(options.config or named_once(named) or None)
    cluster = settings.cluster
    if options.data_dir and not cluster.log_dirs:
        cluster = cluster.with_values({"log.dirs": options.data_dir})
    if options.log_level:
        cluster = cluster.with_values({"log.level": options.log_level})
    return ClusterSettings(cluster=cluster, topic=settings.topic)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the present `sys.stderr`: progress bars replace it while they are shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        raise AttributeError("the stream is stderr")


def log(level: str, log_format: str) -> None:
    """Log to stderr: the cluster at this level, everything else warnings only."""
    handler = StderrHandler()
    handler.setFormatter(formatter(log_format, "%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("spark_broker").setLevel(level)


def log_file() -> str:
    """The file to which stderr goes; empty where it is a terminal or a pipe."""
    try:
        path = Path("/proc/self/fd/2").readlink()
    except OSError:
        return ""
    return str(path) if path.is_file() else ""


def stop_on_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set. Call this once the session exists: PySpark's handler cancels every job."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    forward_jvm_signals(stop.set)
    return stop


def run(cluster: BrokerCluster, stop: threading.Event, seconds: float | None, ready: ReadyFile | None = None) -> None:
    """Wait for a signal or for the time to pass, and keep the ready file true. Raises the reason if the cluster ends
    by itself before.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    renew_at_s = time.monotonic() + RENEW_S
    while not stop.wait(POLL_S) and (deadline is None or time.monotonic() < deadline):
        if cluster.stopped:
            raise cluster.failure or ClosedError("the Spark application has ended under the cluster")
        if ready is not None and time.monotonic() >= renew_at_s:
            ready.renew(cluster)
            renew_at_s = time.monotonic() + RENEW_S


@contextmanager
def session(options: argparse.Namespace, settings: ClusterSettings) -> Iterator[SparkSession]:
    """The Spark session, stopped at the end. With Delta where the cluster is to tier."""
    from pyspark.sql import SparkSession

    with interruptible_start():
        quiet_spark()
        builder = SparkSession.builder.appName("spark-broker")
        builder = configure_spark(builder.master(master(options)))
        if settings.cluster.tiering_interval_ms >= 0:
            builder = configure_delta_where_there(builder)
        spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def master(options: argparse.Namespace) -> str:
    """The master to use. Where none was given, spark-submit reports `local[*]`, which does not suit a cluster."""
    if options.master:
        return str(options.master)
    submitted = submitted_settings().get("spark.master", "local[*]")
    if submitted != "local[*]":
        return submitted
    return f"local-cluster[{options.executors or options.brokers},{CORES},{MEMORY_MB}]"


@contextmanager
def started(
    spark: SparkSession, options: argparse.Namespace, settings: ClusterSettings, stop: threading.Event
) -> Iterator[BrokerCluster]:
    """The cluster, stopped in order at the end. Raises ClosedError if `stop` is set while it starts."""
    config = {**settings.cluster.to_dict(), **settings.topic.given()}
    with progress() as show_progress:

        def tell(what: str, ready: int, needed: int) -> None:
            if stop.is_set():
                raise ClosedError("a signal came before the brokers were live: the start is given up")
            show_progress(what, ready, needed)

        cluster = BrokerCluster.start(
            spark,
            options.brokers,
            config,
            take_over=options.take_over,
            accept_older_metadata=options.accept_older_metadata,
            on_progress=tell,
        )
    with cluster:
        yield cluster


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Shows what is awaited: bars on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield print_progress()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield print_progress()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {what: bars.add_task(text, total=None) for what, text in STAGES.items()}
        yield lambda what, ready, needed: bars.update(tasks[what], completed=ready, total=needed)


STAGES = {"executors": "executors", "brokers": "brokers registering"}


def print_progress() -> Callable[[str, int, int], None]:
    """One line for each change."""
    last: dict[str, int] = {}

    def tell(what: str, ready: int, needed: int) -> None:
        if last.get(what) != ready:
            last[what] = ready
            print(f"{STAGES[what]}: {ready} of {needed}", file=sys.stderr, flush=True)

    return tell


def show(cluster: BrokerCluster) -> None:
    """The bootstrap line and a table of the brokers."""
    status = cluster.status()
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in (COLUMNS, *table_rows(status)):
            print("  ".join(f"{cell:<16}" for cell in row))
    else:
        table = Table(title=f"cluster {cluster.cluster_id}", box=box.SIMPLE)
        for name in COLUMNS:
            table.add_column(name, no_wrap=name == "address")
        for row in table_rows(status):
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    print(f"bootstrap.servers = {cluster.bootstrap_servers}", flush=True)


class ReadyFile:
    """What another process needs to use the cluster. The file appears only when it is complete.

    It is renewed as long as the cluster runs: a broker that replaces another one may have another address, and once
    every broker was replaced, nobody would listen at the first addresses.
    """

    def __init__(self, path: Path, *, temporary: bool) -> None:
        """`temporary`: the cluster's data is deleted when it stops."""
        self._path = path
        self._temporary = temporary
        self._servers = ""
        self._trouble = ""

    def write(self, cluster: BrokerCluster) -> None:
        """Raises ClusterStartError for what the system refuses."""
        self._write(cluster, cluster.status())

    def renew(self, cluster: BrokerCluster) -> None:
        """Write it again if the brokers have other addresses now. What is in the way is logged once, and the next call
        tries again. The file of another cluster stays.
        """
        before = self._servers
        try:
            if cluster.bootstrap_servers in ("", before):
                return
            status = cluster.status()
            if not status.bootstrap_servers:  # The old addresses are better than none: a broker may come back there.
                return
            if (driver := driver_of(self._path)) not in (None, os.getpid()):
                self._tell(f"it is another cluster's now (driver pid {driver})")
                return
            self._write(cluster, status)
        except ClusterStartError as error:
            self._tell(error.message)
        except SparkBrokerError as error:
            self._tell(f"the controller does not say which brokers are live: {error}")
        else:
            self._trouble = ""
            logger.info("the ready file %s names %s; it named %s", self._path, self._servers, before)

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            logger.warning("the ready file %s may name brokers that are gone: %s", self._path, trouble)

    def _write(self, cluster: BrokerCluster, status: ClusterStatus) -> None:
        with written_beside(self._path) as partial:
            partial.write_text(json.dumps(self._document(cluster, status), indent=2) + "\n", encoding="utf-8")
            partial.replace(self._path)
        self._servers = status.bootstrap_servers

    def _document(self, cluster: BrokerCluster, status: ClusterStatus) -> dict[str, object]:
        here = Owner.here("", os.getpid())
        brokers = [
            {
                "id": view.broker.id,
                "host": view.broker.host,
                "port": view.broker.port,
                "pid": view.broker.pid,
                "executor_id": view.broker.executor_id,
                "executor_pid": view.broker.executor_pid,
            }
            for view in status.live_brokers
        ]
        return {
            "bootstrap_servers": status.bootstrap_servers,
            "cluster_id": cluster.cluster_id,
            "log_dirs": cluster.log_dirs,
            "metadata_dir": cluster.metadata_dir,
            "temporary": self._temporary,
            "driver_pid": here.pid,
            "driver_start_time": here.start_time,
            "driver_host": here.host,
            "boot_id": here.boot_id,
            "pid_namespace": here.pid_namespace,
            "driver_log": log_file(),
            "brokers": brokers,
        }


def check_ready_file(path: Path) -> None:
    """Raise ClusterStartError now, and not after Spark has started, where the file cannot be written."""
    with written_beside(path) as partial:
        partial.touch()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """A file beside this one that does not outlive the block. Raises ClusterStartError for what the system refuses."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ClusterStartError(
            f"the ready file {path} cannot be written: {error.strerror}",
            hint="Make room there, or name another --ready-file; then start the cluster again.",
        ) from error


def driver_of(path: Path) -> int | None:
    """The pid of the driver that has written this file; None where no driver's file is there."""
    try:
        ready = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return ready.get("driver_pid") if isinstance(ready, dict) else None


def remove_ready_file(path: Path) -> None:
    """Remove the file if this process has written it: it may be that of a cluster that was started before."""
    if driver_of(path) == os.getpid():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # Whoever reads it finds that its driver does not run.
            print(f"warning: the ready file {path} cannot be removed: {error.strerror}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
