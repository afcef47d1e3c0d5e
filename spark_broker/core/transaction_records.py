"""The records of `__transaction_state`: everything that lasts of a transactional id.

A key is a msgpack array that begins with the number of its type. Records are kept for years: numbers are never used
again, and fields are only added at the end, with defaults. The value None is a tombstone. A compacted log has the last
value of each key, so no record needs an earlier one of another key to be understood (ADR 21).

Records of one append are in one batch. So a log ends before or after all of them, but compaction may leave any of them
out that a later record replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.wire import UNDECODABLE


class Key(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all keys: stored as `[type number, transactional id, ...]`."""

    transactional_id: str


class ProducerKey(Key, frozen=True, tag=1):
    """The id itself, in the one-writer form."""


class ApplicationKey(Key, frozen=True, tag=2):
    """The id itself, in the many-writer form."""


class ExecutionsKey(Key, frozen=True, tag=3):
    """The executions of an application that are remembered. They change once a run."""


class WinnersKey(Key, frozen=True, tag=4):
    """The writers that the decision to commit names."""


class WriterKey(Key, frozen=True, tag=5):
    """A writer of the open transaction (many-writer form)."""

    producer_id: int


class PartitionKey(Key, frozen=True, tag=6):
    """A partition that a writer of the open transaction may have appended to."""

    producer_id: int
    topic_id: str
    partition: int


AnyKey: TypeAlias = ProducerKey | ApplicationKey | ExecutionsKey | WinnersKey | WriterKey | PartitionKey


class Value(msgspec.Struct, frozen=True, array_like=True):
    """Base of all values: stored as an array of the fields. More elements than the fields are of a later version."""


class ProducerValue(Value, frozen=True):
    """`state`: a value of `TransactionState`. `next_*`: the identity from the end of the transaction on.

    `ended_*`: the transaction that ended last, for a producer that repeats its request to end it. -1: none.
    """

    state: str
    timeout_ms: int
    producer_id: int
    producer_epoch: int
    next_producer_id: int
    next_producer_epoch: int
    ended_producer_id: int
    ended_producer_epoch: int
    ended_committed: bool


class ApplicationValue(Value, frozen=True):
    """`version`, `execution`: of the transaction that is open, or was open last."""

    state: str
    timeout_ms: int
    version: int
    execution: str
    last_committed: int
    closed: int
    single_use: bool


class ExecutionsValue(Value, frozen=True):
    """The newest is the last."""

    executions: tuple[str, ...]


class WinnersValue(Value, frozen=True):
    """Their producer ids, sorted."""

    winners: tuple[int, ...]


class WriterValue(Value, frozen=True):
    """The writer has joined. Its epoch is 0."""


class PartitionValue(Value, frozen=True):
    """The partition was added."""


AnyValue: TypeAlias = ProducerValue | ApplicationValue | ExecutionsValue | WinnersValue | WriterValue | PartitionValue

VALUE_TYPES: Mapping[type[AnyKey], type[AnyValue]] = {
    ProducerKey: ProducerValue,
    ApplicationKey: ApplicationValue,
    ExecutionsKey: ExecutionsValue,
    WinnersKey: WinnersValue,
    WriterKey: WriterValue,
    PartitionKey: PartitionValue,
}


class TransactionRecord(NamedTuple):
    """A key and its new value. None: the key is gone."""

    key: AnyKey
    value: AnyValue | None


class StoredRecord(NamedTuple):
    """A record as bytes: key, and value (None: a tombstone)."""

    key: bytes
    value: bytes | None


_encoder = msgspec.msgpack.Encoder()
_key_decoder = msgspec.msgpack.Decoder(AnyKey)
_value_decoders = {key: msgspec.msgpack.Decoder(value) for key, value in VALUE_TYPES.items()}


def encode_record(record: TransactionRecord) -> StoredRecord:
    """The record as it is stored."""
    value = None if record.value is None else _encoder.encode(record.value)
    return StoredRecord(_encoder.encode(record.key), value)


def decode_record(key: bytes, value: bytes | None) -> TransactionRecord:
    """The record from its bytes. Raises CorruptMessageError."""
    try:
        decoded: AnyKey = _key_decoder.decode(key)
        return TransactionRecord(decoded, None if value is None else _value_decoders[type(decoded)].decode(value))
    except UNDECODABLE as error:
        raise CorruptMessageError(f"a record of transactions: {error}") from None
