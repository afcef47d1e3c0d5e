"""Carries ISR proposals to the controller: one thread, proposals that wait share the next request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from spark_broker.broker.partition import PartitionKey
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.core.effects import ProposeIsr
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import (
    AlterIsr,
    AlterIsrResult,
    AlterPartition,
    AlterPartitionResult,
    IsrMember,
)
from spark_broker.transport.client import Connection

logger = logging.getLogger(__name__)

RETRY_S = 0.1


class IsrProposals(threading.Thread):
    """At most one proposal of a partition waits, so the queue is bounded by the number of partitions.

    When the outcome of a request is not known, the proposal is repeated: the replica keeps counting the proposed
    members (maximal ISR) until the controller has answered or a newer state of the partition has arrived.
    """

    def __init__(self, controller: Connection, timeout_ms: int, on_bug: Callable[[BaseException], None]) -> None:
        super().__init__(name="isr-proposals", daemon=True)
        self._controller = controller
        self._timeout_ms = timeout_ms
        self._on_bug = on_bug
        self._condition = threading.Condition()
        self._waiting: dict[PartitionKey, ProposeIsr] = {}
        self._stopped = False
        self.manager: ReplicaManager | None = None

    def propose(self, key: PartitionKey, proposal: ProposeIsr) -> None:
        """Called under the partition's lock: only queues."""
        with self._condition:
            self._waiting[key] = proposal
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()

    def run(self) -> None:
        try:
            while (proposals := self._take()) is not None:
                self._send(proposals)
        except BaseException as error:
            self._on_bug(error)
            raise

    def _take(self) -> dict[PartitionKey, ProposeIsr] | None:
        with self._condition:
            self._condition.wait_for(lambda: self._stopped or bool(self._waiting))
            if self._stopped:
                return None
            proposals, self._waiting = self._waiting, {}
            return proposals

    def _send(self, proposals: dict[PartitionKey, ProposeIsr]) -> None:
        manager = self.manager
        if manager is None:
            return
        changes = [_change(key, proposal) for key, proposal in proposals.items()]
        request = AlterPartition(manager.broker_id, manager.broker_epoch, changes)
        try:
            answer = self._controller.call(request, timeout_ms=self._timeout_ms)
        except SparkBrokerError as error:
            logger.info("ISR proposals are tried again: %s", error)
            self._try_again(manager, proposals)
            return
        if isinstance(answer, AlterPartitionResult):
            for result in answer.results:
                self._settle(manager, result, proposals)

    def _try_again(self, manager: ReplicaManager, proposals: dict[PartitionKey, ProposeIsr]) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._stopped, RETRY_S)
            for key, proposal in proposals.items():
                partition = manager.find(*key)
                if partition is not None and partition.is_current(proposal):
                    self._waiting.setdefault(key, proposal)

    @staticmethod
    def _settle(manager: ReplicaManager, result: AlterIsrResult, proposals: dict[PartitionKey, ProposeIsr]) -> None:
        """Success shows as a newer state of the partition, and so does a stale epoch; a certain refusal ends it."""
        key = (result.topic_id, result.partition)
        partition, proposal = manager.find(*key), proposals.get(key)
        if result.error_code and partition is not None and proposal is not None:
            logger.info("%s: ISR refused: %s %s", partition, result.error_code, result.error_message)
            partition.isr_refused(proposal.leader_epoch, proposal.partition_epoch, result.error_code)


def _change(key: PartitionKey, proposal: ProposeIsr) -> AlterIsr:
    members = [IsrMember(broker, epoch) for broker, epoch in proposal.isr]
    return AlterIsr(*key, proposal.leader_epoch, proposal.partition_epoch, members)
