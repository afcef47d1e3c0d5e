"""KIP-320: a reader that knows the leader epoch of what it read notices when the log was cut below that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pytest

from spark_broker import Consumer, OffsetAndMetadata, TopicPartition
from spark_broker.client.partition_position import PartitionPosition, Prefetched, Start
from spark_broker.core.divergence import Diverging
from spark_broker.errors import LogTruncationError, OffsetOutOfRangeError
from spark_broker.model import NO_EPOCH
from tests.client.fake_broker import FakeCluster
from tests.client.test_consumer import poll_error, poll_rows, values_of

Values = Callable[..., pa.RecordBatch]
T0 = TopicPartition("t", 0)


@pytest.fixture
def topic(cluster: FakeCluster, values: Values) -> FakeCluster:
    """Offsets 0 to 3, a batch each."""
    cluster.create("t")
    for name in "abcd":
        cluster.store("t", 0, values(name))
    return cluster


def truncation(consumer: Consumer) -> LogTruncationError:
    error = poll_error(consumer, LogTruncationError)
    assert isinstance(error, LogTruncationError)
    return error


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_a_cut_below_the_position_is_told_once_and_reading_goes_on_where_the_log_parts(
    topic: FakeCluster, values: Values, reset: str
) -> None:
    with Consumer(topic.bootstrap, auto_offset_reset=reset) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 0)
        poll_rows(consumer, 4)
        topic.cut("t", 0, 2)
        topic.store("t", 0, values("x", "y", "z"))
        assert truncation(consumer).divergent_offset == 2
        assert consumer.position(T0) == 2
        assert values_of(poll_rows(consumer, 3)) == ["x", "y", "z"]


def test_without_a_reset_policy_the_caller_decides_where_to_go_on(topic: FakeCluster, values: Values) -> None:
    with Consumer(topic.bootstrap, auto_offset_reset="none") as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 0)
        poll_rows(consumer, 4)
        topic.cut("t", 0, 2)
        topic.store("t", 0, values("x", "y", "z"))
        for _ in range(3):
            assert truncation(consumer).divergent_offset == 2
        assert consumer.position(T0) == 4
        consumer.seek(T0, 2)
        assert values_of(poll_rows(consumer, 3)) == ["x", "y", "z"]


def test_a_truncation_is_an_offset_out_of_range_for_those_who_know_no_other(topic: FakeCluster) -> None:
    with Consumer(topic.bootstrap, auto_offset_reset="none") as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 0)
        poll_rows(consumer, 4)
        topic.cut("t", 0, 2)
        assert isinstance(poll_error(consumer, OffsetOutOfRangeError), LogTruncationError)


def test_a_log_that_was_cut_at_the_position_or_above_goes_on_unnoticed(topic: FakeCluster, values: Values) -> None:
    with Consumer(topic.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        poll_rows(consumer, 4)
        topic.store("t", 0, values("lost"))
        topic.elect("t", 0, 1)
        values_of(poll_rows(consumer, 1))
        topic.cut("t", 0, 5)
        topic.store("t", 0, values("next"))
        assert values_of(poll_rows(consumer, 1)) == ["next"]


def test_the_log_parts_where_an_epoch_ends_that_both_have(topic: FakeCluster, values: Values) -> None:
    """The reader's records of the lost epoch begin below the end that the epoch before it has at the new leader."""
    with Consumer(topic.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        poll_rows(consumer, 4)
        part = topic.topics["t"].partitions[0]
        before = list(part.log)
        topic.elect("t", 0, 1)
        topic.store("t", 0, values("e1"))
        topic.store("t", 0, values("e1"))
        poll_rows(consumer, 2)
        with topic.changed:
            # A replica that had more of epoch 0 than its successor ever saw, and nothing of epoch 1.
            part.log = before
            part.leader_epoch = 0
            topic.store("t", 0, values("more"))
            part.leader_epoch = 2
        topic.store("t", 0, values("e2", "e2"))
        assert truncation(consumer).divergent_offset == 4
        assert values_of(poll_rows(consumer, 3)) == ["more", "e2", "e2"]


def test_a_committed_offset_is_compared_when_its_group_goes_on(topic: FakeCluster, values: Values) -> None:
    """KAFKA-20507: the truncation came while no consumer of the group was open."""
    with Consumer(topic.bootstrap, group_id="g", topics="t", auto_offset_reset="earliest") as consumer:
        poll_rows(consumer, 4)
    topic.cut("t", 0, 2)
    topic.store("t", 0, values("x", "y", "z"))
    with Consumer(topic.bootstrap, group_id="g", topics="t", auto_offset_reset="earliest") as consumer:
        assert truncation(consumer).divergent_offset == 2
        assert values_of(poll_rows(consumer, 3)) == ["x", "y", "z"]
    with Consumer(topic.bootstrap, group_id="g", topics="t", auto_offset_reset="earliest") as consumer:
        assert consumer.position(T0) == 5


def test_whoever_resumes_is_notified_of_a_truncation_that_came_before_the_last_commits(
    topic: FakeCluster, values: Values
) -> None:
    """A commit after a truncation is noticed, but before poll raises it, must not hide it."""
    settings = {"enable.auto.commit": False, "auto.offset.reset": "earliest"}
    with Consumer(topic.bootstrap, group_id="g", topics="t", config=settings) as consumer:
        poll_rows(consumer, 4)
        topic.cut("t", 0, 2)
        topic.store("t", 0, values("x", "y", "z"))
        for _ in range(100):  # the truncation is noticed during these
            consumer.commit()
    assert topic.committed["g", "t", 0].offset == 4
    with Consumer(topic.bootstrap, group_id="g", topics="t", auto_offset_reset="earliest") as consumer:
        assert truncation(consumer).divergent_offset == 2
        assert values_of(poll_rows(consumer, 3)) == ["x", "y", "z"]


def test_a_second_cut_that_reaches_further_back_is_noticed_as_far_back() -> None:
    """Story: two unclean elections, the second of which brought back the log of an older leader."""
    state = PartitionPosition(T0, None, Start.EARLIEST)
    state.move_to(0)
    for divergent, read, diverging, told in (
        (0, [(2, 59), (4, 62), (6, 77)], Diverging(4, 62), 62),
        (62, [(8, 80)], Diverging(2, 78), 59),
    ):
        assert state.position == divergent
        state.add(Prefetched(None, end, epoch, 1) for epoch, end in read)
        state.take()
        state.truncated(diverging)
        error = state.notify_truncation()
        assert error is not None
        assert error.divergent_offset == told
    assert state.fetched_epoch == 2


def test_a_reader_that_resumed_knows_the_epoch_before_the_place_to_which_it_was_cut() -> None:
    """It has read nothing before its first position: the leader has said which epoch ends there."""
    state = PartitionPosition(T0, Start.COMMITTED, Start.EARLIEST)
    state.move_to(23, leader_epoch=3)
    state.truncated(Diverging(2, 14))
    assert state.notify_truncation() is not None
    assert state.to_commit == OffsetAndMetadata(14, 2)
    assert state.fetched_epoch == 2


def test_a_leader_that_knows_no_epoch_before_the_cut_names_none() -> None:
    state = PartitionPosition(T0, Start.COMMITTED, Start.EARLIEST)
    state.move_to(23, leader_epoch=3)
    state.truncated(Diverging(NO_EPOCH, 14))
    assert state.notify_truncation() is not None
    assert state.to_commit == OffsetAndMetadata(14, None)


def test_a_group_that_resumed_and_was_cut_is_notified_of_the_next_cut(topic: FakeCluster, values: Values) -> None:
    """Story: two unclean elections; between them the group had committed where the first one had left it."""
    resumed = partial(Consumer, topic.bootstrap, group_id="g", topics="t", auto_offset_reset="earliest")
    with resumed() as consumer:
        poll_rows(consumer, 4)
    topic.cut("t", 0, 2)
    with resumed() as consumer:
        assert truncation(consumer).divergent_offset == 2
    topic.cut("t", 0, 1)
    topic.store("t", 0, values("x", "y", "z"))
    with resumed() as consumer:
        assert truncation(consumer).divergent_offset == 1
        assert values_of(poll_rows(consumer, 3)) == ["x", "y", "z"]


def test_a_leader_that_cannot_have_heard_of_the_committed_epoch_is_not_asked() -> None:
    """KAFKA-20507: metadata lags behind what the group has committed."""
    state = PartitionPosition(T0, Start.COMMITTED, Start.EARLIEST)
    state.move_to(4, leader_epoch=3)
    assert not state.may_fetch(2, now_ms=0.0)
    assert state.may_fetch(3, now_ms=0.0)


def test_a_position_at_the_end_that_read_nothing_yet_is_compared_too(topic: FakeCluster, values: Values) -> None:
    with Consumer(topic.bootstrap, auto_offset_reset="latest") as consumer:
        consumer.assign([T0])
        assert consumer.position(T0) == 4
        topic.cut("t", 0, 2)
        topic.store("t", 0, values("x", "y", "z"))
        assert truncation(consumer).divergent_offset <= 3
        assert values_of(poll_rows(consumer, 1))[-1] == "z"


def test_an_offset_kept_elsewhere_is_compared_when_its_epoch_was_kept_with_it(
    topic: FakeCluster, values: Values
) -> None:
    topic.cut("t", 0, 2)
    topic.store("t", 0, values("x", "y", "z"))
    with Consumer(topic.bootstrap, auto_offset_reset="none") as consumer:
        consumer.assign([T0])
        consumer.seek(T0, OffsetAndMetadata(4, leader_epoch=0))
        assert truncation(consumer).divergent_offset == 2
        consumer.seek(T0, 4)
        assert values_of(poll_rows(consumer, 1)) == ["z"]


def test_what_was_fetched_before_the_cut_is_handed_out_first(topic: FakeCluster, values: Values) -> None:
    with Consumer(topic.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        first = poll_rows(consumer, 4)
        assert values_of(first) == list("abcd")
        topic.cut("t", 0, 1)
        topic.store("t", 0, values("x"))
        assert truncation(consumer).divergent_offset == 1
        assert values_of(poll_rows(consumer, 1)) == ["x"]


def test_a_retained_log_start_is_no_truncation(topic: FakeCluster) -> None:
    """Records before the position are gone by retention, with the epochs that wrote them."""
    with Consumer(topic.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        poll_rows(consumer, 4)
        part = topic.topics["t"].partitions[0]
        with topic.changed:
            part.log, part.log_start_offset = [], 4
        topic.elect("t", 0, 1)
        assert consumer.poll(0.3) == []
        assert consumer.position(T0) == 4
