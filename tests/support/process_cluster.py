"""A real cluster without Spark: the controller's process and one process per broker, as a nest would start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
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


class ProcessCluster:
    """Brokers by slot; `kill` one, `launch` it again. A context manager."""

    def __init__(self, base: Path, brokers: int = 3, config: Mapping[str, object] | None = None) -> None:
        self.base = base
        self.settings = load_cluster_settings(config)
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
            host="127.0.0.1",
            port=port,
            shared_executor=True,
        )
        return ControllerClient.start(config)

    def restart_controller(self) -> None:
        """SIGKILL to the controller; another takes over on its port and metadata log."""
        port = self.controller.port
        os.kill(self.controller.pid, signal.SIGKILL)
        self.controller.close()
        self.controller = self._start_controller(port)
        self.await_live(len(self._processes))

    def launch(self, slot: int) -> subprocess.Popen[bytes]:
        """Start a broker's process under a new launch number."""
        launch = self.controller.new_launch()
        spec = BrokerSpec(
            cluster_id=self.controller.cluster_id,
            controller_host="127.0.0.1",
            controller_port=self.controller.port,
            launch=launch,
            log_dirs=str(self.base / "logs"),
            host="127.0.0.1",
            rack=None,
            executor_id=str(slot),
            settings=self.settings.cluster.to_dict(),
            topic_defaults=self.settings.topic.to_dict(),
            replaces=(self._launches[slot],) if slot in self._launches else (),
        )
        process = subprocess.Popen(
            [sys.executable, "-m", CHILD_MODULE], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(ChildOrder(spec, RUN_BROKER, os.getpid())) + b"\n")
        process.stdin.close()
        self._processes[slot] = process
        self._all.append(process)
        self._launches[slot] = launch
        return process

    def await_live(self, count: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until this many brokers are unfenced."""
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.05)):
            if sum(not broker.fenced for broker in self.controller.status().brokers) >= count:
                return
            pause.wait(0.05)
        raise AssertionError(f"{count} brokers are not live: {self.controller.status()}")

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"{b.host}:{b.port}" for b in self.controller.status().brokers if not b.fenced)

    def pid(self, slot: int) -> int:
        return self._processes[slot].pid

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
