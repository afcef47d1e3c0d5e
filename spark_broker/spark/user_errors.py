"""What a user of a DataFrame sees of an error: its message and what to do next, and no traceback of ours.

Spark puts the Python traceback of a failed source in front of the message, a page of frames. It leaves it out where the
worker's environment says so at the moment of the error. A worker ends after an error, so nothing else is hidden.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from spark_broker.errors import SparkBrokerError, UnknownServerError

HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"

OURS = (UnknownServerError,)
"""Bugs of spark-broker: whoever reports one needs the traceback. An InvariantError is no SparkBrokerError."""


@contextmanager
def message_alone() -> Iterator[None]:
    """Raise typed errors on, in a worker of Spark without their traceback."""
    try:
        yield
    except SparkBrokerError as error:
        if _is_worker() and not isinstance(error, OURS):
            os.environ[HIDE_TRACEBACK] = "1"
        raise


def _is_worker() -> bool:
    """Whether this process is a Python worker of Spark's: it runs `python -m pyspark.daemon` or a worker's module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")
