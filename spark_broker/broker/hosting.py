"""Brokers' processes on this machine: start one, adopt one that runs, learn of its end, end it.

A broker's process belongs to its executor's JVM and not to the process that started it. It is found by its name, an
abstract Unix socket: it listens there, and a process that is connected keeps the broker. The name also prevents a
second start of the launch: only one starter can bind it. Any user of the machine may bind any such name, so each launch
has a secret in its own.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import BinaryIO

import msgspec

from spark_broker.broker.executor import ExecutorLog, WatchedProcess, is_readable, peer_of
from spark_broker.broker.spec import LOST, BrokerOutcome, BrokerSpec
from spark_broker.errors import InvalidRequestError, LogDirectoryLockedError
from spark_broker.storage.filesystem import ProcessIdentity

CHILD_MODULE = "spark_broker.broker"

KEEPER_VARIABLE = "SPARK_BROKER_KEEPER"
"""Names the cluster in the environment of a keeper's Python worker; its brokers do not inherit it."""

FEW_ARENAS = {"MALLOC_ARENA_MAX": "4"}
"""glibc makes eight arenas per core, and every stream has a thread. Free memory of one arena serves no other."""

BIND_TIMEOUT_S = 10.0
"""How long a name may be bound by a process that does not listen yet."""

EXIT_TIMEOUT_S = 10.0
POLL_S = 0.02
MAX_LINE_BYTES = 1 << 20


class BrokerOrder(msgspec.Struct, frozen=True):
    """What a broker's process reads from its standard input: one line. `executor`: the JVM that it belongs to."""

    spec: BrokerSpec
    entry: str
    executor: ProcessIdentity


class Lines:
    """Cuts a byte stream into lines of bounded length."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their line ends. Raises InvalidRequestError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise InvalidRequestError(f"a line of more than {MAX_LINE_BYTES} bytes")
        return lines


class KeptBroker:
    """A broker's process, held by a connection to it. Closing the connection leaves the process as it is.

    Raises ProcessLookupError where the process has ended already.
    """

    def __init__(
        self, launch: int, connection: socket.socket, pid: int, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.launch = launch
        self.pid = pid
        self._connection = connection
        self._process = WatchedProcess.of(pid)
        self._child = child  # None: another process started it
        self._lines = Lines()

    @property
    def adopted(self) -> bool:
        """Whether another process started it."""
        return self._child is None

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    def fileno(self) -> int:
        """Readable when there is something to `read`."""
        return self._connection.fileno()

    def read(self) -> BrokerOutcome | None:
        """How the broker ended, once it has; None while it goes on. Call it when `fileno` is readable."""
        try:
            data = self._connection.recv(65_536)
        except OSError:
            data = b""  # reset: its process is gone
        lines = self._lines.feed(data)
        if data and not lines:
            return None
        # The outcome, or the end of the connection: the process ends next.
        if not self._process.wait(EXIT_TIMEOUT_S):
            self._process.kill()
            self._process.wait(EXIT_TIMEOUT_S)
        if lines:
            return BrokerOutcome.from_json(lines[0])
        return BrokerOutcome(reason=LOST, error_message=f"its process {self.pid} ended{_how(self._child)}")

    def kill(self) -> None:
        """Send SIGKILL to the process. Does nothing when it has ended."""
        self._process.kill()

    def wait(self, timeout_s: float) -> BrokerOutcome | None:
        """`read` until the broker has ended; None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            if is_readable(self.fileno(), remaining_s) and (outcome := self.read()) is not None:
                return outcome
        return None

    def close(self) -> None:
        """Stop keeping it."""
        self._connection.close()
        self._process.close()
        if self._child is not None and self._child.poll() is None:
            _children.append(self._child)


_children: list[subprocess.Popen[bytes]] = []
"""Children that run on after their `KeptBroker` was closed. The next start reaps those that have ended."""


def start(
    spec: BrokerSpec, entry: str, executor: ProcessIdentity, *, command: Sequence[str] = (), log: BinaryIO | None = None
) -> KeptBroker:
    """Start the launch's process, unless it runs already: then it is adopted.

    The process is a fresh interpreter in a session of its own, with the limits of this process. Its output is the
    executor's stderr (or `log`). `command` is put before the process's own command, and must not fork. Raises
    LogDirectoryLockedError when another process holds the launch's name and cannot be adopted.
    """
    running = adopt(spec)
    while running is None:
        listener = _bind(spec)
        if listener is not None:
            with listener:
                return _spawn(BrokerOrder(spec, entry, executor), listener, command, log)
        running = adopt(spec)
    return running


def adopt(spec: BrokerSpec) -> KeptBroker | None:
    """The launch's process if it runs on this machine, as this user; None when there is none."""
    deadline = time.monotonic() + BIND_TIMEOUT_S
    pause = threading.Event()
    while (connection := _connect(spec)) is None:
        # The name is bound, but no process listens there: it is being started.
        probe = _bind(spec)
        if probe is not None:
            probe.close()
            return None
        if time.monotonic() > deadline:
            raise LogDirectoryLockedError(f"launch {spec.launch} was begun by another process, which does not go on")
        pause.wait(POLL_S)
    peer = peer_of(connection)
    if peer.uid != os.getuid():
        connection.close()
        taken = f"the name of launch {spec.launch} is taken by process {peer.pid} of user {peer.uid}"
        raise LogDirectoryLockedError(taken)
    try:
        return KeptBroker(spec.launch, connection, peer.pid)
    except ProcessLookupError:
        connection.close()
        return None


def socket_name(spec: BrokerSpec) -> str:
    """The launch's name."""
    # Abstract: it has no file that could stay behind, and it is gone with the last process that has it open.
    return f"\0spark-broker/{spec.cluster_id}/{spec.launch}/{spec.secret}"


def _connect(spec: BrokerSpec) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(socket_name(spec))
    except ConnectionRefusedError:
        connection.close()
        return None
    return connection


def _bind(spec: BrokerSpec) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_name(spec))
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


def _spawn(order: BrokerOrder, listener: socket.socket, command: Sequence[str], log: BinaryIO | None) -> KeptBroker:
    _children[:] = [child for child in _children if child.poll() is None]
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, ExitStack() as undo:
        undo.callback(mine.close)
        child = _popen(order.executor, [*command, *_command(listener, theirs)], (listener, theirs), log)
        if child.stdin is not None:
            try:
                child.stdin.write(msgspec.json.encode(order) + b"\n")
                child.stdin.close()
            except BrokenPipeError:
                pass  # it has ended already: the end of the connection says so
        broker = KeptBroker(order.spec.launch, mine, child.pid, child)
        undo.pop_all()
    return broker


def _command(listener: socket.socket, keeper: socket.socket) -> list[str]:
    return [sys.executable, "-m", CHILD_MODULE, str(listener.fileno()), str(keeper.fileno())]


def _popen(
    executor: ProcessIdentity, command: Sequence[str], sockets: Sequence[socket.socket], log: BinaryIO | None
) -> subprocess.Popen[bytes]:
    stderr = ExecutorLog.of(executor.pid).open() if log is None else os.dup(log.fileno())
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stderr if stderr is not None else sys.stderr.fileno(),
            stderr=stderr,
            env=_environment(os.environ),
            pass_fds=[listener.fileno() for listener in sockets],
            start_new_session=True,  # out of reach of signals to the process group of pyspark.daemon, or of a shell
        )
    finally:
        if stderr is not None:
            os.close(stderr)


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and module path, to which Spark may have added archives."""
    inherited = {name: value for name, value in environment.items() if name != KEEPER_VARIABLE}
    return {**FEW_ARENAS, **inherited, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _how(child: subprocess.Popen[bytes] | None) -> str:
    status = None if child is None else child.poll()
    if status is None:
        return ""
    return f" (signal {-status})" if status < 0 else f" (status {status})"
