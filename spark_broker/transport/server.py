"""The Flight server: hands calls and streams of messages to handlers.

Import this module only in the process that serves (a broker's or the controller's): gRPC does not survive a fork.
Never shut a server down, and never wait for its end: `FlightServerBase.shutdown()` hangs while an idle client stream is
open. The process reports that it is done and then exits.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pyarrow as pa
import pyarrow.flight as flight

from spark_broker.config import ClusterConfig
from spark_broker.errors import (
    InvalidRequestError,
    InvariantError,
    NetworkError,
    NoThreadError,
    SparkBrokerError,
    UnknownServerError,
    UnsupportedVersionError,
)
from spark_broker.process_limits import limit_reached
from spark_broker.protocol import wire
from spark_broker.protocol.messages import CALL_ACTION, PROTOCOL_VERSION, CallRequest, Message, StreamMessage
from spark_broker.threads import Fate, begin
from spark_broker.transport.stream_watch import StreamWatch

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = ClusterConfig().socket_request_max_bytes
SEND_TIMEOUT_MS = ClusterConfig().socket_send_timeout_ms

MAX_DRAINED_MESSAGES = 1000

_TRANSPORT_ERRORS = (flight.FlightError, pa.ArrowException, OSError, StopIteration)

_LEFT = "%s left before it was answered: %s"


class ServerStream:
    """One client's stream of messages. `receive` belongs to the handler's thread; `send` may be called from any.

    A handler that waits for something other than its client sets `on_gone`. It is called when the client has left, from
    another thread and perhaps several times.
    """

    def __init__(self, context: object, reader: object, writer: object, max_bytes: int, on_bug: Fate) -> None:
        self.kind = ""
        self.peer: str = context.peer()  # type: ignore[attr-defined]
        self.on_gone: Callable[[], object] | None = None
        self._on_bug = on_bug
        self._max_bytes = max_bytes
        self._context = context
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()
        self._open = True  # guarded by _lock; Flight's writer is gone once the handler has returned
        self._served = True  # guarded by _context_lock; Flight's context is gone once the handler has returned
        self._context_lock = threading.Lock()
        self._sending_since_s = 0.0
        self._posts: queue.SimpleQueue[_Post | None] | None = None

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
            self._write(data)

    def send_now(self, message: Message) -> bool:
        """Send a message, unless another thread is sending (it may wait for the client). Returns whether it was sent.

        A message to a client that is gone counts as sent.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._write(pa.py_buffer(wire.encode(message)))
        except NetworkError as error:
            logger.info(_LEFT, self.peer, error)
        finally:
            self._lock.release()
        return True

    def _write(self, data: pa.Buffer) -> None:
        """Send under the lock."""
        if not self._open:
            raise NetworkError("the stream is closed")
        self._sending_since_s = time.monotonic()
        try:
            self._writer.write_metadata(data)  # type: ignore[attr-defined]
        except _TRANSPORT_ERRORS as error:
            self._open = False
            raise NetworkError(str(error)) from None
        finally:
            self._sending_since_s = 0.0

    def post(self, message: Message, sent: Callable[[], object]) -> None:
        """Have a thread of this stream send a message, after those that were posted before. It then calls `sent`, even
        if the client is gone. `post` never waits for the client: the caller counts `sent` to bound what it posts."""
        with self._context_lock:
            if self._served and self._posts is None:
                self._posts = self._begin_posts()
            posts = self._posts
        if posts is None:
            sent()
        else:
            posts.put((message, sent))

    def _begin_posts(self) -> queue.SimpleQueue[_Post | None] | None:
        """None: the process can have no more threads. The answer is lost then, and its client asks again in time."""
        posts: queue.SimpleQueue[_Post | None] = queue.SimpleQueue()
        try:
            begin("answers", self._on_bug, partial(self._send_posts, posts))
        except NoThreadError as error:
            logger.warning("%s gets no answer: %s", self.peer, error)
            return None
        return posts

    def _send_posts(self, posts: queue.SimpleQueue[_Post | None]) -> None:
        while (post := posts.get()) is not None:
            message, sent = post
            try:
                self.send(message)
            except NetworkError as error:
                logger.info(_LEFT, self.peer, error)
            sent()

    def drain(self) -> None:
        """Read and ignore messages until the client leaves, up to a bound. If the stream ended while the client still
        writes, Flight would discard what the client has not read yet, including the error that ended the stream."""
        for _ in range(MAX_DRAINED_MESSAGES):
            try:
                self._reader.read_chunk()  # type: ignore[attr-defined]
            except _TRANSPORT_ERRORS:
                return

    @property
    def cancelled(self) -> bool:
        """Whether the client is gone, or the stream is at its end."""
        with self._context_lock:
            return not self._served or bool(self._context.is_cancelled())  # type: ignore[attr-defined]

    @property
    def sending_for_s(self) -> float:
        """How long the message that is being sent has waited for the client to take it; 0: none is being sent."""
        since_s = self._sending_since_s
        return time.monotonic() - since_s if since_s else 0.0

    def look(self) -> None:
        """Call `on_gone`, if the client is gone."""
        on_gone = self.on_gone
        if on_gone is not None and self.cancelled:
            on_gone()

    def close(self) -> None:
        """Refuse further sends; the handler is about to return."""
        with self._context_lock:
            self._served = False
            if self._posts is not None:
                self._posts.put(None)
        with self._lock:
            self._open = False


_Post = tuple[Message, Callable[[], object]]


CallHandler = Callable[[CallRequest], Message]
StreamHandler = Callable[[ServerStream], None]


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """Serves calls and streams on `host:port` (0: any free port) from the moment it is made.

    A handler's typed errors go to its client. Anything else is our own bug. The client gets UnknownServerError, and
    only its call or stream ends: any peer may send a value that nobody has thought of. But after a broken invariant
    nothing that this process holds can be relied on: `on_bug` is called. `StateLock` raises InvariantError, too.
    """

    def __init__(
        self,
        host: str,
        port: int,
        calls: CallHandler,
        streams: Mapping[str, StreamHandler],
        on_bug: Callable[[BaseException], None],
        max_request_bytes: int = MAX_REQUEST_BYTES,
        send_timeout_ms: int = SEND_TIMEOUT_MS,
    ) -> None:
        self._max_request_bytes = max_request_bytes
        self._watch = StreamWatch(send_timeout_ms / 1000)
        self._calls = calls
        self._streams = dict(streams)
        self._on_bug = on_bug
        self.host = host
        super().__init__(f"grpc://{host}:{port}")
        self._watch.port = self.port
        self._watch.start()

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
            return wire.error_response(error)
        except Exception as error:  # noqa: BLE001 (it is logged, and perhaps ends the process)
            return wire.error_response(self._failed("a call", error))

    def do_exchange(self, context: object, descriptor: flight.FlightDescriptor, reader: object, writer: object) -> None:
        """One stream: its handler runs in this thread until the client leaves."""
        stream = ServerStream(context, reader, writer, self._max_request_bytes, self._on_bug)
        self._watch.add(stream)
        try:
            handler = self._stream_handler(stream, bytes(descriptor.command or b""))
            handler(stream)
        except NetworkError:
            return
        except SparkBrokerError as error:
            _send_last(stream, error)
        except Exception as error:  # noqa: BLE001 (it is logged, and perhaps ends the process)
            _send_last(stream, self._failed("a stream", error))
        finally:
            stream.close()
            self._watch.remove(stream)

    def _failed(self, what: str, error: Exception) -> SparkBrokerError:
        """Log it, and end the process if an invariant is broken. Returns the client's error."""
        limit = limit_reached(error)
        if limit is None:
            logger.error("%s failed on a bug", what, exc_info=error)
        else:
            logger.error("%s failed: %s", what, limit)
        if isinstance(error, InvariantError):
            self._on_bug(error)
        return limit or UnknownServerError(f"{type(error).__name__}: {error}")

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
