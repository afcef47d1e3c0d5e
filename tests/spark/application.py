"""The cluster as an application of its own (`jobs/cluster.py`), for tests that kill its driver and start it again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pytest

from spark_broker.testing.faults import is_running
from tests.spark.failover import wait_for
from tests.support.processes import kill_all

ROOT = Path(__file__).parents[2]
MASTER = "local-cluster[3,2,1024]"

TRACEBACK = re.compile(r'^Traceback \(most recent call last\):\n(?!  File "[^"]*pyspark/daemon\.py")', re.MULTILINE)
"""But for those of Spark's Python workers, which lose their JVM in the middle of a task."""


class Application:
    """One start of the cluster application on given directories. Its processes end with the block."""

    def __init__(
        self,
        directory: Path,
        name: str,
        config: dict[str, object],
        *,
        master: str = MASTER,
        brokers: int = 3,
        spark_settings: Mapping[str, str] | None = None,
    ) -> None:
        self._ready_file = directory / f"{name}.json"
        self._log = directory / f"{name}.log"
        settings = [part for key, value in config.items() for part in ("--set", f"{key}={value}")]
        self.bootstrap_servers = ""
        self.broker_pids: list[int] = []
        self.executor_pids: list[int] = []
        self._processes: list[psutil.Process] = []
        command = [sys.executable, str(ROOT / "jobs" / "cluster.py"), "--master", master, "--brokers", str(brokers)]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--ready-file", str(self._ready_file), *settings],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=environment(spark_settings or {}),
            )

    def await_ready(self) -> Self:
        """Wait until every broker is live. Remember the addresses and processes of the brokers."""
        wait_for(lambda: self._ready_file.exists() or self._process.poll() is not None, "the ready file")
        if not self._ready_file.exists():
            pytest.fail(f"the application has ended: {self._log.read_text()}")
        ready = json.loads(self._ready_file.read_text())
        self.bootstrap_servers = str(ready["bootstrap_servers"])
        self.broker_pids = [int(broker["pid"]) for broker in ready["brokers"]]
        self.executor_pids = [int(broker["executor_pid"]) for broker in ready["brokers"]]
        self._processes = [psutil.Process(pid) for pid in (*self.driver_pids, *self.executor_pids, *self.broker_pids)]
        return self

    @property
    def log(self) -> str:
        """What the driver has printed."""
        return self._log.read_text()

    @property
    def driver_pids(self) -> list[int]:
        """The driver's Python process and its JVM."""
        return [self._process.pid, self.jvm_pid]

    @property
    def jvm_pid(self) -> int:
        (jvm,) = (child.pid for child in psutil.Process(self._process.pid).children() if child.name() == "java")
        return int(jvm)

    def await_end(self, *, but: int = -1) -> None:
        """Wait for the end of the driver's Python process and of every broker, except this one's (a pid)."""
        wait_for(lambda: self._process.poll() is not None, "the end of the driver's Python process")
        brokers = [pid for pid in self.broker_pids if pid != but]
        wait_for(lambda: not any(is_running(pid) for pid in brokers), "the end of the application's brokers")

    def end_in_order(self) -> None:
        """Ask the driver to end, and check that it has ended everything."""
        self._process.send_signal(signal.SIGTERM)
        self.await_end()
        assert self._process.returncode == 0, self.log
        assert "stopped" in self.log.splitlines()
        assert not self._ready_file.exists()

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End by force what is left of it."""
        starting = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.kill()
        self._process.wait(30)
        kill_all({*self._processes, *starting})


def environment(spark_settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with settings for the Spark application that is started in it."""
    if not spark_settings:
        return dict(os.environ)
    conf = " ".join(f"--conf {name}={value}" for name, value in spark_settings.items())
    return {**os.environ, "PYSPARK_SUBMIT_ARGS": f"{conf} pyspark-shell"}
