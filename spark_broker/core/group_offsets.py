"""The committed offsets of consumer groups. They are a pure function of the records of `__consumer_offsets`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.messages import CommittedOffset
from spark_broker.protocol.wire import UNDECODABLE

NO_SNAPSHOT = -1


class OffsetKey(msgspec.Struct, frozen=True, array_like=True):
    """The key of a record in `__consumer_offsets`: a group, and the partition whose offset it commits."""

    group_id: str
    topic: str
    partition: int


class OffsetValue(msgspec.Struct, frozen=True, array_like=True):
    """The value: the next offset to read, the leader epoch of the last record read, and a note.

    `as_of`: in a snapshot, the rank of this commit: the offset after the record that made it. Commits go on while a
    snapshot is written, so a commit may lie before the snapshot in the log and yet be newer.
    `topic_id`: of the topic that was read; empty in old records, which count for the topic that has the name.
    """

    offset: int
    leader_epoch: int
    metadata: str
    as_of: int = NO_SNAPSHOT
    topic_id: str = ""


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
    value = OffsetValue(committed.offset, committed.leader_epoch, committed.metadata, topic_id=committed.topic_id)
    return _record(key, value)


def _record(key: OffsetKey, value: OffsetValue) -> OffsetRecord:
    return OffsetRecord(_encoder.encode(key), _encoder.encode(value))


READ_BARRIER = _record(OffsetKey("", "", 0), OffsetValue(0, -1, ""))
"""A record of no group. A coordinator appends it to learn whether it still leads: once the record is committed, no
later leader had been elected when it was appended.
"""


class _Commit(NamedTuple):
    """A commit, and its rank among those of its key: the offset after its batch in the log.

    A transaction's commits rank by their own batches, too, not by the marker that decides them (known bug 36).
    Compaction keeps the last record of each key, so any other rank would count differently after it.
    """

    value: OffsetValue
    rank: int


@dataclass(slots=True)
class _Undecided:
    """What a producer's open transaction would commit, in the order of the log, from its first batch on."""

    first_offset: int
    commits: list[tuple[OffsetKey, _Commit]] = field(default_factory=list)


class CommittedOffsets:
    """The offsets that one partition of `__consumer_offsets` holds; a later commit of a key replaces an earlier one.

    A transaction's commits are unknown until its marker. Then each counts as if it had been made where it was written.
    """

    def __init__(self) -> None:
        self._offsets: dict[OffsetKey, _Commit] = {}
        self._undecided: dict[int, _Undecided] = {}  # by producer id

    def replay(self, records: Iterable[OffsetRecord], end_offset: int) -> bool:
        """Take the next batch of the log, which ends at `end_offset` (exclusive).

        Returns whether it is part of a snapshot. Raises CorruptMessageError.
        """
        commits = _decoded(records, end_offset)
        self._take(commits)
        return any(commit.value.as_of != NO_SNAPSHOT for _, commit in commits)

    def replay_undecided(
        self, producer_id: int, base_offset: int, records: Iterable[OffsetRecord], end_offset: int
    ) -> None:
        """Keep a batch of a producer's transaction until the marker comes. Raises CorruptMessageError."""
        commits = _decoded(records, end_offset)
        self._undecided.setdefault(producer_id, _Undecided(base_offset)).commits += commits

    def replay_marker(self, producer_id: int, *, committed: bool) -> None:
        """End the producer's transaction, if it has one here."""
        undecided = self._undecided.pop(producer_id, None)
        if undecided is not None and committed:
            self._take(undecided.commits)

    def _take(self, commits: list[tuple[OffsetKey, _Commit]]) -> None:
        """A commit counts only where no later one is known. Read barriers are of no group."""
        for key, commit in commits:
            current = self._offsets.get(key)
            if key.group_id and (current is None or current.rank <= commit.rank):
                self._offsets[key] = commit

    @property
    def first_undecided(self) -> int | None:
        """Offset of the first batch of an open transaction. A snapshot does not have it, so the log must keep it."""
        return min((undecided.first_offset for undecided in self._undecided.values()), default=None)

    def undecided(self, group_id: str, partitions: Iterable[tuple[str, int]] | None) -> OffsetKey | None:
        """One of these partitions, or of all, whose offset an open transaction of the group may still commit."""
        wanted = None if partitions is None else set(partitions)
        for undecided in self._undecided.values():
            for key, _ in undecided.commits:
                if key.group_id == group_id and (wanted is None or (key.topic, key.partition) in wanted):
                    return key
        return None

    def committed(self, group_id: str, partitions: Iterable[tuple[str, int]] | None) -> list[CommittedOffset]:
        """What the group has committed for these partitions, or for all."""
        if partitions is None:
            keys = sorted((k for k in self._offsets if k.group_id == group_id), key=lambda k: (k.topic, k.partition))
        else:
            keys = [OffsetKey(group_id, topic, partition) for topic, partition in partitions]
        return [_committed(key, commit.value) for key in keys if (commit := self._offsets.get(key)) is not None]

    def drop(self, topics: Container[str]) -> None:
        """Forget what was committed for these topics, by id: they were deleted."""
        self._offsets = {key: commit for key, commit in self._offsets.items() if commit.value.topic_id not in topics}

    def snapshot(self) -> list[OffsetRecord]:
        """Every live offset, as records. They rebuild this state together with the undecided batches in the log."""
        return [
            _record(key, OffsetValue(value.offset, value.leader_epoch, value.metadata, rank, value.topic_id))
            for key, (value, rank) in self._offsets.items()
        ]

    def __len__(self) -> int:
        return len(self._offsets)


def _committed(key: OffsetKey, value: OffsetValue) -> CommittedOffset:
    return CommittedOffset(key.topic, key.partition, value.offset, value.leader_epoch, value.metadata, value.topic_id)


def _decoded(records: Iterable[OffsetRecord], end_offset: int) -> list[tuple[OffsetKey, _Commit]]:
    """The commits of a batch that ends at `end_offset` (exclusive). Those of a snapshot have their own ranks."""
    try:
        decoded = [(_key_decoder.decode(record.key), _value_decoder.decode(record.value)) for record in records]
        return [
            (key, _Commit(value, end_offset if value.as_of == NO_SNAPSHOT else value.as_of)) for key, value in decoded
        ]
    except (*UNDECODABLE, TypeError) as error:  # TypeError: a record without a key or a value
        raise CorruptMessageError(f"a record of committed offsets: {error}") from None
