"""Known bugs of the producer, put back into its machine: Known bug 22, and what a sender can do wrong.

Not here, but in `tests/client`, are bugs that show in one of many thousand schedules (seeds 105662 and 103088:
`test_partition_queue.py`), and a commit after a failed append, which no rule forbids: the append may have been stored.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import pytest

from spark_broker.client.leader_channel import LeaderChannel
from spark_broker.client.outgoing import OutgoingBatch
from spark_broker.client.partition_queue import PartitionQueue
from spark_broker.client.sender_effects import CompleteBatch, SenderEffect
from spark_broker.client.sender_machine import SenderMachine
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import SparkBrokerError
from tests.sim import bugs
from tests.sim.kinds import has_transactions

Patch = pytest.MonkeyPatch

bug = bugs.bug
bug_of_transactions = partial(bugs.bug, shows=has_transactions)


@bug("22")
def renumber_what_may_be_stored(patch: Patch) -> None:
    """A batch whose answer was lost gets a new number, and is stored once more."""
    failed = PartitionQueue.failed

    def buggy(self: PartitionQueue, batch: OutgoingBatch, error: SparkBrokerError) -> None:
        failed(self, batch, error)
        if error.retriable:
            self._renumber(batch)

    patch.setattr(PartitionQueue, "failed", buggy)


@bug("22")
def take_a_broken_stream_for_an_acknowledgement(patch: Patch) -> None:
    """What is in flight when a stream breaks counts as stored."""
    break_ = SenderMachine._break

    def buggy(
        self: SenderMachine, channel: LeaderChannel, error: SparkBrokerError, now_ms: int, *, suspect: bool
    ) -> list[SenderEffect]:
        stored: list[SenderEffect] = []
        for queue, batch, _ in channel.in_flight.values():
            queue.acknowledged(batch)
            queue.stop()
            stored += [CompleteBatch(batch, batch.metadata(0)), *self._settle(queue, now_ms)]
        channel.in_flight.clear()
        return [*stored, *break_(self, channel, error, now_ms, suspect=suspect)]

    patch.setattr(SenderMachine, "_break", buggy)


@bug("22")
def send_the_newest_first_after_a_failure(patch: Patch) -> None:
    """Batches that have no number yet overtake those that failed."""
    settle = PartitionQueue.settle

    def buggy(self: PartitionQueue) -> list[tuple[OutgoingBatch, SparkBrokerError]]:
        failed = settle(self)
        self.unacked = deque(sorted(self.unacked, key=lambda batch: batch.identity is not None))
        return failed

    patch.setattr(PartitionQueue, "settle", buggy)


@bug("22")
def wait_for_ever_after_a_failed_refresh(patch: Patch) -> None:
    """Nobody has answered a question for metadata, and no other one is asked."""
    patch.setattr(SenderMachine, "refresh_failed", lambda self, error, now_ms: [])


@bug("22")
def never_give_up_a_silent_leader(patch: Patch) -> None:
    """An append that is not answered is waited for until its delivery time-out."""
    patch.setattr(LeaderChannel, "age_ms", lambda self, now_ms: 0)


@bug_of_transactions("23")
def number_on_over_an_epoch(patch: Patch) -> None:
    """Under the next transaction's epoch, numbers do not begin at 0 again."""
    begin_epoch, queue_of = SenderMachine.begin_epoch, SenderMachine._queue_of
    numbers: dict[tuple[SenderMachine, str, int], int] = {}

    def begin(self: SenderMachine, identity: ProducerIdentity) -> None:
        for (topic_id, partition), queue in self._queues.items():
            numbers[self, topic_id, partition] = queue._next_sequence
        begin_epoch(self, identity)

    def queue(self: SenderMachine, batch: OutgoingBatch) -> PartitionQueue:
        partition_queue = queue_of(self, batch)
        number = numbers.pop((self, batch.topic_id, batch.topic_partition.partition), 0)
        partition_queue._next_sequence = max(partition_queue._next_sequence, number)
        return partition_queue

    patch.setattr(SenderMachine, "begin_epoch", begin)
    patch.setattr(SenderMachine, "_queue_of", queue)
