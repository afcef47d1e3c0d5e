"""Which indexes of sealed segments are in memory: those that were used last, of all logs that share a bound."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque

from spark_broker.storage.index import Entries
from spark_broker.storage.segment import Segment

LOADED_BYTES_MAX = 128 << 20
"""Bytes of indexes that a broker keeps for its sealed segments. One segment has up to `segment.index.bytes`."""


class LoadedIndexes:
    """The indexes of sealed segments that are in memory, least recently used first. Safe from any thread.

    A segment that was compacted, deleted or cut goes, and its index with it: nothing here keeps it.

    Invariant: no index is in memory that is not here, but while `entries` runs.
    """

    def __init__(self, bytes_max: int = LOADED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._sizes: OrderedDict[weakref.ref[Segment], int] = OrderedDict()
        self._bytes = 0
        # A segment may be collected while this thread has the lock: its end is only noted.
        self._gone: deque[weakref.ref[Segment]] = deque()

    @property
    def bytes(self) -> int:
        """What all of them take."""
        with self._lock:
            self._forget_gone()
            return self._bytes

    def entries(self, segment: Segment) -> Entries:
        """The segment's entries; those of a sealed one are loaded if need be. Raises as `Segment.entries`."""
        entries = segment.entries()
        if segment.sealed:
            self._used(segment, entries.nbytes)
        return entries

    def _used(self, segment: Segment, size: int) -> None:
        with self._lock:
            self._forget_gone()
            known = weakref.ref(segment, self._gone.append)
            self._bytes += size - self._sizes.pop(known, 0)
            self._sizes[known] = size
            while self._bytes > self._bytes_max and len(self._sizes) > 1:
                oldest, freed = self._sizes.popitem(last=False)
                self._bytes -= freed
                if (unused := oldest()) is not None:
                    unused.unload()

    def _forget_gone(self) -> None:
        """Under the lock."""
        while self._gone:
            self._bytes -= self._sizes.pop(self._gone.popleft(), 0)
