"""Clients that are garbage collected without `close`: their threads end, and what they have begun is finished.

The garbage collector calls back in any thread, whatever locks that holds: it may be in the midst of starting a thread.
So the callback only puts a note into a queue, which takes no lock of Python's. A thread that is there already reads it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from spark_broker.errors import NoThreadError
from spark_broker.interrupts import uninterrupted
from spark_broker.threads import BeginAgain, Fate, begin
from spark_broker.transport.origin import Origin, after_fork


class _End(NamedTuple):
    """How to end a client. `fate`: for what that may raise. `is_over`: whether it has ended already."""

    end: Callable[[], object]
    fate: Fate
    is_over: Callable[[], bool]
    origin: Origin


class _Collector:
    """Ends clients. One in each process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone: SimpleQueue[_End] = SimpleQueue()
        self._is_ready = False

    def make_ready(self) -> None:
        """Have the thread. Raises NoThreadError."""
        if self._is_ready:
            return
        with uninterrupted(self._lock):
            if not self._is_ready:
                begin("collected-clients", BeginAgain(), self._read)
                self._is_ready = True

    def collected(self, end: _End) -> None:
        """Called by the garbage collector."""
        self._gone.put(end)

    def _read(self) -> None:
        while True:
            end = self._gone.get()
            if end.origin.is_elsewhere or end.is_over():
                continue  # Its threads are the parent's, or there are none.
            try:  # It may wait for brokers, and the next one's are other ones.
                begin("collected-client", end.fate, end.end)
            except NoThreadError:
                end.end()


_collector = _Collector()


def make_ready() -> None:
    """Call this before a client has anything that must be ended. Raises NoThreadError."""
    _collector.make_ready()


def end_with(client: object, end: Callable[[], object], fate: Fate, is_over: Callable[[], bool]) -> None:
    """Have `end` called in another thread once nobody has the client any more, unless it `is_over`. What these refer to
    must not refer to the client. `fate`: for what `end` may raise. Nothing is called when the interpreter ends.
    """
    weakref.finalize(client, _collected, _End(end, fate, is_over, Origin())).atexit = False


def _collected(end: _End) -> None:
    _collector.collected(end)


def _begin_anew() -> None:
    """In a forked child: the thread is the parent's, and may have held the lock of the queue."""
    global _collector  # noqa: PLW0603
    _collector = _Collector()


after_fork(_begin_anew)
