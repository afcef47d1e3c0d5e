"""What a leader answers to a simulated reader: the production requests and answers, with batches as plain values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

from spark_broker.client.fetch_machine import FetchedPart, FetchMachine
from spark_broker.client.partition_position import Prefetched
from spark_broker.client.retry import Backoff
from spark_broker.config import ConsumerConfig
from spark_broker.model import ConsumedBatch, TopicPartition
from spark_broker.protocol.arrow_message import row_deltas
from spark_broker.protocol.crc32c import Buffer
from spark_broker.protocol.frame import ROW_OFFSETS, BatchHeader, decode_frames
from spark_broker.testing.simulation.batches import decoded

if TYPE_CHECKING:
    from spark_broker.testing.simulation.world import World


class Values(NamedTuple):
    """Stands in for a `ConsumedBatch`: decoding every batch into Arrow would take a tenth of a schedule."""

    tp: TopicPartition
    offsets: Sequence[int]
    values: tuple[bytes, ...]

    @property
    def base_offset(self) -> int:
        return self.offsets[0]

    def rows_below(self, offset: int) -> int:
        return bisect_left(self.offsets, offset)

    def slice(self, offset: int) -> Values:
        return Values(self.tp, self.offsets[offset:], self.values[offset:])

    def runs(self) -> Iterator[Values]:
        bounds = [at for at in range(1, len(self.offsets)) if self.offsets[at] != self.offsets[at - 1] + 1]
        for first, end in pairwise([0, *bounds, len(self.offsets)]):
            if end > first:
                yield Values(self.tp, self.offsets[first:end], self.values[first:end])

    def records(self) -> Iterator[Record]:
        return (Record(self.tp, offset, value) for offset, value in zip(self.offsets, self.values, strict=True))


class Record(NamedTuple):
    """Stands in for a `ConsumedRecord`."""

    tp: TopicPartition
    offset: int
    value: bytes


class SimFetches(FetchMachine):
    """The production requests and answers; batches are decoded to `Values`."""

    def __init__(self, world: World, name: str, config: ConsumerConfig, backoff: Backoff) -> None:
        """`name`: of the reader."""
        super().__init__(config, None, backoff)
        self._world = world
        self._name = name
        self._read_committed = config.read_committed

    def decode(self, part: FetchedPart) -> list[Prefetched]:
        """Decode an answer as `client.fetch_decoder` does."""
        target, answer = part.target, part.response
        tp = TopicPartition(target.topic.name, target.partition)
        transactional = self._world.transactional
        fetched: list[Prefetched] = []
        offset = target.offset
        frames = decode_frames(part.payload) if part.local is None else part.local
        for header, data in frames:
            if transactional is not None and self._read_committed:
                transactional.rules.handed_out(self._name, target.key, header)
            values = values_of(tp, header, data)
            values = values.slice(values.rows_below(offset))  # a batch may begin before the position
            place = header.next_offset, header.leader_epoch, header.length
            fetched.append(prefetched(values, *place) if values.values else Prefetched(None, *place))
            offset = header.next_offset
        if answer.next_offset > offset:
            fetched.append(Prefetched(None, answer.next_offset, answer.next_epoch, 0))
        return fetched


def values_of(tp: TopicPartition, header: BatchHeader, message: Buffer) -> Values:
    if not header.row_count:
        return Values(tp, (), ())
    if header.attributes & ROW_OFFSETS:
        return Values(tp, (header.base_offset + row_deltas(header, message)).tolist(), decoded(message))
    return Values(tp, range(header.base_offset, header.next_offset), decoded(message))


def prefetched(values: Values, next_offset: int, leader_epoch: int, size_bytes: int = 1) -> Prefetched:
    """These values as an entry that waits for poll."""
    return Prefetched(partial(_identity, cast("ConsumedBatch", values)), next_offset, leader_epoch, size_bytes)


def _identity(batch: ConsumedBatch) -> ConsumedBatch:
    return batch
