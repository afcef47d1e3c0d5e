"""ISR proposals on their way to the controller, without the waiting: at most one of each partition.

When the outcome of a request is not known, the proposal is repeated: the replica keeps counting the proposed members
(maximal ISR) until the controller has answered or a newer state of the partition has arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spark_broker.broker.partition import PartitionKey
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.core.effects import ProposeIsr
from spark_broker.errors import NetworkError, invariant
from spark_broker.protocol.messages import AlterIsr, AlterIsrResult, AlterPartition, AlterPartitionResult, IsrMember

logger = logging.getLogger(__name__)

EXAMPLES = 3
"""How many partitions a line names that is about many."""

RETRY_MS = 100
"""Wait before proposals whose outcome is not known are sent again."""

Proposals = dict[PartitionKey, ProposeIsr]


class ProposalQueue:
    """One request is out at a time, and what waits meanwhile shares the next. Bounded by the number of partitions.

    Not thread-safe. `add` is called under a partition's lock: whoever guards the queue with a lock of its own takes no
    partition's lock under it.
    """

    def __init__(self) -> None:
        self._waiting: Proposals = {}
        self._is_out = False
        self._news: Proposals = {}  # that `take_news` has not returned

    @property
    def is_due(self) -> bool:
        """Whether there is something to `take`."""
        return bool(self._waiting) and not self._is_out

    def add(self, key: PartitionKey, proposal: ProposeIsr) -> None:
        """A newer proposal replaces one that waits."""
        self._waiting[key] = self._news[key] = proposal

    def take_news(self) -> Proposals:
        """All that nobody has announced yet: repeated, they are none."""
        taken, self._news = self._news, {}
        return taken

    def take(self) -> Proposals:
        """All that wait: they share a request. `settled` or `put_back` follows."""
        invariant(self.is_due, "a second request with ISR proposals")
        self._is_out = True
        taken, self._waiting = self._waiting, {}
        return taken

    def settled(self) -> None:
        """The request was answered."""
        self._is_out = False

    def put_back(self, proposals: Proposals) -> None:
        """What became of the request is not known: these, which are `still_open`, go again."""
        self._is_out = False
        for key, proposal in proposals.items():
            self._waiting.setdefault(key, proposal)


def still_open(manager: ReplicaManager, proposals: Proposals) -> Proposals:
    """Those that nothing newer has replaced. Takes the partitions' locks."""
    return {
        key: proposal
        for key, proposal in proposals.items()
        if (partition := manager.find(*key)) is not None and partition.is_current(proposal)
    }


def request_of(manager: ReplicaManager, proposals: Proposals) -> AlterPartition:
    """The request that carries the proposals."""
    changes = [_change(key, proposal) for key, proposal in proposals.items()]
    return AlterPartition(manager.broker_id, manager.broker_epoch, changes)


def announce(manager: ReplicaManager, proposals: Proposals) -> None:
    """Log what is asked for and why, as one line."""
    texts = [
        f"{partition}: ISR {', '.join(str(broker) for broker, _ in proposal.isr)} in leader epoch "
        f"{proposal.leader_epoch} ({proposal.reason})"
        for key, proposal in proposals.items()
        if (partition := manager.find(*key)) is not None
    ]
    _log_together("asks for", texts)


def _log_together(what: str, texts: Sequence[str]) -> None:
    if len(texts) > EXAMPLES:
        logger.info("%s %d ISRs: %s; ...", what, len(texts), "; ".join(texts[:EXAMPLES]))
    elif texts:
        logger.info("%s %s", what, "; ".join(texts))


def settle(manager: ReplicaManager, answer: object, proposals: Proposals) -> None:
    """Success shows as a newer state of the partition, and so does a stale epoch; a certain refusal ends a proposal."""
    if not isinstance(answer, AlterPartitionResult):
        raise NetworkError(f"ISR proposals were answered with {type(answer).__name__}")
    refused = [_settle_one(manager, result, proposals) for result in answer.results]
    _log_together("the controller refuses", [text for text in refused if text])


def _settle_one(manager: ReplicaManager, result: AlterIsrResult, proposals: Proposals) -> str:
    """What was refused; nothing if it was taken."""
    key = (result.topic_id, result.partition)
    partition, proposal = manager.find(*key), proposals.get(key)
    if not result.error_code or partition is None or proposal is None:
        return ""
    partition.isr_refused(proposal.leader_epoch, proposal.partition_epoch, result.error_code)
    return f"{partition} in leader epoch {proposal.leader_epoch}: {result.error_code} {result.error_message}"


def _change(key: PartitionKey, proposal: ProposeIsr) -> AlterIsr:
    members = [IsrMember(broker, epoch) for broker, epoch in proposal.isr]
    return AlterIsr(*key, proposal.leader_epoch, proposal.partition_epoch, members, list(proposal.lacking))
