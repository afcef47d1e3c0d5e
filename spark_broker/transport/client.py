"""Connections to a broker or the controller: calls with a deadline, and streams with a deadline per message.

Like the server, import this only after a fork. A Flight stream has no per-message time-out of its own (a call time-out
would end the stream), so one background thread cancels the streams whose deadline has passed.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref

import pyarrow as pa
import pyarrow.flight as flight

from spark_broker.errors import ForkedProcessError, NetworkError, RequestTimedOutError, error_from_code
from spark_broker.native_calls import native_calls
from spark_broker.protocol import wire
from spark_broker.protocol.messages import (
    CALL_ACTION,
    PROTOCOL_VERSION,
    CallResponse,
    ErrorResponse,
    Message,
    StreamMessage,
)
from spark_broker.threads import LONGEST_WAIT_S, BeginAgain, Worker, begin

END_TIMEOUT_S = 2.0
"""How long the end of the process waits for calls, which cannot be cancelled."""

_TRANSPORT_ERRORS = (flight.FlightError, pa.ArrowException, OSError, StopIteration)

_NOBODY = ("Connection refused", "DNS resolution failed", "Domain name not found")
"""Texts in gRPC's errors for an address at which no process listens."""

_CHANNEL_OPTIONS = [
    # A broker comes back on its port within milliseconds; gRPC's own first wait is a second, shared by all channels.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1500),  # also the time that one attempt may take
    ("grpc.max_reconnect_backoff_ms", 500),
    # Brokers and the controller are reached directly: a proxy for the web would take every call and answer none.
    ("grpc.enable_http_proxy", 0),
]


class Fork:
    """gRPC does not survive a fork: in the child, every call would hang, beyond its deadline."""

    def __init__(self) -> None:
        self._used = False
        self.inherited = False  # whether nothing of gRPC may be touched in this process
        self._kept: list[object] = []  # what a forked process must not free
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.inherited = self._used

    def check(self) -> None:
        """Called before gRPC is used. Raises ForkedProcessError."""
        if self.inherited:
            raise ForkedProcessError("this process was forked from one that had used a client of spark-broker")
        self._used = True

    def keeps(self, *objects: object) -> bool:
        """Whether nothing of gRPC may be touched in this process. It then keeps these for ever."""
        if self.inherited:
            self._kept += objects
        return self.inherited


fork = Fork()
"""Of this process."""


class Connection:
    """A connection to `host:port`. Safe for use by many threads. Nothing is sent before the first call or stream.

    Flight frees a client's channel when the client is closed. A call of another thread on that channel then crashes the
    process. So a client is never closed: each call holds a reference to it, and it is freed with the last reference.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._client: flight.FlightClient | None = None  # for `__del__`, if a later line raises
        fork.check()
        self._client = flight.FlightClient(f"grpc://{host}:{port}", generic_options=_CHANNEL_OPTIONS)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def call(self, request: Message, *, timeout_ms: int) -> CallResponse:
        """Send a request and wait for its response. Raises the peer's typed error, NetworkError or
        RequestTimedOutError."""
        fork.check()
        options = flight.FlightCallOptions(timeout=max(timeout_ms, 1) / 1000)
        action = flight.Action(CALL_ACTION, wire.encode_call(request))
        try:
            with native_calls:
                body = self._do_action(action, options)
        except flight.FlightTimedOutError:
            raise RequestTimedOutError(f"{self.address} did not answer within {timeout_ms} ms") from None
        except _TRANSPORT_ERRORS as error:
            line = _first_line(error)
            raise NetworkError(f"{self.address}: {line}", nobody_there=any(text in line for text in _NOBODY)) from None
        return wire.decode_response(memoryview(body))

    def _do_action(self, action: flight.Action, options: flight.FlightCallOptions) -> pa.Buffer:
        # A function of its own: its reference to the client, perhaps the last, ends while the call still counts.
        return next(iter(self._held().do_action(action, options))).body

    def open_stream(self, kind: str) -> ClientStream:
        """Open a stream of messages. Raises NetworkError."""
        fork.check()
        descriptor = flight.FlightDescriptor.for_command(f"{kind}/{PROTOCOL_VERSION}".encode())
        try:
            with native_calls:
                writer, reader = self._held().do_exchange(descriptor)
                return ClientStream(self.address, writer, reader)
        except _TRANSPORT_ERRORS as error:
            raise NetworkError(f"{self.address}: {_first_line(error)}") from None

    def close(self) -> None:
        """Refuse calls and streams from now on. Those that are under way go on to their end, or their deadline."""
        if not fork.keeps(self._client):
            with native_calls:
                self._client = None

    def __del__(self) -> None:
        if fork.keeps(self._client):
            return
        try:
            with native_calls:
                self._client = None
        except SystemExit:  # the process is ending
            native_calls.keep(self._client)

    def _held(self) -> flight.FlightClient:
        client = self._client
        if client is None:
            raise NetworkError(f"{self.address}: the connection is closed")
        return client


class ClientStream:
    """A stream of messages: one thread may send while another receives."""

    def __init__(self, address: str, writer: object, reader: object) -> None:
        self.address = address
        self._writer = writer
        self._reader = reader
        self._send_lock = threading.Lock()
        # Monotonic seconds; 0: no deadline. Read by the reaper, which cancels the stream once it has passed.
        self.receive_deadline = 0.0
        self.send_deadline = 0.0
        self.timed_out = False
        self.closed = False
        _reaper.watch(self)

    def send(self, message: Message, *payload: wire.Buffer, timeout_ms: int = 30_000) -> None:
        """Send a message. Raises NetworkError; RequestTimedOutError when the peer takes nothing for `timeout_ms`."""
        data = pa.py_buffer(wire.encode(message, *payload))
        with self._send_lock:
            self.send_deadline = time.monotonic() + timeout_ms / 1000
            _reaper.look_at(self.send_deadline)
            try:
                with native_calls:
                    self._writer.write_metadata(data)  # type: ignore[attr-defined]
            except _TRANSPORT_ERRORS as error:
                raise self._failure(error) from None
            finally:
                self.send_deadline = 0.0

    def receive(self, *, timeout_ms: int | None) -> tuple[StreamMessage, memoryview]:
        """The next message and its payload. With `timeout_ms=None`, only `close` in another thread ends the wait early.

        Raises NetworkError, RequestTimedOutError (the stream is then broken) or the error that ended the stream.
        """
        if timeout_ms is not None:
            self.receive_deadline = time.monotonic() + timeout_ms / 1000
            _reaper.look_at(self.receive_deadline)
        try:
            with native_calls:
                chunk = self._reader.read_chunk()  # type: ignore[attr-defined]
        except _TRANSPORT_ERRORS as error:
            raise self._failure(error) from None
        finally:
            self.receive_deadline = 0.0
        if chunk.app_metadata is None:
            raise NetworkError(f"{self.address} sent a message without metadata")
        message, payload = wire.decode(memoryview(chunk.app_metadata))
        if isinstance(message, ErrorResponse):
            raise error_from_code(message.error_code, message.error_message)
        return message, payload

    def _failure(self, error: BaseException) -> NetworkError | RequestTimedOutError:
        if self.timed_out:
            return RequestTimedOutError(f"{self.address} did not answer in time")
        return NetworkError(f"{self.address}: {_first_line(error)}")

    def close(self) -> None:
        """Break the stream: a `receive` or `send` that waits in another thread raises NetworkError."""
        with native_calls:
            self.cancel()

    def cancel(self) -> None:
        """As `close`. This also works while the process ends."""
        self.closed = True
        if (reader := self._reader) is not None:
            reader.cancel()  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if fork.keeps(self._writer, self._reader):
            return
        try:
            with native_calls:
                self.free()
        except SystemExit:  # the process is ending
            native_calls.keep(self._writer, self._reader)

    def free(self) -> None:
        """Break the stream and free it. No thread may be inside it."""
        # Arrow prints to stderr about a broken stream that is freed without a close; after `cancel` a close does not
        # wait.
        if (writer := self._writer) is not None:
            with contextlib.suppress(*_TRANSPORT_ERRORS):
                self.cancel()
                writer.close()  # type: ignore[attr-defined]
        self._reader = self._writer = None


class _Reaper:
    """Cancels streams whose deadline has passed: one thread for the whole process, started by the first stream.

    It sleeps until the earliest deadline that it knows of. A stream sets its deadline before it calls `look_at`; the
    reaper resets `_next_look_s` before it looks at the streams. So no deadline is missed, in whichever order they run.
    """

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[ClientStream] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._sooner = threading.Condition(self._lock)
        self._next_look_s = math.inf
        self._thread: Worker | None = None

    def watch(self, stream: ClientStream) -> None:
        with self._lock:
            self._streams.add(stream)
            if self._thread is None or not self._thread.is_alive():
                self._thread = begin("stream-deadlines", BeginAgain(), self._run)

    def look_at(self, deadline_s: float) -> None:
        """Look at the streams when this deadline has passed, or sooner."""
        if deadline_s < self._next_look_s:
            with self._sooner:
                self._next_look_s = min(deadline_s, self._next_look_s)
                self._sooner.notify()

    def streams(self) -> list[ClientStream]:
        with self._lock:
            return list(self._streams)

    def _run(self) -> None:
        while True:
            with self._sooner:
                while (left_s := self._next_look_s - time.monotonic()) > 0:
                    self._sooner.wait(min(left_s, LONGEST_WAIT_S))
                self._next_look_s = math.inf
            self.look_at(self._look())

    def _look(self) -> float:
        """Cancel the streams that are late. Returns the earliest deadline of the others.

        A function of its own: a local variable of the loop above would keep the streams for ever.
        """
        streams = self.streams()
        now, earliest = time.monotonic(), math.inf
        for stream in streams:
            for deadline in (stream.receive_deadline, stream.send_deadline):
                if 0 < deadline <= now and not stream.timed_out:
                    stream.timed_out = True
                    stream.close()
                elif deadline > now:
                    earliest = min(earliest, deadline)
        return earliest


_reaper = _Reaper()


@atexit.register
def _end_all() -> None:
    """The process ends: break all streams, and let no thread into Flight."""
    if fork.keeps():
        return
    native_calls.refuse()
    streams = _reaper.streams()
    for stream in streams:
        stream.cancel()
    if native_calls.wait_until_nobody_is_inside(END_TIMEOUT_S):
        for stream in streams:
            stream.free()
    else:
        native_calls.keep(*streams)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return line.split(". gRPC client debug context", 1)[0]
