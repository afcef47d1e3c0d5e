"""Spark shows an error of Python as the text of its traceback, often cut off: the message has to stand at its top."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from spark_broker.errors import InvariantError, SparkBrokerError, UnknownServerError

HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"
"""pyspark's own switch. It is read when a worker's last exception is reported; the worker ends then."""


@contextmanager
def message_first() -> Iterator[None]:
    """A typed error that leaves the block ends this worker of Spark, and is shown as its message, without frames.

    The frames would say nothing to the user: the error says what to do next. An error that is a bug keeps its frames.
    """
    try:
        yield
    except (InvariantError, UnknownServerError):
        raise
    except SparkBrokerError:
        os.environ[HIDE_TRACEBACK] = "1"
        raise
