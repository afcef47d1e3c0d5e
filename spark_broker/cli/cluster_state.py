"""Where `cluster start` notes which cluster runs here, so that other commands find it.

The note is the ready file of the cluster application: it appears, whole, once all brokers are live. The application
renews it when a broker has another address, and removes it when it ends in order.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from spark_broker.broker.executor import is_running
from spark_broker.driver.work_folders import state_directory, users_directory
from spark_broker.errors import InvalidDataError
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.storage.filesystem import LOCAL, NO_LOCKS, process_start_time

CLOCK_TOLERANCE_S = 2.0
"""Tolerated between a file's time and a process's start time, because they come from two clocks."""

WAIT_MAX_S = 1_000_000
"""Eleven days. The system's longest wait for a process is twice as long."""

_PID_BYTES = 32


class ClusterState(msgspec.Struct, frozen=True):
    """A running cluster: how clients reach it, the process to stop, and that process's log (empty: its terminal).

    `driver_start_time`: in ticks of the machine whose boot id is `boot_id`. `pid_namespace`: where the driver has this
    pid. `temporary`: the data is deleted when the cluster stops. An earlier version noted neither these nor the host.
    """

    bootstrap_servers: str
    cluster_id: str
    driver_pid: int
    log_dirs: str = ""
    metadata_dir: str = ""
    driver_log: str = ""
    driver_start_time: int = 0
    boot_id: str = ""
    driver_host: str = ""
    pid_namespace: str = ""
    temporary: bool | None = None

    @property
    def driver(self) -> tuple[int, int, str]:
        """The process. Another note of it may name other addresses."""
        return self.driver_pid, self.driver_start_time, self.boot_id


@dataclass(frozen=True)
class _Note:
    """What the file says, and the time at which it was written."""

    state: ClusterState
    written_s: float

    @property
    def driver_runs(self) -> bool:
        """Whether the driver runs here: a pid that belongs to another process now must not be signalled.

        The wall clock does not count: it may have been set since.
        """
        if not self.state.boot_id:
            return _ran_then(self.state.driver_pid, self.written_s)
        here = self.state.boot_id == LOCAL.boot_id()  # The note of another machine may lie in a home that is shared.
        return here and is_running(self.state.driver_pid, self.state.driver_start_time)

    @property
    def elsewhere(self) -> str:
        """Where the driver may run without being seen here; empty where it would be seen."""
        from spark_broker.driver.metadata_claim import Owner

        here = Owner.here("", os.getpid())
        if self.state.boot_id not in ("", here.boot_id):
            return f"on {self.state.driver_host or 'another machine'}, or here before this machine was started again"
        return "in another container" if self.state.pid_namespace not in ("", here.pid_namespace) else ""


def default_state_file() -> Path:
    """`spark-broker/cluster.json` in the user's state directory (XDG_STATE_HOME)."""
    return state_directory() / "cluster.json"


def cluster_command(name: str, state_file: Path | None) -> str:
    """The command as the user types it. `state_file`: where the note is, if that was said; the next command needs it,
    too.
    """
    given = "" if state_file is None else f" --state-file {shlex.quote(str(state_file))}"
    return f"`spark-broker cluster {name}{given}`"


def data_directory(name: str) -> Path:
    """Where a detached cluster of this name keeps its data: in the user's data directory (XDG_DATA_HOME)."""
    return users_directory("XDG_DATA_HOME", ".local/share") / "clusters" / name


def running_cluster(path: Path) -> ClusterState | None:
    """The cluster that the file notes, if its driver still runs. Raises InvalidDataError for another file."""
    note = _read(path)
    return note.state if note is not None and note.driver_runs else None


def _read(path: Path) -> _Note | None:
    try:
        data = path.read_bytes()
        written_s = path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidDataError(
            f"{path} cannot be read: {error.strerror}",
            hint="Give --bootstrap-server, or let XDG_STATE_HOME name a directory of yours.",
        ) from None
    try:
        state = msgspec.json.decode(data, type=ClusterState)
    except UNDECODABLE as error:
        raise InvalidDataError(
            f"{path} is not a note of `cluster start`: {error}",
            hint="Name the --state-file that `cluster start` was given, or remove this file.",
        ) from None
    return _Note(state, written_s)


def remove_note(path: Path, ended: ClusterState | None = None) -> str:
    """Remove the note of a driver that does not run any more. A cluster that was started since keeps its own.

    `ended`: it has just ended, though its parent may not have heard of it. Returns why the note stays, and what to do,
    where its driver may run without being seen here: machines and containers may share a home. Else "".
    """
    if not path.exists():
        return ""
    claim = open_lock(path)
    try:
        if lock(claim):
            return _remove_unless_in_use(path, ended)
        driver = f"process {locked_by(claim)} starts a cluster, or runs one where this command does not see it"
        return f"the file stays: {driver}. Stop it there"
    finally:
        os.close(claim)


def _remove_unless_in_use(path: Path, ended: ClusterState | None) -> str:
    note = _read(path)
    if note is None:
        return ""
    if ended is None or note.state.driver != ended.driver:
        if note.driver_runs:
            return ""
        if place := note.elsewhere:
            driver = f"its driver (pid {note.state.driver_pid}) ran {place}"
            return f"the file stays: {driver}. Stop the cluster there; if it has ended, remove the file"
    path.unlink(missing_ok=True)
    return ""


def open_lock(note: Path) -> int:
    """Open the file beside the note whose lock the driver has as long as it lives."""
    return os.open(note.with_name(f".{note.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def lock(descriptor: int) -> bool:
    """Take the lock, if nobody has it. True also where the file system has no locks."""
    try:
        return LOCAL.lock(descriptor, wait_ms=0)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return True


def locked_by(descriptor: int) -> str:
    """The pid of whoever took the lock last, as it was written there."""
    return os.pread(descriptor, _PID_BYTES, 0).decode(errors="replace")


def end_process(pid: int, timeout_s: float) -> bool:
    """Ask the process to end (SIGTERM) and wait for it, WAIT_MAX_S at most. False: it is there after `timeout_s`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(1000 * min(max(timeout_s, 0), WAIT_MAX_S)))  # Below 0 it would wait for ever.
    except ProcessLookupError:
        return True
    except PermissionError as error:
        raise PermissionError(error.errno, "it is another user's, who can stop it", f"process {pid}") from None
    finally:
        os.close(pidfd)


def _ran_then(pid: int, when_s: float) -> bool:
    """Whether the process runs, and ran at this time."""
    start_ticks = process_start_time(pid)
    if start_ticks is None:
        return False
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    return age_s + CLOCK_TOLERANCE_S >= time.time() - when_s
