"""Both ends of a follower's fetch session, message by message, over real logs."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

import pyarrow as pa
import pytest

from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock, SystemClock
from spark_broker.broker.fetch_session import FAILED_RETRY_MS, RETRY_MS, FetcherSettings, FetchSession
from spark_broker.broker.follower_sessions import AHEAD_MAX, FollowerSessions
from spark_broker.broker.lease import Lease
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionEvents
from spark_broker.broker.replica_fetcher import BACK_OFF_MS, ReplicaFetcher
from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.replica_session import IDLE_REPORT_MAX_MS, ReplicaSession
from spark_broker.broker.topic import Topic
from spark_broker.controller.image import TopicState
from spark_broker.core.replica import FetchPosition, LeaderAndIsr, Replica
from spark_broker.errors import InvalidFetchSessionEpochError, StorageFullError, UnknownTopicOrPartitionError
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.messages import ReplicaFetchRequest, ReplicaFetchResponse, ReplicaStateResponse
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.storage.start_kind import StartKind
from tests.broker.rig import FAR_FUTURE_MS, KEY, TOPIC_ID, Outcome, batch

EPOCHS = {0: 1, 1: 1, 2: 1}
LIVE = {0: 1, 2: 1}
"""Broker 1, the follower, is fenced. As long as it may not join the ISR, no append waits for it."""
Answer = tuple[ReplicaFetchResponse, bytes]


class Manager:
    """The part of a broker that the leader's end of a session uses."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.follower_sessions = FollowerSessions()

    def broker_epochs(self) -> dict[int, int]:
        return EPOCHS

    def partition(self, topic_id: str, number: int) -> Partition:
        assert (topic_id, number) == KEY
        return self._partition

    def live_broker_epochs(self) -> dict[int, int]:
        return LIVE


class Stream:
    """A follower's session with the leader, whose messages the test carries."""

    def __init__(self, leader: Partition, follower: Partition, clock: Clock = SYSTEM_CLOCK, number: int = 0) -> None:
        settings = FetcherSettings(1, 1, max_wait_ms=100, max_bytes=1 << 20, request_timeout_ms=1000)
        self.session = FetchSession(settings, {KEY: follower}, clock, number)
        self.manager = Manager(leader)
        self._clock = clock
        self._server = ReplicaSession(cast(ReplicaManager, self.manager), 1 << 20)

    def share(self, other: Stream) -> None:
        """Both are streams of one leader."""
        self.manager.follower_sessions = other.manager.follower_sessions

    def ask(self) -> Answer:
        """The answer to the next request, without a wait."""
        return self.answer(self.request())

    def request(self) -> ReplicaFetchRequest:
        request = self.session.next_request()
        assert isinstance(request, ReplicaFetchRequest)
        return request

    def answer(self, request: ReplicaFetchRequest) -> Answer:
        """The leader's answer, as after a wait without news."""
        self._server.received(request, self._clock.boottime_ms())
        answer = self._server.try_answer(self._server.deadline_ms)
        assert answer is not None
        return answer.response, b"".join(answer.payload)

    def take(self, answer: Answer) -> None:
        response, payload = answer
        self.session.received(response, memoryview(payload))


class SteppedClock(SystemClock):
    """Boot time passes only when a test changes it."""

    now_ms = 1_000

    def boottime_ms(self) -> int:
        return self.now_ms


Open = Callable[[int], Partition]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the replica of a broker; broker 0 leads, brokers 0 and 2 are in sync."""
    config = MappingProxyType({"segment.bytes": "4096"})
    state = TopicState("t", TOPIC_ID, config, schemas=(schema_to_bytes(DEFAULT_SCHEMA),), partitions=())
    topic, partitions = Topic.of(state), []
    lease = Lease()
    lease.extend(SYSTEM_CLOCK.boottime_ms(), FAR_FUTURE_MS)

    def open_replica(me: int) -> Partition:
        directory = tmp_path / str(me)
        directory.mkdir()
        log = ReplicaLog(directory, topic, StartKind.CLEAN)
        replica = Replica(me, log.state(high_watermark=0), min_insync_replicas=1, lag_max_ms=30_000)
        partition = Partition(KEY, topic, log, replica, lease, PartitionEvents(lambda *_: None, lambda *_: None))
        partition.assign(LeaderAndIsr(0, 0, 0, (0, 1, 2), (0, 2)), topic, EPOCHS)
        partitions.append(partition)
        return partition

    yield open_replica
    for partition in partitions:
        partition.close(clean=False)


def append(leader: Partition, value: bytes) -> None:
    message = encode_batch(batch(value), producer_id=-1, producer_epoch=-1, base_sequence=-1)
    leader.append(Append(message, leader.leader_epoch(), 1, 0, SYSTEM_CLOCK.boottime_ms() + 30_000), Outcome())


def elect(leader: int, leader_epoch: int, *partitions: Partition) -> None:
    for partition in partitions:
        assignment = LeaderAndIsr(leader, leader_epoch, leader_epoch, (0, 1, 2), (leader, 2))
        partition.assign(assignment, partition.topic, EPOCHS)


def test_what_an_ignored_answer_said_of_the_high_watermark_is_said_again(opened: Open) -> None:
    """A follower has two streams. The older one's answer comes first and moves the log, and the newer one's is late.

    The leader had sent its high watermark on the newer stream, and would not send it again until it moves.
    """
    leader, follower = opened(0), opened(1)
    older, newer = Stream(leader, follower), Stream(leader, follower)
    append(leader, b"a")
    before = older.ask()
    leader.follower_fetch(2, 1, FetchPosition(0, 1, 0), LIVE)
    assert leader.replica.high_watermark == 1
    after = newer.ask()

    older.take(before)
    newer.take(after)
    assert (follower.replica.log_end_offset, follower.replica.high_watermark) == (1, 0)

    newer.take(newer.ask())
    assert follower.replica.high_watermark == 1


def test_a_high_watermark_that_was_told_is_not_told_again(opened: Open) -> None:
    leader, follower = opened(0), opened(1)
    stream = Stream(leader, follower)
    append(leader, b"a")
    leader.follower_fetch(2, 1, FetchPosition(0, 1, 0), LIVE)
    stream.take(stream.ask())
    assert follower.replica.high_watermark == 1

    response, _ = stream.ask()
    assert response.partitions == []
    response, _ = stream.ask()
    assert response.partitions == []


def test_how_far_a_follower_is_does_not_stay_with_what_a_late_request_said(opened: Open) -> None:
    """Simulator, seed 413174: a request of an older stream arrives late, although that stream is closed already.

    What the follower reported on its newer stream must hold in the end, although it has nothing to add.
    """
    leader, follower, clock = opened(0), opened(1), SteppedClock()
    older, newer = Stream(leader, follower, clock), Stream(leader, follower, clock)
    late = older.request()
    append(leader, b"a")
    while (request := newer.request()).partitions:
        newer.take(newer.answer(request))
    progress = leader.replica.followers[1]
    assert progress.log_end_offset == 1

    older.answer(late)
    assert progress.log_end_offset == 0

    clock.now_ms += IDLE_REPORT_MAX_MS
    newer.answer(request)
    assert progress.log_end_offset == 1


def test_what_a_session_reports_after_a_later_one_has_begun_moves_no_high_watermark(opened: Open) -> None:
    """The follower lost its log in between: the older request is late, and says more than the follower has."""
    leader, follower, empty = opened(0), opened(1), opened(2)
    append(leader, b"a")
    older = Stream(leader, follower, number=7)
    older.take(older.ask())
    late = older.request()
    assert late.partitions[0].fetch_offset == 1

    newer = Stream(leader, empty, number=8)
    newer.share(older)
    newer.answer(newer.request())
    with pytest.raises(InvalidFetchSessionEpochError, match="session 7 of broker 1; the last one has number 8"):
        older.answer(late)
    assert leader.replica.followers[1].log_end_offset == 0


@pytest.mark.parametrize("foreign", [AHEAD_MAX, 2**62, 2**63 - 1])
def test_a_number_that_some_peer_made_up_keeps_no_follower_out_for_long(opened: Open, foreign: int) -> None:
    """Story: one message with the largest number there is, and the leader took no report of the follower again."""
    leader, follower, clock = opened(0), opened(1), SteppedClock()
    settings = FetcherSettings(1, 1, max_wait_ms=100, max_bytes=1 << 20, request_timeout_ms=1000)
    fetcher = ReplicaFetcher("leader", settings, clock)
    manager = Manager(leader)
    server = ReplicaSession(cast(ReplicaManager, manager), 1 << 20)
    made_up = ReplicaFetchRequest(1, 1, 1, max_wait_ms=0, max_bytes=1, partitions=[], session=foreign)
    with suppress(InvalidFetchSessionEpochError):
        ReplicaSession(cast(ReplicaManager, manager), 1 << 20).received(made_up, clock.boottime_ms())

    fetcher.follow({KEY: follower}, {KEY: 0})
    refused = 0
    while (session := fetcher.session) is not None:
        request = session.next_request()
        assert isinstance(request, ReplicaFetchRequest)
        try:
            server.received(request, clock.boottime_ms())
            break
        except InvalidFetchSessionEpochError as error:
            refused += 1
            fetcher.failed(session, error)
            clock.now_ms += BACK_OFF_MS
            fetcher.tick()
    assert refused <= 2
    assert leader.replica.followers[1].log_end_offset == 0


def test_a_follower_whose_full_disk_refuses_a_cut_is_as_it_was(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulator, seed 423964: its log had not been truncated, but it went on from the truncation offset."""
    leader, follower = opened(0), opened(1)
    elect(1, 1, follower)
    for _ in range(3):
        append(follower, b"uncommitted" * 300)
    elect(0, 2, leader, follower)
    append(leader, b"a")
    stream = Stream(leader, follower, SteppedClock())

    with monkeypatch.context() as patch:
        patch.setattr("spark_broker.storage.log.write_log_state", _is_full)
        stream.take(stream.ask())
    assert follower.replica.fetch_position() == FetchPosition(2, 3, 1)
    assert [header.leader_epoch for header in follower.log.headers(0)] == [1, 1, 1]

    later = Stream(leader, follower)
    for _ in range(3):
        later.take(later.ask())
    assert follower.replica.fetch_position() == FetchPosition(2, 1, 2)
    assert [header.leader_epoch for header in follower.log.headers(0)] == [2]
    assert (follower.replica.epochs.to_pairs(), leader.replica.epochs.to_pairs()) == ([(2, 0)], [(2, 0)])


def test_a_follower_follows_what_a_full_disk_has_left_of_a_cut(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulator, seed 809093: later segments were deleted before the truncation of a sealed one found no room."""
    leader, follower = opened(0), opened(1)
    append(leader, b"a" * 300)
    first = Stream(leader, follower)
    first.take(first.ask())
    elect(1, 1, follower)
    for _ in range(3):
        append(follower, b"uncommitted" * 150)
    bases = [header.base_offset for header in follower.log.headers(0) if header.first_of_segment]
    above = next(base for base in bases if base > 1)  # the segment before it is truncated
    elect(0, 2, leader, follower)
    stream = Stream(leader, follower, SteppedClock())

    with monkeypatch.context() as patch:
        patch.setattr("spark_broker.storage.segment.copy_prefix", _is_full)
        stream.take(stream.ask())
    assert follower.replica.log_end_offset == follower.log.log_end_offset == above
    assert follower.replica.fetch_position().last_fetched_epoch == 1

    later = Stream(leader, follower)
    for _ in range(3):
        later.take(later.ask())
    assert follower.replica.fetch_position() == FetchPosition(2, 1, 0)


def test_a_follower_says_that_what_it_was_sent_did_not_fit(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = opened(0), opened(1)
    append(leader, b"a")
    clock = SteppedClock()
    stream = Stream(leader, follower, clock)
    with monkeypatch.context() as patch:
        patch.setattr("spark_broker.storage.segment.Segment.create", _is_full)
        stream.take(stream.ask())
        clock.now_ms += FAILED_RETRY_MS
        request = stream.request()
        assert [named.no_room for named in request.partitions] == [True]
        stream.take(stream.answer(request))
    assert leader.replica.followers[1].no_room
    clock.now_ms += FAILED_RETRY_MS
    stream.take(stream.ask())
    assert follower.replica.log_end_offset == 1
    request = stream.request()
    assert [named.no_room for named in request.partitions] == [False]


def test_a_follower_that_a_full_disk_keeps_from_beginning_anew_claims_nothing(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log was dropped, and the new one found no room. Then another leader is elected."""
    follower = opened(1)
    elect(1, 1, follower)
    append(follower, b"a")
    elect(0, 2, follower)
    follower.restart_reason = "its leader's log starts later"
    with monkeypatch.context() as patch:
        patch.setattr("spark_broker.storage.producer_snapshots.write_atomically", _is_full)
        with pytest.raises(StorageFullError):
            follower.restart(2, ReplicaStateResponse(5, [(2, 0)], []))
    assert follower.restart_reason, "it is tried again"
    elect(2, 3, follower)
    assert follower.replica.fetch_position() == FetchPosition(3, 0, -1)


def _is_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_batches_of_a_schema_that_the_follower_does_not_know_wait_until_it_does(opened: Open) -> None:
    """The leader has learned of the schema first. A segment begins with its schema, so nothing can be stored yet."""
    leader, follower, clock = opened(0), opened(1), SteppedClock()
    stream = Stream(leader, follower, clock)
    append(leader, b"a")
    while (request := stream.request()).partitions:
        stream.take(stream.answer(request))
    schemas = (*leader.topic.schemas, DEFAULT_SCHEMA.append(pa.field("later", pa.int64())))
    known = replace(leader.topic, schemas=schemas, schema_bytes=tuple(map(schema_to_bytes, schemas)))
    leader.assign(leader.replica.assignment, known, EPOCHS)
    rows = pa.record_batch([*batch(b"b").columns, pa.array([1])], schema=schemas[1])
    message = encode_batch(rows, schema_id=1, producer_id=-1, producer_epoch=-1, base_sequence=-1)
    given = Append(message, leader.leader_epoch(), 1, 1, SYSTEM_CLOCK.boottime_ms() + 30_000)
    with pytest.raises(UnknownTopicOrPartitionError) as refused:
        follower.append(given, Outcome())
    assert refused.value.retriable
    leader.append(given, Outcome())

    stream.take(stream.ask())
    assert follower.replica.log_end_offset == 1
    assert not stream.ask()[0].partitions, "it waits before it asks again"
    follower.assign(follower.replica.assignment, known, EPOCHS)
    clock.now_ms += RETRY_MS
    stream.take(stream.ask())
    assert [header.schema_id for header in follower.log.headers(0)] == [0, 1]


@pytest.mark.parametrize("checked_by", ["the leader", "the follower"])
def test_an_answer_of_an_older_epoch_brings_no_batch_of_a_later_one(
    opened: Open, monkeypatch: pytest.MonkeyPatch, checked_by: str
) -> None:
    """The leader is deposed between its check and its read, cuts its log, and copies what the next leader has."""
    old, follower, new = opened(0), opened(1), opened(2)

    def elect(*partitions: Partition) -> None:
        for partition in partitions:
            partition.assign(LeaderAndIsr(2, 1, 1, (0, 1, 2), (2,)), partition.topic, EPOCHS)

    append(old, b"a")
    for replica in (follower, new):
        stream = Stream(old, replica)
        stream.take(stream.ask())
    append(old, b"only the follower gets this")
    slow = Stream(old, follower)
    slow.take(slow.ask())
    append(old, b"nobody gets this")
    read = old.read_log

    def read_late(offset: int, max_bytes: int, end_offset: int) -> list[Frame]:
        monkeypatch.setattr(old, "read_log", read)
        elect(old, new)
        for value in (b"x", b"y", b"z"):
            append(new, value)
        catching_up = Stream(new, old)
        while old.replica.log_end_offset < 4 or old.replica.epochs.latest_epoch < 1:
            catching_up.take(catching_up.ask())
        if checked_by == "the follower":
            monkeypatch.setattr(old.replica, "check_leader", lambda epoch: None)
        return read(offset, max_bytes, end_offset)

    monkeypatch.setattr(old, "read_log", read_late)
    slow.take(slow.ask())
    assert [(header.base_offset, header.leader_epoch) for header in follower.log.headers(0)] == [(0, 0), (1, 0)]
    elect(follower)
    behind = Stream(new, follower)
    while follower.replica.log_end_offset < 4:
        behind.take(behind.ask())
    assert [h.leader_epoch for h in follower.log.headers(0)] == [h.leader_epoch for h in new.log.headers(0)]
