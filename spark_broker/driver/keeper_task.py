"""The keeper: a Spark task that keeps brokers on its executor.

It starts a broker where none runs and adopts the one that it finds, holds the executor's slot, and tells the driver how
brokers end. It decides nothing, and nothing depends on its fate: Spark may cancel, interrupt, repeat or lose it, and
the brokers go on. The driver's orders come over a connection of the keeper's own.
"""

from __future__ import annotations

import functools
import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterable, Iterator

import msgspec

from spark_broker.broker import hosting
from spark_broker.broker.executor import ExecutorIdentity, executor_identity
from spark_broker.broker.hosting import KeptBroker, Lines
from spark_broker.broker.spec import FAILED, LOST, BrokerOutcome, BrokerSpec
from spark_broker.errors import KafkaStorageError, SparkBrokerError
from spark_broker.process_limits import limit_reached
from spark_broker.quiet_end import end_in_silence
from spark_broker.threads import begin

logger = logging.getLogger(__name__)

RUN_BROKER = "spark_broker.broker.process:run_broker"
"""The broker's entry: `run_broker(spec, leave) -> reason`. It returns when the broker has stopped."""

CONNECT_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 10.0

MISPLACED = b"misplaced"
"""A keeper's result: Spark ran it on another executor than it was meant for."""

LEFT = b"left"
"""A keeper's result: the driver sent `Leave`, or is gone."""


class KeeperOrder(msgspec.Struct, frozen=True):
    """The one row of a keeper's job. `token` tells the driver to which job a connection belongs."""

    host: str
    port: int
    token: str
    executor_id: str
    entry: str


class KeeperHello(msgspec.Struct, frozen=True, tag=True):
    """Keeper to driver: the first message."""

    token: str
    jvm_pid: int


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Driver to keeper: keep this launch.

    `start`: start its process where there is none. Without `start`, a launch that has no process has ended.
    """

    spec: BrokerSpec
    start: bool


class Kept(msgspec.Struct, frozen=True, tag=True):
    """Keeper to driver: the launch's process runs, and is kept. `adopted`: it ran before."""

    launch: int
    pid: int
    adopted: bool


class EndBroker(msgspec.Struct, frozen=True, tag=True):
    """Driver to keeper: SIGKILL to this launch's process."""

    launch: int


class BrokerEnded(msgspec.Struct, frozen=True, tag=True):
    """Keeper to driver: the launch's process is gone, and how it ended."""

    launch: int
    outcome: BrokerOutcome


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Driver to keeper: end the task. Brokers that still run go on. `last`: no other keeper of this cluster follows."""

    last: bool


FromKeeper = KeeperHello | Kept | BrokerEnded
FromDriver = Keep | EndBroker | Leave


def to_line(message: FromKeeper | FromDriver) -> bytes:
    """The message as a line."""
    return msgspec.json.encode(message) + b"\n"


def keeper_task() -> Callable[[Iterable[bytes]], Iterator[bytes]]:
    """The function of a keeper's job. Its one row is the KeeperOrder; it returns one row, how the keeper ended."""
    return functools.partial(run_keeper)


def run_keeper(rows: Iterable[bytes]) -> Iterator[bytes]:
    """Keep brokers until the driver ends the task with `Leave`, or is gone."""
    end_in_silence()
    order = msgspec.json.decode(bytes(next(iter(rows))), type=KeeperOrder)
    executor = executor_identity()
    if executor.verified and executor.executor_id != order.executor_id:
        # Spark may ignore a preferred location: it does so when no core is free there within spark.locality.wait.
        yield MISPLACED
        return
    driver = socket.create_connection((order.host, order.port), CONNECT_TIMEOUT_S)
    driver.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    driver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    driver.sendall(to_line(KeeperHello(order.token, executor.jvm.pid)))
    if Keeper(driver, executor, order).run() and executor.daemon_pid is not None:
        pid = executor.daemon_pid
        begin("end-daemon", lambda _: _terminate(pid), lambda: _end_daemon(driver, pid))
    else:
        driver.close()
    yield LEFT


def _end_daemon(driver: socket.socket, daemon_pid: int) -> None:
    """End the keepers' `pyspark.daemon`, which serves this cluster alone, once the driver has this task's result.

    The driver closes the connection when it has the result. A cancelled task does not end the daemon, because another
    task may be starting.
    """
    with driver:
        driver.settimeout(None)
        try:
            while driver.recv(65_536):
                continue
        except OSError as error:
            logger.info("the driver's connection broke: %s", error)
    _terminate(daemon_pid)


def _terminate(daemon_pid: int) -> None:
    if os.getppid() == daemon_pid:
        os.kill(daemon_pid, signal.SIGTERM)


class Keeper:
    """Carries the driver's orders out, until `Leave` or the end of the connection. One thread."""

    def __init__(self, driver: socket.socket, executor: ExecutorIdentity, order: KeeperOrder) -> None:
        self._driver = driver
        self._executor = executor
        self._order = order
        self._brokers: dict[int, KeptBroker] = {}
        self._lines = Lines()
        self._decoder = msgspec.json.Decoder(FromDriver)
        self._selector = selectors.DefaultSelector()
        self._left = False
        self._is_last = False

    def run(self) -> bool:
        """Run until the driver sends `Leave` or is gone; returns whether no other keeper follows. The brokers go on."""
        self._driver.settimeout(SEND_TIMEOUT_S)
        self._selector.register(self._driver, selectors.EVENT_READ, None)
        try:
            while not self._left:
                # No deadline: a keeper keeps for as long as the cluster runs, and the driver's end wakes it.
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._read_driver()
                    else:
                        self._read_broker(key.data)
        finally:
            self._selector.close()
            for broker in self._brokers.values():
                broker.close()
        return self._is_last

    def _read_driver(self) -> None:
        try:
            data = self._driver.recv(65_536)
        except OSError as error:
            logger.warning("the driver's connection broke: %s", error)
            data = b""
        if not data:
            self._left = True
        for line in self._lines.feed(data):
            match self._decoder.decode(line):
                case Keep(spec, start):
                    self._keep(spec, start=start)
                case EndBroker(launch):
                    self._end(launch)
                case Leave(last):
                    self._left, self._is_last = True, last

    def _keep(self, spec: BrokerSpec, *, start: bool) -> None:
        if spec.launch in self._brokers:
            return
        try:
            broker = self._find(spec, start=start)
        except SparkBrokerError as error:
            self._tell_failure(spec.launch, error)
        except OSError as error:
            self._tell_failure(spec.launch, limit_reached(error) or KafkaStorageError(str(error)))
        else:
            if broker is None:
                self._tell(BrokerEnded(spec.launch, BrokerOutcome(reason=LOST, error_message="its process is gone")))
                return
            self._brokers[spec.launch] = broker
            self._selector.register(broker, selectors.EVENT_READ, broker)
            self._tell(Kept(spec.launch, broker.pid, broker.adopted))

    def _find(self, spec: BrokerSpec, *, start: bool) -> KeptBroker | None:
        if not start:
            return hosting.adopt(spec)
        here = spec.on_executor(self._executor_id, self._executor.jvm.pid)
        return hosting.start(here, self._order.entry, self._executor.jvm)

    @property
    def _executor_id(self) -> str:
        return self._executor.executor_id if self._executor.verified else self._order.executor_id

    def _end(self, launch: int) -> None:
        broker = self._brokers.get(launch)
        if broker is not None:
            broker.kill()

    def _read_broker(self, broker: KeptBroker) -> None:
        outcome = broker.read()
        if outcome is not None:
            self._selector.unregister(broker)
            del self._brokers[broker.launch]
            broker.close()
            self._tell(BrokerEnded(broker.launch, outcome))

    def _tell_failure(self, launch: int, error: SparkBrokerError) -> None:
        self._tell(
            BrokerEnded(launch, BrokerOutcome(reason=FAILED, error_code=error.code, error_message=error.message))
        )

    def _tell(self, message: FromKeeper) -> None:
        try:
            self._driver.sendall(to_line(message))
        except OSError as error:
            logger.warning("the driver could not be told: %s", error)
            self._left = True
