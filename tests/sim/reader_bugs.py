"""Bugs of readers that wait on their leaders for records, put in for the simulator."""

from __future__ import annotations

from functools import partial

from spark_broker.broker.fetch_operation import FetchOperation
from spark_broker.broker.partition import Partition
from spark_broker.core.effects import Effect, HighWatermarkAdvanced
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import FetchRequest
from tests.sim import bugs
from tests.sim.bugs import Patch
from tests.sim.kinds import has_long_polls

bug = partial(bugs.bug, quick=False, shows=has_long_polls)


@bug("49")
def tell_no_reader_of_commits(patch: Patch) -> None:
    """Records are committed, and a reader that waits for them sleeps until its time is over."""
    carry_out = Partition._carry_out_one

    def buggy(self: Partition, effect: Effect) -> None:
        if not isinstance(effect, HighWatermarkAdvanced):
            carry_out(self, effect)

    patch.setattr(Partition, "_carry_out_one", buggy)


@bug("49")
def listen_to_what_is_read_first(patch: Patch) -> None:
    """A fetch of several partitions is woken by the first of them only."""
    received = FetchOperation.received

    def buggy(self: FetchOperation, request: FetchRequest, now_ms: int) -> None:
        received(self, request, now_ms)
        for partition in self._listening[1:]:
            partition.forget(self.notifier)

    patch.setattr(FetchOperation, "received", buggy)


@bug("49")
def say_nothing_when_a_replica_stops(patch: Patch) -> None:
    """A leader's log fails, and those who wait for its records learn it at the end of their wait."""

    def buggy(self: Partition, error: SparkBrokerError) -> None:
        with self.lock:
            self.lines.stopping(error.message)
            self._carry_out(self.replica.stop(error))

    patch.setattr(Partition, "stop", buggy)
