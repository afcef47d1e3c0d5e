"""The driver's side of the nest (`local[N]`): one Spark job whose task keeps all brokers' processes."""

from __future__ import annotations

import logging
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import msgspec
from py4j.protocol import Py4JError
from pyspark import SparkContext

from spark_broker.broker.spec import LOST, BrokerOutcome, BrokerSpec
from spark_broker.driver.broker_task import RUN_BROKER
from spark_broker.driver.executors import LOCAL_EXECUTOR_ID, Executor, is_stopped, local_slots
from spark_broker.driver.hosts import HostListener
from spark_broker.driver.nest_task import BrokerEnded, EndBroker, Lines, StartBroker, nest_task

logger = logging.getLogger(__name__)

GROUP = "spark-broker-nest"
CONNECT_TIMEOUT_S = 60
RESTART_PAUSE_S = 1.0
CLOSE_TIMEOUT_S = 10


class NestHost:
    """Runs all brokers on the one executor of a local session, each in its own process, in one task slot."""

    shared_executor = True

    def __init__(self, sc: SparkContext, *, entry: str = RUN_BROKER) -> None:
        self._sc = sc
        self._entry = entry
        self._executor = Executor(LOCAL_EXECUTOR_ID, "127.0.0.1", local_slots(sc))
        self._directory = Path(tempfile.mkdtemp(prefix="spark-broker-nest-"))  # mode 0700: nobody else may connect
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._ended: dict[int, BrokerOutcome | None] = {}  # by running launch; None until it has ended
        self._listener: HostListener | None = None
        self._closed = threading.Event()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._threads = [
            threading.Thread(target=self._keep_job, name="nest-job", daemon=True),
            threading.Thread(target=self._keep_connection, name="nest-connection", daemon=True),
        ]

    def open(self, listener: HostListener) -> None:
        self._listener = listener
        self._server.bind(self._path)
        self._server.listen(1)
        for thread in self._threads:
            thread.start()

    def executors(self) -> list[Executor]:
        return [self._executor]

    def run(self, executor: Executor, spec: BrokerSpec) -> BrokerOutcome:
        del executor
        with self._changed:
            if not self._changed.wait_for(self._is_usable, CONNECT_TIMEOUT_S):
                return BrokerOutcome(reason=LOST, error_message="the nest's task did not start: is a task slot free?")
            if self._closed.is_set():
                return BrokerOutcome(reason=LOST, error_message="the session has ended")
            self._ended[spec.launch] = None
            if not self._send(StartBroker(spec)):
                self._ended[spec.launch] = BrokerOutcome(reason=LOST, error_message="the nest is gone")
            # No deadline: a broker runs as long as the cluster does. Its end, the nest's or the session's wakes this.
            self._changed.wait_for(lambda: self._ended[spec.launch] is not None)
            outcome = self._ended.pop(spec.launch)
        return outcome or BrokerOutcome(reason=LOST)

    def cancel(self, launch: int) -> None:
        with self._changed:
            if launch in self._ended:
                self._send(EndBroker(launch))

    def close(self) -> None:
        self._closed.set()
        with self._changed:
            self._lose_all("the cluster was stopped")
            self._changed.notify_all()
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT_S)
        if self._threads[0].is_alive() and not is_stopped(self._sc):
            self._sc.cancelJobGroup(GROUP)
        self._server.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _path(self) -> str:
        return str(self._directory / "driver")

    def _is_usable(self) -> bool:
        return self._connection is not None or self._closed.is_set()

    def _send(self, order: StartBroker | EndBroker) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.sendall(msgspec.json.encode(order) + b"\n")
        except OSError:
            return False
        return True

    def _keep_job(self) -> None:
        """Run the nest's job for as long as the cluster runs; a nest that was killed is started again."""
        while not self._closed.is_set():
            if is_stopped(self._sc):
                break
            try:
                self._sc.setJobGroup(GROUP, "brokers of this session", True)
                self._sc.parallelize([self._path.encode()], 1).mapPartitions(nest_task(self._entry)).collect()
            except (Py4JError, OSError, AssertionError, AttributeError) as error:
                logger.info("the nest ended: %s", type(error).__name__)
            self._closed.wait(RESTART_PAUSE_S)
        if not self._closed.is_set() and self._listener is not None:
            self._listener.session_ended()

    def _keep_connection(self) -> None:
        decoder = msgspec.json.Decoder(BrokerEnded)
        self._server.settimeout(RESTART_PAUSE_S)
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            with connection:
                self._serve(connection, decoder)

    def _serve(self, connection: socket.socket, decoder: msgspec.json.Decoder[BrokerEnded]) -> None:
        with self._changed:
            self._connection = connection
            self._changed.notify_all()
        lines = Lines()
        while data := _receive(connection):
            for line in lines.feed(data):
                ended = decoder.decode(line)
                with self._changed:
                    if ended.launch in self._ended:
                        self._ended[ended.launch] = ended.outcome
                    self._changed.notify_all()
        with self._changed:
            self._connection = None
            self._lose_all("the nest's process is gone")

    def _lose_all(self, why: str) -> None:
        for launch, outcome in self._ended.items():
            if outcome is None:
                self._ended[launch] = BrokerOutcome(reason=LOST, error_message=why)
        self._changed.notify_all()


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65_536)
    except OSError:
        return b""
