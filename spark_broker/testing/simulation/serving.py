"""Clients' streams on a broker: the production streams of appends and fetches, fed one message at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from spark_broker.broker.append import AwaitedTransaction
from spark_broker.broker.append_stream import AppendStream
from spark_broker.broker.confirmation import CONFIRMATIONS_MAX, no_coordinator
from spark_broker.broker.fetch_stream import FetchStream
from spark_broker.broker.partition import Partition
from spark_broker.errors import NetworkError, SparkBrokerError
from spark_broker.protocol.messages import AppendRequest, AppendResponse, Message, StreamMessage
from spark_broker.protocol.wire import Buffer
from spark_broker.testing.simulation.network import End

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess

MAX_WAITING = 500


class _ServerStream:
    """Stands in for `transport.server.ServerStream`: `receive` gives the messages that have come, and then None.

    `cancelled` is always true, which lets a long poll answer at once with what there is.
    """

    cancelled = True

    def __init__(self, process: BrokerProcess, end: End) -> None:
        self._process = process
        self._end = end
        self.inbox: deque[tuple[StreamMessage, Buffer]] = deque()
        self._taken: tuple[StreamMessage, Buffer] | None = None  # the last that was received
        self.requests: dict[int, tuple[AppendRequest, Buffer]] = {}

    def receive(self) -> tuple[StreamMessage, Buffer] | None:
        if not self.inbox:
            return None
        self._taken = self.inbox.popleft()
        return self._taken

    def put_back(self) -> None:
        """Let the next `receive` give the last message again."""
        if self._taken is not None:
            self.inbox.appendleft(self._taken)

    def send(self, message: Message, *payload: Buffer) -> None:
        if isinstance(message, AppendResponse):
            request = self.requests.pop(message.correlation_id, None)
            if request is not None and message.error_code == 0:
                self._process.world.invariants.acknowledged(self._process, *request, message.base_offset)
        self._end.send((message, b"".join(payload)))

    def post(self, message: Message, sent: Callable[[], object]) -> None:
        sent()
        with suppress(NetworkError):
            self.send(message)


class _HeldError(Exception):
    """The stream waits for a coordinator, as its thread does in production."""


class _AppendServer:
    """A producer's stream. The first batch of a transaction holds it up until the coordinator has answered."""

    def __init__(self, process: BrokerProcess, end: End) -> None:
        self._process = process
        self._end = end
        self._stream = _ServerStream(process, end)
        self._server = AppendStream(
            process.manager,
            self._stream,  # type: ignore[arg-type]
            MAX_WAITING,
            process.machine.clock,
            confirm=self._confirm,
        )
        self._held = False
        self._asked = 0  # how often it asked about the batch at the front
        self._refusal: SparkBrokerError | None = None

    def received(self, message: object) -> None:
        request, payload = cast("tuple[AppendRequest, Buffer]", message)
        self._stream.requests[request.correlation_id] = (request, payload)
        self._stream.inbox.append((request, payload))
        self._go_on()

    def _go_on(self) -> None:
        while not self._held:
            try:
                _run(self._server, self._end)
            except _HeldError:
                # The batch is received again once the answer is there: it has no token yet, and nothing is stored.
                self._server.answers.waiting.release()
                self._stream.put_back()
            else:
                return

    def _confirm(
        self, partition: Partition, awaited: AwaitedTransaction, transactional_id: str, deadline_ms: int
    ) -> None:
        """`confirmation.Confirm`: raises the coordinator's refusal, or holds the stream until there is an answer."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            self._asked = 0
            raise refusal
        coordination = self._process.coordination
        if coordination is None or self._asked == CONFIRMATIONS_MAX:
            self._asked = 0
            no_coordinator(partition, awaited, transactional_id, deadline_ms)
            return
        self._asked += 1
        self._held = True
        coordination.confirm(partition, awaited, transactional_id, deadline_ms, self._confirmed)
        raise _HeldError

    def _confirmed(self, refusal: SparkBrokerError | None) -> None:
        self._held = False
        self._refusal = refusal
        self._go_on()


def serve_appends(process: BrokerProcess, end: End) -> None:
    """Serve a producer on its stream."""
    end.on_message = _AppendServer(process, end).received


def serve_fetches(process: BrokerProcess, end: End) -> None:
    """Serve a consumer on its stream."""
    stream = _ServerStream(process, end)
    boot_id = process.machine.fs.boot_id()
    server = FetchStream(process.manager, stream, boot_id=boot_id)  # type: ignore[arg-type]

    def received(message: object) -> None:
        stream.inbox.append((cast("StreamMessage", message), b""))
        _run(server, end)

    end.on_message = received


def _run(server: AppendStream | FetchStream, end: End) -> None:
    try:
        server.run()
    except NetworkError:
        return
    except SparkBrokerError as error:
        if not end.closed:
            end.close(error)
