"""A real cluster that faults are made on: what the nemesis asks of it, whether it is processes or Spark executors."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from spark_broker.client.admin import Admin
from spark_broker.errors import SparkBrokerError
from spark_broker.model import BrokerInfo, PartitionInfo, TopicPartition
from spark_broker.storage.directory_meta import read_meta

POLL_S = 0.1
BROKERS = 3
REPLICAS = 3

CONFIG: dict[str, object] = {
    "broker.session.timeout.ms": 3000,
    "replica.lag.time.max.ms": 10_000,
    "replica.reassignment.delay.ms": 600_000,
    "offsets.topic.num.partitions": 2,
    "transaction.state.log.num.partitions": 4,
    "log.cleaner.backoff.ms": 500,
}
"""A silent broker is fenced within seconds; the replicas of one that is away are not moved, since it comes back. Logs
are compacted as often as they need it.
"""


class NotHealedError(Exception):
    """The cluster did not become well again: as bad as a lost record."""


class Target(ABC):
    """A cluster of `BROKERS` brokers. `kinds`: the faults that can be made; `missing`: those that cannot, and why."""

    name: str
    log_dirs: list[Path]

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        self._admin: Admin | None = None
        self._pause = threading.Event()

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def bootstrap_servers(self) -> str: ...

    @abstractmethod
    def strike(self, kind: str, rng: random.Random) -> AbstractContextManager[str]:
        """Make a fault; it lasts as long as the block, or for good. Gives the name of what was hit."""

    def check_spared(self) -> None:  # noqa: B027 (not every kind of cluster can tell)
        """Raise NotHealedError where the last fault ended a broker that it did not hit."""

    @abstractmethod
    def tend(self) -> None:
        """Restart what nothing else restarts."""

    def admin(self) -> Admin:
        if self._admin is None:
            self._admin = Admin(self.bootstrap_servers)
        return self._admin

    def live(self) -> tuple[BrokerInfo, ...]:
        return self.admin().describe_cluster().brokers

    def described(self, topic: str) -> tuple[PartitionInfo, ...]:
        return self.admin().describe_topic(topic).partitions

    def choose(self, rng: random.Random, topic: str) -> BrokerInfo:
        """A live broker: every second time the one that leads partition 0."""
        wants_leader, fallback = rng.random() < 0.5, rng.random()
        candidates: list[BrokerInfo] = []

        def chosen() -> bool:
            live = sorted(self.live(), key=lambda broker: broker.id)
            leader = self.described(topic)[0].leader
            candidates[:] = [broker for broker in live if broker.id == leader] if wants_leader else live
            return bool(candidates)

        self.wait_for(chosen, "a live broker", 120.0)
        return candidates[int(fallback * len(candidates))]

    def leader_and_others(self, topic: str) -> tuple[BrokerInfo, list[BrokerInfo]]:
        """The broker that leads partition 0, and the other live ones; waits for it."""
        brokers: dict[int, BrokerInfo] = {}
        leaders: list[int | None] = []

        def chosen() -> bool:
            brokers.clear()
            brokers.update({broker.id: broker for broker in self.live()})
            leaders[:] = [self.described(topic)[0].leader]
            return leaders[0] in brokers

        self.wait_for(chosen, "a live leader of partition 0", 120.0)
        assert leaders[0] is not None
        return brokers.pop(leaders[0]), list(brokers.values())

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Return once the condition holds, tending the cluster meanwhile. Raises NotHealedError.

        A call that fails while brokers change says nothing: it is made again.
        """
        deadline = time.monotonic() + timeout_s
        last = "it was false"
        while True:
            try:
                self.tend()
                if condition():
                    return
            except SparkBrokerError as error:
                last = str(error)
            if time.monotonic() > deadline:
                raise NotHealedError(f"waited {timeout_s} s in vain for {what}; at last {last}")
            self._pause.wait(POLL_S)

    def hold(self, seconds: float) -> None:
        """Let a fault last."""
        self._pause.wait(seconds)

    def await_healed(self, topic: str, timeout_s: float) -> None:
        """Wait until all brokers are live and every partition has its leader and all its replicas in sync."""

        def healed() -> bool:
            full = all(p.leader in p.isr and len(p.isr) == len(p.replicas) for p in self.described(topic))
            return full and len(self.live()) == BROKERS

        self.wait_for(healed, f"{BROKERS} live brokers and full ISRs", timeout_s)

    def partitions(self, topic: str) -> list[TopicPartition]:
        return [TopicPartition(topic, partition.partition) for partition in self.described(topic)]

    def broker_of(self, directory: Path) -> str:
        """The broker that a log directory belongs to."""
        meta = read_meta(directory)
        return f"broker {meta.broker_id}" if meta else str(directory.name)


@contextmanager
def lasting(target: str) -> Iterator[str]:
    """A fault that nothing ends."""
    yield target
