"""Committed offsets of consumer groups, as a pure function of the records of `__consumer_offsets`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.messages import CommittedOffset
from spark_broker.protocol.wire import UNDECODABLE


class OffsetKey(msgspec.Struct, frozen=True, array_like=True):
    """The key of a record in `__consumer_offsets`: what is committed for which group."""

    group_id: str
    topic: str
    partition: int


class OffsetValue(msgspec.Struct, frozen=True, array_like=True):
    """The value: the next offset to read, the leader epoch of the last record read, and a note."""

    offset: int
    leader_epoch: int
    metadata: str


class OffsetRecord(NamedTuple):
    """A record as bytes: key and value."""

    key: bytes
    value: bytes


_encoder = msgspec.msgpack.Encoder()
_key_decoder = msgspec.msgpack.Decoder(OffsetKey)
_value_decoder = msgspec.msgpack.Decoder(OffsetValue)


def offset_record(group_id: str, committed: CommittedOffset) -> OffsetRecord:
    """The record that commits this offset."""
    key = OffsetKey(group_id, committed.topic, committed.partition)
    value = OffsetValue(committed.offset, committed.leader_epoch, committed.metadata)
    return OffsetRecord(_encoder.encode(key), _encoder.encode(value))


@dataclass(slots=True)
class _Undecided:
    """What a producer's open transaction would commit, in the order of the log, from its first batch on."""

    first_offset: int
    commits: list[tuple[OffsetKey, OffsetValue]] = field(default_factory=list)


class GroupOffsets:
    """The offsets that one partition of `__consumer_offsets` holds; a later commit of a key replaces an earlier one.

    A transaction's commits take effect where its marker is, not where they were written: nobody could see them before.
    """

    def __init__(self) -> None:
        self._offsets: dict[OffsetKey, OffsetValue] = {}
        self._undecided: dict[int, _Undecided] = {}  # by producer id

    def replay(self, records: Iterable[OffsetRecord]) -> None:
        """Take records in the order of the log. Raises CorruptMessageError."""
        self._offsets.update(_decoded(records))

    def replay_undecided(self, producer_id: int, base_offset: int, records: Iterable[OffsetRecord]) -> None:
        """A batch of a producer's transaction, at this offset: kept aside. Raises CorruptMessageError."""
        self._undecided.setdefault(producer_id, _Undecided(base_offset)).commits += _decoded(records)

    def replay_marker(self, producer_id: int, *, committed: bool) -> None:
        """The end of the producer's transaction, if it has one here."""
        undecided = self._undecided.pop(producer_id, None)
        if undecided is not None and committed:
            self._offsets.update(undecided.commits)

    @property
    def first_undecided(self) -> int | None:
        """Offset of the first batch whose transaction is open: a snapshot does not have it, so the log must keep it."""
        return min((undecided.first_offset for undecided in self._undecided.values()), default=None)

    def committed(self, group_id: str, partitions: Iterable[tuple[str, int]] | None) -> list[CommittedOffset]:
        """What the group has committed for these partitions, or for all."""
        if partitions is None:
            keys = sorted((k for k in self._offsets if k.group_id == group_id), key=lambda k: (k.topic, k.partition))
        else:
            keys = [OffsetKey(group_id, topic, partition) for topic, partition in partitions]
        return [
            CommittedOffset(key.topic, key.partition, value.offset, value.leader_epoch, value.metadata)
            for key in keys
            if (value := self._offsets.get(key)) is not None
        ]

    def snapshot(self) -> list[OffsetRecord]:
        """Every live offset, as records that rebuild this state together with what is undecided."""
        return [OffsetRecord(_encoder.encode(key), _encoder.encode(value)) for key, value in self._offsets.items()]

    def __len__(self) -> int:
        return len(self._offsets)


def _decoded(records: Iterable[OffsetRecord]) -> list[tuple[OffsetKey, OffsetValue]]:
    try:
        return [(_key_decoder.decode(record.key), _value_decoder.decode(record.value)) for record in records]
    except (*UNDECODABLE, TypeError) as error:  # TypeError: a record without a key or a value
        raise CorruptMessageError(f"a record of committed offsets: {error}") from None
