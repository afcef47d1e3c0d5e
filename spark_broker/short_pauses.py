"""Keeps Python's garbage collector from stopping a server for long.

A full collection looks at every object while all threads wait: 0.8 s in a broker of 5,000 partitions. So what has
survived one is left out of those that follow, which then take milliseconds. Nothing may rely on the collector to be
freed: what a server lets go of (a connection, a replica) holds no reference to itself. If something does, a collection
of everything comes after hours.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Literal

OLDEST_GENERATION = 2

WHOLE_INTERVAL_S = 6 * 3600.0
"""A collection of everything comes no sooner after the last one,"""

WHOLE_GROWTH = 1.5
"""and only if so many times as many objects are kept as after that one."""


class ShortPauses:
    """A callback of the collector. `install` one in the process of a server."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._is_whole = True  # whether the full collection that ends next has looked at everything
        self._whole_s = 0.0  # when one last did
        self._kept = 0  # objects that were left after it

    def __call__(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase != "stop" or info["generation"] != OLDEST_GENERATION:
            return
        gc.freeze()
        now_s = self._clock_s()
        if self._is_whole:
            self._is_whole, self._whole_s, self._kept = False, now_s, gc.get_freeze_count()
        elif now_s - self._whole_s >= WHOLE_INTERVAL_S and gc.get_freeze_count() > WHOLE_GROWTH * self._kept:
            self._is_whole = True
            gc.unfreeze()

    def install(self) -> None:
        """Begin with what there is now."""
        gc.callbacks.append(self)
        gc.collect()
