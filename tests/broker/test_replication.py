"""Replication between real brokers with servers, streams and files; the test is the controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_broker.broker import fetch_session
from spark_broker.config import TopicConfig
from spark_broker.errors import (
    FencedLeaderEpochError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    UnknownLeaderEpochError,
)
from spark_broker.protocol.frame import Frame, decode_frames
from tests.broker.rig import Rig

WaitUntil = Callable[..., None]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, topic=TopicConfig(min_insync_replicas=2))
    rig.publish()
    yield rig
    rig.stop()


def test_an_append_with_acks_all_is_on_every_replica_byte_for_byte(rig: Rig, wait_until: WaitUntil) -> None:
    offsets = [rig.brokers[0].append(b"%d" % n, b"x", epoch=0).result(20) for n in range(20)]
    assert offsets == list(range(0, 40, 2))
    logs = [rig.brokers[n].partition.log for n in range(3)]
    frames = [[(f.header, bytes(f.message)) for f in log.read(0, 1 << 30, 40)] for log in logs]
    assert frames[0] == frames[1] == frames[2]
    wait_until(lambda: rig.brokers[1].partition.replica.high_watermark == 40, "the follower's high watermark")


def test_a_failover_keeps_what_was_acknowledged_and_fences_the_old_leader(rig: Rig, wait_until: WaitUntil) -> None:
    old, new = rig.brokers[0], rig.brokers[1]
    for n in range(5):
        old.append(b"%d" % n, epoch=0).result(20)
    rig.publish(1, 2, leader=1, leader_epoch=1, partition_epoch=1, isr=(1, 2))
    assert new.append(b"after", epoch=1).result(20) == 5
    # The old leader does not know: it takes the batch, but no follower copies it, so it never acknowledges.
    stray = old.append(b"stray", epoch=0)
    assert not stray.done()
    rig.publish(0)
    with pytest.raises(NotLeaderOrFollowerError):
        stray.result(20)
    wait_until(lambda: old.values() == [b"0", b"1", b"2", b"3", b"4", b"after"], "the old leader's log to be cut")
    new.await_proposal({0, 1, 2})


def test_a_request_that_names_another_leader_epoch_is_refused(rig: Rig) -> None:
    rig.publish(leader_epoch=3, partition_epoch=1)
    with pytest.raises(FencedLeaderEpochError):
        rig.brokers[0].append(b"x", epoch=2)
    with pytest.raises(UnknownLeaderEpochError):
        rig.brokers[0].append(b"x", epoch=4)
    with pytest.raises(NotLeaderOrFollowerError):
        rig.brokers[1].append(b"x", epoch=3)


def test_acks_all_is_refused_while_the_isr_is_too_small_and_acks_1_is_not_committed(rig: Rig) -> None:
    rig.publish(isr=(0,), partition_epoch=1)
    with pytest.raises(NotEnoughReplicasError):
        rig.brokers[0].append(b"x", epoch=0)
    assert rig.brokers[0].append(b"y", epoch=0, acks=1).result(20) == 0
    assert rig.brokers[0].partition.replica.high_watermark == 0


def test_a_retry_after_a_failover_gets_the_original_offset(rig: Rig) -> None:
    first = rig.brokers[0].append(b"a", epoch=0, producer_id=7, sequence=0).result(20)
    rig.brokers[0].append(b"b", epoch=0, producer_id=7, sequence=1).result(20)
    rig.publish(leader=2, leader_epoch=1, partition_epoch=1, isr=(1, 2))
    assert rig.brokers[2].append(b"a", epoch=1, producer_id=7, sequence=0).result(20) == first
    assert rig.brokers[2].values() == [b"a", b"b"]


def test_a_restarted_broker_has_its_log_its_epochs_and_its_producers(tmp_path: Path) -> None:
    rig = Rig(tmp_path, brokers=1)
    rig.publish()
    rig.brokers[0].append(b"a", epoch=0, producer_id=7, sequence=0).result(20)
    rig.publish(leader_epoch=5, partition_epoch=1)
    rig.brokers[0].append(b"b", epoch=5, producer_id=7, sequence=1).result(20)
    before = rig.brokers[0].partition.replica
    rig.stop()
    again = Rig(tmp_path, brokers=1)
    again.publish(leader_epoch=6)
    after = again.brokers[0].partition.replica
    assert again.brokers[0].values() == [b"a", b"b"]
    assert after.producers == before.producers
    assert after.epochs.to_pairs() == [(0, 0), (5, 1), (6, 2)]
    assert again.brokers[0].append(b"b", epoch=6, producer_id=7, sequence=1).result(20) == 1
    again.stop()


def test_a_follower_behind_the_log_start_begins_there_with_the_leaders_producers(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    topic = TopicConfig(segment_bytes=4096, retention_bytes=4096)
    rig = Rig(tmp_path, brokers=2, topic=topic)
    rig.publish(0, isr=(0,))
    leader = rig.brokers[0]
    for n in range(12):
        leader.append(b"%d" % n * 200, epoch=0, producer_id=7, sequence=n).result(20)
    leader.partition.apply_retention()
    start = leader.partition.replica.log_start_offset
    assert start > 0
    rig.publish(1, isr=(0,))
    leader.await_proposal({0, 1})
    follower = rig.brokers[1].partition.replica
    wait_until(lambda: follower.log_end_offset == 12, "the follower to catch up")
    assert follower.log_start_offset == start
    assert follower.producers == leader.partition.replica.producers
    rig.stop()


@pytest.mark.parametrize("restart", [False, True])
def test_a_partition_whose_records_are_all_too_old_is_empty_and_goes_on(
    tmp_path: Path, wait_until: WaitUntil, restart: bool
) -> None:
    """Story: what was in the last segment stayed readable for ever where nothing was appended any more."""
    topic = TopicConfig(retention_ms=0)
    rig = Rig(tmp_path, brokers=3, topic=topic)
    rig.publish(0, 1, isr=(0, 1))
    for n in range(3):
        rig.brokers[0].append(b"%d" % n, epoch=0, producer_id=7, sequence=n).result(20)

    def is_empty(broker: int) -> bool:
        rig.brokers[0].partition.apply_retention()
        partition = rig.brokers[broker].partition
        bounds = (partition.replica.log_start_offset, partition.replica.log_end_offset)
        return bounds == (3, 3) and not list(partition.log.directory.glob("*.arrow"))

    for broker in (0, 1):
        wait_until(lambda broker=broker: is_empty(broker), f"broker {broker} to delete everything")
    if restart:
        rig.stop()
        rig = Rig(tmp_path, brokers=3, topic=topic)
    rig.publish(isr=(1,), leader=1, leader_epoch=1, partition_epoch=1)
    late = rig.brokers[2].partition.replica
    wait_until(lambda: late.log_start_offset == 3, "a follower that had nothing to begin there")
    assert rig.brokers[1].append(b"3", epoch=1, acks=1, producer_id=7, sequence=3).result(20) == 3
    for broker in (0, 2):
        replica = rig.brokers[broker].partition.replica
        wait_until(lambda replica=replica: replica.log_end_offset == 4, "a follower to catch up")
        assert replica.log_start_offset == 3
        assert replica.producers == rig.brokers[1].partition.replica.producers
    (frame,) = rig.brokers[1].partition.log.read(3, 1 << 20, 4)
    assert (frame.header.base_offset, frame.header.base_sequence) == (3, 3)
    rig.stop()


def test_an_idle_follower_that_was_unfenced_after_its_last_fetch_still_joins_the_isr(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    rig = Rig(tmp_path, brokers=2)
    rig.fenced = {1}
    rig.publish(isr=(0,))
    rig.brokers[0].append(b"a", epoch=0).result(20)
    progress = rig.brokers[0].partition.replica.followers[1]
    wait_until(lambda: progress.log_end_offset == 1, "the follower's last fetch")
    rig.fenced = set()
    rig.publish(0)
    rig.brokers[0].await_proposal({0, 1})
    rig.stop()


def test_a_follower_without_memory_for_an_answer_asks_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: its broker ended. A client's call that gets no memory ends alone."""
    failed = [MemoryError(), MemoryError(), MemoryError()]

    def fail_at_first(payload: memoryview) -> list[Frame]:
        if payload and failed:
            raise failed.pop()
        return decode_frames(payload)

    monkeypatch.setattr(fetch_session, "decode_frames", fail_at_first)
    assert rig.brokers[0].append(b"x", epoch=0).result(20) == 0
    assert not failed
