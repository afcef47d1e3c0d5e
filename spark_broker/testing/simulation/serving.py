"""Clients' streams on a broker: the production streams of appends and fetches, fed one message at a time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, cast

from spark_broker.broker.append_stream import AppendStream
from spark_broker.broker.fetch_stream import FetchStream
from spark_broker.errors import InvariantError, NetworkError, SparkBrokerError
from spark_broker.protocol.messages import AppendRequest, AppendResponse, Message, StreamMessage
from spark_broker.protocol.wire import Buffer
from spark_broker.testing.simulation.network import End

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess

MAX_WAITING = 500


class _ServerStream:
    """Stands in for `transport.server.ServerStream`: `receive` gives what has come, then says that nothing is left.

    `cancelled`: always, so that a long poll answers at once with what there is.
    """

    cancelled = True

    def __init__(self, process: BrokerProcess, end: End) -> None:
        self._process = process
        self._end = end
        self.inbox: deque[tuple[StreamMessage, Buffer]] = deque()
        self.requests: dict[int, tuple[AppendRequest, Buffer]] = {}

    def receive(self) -> tuple[StreamMessage, Buffer] | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, message: Message, *payload: Buffer) -> None:
        if isinstance(message, AppendResponse):
            request = self.requests.pop(message.correlation_id, None)
            if request is not None and message.error_code == 0:
                self._process.world.invariants.acknowledged(self._process, *request, message.base_offset)
        self._end.send((message, b"".join(payload)))


def serve_appends(process: BrokerProcess, end: End) -> None:
    """Serve a producer on its stream."""
    stream = _ServerStream(process, end)
    server = AppendStream(process.manager, stream, MAX_WAITING, process.machine.clock)  # type: ignore[arg-type]

    def received(message: object) -> None:
        request, payload = cast("tuple[AppendRequest, Buffer]", message)
        stream.requests[request.correlation_id] = (request, payload)
        stream.inbox.append((request, payload))
        _run(server, end)

    end.on_message = received


def serve_fetches(process: BrokerProcess, end: End) -> None:
    """Serve a consumer on its stream."""
    stream = _ServerStream(process, end)
    server = FetchStream(process.manager, stream)  # type: ignore[arg-type]

    def received(message: object) -> None:
        stream.inbox.append((cast("StreamMessage", message), b""))
        _run(server, end)

    end.on_message = received


def _run(server: AppendStream | FetchStream, end: End) -> None:
    try:
        server.run()
    except InvariantError:
        raise
    except NetworkError:
        return
    except SparkBrokerError as error:
        if not end.closed:
            end.close(error)
