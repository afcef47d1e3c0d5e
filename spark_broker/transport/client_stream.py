"""A client's stream of messages, on a socket of its own.

The thread that waits for the next message receives it itself: woken by another one, it would wait for the interpreter
twice, and a process whose main thread computes gives it away every five milliseconds. What nobody reads stays with the
system, and then with the peer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from spark_broker.addresses import address_text
from spark_broker.errors import (
    InvalidRequestError,
    NetworkError,
    RequestTimedOutError,
    SparkBrokerError,
    again,
    error_from_code,
)
from spark_broker.protocol import wire
from spark_broker.protocol.messages import ErrorResponse, Message, StreamMessage
from spark_broker.transport.frames import Frame, FrameHeader, FrameReader, Operation, encode
from spark_broker.transport.hello import check_hello, hello
from spark_broker.transport.origin import Origin, after_fork
from spark_broker.transport.sockets import connected, write_some

T = TypeVar("T")

SCRATCH_BYTES = 64 * 1024
ANSWER_MAX_BYTES = 1 << 31
"""Largest frame that a client receives."""

POLL_MAX_MS = 1 << 30
"""A wait of twelve days. `poll` takes no number beyond 31 bits; the wait goes on after it."""

STREAM = 1
"""The number of the only stream of its connection."""


class ClientStream:
    """One thread may send while another receives. `close` may be called from any, and ends their waits. A stream that
    nobody holds any more is closed with its socket.

    Invariants: `_users` counts the threads inside `send` and `receive`. The descriptor is closed by the last of them
    after `closed` is set, and by nobody else: its number may belong to another socket from then on.
    """

    def __init__(self, host: str, port: int, kind: str) -> None:
        """Raises NetworkError."""
        self.address = address_text(host, port)
        self.kind = kind
        self.timed_out = False
        self.closed = self._is_greeted = False
        self._origin = Origin()
        self._sock = connected(host, port)
        _streams.add(self)
        self._lock = threading.Lock()
        self._users = 0
        self._why: SparkBrokerError | None = None  # what broke the stream
        self._send_lock = threading.Lock()
        self._reader = FrameReader(admit_answer)
        self._scratch: memoryview | None = None
        self._frames: deque[Frame] = deque()
        self._used(lambda: self._send([*hello(), *encode(Operation.OPEN, kind.encode(), stream=STREAM)], 30_000))

    def send(self, message: Message, *payload: wire.Buffer, timeout_ms: int = 30_000) -> None:
        """Send a message. Raises NetworkError; RequestTimedOutError when the peer takes nothing for `timeout_ms`."""
        parts = encode(Operation.MESSAGE, wire.encode(message), *payload, stream=STREAM)
        self._used(lambda: self._send(parts, timeout_ms))

    def receive(self, *, timeout_ms: int | None) -> tuple[StreamMessage, memoryview]:
        """The next message and its payload. With `timeout_ms=None`, only `close` in another thread ends the wait early.

        Raises NetworkError, the error that ended the stream, or RequestTimedOutError when the peer has sent nothing for
        `timeout_ms`; the stream is then broken. While a message comes, it is waited for: thrown away, it would have to
        come again, over the same slow link, and would be late again.
        """
        silence_s = None if timeout_ms is None else timeout_ms / 1000
        frame = self._used(lambda: self._next(silence_s))
        message = wire.decode_message(frame.message)
        if isinstance(message, ErrorResponse):
            raise error_from_code(message.error_code, message.error_message)
        return message, frame.payload

    @property
    def is_quiet(self) -> bool:
        """Whether it is open, and nothing has come. While no message is due, anything else is its end."""
        if self.closed or self._origin.is_elsewhere:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not self._frames and not poll.poll(0)

    def close(self) -> None:
        """Break the stream: a `receive` or `send` that waits in another thread raises NetworkError."""
        if not self._origin.is_elsewhere:
            self._break(NetworkError(f"{self.address}: the stream is closed"))

    def abandon(self) -> None:
        """In a forked process: let go of the parent's connection, and say nothing on it."""
        self.closed = True
        self._sock.close()

    def _used(self, work: Callable[[], T]) -> T:
        """Do this while the descriptor stays open. Raises what broke the stream."""
        self._origin.check()
        with self._lock:
            if self.closed:
                raise self._failure()
            self._users += 1
        try:
            return work()
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def _send(self, parts: list[wire.Buffer], timeout_ms: int) -> None:
        with self._send_lock:
            if self.closed:
                raise self._failure()
            try:
                self._write(parts, timeout_ms)
            except SparkBrokerError:
                raise
            except OSError as error:
                raise self._broke(error) from None
            except BaseException:
                # A signal's handler raised, and nobody knows which bytes the system has: the peer must not read on.
                self._break(NetworkError(f"{self.address}: the process was interrupted while it sent"))
                raise

    def _write(self, parts: list[wire.Buffer], timeout_ms: int) -> None:
        left: deque[memoryview] = deque(memoryview(part) for part in parts)
        while left:
            try:
                write_some(self._sock, left)
            except BlockingIOError:
                if not self._ready(select.POLLOUT, time.monotonic() + timeout_ms / 1000):
                    raise self._timed_out() from None

    def _next(self, silence_s: float | None) -> Frame:
        heard_s = time.monotonic()
        while True:
            while self._frames:
                frame = self._frames.popleft()
                if frame.header.operation is Operation.MESSAGE:
                    return frame
                self._control(frame)
            if not self._ready(select.POLLIN, None if silence_s is None else heard_s + silence_s):
                raise self._timed_out()
            if self._receive():
                heard_s = time.monotonic()

    def _receive(self) -> bool:
        """Whether something has come."""
        target = self._reader.target
        if target is None and self._scratch is None:
            self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        room = self._scratch if target is None else target
        try:
            count = self._sock.recv_into(room)  # type: ignore[arg-type]  # it is there
            if not count:
                raise self._break(self._not_ours("the peer closed the connection"))
            if target is None:
                self._frames += self._reader.feed(room[:count])  # type: ignore[index]
            elif (frame := self._reader.filled(count)) is not None:
                self._frames.append(frame)
        except BlockingIOError:
            return False
        except InvalidRequestError as error:
            raise self._break(self._not_ours(error.message)) from None
        except SparkBrokerError:
            raise
        except OSError as error:
            raise self._broke(error) from None
        except BaseException:
            self._break(NetworkError(f"{self.address}: the process was interrupted while it received"))
            raise
        return True

    def _not_ours(self, otherwise: str) -> NetworkError:
        """The error of a peer that is no broker, by the first that it has said; of one that may be one, `otherwise`."""
        said = "" if self._is_greeted else self._reader.no_frame
        return NetworkError(f"{self.address}: {said or otherwise}", foreign=bool(said))

    def _control(self, frame: Frame) -> None:
        """A frame that is no message of the stream. Raises if it ends the stream."""
        if frame.header.operation is Operation.END:
            raise self._break(refusal(self.address, frame.message))
        try:
            check_hello(frame.message)
            self._is_greeted = True
        except SparkBrokerError as error:
            raise self._break(error) from None

    def _ready(self, what: int, deadline_s: float | None) -> bool:
        """Wait until the socket is ready, or broken. False: the deadline has passed. Raises what broke the stream."""
        poll = select.poll()
        poll.register(self._sock, what)
        while True:
            left_ms = POLL_MAX_MS if deadline_s is None else (deadline_s - time.monotonic()) * 1000
            ready = poll.poll(min(max(0, int(left_ms + 0.999)), POLL_MAX_MS))
            if self.closed:
                raise self._failure()
            if ready or left_ms <= 0:
                return bool(ready)

    def _timed_out(self) -> SparkBrokerError:
        self.timed_out = True
        return self._break(RequestTimedOutError(f"{self.address} did not answer in time"))

    def _broke(self, error: OSError) -> SparkBrokerError:
        return self._break(NetworkError(f"{self.address}: the connection broke: {error.strerror or error}"))

    def _break(self, why: SparkBrokerError) -> SparkBrokerError:
        """The stream is over. Returns the first reason."""
        with self._lock:
            if not self.closed:
                self.closed, self._why = True, why
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)  # it wakes whoever waits
                self._close_unused()
        return self._failure()

    def _close_unused(self) -> None:
        """Under the lock."""
        if self.closed and not self._users:
            self._sock.close()

    def _failure(self) -> SparkBrokerError:
        why = self._why
        return NetworkError(f"{self.address}: the stream is closed") if why is None else again(why)


def admit_answer(header: FrameHeader) -> bool:
    """See `FrameReader`."""
    if header.body_bytes > ANSWER_MAX_BYTES:
        raise InvalidRequestError(f"the peer sends a frame of {header.body_bytes} bytes")
    return True


def refusal(address: str, message: wire.Buffer) -> SparkBrokerError:
    """The error that ended a stream or a connection. Nothing: the peer has closed it in order."""
    if not message:
        return NetworkError(f"{address}: the peer ended the stream")
    said = wire.decode_message(message)
    if isinstance(said, ErrorResponse):
        return error_from_code(said.error_code, said.error_message)
    return InvalidRequestError(f"{address} ended the stream with a {type(said).__name__}")


_streams: weakref.WeakSet[ClientStream] = weakref.WeakSet()


def _abandon_all() -> None:
    for stream in list(_streams):
        stream.abandon()


after_fork(_abandon_all)
