"""ISR proposals on their way to the controller, without the waiting: at most one of each partition.

When the outcome of a request is not known, the proposal is repeated: the replica keeps counting the proposed members
(maximal ISR) until the controller has answered or a newer state of the partition has arrived.
"""

from __future__ import annotations

import logging

from spark_broker.broker.partition import PartitionKey
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.core.effects import ProposeIsr
from spark_broker.protocol.messages import AlterIsr, AlterIsrResult, AlterPartition, AlterPartitionResult, IsrMember

logger = logging.getLogger(__name__)

RETRY_MS = 100
"""Wait before proposals whose outcome is not known are sent again."""

Proposals = dict[PartitionKey, ProposeIsr]


class ProposalQueue:
    """Not thread-safe. Bounded by the number of partitions."""

    def __init__(self) -> None:
        self._waiting: Proposals = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, key: PartitionKey, proposal: ProposeIsr) -> None:
        """A newer proposal replaces one that waits."""
        self._waiting[key] = proposal

    def take(self) -> Proposals:
        """All that wait: they share a request."""
        taken, self._waiting = self._waiting, {}
        return taken

    def try_again(self, manager: ReplicaManager, proposals: Proposals) -> None:
        """What became of these is not known: those that are still open go again."""
        for key, proposal in proposals.items():
            partition = manager.find(*key)
            if partition is not None and partition.is_current(proposal):
                self._waiting.setdefault(key, proposal)


def request_of(manager: ReplicaManager, proposals: Proposals) -> AlterPartition:
    """The request that carries the proposals."""
    changes = [_change(key, proposal) for key, proposal in proposals.items()]
    return AlterPartition(manager.broker_id, manager.broker_epoch, changes)


def settle(manager: ReplicaManager, answer: AlterPartitionResult, proposals: Proposals) -> None:
    """Success shows as a newer state of the partition, and so does a stale epoch; a certain refusal ends a proposal."""
    for result in answer.results:
        _settle_one(manager, result, proposals)


def _settle_one(manager: ReplicaManager, result: AlterIsrResult, proposals: Proposals) -> None:
    key = (result.topic_id, result.partition)
    partition, proposal = manager.find(*key), proposals.get(key)
    if result.error_code and partition is not None and proposal is not None:
        logger.info("%s: ISR refused: %s %s", partition, result.error_code, result.error_message)
        partition.isr_refused(proposal.leader_epoch, proposal.partition_epoch, result.error_code)


def _change(key: PartitionKey, proposal: ProposeIsr) -> AlterIsr:
    members = [IsrMember(broker, epoch) for broker, epoch in proposal.isr]
    return AlterIsr(*key, proposal.leader_epoch, proposal.partition_epoch, members, list(proposal.lacking))
