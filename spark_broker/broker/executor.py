"""The executor that a process belongs to: which JVM it is, whether it still runs, and where it logs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from spark_broker.storage.filesystem import ProcessIdentity, process_start_time, read_proc

_PROC = Path("/proc")
_STDERR = 2
_CREDENTIALS = struct.Struct("3i")
LOOK_S = 0.25
"""How often a process is looked at where the system does not say when it ends."""

_ENDED = ("Z", "X")
"""States of a process that has ended, and that its parent has not waited for."""


@dataclass(frozen=True, slots=True)
class ExecutorIdentity:
    """The executor that this process belongs to.

    `verified`: Spark's own id was found on the JVM's command line. `daemon_pid`: the `pyspark.daemon` between the JVM
    and this process; None where Spark starts its Python workers without one.
    """

    executor_id: str
    jvm: ProcessIdentity
    daemon_pid: int | None
    verified: bool


def executor_identity() -> ExecutorIdentity:
    """Which executor this Python worker belongs to."""
    parent = os.getppid()
    above = _ancestors(parent)
    # If no program is called java, the JVM is the daemon's parent.
    jvm_pid = next((pid for pid in above if _is_java(pid)), above[:2][-1])
    jvm = ProcessIdentity(jvm_pid, process_start_time(jvm_pid) or 0)
    daemon_pid = None if parent == jvm_pid else parent
    command = _command(jvm_pid)
    if "--executor-id" in command[:-1]:
        return ExecutorIdentity(command[command.index("--executor-id") + 1], jvm, daemon_pid, verified=True)
    return ExecutorIdentity(f"pid-{jvm_pid}", jvm, daemon_pid, verified=False)


def parent_of(pid: int) -> int | None:
    """The parent's pid; None when there is no such process here, or it is another user's, and hidden."""
    try:
        fields = _stat(pid)
    except PermissionError:
        return None
    return int(fields[1]) if fields else None


def is_running(pid: int, start_time: int | None = None) -> bool:
    """Whether the process exists and has not ended. A zombie has ended. Where that cannot be found out, it runs.

    `start_time`: it must also be the process that started then, and not another one with the same pid.
    """
    try:
        fields = _stat(pid)
        return bool(fields) and fields[0] not in _ENDED and start_time in (None, process_start_time(pid))
    except OSError:
        return True


class WatchedProcess:
    """A process of this machine. A later process with the same pid is not mistaken for it.

    `descriptor` becomes readable when the process ends. It is None where the system has no such descriptors (Linux
    before 5.3): then poll `has_ended`.
    """

    def __init__(self, process: ProcessIdentity) -> None:
        """Raises ProcessLookupError when the process has ended, unless it is a child that was not waited for."""
        self._process = process
        self.descriptor = _pidfd(process.pid)
        # Compared after the descriptor was opened, so that both are of the same process.
        if process_start_time(process.pid) != process.start_time:
            self.close()
            raise ProcessLookupError(f"process {process.pid} has ended")

    @classmethod
    def of(cls, pid: int) -> WatchedProcess:
        """The process that has this pid now. Raises ProcessLookupError when there is none."""
        return cls(ProcessIdentity(pid, process_start_time(pid) or 0))

    @property
    def has_ended(self) -> bool:
        if self.descriptor is not None:
            return is_readable(self.descriptor, 0.0)
        return not is_running(self._process.pid, self._process.start_time)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it has ended."""
        if self.descriptor is not None:
            return is_readable(self.descriptor, timeout_s)
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while not self.has_ended and time.monotonic() < deadline:
            pause.wait(LOOK_S)
        return self.has_ended

    def kill(self) -> None:
        """Send SIGKILL. Does nothing when the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            elif not self.has_ended:
                os.kill(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def is_readable(descriptor: int, timeout_s: float) -> bool:
    """Whether there is something to read, within this time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a local connection. A client sees the process that called `listen`."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Who is at the other end, as the kernel says."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


@dataclass(frozen=True, slots=True)
class ExecutorLog:
    """Where an executor's stderr goes. `opened`: what to open to write to it; None where it cannot be opened."""

    opened: Path | None
    shown: str
    """The path to show to people; empty where it is not known."""

    @classmethod
    def of(cls, jvm_pid: int) -> ExecutorLog:
        """The stderr of this JVM.

        The stderr of `pyspark.daemon` cannot be used. It is a pipe to the JVM, which breaks when the daemon ends, and a
        broker outlives the daemon.
        """
        handle = _PROC / str(jvm_pid) / "fd" / str(_STDERR)
        try:
            target, status = str(handle.readlink()), handle.stat()
        except OSError:
            return cls(None, "")
        mode = status.st_mode
        if stat.S_ISREG(mode) and not status.st_nlink:
            return cls(handle if _appends(jvm_pid) else None, "")  # deleted: it has no name any more
        if stat.S_ISREG(mode):
            # Two writers of one file overwrite each other unless both append.
            path = Path(target) if _appends(jvm_pid) else Path(f"{target}.brokers")
            return cls(path, str(path))
        if stat.S_ISFIFO(mode):
            # The pipe of a standalone worker, which copies it into a file in the executor's working directory.
            return cls(handle, _existing(_PROC / str(jvm_pid) / "cwd", "stderr"))
        return cls(handle if stat.S_ISCHR(mode) else None, target)

    def open(self) -> int | None:
        """A new descriptor. It never blocks, because a full pipe must not stop a broker. None: inherit stderr."""
        if self.opened is None:
            return None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return os.open(self.opened, flags, 0o644)
        except OSError:
            return None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the program's name (state, parent, ...); empty when there is no process.

    Raises OSError where it cannot be read: who has no descriptor left must not take that for the end of a process.
    """
    try:
        text = read_proc(_PROC / str(pid) / "stat")
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The name is in parentheses, and may itself hold spaces and parentheses.
    return text.rpartition(")")[2].split()


def _ancestors(pid: int) -> list[int]:
    chain = [pid]
    while (above := parent_of(chain[-1])) is not None and above > 1:
        chain.append(above)
    return chain


def _is_java(pid: int) -> bool:
    try:
        return (_PROC / str(pid) / "exe").readlink().name.removesuffix(" (deleted)") == "java"
    except OSError:
        return False


def _command(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _appends(pid: int) -> bool:
    try:
        lines = (_PROC / str(pid) / "fdinfo" / str(_STDERR)).read_text().splitlines()
    except OSError:
        return False
    flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), 0)
    return bool(flags & os.O_APPEND)


def _existing(directory: Path, name: str) -> str:
    try:
        path = directory.readlink() / name
    except OSError:
        return ""
    return str(path) if path.exists() else ""
