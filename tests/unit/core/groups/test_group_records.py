"""The bytes of the records of `__consumer_offsets` stay readable, and those of the version before are recognised."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.core.groups.records import (
    AssignmentKey,
    AssignmentValue,
    GroupKey,
    GroupRecord,
    GroupValue,
    MemberKey,
    MemberValue,
    OffsetKey,
    OffsetValue,
    OldCommit,
    OldOffsetKey,
    OldOffsetValue,
    Rebalance,
    TargetEpochKey,
    TargetEpochValue,
    TargetKey,
    TargetValue,
    decode_record,
    encode_record,
    epochs_of,
    grouped_epochs,
    partitions_of,
    take_old_commit,
    target_value,
)
from spark_broker.errors import CorruptMessageError

ID = "ab" * 16

STORED: list[tuple[GroupRecord, object, object]] = [
    (
        GroupRecord(OffsetKey("g", ID, 3), OffsetValue(42, 7, "note", 1000, "orders")),
        [1, "g", ID, 3],
        [42, 7, "note", 1000, "orders"],
    ),
    (
        GroupRecord(GroupKey("g"), GroupValue(5, "hash", "uniform", (Rebalance(5, 1000, "m joined"),))),
        [2, "g"],
        [5, "hash", "uniform", [[5, 1000, "m joined"]]],
    ),
    (
        GroupRecord(MemberKey("g", "m"), MemberValue(("orders",), "o.*", "i", "rack", "c", "host", 1, 2, "range")),
        [3, "g", "m"],
        [["orders"], "o.*", "i", "rack", "c", "host", 1, 2, "range"],
    ),
    (GroupRecord(TargetEpochKey("g"), TargetEpochValue(5)), [4, "g"], [5]),
    (GroupRecord(TargetKey("g", "m"), TargetValue(((ID, (0, 1)),))), [5, "g", "m"], [[[ID, [0, 1]]]]),
    (
        GroupRecord(AssignmentKey("g", "m"), AssignmentValue(5, 4, ((ID, ((0, 3),)),), ((ID, ((1, 2),)),))),
        [6, "g", "m"],
        [5, 4, [[ID, [[0, 3]]]], [[ID, [[1, 2]]]]],
    ),
]

partitions = st.tuples(st.sampled_from(["a" * 32, "b" * 32]), st.integers(0, 9))


@pytest.mark.parametrize(("record", "key", "value"), STORED)
def test_a_record_has_these_bytes_for_ever(record: GroupRecord, key: object, value: object) -> None:
    stored = encode_record(record)
    assert stored.value is not None
    assert msgspec.msgpack.decode(stored.key) == key
    assert msgspec.msgpack.decode(stored.value) == value
    assert decode_record(*stored) == record


@pytest.mark.parametrize(("record", "key", "value"), STORED)
def test_fields_of_a_later_version_at_the_end_are_passed_over(record: GroupRecord, key: object, value: object) -> None:
    assert isinstance(value, list)
    later = msgspec.msgpack.encode([*value, "of a later version"])
    assert decode_record(msgspec.msgpack.encode(key), later) == record


@pytest.mark.parametrize(("record", "key", "value"), STORED)
def test_a_tombstone_keeps_the_key(record: GroupRecord, key: object, value: object) -> None:
    del value
    stored = encode_record(GroupRecord(record.key, None))
    assert stored.value is None
    assert msgspec.msgpack.decode(stored.key) == key
    assert decode_record(*stored) == GroupRecord(record.key, None)


def as_written_before(key: list[object], value: list[object]) -> tuple[bytes, bytes]:
    """The bytes of a record of an earlier version."""
    return msgspec.msgpack.encode(key), msgspec.msgpack.encode(value)


def test_a_commit_of_the_version_before_is_recognised_and_counts_for_the_topic_that_has_the_name() -> None:
    old = decode_record(*as_written_before(["g" * 40, "orders", 3], [42, 7, "note", -1, ""]))
    assert old == OldCommit(OldOffsetKey("g" * 40, "orders", 3), OldOffsetValue(42, 7, "note"))
    assert isinstance(old, OldCommit)
    taken = GroupRecord(OffsetKey("g" * 40, ID, 3), OffsetValue(42, 7, "note", 1000, "orders"))
    assert take_old_commit(old, {"orders": ID}.get, 1000) == taken
    assert take_old_commit(old, lambda _: None, 1000) is None


def test_an_old_commit_that_names_its_topics_id_is_of_that_topic_and_no_later_one() -> None:
    old = decode_record(*as_written_before(["g", "orders", 3], [42, -1, "", -1, "cd" * 16]))
    assert isinstance(old, OldCommit)
    taken = take_old_commit(old, {"orders": ID}.get, 0)
    assert taken is not None
    assert taken.key == OffsetKey("g", "cd" * 16, 3)


def test_an_old_read_barrier_and_an_old_tombstone_are_no_commits() -> None:
    key, value = as_written_before(["", "", 0], [0, -1, "", -1, ""])
    barrier, tombstone = decode_record(key, value), decode_record(key, None)
    assert isinstance(barrier, OldCommit)
    assert isinstance(tombstone, OldCommit)
    assert take_old_commit(barrier, {"": ID}.get, 0) is None
    assert take_old_commit(tombstone, {"": ID}.get, 0) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b"\x90"),
        (b"", b"\x90"),
        (b"\xc1", b"\x90"),
        (msgspec.msgpack.encode([99, "g"]), b"\x90"),
        (msgspec.msgpack.encode([1, "g", ID, 3]), b"\x90"),
        (msgspec.msgpack.encode([1, "g", ID, 3]), msgspec.msgpack.encode(["text"])),
        (msgspec.msgpack.encode(["g", "orders", 3]), b"\x90"),
        (msgspec.msgpack.encode(["g", "orders", "three"]), None),
    ],
)
def test_bytes_that_are_no_record_are_a_typed_error(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptMessageError):
        decode_record(key, value)


@given(st.dictionaries(partitions, st.integers(0, 99)))
def test_partitions_are_grouped_by_topic_and_back(epochs: dict[tuple[str, int], int]) -> None:
    assert epochs_of(grouped_epochs(epochs)) == epochs
    assert partitions_of(target_value(epochs)) == epochs.keys()
