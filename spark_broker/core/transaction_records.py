"""The records of `__transaction_state`: everything that a transaction coordinator ever decides.

Records are kept for years. Their tags are therefore numbers that are never reused, and fields are only added at the
end, with defaults. A record's key in the log is the transactional id (UTF-8). Its value is one of the changes below.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.wire import UNDECODABLE

NO_VERSION = -1


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all records: stored as `[tag, field, field, ...]`."""


class Restored(Change, frozen=True, tag=0):
    """The whole state of an id, in a snapshot. It replaces all earlier records of the id.

    It is one record, because a snapshot may be cut short between two records, and must not lose half of an id.
    `writers` has (producer id, epoch, partitions). A partition is (index in `topic_ids`, number). `ended_*`: the
    one-writer transaction that ended last, for a producer that repeats its request to end it. Producer id -1: none.
    """

    grouped: bool
    state: str
    timeout_ms: int
    producer_id: int
    producer_epoch: int
    next_producer_id: int
    next_producer_epoch: int
    ended_producer_id: int
    ended_producer_epoch: int
    ended_committed: bool
    version: int
    execution: str
    executions: tuple[str, ...]
    last_committed: int
    closed: int
    winners: tuple[int, ...]
    topic_ids: tuple[str, ...]
    writers: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
    single_use: bool = False


class Initialized(Change, frozen=True, tag=1):
    """A producer of the id (one-writer form) has this identity from now on; every earlier one is fenced."""

    producer_id: int
    producer_epoch: int
    timeout_ms: int


class ExecutionStarted(Change, frozen=True, tag=2):
    """An application's execution has sent its first request, which fences every earlier one (many-writer form).

    `single_use`: the application has one version.
    """

    execution: str
    single_use: bool = False


class Opened(Change, frozen=True, tag=3):
    """A version of an application is open for joins."""

    version: int
    execution: str
    timeout_ms: int


class WriterJoined(Change, frozen=True, tag=4):
    """A task attempt writes under this producer id, in epoch 0."""

    producer_id: int


class PartitionAdded(Change, frozen=True, tag=5):
    """A writer may append to the partition. In the one-writer form, the first one opens the transaction."""

    producer_id: int
    topic_id: str
    partition: int


class Ending(Change, frozen=True, tag=6):
    """The decision. Winners (many-writer form) get commit markers, every other writer abort markers.

    `next_*`: the one-writer form's identity from the transaction's end on.
    """

    committed: bool
    winners: tuple[int, ...] = ()
    next_producer_id: int = -1
    next_producer_epoch: int = -1


class Ended(Change, frozen=True, tag=7):
    """The marker of every partition is committed: all of them show the outcome."""


class Forgotten(Change, frozen=True, tag=8):
    """The id has expired."""


AnyChange = (
    Restored | Initialized | ExecutionStarted | Opened | WriterJoined | PartitionAdded | Ending | Ended | Forgotten
)


class TransactionRecord(NamedTuple):
    """A change of one transactional id."""

    transactional_id: str
    change: AnyChange


class StoredRecord(NamedTuple):
    """A record as bytes: key and value."""

    key: bytes
    value: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyChange)


def encode_record(record: TransactionRecord) -> StoredRecord:
    """The record as it is stored."""
    return StoredRecord(record.transactional_id.encode(), _encoder.encode(record.change))


def decode_record(key: bytes | None, value: bytes | None) -> TransactionRecord:
    """The record from its bytes. Raises CorruptMessageError."""
    if key is None or value is None:
        raise CorruptMessageError("a record of transactions without a key or a value")
    try:
        return TransactionRecord(key.decode(), _decoder.decode(value))
    except UNDECODABLE as error:
        raise CorruptMessageError(f"a record of transactions: {error}") from None
