"""The two clocks of a broker. They are passed as a parameter, so that simulated brokers can use simulated time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Milliseconds, as integers."""

    def boottime_ms(self) -> int:
        """Since the machine started. It goes on while the machine sleeps, so a lease expires even then."""

    def wall_ms(self) -> int:
        """UTC, since 1970: what goes into records."""


class SystemClock:
    """The machine's own clocks."""

    def boottime_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


SYSTEM_CLOCK = SystemClock()
