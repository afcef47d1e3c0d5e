"""Requests and calls that took long, as lines of the log: at most one of a kind in `INTERVAL_S`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

SLOW_S = 1.0
"""Longer than a request takes, unless it waits on purpose or its broker has no time for it."""

INTERVAL_S = 1.0
"""An overloaded broker has thousands of slow requests a second: a line says how many others it stands for."""


class SlowLog:
    """Thread-safe. For a quick request, `took` costs one comparison."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._next_s: dict[str, float] = {}  # by kind; there are as many as types of requests
        self._left_out: dict[str, int] = {}

    def took(self, kind: str, seconds: float, **fields: object) -> None:
        """`kind`: what took this long, such as "append". `fields`: for example its partition, epoch and offset."""
        if seconds < SLOW_S:
            return
        now_s = self._clock_s()
        with self._lock:
            if now_s < self._next_s.get(kind, now_s):
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
                return
            self._next_s[kind] = now_s + INTERVAL_S
            others = self._left_out.pop(kind, 0)
        named = "".join(f", {name.replace('_', ' ')} %({name})s" for name in fields)
        values = {**fields, "kind": kind, "took_ms": round(seconds * 1000), "others": others}
        more = "; so did %(others)d others since the last such line" if others else ""
        line = f"slow: %(kind)s took %(took_ms)d ms{named}{more}"
        logger.warning(line, values)

    @contextmanager
    def watch(self, kind: str, **fields: object) -> Iterator[None]:
        """Time a block that may take long, also when it ends in an error."""
        began_s = self._clock_s()
        try:
            yield
        finally:
            self.took(kind, self._clock_s() - began_s, **fields)


SLOW = SlowLog()
"""The slow log of this process."""
