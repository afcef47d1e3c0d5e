"""A signal whose handler raises, as that of Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class Stop(BaseException):
    """As KeyboardInterrupt: no `except Exception` stops it."""


@dataclass(slots=True)
class Alarms:
    """`rang`: whether the alarm that was set last has come.

    Where it comes in the callback of a weak reference, or of the garbage collector (Hypothesis has one), Python itself
    throws Stop away: what goes on until it is stopped goes on while it has not rung.
    """

    rang: bool = False

    def stop_in(self, seconds: float) -> None:
        """Raise Stop in the main thread after so long."""
        self.rang = False
        signal.setitimer(signal.ITIMER_REAL, seconds)


@contextmanager
def alarms_stop() -> Iterator[Alarms]:
    """In the block, SIGALRM raises Stop."""
    alarms = Alarms()

    def stop(number: int, frame: object) -> None:
        alarms.rang = True
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        yield alarms
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
