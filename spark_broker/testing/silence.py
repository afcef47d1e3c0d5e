"""Brokers that are broken on purpose, thousands of times, need not tell of it each time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_brokers() -> Iterator[None]:
    """Within, `spark_broker` logs nothing below CRITICAL; afterwards it logs as before."""
    logger = logging.getLogger("spark_broker")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
