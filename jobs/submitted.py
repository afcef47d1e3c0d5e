"""What the jobs share: arguments of the form NAME=VALUE, a session, the end of a stream, and errors in one line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from spark_broker.cli.main import INTERRUPTED
from spark_broker.driver.session import (
    configure_spark,
    forward_jvm_signals,
    ignore_jvm_interrupts,
    interruptible_start,
    quiet_spark,
    submitted_settings,
)
from spark_broker.errors import InvalidConfigError, SparkBrokerError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryListener, StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery

Configure: TypeAlias = "Callable[[SparkSession.Builder], SparkSession.Builder]"

FORMAT = "spark_broker"
MASTER = "local[2]"

RECORDS = "records"
"""The name under which Spark reports how many rows of a micro-batch were observed."""

POLL_S = 1
REPORTED_TIMEOUT_S = 30.0


def add_pairs(group: argparse._ArgumentGroup, name: str, what: str) -> None:
    """Add an argument NAME=VALUE that may be repeated."""
    group.add_argument(name, action="append", default=[], type=pair, metavar="NAME=VALUE", help=what)


def pair(text: str) -> tuple[str, str]:
    """Raises argparse's error unless there is a name before an equals sign."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def wrong_arguments(message: str) -> InvalidConfigError:
    """The error for arguments that do not go together."""
    return InvalidConfigError(message, hint="`--help` explains them.")


@contextmanager
def session(name: str, configure: Configure = lambda builder: builder) -> Iterator[SparkSession]:
    """A session with the master that spark-submit was given; it is stopped at the end. `configure` sets more on it."""
    from pyspark.sql import SparkSession

    with interruptible_start():
        quiet_spark()
        end_on_signals()
        builder = SparkSession.builder.appName(name).master(submitted_settings().get("spark.master", MASTER))
        spark = configure(configure_spark(builder)).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def end_on_signals() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does. spark-submit's JVM survives both, and hands SIGTERM on.

    If it ended, the job could neither stop a query nor say anything. Ctrl-C reaches this process anyway.
    """
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    ignore_jvm_interrupts()
    forward_jvm_signals(lambda: os.kill(os.getpid(), signal.SIGTERM), ("TERM",))


def exit_status(run: Callable[[], None]) -> int:
    """Run a job; returns its exit status. Its error, or its end by a signal, is printed as one line on stderr."""
    try:
        return told_in_a_line(run)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def told_in_a_line(run: Callable[[], None]) -> int:
    """Run a part of a job; returns its exit status. An error, ours or Spark's, is printed as one line on stderr."""
    from spark_broker.spark.spark_failures import of_spark, root_cause, said

    try:
        run()
    except SparkBrokerError as error:
        text = str(error).partition("\n\n")[0]
    except of_spark() as error:
        text = said(error) + root_cause(error)
    else:
        return 0
    print(f"error: {text}", file=sys.stderr)
    return 1


def observed(frame: DataFrame) -> DataFrame:
    """The frame of a stream whose rows `records_until_end` counts: what is written, after filters and generators."""
    from pyspark.sql.functions import count, lit

    return frame.observe(RECORDS, count(lit(1)).alias(RECORDS))


def records_until_end(spark: SparkSession, start: Callable[[], StreamingQuery]) -> int:
    """Start a query and wait until it has ended; returns the number of its `observed` rows. SIGINT and SIGTERM stop it.

    Raises StreamingQueryException when it has failed. Only `awaitTermination` tells: a query that is not active any
    more may have ended well.
    """
    from pyspark.errors import StreamingQueryException

    count = RecordCount()
    spark.streams.addListener(listener_of(count))
    query = start()
    stop = noted_signals()
    try:
        while not query.awaitTermination(POLL_S):
            if stop.is_set():
                query.stop()
                break
    except StreamingQueryException:
        if not stop.is_set():  # Else the signal has also ended Spark's own processes: systemd sends it to them all.
            raise
    return count.at_end()


def noted_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set from now on.

    An exception would end any call to the JVM, and a second one `stop` itself: spark-submit hands on what this process
    may also get.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


class RecordCount:
    """Counts the observed rows of the first query that starts. The query itself keeps only its last hundred reports."""

    def __init__(self) -> None:
        self._run_id = ""
        self._records = 0
        self._ended = threading.Event()

    def start(self, run_id: str) -> None:
        """A query starts."""
        self._run_id = self._run_id or run_id

    def add(self, progress: StreamingQueryProgress) -> None:
        """Add a micro-batch."""
        rows = progress.observedMetrics.get(RECORDS)
        if rows is not None and str(progress.runId) == self._run_id:
            self._records += int(rows[RECORDS])

    def end(self, run_id: str) -> None:
        """A query has made its last report."""
        if run_id == self._run_id:
            self._ended.set()

    def at_end(self) -> int:
        """The number, once all reports are here. Some come after the query has ended."""
        if not self._ended.wait(REPORTED_TIMEOUT_S):
            print(f"warning: Spark has not reported all batches after {REPORTED_TIMEOUT_S:g} s", file=sys.stderr)
        return self._records


def listener_of(count: RecordCount) -> StreamingQueryListener:
    """What Spark calls, on a thread of its own. PySpark is imported here: at the top, Ctrl-C would be a traceback."""
    from pyspark.sql.streaming import listener

    class Listener(listener.StreamingQueryListener):
        """Hands the reports on."""

        def onQueryStarted(self, event: listener.QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
            """Before `start` returns."""
            count.start(str(event.runId))

        def onQueryProgress(self, event: listener.QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
            """After each micro-batch."""
            count.add(event.progress)

        def onQueryTerminated(self, event: listener.QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
            """After the last one."""
            count.end(str(event.runId))

    return Listener()
