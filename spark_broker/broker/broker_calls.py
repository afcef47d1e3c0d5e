"""Calls from this broker to others and to the controller: kept connections, and threads if a caller cannot wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Reply
from spark_broker.broker.slow import SLOW
from spark_broker.controller.image import BrokerState
from spark_broker.errors import NetworkError, NoThreadError, SparkBrokerError
from spark_broker.protocol.messages import AllocateProducerIdsRequest, Message
from spark_broker.threads import Worker, start
from spark_broker.transport.client import Connection

QUEUED_CALLS_MAX = 100

NewConnection = Callable[[str, int], Connection]


class BrokerCalls:
    """`call` blocks the calling thread. `send` uses one thread for each destination, so a broker that does not answer
    delays only its own requests."""

    def __init__(
        self,
        manager: ReplicaManager,
        controller: Connection,
        timeout_ms: int,
        on_bug: Callable[[BaseException], None],
        new_connection: NewConnection = Connection,
    ) -> None:
        self._manager = manager
        self._timeout_ms = timeout_ms
        self._on_bug = on_bug
        self._new_connection = new_connection
        self._lock = threading.Lock()
        self._stopped = False
        self._connections: dict[int, Connection] = {}
        self._callers: dict[int, _Caller] = {}
        self._controller = _Caller("calls-controller", controller, on_bug)

    def start(self) -> None:
        self._controller.start()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            callers = [self._controller, *self._callers.values()]
        for caller in callers:
            caller.stop()

    def call(self, broker: BrokerState, request: Message, timeout_ms: int) -> Message:
        """Raises the other broker's typed error, NetworkError or RequestTimedOutError."""
        with SLOW.watch(f"call of {type(request).__name__}", to=f"broker {broker.id}"):
            answer: Message = self._connection(broker).call(request, timeout_ms=timeout_ms)
        return answer

    def send(self, broker: BrokerState, request: Message, timeout_ms: int, answered: Reply) -> None:
        """Like `call`, without waiting: `answered` is called from another thread, or now where the call is refused."""
        connection = self._connection(broker)
        try:
            caller = self._caller(broker.id, connection)
        except NoThreadError as error:
            answered(error)
        else:
            caller.put(request, timeout_ms, answered)

    def _caller(self, broker_id: int, connection: Connection) -> _Caller:
        """The thread for a destination. Raises NoThreadError: the next call tries again."""
        with self._lock:
            caller = self._callers.get(broker_id)
            if caller is not None and caller.connection is connection:
                return caller
            successor = _Caller(f"calls-{broker_id}", connection, self._on_bug)
            if not self._stopped:
                start(successor)
            if caller is not None:
                caller.stop()
            self._callers[broker_id] = successor
            return successor

    def allocate_producer_ids(self, answered: Reply) -> None:
        """Ask the controller for a block of producer ids; `answered` is called from another thread."""
        request = AllocateProducerIdsRequest(self._manager.broker_id, self._manager.broker_epoch)
        self._controller.put(request, self._timeout_ms, answered)

    def _connection(self, broker: BrokerState) -> Connection:
        """The connection to a broker. It is replaced when the broker's address has changed."""
        with self._lock:
            connection = self._connections.get(broker.id)
            if connection is None or (connection.host, connection.port) != (broker.host, broker.port):
                connection = self._connections[broker.id] = self._new_connection(broker.host, broker.port)
            return connection


class _Caller(Worker):
    """Makes the calls to one destination, one after the other."""

    def __init__(self, name: str, connection: Connection, on_bug: Callable[[BaseException], None]) -> None:
        super().__init__(name, on_bug)
        self.connection = connection
        self._stopping = threading.Event()
        self._queue: queue.Queue[tuple[Message, int, Reply]] = queue.Queue(QUEUED_CALLS_MAX)

    def put(self, request: Message, timeout_ms: int, answered: Reply) -> None:
        try:
            self._queue.put_nowait((request, timeout_ms, answered))
        except queue.Full:
            answered(NetworkError(f"{QUEUED_CALLS_MAX} calls to {self.connection.address} wait already"))
        if self._stopping.is_set():  # The thread may have ended before it saw this call.
            self._refuse_rest()

    def stop(self) -> None:
        self._stopping.set()

    def work(self) -> None:
        while not self._stopping.is_set():
            try:
                question = self._queue.get(timeout=0.5)
            except queue.Empty:
                continue
            self._make(*question)
        self._refuse_rest()

    def _make(self, request: Message, timeout_ms: int, answered: Reply) -> None:
        try:
            with SLOW.watch(f"call of {type(request).__name__}", to=self.connection.address):
                answer: Message | SparkBrokerError = self.connection.call(request, timeout_ms=timeout_ms)
        except SparkBrokerError as error:
            answer = error
        answered(answer)

    def _refuse_rest(self) -> None:
        with suppress(queue.Empty):
            while True:
                _, _, answered = self._queue.get_nowait()
                answered(NetworkError(f"{self.connection.address}: the connection was given up"))
