"""A standalone Spark cluster of this machine, whose workers have hosts of their own (addresses of the loopback net)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.spark.failover import wait_for
from tests.support.ports import free_port

SPARK_CLASS = Path(sys.executable).with_name("spark-class")
MASTER_CLASS = "org.apache.spark.deploy.master.Master"
WORKER_CLASS = "org.apache.spark.deploy.worker.Worker"
TIMEOUT_S = 30.0


class StandaloneCluster:
    """A master, and a worker on each of 127.0.0.1, 127.0.0.2 and so on. A context manager."""

    def __init__(
        self, directory: Path, workers: int, java_options: str = "", *, cores: int = 2, memory: str = "2g"
    ) -> None:
        self._directory = directory
        self._java_options = java_options
        self._processes: list[subprocess.Popen[bytes]] = []
        self._master_log = directory / "master.log"
        self._page = f"http://127.0.0.1:{free_port()}"
        port = self._page.rpartition(":")[2]
        self._start("127.0.0.1", self._master_log, MASTER_CLASS, "--port", "0", "--webui-port", port)
        self._workers = workers
        self._resources = ("--cores", str(cores), "--memory", memory)  # of each worker
        self.master = ""

    def _start(self, host: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "SPARK_LOCAL_IP": host, "SPARK_DAEMON_JAVA_OPTS": self._java_options}
        with log.open("wb") as output:
            command = [str(SPARK_CLASS), *arguments, "--host", host]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        self._processes.append(process)
        return process

    def __enter__(self) -> Self:
        try:
            wait_for(lambda: re.search(r"spark://[\d.:]+", self._master_log.read_text()), "the master")
            match = re.search(r"spark://[\d.:]+", self._master_log.read_text())
            self.master = match.group(0) if match else ""
            for _ in range(self._workers):
                self.add_worker()
        except BaseException:
            self.close()
            raise
        return self

    def add_worker(self) -> None:
        """Start a worker on the next address. The applications that want more cores get an executor on it."""
        host = f"127.0.0.{len(self._processes)}"
        place = ("--work-dir", str(self._directory / host), "--webui-port", "0")
        log = self._directory / f"worker-{host}.log"
        self._start(host, log, WORKER_CLASS, *self._resources, *place, self.master)
        wait_for(lambda: "Successfully registered" in log.read_text(), f"a worker on {host}")

    def decommission(self, host: str) -> None:
        """What an operator does before a machine goes: the worker on it is notified, and notifies its executors."""
        os.kill(self._worker(host).pid, signal.SIGPWR)

    def kill_application(self) -> None:
        """What the page of the master does when a user presses (kill) beside the application."""
        page = urllib.request.urlopen(self._page, timeout=TIMEOUT_S).read().decode()
        (application,) = set(re.findall(r"app-\d+-\d+", page))
        data = urllib.parse.urlencode({"id": application, "terminate": "true"}).encode()
        with urllib.request.urlopen(f"{self._page}/app/kill/", data, timeout=TIMEOUT_S):
            pass

    def _worker(self, host: str) -> subprocess.Popen[bytes]:
        return self._processes[int(host.rpartition(".")[2])]

    def close(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(TIMEOUT_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
