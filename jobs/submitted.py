"""What the jobs share: arguments of the form NAME=VALUE, a session, and errors in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from spark_broker.driver.session import configure_spark, quiet_spark, submitted_settings
from spark_broker.errors import InvalidConfigError, SparkBrokerError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Configure: TypeAlias = "Callable[[SparkSession.Builder], SparkSession.Builder]"

FORMAT = "spark_broker"
MASTER = "local[2]"


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

    quiet_spark()
    builder = SparkSession.builder.appName(name).master(submitted_settings().get("spark.master", MASTER))
    spark = configure(configure_spark(builder)).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def told_in_a_line(run: Callable[[], None]) -> int:
    """Run a job; returns its exit status. An error, ours or Spark's, is printed as one line on stderr."""
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


def records_until_end(query: StreamingQuery) -> int:
    """Wait until the query has ended; returns the number of its records. Ctrl-C stops it.

    Raises StreamingQueryException when it has failed. Only `awaitTermination` tells: a query that is not active any
    more may have ended well.
    """
    read, seen = 0, -1
    try:
        while not query.awaitTermination(1):
            read, seen = _count_new(query, read, seen)
    except KeyboardInterrupt:
        query.stop()
    return _count_new(query, read, seen)[0]


def _count_new(query: StreamingQuery, read: int, seen: int) -> tuple[int, int]:
    """The records so far, and the last batch counted. Spark keeps the progress of the last hundred batches."""
    for progress in query.recentProgress:
        if progress.batchId > seen and progress.numInputRows:
            read, seen = read + progress.numInputRows, progress.batchId
    return read, seen
