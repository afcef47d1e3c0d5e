"""Connections to a broker or the controller: calls with a deadline, and streams.

A caller's thread writes what its socket takes; one thread for the whole process receives the answers (`client_loop`).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from spark_broker.addresses import address_text
from spark_broker.errors import (
    NetworkError,
    RequestTimedOutError,
    SparkBrokerError,
    again,
)
from spark_broker.interrupts import Turn, interruptible, uninterrupted
from spark_broker.protocol import wire
from spark_broker.protocol.messages import CallResponse, Message
from spark_broker.threads import LONGEST_WAIT_S
from spark_broker.transport.channel import Channel
from spark_broker.transport.client_loop import client_loop
from spark_broker.transport.client_stream import ClientStream, admit_answer, refusal
from spark_broker.transport.frames import UINT32_MAX, Frame, Operation, encode
from spark_broker.transport.hello import check_hello, hello
from spark_broker.transport.origin import Origin
from spark_broker.transport.sockets import connected

T = TypeVar("T")

Meanwhile = Callable[[float], None]
"""What a caller does now and then while it waits, with the seconds that are left. What it raises ends the wait."""

MEANWHILE_S = 1.0
"""How often."""


class Connection:
    """Calls and streams to `host:port`. Safe for use by many threads.

    Calls share a socket, which the first one opens, and the next one after it broke. Every stream has a socket of its
    own: a stream that nobody reads must keep no other, and no call, from being received.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._origin = Origin()
        self._connecting = Turn()
        self._link: _Link | None = None
        self._closed = False

    @property
    def address(self) -> str:
        return address_text(self.host, self.port)

    def call(
        self, request: Message, *, timeout_ms: int, meanwhile: Meanwhile | None = None, patient: bool = False
    ) -> CallResponse:
        """Send a request and wait for its response. Raises the peer's typed error, NetworkError or
        RequestTimedOutError, and what `meanwhile` raises.

        `patient`: for answers that may be large. The time is over when the peer has sent nothing for so long.
        """
        timeout_s = max(timeout_ms, 1) / 1000
        deadline_s = time.monotonic() + timeout_s
        with uninterrupted():
            link = self._linked(deadline_s)
            answer = link.ask(wire.encode(request), deadline_s, meanwhile, timeout_s if patient else None)
        if answer is None:
            raise link.foreign() or RequestTimedOutError(f"{self.address} did not answer within {timeout_ms} ms")
        return wire.decode_response(answer)

    def open_stream(self, kind: str) -> ClientStream:
        """Open a stream of messages. Raises NetworkError."""
        self._origin.check()
        self._check_open()
        return ClientStream(self.host, self.port, kind)

    def close(self) -> None:
        """Refuse calls and streams from now on. Those that are under way go on to their end, or their deadline."""
        self._closed = True
        link = self._link
        if link is not None and not self._origin.is_elsewhere:
            link.retire()

    def give_up(self) -> None:
        """Nobody waits for an answer any more: what the peer has not received must not come to it much later."""
        link = self._link
        if link is not None and not self._origin.is_elsewhere:
            link.retire(given_up=True)

    def __del__(self) -> None:
        # The garbage collector runs in any thread, whatever locks it holds.
        link = self.__dict__.get("_link")
        if link is not None and not self._origin.is_elsewhere:
            link.channel.loop.soon(link.retire)

    def _linked(self, deadline_s: float) -> _Link:
        """The open connection. In an `uninterrupted` block. Raises NetworkError and RequestTimedOutError."""
        self._origin.check()
        link = self._link
        if link is not None and not link.closed and not self._closed:
            return link
        if not self._connecting.take(min(max(0.0, deadline_s - time.monotonic()), LONGEST_WAIT_S)):
            raise RequestTimedOutError(f"{self.address}: another call has been connecting for too long")
        try:
            self._check_open()
            if self._link is None or self._link.closed:
                self._link = _Link(self.host, self.port, deadline_s - time.monotonic())
            return self._link
        finally:
            self._connecting.give_back()

    def _check_open(self) -> None:
        if self._closed:
            raise NetworkError(f"{self.address}: the connection is closed")


def _first(answers: queue.SimpleQueue[T], deadline_s: float, meanwhile: Meanwhile | None) -> T | None:
    """What comes first; None: nothing came in time."""
    while True:
        remaining_s = max(0.001, min(deadline_s - time.monotonic(), LONGEST_WAIT_S))
        try:
            with interruptible():
                return answers.get(timeout=remaining_s if meanwhile is None else min(remaining_s, MEANWHILE_S))
        except queue.Empty:
            if time.monotonic() >= deadline_s:
                return None
            if meanwhile is not None:
                meanwhile(deadline_s - time.monotonic())


class _Link:
    """One socket: `_answers` has who waits for the answer to which call."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Raises NetworkError."""
        self.address = address_text(host, port)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[wire.Buffer | SparkBrokerError]] = {}
        self._retired = self._given_up = self._is_greeted = False
        self._failure: SparkBrokerError | None = None  # what the peer said before it closed the connection
        with interruptible():
            sock = connected(host, port, timeout_s)
        self.channel = Channel(
            client_loop.get(),
            sock,
            admit=admit_answer,
            on_frame=self._received,
            on_closed=self._closed_because,
        )
        client_loop.add(self.channel)
        self.channel.send(hello())
        self.channel.start()

    @property
    def closed(self) -> bool:
        return self.channel.closed

    def ask(
        self, request: bytes, deadline_s: float, meanwhile: Meanwhile | None, silence_s: float | None
    ) -> wire.Buffer | None:
        """The encoded answer; None: it did not come in time. Raises NetworkError, or what the peer refused it with.

        `silence_s`: while something comes, wait so much longer.
        """
        answers: queue.SimpleQueue[wire.Buffer | SparkBrokerError] = queue.SimpleQueue()
        with self._lock:
            correlation = self._unused()
            self._answers[correlation] = answers
        try:
            self._send(encode(Operation.CALL, request, correlation=correlation))
            received_bytes = self.channel.received_bytes
            answer = _first(answers, deadline_s, meanwhile)
            while answer is None and silence_s is not None and self.channel.received_bytes > received_bytes:
                received_bytes = self.channel.received_bytes
                answer = _first(answers, time.monotonic() + silence_s, meanwhile)
        finally:
            with self._lock:
                self._answers.pop(correlation, None)
            self._close_if_idle()
        if isinstance(answer, SparkBrokerError):
            raise again(answer)
        return answer

    def _unused(self) -> int:
        """A number that fits into a header. A connection may see more calls than there are. Under the lock."""
        while (number := next(self._numbers) % UINT32_MAX + 1) in self._answers:
            pass
        return number

    def retire(self, *, given_up: bool = False) -> None:
        """Close the connection as soon as nobody waits for anything of it. `given_up`: reset it."""
        self._retired, self._given_up = True, self._given_up or given_up
        self._close_if_idle()

    def failure(self) -> SparkBrokerError:
        """Why the connection is closed."""
        said = self._failure or self.foreign()
        return NetworkError(f"{self.address}: {self.channel.why}") if said is None else said

    def foreign(self) -> NetworkError | None:
        """What to raise of a peer that is no broker, by the first that it has said; None: it may be one."""
        said = "" if self._is_greeted else self.channel.no_frame
        return NetworkError(f"{self.address}: {said}", foreign=True) if said else None

    def _close_if_idle(self) -> None:
        if self._retired and not self.closed:
            with self._lock:
                idle = not self._answers
            if idle:
                end = self.channel.reset if self._given_up else self.channel.close
                end("this side closed the connection")

    def _send(self, parts: list[wire.Buffer]) -> None:
        try:
            self.channel.send(parts)
        except NetworkError:
            raise self.failure() from None

    def _received(self, frame: Frame) -> None:
        """In the loop's thread."""
        header = frame.header
        match header.operation:
            case Operation.ANSWER:
                waiting = self._answers.get(header.correlation)
                if waiting is not None:
                    waiting.put(frame.message)
            case Operation.END:
                self._failure = refusal(self.address, frame.message)
            case _:
                self._greeted(frame)

    def _greeted(self, frame: Frame) -> None:
        try:
            check_hello(frame.message)
            self._is_greeted = True
        except SparkBrokerError as error:
            self._failure = error
            self.channel.close(error.message)

    def _closed_because(self, why: str) -> None:
        """In the loop's thread."""
        with self._lock:
            waiting = list(self._answers.values())
        for answers in waiting:
            answers.put(self.failure())
