"""The cluster as a Spark application of its own, so that its driver can be killed too."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import psutil

from spark_broker.model import BrokerInfo
from spark_broker.testing.faults import (
    BrokerProcesses,
    broker_processes,
    kill_all_python,
    kill_broker,
    kill_executor,
    kill_executor_and_broker,
    kill_keeper,
    kill_keeper_daemon,
    stopped,
)
from tests.chaos.disks import SmallDisk, away, mounted
from tests.chaos.process_target import AHEAD_S, AWAY_S, FREEZE_S, FULL_S
from tests.chaos.target import CONFIG, NotHealedError, Target
from tests.spark.application import Application
from tests.support.ports import free_port
from tests.support.processes import kill_all
from tests.support.spark_ui import SparkUi

MASTER = "local-cluster[3,2,1024]"

KILLS = {
    "kill-jvm": kill_executor,
    "kill-broker": kill_broker,
    "kill-jvm-and-broker": kill_executor_and_broker,
    "kill-all-python": kill_all_python,
}
"""Faults that end a broker."""

KEEPER_KILLS = {"kill-keeper": kill_keeper, "kill-keeper-daemon": kill_keeper_daemon}
"""Faults that end no broker. Kills on Spark's own page end none either, nor do freezes of other processes."""

PAGE_KILLS = {"kill-jobs": "jobs", "kill-stages": "stages"}
FREEZES: dict[str, Callable[[BrokerProcesses], tuple[int | None, ...]]] = {
    "freeze-broker": lambda one: (one.broker,),
    "freeze-jvm": lambda one: (one.jvm,),
    "freeze-keeper": lambda one: (one.keeper, one.keeper_daemon),
    "freeze-executor": lambda one: (one.jvm, one.keeper_daemon, one.keeper, one.broker),
}


class SparkTarget(Target):
    """Three executors of Spark's, a broker on each."""

    name = "Spark executors"

    def __init__(self, directory: Path, topic: str) -> None:
        super().__init__()
        self._directory = directory
        self._topic = topic
        self._names = (f"application-{number}" for number in count())
        self._undo = ExitStack()
        self.log_dirs = [directory / "logs"]
        self._seen: set[psutil.Process] = set()
        self._spared: dict[int, int] = {}  # broker id to its epoch, of those that the last fault must not have ended
        self._disk: SmallDisk | None = None
        self.missing["lossy-network"] = "executors of a local-cluster share one network namespace"
        with self._undo:
            disk = self._undo.enter_context(mounted(self.log_dirs[0] / "broker-0"))
            if isinstance(disk, SmallDisk):
                self._disk = disk
            else:
                self.missing["full-disk"] = disk
            self._undo.callback(self._end_processes)
            self._application = self._start()
            self._bootstrap_servers = self._application.bootstrap_servers
            self._undo = self._undo.pop_all()

    def _start(self) -> Application:
        config = {**CONFIG, "log.dirs": self.log_dirs[0], "metadata.dir": self._directory / "metadata"}
        port = free_port()
        self._page = SparkUi(f"http://127.0.0.1:{port}")
        spark_settings = {"spark.ui.enabled": "true", "spark.ui.port": str(port)}
        application = Application(
            self._directory, next(self._names), config, master=MASTER, spark_settings=spark_settings
        )
        return self._undo.enter_context(application).await_ready()

    def _end_processes(self) -> None:
        """A broker whose keeper has ended is an orphan."""
        kill_all(self._seen)

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()
        self._undo.close()

    @property
    def kinds(self) -> tuple[str, ...]:
        disk = ("full-disk",) if self._disk else ()
        return (
            *KILLS,
            *KEEPER_KILLS,
            *PAGE_KILLS,
            "kill-leader-ahead",
            "kill-driver",
            "metadata-away",
            *FREEZES,
            *disk,
        )

    @property
    def bootstrap_servers(self) -> str:
        return self._bootstrap_servers

    def tend(self) -> None:
        """Nothing: Spark and the launcher restart what has ended."""

    @contextmanager
    def strike(self, kind: str, rng: random.Random) -> Iterator[str]:
        self._spared = {}
        if kind == "kill-driver":
            yield "the driver"
            self._restart_driver()
        elif kind == "metadata-away":
            self._spare(but=None)
            seconds = rng.uniform(*AWAY_S)
            with away(self._directory / "metadata"):
                yield f"{seconds:.1f} s"
                self.hold(seconds)
        elif kind == "full-disk":
            assert self._disk is not None
            seconds = rng.uniform(*FULL_S)
            with self._disk.full():
                yield f"{self.broker_of(self._disk.path)}, {seconds:.1f} s"
                self.hold(seconds)
        elif kind == "kill-leader-ahead":
            with self._ahead(rng) as hit:
                yield hit
        elif kind in PAGE_KILLS:
            self._spare(but=None)
            yield f"{self._page.kill(PAGE_KILLS[kind])} {PAGE_KILLS[kind]}"
        else:
            with self._one_executor(kind, rng) as hit:
                yield hit

    @contextmanager
    def _one_executor(self, kind: str, rng: random.Random) -> Iterator[str]:
        broker = self.choose(rng, self._topic)
        processes = self._processes(broker)
        ends = kind in KILLS or kind in ("freeze-broker", "freeze-executor")
        self._spare(but=broker if ends else None)
        if kind in FREEZES:
            seconds = rng.uniform(*FREEZE_S)
            with stopped(*FREEZES[kind](processes)):
                yield f"broker {broker.id}, {seconds:.1f} s"
                self.hold(seconds)
        else:
            {**KILLS, **KEEPER_KILLS}[kind](processes)
            yield f"broker {broker.id}"

    @contextmanager
    def _ahead(self, rng: random.Random) -> Iterator[str]:
        """While its followers are frozen a leader can only append ahead of them: what it then acknowledges is lost."""
        leader, others = self.leader_and_others(self._topic)
        victim = self._processes(leader)
        with stopped(*(self._processes(broker).broker for broker in others)):
            self.hold(rng.uniform(*AHEAD_S))
            kill_executor_and_broker(victim)
            yield f"broker {leader.id}"

    def _spare(self, *, but: BrokerInfo | None) -> None:
        """The next fault must not end these brokers: all that are live now, except the one that it hits."""
        self._spared = {broker.id: broker.epoch for broker in self.live() if but is None or broker.id != but.id}

    def check_spared(self) -> None:
        now = {broker.id: broker.epoch for broker in self.admin().describe_cluster(include_fenced=True).brokers}
        for broker_id, epoch in self._spared.items():
            if now.get(broker_id) != epoch:
                raise NotHealedError(f"broker {broker_id} was restarted by a fault that did not hit it")

    def _processes(self, broker: BrokerInfo) -> BrokerProcesses:
        processes = broker_processes(broker)
        self._seen |= {psutil.Process(pid) for pid in (processes.jvm, *processes.python)}
        return processes

    def _restart_driver(self) -> None:
        for broker in self.live():
            self._processes(broker)
        for pid in self._application.driver_pids:
            os.kill(pid, signal.SIGKILL)
        self._application.await_end()
        self._application = self._start()
