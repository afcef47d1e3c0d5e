"""What a user of a DataFrame sees of an error: its message and what to do next, without our traceback.

Spark puts the Python traceback of a failed source, a page of frames, in front of the message. It leaves the traceback
out if the worker's environment says so when the error is reported. A worker ends after an error, so nothing else is
hidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from spark_broker.errors import SparkBrokerError, UnknownServerError
from spark_broker.quiet_end import is_worker

HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"

OURS = (UnknownServerError,)
"""Bugs of spark-broker. A report of one needs the traceback. An InvariantError is no SparkBrokerError."""


@contextmanager
def message_alone() -> Iterator[None]:
    """Raise typed errors again. In a worker of Spark they come without their traceback."""
    try:
        yield
    except SparkBrokerError as error:
        if is_worker() and not isinstance(error, OURS):
            os.environ[HIDE_TRACEBACK] = "1"
        raise
