"""Faults of real brokers on Spark executors of this machine: signals to exactly the processes of one broker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spark_broker.broker.watchdog import parent_of
from spark_broker.errors import InvalidRequestError
from spark_broker.model import BrokerInfo


@dataclass(frozen=True, slots=True)
class BrokerProcesses:
    """A broker on an executor: the worker that serves, `pyspark.daemon` that forked it, the executor's JVM."""

    worker: int
    daemon: int
    jvm: int


def broker_processes(broker: BrokerInfo) -> BrokerProcesses:
    """The processes of a broker that runs on an executor of this machine.

    Raises InvalidRequestError for any other: a signal must never reach a process that is not the broker's.
    """
    daemon = parent_of(broker.pid)
    jvm = None if daemon is None else parent_of(daemon)
    if daemon is None or jvm is None or jvm != broker.executor_pid:
        raise InvalidRequestError(f"broker {broker.id}: process {broker.pid} is not a worker of its executor here")
    return BrokerProcesses(broker.pid, daemon, jvm)


def kill_worker(processes: BrokerProcesses) -> None:
    """SIGKILL to the Python worker alone; the executor stays."""
    os.kill(processes.worker, signal.SIGKILL)


def kill_executor(processes: BrokerProcesses) -> None:
    """SIGKILL to the executor's JVM; Spark's daemon ends with it, and the worker with the daemon."""
    os.kill(processes.jvm, signal.SIGKILL)


def kill_executor_and_daemon(processes: BrokerProcesses) -> None:
    """SIGKILL to the JVM and to `pyspark.daemon`: nobody is left who would end the worker (the zombie)."""
    for pid in (processes.jvm, processes.daemon):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end of the block, where the process is still there."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; one that nobody has waited for has ended."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
