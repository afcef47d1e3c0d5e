"""The nest: one Spark task that keeps several brokers, each in a process of its own, on the one executor of `local[N]`.

A notebook on two cores has two task slots: a task per broker would leave none for queries. The nest takes one slot. It
starts and ends processes on the driver's word (a socket on this machine), reports each one's end, and decides nothing.
"""

from __future__ import annotations

import functools
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from spark_broker.broker.spec import LOST, BrokerOutcome, BrokerSpec
from spark_broker.broker.watchdog import Watchdog, die_with_parent, lineage
from spark_broker.driver.broker_task import TASK_GENERATIONS
from spark_broker.errors import InvalidRequestError

CONNECT_TIMEOUT_S = 10
EXIT_TIMEOUT_S = 10
MAX_LINE_BYTES = 1 << 20
CHILD_MODULE = "spark_broker.driver.broker_child"


class StartBroker(msgspec.Struct, frozen=True, tag=True):
    """Driver to nest: start this launch in a process of its own."""

    spec: BrokerSpec


class EndBroker(msgspec.Struct, frozen=True, tag=True):
    """Driver to nest: SIGKILL to this launch's process."""

    launch: int


class BrokerEnded(msgspec.Struct, frozen=True, tag=True):
    """Nest to driver: the launch's process is gone, and how it ended."""

    launch: int
    outcome: BrokerOutcome


class ChildOrder(msgspec.Struct, frozen=True):
    """Nest to broker process, on its standard input. `parent_pid`: the nest, whose end is the broker's end."""

    spec: BrokerSpec
    entry: str
    parent_pid: int


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


def nest_task(entry: str) -> Callable[[Iterable[bytes]], Iterator[bytes]]:
    """The function of the nest's job. Its one row is the path of the driver's socket."""
    return functools.partial(run_nest, entry=entry)


def run_nest(rows: Iterable[bytes], *, entry: str) -> Iterator[bytes]:
    """Serve the driver until it closes the socket; then end every broker that is left."""
    path = bytes(next(iter(rows))).decode()
    die_with_parent()
    watchdog = Watchdog(TASK_GENERATIONS)
    watchdog.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as driver:
        driver.settimeout(CONNECT_TIMEOUT_S)
        driver.connect(path)
        Nest(driver, entry).run()
    watchdog.stop()
    yield b"closed"


class Nest:
    """Brokers' processes by launch. One thread starts them all: they are to die with the thread that started them."""

    def __init__(self, driver: socket.socket, entry: str) -> None:
        self._driver = driver
        self._entry = entry
        self._jvm_pid = lineage(TASK_GENERATIONS)[-1]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._said: dict[int, bytes] = {}  # what each process has written: its outcome, at its end
        self._lines = Lines()
        self._orders = msgspec.json.Decoder(StartBroker | EndBroker)
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Until the driver closes the socket."""
        self._driver.settimeout(CONNECT_TIMEOUT_S)
        self._selector.register(self._driver, selectors.EVENT_READ, None)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._read_child(key.data)
                    elif not self._read_driver():
                        return
        finally:
            self._selector.close()
            for process in self._processes.values():
                process.kill()
                _reap(process)

    def _read_driver(self) -> bool:
        data = self._driver.recv(65_536)
        for line in self._lines.feed(data):
            order = self._orders.decode(line)
            if isinstance(order, StartBroker):
                self._start(order.spec)
            elif order.launch in self._processes:
                self._processes[order.launch].kill()
        return bool(data)

    def _start(self, spec: BrokerSpec) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", CHILD_MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
        )
        self._processes[spec.launch] = process
        self._said[spec.launch] = b""
        self._selector.register(_pipe(process.stdout), selectors.EVENT_READ, spec.launch)
        order = ChildOrder(spec.on_executor(spec.executor_id, self._jvm_pid), self._entry, os.getpid())
        stdin = _pipe(process.stdin)
        try:
            os.write(stdin, msgspec.json.encode(order) + b"\n")
        except BrokenPipeError:
            return  # it has ended already: the end of its output says so

    def _read_child(self, launch: int) -> None:
        process = self._processes[launch]
        data = os.read(_pipe(process.stdout), 65_536)
        if data:
            self._said[launch] = (self._said[launch] + data)[-MAX_LINE_BYTES:]
            return
        self._selector.unregister(_pipe(process.stdout))
        del self._processes[launch]
        ended = BrokerEnded(launch, _outcome(self._said.pop(launch), _reap(process)))
        self._driver.sendall(msgspec.json.encode(ended) + b"\n")


def _outcome(said: bytes, status: int) -> BrokerOutcome:
    if said.endswith(b"\n"):
        return BrokerOutcome.from_json(said.splitlines()[-1])
    return BrokerOutcome(reason=LOST, error_message=f"its process ended with status {status}")


def _reap(process: subprocess.Popen[bytes]) -> int:
    """The exit status. A process that has closed its output is ending; one that does not is killed."""
    try:
        status = process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait(EXIT_TIMEOUT_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return status


def _pipe(stream: object) -> int:
    return int(stream.fileno())  # type: ignore[attr-defined]


def _environment() -> dict[str, str]:
    """The worker's, with this package found where the worker found it."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
