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
import pyarrow as pa

from spark_broker.core.batch import batch_info
from spark_broker.core.compaction import Cleaned, CompactionRules, Fate
from spark_broker.errors import StorageFullError
from spark_broker.protocol.arrays import to_numpy
from spark_broker.protocol.arrow_message import row_deltas
from spark_broker.protocol.frame import CONTROL, ENTRY_BYTES, BatchHeader, Frame
from spark_broker.storage.filesystem import FileSystem
from spark_broker.storage.keyed_rows import KeyedRows, Mask
from spark_broker.storage.log_view import LogView
from spark_broker.storage.offset_map import OffsetMap, Offsets
from spark_broker.storage.rewriting import EMPTY_BYTES, Outcome, Rewriting
from spark_broker.storage.segment import Segment
from spark_broker.storage.segment_swap import CompactedSegment, write_compacted

CHUNK_BYTES = 33_554_432
"""About so many bytes of batches are in memory at a time."""

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
        schema_messages: Sequence[bytes],
        pace: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`schema_messages[i]` is that of schema id i. `pace` is called with the bytes that were read or written.

        It may wait, or raise to end the pass.
        """
        self._fs = fs
        self._directory = directory
        self._view = view
        self._plan = plan
        self._rows = rows
        self._schema_messages = schema_messages
        self._pace = pace
        self._newest = OffsetMap(plan.dedupe_bytes_max)
        self._cleaned = plan.cleaned
        self.result = PassResult()

    def swaps(self) -> Iterator[Swap]:
        """Carry each one out before you ask for the next. Raises OSError, StorageFullError, and what `pace` raises."""
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

    def _chunks(self, segment: Segment, from_offset: int = 0) -> Iterator[list[Frame]]:
        for frames in self._view.chunks(segment, CHUNK_BYTES, from_offset):
            self._pace(sum(frame.header.length for frame in frames))
            yield frames

    def _note_what_is_new(self) -> int:
        """Fill the map of keys. Returns up to which offset (exclusive) it has all of them."""
        clean_to = reached = self._plan.cleaned.clean_to
        for segment in self._plan.segments:
            if segment.next_offset <= clean_to:
                continue
            for frames in self._chunks(segment, clean_to):
                keyed = [frame for frame in frames if self._has_records(frame.header)]
                if keyed:
                    self._newest.add([self._rows.keys(frame) for frame in keyed], _offsets(keyed))
                reached = frames[-1].header.next_offset
                if self._newest.is_full:
                    return reached
        return reached

    def _has_records(self, header: BatchHeader) -> bool:
        return header.row_count > 0 and not self._plan.rules.is_aborted(batch_info(header))

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
        for frames in self._chunks(segment):
            for (header, _), left in zip(frames, self._rows_left(frames, examined), strict=True):
                examined.add(header, self._outcome(header, left))
        return examined

    def _rows_left(self, frames: Sequence[Frame], examined: _Examined) -> Iterator[Mask | None]:
        """Which rows of each batch are left. None: the batch has no rows, or no reader is given them."""
        keyed = [frame for frame in frames if self._has_records(frame.header)]
        left = np.empty(0, np.bool_)
        if keyed:
            keys, offsets = [self._rows.keys(frame) for frame in keyed], _offsets(keyed)
            left = ~self._newest.superseded(pa.chunked_array(keys), offsets)
            purged = self._purged(keyed, keys, offsets) & left
            examined.purges |= bool(purged.any())
            left &= ~purged
        examined.records_removed += sum(frame.header.row_count for frame in frames) - int(np.count_nonzero(left))
        at = 0
        for frame in frames:
            if self._has_records(frame.header):
                yield left[at : at + frame.header.row_count]
                at += frame.header.row_count
            else:
                yield None

    def _purged(self, keyed: Sequence[Frame], keys: Sequence[pa.Array], offsets: Offsets) -> Mask:
        """Which rows are tombstones that go."""
        purge_to = self._plan.rules.purge_to
        masks = [
            self._rows.tombstones(frame) & to_numpy(key.is_valid())
            if frame.header.base_offset < purge_to
            else np.zeros(len(key), np.bool_)
            for frame, key in zip(keyed, keys, strict=True)
        ]
        return np.concatenate(masks) & (offsets < purge_to)

    def _outcome(self, header: BatchHeader, left: Mask | None) -> Outcome:
        count = 0 if left is None else int(np.count_nonzero(left))
        fate = self._plan.rules.fate(batch_info(header), count)
        return Outcome(fate, None if left is None or count == len(left) else left)

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
        message = self._schema_messages[first.first.schema_id]
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


def _offsets(frames: Sequence[Frame]) -> Offsets:
    return np.concatenate([frame.header.base_offset + row_deltas(*frame) for frame in frames])
