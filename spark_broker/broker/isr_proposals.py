"""Carries ISR proposals to the controller in one thread. Proposals that wait share the next request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.proposal_queue import (
    RETRY_MS,
    ProposalQueue,
    Proposals,
    announce,
    request_of,
    settle,
    still_open,
)
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.slow import SLOW
from spark_broker.core.effects import ProposeIsr
from spark_broker.errors import SparkBrokerError
from spark_broker.threads import Worker
from spark_broker.transport.client import Connection

logger = logging.getLogger(__name__)


class IsrProposals(Worker):
    """One request at a time; while its outcome is unknown, its proposals are repeated (see `proposal_queue`)."""

    def __init__(self, controller: Connection, timeout_ms: int, on_bug: Callable[[BaseException], None]) -> None:
        super().__init__("isr-proposals", on_bug)
        self._controller = controller
        self._timeout_ms = timeout_ms
        self._condition = threading.Condition()
        self._queue = ProposalQueue()
        self._stopped = False
        self.manager: ReplicaManager | None = None

    def propose(self, key: PartitionKey, proposal: ProposeIsr) -> None:
        """Called under the partition's lock: only queues."""
        with self._condition:
            self._queue.add(key, proposal)
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()

    def work(self) -> None:
        while (proposals := self._take()) is not None:
            self._send(proposals)

    def _take(self) -> Proposals | None:
        with self._condition:
            self._condition.wait_for(lambda: self._stopped or self._queue.is_due)
            return None if self._stopped else self._queue.take()

    def _send(self, proposals: Proposals) -> None:
        manager = self.manager
        if manager is None:
            return
        with self._condition:
            news = self._queue.take_news()
        announce(manager, news)
        try:
            with SLOW.watch("call of AlterPartition", to="the controller"):
                answer = self._controller.call(request_of(manager, proposals), timeout_ms=self._timeout_ms)
            settle(manager, answer, proposals)
        except SparkBrokerError as error:
            logger.info("ISR proposals are tried again: %s", error)
            self._try_again(manager, proposals)
            return
        with self._condition:
            self._queue.settled()

    def _try_again(self, manager: ReplicaManager, proposals: Proposals) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._stopped, RETRY_MS / 1000)
        # Not under the queue's lock: this takes partitions' locks, under which partitions take the queue's.
        proposals = still_open(manager, proposals)
        with self._condition:
            self._queue.put_back(proposals)
