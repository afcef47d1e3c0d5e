"""The thread that computes the targets of large groups, so that no request waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_broker.threads import Worker


class TargetThread(Worker):
    """Does one piece of work after the other, until `stop`. What is asked for again by a name replaces what waits, so
    there is at most one for each group.
    """

    def __init__(self, on_bug: Callable[[BaseException], None]) -> None:
        super().__init__("group-targets", on_bug)
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._waiting: dict[str, Callable[[], None]] = {}
        self._stopped = False

    def compute(self, name: str, work: Callable[[], None]) -> None:
        """Do the work soon. Called from any thread."""
        with self._changed:
            self._waiting[name] = work
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                work = self._waiting.pop(next(iter(self._waiting)))
            work()
