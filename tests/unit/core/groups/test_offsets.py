"""Committed offsets: who may commit, what expires, what is deleted, and that a new topic inherits nothing."""

from __future__ import annotations

from random import Random

import pytest

from spark_broker.core.groups.records import OldCommit, OldOffsetKey, OldOffsetValue, decode_record, encode_record
from spark_broker.core.groups.requests import Commit, CommitOffset, GroupSettings
from spark_broker.core.groups.state import GroupPhase
from spark_broker.errors import (
    FencedMemberEpochError,
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    InvalidGroupIdError,
    NonEmptyGroupError,
    OffsetMetadataTooLargeError,
    OffsetOutOfRangeError,
    StaleMemberEpochError,
    UnknownMemberIdError,
    UnknownTopicIdError,
    UnstableOffsetCommitError,
)
from tests.unit.core.groups.member import Member
from tests.unit.core.groups.shard_log import Record
from tests.unit.core.groups.shell import CLICKS, GROUP, ORDERS, RETENTION_MS, SESSION_MS, Shell, partitions, topic

FIRST = (ORDERS, 0)


def handed_over() -> tuple[Shell, Member, Member]:
    """m1 had four partitions since epoch 1, and has kept two of them; m2 has the others since epoch 2."""
    shell = Shell()
    (first,) = shell.joined("m1")
    second = shell.member("m2")
    shell.settle(first, second)
    assert (first.epoch, second.epoch) == (2, 2)
    return shell, first, second


def test_a_commit_is_good_from_the_epoch_of_the_assignment_to_the_members_own() -> None:
    """KIP-1251."""
    shell, first, second = handed_over()
    kept, given = min(first.owned), min(second.owned)
    assert shell.commit({kept: 1}, first, epoch=1) == {}, "it has had it since epoch 1"
    assert shell.commit({kept: 2}, first, epoch=2) == {}
    assert shell.commit({given: 3}, second, epoch=2) == {}
    for member, partition, epoch in ((second, given, 1), (first, given, 2), (first, given, 1), (second, kept, 2)):
        refused = shell.commit({partition: 9}, member, epoch)
        assert isinstance(refused[partition], StaleMemberEpochError), (member.member_id, partition, epoch)
    with pytest.raises(FencedMemberEpochError, match="epoch 2, and names 3"):
        shell.commit({kept: 9}, first, epoch=3)
    assert shell.offsets() == {kept: 2, given: 3}


def test_a_partition_that_is_being_revoked_may_still_be_committed() -> None:
    shell = Shell()
    (first,) = shell.joined("m1")
    shell.beat(shell.member("m2"))
    shell.beat(first)
    assert shell.commit(dict.fromkeys(partitions(), 5), first) == {}
    shell.step(first)
    assert len(shell.commit(dict.fromkeys(partitions(), 6), first)) == 2


def test_what_is_refused_of_a_commit_leaves_the_rest() -> None:
    shell = Shell(topic(), topic(CLICKS))
    (member,) = shell.joined("m")
    given = {
        FIRST: CommitOffset(7),
        (ORDERS, 1): CommitOffset(-1),
        (ORDERS, 2): CommitOffset(1, metadata="x" * 4097),
        (ORDERS, 9): CommitOffset(1),
        (CLICKS, 0): CommitOffset(1),
        ("f" * 32, 0): CommitOffset(1),
    }
    decision = shell.shard.commit(Commit(GROUP, given, "m", member.epoch), shell.now)
    shell.carry_out(decision)
    assert {partition: type(error) for partition, error in decision.answer.refused.items()} == {
        (ORDERS, 1): OffsetOutOfRangeError,
        (ORDERS, 2): OffsetMetadataTooLargeError,
        (ORDERS, 9): UnknownTopicIdError,
        (CLICKS, 0): StaleMemberEpochError,
        ("f" * 32, 0): UnknownTopicIdError,
    }
    assert shell.offsets() == {FIRST: 7}


def test_a_commit_without_a_member_is_taken_only_while_the_group_has_none() -> None:
    shell = Shell()
    assert shell.commit({FIRST: 1}) == {}
    assert shell.phase is GroupPhase.EMPTY
    (member,) = shell.joined("m")
    with pytest.raises(UnknownMemberIdError, match="has members"):
        shell.commit({FIRST: 2})
    shell.leave(member)
    with pytest.raises(UnknownMemberIdError, match="no member m"):
        shell.commit({FIRST: 3}, member, epoch=1)
    assert shell.commit({FIRST: 4}) == {}
    assert shell.offsets() == {FIRST: 4}


@pytest.mark.parametrize("group_id", ["", "g" * 250])
def test_the_name_of_a_group_is_bounded(group_id: str) -> None:
    shell = Shell()
    with pytest.raises(InvalidGroupIdError, match="from 1 to 249 characters"):
        shell.shard.commit(Commit(group_id, {FIRST: CommitOffset(1)}), shell.now)


def test_a_members_stale_epoch_is_an_error_and_never_no_offset() -> None:
    shell, first, second = handed_over()
    shell.commit({min(first.owned): 5}, first)
    assert shell.shard.offsets(GROUP, [min(first.owned)], "m2", 2)
    assert shell.shard.offsets(GROUP, [min(second.owned)], "m2", 2) == {}
    for member_id, epoch in (("m1", 0), ("m2", 3)):
        with pytest.raises(StaleMemberEpochError):
            shell.shard.offsets(GROUP, None, member_id, epoch)
    with pytest.raises(UnknownMemberIdError):
        shell.shard.offsets(GROUP, None, "m3", 2)


def test_a_topic_that_is_created_again_inherits_no_offset() -> None:
    """KAFKA-19141."""
    shell = Shell()
    shell.commit({FIRST: 7})
    recreated = "c" * 32
    shell.change_topics(topic(recreated), deleted=[ORDERS])
    assert shell.offsets() == {}
    assert isinstance(shell.commit({FIRST: 8})[FIRST], UnknownTopicIdError)
    assert shell.commit({(recreated, 0): 1}) == {}


def test_a_topic_that_is_only_missing_from_the_image_keeps_its_offsets() -> None:
    shell = Shell()
    shell.commit({FIRST: 7})
    shell.change_topics()
    shell.load(Random(1))
    shell.change_topics(topic())
    assert shell.offsets() == {FIRST: 7}


def test_offsets_of_a_group_without_members_expire_and_then_the_group_is_gone() -> None:
    shell = Shell()
    shell.commit({FIRST: 7})
    shell.pass_time(RETENTION_MS // 2)
    shell.commit({(ORDERS, 1): 8})
    shell.pass_time(RETENTION_MS // 2 - 1)
    assert len(shell.offsets()) == 2
    shell.pass_time(shell.settings.expiry_interval_ms)
    assert shell.offsets() == {(ORDERS, 1): 8}
    shell.load(Random(2))
    shell.pass_time(RETENTION_MS)
    assert shell.phase is GroupPhase.DEAD
    assert shell.shard.phases() == {}


def test_offsets_age_from_when_the_group_became_empty() -> None:
    """A group that commits seldom does not lose its offsets in a restart."""
    shell = Shell()
    (member,) = shell.joined("m")
    shell.commit({FIRST: 7}, member)
    for _ in range(3 * RETENTION_MS // SESSION_MS):
        shell.pass_time(SESSION_MS - 1)
        shell.beat(member)
    shell.leave(member)
    shell.pass_time(RETENTION_MS - 1)
    assert shell.offsets() == {FIRST: 7}
    shell.pass_time(shell.settings.expiry_interval_ms)
    assert shell.phase is GroupPhase.DEAD


def test_nothing_of_a_group_expires_or_is_deleted_under_an_open_transaction() -> None:
    shell = Shell()
    shell.commit({FIRST: 7})
    shell.pass_time(2 * RETENTION_MS, open_transactions=[GROUP])
    assert shell.offsets() == {FIRST: 7}
    with pytest.raises(UnstableOffsetCommitError, match="open transaction"):
        shell.shard.delete_group(GROUP, shell.now, [GROUP].__contains__)
    with pytest.raises(UnstableOffsetCommitError, match="open transaction"):
        shell.shard.delete_offsets(GROUP, [FIRST], shell.now, [GROUP].__contains__)
    shell.pass_time(shell.settings.expiry_interval_ms)
    assert shell.phase is GroupPhase.DEAD


def test_offsets_expire_a_thousand_at_a_time() -> None:
    shell = Shell(topic(partitions=2500), settings=GroupSettings(offsets_retention_ms=10, expiry_interval_ms=1))
    for number in range(3):
        given = {(ORDERS, partition): CommitOffset(1) for partition in range(900)}
        shell.carry_out(shell.shard.commit(Commit(f"g{number}", given), shell.now))
    counts = [len(shell.pass_time(100 * (number == 0))) for number in range(3)]
    assert counts == [1800, 900, 0]


def test_a_group_is_deleted_with_everything_once_it_has_no_members() -> None:
    shell = Shell()
    (member,) = shell.joined("m")
    shell.commit({FIRST: 7}, member)
    with pytest.raises(NonEmptyGroupError, match="has 1 members"):
        shell.shard.delete_group(GROUP, shell.now)
    shell.leave(member)
    shell.carry_out(shell.shard.delete_group(GROUP, shell.now))
    assert shell.phase is GroupPhase.DEAD
    with pytest.raises(GroupIdNotFoundError):
        shell.shard.delete_group(GROUP, shell.now)
    shell.load(Random(4))
    assert shell.offsets() == {}
    (again,) = shell.joined("m")
    assert again.epoch == 1


def test_offsets_of_a_topic_are_deleted_unless_members_read_it() -> None:
    shell = Shell(topic(), topic(CLICKS))
    shell.commit({FIRST: 7, (CLICKS, 0): 8})
    shell.joined("m")
    with pytest.raises(GroupSubscribedToTopicError, match="read orders"):
        shell.shard.delete_offsets(GROUP, [FIRST, (CLICKS, 0)], shell.now)
    shell.carry_out(shell.shard.delete_offsets(GROUP, [(CLICKS, 0), (CLICKS, 3)], shell.now))
    assert shell.offsets() == {FIRST: 7}
    with pytest.raises(GroupIdNotFoundError):
        shell.shard.delete_offsets("another", [FIRST], shell.now)


def old_commit(name: str, offset: int, topic_id: str = "") -> Record:
    """Through its bytes."""
    commit = OldCommit(OldOffsetKey(GROUP, name, 0), OldOffsetValue(offset, -1, "", topic_id=topic_id))
    return decode_record(*encode_record(commit))


def test_old_commits_are_taken_once_for_the_topic_that_has_the_name() -> None:
    shell = Shell(log=[old_commit("orders", 3), old_commit("orders", 5), old_commit("not there", 9)])
    assert shell.offsets() == {FIRST: 5}
    assert [tombstone.key.topic for tombstone in shell.old_tombstones()] == ["orders"]
    recreated = "c" * 32
    shell.change_topics(topic(recreated), deleted=[ORDERS])
    for seed in range(4):
        shell.load(Random(seed))
        assert shell.offsets() == {}, "the new topic of the name inherits nothing"


def test_an_old_commit_replaces_no_newer_one() -> None:
    shell = Shell()
    shell.commit({FIRST: 7})
    shell.log.insert(0, old_commit("orders", 3))
    shell.load()
    assert shell.offsets() == {FIRST: 7}
    assert len(shell.old_tombstones()) == 1
