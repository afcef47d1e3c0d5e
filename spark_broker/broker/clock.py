"""The two clocks of a broker."""

from __future__ import annotations

import time


def boottime_ms() -> int:
    """Milliseconds since the machine started; it goes on while the machine sleeps, so a lease cannot outlive that."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def wall_ms() -> int:
    """UTC milliseconds: what goes into records."""
    return time.time_ns() // 1_000_000
