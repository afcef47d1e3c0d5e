"""The Flight server: hands calls and streams of messages to handlers.

Import this module only in the process that serves (a Spark task after its fork, the controller's process): gRPC does
not survive a fork. Never join or shut a server down in order: `FlightServerBase.shutdown()` hangs while an idle client
stream is open. The process reports that it is done and then exits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
import pyarrow.flight as flight

from spark_broker.config import ClusterConfig
from spark_broker.errors import (
    InvalidRequestError,
    InvariantError,
    NetworkError,
    SparkBrokerError,
    UnknownServerError,
    UnsupportedVersionError,
)
from spark_broker.protocol import wire
from spark_broker.protocol.messages import CALL_ACTION, PROTOCOL_VERSION, CallRequest, Message, StreamMessage

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = ClusterConfig().socket_request_max_bytes

MAX_DRAINED_MESSAGES = 1000

_TRANSPORT_ERRORS = (flight.FlightError, pa.ArrowException, OSError, StopIteration)


class ServerStream:
    """One client's stream of messages. `receive` belongs to the handler's thread; `send` may be called from any."""

    def __init__(self, kind: str, context: object, reader: object, writer: object, max_bytes: int) -> None:
        self.kind = kind
        self._max_bytes = max_bytes
        self._context = context
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()
        self._open = True  # guarded by _lock; Flight's writer is gone once the handler has returned

    def receive(self) -> tuple[StreamMessage, memoryview] | None:
        """The next message and its payload; None at the end of the stream. Raises InvalidRequestError."""
        try:
            chunk = self._reader.read_chunk()  # type: ignore[attr-defined]
        except _TRANSPORT_ERRORS:
            return None
        if chunk.app_metadata is None:
            raise InvalidRequestError("a stream message without metadata")
        _check_size(len(chunk.app_metadata), self._max_bytes)
        return wire.decode(memoryview(chunk.app_metadata))

    def send(self, message: Message, *payload: wire.Buffer) -> None:
        """Send a message. Raises NetworkError when the client is gone."""
        data = pa.py_buffer(wire.encode(message, *payload))
        with self._lock:
            if not self._open:
                raise NetworkError("the stream is closed")
            try:
                self._writer.write_metadata(data)  # type: ignore[attr-defined]
            except _TRANSPORT_ERRORS as error:
                self._open = False
                raise NetworkError(str(error)) from None

    def drain(self) -> None:
        """Read on, unheeded, until the client leaves: if the stream ended under a client that still writes, Flight
        would throw away what the client has not read yet, the error that ended it among that. Bounded."""
        for _ in range(MAX_DRAINED_MESSAGES):
            try:
                self._reader.read_chunk()  # type: ignore[attr-defined]
            except _TRANSPORT_ERRORS:
                return

    @property
    def cancelled(self) -> bool:
        """Whether the client is gone. Every wait on the server polls this."""
        return not self._open or bool(self._context.is_cancelled())  # type: ignore[attr-defined]

    def close(self) -> None:
        """Refuse further sends; the handler is about to return."""
        with self._lock:
            self._open = False


CallHandler = Callable[[CallRequest], Message]
StreamHandler = Callable[[ServerStream], None]


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """Serves calls and streams on `host:port` (0: any free port) from the moment it is made.

    A handler's typed errors go to its client. Anything else is our own bug: `on_bug` is told, and the client gets
    UnknownServerError.
    """

    def __init__(
        self,
        host: str,
        port: int,
        calls: CallHandler,
        streams: Mapping[str, StreamHandler],
        on_bug: Callable[[BaseException], None],
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        self._max_request_bytes = max_request_bytes
        self._calls = calls
        self._streams = dict(streams)
        self._on_bug = on_bug
        self.host = host
        super().__init__(f"grpc://{host}:{port}")

    def do_action(self, context: object, action: flight.Action) -> Iterator[bytes]:
        """One call: a request in, a response out."""
        del context
        yield wire.encode_call(self._answer(action))

    def _answer(self, action: flight.Action) -> Message:
        try:
            if action.type != CALL_ACTION:
                raise InvalidRequestError(f"unknown action {action.type!r}")
            _check_size(action.body.size, self._max_request_bytes)
            return self._calls(wire.decode_request(memoryview(action.body)))
        except SparkBrokerError as error:
            if isinstance(error, InvariantError):
                self._on_bug(error)
            return wire.error_response(error)
        except Exception as error:
            logger.exception("a call failed")
            self._on_bug(error)
            return wire.error_response(UnknownServerError(f"{type(error).__name__}: {error}"))

    def do_exchange(self, context: object, descriptor: flight.FlightDescriptor, reader: object, writer: object) -> None:
        """One stream: its handler runs in this thread until the client leaves."""
        stream = ServerStream("", context, reader, writer, self._max_request_bytes)
        try:
            handler = self._stream_handler(stream, bytes(descriptor.command or b""))
            handler(stream)
        except NetworkError:
            return
        except SparkBrokerError as error:
            if isinstance(error, InvariantError):
                self._on_bug(error)
            _send_last(stream, error)
        except Exception as error:
            logger.exception("a stream failed")
            self._on_bug(error)
            _send_last(stream, UnknownServerError(f"{type(error).__name__}: {error}"))
        finally:
            stream.close()

    def _stream_handler(self, stream: ServerStream, command: bytes) -> StreamHandler:
        kind, _, version = command.decode("ascii", errors="replace").partition("/")
        if kind not in self._streams:
            raise InvalidRequestError(f"unknown stream {kind!r}")
        if version != str(PROTOCOL_VERSION):
            raise UnsupportedVersionError(f"the peer speaks version {version}, this process {PROTOCOL_VERSION}")
        stream.kind = kind
        return self._streams[kind]


def _check_size(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise InvalidRequestError(f"a message of {size_bytes} bytes; {limit_bytes} are allowed")


def _send_last(stream: ServerStream, error: SparkBrokerError) -> None:
    try:
        stream.send(wire.error_response(error))
    except NetworkError:
        logger.info("a client left before it heard of: %s", error)
        return
    stream.drain()
