"""However a session ends, no process of its cluster is left: brokers, keepers, their daemons, the controller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spark_broker.testing.faults import is_running
from tests.support.processes import kill_all
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]

SESSION = textwrap.dedent(
    """
    import json, sys
    from pyspark.sql import SparkSession
    from spark_broker import BrokerCluster, configure_spark

    spark = configure_spark(SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")).getOrCreate()
    cluster = BrokerCluster.start(spark, 2, {"log.dirs": sys.argv[2]})
    print(json.dumps([broker.pid for broker in cluster.describe().brokers]), flush=True)
    for line in sys.stdin:
        exec(line)
        print("done", flush=True)
    """
)


class Session:
    """A Python process with a Spark session and a cluster of two brokers in it. It runs the statements of `tell`."""

    def __init__(self, master: str, log_dirs: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SESSION, master, str(log_dirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.brokers: list[int] = json.loads(self._line())
        self._everything = psutil.Process(self._process.pid).children(recursive=True)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def tell(self, statement: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(statement + "\n")
        self._process.stdin.flush()
        assert self._line() == "done\n"

    def kill(self, name: str) -> None:
        """SIGKILL to the driver's "python" or "jvm"."""
        jvm = next(process.pid for process in self._everything if process.name() == "java")
        os.kill({"python": self._process.pid, "jvm": jvm}[name], signal.SIGKILL)

    def await_no_broker(self) -> None:
        eventually(lambda: not any(is_running(pid) for pid in self.brokers), 20, "the end of every broker")

    def await_nothing(self) -> None:
        """Wait until all processes that the session had started have ended."""

        def left() -> list[str]:
            return [str(process) for process in self._everything if process.is_running() and is_running(process.pid)]

        eventually(lambda: not left(), 30, f"the end of {left()}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)
        kill_all(self._everything)


@pytest.fixture(params=["local[2]", pytest.param("local-cluster[2,2,1024]", marks=pytest.mark.full)])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    started = Session(request.param, tmp_path)
    yield started
    started.close()


def test_a_session_that_stops_under_its_cluster_leaves_no_broker(session: Session) -> None:
    """In `local[N]` the JVM of the brokers' executor lives on."""
    session.tell("spark.stop()")

    session.await_no_broker()
    session.tell("assert cluster.stopped")


@pytest.mark.full
def test_a_session_that_stops_after_its_cluster_leaves_no_broker(session: Session) -> None:
    session.tell("cluster.stop(); spark.stop()")

    session.await_no_broker()


@pytest.mark.full
def test_a_cluster_that_is_stopped_while_a_broker_is_frozen_leaves_no_broker(session: Session) -> None:
    os.kill(session.brokers[0], signal.SIGSTOP)

    session.tell("cluster._settings.cluster.__dict__['controlled_shutdown_timeout_ms'] = 1000; cluster.stop()")

    session.await_no_broker()


@pytest.mark.parametrize("name", ["python", pytest.param("jvm", marks=pytest.mark.full)])
def test_a_killed_driver_leaves_nothing(session: Session, name: str) -> None:
    session.kill(name)

    session.await_no_broker()
    if name == "python":
        session.await_nothing()
