"""Which partitions a consumer asks a leader for, in which order, and what breaks a fetch off."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from spark_broker.client.consumer_effects import BreakFetch
from spark_broker.client.consumer_machine import ConsumerMachine
from spark_broker.client.fetch_machine import Fetch, FetchAnswer
from spark_broker.client.leader_fetches import FULL_WAIT_MS
from spark_broker.client.partition_position import Prefetched
from spark_broker.client.retry import Backoff
from spark_broker.config import ConsumerConfig
from spark_broker.model import OffsetAndMetadata, TopicPartition
from spark_broker.protocol.messages import FetchedPartition
from tests.unit.test_consumer_machine import view

BATCH_BYTES = 10_000
ENDLESS = 10**9


class OneRow:
    """Stands in for a batch whose rows do not matter."""

    def runs(self) -> list[OneRow]:
        return [self]

    def rows_below(self, offset: int) -> int:
        del offset
        return 0

    def slice(self, offset: int) -> OneRow:
        del offset
        return self


class Backlog:
    """A leader with endless records. It answers in the order of a request, while there is room (`FetchOperation`)."""

    def __init__(self, partitions: int, *, fetch_max_bytes: int, room_bytes: int) -> None:
        config = ConsumerConfig(auto_offset_reset="earliest", fetch_max_bytes=fetch_max_bytes)
        self.machine = ConsumerMachine(config, None, Backoff(100, 100, rng=random.Random(1)))
        self.partitions = [TopicPartition("t", number) for number in range(partitions)]
        self.machine.assign(self.partitions)
        for tp in self.partitions:
            self.machine.seek(tp, OffsetAndMetadata(0))
        self.now_ms = 1000.0
        self.machine.step(self.now_ms)
        self.machine.metadata_came(view(*[(0, 0)] * partitions), self.now_ms)
        self.machine.step(self.now_ms)
        self.read: Counter[int] = Counter()
        self._room_bytes = room_bytes

    def fetch(self) -> Fetch:
        fetch = self.machine.leaders.next_fetch(0, self.now_ms)
        assert fetch is not None
        return fetch

    def answer(self, fetch: Fetch) -> None:
        answers, left_bytes = [], min(self._room_bytes, fetch.request.max_bytes)
        for asked in fetch.request.partitions:
            count = min(asked.max_bytes, left_bytes) // BATCH_BYTES
            if not count:
                break
            left_bytes -= count * BATCH_BYTES
            ends = range(asked.offset + 1, asked.offset + count + 1)
            batches = [Prefetched(OneRow, end, 0, BATCH_BYTES) for end in ends]  # type: ignore[arg-type]
            response = FetchedPartition(
                *(asked.topic_id, asked.partition, 0),
                leader_epoch=0,
                length=count * BATCH_BYTES,
                next_offset=asked.offset + count,
                high_watermark=ENDLESS,
            )
            answers.append(FetchAnswer(fetch.targets[asked.topic_id, asked.partition], response, batches))
            self.read[asked.partition] += count
        self.now_ms += 50
        self.machine.leaders.fetched(0, fetch, answers, self.now_ms)

    def poll_all(self) -> None:
        while self.machine.poll()[0]:
            pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partitions", "fetch_max_bytes", "room_bytes"),
    [(4, 1 << 20, 1 << 30), (64, 50 << 20, 1 << 30), (4, 50 << 20, 64 * 1024)],
    ids=["a small limit", "many partitions", "a broker without room"],
)
def test_every_partition_has_its_turn(partitions: int, fetch_max_bytes: int, room_bytes: int) -> None:
    """Story: the first partitions used up every answer, and some were never read."""
    backlog = Backlog(partitions, fetch_max_bytes=fetch_max_bytes, room_bytes=room_bytes)
    for _ in range(4 * partitions):
        backlog.answer(backlog.fetch())
        backlog.poll_all()
    assert len(backlog.read) == partitions
    assert max(backlog.read.values()) <= 2 * min(backlog.read.values())


def test_a_resume_of_what_is_not_paused_breaks_nothing() -> None:
    backlog = Backlog(2, fetch_max_bytes=1 << 20, room_bytes=1 << 20)
    fetch = backlog.fetch()
    backlog.machine.pause(backlog.partitions[0], paused=False)
    assert backlog.machine.leaders.awaits(0, fetch)


@pytest.mark.parametrize("how", ["resume", "seek"])
def test_a_caller_that_moves_a_partition_at_each_turn_still_gets_records_of_the_others(how: str) -> None:
    """Story: each call broke off the fetch of all partitions of the leader. No answer ever came."""
    backlog = Backlog(2, fetch_max_bytes=1 << 20, room_bytes=1 << 20)
    moved = backlog.partitions[0]
    broken = 0
    for _ in range(20):
        fetch = backlog.fetch()
        if how == "seek":
            backlog.machine.seek(moved, OffsetAndMetadata(0))
        else:
            backlog.machine.pause(moved, paused=True)
            backlog.machine.pause(moved, paused=False)
        if BreakFetch(0) in backlog.machine.step(backlog.now_ms):
            broken += 1
            continue
        assert not broken or fetch.request.max_wait_ms <= FULL_WAIT_MS, "what was moved is asked for soon"
        backlog.answer(fetch)
        backlog.poll_all()
    assert broken == 10
    assert backlog.read[1]
