"""A process that can start no thread for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_threads(
    patch: pytest.MonkeyPatch, of: Callable[[threading.Thread], bool] = lambda _: True
) -> Iterator[list[str]]:
    """Until this block ends, no thread for which `of` is true can be started. Yields the names of those refused."""
    start, refused = threading.Thread.start, list[str]()

    def start_if_allowed(thread: threading.Thread) -> None:
        if of(thread):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with patch.context() as within:
        within.setattr(threading.Thread, "start", start_if_allowed)
        yield refused
