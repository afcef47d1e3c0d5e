"""File descriptors of this process: the log's files come first, and connections get what is left.

Clients decide how many connections there are. Where they take every descriptor, a broker could open no file any more.
So the soft limit is raised as far as it may be, but for a few descriptors that only files get.
"""

from __future__ import annotations

import errno
import logging
import resource
import threading
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

SPARED = 64
"""So many descriptors are kept for files."""

_MOST = 1 << 20  # Where there is no hard limit. No broker needs more, and some kernels refuse more.

logger = logging.getLogger(__name__)


class Descriptors:
    """The limit of this process, of which there is one: `DESCRIPTORS`. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spared = 0  # Guarded by _lock.

    def raise_limit(self) -> int:
        """Raise the soft limit of open files, once; returns what connections may use of it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST if hard == resource.RLIM_INFINITY else hard
        with self._lock:
            self._spared = min(SPARED, most // 4)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most - self._spared, hard))
        logger.info(
            "open files: at most %d (was %d), and %d more for the log's files", most - self._spared, soft, self._spared
        )
        return most - self._spared

    def spared(self, open_file: Callable[[], T]) -> T:
        """Call what opens a file. Where no descriptor is left, it gets one of those that are kept for files."""
        try:
            return open_file()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            with self._lock:
                if self._spared == 0:
                    raise
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft + self._spared, hard))
                try:
                    return open_file()
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


DESCRIPTORS: Final = Descriptors()
