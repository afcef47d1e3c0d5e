"""One connected socket: frames in, frames out, bounds on both.

Any thread sends: it writes what the socket takes, and leaves the rest to the loop's thread. Only the loop's thread
receives, and only it closes the descriptor.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from spark_broker.errors import (
    InvalidRequestError,
    NetworkError,
    NoMemoryError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.process_limits import limit_reached
from spark_broker.protocol.wire import Buffer
from spark_broker.threads import LONGEST_WAIT_S
from spark_broker.transport.frames import NO_PAYLOAD, Frame, FrameHeader, FrameReader
from spark_broker.transport.io_loop import IoLoop
from spark_broker.transport.sockets import write_some

if TYPE_CHECKING:
    from asyncio import TimerHandle

UNSENT_MAX_BYTES = 1024 * 1024
"""A peer that leaves more than this unread is not read from, until it has read half of it."""

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 s."""

FINISH_TIMEOUT_S = 5.0

NO_ROOM = "no room"
"""The reason to receive nothing while `admit` has refused the next frame."""

UNSENT = "unsent"
"""The reason to receive nothing while the peer does not take what is sent to it."""

READS_AT_ONCE = 16
"""How often a connection that has more is read, before another one's turn comes."""


class Unsent(NamedTuple):
    """A callback for when everything up to a position of the output was written."""

    position: int
    written: Callable[[], object]


class Channel:
    """A connection, from `start` to `closed`.

    Invariants, under `_lock`: `_parts` is what was given to `send` and not written, `_unsent` its bytes; `_position`
    counts all bytes that were ever given, and `_written` those that the system has taken. Nothing is written once
    `closed` is set. `_paused` holds the reasons why nothing is read; only the loop's thread changes it.
    """

    def __init__(
        self,
        loop: IoLoop,
        sock: socket.socket,
        *,
        admit: Callable[[FrameHeader], bool],
        on_frame: Callable[[Frame], object],
        on_closed: Callable[[str], object],
        on_refused: Callable[[SparkBrokerError, bytes], object] | None = None,
    ) -> None:
        """All are called in the loop's thread; `on_closed` once, with the reason.

        `admit` is `FrameReader`'s. `on_refused` gets an InvalidRequestError from it or from `on_frame`, or the
        NoMemoryError of a frame for which there is none, with the bytes that were received last, and the part of a
        header before them. Without it, the connection is closed then.
        """
        self.loop = loop
        self.closed = False
        self.why = ""
        self.why_finished = ""
        self._told = False  # whether the owner was told of the end
        self._sock = sock
        self._fd = sock.fileno()
        self._reader = FrameReader(admit)
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._on_refused = on_refused
        self._finishing: TimerHandle | None = None
        self._answer: Callable[[bytes], bytes] | None = None  # to what comes while it is finishing
        self._said_all = False  # guarded by _lock: nothing is sent behind what was
        self._lock = threading.Lock()
        self._less = threading.Condition(self._lock)
        self._parts: deque[memoryview] = deque()
        self._unsent = 0
        self._position = 0
        self._written = 0
        self._callbacks: deque[Unsent] = deque()
        self._written_s = 0.0  # when bytes were last written, or began to wait
        self._unsent_since_s = 0.0  # since when there have always been bytes that wait
        self._writing = False  # whether the loop waits until the socket takes more
        self._paused: set[str] = {"not started"}
        self.received_bytes = 0
        """Since the beginning."""

        self._frame_since_s = 0.0
        self._frame_kept_since_s = 0.0  # later by all pauses that are not the peer's doing
        self._pauses_since_s = 0.0  # when the last one of these began

    def start(self) -> None:
        """Begin to receive. From any thread, once."""
        self.loop.soon(lambda: self.resume("not started"))

    @property
    def waiting_for_s(self) -> float:
        """How long the peer has taken nothing of what waits for it; 0: nothing waits."""
        return time.monotonic() - self._written_s if self._unsent else 0.0

    @property
    def unsent_for_s(self) -> float:
        """How long something has waited for the peer, which may have taken a little now and then; 0: nothing waits."""
        return time.monotonic() - self._unsent_since_s if self._unsent else 0.0

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the peer to take them."""
        return self._unsent

    @property
    def written_bytes(self) -> int:
        """Bytes that the system has taken since the beginning."""
        return self._written

    @property
    def frame_for_s(self) -> float:
        """How long the frame that is being received has taken; 0: none is, or this side does not read."""
        since_s = self._frame_since_s
        return time.monotonic() - since_s if since_s and not self._paused else 0.0

    @property
    def frame_kept_for_s(self) -> float:
        """As `frame_for_s`, but while this side does not read because the peer takes nothing, the time goes on."""
        until_s = self._pauses_since_s if self._pauses else time.monotonic()
        return until_s - self._frame_kept_since_s if self._frame_since_s else 0.0

    @property
    def _pauses(self) -> bool:
        """Whether nothing is read for a reason that is not the peer's doing."""
        return bool(self._paused - {UNSENT})

    @property
    def no_frame(self) -> str:
        """What to say of a peer that has sent what begins no frame; empty: it has not."""
        return self._reader.no_frame

    @property
    def frame_bytes(self) -> int:
        """How much of its body has come."""
        return self._reader.received_bytes

    def is_paused_beside(self, why: str) -> bool:
        """Whether there is another reason to receive nothing. In the loop's thread."""
        return bool(self._paused - {why})

    def send(self, parts: Iterable[Buffer], written: Callable[[], object] | None = None, *, last: bool = False) -> int:
        """Send a frame, without waiting. Returns the position of the output behind it, for `wait_written`.

        `written` is called in this thread or in the loop's when the system has all of it, and also when the connection
        ends before. The parts must not change until then. Raises NetworkError if the connection is closed, or the
        `last` frame was sent.
        """
        with self._lock:
            if self.closed or self._said_all:
                raise NetworkError(self.why or self.why_finished)
            try:
                self._said_all = last
                waits, before = bool(self._parts), self._unsent
                for part in parts:
                    self._parts.append(memoryview(part))
                    self._unsent += len(part)
                    self._position += len(part)
                position = self._position
                if written is not None:
                    self._callbacks.append(Unsent(position, written))
                if not waits:
                    self._written_s = self._unsent_since_s = time.monotonic()
                    self._write()
                elif before <= UNSENT_MAX_BYTES < self._unsent:
                    self.loop.soon(self._hold_back)
                done = self._done()
            except BaseException:
                # A signal's handler raised, and nobody knows which bytes the system has: the peer must not read on.
                self._shut("the process was interrupted while it sent")
                raise
        self._after(done)
        return position

    def wait_written(self, position: int, timeout_s: float) -> None:
        """Wait until the system has everything up to this position. Raises NetworkError when the connection ends
        before, and RequestTimedOutError when the peer has taken nothing for so long."""
        with self._lock:
            while True:
                if self._written >= position:
                    return
                if self.closed:
                    raise NetworkError(self.why)
                left_s = timeout_s - self.waiting_for_s
                if left_s <= 0:
                    raise RequestTimedOutError(f"the peer has taken nothing for {timeout_s} s")
                self._less.wait(min(left_s, LONGEST_WAIT_S))

    def close(self, why: str) -> None:
        """End the connection. From any thread; the first reason counts."""
        with self._lock:
            self._shut(why)

    def reset(self, why: str) -> None:
        """End the connection, and have the system throw away what the peer does not take: it would keep it for long."""
        with self._lock:
            if not self.closed:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self._shut(why)

    def _shut(self, why: str) -> None:
        """Under the lock."""
        if self.closed:
            return
        self.closed, self.why = True, why
        self._less.notify_all()
        self.loop.soon(self._ended)

    def orphaned(self, why: str) -> None:
        """End the connection, whose loop has ended."""
        self.close(why)
        self._ended()

    def abandon(self) -> None:
        """In a forked process: let go of the parent's connection, and touch neither its loop nor its peer."""
        self.closed, self.why = True, "this process was forked from the one that opened the connection"
        with contextlib.suppress(OSError):
            self._sock.close()

    def pause(self, why: str) -> None:
        """Receive nothing more. In the loop's thread."""
        if not self._paused and not self.closed:
            self.loop.loop.remove_reader(self._fd)
        if why != UNSENT and not self._pauses:
            self._pauses_since_s = time.monotonic()
        self._paused.add(why)

    def resume(self, why: str) -> None:
        """This reason to receive nothing is gone. In the loop's thread."""
        if why not in self._paused:
            return
        self._paused.discard(why)
        if why != UNSENT and not self._pauses:
            self._frame_kept_since_s += time.monotonic() - max(self._pauses_since_s, self._frame_kept_since_s)
        if not self._paused and not self.closed:
            if self._frame_since_s:
                self._frame_since_s = time.monotonic()
            self.loop.loop.add_reader(self._fd, self._readable)
            if self._reader.waits:
                self._take(self._reader.resume(), NO_PAYLOAD)

    def _readable(self) -> None:
        try:
            for _ in range(READS_AT_ONCE):
                if self.closed or not self._receive():
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"the connection broke: {error.strerror or error}")

    def finish(self, why: str, parts: Iterable[Buffer], answer: Callable[[bytes], bytes] | None = None) -> None:
        """Send this as the last, and close the connection when the peer has read it, or after a while. In the loop's
        thread.

        What it sends meanwhile is thrown away: closed at once, the connection would be reset, and what the peer has
        not read yet would be lost to it. With `answer`, the peer gets what it makes of each piece that comes. Raises
        NetworkError if the connection is closed.
        """
        if self._finishing is None and not self.closed:
            self._finishing = self.loop.loop.call_later(FINISH_TIMEOUT_S, self.close, why)
            self.why_finished = why
            self._answer = answer
            if answer is None:
                self.send(parts, self._half_close, last=True)
            else:
                self.send(parts)

    def _half_close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _receive(self) -> bool:
        """Receive once. Returns whether there may be more."""
        if self._finishing is not None:
            return self._receive_the_rest()
        target = self._reader.target
        room = self.loop.scratch if target is None else target
        count = self._sock.recv_into(room)
        if not count:
            self.close("the peer closed the connection")
            return False
        self.received_bytes += count
        if target is None:
            self._take(self._reader.feed(room[:count]), room[:count])
        elif (frame := self._reader.filled(count)) is not None:
            self._take(iter((frame,)), NO_PAYLOAD)
        if not self._reader.is_within_a_frame:
            self._frame_since_s = 0.0
        elif not self._frame_since_s:
            self._frame_since_s = self._frame_kept_since_s = time.monotonic()
        self._hold_back()  # What was received may have been answered at once.
        return count == len(room) and not self._paused and not self.closed

    def _receive_the_rest(self) -> bool:
        count = self._sock.recv_into(self.loop.scratch)
        if not count:
            self.close(self.why_finished)
        elif self._answer is not None and (said := self._answer(self.loop.scratch[:count].tobytes())):
            with contextlib.suppress(NetworkError):
                self.send((said,))
        return bool(count)

    def _take(self, frames: Iterator[Frame], data: memoryview) -> None:
        try:
            while not (self.closed or self._finishing):
                frame = _next_of(frames)
                if frame is None:
                    break
                self._frame_since_s = 0.0
                self._on_frame(frame)
        except (InvalidRequestError, NoMemoryError) as error:
            if self._on_refused is None:
                self.close(error.message)
            else:
                self._on_refused(error, self._reader.begun_before + data)
            return
        if self._reader.waits:
            self.pause(NO_ROOM)

    def _write(self) -> None:
        """Write what the socket takes. Under the lock."""
        while self._parts:
            try:
                count = write_some(self._sock, self._parts)
            except BlockingIOError:
                break
            except OSError as error:
                self._broken(f"the connection broke: {error.strerror or error}")
                break
            self._written_s = time.monotonic()
            self._written += count
            self._unsent -= count
        if self._parts and not self._writing:
            self._writing = True
            self.loop.soon(self._await_writable)

    def _broken(self, why: str) -> None:
        """Nothing can be written any more. What the peer said before it went may still be there to read."""

        def end() -> None:
            if not self.closed and not self._paused:
                self._readable()
            self.close(why)

        self.loop.soon(end)

    def _await_writable(self) -> None:
        if not self.closed:
            self._hold_back()
            self.loop.loop.add_writer(self._fd, self._writable)

    def _hold_back(self) -> None:
        """Receive nothing from a peer that takes nothing, if `_writable` will be called, which resumes.

        In the midst of a `send`, much may wait that the system takes at once.
        """
        if self._unsent <= UNSENT_MAX_BYTES:  # This runs for each frame. Whoever sends more looks again.
            return
        with self._lock:
            holds = self._writing and self._unsent > UNSENT_MAX_BYTES
        if holds and not self.closed:
            self.pause(UNSENT)

    def _writable(self) -> None:
        with self._lock:
            if self.closed:
                return
            self._write()
            done = self._done()
            if not self._parts:
                self._writing = False
                self.loop.loop.remove_writer(self._fd)
            self._less.notify_all()
            goes_on = self._unsent <= UNSENT_MAX_BYTES // 2
        self._after(done)
        self._hold_back()
        if goes_on:
            self.resume(UNSENT)

    def _done(self) -> list[Unsent]:
        """The callbacks whose bytes were written. Under the lock."""
        done: list[Unsent] = []
        while self._callbacks and self._callbacks[0].position <= self._written:
            done.append(self._callbacks.popleft())
        return done

    def _after(self, done: Iterable[Unsent]) -> None:
        for callback in done:
            try:
                callback.written()
            except Exception as error:  # noqa: BLE001 (it ends the loop, and so whoever relies on it)
                self.loop.fail(error)

    def _ended(self) -> None:
        """The descriptor is closed, in the loop's thread if there is one, and the owner is told."""
        if not self.loop.loop.is_closed():
            self.loop.loop.remove_reader(self._fd)
            self.loop.loop.remove_writer(self._fd)
        with self._lock:
            told, self._told = self._told, True
            self._sock.close()
            self._parts.clear()
            self._unsent = 0
            done, self._callbacks = self._callbacks, deque()
        self._after(done)
        if not told:
            on_closed, self._on_closed, self._on_frame, self._on_refused = self._on_closed, _nothing, _nothing, None
            self._reader.end()  # What holds its owner would keep both until a garbage collection.
            on_closed(self.why)


def _next_of(frames: Iterator[Frame]) -> Frame | None:
    """The next frame. Raises NoMemoryError: the other connections of the loop go on."""
    try:
        return next(frames, None)
    except MemoryError as error:
        raise limit_reached(error) or error from None


def _nothing(*_: object) -> None:
    """After the end of a channel nobody is called."""
