"""One pass of compaction over the sealed segments of a log.

A pass notes the newest offset of each key in what is new. Then it takes the segments from the beginning, and writes one
in the place of several without the records that are superseded. It changes nothing itself: it writes files beside the
log's own, and each `Swap` says which segments they are to replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from spark_broker.core.batch import batch_info
from spark_broker.core.compaction import Cleaned, CompactionRules, Fate
from spark_broker.errors import StorageFullError
from spark_broker.protocol.arrays import from_mask, to_numpy
from spark_broker.protocol.arrow_message import MAX_ROWS
from spark_broker.protocol.frame import CONTROL, ENTRY_BYTES, TRANSACTIONAL, BatchHeader, Frame
from spark_broker.storage.filesystem import FileSystem
from spark_broker.storage.keyed_rows import KeyedRows, Mask, offsets_of
from spark_broker.storage.log_view import Chunk, LogView
from spark_broker.storage.offset_map import OffsetMap
from spark_broker.storage.rewriting import EMPTY_BYTES, Outcome, Rewriting
from spark_broker.storage.segment import Segment
from spark_broker.storage.segment_swap import CompactedSegment, write_compacted

CHUNK_BYTES = 16_777_216
"""About so many bytes of batches are in memory at a time, stored and inflated."""

CHUNK_ROWS = MAX_ROWS
"""Of about so many rows it is in memory at a time which keys and offsets they have."""

ROWS_MAX = 20_000_000
"""Of at most about so many rows it is in memory which of them are left."""


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What a pass works on. `segments`: from the log start to the end of what may be compacted, sealed.

    `room_bytes`: what it leaves free on the disk.
    """

    segments: tuple[Segment, ...]
    cleaned: Cleaned
    rules: CompactionRules
    segment_bytes_max: int
    index_bytes_max: int
    dedupe_bytes_max: int
    room_bytes: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class Swap:
    """`compacted` is to replace `segments`, and the log is to remember `cleaned` from then on."""

    segments: tuple[Segment, ...]
    compacted: CompactedSegment
    cleaned: Cleaned


@dataclass(slots=True)
class PassResult:
    """What a pass has done. Bytes are those of the segments that were replaced, and of those in their place."""

    clean_to: int = 0
    segments_before: int = 0
    segments_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    records_removed: int = 0


@dataclass(slots=True)
class _Examined:
    """A segment, and what becomes of its batches, in order. `size_bytes`: about what will be left of it.

    `changed`: whether any batch becomes another one. `purges`: whether a tombstone or a marker goes. `begins`, `ends`:
    the fate and the leader epoch of the first batch and the last.
    """

    segment: Segment
    outcomes: list[Outcome] = field(default_factory=list)
    changed: bool = False
    purges: bool = False
    rows: int = 0
    records_removed: int = 0
    size_bytes: int = 0
    entries: int = 0
    begins: tuple[Fate, int] | None = None
    ends: tuple[Fate, int] | None = None

    def add(self, header: BatchHeader, outcome: Outcome) -> None:
        """The next batch."""
        joins = outcome.fate is Fate.GAP and self.ends == (Fate.GAP, header.leader_epoch)
        self.ends = outcome.fate, header.leader_epoch
        self.begins = self.begins or self.ends
        self.changed |= joins or outcome.changes(header)
        self.purges |= bool(header.attributes & CONTROL) and outcome.fate is Fate.GAP
        self.outcomes.append(outcome)
        self.rows += header.row_count
        if not joins:
            self.size_bytes += outcome.size_bytes(header)
            self.entries += 1


class Cleaner:
    """Runs one pass. For one thread; the log may change meanwhile.

    Reads raise FileNotFoundError or DamagedLogError when a segment is gone, or damaged: ask the log which.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: Path,
        view: LogView,
        plan: PassPlan,
        rows: KeyedRows,
        pace: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`pace` is called with the bytes that were read or written. It may wait, or raise to end the pass."""
        self._fs = fs
        self._directory = directory
        self._view = view
        self._plan = plan
        self._rows = rows
        self._pace = pace
        self._newest = OffsetMap(plan.dedupe_bytes_max)
        self._cleaned = plan.cleaned
        self.result = PassResult()

    def swaps(self) -> Iterator[Swap]:
        """Carry each one out before you ask for the next.

        Raises OSError, StorageFullError, CorruptMessageError, UnknownSchemaError, and what `pace` raises.
        """
        self.result.clean_to = clean_to = self._note_what_is_new()
        group: list[_Examined] = []
        for segment in self._plan.segments:
            if segment.base_offset >= clean_to:
                break
            examined = self._examine(segment)
            if group and not self._join(group, examined):
                yield from self._replace(group)
                group = []
            group.append(examined)
        yield from self._replace(group)

    def cleaned(self) -> Cleaned:
        """What the log is to remember once all swaps are carried out."""
        plan = self._plan
        return self._cleaned.after(self.result.clean_to, plan.rules.purge_to, plan.now_ms)

    def _chunks(self, segment: Segment, from_offset: int = 0) -> Iterator[Chunk]:
        for chunk in self._view.chunks(segment, CHUNK_BYTES, from_offset):
            self._pace(len(chunk.data))
            yield from chunk.parts(CHUNK_BYTES, CHUNK_ROWS)

    def _note_what_is_new(self) -> int:
        """Fill the map of keys. Returns up to which offset (exclusive) it has all of them."""
        clean_to = reached = self._plan.cleaned.clean_to
        for segment in self._plan.segments:
            if segment.next_offset <= clean_to:
                continue
            for chunk in self._chunks(segment, clean_to):
                keys, offsets, readable = self._rows.keys(chunk), offsets_of(chunk), self._readable(chunk)
                if not readable.all():
                    keys, offsets = keys.filter(from_mask(readable)), offsets[readable]
                self._newest.add(keys, offsets)
                reached = chunk.next_offset
                if self._newest.is_full:
                    return reached
        return reached

    def _readable(self, chunk: Chunk) -> Mask:
        """Which rows are not of aborted batches."""
        rules = self._plan.rules
        batches = [
            not header.attributes & TRANSACTIONAL or not rules.is_aborted(batch_info(header))
            for header, _ in chunk.frames
        ]
        return np.repeat(np.array(batches, np.bool_), chunk.row_counts)

    def _join(self, group: Sequence[_Examined], examined: _Examined) -> bool:
        """Whether the segment is to become one with those before it.

        One that is large and stays as it is is not written again for the sake of a small one.
        """
        plan, members = self._plan, (*group, examined)
        if any(not member.changed and member.size_bytes * 2 > plan.segment_bytes_max for member in members):
            return False
        gaps = sum(a.ends == b.begins and a.ends[0] is Fate.GAP for a, b in pairwise(members) if a.ends)
        size = sum(member.size_bytes for member in members) - gaps * EMPTY_BYTES
        return (
            size <= plan.segment_bytes_max
            and sum(member.entries for member in members) * ENTRY_BYTES <= plan.index_bytes_max
            and sum(member.rows for member in members) <= ROWS_MAX
            and examined.segment.first.schema_id == group[0].segment.first.schema_id
        )

    def _examine(self, segment: Segment) -> _Examined:
        """What becomes of the batches. Only keys are read, and values below the offset where tombstones go."""
        examined = _Examined(segment)
        for chunk in self._chunks(segment):
            left = self._rows_left(chunk, examined)
            counts = np.concatenate([[0], np.cumsum(left)])
            ends = np.cumsum(chunk.row_counts)
            for (header, _), end in zip(chunk.frames, ends.tolist(), strict=True):
                start = end - header.row_count
                count = int(counts[end] - counts[start])
                fate = self._plan.rules.fate(batch_info(header), count)
                rows = left[start:end] if 0 < count < header.row_count else None
                examined.add(header, Outcome(fate, rows))
        return examined

    def _rows_left(self, chunk: Chunk, examined: _Examined) -> Mask:
        """Which rows of the chunk are left."""
        keys, offsets = self._rows.keys(chunk), offsets_of(chunk)
        left = ~self._newest.superseded(keys, offsets) & self._readable(chunk)
        purge_to = self._plan.rules.purge_to
        if chunk.frames[0].header.base_offset < purge_to:
            purged = left & (offsets < purge_to) & to_numpy(keys.is_valid()) & self._rows.tombstones(chunk)
            examined.purges |= bool(purged.any())
            left &= ~purged
        examined.records_removed += len(left) - int(np.count_nonzero(left))
        return left

    def _replace(self, group: Sequence[_Examined]) -> Iterator[Swap]:
        """Write one segment for the group. More, where the rows that are left are larger than they seemed to be."""
        while len(group) > 1 or (group and group[0].changed):
            compacted, taken = self._write(group)
            replaced, group = group[:taken], group[taken:]
            if any(examined.purges for examined in replaced):
                self._cleaned = self._cleaned.purging(self._plan.rules.purge_to)
            self._count(replaced, compacted)
            yield Swap(tuple(examined.segment for examined in replaced), compacted, self._cleaned)

    def _write(self, group: Sequence[_Examined]) -> tuple[CompactedSegment, int]:
        """Returns the segment, and in place of how many of the group it is."""
        first = group[0].segment
        self._check_room(sum(examined.size_bytes for examined in group))
        rewriting = Rewriting(self._rows, self._chunks, self._plan.segment_bytes_max)
        parts = self._paced(rewriting.parts([(examined.segment, examined.outcomes) for examined in group]))
        message = self._rows.schema_message(first.first.schema_id)
        compacted = write_compacted(self._fs, self._directory, first.base_offset, message, parts)
        return compacted, rewriting.taken

    def _check_room(self, size_bytes: int) -> None:
        """What is written lies beside what it replaces, until it has taken its place."""
        free_bytes = self._fs.free_bytes(self._directory)
        if free_bytes - size_bytes < self._plan.room_bytes:
            what = f"compaction needs {size_bytes} bytes beside {self._plan.room_bytes}; {free_bytes} are free"
            raise StorageFullError(f"{self._directory.name}: {what}")

    def _paced(self, parts: Iterator[list[Frame]]) -> Iterator[list[Frame]]:
        for frames in parts:
            self._pace(sum(frame.header.length for frame in frames))
            yield frames

    def _count(self, replaced: Sequence[_Examined], compacted: CompactedSegment) -> None:
        result = self.result
        result.segments_before += len(replaced)
        result.segments_after += 1
        result.bytes_before += sum(examined.segment.size_bytes for examined in replaced)
        result.bytes_after += compacted.size_bytes
        result.records_removed += sum(examined.records_removed for examined in replaced)
