"""The cluster as a Spark application of its own, so that its driver can be killed too."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import psutil

from spark_broker.model import BrokerInfo
from spark_broker.testing.faults import (
    BrokerProcesses,
    broker_processes,
    kill_executor,
    kill_executor_and_daemon,
    kill_worker,
    stopped,
)
from tests.chaos.disks import SmallDisk, mounted
from tests.chaos.process_target import AHEAD_S, FREEZE_S, FULL_S
from tests.chaos.target import CONFIG, Target
from tests.spark.application import Application

MASTER = "local-cluster[3,2,1024]"

KILLS = {
    "kill-jvm": kill_executor,
    "kill-worker": kill_worker,
    "kill-jvm-and-daemon": kill_executor_and_daemon,
}
FREEZES = ("freeze-worker", "freeze-jvm", "freeze-executor")


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
        application = Application(self._directory, next(self._names), config, master=MASTER)
        return self._undo.enter_context(application).await_ready()

    def _end_processes(self) -> None:
        """Workers whose executor and daemon are gone are nobody's children. psutil knows a pid that was used again."""
        for process in self._seen:
            if process.is_running():
                process.kill()

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()
        self._undo.close()

    @property
    def kinds(self) -> tuple[str, ...]:
        return (*KILLS, "kill-leader-ahead", "kill-driver", *FREEZES, *(("full-disk",) if self._disk else ()))

    @property
    def bootstrap_servers(self) -> str:
        return self._bootstrap_servers

    def tend(self) -> None:
        """Spark and the launcher do."""

    @contextmanager
    def strike(self, kind: str, rng: random.Random) -> Iterator[str]:
        if kind == "kill-driver":
            yield "the driver"
            self._restart_driver()
        elif kind == "full-disk":
            assert self._disk is not None
            seconds = rng.uniform(*FULL_S)
            with self._disk.full():
                yield f"{self.broker_of(self._disk.path)}, {seconds:.1f} s"
                self.hold(seconds)
        elif kind == "kill-leader-ahead":
            with self._ahead(rng) as hit:
                yield hit
        else:
            broker = self.choose(rng, self._topic)
            processes = self._processes(broker)
            if kind in KILLS:
                KILLS[kind](processes)
                yield f"broker {broker.id}"
            else:
                seconds = rng.uniform(*FREEZE_S)
                with self._frozen(kind, processes):
                    yield f"broker {broker.id}, {seconds:.1f} s"
                    self.hold(seconds)

    @contextmanager
    def _ahead(self, rng: random.Random) -> Iterator[str]:
        """While its followers are frozen a leader can only append ahead of them: what it then acknowledges is lost."""
        leader, others = self.leader_and_others(self._topic)
        victim = self._processes(leader)
        with ExitStack() as frozen:
            for broker in others:
                frozen.enter_context(stopped(self._processes(broker).worker))
            self.hold(rng.uniform(*AHEAD_S))
            kill_executor(victim)
            yield f"broker {leader.id}"

    @contextmanager
    def _frozen(self, kind: str, processes: BrokerProcesses) -> Iterator[None]:
        whole = (processes.jvm, processes.daemon, processes.worker)
        pids = {"freeze-worker": whole[2:], "freeze-jvm": whole[:1], "freeze-executor": whole}[kind]
        with ExitStack() as frozen:
            for pid in pids:
                frozen.enter_context(stopped(pid))
            yield

    def _processes(self, broker: BrokerInfo) -> BrokerProcesses:
        found = broker_processes(broker)
        self._seen |= {psutil.Process(pid) for pid in (found.worker, found.daemon, found.jvm)}
        return found

    def _restart_driver(self) -> None:
        for broker in self.live():
            self._processes(broker)
        for pid in self._application.driver_pids:
            os.kill(pid, signal.SIGKILL)
        self._application.await_end()
        self._application = self._start()
