"""The thread that sends ISR proposals to the controller while partitions propose more."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from spark_broker.broker.isr_proposals import IsrProposals
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.core.effects import ProposeIsr
from spark_broker.errors import NetworkError
from spark_broker.protocol.messages import AlterPartitionRequest, AlterPartitionResponse

KEY: PartitionKey = ("t", 0)
OTHER: PartitionKey = ("t", 1)
PROPOSAL = ProposeIsr(7, 12, ((1, 5), (2, 6)))
DEADLINE_S = 20


class FakeController:
    """Cannot be reached the first time; answers after that."""

    address = "controller:1"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.answered = threading.Event()

    def call(self, request: AlterPartitionRequest, *, timeout_ms: int) -> AlterPartitionResponse:
        del timeout_ms
        self.asked.append([change.partition for change in request.changes])
        if len(self.asked) == 1:
            raise NetworkError("connection refused")
        self.answered.set()
        return AlterPartitionResponse([])


class ProposingPartition:
    """Another thread holds its lock and proposes an ISR, so `is_current` waits for that thread."""

    def __init__(self, proposals: IsrProposals) -> None:
        self._proposals = proposals
        self.could_propose = False
        self.replica = SimpleNamespace(log_end_offset=500)

    def is_current(self, proposal: ProposeIsr) -> bool:
        assert proposal == PROPOSAL
        proposing = threading.Thread(target=self._proposals.propose, args=(OTHER, PROPOSAL), daemon=True)
        proposing.start()
        proposing.join(DEADLINE_S)
        self.could_propose = not proposing.is_alive()
        return True


def test_a_partition_can_propose_while_an_earlier_proposal_is_compared_with_it() -> None:
    """Under the queue's lock, the comparison would wait for the partition's lock. The thread that holds the partition's
    lock would wait for the queue's: both would wait for ever."""
    controller, bugs = FakeController(), list[BaseException]()
    proposals = IsrProposals(cast("Any", controller), 1000, bugs.append)
    partition = ProposingPartition(proposals)
    find = {KEY: partition, OTHER: partition}
    proposals.manager = cast("Any", SimpleNamespace(broker_id=1, broker_epoch=5, find=lambda *key: find.get(key)))
    proposals.propose(KEY, PROPOSAL)
    proposals.start()

    assert controller.answered.wait(2 * DEADLINE_S)
    proposals.stop()
    proposals.join(DEADLINE_S)

    assert partition.could_propose
    assert [sorted(partitions) for partitions in controller.asked] == [[0], [0, 1]]
    assert bugs == []
