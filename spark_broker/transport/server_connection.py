"""One client of a server: its socket, its calls and its streams."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from spark_broker.addresses import address_text
from spark_broker.errors import (
    InvalidRequestError,
    NetworkError,
    ProcessLimitError,
    SparkBrokerError,
    ThrottlingQuotaExceededError,
)
from spark_broker.process_limits import limit_reached
from spark_broker.protocol import wire
from spark_broker.protocol.messages import Message
from spark_broker.transport.answer_room import CallRoom, ConnectionAnswers, handling
from spark_broker.transport.byte_budget import ByteBudget
from spark_broker.transport.channel import NO_ROOM, Channel
from spark_broker.transport.foreign_peers import foreign_peer
from spark_broker.transport.frames import HELLO_BYTES_MAX, MAGIC, Frame, FrameHeader, Operation, encode
from spark_broker.transport.hello import check_hello, hello
from spark_broker.transport.server_stream import ServerStream
from spark_broker.transport.sockets import prepare

if TYPE_CHECKING:
    from spark_broker.transport.server import Server

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
FRAME_TIMEOUT_S = 60.0
"""How long a peer may take for a frame that it has begun, while this side is ready to read."""

PATIENCE_S = 5.0
SLOW_BYTES_S = 1 << 20
"""While others wait for room, a peer that has sent a message for so long must have sent so many bytes a second. Else it
would keep the room for a minute."""

KEPT_MAX_BYTES = 64 * 1024
"""While others wait for room, a peer is disconnected that keeps more than this for longer than `PATIENCE_S`: it has its
handlers wait, for answers that it does not take or for what it wants to wait for, and sends more meanwhile. So is one
that keeps answers to its calls, and takes fewer than `SLOW_BYTES_S`."""

UNREAD_MAX_BYTES = 1 << 20
"""A connection whose handlers are so far behind is received no further."""

CALLS_MAX = 256
"""Calls of one connection that are worked on at a time; more are not read."""

STREAMS_MAX = 1000
"""Streams of one connection."""

FROM_CLIENTS = (Operation.MESSAGE, Operation.CALL, Operation.OPEN, Operation.CANCEL)
"""What a client sends once it was greeted."""

UNREAD = "unread"
"""The reason to receive nothing while handlers are behind."""

WITHOUT_BUDGET = (Operation.OPEN, Operation.CANCEL)
"""As small as a hello."""


class Later(Protocol):
    """The answer to a call that no thread waits for."""

    def then(self, reply: Callable[[Message | SparkBrokerError], None]) -> None:
        """Have `reply` called with it, once, now or from another thread."""


class ServerConnection:
    """One client's socket: its calls and its streams. Its methods run in the loop's thread, but for `disconnect`.

    Invariants: `_calls` counts the calls that have begun, and whose answer the peer's system does not have; `_streams`
    are those whose handler has not returned.
    """

    def __init__(self, server: Server, sock: socket.socket, address: tuple[str, int]) -> None:
        self.server = server
        self.host, port = address[:2]
        self.peer = address_text(self.host, port)
        self._greeted = False
        self._reserved: tuple[ByteBudget, int] | None = None  # for the frame that is being received
        self._since_s = self._used_s = time.monotonic()
        self._calls = 0
        self._answers = ConnectionAnswers(server.of_answers, self._there_is_room)
        self._waiting: Frame | None = None  # a call that waits for room for its answer: nothing is read behind it
        self._watched: tuple[float, int] | None = None  # since when answers wait, and what was written by then
        self._streams: dict[int, ServerStream] = {}
        self._kind = ""  # of the stream that was opened last
        self._lock = threading.Lock()
        self._unread_bytes = 0  # of all streams' messages, until their handlers are done; guarded by _lock
        self._held_back = False  # whether these are too many; guarded by _lock
        prepare(sock)
        self.channel = Channel(
            server.loop,
            sock,
            admit=self._admit,
            on_frame=self._received,
            on_closed=self._closed,
            on_refused=self._refused_bytes,
        )
        self.channel.start()

    def budget_of(self, kind: str) -> ByteBudget:
        return self.server.budget_of(kind)

    def look(self, now_s: float) -> None:
        """Close the connection if the peer is too slow, or has not used it for long."""
        channel, limits = self.channel, self.server.limits
        self._answers.look(now_s)
        if channel.waiting_for_s > self.server.send_timeout_s:
            self.disconnect("/".join(sorted({stream.kind for stream in self._streams.values()})) or "calls")
        elif channel.frame_for_s > FRAME_TIMEOUT_S:
            self._slow(f"has taken {channel.frame_for_s:.0f} s to send one message")
        elif self._keeps_room_from_others():
            seconds = channel.frame_kept_for_s
            self._slow(f"has sent {channel.frame_bytes} bytes of a message in {seconds:.0f} s; others wait")
        elif self._keeps_answers(now_s):
            kept = self._answers.untaken_bytes
            self._slow(f"takes too little of {kept} bytes of answers to its calls; others wait for room")
        elif (kept := self._kept_bytes()) > KEPT_MAX_BYTES:
            self._slow(f"keeps {kept} bytes of messages waiting for itself for {PATIENCE_S:.0f} s; others wait")
        elif not self._greeted and now_s - self._since_s > HELLO_TIMEOUT_S:
            channel.close("it has not said who it is")
        elif not (self._streams or self._calls or self._waiting) and now_s - self._used_s > limits.idle_s:
            channel.close(f"it was idle for connections.max.idle.ms = {limits.idle_s * 1000:.0f}")

    def _keeps_room_from_others(self) -> bool:
        if self._reserved is None or not self._reserved[0].is_awaited:
            return False
        seconds = self.channel.frame_kept_for_s
        return seconds > PATIENCE_S and self.channel.frame_bytes < seconds * SLOW_BYTES_S

    def _keeps_answers(self, now_s: float) -> bool:
        """Whether it has taken answers too slowly for a while, and others wait for their room."""
        if self._answers.untaken_bytes <= KEPT_MAX_BYTES or not self.channel.unsent_bytes:
            self._watched = None
            return False
        since_s, before = self._watched = self._watched or (now_s, self.channel.written_bytes)
        seconds = now_s - since_s
        if seconds <= PATIENCE_S:
            return False
        if self.channel.written_bytes - before >= seconds * SLOW_BYTES_S:
            self._watched = None
            return False
        return self.server.of_answers.is_awaited

    def _kept_bytes(self) -> int:
        """Bytes that take room, which others wait for, by the peer's own doing. Those of a slow broker do not count."""
        streams = (stream for stream in self._streams.values() if self.budget_of(stream.kind).is_awaited)
        kept = sum(stream.kept_bytes(PATIENCE_S) for stream in streams)
        is_kept = self.server.of_clients.is_awaited and self.channel.unsent_for_s > PATIENCE_S
        return kept + (self._waiting.header.held_bytes if self._waiting is not None and is_kept else 0)

    def _delivered(self, size: int) -> None:
        with self._lock:
            self._unread_bytes += size
            self._held_back = self._held_back or self._unread_bytes > UNREAD_MAX_BYTES
            if self._held_back:
                self.channel.pause(UNREAD)

    def given_back(self, kind: str, size: int) -> None:
        """A handler of this kind is done with a message, or has ended before it took it. From any thread."""
        self.budget_of(kind).release(size)
        with self._lock:
            self._unread_bytes -= size
            goes_on = self._held_back and self._unread_bytes <= UNREAD_MAX_BYTES // 2
        if goes_on:
            self.channel.loop.soon(self._read_on)

    def _read_on(self) -> None:
        with self._lock:
            self._held_back = self._unread_bytes > UNREAD_MAX_BYTES // 2
        if not self._held_back:
            self.channel.resume(UNREAD)

    def disconnect(self, kind: str) -> None:
        """The client takes nothing. From any thread."""
        waited = f"{self.channel.waiting_for_s:.0f} s"
        self._slow(f"has taken nothing of its {kind} stream for {waited}")

    def _slow(self, what: str) -> None:
        if not self.channel.closed:
            logger.warning("%s %s: disconnected", self.peer, what)
            self.channel.reset(what)

    def _admit(self, header: FrameHeader) -> bool:
        operation, limit = header.operation, self.server.max_request_bytes
        if not self._greeted:
            if operation is not Operation.HELLO or header.body_bytes > HELLO_BYTES_MAX:
                raise InvalidRequestError("a connection begins with a hello")
            return True
        if operation not in FROM_CLIENTS:
            raise InvalidRequestError(f"a client that was greeted sends no {operation.name}")
        if operation in WITHOUT_BUDGET:
            if header.body_bytes > HELLO_BYTES_MAX:
                raise InvalidRequestError(f"{operation.name} of {header.body_bytes} bytes")
            return self._waiting is None
        if header.body_bytes > limit:
            raise InvalidRequestError(f"a message of {header.body_bytes} bytes; {limit} are allowed")
        if self._waiting is not None or (operation is Operation.CALL and self._calls >= CALLS_MAX):
            return False
        budget = self._budget(header)
        if not budget.reserve(header.held_bytes, self, self._there_is_room):
            return False
        self._reserved = (budget, header.held_bytes)
        return True

    def _release(self) -> None:
        """Nobody works on the frame that was received last."""
        if self._reserved is not None:
            budget, size = self._reserved
            self._reserved = None
            budget.release(size)

    def _budget(self, header: FrameHeader) -> ByteBudget:
        """Which one a call or a message counts against. Messages to a stream that has ended are received, too."""
        if header.operation is Operation.CALL:
            return self.server.of_clients
        stream = self._streams.get(header.stream)
        return self.server.budget_of(self._kind if stream is None else stream.kind)

    def _there_is_room(self) -> None:
        self.channel.loop.soon(self._go_on)

    def _go_on(self) -> None:
        if self._waiting is not None and not self.channel.closed:
            self._call(self._waiting)
            if self._waiting is not None:
                return
        if self.channel.is_paused_beside(NO_ROOM):  # Its peer reads nothing, say: others must not wait for that.
            self._wait_no_more()
        self.channel.resume(NO_ROOM)

    def _wait_no_more(self) -> None:
        for budget in (self.server.of_clients, self.server.of_brokers, self.server.of_answers):
            budget.forget(self)

    def _received(self, frame: Frame) -> None:
        self._used_s = time.monotonic()
        header = frame.header
        match header.operation:
            case Operation.HELLO if not self._greeted:
                self._greet(frame)
            case Operation.CALL:
                self._reserved = None  # the handler's from now on
                self._call(frame)
            case Operation.OPEN:
                self._open(header.stream, bytes(frame.message).decode("ascii", errors="replace"))
            case Operation.MESSAGE:
                stream = self._streams.get(header.stream)
                if stream is not None and self._reserved is not None:
                    self._reserved = None
                    self._delivered(header.held_bytes)
                    stream.deliver(frame)
                self._release()
            case Operation.CANCEL:
                stream = self._streams.get(header.stream)
                if stream is not None and not stream.cancelled:
                    stream.gone()

    def _greet(self, frame: Frame) -> None:
        self._greeted = True
        with contextlib.suppress(NetworkError):
            self.channel.send(hello())
        try:
            check_hello(frame.message)
        except SparkBrokerError as error:
            self._refuse(error)

    def _refuse(self, error: SparkBrokerError) -> None:
        """Tell the client what is wrong, and close the connection."""
        logger.info("%s is refused: %s", self.peer, error)
        with contextlib.suppress(NetworkError):
            reason = wire.encode(wire.error_response(error))
            self.channel.finish(error.message, encode(Operation.END, reason))

    def _refused_bytes(self, error: SparkBrokerError, data: bytes) -> None:
        self._release()  # There may have been room for the frame, and no memory.
        if isinstance(error, ProcessLimitError):
            self.server.say(f"a message of {self.peer} was not received: {error}")
        if self._greeted or data.startswith(MAGIC):
            self._refuse(error)
            return
        peer = foreign_peer(data)
        self.server.say(f"{peer.who} has connected from {self.host}, and is refused")
        with contextlib.suppress(NetworkError):
            self.channel.finish(error.message, (peer.said,), peer.answer)

    def _call(self, frame: Frame) -> None:
        """Have a handler work on a call, now or when there is room for its answer."""
        room = self._answers.begin(self)
        self._waiting = frame if room is None else None
        if room is None:
            return
        self._calls += 1
        try:
            self.server.threads.run(partial(self._answer, frame, room))
        except SparkBrokerError as error:
            logger.warning("a call of %s is refused: %s", self.peer, error)
            self.server.of_clients.release(frame.header.held_bytes)
            self._reply(frame.header, room, error)

    def _answer(self, frame: Frame, room: CallRoom) -> None:
        """In a handler's thread."""
        header = frame.header
        handling(room)
        try:
            answer = self.server.answer(frame.message)
        finally:
            handling(None)
            self.server.of_clients.release(header.held_bytes)
        if isinstance(answer, Message):
            self._reply(header, room, answer)
        else:
            room.is_small()
            answer.then(partial(self._reply, header, room))

    def _reply(self, header: FrameHeader, room: CallRoom, answer: Message | SparkBrokerError) -> None:
        """From any thread, which does not wait for the client: what it does not take would wait twice, as the answer
        and as its bytes."""
        message = wire.error_response(answer) if isinstance(answer, SparkBrokerError) else answer
        over = partial(self._over, room)
        try:
            parts = encode(Operation.ANSWER, wire.encode(message), correlation=header.correlation)
            self.channel.send(parts, over)
            if not room.ended:  # Mostly the system took all.
                room.made(sum(map(len, parts)))
        except NetworkError:
            over()
        except MemoryError as error:
            self._slow(f"gets no answer: {limit_reached(error)}")
            over()

    def _over(self, room: CallRoom) -> None:
        """The client's system has the answer, or there is none. From any thread."""
        if room.end():
            self.channel.loop.soon(self._answered)

    def _answered(self) -> None:
        self._calls -= 1
        self._used_s = time.monotonic()
        if self._calls == CALLS_MAX // 2:
            self.channel.resume(NO_ROOM)

    def _open(self, stream_id: int, kind: str) -> None:
        stream = ServerStream(self, stream_id, kind)
        if stream_id in self._streams or not stream_id:
            raise InvalidRequestError(f"stream {stream_id} is open already")
        if len(self._streams) >= STREAMS_MAX:
            raise InvalidRequestError(f"a connection has at most {STREAMS_MAX} streams")
        self._streams[stream_id] = stream
        self._kind = kind
        self.server.streams_begun(kind, 1)
        if kind not in self.server.streams:
            stream.end(InvalidRequestError(f"unknown stream {kind!r}"))
            return
        if self.server.has_too_many(kind):
            self.server.say(f"a {kind} stream of {self.host} was refused: {self.server.limits.connections} are open")
            stream.end(ThrottlingQuotaExceededError(f"{self.server.limits.connections} streams are open"))
            return
        try:
            self.server.threads.run(partial(self.server.handle, stream))
        except SparkBrokerError as error:
            logger.warning("%s gets no %s stream: %s", self.peer, kind, error)
            stream.end(error)

    def forget(self, stream_id: int) -> None:
        """The stream's handler has returned."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self.server.streams_begun(stream.kind, -1)
        self._used_s = time.monotonic()

    def _closed(self, why: str) -> None:
        """The channel is closed."""
        del why
        self._wait_no_more()
        self._release()
        self._answers.close()
        if self._waiting is not None:
            self.server.of_clients.release(self._waiting.header.held_bytes)
            self._waiting = None
        for stream in list(self._streams.values()):
            if not stream.cancelled:
                stream.gone()
        self.server.forget(self)
