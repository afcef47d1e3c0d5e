"""Silences the logs of brokers that a test breaks on purpose, thousands of times."""

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
