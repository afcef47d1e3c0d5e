"""A broker's part in consumer groups: the production coordinator of committed offsets, without its callers' threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_broker.broker.coordinator import Coordinator
from spark_broker.broker.service import COMMIT_TIMEOUT_MS
from spark_broker.protocol.messages import OffsetCommit, OffsetFetch
from spark_broker.testing.simulation.network import Reply

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess


class GroupCoordination:
    """Serves what concerns groups; maintenance writes the snapshots, as in production."""

    def __init__(self, process: BrokerProcess) -> None:
        self._clock = process.machine.clock
        snapshot_records = process.world.settings.cluster.offsets_topic_snapshot_records
        self.coordinator = Coordinator(process.manager, snapshot_records, clock=self._clock)

    def answer(self, request: OffsetCommit | OffsetFetch, reply: Reply) -> None:
        """As `BrokerService.answer`. Raises the error that the caller gets."""
        if isinstance(request, OffsetFetch):
            reply(self.coordinator.fetch(request))
        else:
            self.coordinator.commit(request, self._clock.boottime_ms() + COMMIT_TIMEOUT_MS, reply)
