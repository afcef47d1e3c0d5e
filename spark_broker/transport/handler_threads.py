"""Threads for calls and streams that wait. A thread that has nothing to do waits a while for the next one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial

from spark_broker.threads import Fate, begin

IDLE_S = 10.0
"""How long a thread without work is kept."""

Work = Callable[[], object]


class HandlerThreads:
    """As many threads as there is work that has begun. `run` never waits."""

    def __init__(self, name: str, fate: Fate) -> None:
        self._name = name
        self._fate = fate
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Work]] = []  # of threads that wait for work; the last one is the warmest

    def run(self, work: Work) -> None:
        """Have a thread do this work. Raises NoThreadError."""
        with self._lock:
            waiting = self._idle.pop() if self._idle else None
        if waiting is not None:
            waiting.put(work)
        else:
            begin(self._name, self._fate, partial(self._serve, work))

    def _serve(self, work: Work | None) -> None:
        mine: queue.SimpleQueue[Work] = queue.SimpleQueue()
        while work is not None:
            work()
            work = None  # it holds what it worked on
            with self._lock:
                self._idle.append(mine)
            work = self._next(mine)

    def _next(self, mine: queue.SimpleQueue[Work]) -> Work | None:
        try:
            return mine.get(timeout=IDLE_S)
        except queue.Empty:
            with self._lock:
                if mine in self._idle:
                    self._idle.remove(mine)
                    return None
        return mine.get()  # it was chosen at the last moment
