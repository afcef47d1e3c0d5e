"""What a transaction coordinator decides about a transactional id, one change at a time.

An earlier version stored the changes: a record's key was the transactional id (UTF-8), its value the change. Logs that
begin with such records are understood, once. So tags and fields stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from spark_broker.core.transaction_records import (
    PartitionKey,
    StoredRecord,
    TransactionRecord,
    WriterKey,
    decode_record,
    encode_record,
)
from spark_broker.errors import CorruptMessageError, invariant
from spark_broker.protocol.wire import UNDECODABLE

NO_VERSION = -1


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all changes. An earlier version stored them, as `[tag, field, field, ...]`."""


class Restored(Change, frozen=True, tag=0):
    """The whole state of an id, in a snapshot of an earlier version. Nothing decides it any more.

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


class Settled(Change, frozen=True, tag=9):
    """What these keys name is settled: the markers are committed. The other keys follow, and `Ended` comes last.

    Only a transaction that has more keys than one append may have needs it. No version has stored it.
    """

    keys: tuple[WriterKey | PartitionKey, ...]


OldChange = (
    Restored | Initialized | ExecutionStarted | Opened | WriterJoined | PartitionAdded | Ending | Ended | Forgotten
)
"""What an earlier version stored."""

AnyChange = OldChange | Settled


class OldRecord(NamedTuple):
    """A record of an earlier version. None: the id has been stored as it is today, before this record."""

    transactional_id: str
    change: OldChange | None


AnyRecord = TransactionRecord | OldRecord

_decoder = msgspec.msgpack.Decoder(OldChange)


def encode_any(record: AnyRecord) -> StoredRecord:
    """The record as it is stored. Of old records only those are written that say that an id is stored anew."""
    if isinstance(record, TransactionRecord):
        return encode_record(record)
    invariant(record.change is None, "a record of an earlier version is written: %s", record)
    return StoredRecord(record.transactional_id.encode(), None)


def decode_any(key: bytes | None, value: bytes | None) -> AnyRecord:
    """The record from its bytes. Raises CorruptMessageError."""
    if key is None:
        raise CorruptMessageError("a record of transactions without a key")
    if not _is_old(key):
        return decode_record(key, value)
    try:
        return OldRecord(key.decode(), None if value is None else _decoder.decode(value))
    except UNDECODABLE as error:
        raise CorruptMessageError(f"a record of transactions: {error}") from None


def is_old_change(key: bytes | None, value: bytes | None) -> bool:
    """Whether a stored record is a change that an earlier version decided."""
    return key is not None and _is_old(key) and value is not None


def _is_old(key: bytes) -> bool:
    """A key of today begins with a byte with which no text in UTF-8 begins."""
    return not key or not 0x80 <= key[0] < 0xC0
