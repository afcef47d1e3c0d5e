"""A real cluster without Spark: the controller's process and one process per broker, as a keeper would start them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from spark_broker.broker import hosting
from spark_broker.broker.hosting import KeptBroker
from spark_broker.broker.spec import BrokerSpec, new_secret
from spark_broker.config import load_cluster_settings
from spark_broker.driver.controller_client import ControllerClient
from spark_broker.driver.controller_pipe import ControllerConfig
from spark_broker.driver.keeper_task import RUN_BROKER
from spark_broker.storage.filesystem import ProcessIdentity, process_start_time

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where a broker runs: the address that it binds, and a command before its own, which must not fork."""

    host: str = LOOPBACK
    command: tuple[str, ...] = ()


class ProcessCluster:
    """Brokers by slot. `launch` starts one; its `kill` ends it. A context manager. For use by several threads.

    `places`: one for each broker, which then has a `log.dirs` of its own: a bootstrap list survives the end of all
    of them. `controller_host`: what the controller binds; `output`: where brokers' output goes.
    `entry`: what a broker's process runs, as module:function. `live`: how many brokers the start waits for, if not all.
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
        entry: str = RUN_BROKER,
        live: int | None = None,
        accept_older_metadata: bool = False,
    ) -> None:
        self.base = base
        self.log_dirs = base / "logs"
        self.settings = load_cluster_settings(config)
        self._places = list(places) or [Place()] * brokers
        self._own_log_dirs = bool(places)
        self._controller_host = controller_host
        self._output = output
        self._entry = entry
        self._lock = threading.RLock()
        self._brokers: dict[int, KeptBroker] = {}  # by slot
        self._all: list[KeptBroker] = []
        self.controller = self._start_controller(accept_older_metadata=accept_older_metadata)
        for slot in range(brokers):
            self.launch(slot)
        self.await_live(brokers if live is None else live)

    def _start_controller(self, port: int = 0, *, accept_older_metadata: bool = False) -> ControllerClient:
        config = ControllerConfig(
            cluster=self.settings.cluster.to_dict(),
            topic=self.settings.topic.given(),
            metadata_dir=str(self.base / "metadata"),
            host=self._controller_host,
            port=port,
            shared_executor=True,
            accept_older_metadata=accept_older_metadata,
        )
        return ControllerClient.start(config)

    def restart_controller(self) -> None:
        """SIGKILL to the controller; another takes over on its port and metadata log."""
        with self._lock:
            port = self.controller.port
            os.kill(self.controller.pid, signal.SIGKILL)
            self.controller.close()
            self.controller = self._start_controller(port)
        self.await_live(len(self._brokers))

    def launch(self, slot: int) -> KeptBroker:
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
                secret=new_secret(),
                replaces=(self._brokers[slot].launch,) if slot in self._brokers else (),
            )
            broker = self._start(slot, place, spec)
            self._brokers[slot] = broker
            self._all.append(broker)
        return broker

    def _start(self, slot: int, place: Place, spec: BrokerSpec) -> KeptBroker:
        """This process is to the brokers what an executor's JVM is to others: they end when it does."""
        executor = ProcessIdentity(os.getpid(), process_start_time(os.getpid()) or 0)
        path = Path(os.devnull) if self._output is None else self._output / f"slot-{slot}.log"
        with path.open("ab") as log:
            return hosting.start(spec, self._entry, executor, command=place.command, log=log)

    def log_dirs_of(self, slot: int) -> Path:
        """The `log.dirs` under which a slot's broker claims its directory."""
        return self.log_dirs / f"slot-{slot}" if self._own_log_dirs else self.log_dirs

    def launch_ended(self) -> list[int]:
        """Launch every broker whose process has ended, as Spark's launcher would; returns their slots."""
        with self._lock:
            ended = self.ended()
            for slot in ended:
                self.launch(slot)
            return ended

    def ended(self) -> list[int]:
        """The slots of brokers whose process has ended."""
        with self._lock:
            return [slot for slot, broker in self._brokers.items() if broker.has_ended]

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
        return self._brokers[slot].pid

    def slot_of(self, pid: int) -> int | None:
        """The slot whose present process this is; None for one that was replaced."""
        return next((slot for slot, broker in self._brokers.items() if broker.pid == pid), None)

    def stop(self) -> None:
        """End everything; nothing is left for a second call."""
        ended, self._all = self._all, []
        for broker in ended:
            broker.kill()
            broker.wait(END_TIMEOUT_S)
            broker.close()
        self.controller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
