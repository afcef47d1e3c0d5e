"""Where `cluster start` notes which cluster runs here, so that other commands find it.

The note is the ready file of the cluster application: it appears, whole, once all brokers are live, and the application
removes it when it ends in order.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import time
from pathlib import Path

import msgspec

from spark_broker.broker.executor import is_running
from spark_broker.driver.work_folders import state_directory, users_directory
from spark_broker.errors import InvalidDataError
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.storage.filesystem import LOCAL, process_start_time

CLOCK_TOLERANCE_S = 2.0
"""Tolerated between a file's time and a process's start time, because they come from two clocks."""


class ClusterState(msgspec.Struct, frozen=True):
    """A running cluster: how clients reach it, the process to stop, and that process's log (empty: its terminal).

    `driver_start_time`: in ticks of the machine whose boot id is `boot_id`; empty in a note of an earlier version.
    """

    bootstrap_servers: str
    cluster_id: str
    driver_pid: int
    log_dirs: str = ""
    metadata_dir: str = ""
    driver_log: str = ""
    driver_start_time: int = 0
    boot_id: str = ""


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
    return state if _runs(state, written_s) else None


def remove_note(path: Path, ended: ClusterState | None) -> None:
    """Remove the note of a driver that does not run any more. `ended`: it has just ended, though its parent may not
    have heard of it. A cluster that was started since keeps its own.
    """
    left = running_cluster(path)
    if path.exists() and (left is None or left == ended):
        path.unlink(missing_ok=True)


def end_process(pid: int, timeout_s: float) -> bool:
    """Ask the process to end (SIGTERM) and wait for it. False when it is still there after `timeout_s`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    except ProcessLookupError:
        return True
    except PermissionError as error:
        raise PermissionError(error.errno, "it is another user's, who can stop it", f"process {pid}") from None
    finally:
        os.close(pidfd)


def _runs(state: ClusterState, written_s: float) -> bool:
    """Whether the driver runs: a pid that belongs to another process now must not be signalled.

    The wall clock does not count: it may have been set since.
    """
    if not state.boot_id:
        return _ran_then(state.driver_pid, written_s)
    here = state.boot_id == LOCAL.boot_id()  # The note of another machine may lie in a home that is shared.
    return here and is_running(state.driver_pid, state.driver_start_time)


def _ran_then(pid: int, when_s: float) -> bool:
    """Whether the process runs, and ran at this time."""
    start_ticks = process_start_time(pid)
    if start_ticks is None:
        return False
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    return age_s + CLOCK_TOLERANCE_S >= time.time() - when_s
