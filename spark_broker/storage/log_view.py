"""A log as one read finds it: its segments and its bounds at a moment.

Segments and the entries of an index are replaced, never changed. So a view stays what it was while the log grows; a cut
or a deletion can make a read of it fail.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spark_broker.errors import OffsetOutOfRangeError
from spark_broker.protocol.arrow_message import inflated_bytes
from spark_broker.protocol.frame import BatchHeader, Frame
from spark_broker.storage.extent import extent
from spark_broker.storage.index import (
    Entries,
    count_below,
    count_within,
    end_position,
    find_timestamp,
    header_at,
    headers_of,
)
from spark_broker.storage.loaded_indexes import LoadedIndexes
from spark_broker.storage.segment import Segment
from spark_broker.storage.stored_run import StoredRun


class Chunk(NamedTuple):
    """Consecutive batches of one segment. `data`: their messages, one after the other."""

    frames: list[Frame]
    data: bytes

    @property
    def schema_id(self) -> int:
        return self.frames[0].header.schema_id

    @property
    def row_counts(self) -> npt.NDArray[np.int64]:
        """Rows of each batch."""
        return np.array([frame.header.row_count for frame in self.frames], np.int64)

    @property
    def row_count(self) -> int:
        return sum(frame.header.row_count for frame in self.frames)

    @property
    def next_offset(self) -> int:
        """The offset after the last batch."""
        return self.frames[-1].header.next_offset

    def parts(self, bytes_max: int, rows_max: int) -> Iterator[Chunk]:
        """The chunk in parts with at most so many rows, and so many bytes once they are inflated.

        A batch that has more is alone. Raises CorruptMessageError.
        """
        part, size, rows, begins, position = list[Frame](), 0, 0, 0, 0
        for frame in self.frames:
            more_bytes, more_rows = inflated_bytes(frame), frame.header.row_count
            if part and (size + more_bytes > bytes_max or rows + more_rows > rows_max):
                yield Chunk(part, self.data[begins:position])
                part, size, rows, begins = [], 0, 0, position
            part.append(frame)
            size, rows, position = size + more_bytes, rows + more_rows, position + frame.header.length
        yield Chunk(part, self.data[begins:position])


class LogView(NamedTuple):
    """Reads raise FileNotFoundError or DamagedLogError if the log was cut meanwhile."""

    segments: tuple[Segment, ...]
    log_start_offset: int
    log_end_offset: int
    indexes: LoadedIndexes

    def read(self, offset: int, max_bytes: int, end_offset: int) -> list[Frame]:
        """See `PartitionLog.read`."""
        frames: list[Frame] = []
        for segment, entries, start, stop in self._runs(offset, max_bytes, end_offset):
            frames += segment.read(entries, start, stop)
        return frames

    def by_schema(self) -> dict[int, Segment]:
        """A segment for each schema id that batches have. Those of one segment have one schema."""
        return {segment.first.schema_id: segment for segment in self.segments}

    def locate(self, offset: int, max_bytes: int, end_offset: int) -> list[StoredRun]:
        """See `PartitionLog.locate`."""
        runs = self._runs(offset, max_bytes, end_offset)
        return [segment.locate(entries, start, stop) for segment, entries, start, stop in runs]

    def _runs(self, offset: int, max_bytes: int, end_offset: int) -> Iterator[tuple[Segment, Entries, int, int]]:
        """Each segment to read, its entries, and the indexes of the first entry and the last (exclusive) to read."""
        log_start, log_end = self.log_start_offset, self.log_end_offset
        if not log_start <= offset <= log_end:
            raise OffsetOutOfRangeError(f"offset {offset}; the log has {log_start} to {log_end}")
        limit = min(end_offset, log_end)
        segments = self.segments
        first = True
        for segment in segments[max(0, segment_of(segments, offset)) :]:
            if offset >= limit or (not first and max_bytes <= 0):
                break
            entries = self.indexes.entries(segment)
            start = count_below(entries, offset)
            if start == len(entries):
                break  # It was cut off since the log end was read.
            fitting = max(count_within(entries, start, max_bytes), start + 1 if first else start)
            stop = min(fitting, count_below(entries, limit))
            if stop <= start:
                break
            yield segment, entries, start, stop
            first = False
            max_bytes -= end_position(entries, stop - 1) - int(entries["position"][start])
            offset = header_at(entries, stop - 1).next_offset
            if stop < len(entries):
                break

    def headers(self, from_offset: int) -> list[BatchHeader]:
        """The headers from the batch that contains `from_offset` on. Only indexes are read."""
        headers: list[BatchHeader] = []
        for segment in self.segments[max(0, segment_of(self.segments, from_offset)) :]:
            entries = self.indexes.entries(segment)
            headers += headers_of(entries[count_below(entries, from_offset) :])
        return headers

    def header_of(self, offset: int) -> BatchHeader | None:
        """The header of the batch that contains the offset; None when no batch does."""
        at = segment_of(self.segments, offset)
        if at < 0 or offset >= self.segments[at].next_offset:
            return None
        entries = self.indexes.entries(self.segments[at])
        return header_at(entries, count_below(entries, offset))

    def chunks(self, segment: Segment, max_bytes: int, from_offset: int = 0) -> Iterator[Chunk]:
        """The batches of one segment from the one that contains `from_offset` on, about `max_bytes` at a time."""
        entries = self.indexes.entries(segment)
        start = count_below(entries, from_offset)
        while start < len(entries):
            stop = max(count_within(entries, start, max_bytes), start + 1)
            yield Chunk(*segment.read_run(entries, start, stop))
            start = stop

    def extent(self, start: int, end: int, max_bytes: int) -> tuple[int, int]:
        """See `extent`."""
        return extent(self.segments, self.indexes.entries, start, end, max_bytes)

    def offset_for_timestamp(self, timestamp_us: int) -> tuple[int, BatchHeader] | None:
        """See `PartitionLog.offset_for_timestamp`."""
        segments = self.segments
        first = max(segment_of(segments, self.log_start_offset), 0)  # The maximum may be higher below the log start.
        position = bisect_left(segments, timestamp_us, lo=first, key=lambda segment: segment.max_timestamp_us)
        if position >= len(segments):
            return None
        entries = self.indexes.entries(segments[position])
        entry = max(find_timestamp(entries, timestamp_us), count_below(entries, self.log_start_offset))
        if entry >= len(entries):
            return None
        header = header_at(entries, entry)
        return header.base_offset, header


def segment_of(segments: Sequence[Segment], offset: int) -> int:
    """Index of the segment that contains the offset, if one does; -1 when the offset lies before all segments."""
    return bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1
