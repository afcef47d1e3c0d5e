"""Something that goes on beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def meanwhile(work: Callable[[threading.Event], object], timeout_s: float = 60.0) -> Iterator[None]:
    """Run `work` in a thread until the block ends. Then its event is set, and it has `timeout_s` to return.

    Raises what `work` raises, and TimeoutError when it does not return.
    """
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, ended)
        try:
            yield
        finally:
            ended.set()
        working.result(timeout_s)
