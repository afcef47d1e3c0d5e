"""Which indexes of sealed segments are in memory: those that were used last, of all logs that share a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict

from spark_broker.storage.index import Entries
from spark_broker.storage.segment import Segment

LOADED_BYTES_MAX = 128 << 20
"""Bytes of indexes that a broker keeps for its sealed segments. One segment has up to `segment.index.bytes`."""


class LoadedIndexes:
    """The indexes of sealed segments that are in memory, least recently used first. Safe from any thread.

    Invariant: no index is in memory that is not here, but while `entries` runs.
    """

    def __init__(self, bytes_max: int = LOADED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Segment, int] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What all of them take."""
        return self._bytes

    def entries(self, segment: Segment) -> Entries:
        """The segment's entries; those of a sealed one are loaded if need be. Raises as `Segment.entries`."""
        entries = segment.entries()
        if segment.sealed:
            self._used(segment, entries.nbytes)
        return entries

    def _used(self, segment: Segment, size: int) -> None:
        with self._lock:
            self._bytes += size - self._sizes.pop(segment, 0)
            self._sizes[segment] = size
            while self._bytes > self._bytes_max and len(self._sizes) > 1:
                oldest, freed = self._sizes.popitem(last=False)
                self._bytes -= freed
                oldest.unload()
