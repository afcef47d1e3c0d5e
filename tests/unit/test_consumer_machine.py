"""The consumer's rules, without thread, clock or socket: events and the time in, effects out."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

import pyarrow as pa
import pytest

from spark_broker.client.cluster_view import ClusterView, TopicView
from spark_broker.client.consumer_effects import (
    BreakFetch,
    CommitOffsets,
    Effect,
    FetchCommitted,
    FollowLeader,
    LeaveLeader,
    LookUpOffsets,
    RefreshMetadata,
)
from spark_broker.client.consumer_machine import ConsumerMachine
from spark_broker.client.fetch_machine import Fetch, FetchAnswer
from spark_broker.client.partition_position import Prefetched
from spark_broker.client.retry import Backoff
from spark_broker.config import ConsumerConfig
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InconsistentTopicIdError,
    LogTruncationError,
    NetworkError,
    NotLeaderOrFollowerError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import ConsumedBatch, OffsetAndMetadata, TopicPartition
from spark_broker.protocol.messages import BrokerMetadata, FetchedPartition, ListedOffset, PartitionMetadata

E = TypeVar("E")

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
EARLIEST = "earliest"


def view(*leaders: tuple[int, int], topic_id: str = "id", brokers: int = 3) -> ClusterView:
    """A topic `t`; each partition is given as its leader and leader epoch."""
    partitions = tuple(
        PartitionMetadata(number, leader, epoch, [0, 1, 2], [0, 1, 2], epoch)
        for number, (leader, epoch) in enumerate(leaders)
    )
    return ClusterView(
        brokers={n: BrokerMetadata(n, f"b{n}", 9092, None, 1, 0, "", 0, False) for n in range(brokers)},
        topics={"t": TopicView("t", topic_id, partitions, (), {})} if partitions else {},
    )


class Rig:
    """A machine for which the test plays the brokers and the clock."""

    def __init__(self, **settings: object) -> None:
        config = ConsumerConfig(**{"auto_offset_reset": "earliest", "retry_backoff_ms": 100, **settings})  # type: ignore[arg-type]
        self.machine = ConsumerMachine(config, None, Backoff(100, 100, rng=random.Random(1)))
        self.now_ms = 1000.0

    def step(self) -> list[Effect]:
        return self.machine.step(self.now_ms)

    def only(self, kind: type[E]) -> E:
        """The one effect of this kind in the next step."""
        (effect,) = [effect for effect in self.step() if isinstance(effect, kind)]
        return effect

    def metadata(self, cluster: ClusterView) -> list[Effect]:
        self.only(RefreshMetadata)
        self.machine.metadata_came(cluster, self.now_ms)
        return self.step()

    def reading(self, offset: int = 0, epoch: int = -1) -> Rig:
        """Position the consumer at an offset of `t-0`, which broker 0 leads in epoch 0."""
        self.machine.assign([T0])
        self.machine.seek(T0, OffsetAndMetadata(offset, epoch))
        self.metadata(view((0, 0)))
        return self

    def fetch(self, broker_id: int = 0) -> Fetch:
        fetch = self.machine.leaders.next_fetch(broker_id, self.now_ms)
        assert fetch is not None
        return fetch

    def answer(self, fetch: Fetch, next_offset: int, epoch: int = 0, broker_id: int = 0) -> None:
        """One batch up to `next_offset`."""
        (target,) = fetch.targets.values()
        batch = Prefetched(_no_batch, next_offset, epoch, 10)
        response = FetchedPartition(*target.key, 0, leader_epoch=epoch, length=10, next_offset=next_offset)
        self.machine.leaders.fetched(broker_id, fetch, [FetchAnswer(target, response, [batch])], self.now_ms)

    def refuse(self, fetch: Fetch, error: Exception, broker_id: int = 0) -> None:
        (target,) = fetch.targets.values()
        diverging = (-1, -1)
        if isinstance(error, LogTruncationError):
            diverging = (error.diverging_epoch, error.divergent_offset)
        response = FetchedPartition(*target.key, 1, diverging_epoch=diverging[0], diverging_end_offset=diverging[1])
        self.machine.leaders.fetched(broker_id, fetch, [FetchAnswer(target, response, error=error)], self.now_ms)  # type: ignore[arg-type]

    def truncate(self) -> None:
        """Read up to 10 in epoch 0, then a leader of epoch 1 whose log diverges at 4."""
        self.answer(self.fetch(), 10)
        self.machine.poll()
        self.refuse(self.fetch(), LogTruncationError("", divergent_offset=4, diverging_epoch=0))


def _no_batch() -> ConsumedBatch:
    """Stands in for one whose rows do not matter."""
    rows = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
    return ConsumedBatch("t", 0, 0, rows, 0, datetime(2026, 1, 1, tzinfo=UTC), pa.nulls(0))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_subscribed_topic_is_asked_for_then_its_first_offsets_then_its_leaders_are_fetched_from(rig: Rig) -> None:
    rig.machine.subscribe(["t"])
    assert rig.only(RefreshMetadata).topics == {"t"}
    assert rig.step() == []
    rig.machine.metadata_came(view((0, 0), (1, 0)), rig.now_ms)
    effects = rig.step()
    assert {effect.broker_id for effect in effects if isinstance(effect, FollowLeader)} == {0, 1}
    (asked,) = [effect for effect in effects if isinstance(effect, LookUpOffsets)]
    assert asked.moments == {T0: EARLIEST, T1: EARLIEST}
    assert rig.machine.leaders.next_fetch(0, rig.now_ms) is None
    info = {tp: ListedOffset("id", tp.partition, 0, offset=5, last_epoch=0) for tp in (T0, T1)}
    rig.machine.offsets_came(asked, info, {}, rig.now_ms)
    assert [(p.partition, p.offset, p.last_fetched_epoch) for p in rig.fetch().request.partitions] == [(0, 5, 0)]
    assert rig.machine.leaders.next_fetch(0, rig.now_ms) is None, "one at a time"


def test_a_topic_that_is_missing_does_not_keep_others_from_their_first_positions(rig: Rig) -> None:
    """Found by the simulator while the machine was new."""
    rig.machine.subscribe(["t", "missing"])
    effects = rig.metadata(view((0, 0)))
    assert any(isinstance(effect, LookUpOffsets) for effect in effects)
    assert rig.machine.checks.errors == {}
    for _ in range(10):
        rig.now_ms += 200
        for effect in rig.step():
            if isinstance(effect, RefreshMetadata):
                rig.machine.metadata_came(view((0, 0)), rig.now_ms)
    # The lookup is still under way: it was not forgotten, and no second one was started.
    assert rig.machine.partitions[T0].start is not None


def test_lookups_that_fail_are_made_again_after_a_back_off_with_new_metadata(rig: Rig) -> None:
    rig.machine.subscribe(["t"])
    (asked,) = [effect for effect in rig.metadata(view((0, 0))) if isinstance(effect, LookUpOffsets)]
    rig.machine.offsets_came(asked, {}, {T0: NotLeaderOrFollowerError("moved")}, rig.now_ms)
    assert not any(isinstance(effect, LookUpOffsets) for effect in rig.metadata(view((1, 1))))
    assert rig.now_ms < rig.machine.wake_ms(rig.now_ms) <= rig.now_ms + 120
    rig.now_ms = rig.machine.wake_ms(rig.now_ms)
    assert rig.only(LookUpOffsets).moments == {T0: EARLIEST}


def test_a_seek_during_a_lookup_wins(rig: Rig) -> None:
    rig.machine.subscribe(["t"])
    (asked,) = [effect for effect in rig.metadata(view((0, 0))) if isinstance(effect, LookUpOffsets)]
    rig.machine.seek(T0, OffsetAndMetadata(7))
    rig.machine.offsets_came(asked, {T0: ListedOffset("id", 0, 0, offset=5)}, {}, rig.now_ms)
    assert rig.machine.partitions[T0].position == 7


def test_a_group_begins_where_it_committed_and_elsewhere_where_the_reset_says() -> None:
    rig = Rig(group_id="g")
    rig.machine.subscribe(["t"])
    (asked,) = [effect for effect in rig.metadata(view((0, 3), (1, 0))) if isinstance(effect, FetchCommitted)]
    rig.machine.committed_came(asked, {T0: OffsetAndMetadata(9, 3)}, rig.now_ms)
    (target,) = rig.fetch().targets.values()
    assert (target.offset, target.read_epoch) == (9, 3)
    (lookup,) = [effect for effect in rig.metadata(view((0, 3), (1, 0))) if isinstance(effect, LookUpOffsets)]
    assert lookup.moments == {T1: EARLIEST}


def test_a_leader_that_cannot_have_heard_of_the_committed_epoch_is_not_asked(rig: Rig) -> None:
    rig.reading(9, epoch=3)
    assert rig.machine.leaders.next_fetch(0, rig.now_ms) is None
    rig.now_ms += 200
    rig.metadata(view((0, 3)))
    assert rig.fetch().request.partitions[0].leader_epoch == 3


def test_a_leader_that_moved_is_fetched_from_at_once_and_the_old_one_after_a_back_off(rig: Rig) -> None:
    rig.reading()
    rig.refuse(rig.fetch(), NotLeaderOrFollowerError("moved"))
    assert rig.machine.leaders.next_fetch(0, rig.now_ms) is None
    effects = rig.metadata(view((1, 1)))
    assert [type(effect) for effect in effects] == [LeaveLeader, FollowLeader]
    assert rig.fetch(1).request.partitions[0].leader_epoch == 1


def test_a_stream_that_broke_backs_its_partitions_off(rig: Rig) -> None:
    rig.reading()
    assert rig.machine.leaders.fetch_failed(0, rig.fetch(), NetworkError("broken"), rig.now_ms)
    assert rig.machine.leaders.next_fetch(0, rig.now_ms) is None
    rig.metadata(view((0, 0)))
    rig.now_ms = rig.machine.wake_ms(rig.now_ms)
    assert rig.fetch().targets


def test_a_seek_breaks_the_long_poll_and_its_answer_is_thrown_away(rig: Rig) -> None:
    rig.reading()
    fetch = rig.fetch()
    rig.machine.seek(T0, OffsetAndMetadata(3))
    assert rig.step() == [BreakFetch(0)]
    rig.answer(fetch, 10)
    assert rig.machine.poll() == ([], False)
    assert not rig.machine.leaders.fetch_failed(0, fetch, NetworkError("closed"), rig.now_ms)
    assert rig.fetch().request.partitions[0].offset == 3


def test_a_leader_that_does_not_answer_makes_metadata_suspect(rig: Rig) -> None:
    rig.reading()
    fetch = rig.fetch()
    rig.now_ms = fetch.due_ms + 400
    assert rig.step() == []
    rig.now_ms = rig.machine.wake_ms(rig.now_ms) + 1
    assert rig.only(RefreshMetadata).topics == {"t"}


def test_an_offset_out_of_range_is_judged_when_what_was_fetched_before_is_used_up(rig: Rig) -> None:
    rig.reading()
    rig.answer(rig.fetch(), 10)
    rig.refuse(rig.fetch(), OffsetOutOfRangeError("no"))
    assert rig.machine.partitions[T0].position == 0
    assert rig.machine.poll()[1]
    rig.now_ms += 200
    rig.refuse(rig.fetch(), OffsetOutOfRangeError("no"))
    (lookup,) = rig.metadata(view((0, 0)))
    assert isinstance(lookup, LookUpOffsets), "once metadata is there that knows of the deletion"
    assert lookup.moments == {T0: EARLIEST}


def test_a_paused_partition_is_not_fetched(rig: Rig) -> None:
    rig.reading()
    rig.machine.pause(T0, paused=True)
    assert rig.machine.leaders.next_fetch(0, rig.now_ms) is None
    rig.machine.pause(T0, paused=False)
    assert rig.fetch().targets


def test_a_closed_machine_leaves_its_leaders_and_begins_nothing(rig: Rig) -> None:
    rig.reading()
    rig.machine.close()
    assert rig.step() == [LeaveLeader(0)]
    rig.now_ms += 1e9
    assert rig.step() == []
    assert rig.machine.leaders.next_fetch(0, rig.now_ms) is None


def test_a_truncation_is_notified_of_once_and_fetches_wait_for_it(rig: Rig) -> None:
    rig.reading()
    rig.truncate()
    assert rig.machine.leaders.next_fetch(0, rig.now_ms) is None
    with pytest.raises(LogTruncationError) as raised:
        rig.machine.poll()
    assert raised.value.divergent_offset == 4
    assert rig.machine.poll() == ([], False)
    (target,) = rig.fetch().targets.values()
    assert (target.offset, target.read_epoch) == (4, 0)


def test_what_is_committed_lies_before_a_truncation_that_nobody_is_notified_of(rig: Rig) -> None:
    """If the process ends between the commit and the next poll, the consumer that resumes is notified."""
    rig.reading()
    rig.truncate()
    assert rig.machine.positions_to_commit() == {T0: OffsetAndMetadata(10, 0)}
    with pytest.raises(LogTruncationError):
        rig.machine.poll()
    assert rig.machine.positions_to_commit() == {T0: OffsetAndMetadata(4, 0)}


def test_a_topic_that_is_missing_for_longer_than_a_broker_lags_is_an_error_until_it_is_there(rig: Rig) -> None:
    rig.machine.subscribe(["t"])
    rig.metadata(view())
    assert rig.machine.poll() == ([], False)
    rig.now_ms += 1100
    rig.metadata(view())
    assert rig.machine.stands_still
    with pytest.raises(UnknownTopicOrPartitionError, match="'t'"):
        rig.machine.raise_error()
    rig.now_ms += 1100
    rig.metadata(view((0, 0)))
    assert rig.machine.poll() == ([], False)


def recreated(rig: Rig) -> None:
    """The topic was deleted and created again, so long ago that the consumer believes it."""
    rig.reading(5, epoch=0)
    for _ in range(2):
        rig.now_ms += 300_001
        rig.metadata(view((0, 0), topic_id="another"))
        rig.now_ms += 1100


def test_a_topic_that_was_created_again_is_not_read_as_the_old_one(rig: Rig) -> None:
    recreated(rig)
    assert rig.machine.leaders.next_fetch(0, rig.now_ms) is None
    assert rig.machine.stands_still
    with pytest.raises(InconsistentTopicIdError):
        rig.machine.raise_error()


@pytest.mark.parametrize(
    "begin", [lambda machine: machine.seek(T0, OffsetAndMetadata(0))], ids=["an offset of the new topic"]
)
def test_a_consumer_starts_again_from_the_new_topics_offsets(
    rig: Rig, begin: Callable[[ConsumerMachine], None]
) -> None:
    recreated(rig)
    begin(rig.machine)
    assert rig.machine.poll() == ([], False)
    assert rig.fetch().request.partitions[0].topic_id == "another"


def test_commits_go_out_one_at_a_time_and_older_ones_that_nobody_waits_for_are_left_out() -> None:
    rig = Rig(group_id="g")
    offsets = [{T0: OffsetAndMetadata(n)} for n in range(4)]
    rig.machine.commit_later(offsets[0], 0.0)
    first = rig.only(CommitOffsets)
    rig.machine.commit_later(offsets[1], 0.0)
    rig.machine.commit_later(offsets[2], 0.0)
    assert rig.step() == []
    rig.machine.commit_ended(first)
    second = rig.only(CommitOffsets)
    assert (first.offsets, second.offsets) == (offsets[0], offsets[2])
    waited_for = rig.machine.commit(offsets[3], 0.0)
    rig.machine.commit_ended(second)
    assert rig.only(CommitOffsets) is waited_for
    rig.machine.commit_ended(waited_for)
    assert waited_for.done
    rig.machine.commit_later(offsets[3], 0.0)
    assert rig.step() == [], "it is committed already"


def test_a_commit_that_is_under_way_is_made_again_behind_another_one_that_waits() -> None:
    """Story: read, seek back, commit: the third commit was left out, and the group went on at the second."""
    rig = Rig(group_id="g")
    ten, twenty = {T0: OffsetAndMetadata(10)}, {T0: OffsetAndMetadata(20)}
    rig.machine.commit_later(ten, 0.0)
    first = rig.only(CommitOffsets)
    rig.machine.commit_later(twenty, 0.0)
    rig.machine.commit_later(ten, 0.0)
    rig.machine.commit_ended(first)
    last = [effect for effect in rig.step() if isinstance(effect, CommitOffsets)]
    for commit in last:
        rig.machine.commit_ended(commit)
    assert (rig.machine.committed, rig.step()) == (ten, [])


def test_what_waits_is_not_what_a_close_commits() -> None:
    rig = Rig(group_id="g").reading(20, epoch=0)
    ten, twenty = {T0: OffsetAndMetadata(10)}, {T0: OffsetAndMetadata(20)}
    for offsets in (ten, twenty):
        rig.machine.commit_later(offsets, 0.0)
        if offsets is ten:
            rig.machine.commit_ended(rig.only(CommitOffsets))
    rig.machine.seek(T0, ten[T0])
    assert rig.machine.uncommitted_positions() == ten


def test_an_assigned_partition_that_is_newer_than_the_metadata_is_read_once_the_metadata_has_it(rig: Rig) -> None:
    """Story: it was an error at once, and for good."""
    rig.machine.assign([T1])
    rig.metadata(view((0, 0)))
    assert not rig.machine.stands_still
    rig.now_ms += 1100
    rig.metadata(view((0, 0)))
    with pytest.raises(UnknownTopicOrPartitionError, match="has 1 partitions"):
        rig.machine.raise_error()
    rig.now_ms += 1100
    effects = rig.metadata(view((0, 0), (0, 0)))
    assert not rig.machine.stands_still
    assert [effect.moments for effect in effects if isinstance(effect, LookUpOffsets)] == [{T1: EARLIEST}]


def test_what_a_failed_commit_has_stored_is_not_known() -> None:
    """Simulator, seed 403128: when the position is back where it was, the consumer must commit again."""
    rig = Rig(group_id="g")
    before, after = {T0: OffsetAndMetadata(1)}, {T0: OffsetAndMetadata(2)}
    rig.machine.commit_later(before, 0.0)
    rig.machine.commit_ended(rig.only(CommitOffsets))
    rig.machine.commit_later(after, 0.0)
    rig.machine.commit_ended(rig.only(CommitOffsets), CoordinatorNotAvailableError("the answer is lost"))
    rig.machine.commit_later(before, 0.0)
    assert rig.only(CommitOffsets).offsets == before


def test_metadata_that_comes_after_its_end_has_no_leader_followed() -> None:
    """It was requested before the end. The thread for that leader would never have ended."""
    rig = Rig()
    rig.machine.assign([T0])
    rig.only(RefreshMetadata)
    rig.machine.close()
    rig.machine.metadata_came(view((1, 5)), rig.now_ms)
    assert rig.step() == []


def test_a_partition_that_moves_to_a_leader_with_a_long_poll_does_not_wait_for_its_end(rig: Rig) -> None:
    rig.machine.assign([T0, T1])
    rig.machine.seek(T0, OffsetAndMetadata(0))
    rig.machine.seek(T1, OffsetAndMetadata(0))
    rig.metadata(view((0, 0), (1, 0)))
    rig.fetch(0)
    rig.fetch(1)
    rig.machine.learned(view((1, 1), (1, 0)))
    assert BreakFetch(1) in rig.step()
    assert {target.partition for target in rig.fetch(1).targets.values()} == {0, 1}
