"""No thread is inside Arrow's C++ when the interpreter ends.

A daemon thread that comes back from Arrow after that wants the interpreter's lock. Python ends such a thread where it
stands; the end unwinds Arrow's C++ frames, which do not allow it, and the process aborts (SIGABRT, "terminate called
without an active exception"). It happens in calls of Flight, and where a stream, a reader or a writer is freed: Arrow
lets go of the lock meanwhile.
"""

from __future__ import annotations

import threading


class NativeCalls:
    """Counts the threads inside: `with native_calls:` around such a call, and around what frees such an object.

    Invariants, under the lock: `_inside >= 0`; once `_refused`, no other thread than the last one comes in.
    """

    def __init__(self) -> None:
        # One thread may come twice: a collection of garbage inside frees other objects.
        self._lock = threading.RLock()
        self._nobody_inside = threading.Condition(self._lock)
        self._inside = 0
        self._refused = False
        self._last_thread = 0  # who ends the process goes on making calls
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
        """Returns whether nobody is. Only after `refuse` does it stay so."""
        with self._lock:
            return self._nobody_inside.wait_for(lambda: not self._inside, timeout_s)

    def keep(self, *objects: object) -> None:
        """These are freed by the main thread, at the very end."""
        self._kept.extend(objects)


native_calls = NativeCalls()
