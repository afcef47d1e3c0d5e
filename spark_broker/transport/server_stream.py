"""A client's stream of messages, as its handler sees it."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_broker.errors import NetworkError, RequestTimedOutError, SparkBrokerError
from spark_broker.protocol import wire
from spark_broker.protocol.messages import Message, StreamMessage
from spark_broker.transport.frames import Frame, FrameHeader, Operation, encode

if TYPE_CHECKING:
    from spark_broker.transport.server_connection import ServerConnection

logger = logging.getLogger(__name__)

LARGE_MESSAGE_BYTES = 1 << 20
"""Larger than what any client of ours asks for and then waits."""

_LEFT = "%s left before it was answered: %s"


class ServerStream:
    """One client's stream of messages. `receive` belongs to the handler's thread; `send` may be called from any.

    A handler that waits for something other than its client sets `on_gone`. It is called once when the client has
    left, from the thread that moves bytes: it must not wait.
    """

    def __init__(self, connection: ServerConnection, stream_id: int, kind: str) -> None:
        self.id = stream_id
        self.kind = kind
        self.peer = connection.peer
        self.on_gone: Callable[[], object] | None = None
        self.cancelled = False
        """Whether the client is gone, or the stream is at its end."""

        self._connection = connection
        self._channel = connection.channel
        self._timeout_s = connection.server.send_timeout_s
        self._inbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()  # None: nothing more will come
        self._taken: FrameHeader | None = None  # of the message that the handler works on
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._unread_bytes = 0  # of messages that the handler has not taken
        self._unread_since_s = 0.0  # since when there has always been one
        self._waits = 0  # threads that wait for the client
        self._waits_since_s = 0.0  # since when there has always been one
        self._waited_s = 0.0  # how long there was one since the handler took a message, and before that

    def receive(self) -> tuple[StreamMessage, memoryview] | None:
        """The next message and its payload; None at the end of the stream. Raises InvalidRequestError.

        The handler is done with the message before: its bytes no longer count.
        """
        self._give_back()
        frame = self._inbox.get()
        if frame is None:
            self._inbox.put(None)
            return None
        self._take(frame.header)
        return wire.decode_message(frame.message), frame.payload

    @contextmanager
    def waiting_for_client(self) -> Iterator[None]:
        """Within this block the handler waits for something that is up to its client: that it takes an answer, or that
        the time is over for which it wants to wait. What it has sent meanwhile takes room by its own doing."""
        with self._lock:
            if not self._waits:
                self._waits_since_s = time.monotonic()
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1
                if not self._waits:
                    self._waited_s += time.monotonic() - self._waits_since_s

    def kept_bytes(self, patience_s: float) -> int:
        """Bytes that take room by the client's own doing for longer than this.

        A client of ours sends nothing more before it has its answer, and waits for none with a large message.
        """
        now_s = time.monotonic()
        with self._lock:
            waited_s = self._waited_s + (now_s - self._waits_since_s if self._waits else 0.0)
            is_unread = self._unread_bytes and now_s - self._unread_since_s > patience_s
            kept = self._unread_bytes if is_unread else 0
            if waited_s > patience_s:
                taken = self._taken
                return kept + (taken.held_bytes if taken and taken.body_bytes > LARGE_MESSAGE_BYTES else 0)
        return kept if self._channel.unsent_for_s > patience_s else 0

    def send(self, message: Message, *payload: wire.Buffer) -> None:
        """Send a message, and wait until the client's system has it. Raises NetworkError when the client is gone."""
        if self.cancelled:
            raise NetworkError("the stream is closed")
        position = self._channel.send(self._frame(message, *payload))
        if self._channel.unsent_bytes:
            try:
                with self.waiting_for_client():
                    self._channel.wait_written(position, self._timeout_s)
            except RequestTimedOutError:
                self._connection.disconnect(self.kind)
                raise NetworkError("the client takes nothing") from None

    def post(self, message: Message, sent: Callable[[], object]) -> None:
        """Send a message after those that were sent before, without waiting for the client. `sent` is called when its
        system has the message, and also if it is gone: the caller counts these to bound what it posts. It must not
        wait."""
        if self.cancelled:
            sent()
            return
        try:
            self._channel.send(self._frame(message), sent)
        except NetworkError as error:
            logger.info(_LEFT, self.peer, error)
            sent()

    @property
    def sending_for_s(self) -> float:
        """How long what is being sent has waited for the client to take any of it; 0: nothing waits."""
        return self._channel.waiting_for_s

    def deliver(self, frame: Frame) -> None:
        """A message has arrived. In the loop's thread."""
        with self._lock:
            if not self._unread_bytes:
                self._unread_since_s = time.monotonic()
            self._unread_bytes += frame.header.held_bytes
        self._inbox.put(frame)

    def gone(self) -> None:
        """The client has left. In the loop's thread. What it has sent before is still served."""
        self.cancelled = True
        self._inbox.put(None)
        if (on_gone := self.on_gone) is not None:
            on_gone()

    def end(self, error: SparkBrokerError | None) -> None:
        """The handler is done. `error` ended the stream, and the client is told."""
        self._give_back()
        if not self.cancelled:
            message = b"" if error is None else wire.encode(wire.error_response(error))
            with contextlib.suppress(NetworkError):
                self._channel.send(encode(Operation.END, message, stream=self.id))
        self.cancelled = True
        self._channel.loop.soon(self._ended)

    def _ended(self) -> None:
        """In the loop's thread: what came meanwhile is not served any more."""
        self._connection.forget(self.id)
        while not self._inbox.empty():
            frame = self._inbox.get_nowait()
            if frame is not None:
                self._take(frame.header)
                self._give_back()

    def _frame(self, message: Message, *payload: wire.Buffer) -> list[wire.Buffer]:
        return encode(Operation.MESSAGE, wire.encode(message), *payload, stream=self.id)

    def _take(self, header: FrameHeader) -> None:
        with self._lock:
            self._taken, self._waited_s, self._waits_since_s = header, 0.0, time.monotonic()
            self._unread_bytes -= header.held_bytes

    def _give_back(self) -> None:
        with self._lock:
            header, self._taken = self._taken, None
        if header is not None:
            self._connection.given_back(self.kind, header.held_bytes)
