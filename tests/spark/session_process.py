"""A Python process with a Spark session and a cluster in it, as a notebook: it does what it is told, line by line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from spark_broker.testing.faults import is_running
from tests.support.processes import kill_all
from tests.support.story import step
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]

CELLS = textwrap.dedent(
    """
    import json, os, signal, sys
    from pyspark.sql import SparkSession
    from spark_broker import BrokerCluster, configure_spark

    def begin(brokers):
        global spark, cluster
        builder = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")
        spark = configure_spark(builder).getOrCreate()
        cluster = BrokerCluster.start(spark, brokers, {"log.dirs": sys.argv[2]})

    for line in sys.stdin:
        if line.startswith("? "):
            print(json.dumps(eval(line[2:])), flush=True)
        else:
            exec(line)
            print(json.dumps("done"), flush=True)
    """
)


class SessionProcess:
    """The process. It runs the statements of `tell` and answers `ask`. A context manager: nothing of it is left.

    `brokers`: the pids of every broker that was there when `begin` returned.
    """

    def __init__(self, master: str, directory: Path) -> None:
        self._log = directory / "stderr"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CELLS, master, str(directory / "log-dirs")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
        self.brokers: list[int] = []
        self._everything: set[psutil.Process] = set()

    @property
    def log(self) -> str:
        """What the process has written to its standard error."""
        return self._log.read_text()

    def tell(self, statement: str) -> None:
        """Run a statement of one line."""
        assert self._answer(statement) == "done"

    def ask(self, expression: str) -> Any:
        """The value of an expression, as JSON can say it."""
        return self._answer(f"? {expression}")

    def _answer(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process ended at: {line}\n{self.log}"
        return json.loads(answer)

    def begin(self, brokers: int = 2) -> None:
        """Start a cluster of so many brokers, in the session that there is or in a new one."""
        self.tell(f"begin({brokers})")
        self.brokers += self.pids()
        self._everything |= set(psutil.Process(self._process.pid).children(recursive=True))

    def pids(self) -> list[int]:
        """The processes of the brokers, by id."""
        pids: list[int] = self.ask("[broker.pid for broker in cluster.describe().brokers]")
        return pids

    def kill(self, name: str) -> None:
        """SIGKILL to the driver's "python" or "jvm"."""
        (jvm,) = (child.pid for child in psutil.Process(self._process.pid).children() if child.name() == "java")
        os.kill({"python": self._process.pid, "jvm": jvm}[name], signal.SIGKILL)

    def await_no_broker(self) -> None:
        eventually(lambda: not any(is_running(pid) for pid in self.brokers), 20, "the end of every broker")

    def await_nothing(self) -> None:
        """Wait until all processes that the session had started have ended."""

        def left() -> list[str]:
            return [str(process) for process in self._everything if process.is_running() and is_running(process.pid)]

        eventually(lambda: not left(), 30, f"the end of {left()}")

    def assert_no_end_leaves_a_broker(self) -> None:
        """Of the present cluster, and of others after it: each ends in another way. In the end there is no process.

        In `local[N]` the JVM of the brokers' executor lives on when its session stops.
        """
        with step("the cluster is stopped while a broker is frozen"):
            os.kill(self.pids()[0], signal.SIGSTOP)
            self.tell("cluster._settings.cluster.__dict__['controlled_shutdown_timeout_ms'] = 1000; cluster.stop()")
            self.await_no_broker()
        with step("the cluster is stopped, and then its session"):
            self.begin()
            self.tell("cluster.stop(); spark.stop()")
            self.await_no_broker()
        with step("the session is stopped under its cluster"):
            self.begin()
            self.tell("spark.stop()")
            self.await_no_broker()
            eventually(lambda: self.ask("cluster.stopped"), 30, "the cluster's own word that it has stopped")
        with step("the driver's Python is killed"):
            self.begin()
            self.kill("python")
            self.await_no_broker()
            self.await_nothing()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        starting = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.kill()
        self._process.communicate(timeout=30)
        kill_all({*self._everything, *starting})
