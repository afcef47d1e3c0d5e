"""The cluster as processes, each broker in a network namespace of its own where the machine allows it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from spark_broker.errors import SparkBrokerError
from spark_broker.testing.faults import stopped
from tests.chaos.disks import SmallDisk, away, mounted
from tests.chaos.network import HUB, HUB_NODE, Network
from tests.chaos.target import BROKERS, CONFIG, Target
from tests.support.process_cluster import LOOPBACK, Place, ProcessCluster

FREEZE_S = (0.2, 8.0)
LOSS_S = (1.0, 10.0)
FULL_S = (1.0, 8.0)
AHEAD_S = (0.3, 2.0)
AWAY_S = (1.0, 20.0)
"""How long the metadata directory is gone: longer than leases and sessions, too."""


class ProcessTarget(Target):
    """`no_network`: why packets cannot be lost here; "" when they can."""

    name = "processes"

    def __init__(self, directory: Path, topic: str, *, no_network: str) -> None:
        super().__init__()
        self._topic = topic
        self._undo = ExitStack()
        self.log_dirs = [directory / "logs" / f"slot-{slot}" for slot in range(BROKERS)]
        self._disk: SmallDisk | None = None
        self._network: Network | None = None
        with self._undo:
            disk = self._undo.enter_context(mounted(self.log_dirs[0] / "broker-0"))
            if isinstance(disk, SmallDisk):
                self._disk = disk
            else:
                self.missing["full-disk"] = disk
            if no_network:
                self.missing["lossy-network"] = no_network
            else:
                self._network = self._undo.enter_context(Network(BROKERS))
            (directory / "output").mkdir()
            self.cluster = self._undo.enter_context(
                ProcessCluster(
                    directory,
                    BROKERS,
                    CONFIG,
                    places=self._network.places if self._network else [Place()] * BROKERS,
                    controller_host=HUB if self._network else LOOPBACK,
                    output=directory / "output",
                )
            )
            self._bootstrap_servers = self.cluster.bootstrap_servers
            self._undo = self._undo.pop_all()

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()
        self._undo.close()

    @property
    def kinds(self) -> tuple[str, ...]:
        always = (
            "kill-broker",
            "kill-all-brokers",
            "kill-leader-ahead",
            "freeze-broker",
            "replace-frozen-broker",
            "kill-controller",
            "freeze-controller",
            "metadata-away",
        )
        disk = ("full-disk",) if self._disk else ()
        network = ("lose-to-broker", "lose-to-hub", "lose-from-hub") if self._network else ()
        return (*always, *disk, *network)

    @property
    def bootstrap_servers(self) -> str:
        return self._bootstrap_servers

    def tend(self) -> None:
        with suppress(SparkBrokerError):  # The next call tries again: it may be the controller that is down.
            self.cluster.launch_ended()

    @contextmanager
    def strike(self, kind: str, rng: random.Random) -> Iterator[str]:
        match kind:
            case "kill-broker":
                broker = self.choose(rng, self._topic)
                os.kill(broker.pid, signal.SIGKILL)
                yield f"broker {broker.id}"
            case "kill-all-brokers":
                for slot in range(BROKERS):
                    os.kill(self.cluster.pid(slot), signal.SIGKILL)
                yield "all brokers"
            case "freeze-broker":
                broker = self.choose(rng, self._topic)
                seconds = rng.uniform(*FREEZE_S)
                with stopped(broker.pid):
                    yield f"broker {broker.id}, {seconds:.1f} s"
                    self.hold(seconds)
            case "replace-frozen-broker":
                broker = self.choose(rng, self._topic)
                slot_of_broker = self.cluster.slot_of(broker.pid)
                with stopped(broker.pid):
                    yield f"broker {broker.id}"
                    if slot_of_broker is not None:
                        self.cluster.launch(slot_of_broker)
                    self.hold(rng.uniform(*FREEZE_S))
            case "kill-leader-ahead":
                with self._ahead(rng) as hit:
                    yield hit
            case "kill-controller":
                yield "the controller"
                self.cluster.restart_controller()
            case "freeze-controller":
                seconds = rng.uniform(*FREEZE_S)
                with stopped(self.cluster.controller.pid):
                    yield f"the controller, {seconds:.1f} s"
                    self.hold(seconds)
            case "metadata-away":
                seconds, also = rng.uniform(*AWAY_S), self.choose(rng, self._topic) if rng.random() < 0.5 else None
                with away(self.cluster.base / "metadata"):
                    if also is not None:
                        os.kill(also.pid, signal.SIGKILL)
                    yield f"{seconds:.1f} s" + (f", broker {also.id} killed" if also else "")
                    self.hold(seconds)
            case "full-disk":
                assert self._disk is not None
                seconds = rng.uniform(*FULL_S)
                with self._disk.full():
                    yield f"{self.broker_of(self._disk.path)}, {seconds:.1f} s"
                    self.hold(seconds)
            case _:
                with self._lossy(kind, rng) as hit:
                    yield hit

    @contextmanager
    def _ahead(self, rng: random.Random) -> Iterator[str]:
        """While its followers are frozen a leader can only append ahead of them: what it then acknowledges is lost."""
        leader, others = self.leader_and_others(self._topic)
        with ExitStack() as frozen:
            for broker in others:
                frozen.enter_context(stopped(broker.pid))
            self.hold(rng.uniform(*AHEAD_S))
            os.kill(leader.pid, signal.SIGKILL)
            yield f"broker {leader.id}"

    @contextmanager
    def _lossy(self, kind: str, rng: random.Random) -> Iterator[str]:
        assert self._network is not None
        source, target = rng.sample(range(BROKERS), 2)
        if kind == "lose-to-hub":
            target = HUB_NODE
        elif kind == "lose-from-hub":
            source = HUB_NODE
        seconds = rng.uniform(*LOSS_S)
        names = [f"slot {node}" if node != HUB_NODE else "controller and clients" for node in (source, target)]
        with self._network.lossy(source, target):
            yield f"{names[0]} to {names[1]}, {seconds:.1f} s"
            self.hold(seconds)
