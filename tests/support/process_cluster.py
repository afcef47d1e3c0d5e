"""A real cluster without Spark: the controller's process and one process per broker, as a nest would start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from spark_broker.broker.spec import BrokerSpec
from spark_broker.config import load_cluster_settings
from spark_broker.driver.broker_task import RUN_BROKER
from spark_broker.driver.controller_client import ControllerClient
from spark_broker.driver.controller_pipe import ControllerConfig
from spark_broker.driver.nest_task import CHILD_MODULE, ChildOrder

START_TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where a broker runs: the address that it binds, and a command before its own, which must not fork."""

    host: str = LOOPBACK
    command: tuple[str, ...] = ()


class ProcessCluster:
    """Brokers by slot; `kill` one, `launch` it again. A context manager. For use by several threads.

    `places`: one for each broker, which then has a `log.dirs` of its own: a bootstrap list survives the end of all
    of them. `controller_host`: what the controller binds; `output`: where brokers' words go.
    """

    def __init__(
        self,
        base: Path,
        brokers: int = 3,
        config: Mapping[str, object] | None = None,
        *,
        places: Sequence[Place] = (),
        controller_host: str = LOOPBACK,
        output: Path | None = None,
    ) -> None:
        self.base = base
        self.log_dirs = base / "logs"
        self.settings = load_cluster_settings(config)
        self._places = list(places) or [Place()] * brokers
        self._own_log_dirs = bool(places)
        self._controller_host = controller_host
        self._output = output
        self._lock = threading.RLock()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._launches: dict[int, int] = {}
        self._all: list[subprocess.Popen[bytes]] = []
        self.controller = self._start_controller()
        for slot in range(brokers):
            self.launch(slot)
        self.await_live(brokers)

    def _start_controller(self, port: int = 0) -> ControllerClient:
        config = ControllerConfig(
            cluster=self.settings.cluster.to_dict(),
            topic=self.settings.topic.to_dict(),
            metadata_dir=str(self.base / "metadata"),
            host=self._controller_host,
            port=port,
            shared_executor=True,
        )
        return ControllerClient.start(config)

    def restart_controller(self) -> None:
        """SIGKILL to the controller; another takes over on its port and metadata log."""
        with self._lock:
            port = self.controller.port
            os.kill(self.controller.pid, signal.SIGKILL)
            self.controller.close()
            self.controller = self._start_controller(port)
        self.await_live(len(self._processes))

    def launch(self, slot: int) -> subprocess.Popen[bytes]:
        """Start a broker's process under a new launch number."""
        with self._lock:
            launch = self.controller.new_launch()
            place = self._places[slot]
            spec = BrokerSpec(
                cluster_id=self.controller.cluster_id,
                controller_host=self._controller_host,
                controller_port=self.controller.port,
                launch=launch,
                log_dirs=str(self.log_dirs_of(slot)),
                host=place.host,
                rack=None,
                executor_id=str(slot),
                settings=self.settings.cluster.to_dict(),
                topic_defaults=self.settings.topic.to_dict(),
                replaces=(self._launches[slot],) if slot in self._launches else (),
            )
            process = self._spawn(slot, place, ChildOrder(spec, RUN_BROKER, os.getpid()))
            self._processes[slot] = process
            self._all.append(process)
            self._launches[slot] = launch
        return process

    def _spawn(self, slot: int, place: Place, order: ChildOrder) -> subprocess.Popen[bytes]:
        command = [*place.command, sys.executable, "-m", CHILD_MODULE]
        if self._output is None:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        else:
            with (self._output / f"slot-{slot}.log").open("ab") as log:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.close()
        return process

    def log_dirs_of(self, slot: int) -> Path:
        """Under which a slot's broker claims its directory."""
        return self.log_dirs / f"slot-{slot}" if self._own_log_dirs else self.log_dirs

    def launch_ended(self) -> list[int]:
        """Launch every broker whose process has ended, as Spark's launcher would; the slots."""
        with self._lock:
            ended = [slot for slot, process in self._processes.items() if process.poll() is not None]
            for slot in ended:
                self.launch(slot)
            return ended

    def await_live(self, count: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until this many brokers are unfenced."""
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.05)):
            if self.live_count() >= count:
                return
            pause.wait(0.05)
        raise AssertionError(f"{count} brokers are not live: {self.controller.status()}")

    def live_count(self) -> int:
        """Brokers that are unfenced."""
        with self._lock:
            return sum(not broker.fenced for broker in self.controller.status().brokers)

    @property
    def bootstrap_servers(self) -> str:
        with self._lock:
            return ",".join(f"{b.host}:{b.port}" for b in self.controller.status().brokers if not b.fenced)

    def pid(self, slot: int) -> int:
        return self._processes[slot].pid

    def slot_of(self, pid: int) -> int | None:
        """The slot whose present process this is; None for one that was replaced."""
        return next((slot for slot, process in self._processes.items() if process.pid == pid), None)

    def stop(self) -> None:
        for process in self._all:
            process.kill()
            process.wait(10)
        self.controller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
