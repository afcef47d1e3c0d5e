"""What `Admin` says of consumer groups, and changes from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from spark_broker import Admin, GroupListing, OffsetAndMetadata, TopicPartition
from spark_broker.client import group_admin
from spark_broker.errors import (
    ClosedError,
    CoordinatorNotAvailableError,
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    InvalidDataError,
    InvalidGroupIdError,
    NetworkError,
    NonEmptyGroupError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
    UnstableOffsetCommitError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import (
    CallRequest,
    CommittedOffset,
    DeleteGroupOffsetsRequest,
    DescribeGroupRequest,
    HistoryMetadata,
    ListGroupsRequest,
    ListGroupsResponse,
    MemberAbout,
    Message,
    OffsetCommitRequest,
)
from spark_broker.protocol.messages import GroupListing as ListedGroup
from spark_broker.protocol.murmur2 import group_partition
from tests.client.fake_broker import FakeCluster

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
ABOUT = MemberAbout(["t"], "", "rack", "my client", "my host", 45_000, 300_000, "")


@pytest.fixture
def topics(cluster: FakeCluster, values: Callable[..., pa.RecordBatch]) -> FakeCluster:
    """Groups have their topic. The topic t has two partitions: ten records, and none."""
    cluster.create(CONSUMER_OFFSETS_TOPIC, 3)
    cluster.create("t", 2)
    cluster.store("t", 0, values(*"0123456789"))
    return cluster


@pytest.fixture
def admin(cluster: FakeCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap) as client:
        yield client


def impatient(cluster: FakeCluster, ms: int = 500) -> Admin:
    return Admin(cluster.bootstrap, default_api_timeout_ms=ms, request_timeout_ms=ms)


def commit(cluster: FakeCluster, group: str, offset: int, partition: int = 0) -> None:
    cluster.committed[group, "t", partition] = CommittedOffset("t", partition, offset, 0, "a note")


def groups_elsewhere(count: int) -> list[str]:
    """Groups of as many coordinators."""
    names: dict[int, str] = {}
    for number in range(100):
        names.setdefault(group_partition(f"g{number}", 3), f"g{number}")
    return sorted(names.values())[:count]


def test_groups_of_every_coordinator_are_listed(topics: FakeCluster, admin: Admin) -> None:
    first, second, third = groups_elsewhere(3)
    for group in (first, second):
        commit(topics, group, 5)
    topics.groups.join(third, "m", ABOUT)
    assert [(g.group_id, g.state, g.members) for g in admin.list_groups()] == sorted(
        [(first, "Empty", 0), (second, "Empty", 0), (third, "Stable", 1)]
    )
    assert {g.coordinator for g in admin.list_groups()} == {0, 1, 2}
    assert [g.group_id for g in admin.list_groups(["Stable"])] == [third]
    assert admin.list_groups("Reconciling") == []


def test_where_no_group_was_ever_kept_there_is_none_and_no_topic_is_made(cluster: FakeCluster, admin: Admin) -> None:
    assert admin.list_groups() == []
    for question in (admin.describe_group, admin.group_offsets, admin.delete_group):
        with pytest.raises(GroupIdNotFoundError, match="groups list"):
            question("g")
    assert cluster.topics == {}


def test_groups_of_a_broker_that_is_lost_are_listed_by_the_next_coordinator(topics: FakeCluster, admin: Admin) -> None:
    for group in groups_elsewhere(3):
        commit(topics, group, 5)
    topics.kill(1)
    assert len(admin.list_groups()) == 3


def test_a_frozen_broker_holds_the_list_up_only_until_another_one_leads(topics: FakeCluster, admin: Admin) -> None:
    for group in groups_elsewhere(3):
        commit(topics, group, 5)

    def hook(broker: int, request: CallRequest) -> Message | None:
        if broker == 1 and isinstance(request, ListGroupsRequest):
            topics.fence(1)
            ended.wait(60)
        return None

    ended = threading.Event()
    topics.call_hook = hook
    began_s = time.monotonic()
    assert len(admin.list_groups()) == 3
    assert time.monotonic() - began_s < 20
    ended.set()


def test_a_broker_that_does_not_know_yet_that_it_leads_is_asked_again(topics: FakeCluster, admin: Admin) -> None:
    commit(topics, "g", 5)

    def hook(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, ListGroupsRequest) and broker not in asked:
            asked.add(broker)
            return ListGroupsResponse([], [])
        return None

    asked: set[int] = set()
    topics.call_hook = hook
    assert [g.group_id for g in admin.list_groups()] == ["g"]
    assert asked == {0, 1, 2}


def test_a_list_that_would_lack_groups_is_an_error_that_says_whose(topics: FakeCluster) -> None:
    topics.elect(CONSUMER_OFFSETS_TOPIC, 1, -1)
    with impatient(topics) as admin, pytest.raises(CoordinatorNotAvailableError) as raised:
        admin.list_groups()
    assert f"{CONSUMER_OFFSETS_TOPIC}-1 (no broker leads there" in raised.value.message


def test_a_client_that_is_closed_ends_the_wait_for_a_list(topics: FakeCluster) -> None:
    topics.elect(CONSUMER_OFFSETS_TOPIC, 1, -1)
    admin = Admin(topics.bootstrap, retry_backoff_ms=100)

    def hook(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, ListGroupsRequest):
            asked.set()
        return None

    def close() -> None:
        asked.wait(30)
        admin.close()

    asked = threading.Event()
    topics.call_hook = hook
    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(ClosedError):
        admin.list_groups()
    closer.join(30)


def test_a_dead_broker_that_nobody_has_noticed_does_not_hang_the_list(topics: FakeCluster) -> None:
    topics.kill(1, fail_over=False)
    began_s = time.monotonic()
    with impatient(topics, 1000) as admin, pytest.raises(CoordinatorNotAvailableError, match="broker 1: "):
        admin.list_groups()
    assert time.monotonic() - began_s < 10


def test_of_two_coordinators_the_later_one_is_believed(topics: FakeCluster, admin: Admin) -> None:
    """A leader that was deposed may answer, too."""
    number = group_partition("g", 3)

    def hook(broker: int, request: CallRequest) -> Message | None:
        if not isinstance(request, ListGroupsRequest):
            return None
        if broker == 0:
            return ListGroupsResponse([ListedGroup("g", "Stable", 1)], [(0, 0), (1, 0), (2, 0)])
        return ListGroupsResponse([ListedGroup("g", "Empty", 0)], [(number, 7)])

    topics.call_hook = hook
    assert [(g.state, g.members) for g in admin.list_groups()] == [("Empty", 0)]


def test_a_group_is_described_with_its_members_and_rebalances(topics: FakeCluster, admin: Admin) -> None:
    topics.groups.join("g", "m", ABOUT, "instance")
    described = admin.describe_group("g")
    assert (described.state, described.epoch, described.target_epoch) == ("Stable", 1, 1)
    assert described.assignor == "uniform"
    (member,) = described.members
    assert (member.member_id, member.instance_id, member.client_id, member.host) == (
        *("m", "instance", "my client", "my host"),
    )
    assert (member.kind, member.epoch, member.rack, member.pattern) == ("stable", 1, "rack", None)
    assert (member.assigned, member.target, member.revoking) == ((T0, T1), (T0, T1), ())
    assert (member.session_timeout, member.max_poll_interval) == (45.0, 300.0)
    (rebalance,) = described.rebalances
    assert (rebalance.epoch, rebalance.reason) == (1, "m joined")
    assert abs((rebalance.time - datetime.now(UTC)).total_seconds()) < 60
    assert "m joined" in str(rebalance)
    html = described._repr_html_()
    assert "my host" in html
    assert "t-0, t-1" in html


def test_a_frozen_coordinator_is_asked_again_elsewhere(topics: FakeCluster, admin: Admin) -> None:
    commit(topics, "g", 5)

    def hook(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, DescribeGroupRequest) and not topics.fenced:
            topics.fence(broker)
        return None

    topics.call_hook = hook
    assert admin.describe_group("g").state == "Empty"
    assert topics.fenced


def test_the_offsets_of_a_group_have_ends_and_lag(topics: FakeCluster, admin: Admin) -> None:
    topics.groups.join("g", "m", ABOUT)
    commit(topics, "g", 4)
    first, second = admin.group_offsets("g").values()
    assert (first.topic_partition, first.committed, first.start_offset, first.end_offset, first.lag) == (
        T0,
        4,
        0,
        10,
        6,
    )
    assert (first.leader_epoch, first.metadata, first.member_id) == (0, "a note", "m")
    assert (second.topic_partition, second.committed, second.lag, second.member_id) == (T1, None, 0, "m")


def test_offsets_of_partitions_of_choice_need_no_group(topics: FakeCluster, admin: Admin) -> None:
    offsets = admin.group_offsets("nobody", [T0])
    assert [(o.committed, o.lag, o.lag_at(7)) for o in offsets.values()] == [(None, 10, 3)]
    with pytest.raises(UnknownTopicOrPartitionError):
        admin.group_offsets("nobody", [TopicPartition("t", 2)])
    with pytest.raises(GroupIdNotFoundError):
        admin.group_offsets("nobody")


def test_a_partition_whose_leader_does_not_answer_has_no_end(topics: FakeCluster, admin: Admin) -> None:
    commit(topics, "g", 4)
    topics.elect("t", 0, -1)
    (offset,) = admin.group_offsets("g").values()
    assert (offset.committed, offset.end_offset, offset.lag) == (4, None, None)


def test_offsets_of_a_topic_that_is_gone_are_left_out(topics: FakeCluster, admin: Admin) -> None:
    commit(topics, "g", 4)
    topics.create("other")
    topics.committed["g", "other", 0] = CommittedOffset("other", 0, 0)
    del topics.topics["t"]
    assert list(admin.group_offsets("g")) == [TopicPartition("other", 0)]


def test_offsets_are_set_while_the_group_has_no_members(topics: FakeCluster, admin: Admin) -> None:
    admin.alter_group_offsets("g", {T0: 10, T1: OffsetAndMetadata(0, None, "from here on")})
    assert [(o.committed, o.metadata) for o in admin.group_offsets("g").values()] == [(10, ""), (0, "from here on")]
    (request,) = topics.commits
    assert {offset.topic_id for offset in request.offsets} == {topics.topics["t"].topic_id}


def test_more_offsets_than_a_request_holds_are_set_and_deleted(
    topics: FakeCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_admin, "PARTITIONS_AT_ONCE", 1)
    admin.alter_group_offsets("g", {T0: 10, T1: 0})
    assert [len(request.offsets) for request in topics.commits] == [1, 1]
    assert len(admin.group_offsets("g")) == 2
    admin.delete_group_offsets("g", [T0, T1])
    assert topics.committed == {}


def test_an_offset_that_only_the_topics_table_has_can_be_set(topics: FakeCluster, admin: Admin) -> None:
    topic = topics.topics["t"]
    topic.config["delta.path"], topic.history = "/lake/t", HistoryMetadata("a-table", 0, 0, [1, 0], [6, 0], "", 0)
    topic.partitions[0].log_start_offset = 6
    admin.alter_group_offsets("g", {T0: 1})
    (offset,) = admin.group_offsets("g").values()
    assert (offset.start_offset, offset.lag) == (1, 9)
    with pytest.raises(OffsetOutOfRangeError, match="before the first record 1"):
        admin.alter_group_offsets("g", {T0: 0})


def test_offsets_of_a_group_with_members_are_theirs_to_set(topics: FakeCluster, admin: Admin) -> None:
    topics.groups.join("g", "m", ABOUT)
    with pytest.raises(NonEmptyGroupError, match=r"'g' has members.*nothing was changed -> Stop the group's consumers"):
        admin.alter_group_offsets("g", {T0: 3})
    topics.groups.leave("g", "m")
    admin.alter_group_offsets("g", {T0: 3})
    assert topics.committed["g", "t", 0].offset == 3


def test_a_member_that_joins_between_two_parts_does_not_hide_what_was_set(
    topics: FakeCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the error said that nothing was changed, and the group read on from where it had been moved to."""
    monkeypatch.setattr(group_admin, "PARTITIONS_AT_ONCE", 1)

    def joins(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, OffsetCommitRequest) and topics.commits:
            topics.groups.join("g", "m", ABOUT)
        return None

    topics.call_hook = joins
    with pytest.raises(NonEmptyGroupError, match="may have been set before"):
        admin.alter_group_offsets("g", {T0: 3, T1: 0})
    assert list(topics.committed) == [("g", "t", 0)]


def test_a_lost_answer_is_no_sign_that_nothing_was_set(topics: FakeCluster, admin: Admin) -> None:
    def lost(broker: int, request: CallRequest) -> Message | None:
        if not isinstance(request, OffsetCommitRequest) or topics.commits:
            return None
        with topics.changed:
            topics._answer(broker, request)
        topics.groups.join("g", "m", ABOUT)
        raise NetworkError("the answer was lost")

    topics.call_hook = lost
    with pytest.raises(NonEmptyGroupError, match="may have been set before"):
        admin.alter_group_offsets("g", {T0: 3})
    assert topics.committed["g", "t", 0].offset == 3


@pytest.mark.parametrize(("offset", "where"), [(11, "beyond the end 10"), (1, "before the first record 2")])
def test_an_offset_where_no_record_can_be_is_refused(
    topics: FakeCluster, admin: Admin, offset: int, where: str
) -> None:
    topics.topics["t"].partitions[0].log_start_offset = 2
    with pytest.raises(OffsetOutOfRangeError, match=f"{where}; nothing was changed -> Give an offset from 2 to 10"):
        admin.alter_group_offsets("g", {T0: offset, T1: 0})
    assert topics.committed == {}


@pytest.mark.parametrize("tp", [TopicPartition("t", 2), TopicPartition("nowhere", 0)])
def test_offsets_of_a_partition_that_is_not_there_are_refused(
    topics: FakeCluster, admin: Admin, tp: TopicPartition
) -> None:
    with pytest.raises(UnknownTopicOrPartitionError):
        admin.alter_group_offsets("g", {tp: 0})
    with pytest.raises(UnknownTopicOrPartitionError):
        admin.delete_group_offsets("g", [tp])
    admin.alter_group_offsets("g", {})
    assert not [request for _, request in topics.calls if isinstance(request, OffsetCommitRequest)]


def test_groups_are_deleted_and_the_others_are_not(topics: FakeCluster, admin: Admin) -> None:
    commit(topics, "a", 1)
    topics.groups.join("b", "m", ABOUT)
    results = admin.delete_groups(["a", "b", "c", "x" * 300])
    assert [type(results[name]) for name in results] == [
        *(type(None), NonEmptyGroupError, GroupIdNotFoundError, InvalidGroupIdError),
    ]
    assert "has 1 members" in str(results["b"])
    assert topics.committed == {}
    assert admin.list_groups() == [GroupListing("b", "Stable", 1, admin.describe_group("b").coordinator)]


def test_a_group_that_is_named_twice_is_deleted_once(topics: FakeCluster, admin: Admin) -> None:
    """Story: the second deletion found no group, and its error stood for the first."""
    commit(topics, "a", 1)
    assert admin.delete_groups(["a", "a"]) == {"a": None}
    assert topics.committed == {}


def test_offsets_are_deleted_once_also_where_their_group_goes_with_the_first_of_them(
    topics: FakeCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: more partitions than a request holds. The group had offsets in the first only, and was "not there"."""
    monkeypatch.setattr(group_admin, "PARTITIONS_AT_ONCE", 1)
    commit(topics, "g", 1)
    admin.delete_group_offsets("g", [T0, T0, T1])
    assert topics.committed == {}


def test_a_deletion_of_offsets_names_the_topic_that_there_was(topics: FakeCluster, admin: Admin) -> None:
    """So the next try deletes nothing of a topic that was created between the two."""

    def lost(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, DeleteGroupOffsetsRequest):
            asked.append(request.topic_ids)
            if len(asked) == 1:
                raise NetworkError("the answer was lost")
        return None

    asked: list[dict[str, str]] = []
    commit(topics, "g", 1)
    before = topics.topics["t"].topic_id
    topics.call_hook = lost
    admin.delete_group_offsets("g", [T0])
    assert asked == [{"t": before}] * 2


def test_some_offsets_are_deleted_where_nobody_reads(topics: FakeCluster, admin: Admin) -> None:
    topics.create("other")
    commit(topics, "g", 1)
    topics.committed["g", "other", 0] = CommittedOffset("other", 0, 0)
    topics.groups.join("g", "m", ABOUT)
    with pytest.raises(GroupSubscribedToTopicError, match="read t"):
        admin.delete_group_offsets("g", [T0])
    admin.delete_group_offsets("g", [TopicPartition("other", 0)])
    assert list(topics.committed) == [("g", "t", 0)]
    with pytest.raises(GroupIdNotFoundError):
        admin.delete_group_offsets("nobody", [T0])


def test_what_an_open_transaction_may_still_commit_to_is_not_deleted(topics: FakeCluster) -> None:
    commit(topics, "g", 1)
    topics.groups.open_transactions.add("g")
    with impatient(topics) as admin:
        with pytest.raises(UnstableOffsetCommitError):
            admin.delete_group("g")
        with pytest.raises(UnstableOffsetCommitError):
            admin.delete_group_offsets("g", [T0])
    assert list(topics.committed) == [("g", "t", 0)]


@pytest.mark.parametrize(("group_id", "error"), [("", InvalidGroupIdError), ("x" * 250, InvalidGroupIdError)])
def test_an_id_that_no_group_can_have_is_refused(
    topics: FakeCluster, admin: Admin, group_id: str, error: type[Exception]
) -> None:
    for call in (
        *(admin.describe_group, admin.group_offsets, admin.delete_group),
        lambda name: admin.alter_group_offsets(name, {T0: 0}),
        lambda name: admin.delete_group_offsets(name, [T0]),
    ):
        with pytest.raises(error, match="from 1 to 249 characters"):
            call(group_id)


@pytest.mark.parametrize("state", ["stable", "Dead", 1])
def test_a_state_that_no_group_has_is_refused(topics: FakeCluster, admin: Admin, state: str) -> None:
    with pytest.raises(InvalidDataError):
        admin.list_groups([state])
