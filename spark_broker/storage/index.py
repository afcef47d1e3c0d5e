"""The dense index of one segment in memory: one entry per batch, in order of offset, position and running timestamp.

Readers take `entries`, a view that is replaced and never changed: appends write beyond its end, and a cut makes a copy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spark_broker.errors import CorruptMessageError, DamagedLogError, invariant
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.frame import ENTRY_BYTES, ENTRY_DTYPE, HEADER_BYTES, BatchHeader, pack_entry, unpack_header

Entries = npt.NDArray[np.void]
INDEX_BYTES_MAX = (1 << 31) - 1
"""The largest `segment.index.bytes`."""

_FIRST_CAPACITY = 16
_COVERED_BYTES = HEADER_BYTES - 4  # The entry's CRC covers these bytes. The CRC is the last field of the header.


class EntryIndex:
    """A growing array of entries. One writer; any number of readers of `entries`."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self._array = entries
        self._bytes: memoryview | None = None  # of `_array`; None: it has no room yet

    @classmethod
    def empty(cls) -> EntryIndex:
        return cls(np.empty(0, ENTRY_DTYPE))

    @classmethod
    def from_bytes(cls, data: bytes) -> EntryIndex:
        """From the content of an index file, a whole number of entries."""
        invariant(len(data) % ENTRY_BYTES == 0, "an index is a whole number of entries")
        return cls(np.frombuffer(data, ENTRY_DTYPE))

    def __len__(self) -> int:
        return len(self.entries)

    def extend(self, packed: bytes) -> None:
        """Append packed entries and show them to readers."""
        count = len(self.entries)
        end = count + len(packed) // ENTRY_BYTES
        if self._bytes is None or end > len(self._array):
            grown = np.empty(max(2 * count, end, _FIRST_CAPACITY), ENTRY_DTYPE)
            grown[:count] = self.entries
            self._array, self._bytes = grown, grown.view(np.uint8).data
        self._bytes[count * ENTRY_BYTES : end * ENTRY_BYTES] = packed  # numpy takes ten times as long to copy one entry
        self.entries = self._array[:end]

    def prefix(self, count: int) -> EntryIndex:
        """A new index of the first `count` entries; readers of this one are not disturbed."""
        return EntryIndex(self.entries[:count].copy())


def header_at(entries: Entries, index: int) -> BatchHeader:
    """The header of one entry; negative indices count from the end."""
    return unpack_header(entries[index].tobytes(), verify=False)


def headers_of(entries: Entries) -> list[BatchHeader]:
    """The headers of these entries."""
    data = entries.tobytes()
    return [unpack_header(data, at, verify=False) for at in range(0, len(data), ENTRY_BYTES)]


def end_position(entries: Entries, index: int = -1) -> int:
    """The byte of the `.arrow` file after the batch."""
    return int(entries["position"][index]) + int(entries["length"][index])


def count_below(entries: Entries, offset: int) -> int:
    """How many batches lie wholly below the offset. A batch that contains the offset has this number as its index."""
    count = bisect_left(entries["base_offset"], offset)
    if count and int(entries["base_offset"][count - 1]) + int(entries["last_offset_delta"][count - 1]) >= offset:
        count -= 1
    return count


def count_within(entries: Entries, start: int, max_bytes: int) -> int:
    """The index after the last batch of the longest run that begins at `start` and has at most `max_bytes`."""
    limit = int(entries["position"][start]) + max_bytes
    count = bisect_right(entries["position"], limit)
    return count if count and end_position(entries, count - 1) <= limit else count - 1


def find_timestamp(entries: Entries, timestamp_us: int) -> int:
    """Index of the first batch whose running maximum reaches the timestamp; the number of batches if none does."""
    return bisect_left(entries["max_timestamp_us"], timestamp_us)


def pack_entries(headers: Sequence[BatchHeader], position: int) -> bytes:
    """The packed entries of consecutive batches. The first batch's message begins at `position`."""
    packed = []
    for header in headers:
        packed.append(pack_entry(header, position))
        position += header.length
    return b"".join(packed)


def check_chain(entries: Entries, base_offset: int, *, verify_from: int = 0) -> None:
    """Check that offsets and positions follow one another, and the CRCs of the entries from index `verify_from` on.

    It takes half a microsecond for each entry. Raises DamagedLogError.
    """
    next_offsets = entries["base_offset"] + entries["last_offset_delta"] + 1
    ends = entries["position"] + entries["length"]
    contiguous = (
        int(entries["base_offset"][0]) == base_offset
        and bool(np.all(entries["base_offset"][1:] == next_offsets[:-1]))
        and bool(np.all(entries["position"][1:] == ends[:-1]))
        and bool(np.all(entries["last_offset_delta"] >= 0))
        and bool(np.all(entries["length"] > 0))
        and bool(np.all(entries["row_count"] >= 0))
        and bool(np.all(entries["reserved"] == 0))
        and int(entries["position"][0]) > 0
    )
    if not contiguous:
        raise DamagedLogError(f"the index of segment {base_offset} is not contiguous")
    data = entries[verify_from:].tobytes()
    for at, crc in zip(range(0, len(data), ENTRY_BYTES), entries["entry_crc"][verify_from:].tolist(), strict=True):
        if crc32c(data[at : at + _COVERED_BYTES]) != crc:
            number = verify_from + at // ENTRY_BYTES
            raise DamagedLogError(f"the index of segment {base_offset}: entry {number} fails its CRC")


def unpack_entry_checked(data: bytes, at: int, base_offset: int) -> BatchHeader:
    """The header of an entry, its CRC checked. Raises DamagedLogError."""
    try:
        return unpack_header(data, at)
    except CorruptMessageError as error:
        raise DamagedLogError(f"the index of segment {base_offset}: {error.message}") from None
