"""The records of `__consumer_offsets`: everything that lasts of a consumer group.

A key is a msgpack array that begins with the number of its type. Records are kept for years: numbers are never used
again, and fields are only added at the end, with defaults. The value None is a tombstone. A compacted log has the last
value of each key, so no record needs an earlier one of another key to be understood.

Keys that begin with text are of an earlier version, which committed offsets by the topic's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from spark_broker.errors import CorruptMessageError
from spark_broker.protocol.wire import UNDECODABLE

Partition: TypeAlias = tuple[str, int]
"""Topic id and number. A topic that is created again has another id, and inherits nothing."""


class Key(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all keys: stored as `[type number, group id, ...]`."""

    group_id: str


class OffsetKey(Key, frozen=True, tag=1):
    """The committed offset of a partition."""

    topic_id: str
    partition: int


class GroupKey(Key, frozen=True, tag=2):
    """The group itself."""


class MemberKey(Key, frozen=True, tag=3):
    """What a member has said about itself."""

    member_id: str


class TargetEpochKey(Key, frozen=True, tag=4):
    """The group epoch that the targets of all members belong to."""


class TargetKey(Key, frozen=True, tag=5):
    """What a member shall own."""

    member_id: str


class AssignmentKey(Key, frozen=True, tag=6):
    """What a member owns."""

    member_id: str


AnyKey: TypeAlias = OffsetKey | GroupKey | MemberKey | TargetEpochKey | TargetKey | AssignmentKey


class Value(msgspec.Struct, frozen=True, array_like=True):
    """Base of all values: stored as an array of the fields. More elements than the fields are of a later version."""


class OffsetValue(Value, frozen=True):
    """The next offset to read, and the leader epoch of the last record read (-1: not known).

    `commit_ms`: wall-clock time of the commit. `topic`: the topic's name then, for people.
    """

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_ms: int = -1
    topic: str = ""


class Rebalance(Value, frozen=True):
    """Why an epoch began (KIP-800). `time_ms`: wall-clock time."""

    epoch: int
    time_ms: int
    reason: str


class GroupValue(Value, frozen=True):
    """The epoch rises whenever the inputs of the target change. `rebalances`: the last few, the newest last."""

    epoch: int
    inputs_hash: str
    assignor: str
    rebalances: tuple[Rebalance, ...] = ()


def revocation_ms(session_timeout_ms: int, rebalance_timeout_ms: int) -> int:
    """How long a member has to give up what it is told to. One that has not heard of it reads on until its session
    ends, so it is no shorter than that.
    """
    return max(rebalance_timeout_ms, session_timeout_ms)


class MemberValue(Value, frozen=True):
    """What a member says about itself. It subscribes to `topics` (names, sorted) or to a `pattern`, or to both.

    `instance_id`: of a static member; empty: a dynamic one. `assignor`: empty when the member does not mind.
    `rebalance_timeout_ms`: max.poll.interval.ms.
    """

    topics: tuple[str, ...]
    pattern: str = ""
    instance_id: str = ""
    rack: str = ""
    client_id: str = ""
    host: str = ""
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 300_000
    assignor: str = ""

    @property
    def revocation_ms(self) -> int:
        """Of this member."""
        return revocation_ms(self.session_timeout_ms, self.rebalance_timeout_ms)


class TargetEpochValue(Value, frozen=True):
    """The targets are those of this group epoch."""

    epoch: int


class TargetValue(Value, frozen=True):
    """`partitions`: (topic id, numbers) of each topic."""

    partitions: tuple[tuple[str, tuple[int, ...]], ...]


class AssignmentValue(Value, frozen=True):
    """Partitions are (topic id, ((number, since_epoch), ...)) of each topic.

    `since_epoch`: the member epoch in which the member got the partition. `previous_epoch`: the epoch that the member
    had named when it got this one. `revoking`: told to be given up, and perhaps still owned.
    """

    epoch: int
    previous_epoch: int
    assigned: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()
    revoking: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()


AnyValue: TypeAlias = OffsetValue | GroupValue | MemberValue | TargetEpochValue | TargetValue | AssignmentValue

VALUE_TYPES: Mapping[type[AnyKey], type[AnyValue]] = {
    OffsetKey: OffsetValue,
    GroupKey: GroupValue,
    MemberKey: MemberValue,
    TargetEpochKey: TargetEpochValue,
    TargetKey: TargetValue,
    AssignmentKey: AssignmentValue,
}


class GroupRecord(NamedTuple):
    """A key and its new value. None: the key is gone."""

    key: AnyKey
    value: AnyValue | None


class OldOffsetKey(msgspec.Struct, frozen=True, array_like=True):
    """The key of an earlier version: `[group, topic name, partition]`."""

    group_id: str
    topic: str
    partition: int


class OldOffsetValue(msgspec.Struct, frozen=True, array_like=True):
    """The value of an earlier version. `topic_id`: empty in the oldest ones. `as_of` is of no use any more."""

    offset: int
    leader_epoch: int
    metadata: str
    as_of: int = -1
    topic_id: str = ""


class OldCommit(NamedTuple):
    """A commit by the topic's name. None: it is gone."""

    key: OldOffsetKey
    value: OldOffsetValue | None


class StoredRecord(NamedTuple):
    """A record as bytes: key, and value (None: a tombstone)."""

    key: bytes
    value: bytes | None


_encoder = msgspec.msgpack.Encoder()
_key_decoder = msgspec.msgpack.Decoder(AnyKey)
_value_decoders = {key: msgspec.msgpack.Decoder(value) for key, value in VALUE_TYPES.items()}
_old_key_decoder = msgspec.msgpack.Decoder(OldOffsetKey)
_old_value_decoder = msgspec.msgpack.Decoder(OldOffsetValue)

_ARRAY_OF_THREE = 0x93


def encode_record(record: GroupRecord | OldCommit) -> StoredRecord:
    """The record as it is stored. Of old commits only tombstones are written."""
    value = None if record.value is None else _encoder.encode(record.value)
    return StoredRecord(_encoder.encode(record.key), value)


def decode_record(key: bytes | None, value: bytes | None) -> GroupRecord | OldCommit:
    """The record from its bytes. Raises CorruptMessageError."""
    if key is None:
        raise CorruptMessageError("a record of consumer groups without a key")
    try:
        if _begins_with_text(key):
            return OldCommit(_old_key_decoder.decode(key), None if value is None else _old_value_decoder.decode(value))
        decoded: AnyKey = _key_decoder.decode(key)
        return GroupRecord(decoded, None if value is None else _value_decoders[type(decoded)].decode(value))
    except UNDECODABLE as error:
        raise CorruptMessageError(f"a record of consumer groups: {error}") from None


def _begins_with_text(key: bytes) -> bool:
    """Whether a msgpack array of three begins with text: fixstr, str 8, str 16 or str 32."""
    return len(key) > 1 and key[0] == _ARRAY_OF_THREE and (0xA0 <= key[1] <= 0xBF or 0xD9 <= key[1] <= 0xDB)


def take_old_commit(commit: OldCommit, resolve: Callable[[str], str | None], commit_ms: int) -> GroupRecord | None:
    """The commit by topic id. `resolve`: the id of the topic that has this name now, or None. `commit_ms`: now.

    None: a tombstone, a read barrier (a record of no group), or a topic that is not there.
    """
    key, value = commit
    if value is None or not key.group_id:
        return None
    topic_id = value.topic_id or resolve(key.topic)
    if not topic_id:
        return None
    return GroupRecord(
        OffsetKey(key.group_id, topic_id, key.partition),
        OffsetValue(value.offset, value.leader_epoch, value.metadata, commit_ms, key.topic),
    )


def target_value(partitions: Iterable[Partition]) -> TargetValue:
    """The partitions of a target by topic, in order."""
    by_topic: dict[str, list[int]] = {}
    for topic_id, number in sorted(partitions):
        by_topic.setdefault(topic_id, []).append(number)
    return TargetValue(tuple((topic_id, tuple(numbers)) for topic_id, numbers in by_topic.items()))


def partitions_of(value: TargetValue) -> frozenset[Partition]:
    """The partitions of a target."""
    return frozenset((topic_id, number) for topic_id, numbers in value.partitions for number in numbers)


def grouped_epochs(epochs: Mapping[Partition, int]) -> tuple[tuple[str, tuple[tuple[int, int], ...]], ...]:
    """`since_epoch` of partitions, by topic, in order."""
    by_topic: dict[str, list[tuple[int, int]]] = {}
    for topic_id, number in sorted(epochs):
        by_topic.setdefault(topic_id, []).append((number, epochs[topic_id, number]))
    return tuple((topic_id, tuple(numbers)) for topic_id, numbers in by_topic.items())


def epochs_of(grouped: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]) -> dict[Partition, int]:
    """`since_epoch` of each partition."""
    return {(topic_id, number): since for topic_id, numbers in grouped for number, since in numbers}
