"""Faults of real brokers on Spark executors of this machine: signals to exactly the processes of one broker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spark_broker.broker.executor import is_running, parent_of
from spark_broker.broker.hosting import KEEPER_VARIABLE
from spark_broker.errors import InvalidRequestError
from spark_broker.model import BrokerInfo

__all__ = [
    "BrokerProcesses",
    "broker_processes",
    "is_running",
    "kill_all_python",
    "kill_broker",
    "kill_executor",
    "kill_executor_and_broker",
    "kill_keeper",
    "kill_keeper_daemon",
    "stopped",
]


@dataclass(frozen=True, slots=True)
class BrokerProcesses:
    """A broker on an executor: its process; the executor's JVM; the keeper, and the `pyspark.daemon` that forked it.

    `keeper` and `keeper_daemon` are None while another keeper is on its way. `python`: every Python process of the JVM.
    """

    broker: int
    jvm: int
    keeper: int | None
    keeper_daemon: int | None
    python: tuple[int, ...]


def broker_processes(broker: BrokerInfo) -> BrokerProcesses:
    """The processes of a broker that runs on an executor of this machine.

    Raises InvalidRequestError for any other: a signal must never reach a process that is not the broker's.
    """
    if not is_running(broker.pid) or not is_running(broker.executor_pid):
        raise InvalidRequestError(f"broker {broker.id}: process {broker.pid} is not a broker of an executor here")
    children = _children()
    daemons = [pid for pid in children.get(broker.executor_pid, []) if _is_python(pid)]
    workers = [worker for daemon in daemons for worker in children.get(daemon, [])]
    daemon = next((pid for pid in daemons if _keeps(pid) and children.get(pid)), None)
    keeper = children[daemon][0] if daemon is not None else None
    python = (broker.pid, *daemons, *(worker for worker in workers if worker != broker.pid))
    return BrokerProcesses(broker.pid, broker.executor_pid, keeper, daemon, python)


def kill_broker(processes: BrokerProcesses) -> None:
    """SIGKILL to the broker's process alone; the executor stays."""
    _kill(processes.broker)


def kill_executor(processes: BrokerProcesses) -> None:
    """SIGKILL to the executor's JVM; the broker hands over in the short time that it then has."""
    _kill(processes.jvm)


def kill_executor_and_broker(processes: BrokerProcesses) -> None:
    """SIGKILL to both at once, as when a container dies."""
    _kill(processes.broker, processes.jvm)


def kill_keeper(processes: BrokerProcesses) -> None:
    """SIGKILL to the keeper's Python worker; the broker does not notice."""
    _kill(processes.keeper)


def kill_keeper_daemon(processes: BrokerProcesses) -> None:
    """SIGKILL to the `pyspark.daemon` that forked the keeper."""
    _kill(processes.keeper_daemon)


def kill_all_python(processes: BrokerProcesses) -> None:
    """SIGKILL to every Python process of the executor: broker, keeper, daemons, users' workers."""
    _kill(*processes.python)


def _kill(*pids: int | None) -> None:
    for pid in pids:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def stopped(*pids: int | None) -> Iterator[None]:
    """SIGSTOP to these processes; at the end of the block, SIGCONT to those that are still there."""
    there = [pid for pid in pids if pid is not None]
    for pid in there:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in there:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _children() -> dict[int, list[int]]:
    """Every process of this machine by its parent, oldest first."""
    children: dict[int, list[int]] = {}
    for pid in sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        parent = parent_of(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    return children


def _is_python(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "exe").readlink().name.startswith("python")
    except OSError:
        return False


def _keeps(pid: int) -> bool:
    """Whether this daemon forks keepers, and no users' workers."""
    try:
        environment = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(KEEPER_VARIABLE.encode() + b"=") for variable in environment)
