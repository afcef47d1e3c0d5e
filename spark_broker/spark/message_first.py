"""Spark shows an error of Python as the text of its traceback, and often cuts it. So the message must come first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from spark_broker.errors import InvariantError, SparkBrokerError, UnknownServerError

HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"
"""pyspark's own switch. pyspark reads it when it reports the last exception of a worker. The worker ends then."""


@contextmanager
def message_first() -> Iterator[None]:
    """A typed error that leaves the block ends this worker of Spark. Its message is shown without frames.

    The frames would not help the user: the error says what to do next. An error that is a bug keeps its frames.
    """
    try:
        yield
    except (InvariantError, UnknownServerError):
        raise
    except SparkBrokerError:
        os.environ[HIDE_TRACEBACK] = "1"
        raise
