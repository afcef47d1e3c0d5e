"""The offsets that a group keeps while what its consumers read changes, ends, or comes later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from spark_broker import Admin, Consumer, NewTopic, TopicPartition
from spark_broker.client import committing
from spark_broker.errors import InconsistentTopicIdError, UnknownTopicOrPartitionError
from spark_broker.protocol.messages import (
    CallRequest,
    Message,
    OffsetCommitRequest,
)
from tests.client.fake_broker import FakeCluster, FakePartition
from tests.client.test_consumer import T0, T1, Values, poll_rows, values_of
from tests.support.waiting import eventually


def member(cluster: FakeCluster, *topics: str, **settings: object) -> Consumer:
    return Consumer(cluster.bootstrap, topics=topics or ["t"], config={"group.id": "g", **settings})


def alone(cluster: FakeCluster, **settings: object) -> Consumer:
    """It assigns its own partitions."""
    return Consumer(cluster.bootstrap, config={"group.id": "g", "auto.offset.reset": "earliest", **settings})


def stored(cluster: FakeCluster, partition: TopicPartition = T0) -> int | None:
    with alone(cluster) as other:
        offset = other.committed(partition)
        return None if offset is None else offset.offset


def commits_of(cluster: FakeCluster) -> list[OffsetCommitRequest]:
    """Those that come from now on."""
    sent: list[OffsetCommitRequest] = []

    def note(_: int, request: CallRequest) -> Message | None:
        if isinstance(request, OffsetCommitRequest):
            sent.append(request)
        return None

    cluster.call_hook = note
    return sent


@pytest.mark.parametrize(
    "change",
    [lambda consumer: consumer.assign([T1]), Consumer.unsubscribe, lambda consumer: consumer.subscribe(["other"])],
    ids=["assign", "unsubscribe", "subscribe"],
)
def test_positions_of_partitions_that_a_consumer_gives_up_are_committed(
    cluster: FakeCluster, values: Values, change: Callable[[Consumer], None]
) -> None:
    """Story: they were thrown away. The next consumer of the group began at the end, or read everything again."""
    cluster.create("t", 2)
    cluster.create("other")
    cluster.store("t", 0, values("a", "b"))
    with alone(cluster) as consumer:
        consumer.assign([T0])
        poll_rows(consumer, 2)
        change(consumer)
    assert stored(cluster) == 2


@pytest.mark.parametrize("is_member", [False, True])
def test_a_commit_for_which_nobody_waits_is_stored_before_the_consumer_ends(
    cluster: FakeCluster, values: Values, is_member: bool
) -> None:
    """Story: the end of the `with` block threw it away, without a word."""
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    settings = {"enable.auto.commit": False, "auto.offset.reset": "earliest"}
    with member(cluster, **settings) if is_member else alone(cluster, **settings) as consumer:
        if not is_member:
            consumer.assign([T0])
        poll_rows(consumer, 1)
        consumer.commit_async()
    assert stored(cluster) == 1


def test_an_offset_that_does_not_change_is_stored_again(
    cluster: FakeCluster, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: a partition was quiet for a week. The coordinator forgot the offset of a consumer that went on polling,
    which took it for stored.
    """
    monkeypatch.setattr(committing, "RENEW_S", 0.0)
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with alone(cluster, **{"auto.commit.interval.ms": 10}) as consumer:
        consumer.assign([T0])
        poll_rows(consumer, 1)
        eventually(lambda: consumer.poll(0.0) == [] and stored(cluster) == 1, 10, "the first commit")
        sent = commits_of(cluster)
        eventually(lambda: consumer.poll(0.0) == [] and len(sent) >= 2, 10, "the same offset is sent again and again")


def test_the_same_offset_of_another_topic_of_the_name_is_stored(cluster: FakeCluster, values: Values) -> None:
    """Story: the nightly reload had as many records as the day before. Its offset was taken for stored."""
    sent = commits_of(cluster)
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with alone(cluster, **{"auto.commit.interval.ms": 10}) as consumer, Admin(cluster.bootstrap) as admin:
        consumer.assign([T0])
        poll_rows(consumer, 1)
        eventually(lambda: consumer.poll(0.0) == [] and sent, 10, "the first commit")
        admin.delete_topic("t")
        admin.create_topic(NewTopic("t", 1, 1))
        cluster.store("t", 0, values("b"))
        with pytest.raises((InconsistentTopicIdError, UnknownTopicOrPartitionError)):
            eventually(lambda: consumer.poll(0.2) and False, 20, "the error")
        sent.clear()
        consumer.seek_to_beginning(T0)
        assert values_of(poll_rows(consumer, 1)) == ["b"]
        topic_id = admin.describe_topic("t").topic_id
    (one,) = sent[-1].offsets
    assert (one.topic_id, one.offset) == (topic_id, 1)


@pytest.mark.full
def test_a_seek_counts_for_no_partition_that_another_member_has_read_meanwhile(
    cluster: FakeCluster, values: Values
) -> None:
    """Story: `seek_to_end` of a member that had another topic's partition. The one that came hours later began at its
    end, and what its last reader had not committed was read by nobody.
    """
    topics = ("ta", "tb")
    for topic in topics:
        cluster.create(topic)
    settings = {"auto.offset.reset": "earliest", "enable.auto.commit": False}
    with member(cluster, *topics, **settings) as stays, member(cluster, *topics, **settings) as goes:

        def share() -> bool:
            for consumer in (stays, goes):
                consumer.poll(0.05)
            return len(stays.assignment()) == len(goes.assignment()) == 1

        eventually(share, 30, "each has one")
        stays.seek_to_end()
        (partition,) = goes.assignment()
        cluster.store(partition.topic, 0, values("a", "b", "c"))
        poll_rows(goes, 3)
        goes.commit({partition: 1})
        goes.close()
        assert values_of(poll_rows(stays, 2)) == ["b", "c"]


def idle_and_busy(cluster: FakeCluster) -> tuple[Consumer, Consumer]:
    """Two members, of which the second has no partition of a topic that has one."""
    first, second = member(cluster), member(cluster)

    def share() -> bool:
        first.poll(0.05), second.poll(0.05)
        return sorted(map(len, (first.assignment(), second.assignment()))) == [0, 1]

    eventually(share, 30, "one has it")
    return (first, second) if first.assignment() else (second, first)


def test_a_partition_that_is_added_is_read_from_its_first_record_whoever_gets_it(
    cluster: FakeCluster, values: Values
) -> None:
    """Story: it went to a member that had nothing of the topic, and began at its end there."""
    cluster.create("t")
    busy, idle = idle_and_busy(cluster)
    with busy, idle, Admin(cluster.bootstrap) as admin:
        admin.create_partitions("t", 2)
        cluster.store("t", 1, values("first"))

        def reads() -> bool:
            return any(batch.partition == 1 for consumer in (busy, idle) for batch in consumer.poll(0.05))

        eventually(reads, 30, "the first record")


@pytest.mark.full
def test_a_topic_that_is_created_again_is_read_from_its_beginning(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    with member(cluster) as consumer, Admin(cluster.bootstrap) as admin:
        assert consumer.position(T0) == 0
        admin.delete_topic("t")
        admin.create_topic(NewTopic("t", 1, 1))
        cluster.store("t", 0, values("first"))
        found: list[object] = []

        def reads() -> bool:
            with contextlib.suppress(InconsistentTopicIdError, UnknownTopicOrPartitionError):
                found.extend(values_of(consumer.poll(0.2)))
            return bool(found)

        eventually(reads, 30, "the new topic's record")


OTHER = TopicPartition("other", 0)
LATE = TopicPartition("late", 0)


@pytest.mark.parametrize(
    ("begin", "group"),
    [
        (lambda consumer: consumer.subscribe(["late", "other"]), "g"),
        (lambda consumer: consumer.subscribe(pattern="late|other"), "g"),
        (lambda consumer: consumer.subscribe(["late", "other"]), ""),
        (lambda consumer: consumer.assign([LATE, OTHER]), "g"),
        (lambda consumer: consumer.assign([LATE, OTHER]), ""),
    ],
    ids=["names", "pattern", "names without a group", "assigned for a group", "assigned"],
)
def test_a_topic_that_is_created_later_is_read_from_its_first_record(
    cluster: FakeCluster, values: Values, begin: Callable[[Consumer], None], group: str
) -> None:
    """Story: it began at the end that it had when the consumer noticed it, and what had come before was passed."""
    cluster.create("other")
    with Consumer(cluster.bootstrap, group_id=group) as consumer:
        begin(consumer)
        assert consumer.position(OTHER) == 0, "metadata has come"
        cluster.create("late")
        cluster.store("late", 0, values("a", "b"))
        assert values_of(poll_rows(consumer, 2)) == ["a", "b"]


def test_a_partition_that_is_assigned_before_it_is_there_is_read_from_its_first_record(
    cluster: FakeCluster, values: Values
) -> None:
    cluster.create("t")
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([T0, T1])
        assert consumer.position(T0) == 0, "metadata has come"
        cluster.topics["t"].partitions.append(FakePartition(1))
        cluster.store("t", 1, values("a"))
        assert values_of(poll_rows(consumer, 1), partition=1) == ["a"]


def test_a_seek_to_the_end_counts_for_a_topic_that_is_created_later(cluster: FakeCluster, values: Values) -> None:
    cluster.create("other")
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([LATE, OTHER])
        consumer.seek_to_end(LATE)
        assert consumer.position(OTHER) == 0, "metadata has come"
        cluster.create("late")
        cluster.store("late", 0, values("a", "b"))
        assert consumer.position(LATE) == 2
