"""The demo's Spark applications. Each is a process group of its own, with a log file, and the demo ends it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

JOBS = Path(__file__).resolve().parent
POLL_S = 0.05
END_TIMEOUT_S = 20.0


class DemoError(Exception):
    """The demo cannot go on. The message says why and where to look."""


class SparkProcess:
    """One `spark-submit`, started at once. A context manager: what still runs at its end is ended by force."""

    def __init__(self, job: str, arguments: Sequence[str], log: Path, *, master: str = "") -> None:
        self.job = job
        self.log = log
        command = [spark_submit(), *(("--master", master) if master else ()), str(JOBS / job), *arguments]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """The exit status, once it has ended. Raises DemoError after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self.job} still runs after {timeout_s:g} s; its log: {self.log}") from None

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait for something that this job brings about. Raises DemoError when it ends first or takes too long."""
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not condition():
            if self.status() is not None and not condition():
                raise DemoError(f"{self.job} ended with status {self.status()} before {what}; its log: {self.log}")
            if time.monotonic() > deadline:
                raise DemoError(f"{what}: not within {timeout_s:g} s; the log of {self.job}: {self.log}")
            pause.wait(POLL_S)

    def terminate(self, pid: int) -> None:
        """Ask one process of this application to end: a cluster ends in order when its driver is asked."""
        os.kill(pid, signal.SIGTERM)

    def last_line(self) -> str:
        """The last line of its log that is not blank."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        """End the whole group, by force where it does not end on SIGTERM."""
        if self.status() is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(self._process.pid, number)
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def spark_submit() -> str:
    """The `spark-submit` of this environment. Raises DemoError."""
    beside = Path(sys.executable).parent / "spark-submit"
    path = str(beside) if beside.exists() else shutil.which("spark-submit")
    if path is None:
        raise DemoError("there is no spark-submit: pip install 'spark-broker[spark]'")
    return path


def environment() -> dict[str, str]:
    """The environment of a Spark application on this machine, whether or not `make` has set it."""
    bin_directory = str(Path(sys.executable).parent)
    return {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        **os.environ,
        "PATH": os.pathsep.join((bin_directory, os.environ.get("PATH", ""))),
    }


def kill(pid: int) -> None:
    """`kill -9` of exactly this process, and wait until it is gone. Raises ProcessLookupError when it is not there."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(END_TIMEOUT_S * 1000)
    finally:
        os.close(pidfd)
