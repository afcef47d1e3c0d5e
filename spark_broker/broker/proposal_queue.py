"""ISR proposals on their way to the controller, at most one of each partition. Nothing here waits.

When the outcome of a request is not known, the proposal is repeated: the replica keeps counting the proposed members
(maximal ISR) until the controller has answered or a newer state of the partition has arrived.
"""

from __future__ import annotations

import logging
from itertools import islice

from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.core.effects import ProposeIsr
from spark_broker.errors import NetworkError, error_from_code, invariant
from spark_broker.protocol.messages import (
    AlterIsr,
    AlterIsrResult,
    AlterPartitionRequest,
    AlterPartitionResponse,
    IsrMember,
)
from spark_broker.protocol.messages.control import ISR_CHANGES_MAX

logger = logging.getLogger(__name__)

RETRY_MS = 100
"""Wait before proposals whose outcome is not known are sent again."""

Proposals = dict[PartitionKey, ProposeIsr]


class ProposalQueue:
    """One request is out at a time. Proposals that wait share the next. Bounded by the number of partitions.

    Not thread-safe. `add` is called under a partition's lock, so no partition's lock may be taken under a lock that
    guards the queue.
    """

    def __init__(self) -> None:
        self._waiting: Proposals = {}
        self._is_out = False
        self._news: Proposals = {}  # proposals that `take_news` has not returned

    @property
    def is_due(self) -> bool:
        """Whether there is something to `take`."""
        return bool(self._waiting) and not self._is_out

    def add(self, key: PartitionKey, proposal: ProposeIsr) -> None:
        """A newer proposal replaces one that waits."""
        self._waiting[key] = self._news[key] = proposal

    def take_news(self) -> Proposals:
        """All proposals that are not announced yet. A repeated proposal is not announced again."""
        taken, self._news = self._news, {}
        return taken

    def take(self) -> Proposals:
        """Proposals that wait, those that wait longest first, as many as a request takes. `settled` or `put_back` must
        follow.
        """
        invariant(self.is_due, "a second request with ISR proposals")
        self._is_out = True
        taken = dict(islice(self._waiting.items(), ISR_CHANGES_MAX))
        for key in taken:
            del self._waiting[key]
        return taken

    def settled(self) -> None:
        """The request was answered."""
        self._is_out = False

    def put_back(self, proposals: Proposals) -> None:
        """The outcome of the request is not known: these proposals, which are `still_open`, are sent again."""
        self._is_out = False
        for key, proposal in proposals.items():
            self._waiting.setdefault(key, proposal)


def still_open(manager: ReplicaManager, proposals: Proposals) -> Proposals:
    """The proposals that nothing newer has replaced. Takes the partitions' locks."""
    return {
        key: proposal
        for key, proposal in proposals.items()
        if (partition := manager.find(*key)) is not None and partition.is_current(proposal)
    }


def request_of(manager: ReplicaManager, proposals: Proposals) -> AlterPartitionRequest:
    """The request that carries the proposals."""
    changes = [_change(key, proposal) for key, proposal in proposals.items()]
    return AlterPartitionRequest(manager.broker_id, manager.broker_epoch, changes)


def announce(manager: ReplicaManager, proposals: Proposals) -> None:
    """Log what is asked for and why: a line for each partition, which has one proposal at a time."""
    for key, proposal in proposals.items():
        partition = manager.find(*key)
        if partition is not None:
            text = "%(topic_partition)s: asks for ISR %(isr)s in leader epoch %(leader_epoch)d: %(why)s"
            logger.info(text, {**_fields(partition, proposal), "why": proposal.reason})


def _fields(partition: Partition, proposal: ProposeIsr) -> dict[str, object]:
    return {
        "topic_partition": str(partition),
        "leader_epoch": proposal.leader_epoch,
        "partition_epoch": proposal.partition_epoch,
        "isr": tuple(broker for broker, _ in proposal.isr),
        "offset": partition.replica.log_end_offset,
    }


def settle(manager: ReplicaManager, answer: object, proposals: Proposals) -> None:
    """Act on the controller's answer: a certain refusal ends a proposal.

    Success shows as a newer state of the partition in the metadata, and so does a stale epoch.
    """
    if not isinstance(answer, AlterPartitionResponse):
        raise NetworkError(f"ISR proposals were answered with {type(answer).__name__}")
    for result in answer.results:
        _settle_one(manager, result, proposals)


def _settle_one(manager: ReplicaManager, result: AlterIsrResult, proposals: Proposals) -> None:
    key = (result.topic_id, result.partition)
    partition, proposal = manager.find(*key), proposals.get(key)
    if partition is None or proposal is None:
        return
    if not result.error_code:
        text = "%(topic_partition)s: the controller takes ISR %(isr)s in leader epoch %(leader_epoch)d"
        logger.info(text, _fields(partition, proposal))
        return
    error = error_from_code(result.error_code, result.error_message)
    text = "%(topic_partition)s: the controller refuses ISR %(isr)s in leader epoch %(leader_epoch)d: %(why)s"
    logger.info(text, {**_fields(partition, proposal), "why": f"{error.name}: {error.message}"})
    partition.isr_refused(proposal.leader_epoch, proposal.partition_epoch, result.error_code)


def _change(key: PartitionKey, proposal: ProposeIsr) -> AlterIsr:
    members = [IsrMember(broker, epoch) for broker, epoch in proposal.isr]
    return AlterIsr(*key, proposal.leader_epoch, proposal.partition_epoch, members, list(proposal.lacking))
