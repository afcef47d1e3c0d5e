"""A signal whose handler raises, as that of Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stop(BaseException):
    """As KeyboardInterrupt: no `except Exception` stops it."""


@contextmanager
def alarms_stop() -> Iterator[None]:
    """In the block, SIGALRM raises Stop."""

    def stop(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
