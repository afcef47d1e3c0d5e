"""Waiting on a condition with a deadline, for states of other processes that no condition variable reaches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def eventually(predicate: Callable[[], object], timeout_s: float = 30.0, what: str = "") -> None:
    """Return once `predicate()` is true; raise TimeoutError when it is not within `timeout_s`.

    The deadline bounds a hang; it measures nothing.
    """
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s} s in vain{': ' if what else ''}{what}")
        pause.wait(0.01)
