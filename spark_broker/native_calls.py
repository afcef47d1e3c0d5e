"""Keeps threads out of Arrow's C++ while the interpreter ends.

A daemon thread that returns from Arrow after the end of the interpreter asks for the interpreter's lock. Python then
ends the thread, which unwinds Arrow's C++ frames. They do not allow that, and the process aborts (SIGABRT, "terminate
called without an active exception"). This happens in its calls, and where a stream, a reader or a writer is
freed: Arrow releases the lock in both cases.
"""

from __future__ import annotations

import atexit
import threading


class NativeCalls:
    """Counts the threads inside Arrow.

    All code that frees a stream, a reader or a writer runs in `with native_calls:`.

    Invariants, under the lock: `_inside >= 0`; once `_refused` is set, only `_last_thread` enters.
    """

    def __init__(self) -> None:
        # One thread may enter twice: garbage collection inside frees other objects.
        self._lock = threading.RLock()
        self._nobody_inside = threading.Condition(self._lock)
        self._inside = 0
        self._refused = False
        self._last_thread = 0  # the thread that ends the process still makes calls
        self._kept: list[object] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._refused and threading.get_ident() != self._last_thread:
                raise SystemExit  # it ends the thread, silently
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._refused and not self._inside:
                self._nobody_inside.notify_all()

    def refuse(self) -> None:
        """Let no other thread in from now on."""
        with self._lock:
            self._last_thread = threading.get_ident()
            self._refused = True

    def wait_until_nobody_is_inside(self, timeout_s: float) -> bool:
        """Returns whether no thread is inside. Only after `refuse` does that stay true."""
        with self._lock:
            return self._nobody_inside.wait_for(lambda: not self._inside, timeout_s)

    def keep(self, *objects: object) -> None:
        """Keep these objects until the very end, when the main thread frees them."""
        self._kept.extend(objects)


END_TIMEOUT_S = 2.0
"""How long the end of the process waits for calls, which cannot be cancelled."""

native_calls = NativeCalls()


@atexit.register
def _end() -> None:
    """The process ends: no thread gets into Arrow any more, and those inside may come out."""
    native_calls.refuse()
    native_calls.wait_until_nobody_is_inside(END_TIMEOUT_S)
