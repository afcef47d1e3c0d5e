"""Committed offsets of consumer groups, as a pure function of the records of `__consumer_offsets`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.messages import CommittedOffset


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


class GroupOffsets:
    """The offsets that one partition of `__consumer_offsets` holds; a later record of a key replaces an earlier one."""

    def __init__(self) -> None:
        self._offsets: dict[OffsetKey, OffsetValue] = {}

    def replay(self, records: Iterable[OffsetRecord]) -> None:
        """Take records in the order of the log. Raises CorruptMessageError."""
        for record in records:
            try:
                self._offsets[_key_decoder.decode(record.key)] = _value_decoder.decode(record.value)
            except (msgspec.MsgspecError, TypeError) as error:  # TypeError: a record without a key or a value
                raise CorruptMessageError(f"a record of committed offsets: {error}") from None

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
        """Every live offset, as records that rebuild this state."""
        return [OffsetRecord(_encoder.encode(key), _encoder.encode(value)) for key, value in self._offsets.items()]

    def __len__(self) -> int:
        return len(self._offsets)
