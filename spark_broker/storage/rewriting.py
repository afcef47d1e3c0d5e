"""The batches of compacted segments: what is left of each, with gaps in the place of what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spark_broker.core.batch import NO_PRODUCER
from spark_broker.core.compaction import Fate
from spark_broker.protocol.arrays import from_numpy
from spark_broker.protocol.arrow_message import (
    compression_of,
    decode_batch,
    encode_compacted,
    encode_gap,
    restamp,
    row_deltas,
)
from spark_broker.protocol.frame import (
    CONTROL,
    FIRST_OF_SEGMENT,
    NO_SEQUENCE,
    ROW_OFFSETS,
    TRANSACTIONAL,
    BatchHeader,
    Frame,
)
from spark_broker.storage.keyed_rows import KeyedRows, Mask
from spark_broker.storage.log_view import Chunk
from spark_broker.storage.segment import Segment

GAP_SPAN_MAX = 2**31 - 1

EMPTY_BYTES = 768
"""About what a batch takes beside its rows' values, and a batch without rows takes in all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a batch. `left`: which of its rows stay; None: all of them."""

    fate: Fate
    left: Mask | None = None

    def changes(self, header: BatchHeader) -> bool:
        """Whether the batch itself becomes another one."""
        match self.fate:
            case Fate.GAP:
                return bool(header.row_count) or header.producer_id != NO_PRODUCER
            case Fate.PLACE:
                return bool(header.row_count)
            case Fate.RECORDS:
                return self.left is not None or bool(header.attributes & TRANSACTIONAL)

    def size_bytes(self, header: BatchHeader) -> int:
        """About how large the batch will be. Rows may differ in size."""
        if self.fate is not Fate.RECORDS:
            return EMPTY_BYTES
        if self.left is None:
            return header.length
        return min(header.length, EMPTY_BYTES + header.length * int(np.count_nonzero(self.left)) // header.row_count)


class Rewriting:
    """Consecutive segments as one. For one use."""

    def __init__(self, rows: KeyedRows, chunks: Callable[[Segment], Iterator[Chunk]], bytes_max: int) -> None:
        """`chunks` reads a segment. No segment is begun once more than `bytes_max` has been written."""
        self._rows = rows
        self._chunks = chunks
        self._bytes_max = bytes_max
        self._bytes = 0
        self._gap: BatchHeader | None = None
        self._begun = False
        self.taken = 0
        """How many of the segments are part of it, once all parts were taken."""

    def parts(self, segments: Sequence[tuple[Segment, Sequence[Outcome]]]) -> Iterator[list[Frame]]:
        """The batches in order, a chunk at a time. Each segment comes with what becomes of its batches."""
        for segment, outcomes in segments:
            if self._bytes > self._bytes_max:
                break
            self.taken += 1
            remaining = iter(outcomes)
            for chunk in self._chunks(segment):
                part = [new for frame in chunk.frames for new in self._rewritten(frame, next(remaining))]
                self._bytes += sum(frame.header.length for frame in part)
                yield part
        yield self._gap_ends()

    def _rewritten(self, frame: Frame, outcome: Outcome) -> list[Frame]:
        if outcome.fate is not Fate.GAP:
            return [*self._gap_ends(), self._kept(frame, outcome)]
        grown = None if self._gap is None else joined(self._gap, frame.header)
        if grown is not None:
            self._gap = grown
            return []
        ended = self._gap_ends()
        self._gap = _gap_of(frame.header)
        return ended

    def _gap_ends(self) -> list[Frame]:
        gap, self._gap = self._gap, None
        return [] if gap is None else [encode_gap(self._rows.schema_of(gap.schema_id), self._placed(gap))]

    def _placed(self, header: BatchHeader) -> BatchHeader:
        """The first batch of the segment says that it is; no other one does."""
        attributes = header.attributes & ~FIRST_OF_SEGMENT
        if not self._begun:
            self._begun = True
            attributes |= FIRST_OF_SEGMENT
        return header._replace(attributes=attributes)

    def _kept(self, frame: Frame, outcome: Outcome) -> Frame:
        header = self._placed(frame.header)
        if not header.attributes & CONTROL:
            # Its transaction is decided, and what is left was committed: it must not wait for a marker, which may go.
            header = header._replace(attributes=header.attributes & ~TRANSACTIONAL)
        if outcome.fate is Fate.PLACE and header.row_count:
            return encode_gap(self._rows.schema_of(header.schema_id), header)
        if outcome.left is not None:
            return self._filtered(frame, header, outcome.left)
        return frame if header.attributes == frame.header.attributes else restamp(frame.message, header)

    def _filtered(self, frame: Frame, header: BatchHeader, left: Mask) -> Frame:
        rows = decode_batch(frame.message, self._rows.schema_of(header.schema_id))
        batch = rows.take(from_numpy(np.flatnonzero(left)))
        return encode_compacted(batch, header, row_deltas(*frame)[left], compression_of(frame.message))


def _gap_of(header: BatchHeader) -> BatchHeader:
    """A gap in the place of this batch."""
    return header._replace(
        row_count=0,
        producer_id=NO_PRODUCER,
        producer_epoch=-1,
        base_sequence=NO_SEQUENCE,
        attributes=ROW_OFFSETS,
        length=0,
        message_crc=0,
    )


def joined(gap: BatchHeader, header: BatchHeader) -> BatchHeader | None:
    """The gap with the offsets of the next batch. None: it is of another leader epoch, or the gap would be too long.

    Batches carry their leader epochs: the epoch history can be rebuilt from them.
    """
    delta = header.last_offset - gap.base_offset
    if header.leader_epoch != gap.leader_epoch or delta >= GAP_SPAN_MAX:
        return None
    return gap._replace(
        last_offset_delta=delta,
        append_time_ms=max(gap.append_time_ms, header.append_time_ms),
        max_timestamp_us=header.max_timestamp_us,
    )
