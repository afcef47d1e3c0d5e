"""A server in this process, and what it holds for its peers: bytes, threads, descriptors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spark_broker.errors import InvalidRequestError
from spark_broker.protocol.messages import EmptyResponse, FetchRequest, FetchResponse, Message, MetadataRequest
from spark_broker.transport import handler_threads, server, server_connection
from spark_broker.transport.answer_room import expect_small_answer
from spark_broker.transport.client_loop import client_loop
from spark_broker.transport.frames import Operation
from spark_broker.transport.server import Server
from spark_broker.transport.server_limits import ServerLimits
from spark_broker.transport.server_stream import ServerStream
from tests.support.raw_peer import RawPeer
from tests.support.waiting import eventually

HOST = "127.0.0.1"
WAIT_S = 30.0
REQUEST = FetchRequest(1, max_wait_ms=0, min_bytes=0, max_bytes=1, partitions=[])
CALL = MetadataRequest(None)


@dataclass(frozen=True)
class Settings:
    """Of a rig's server. Nothing is at its limit by itself."""

    host: str = HOST
    max_request_bytes: int = 1 << 30
    send_timeout_ms: int = 30_000
    connections: int = 10_000
    connections_per_ip: int = 10_000
    idle_s: float = 600.0
    queued_bytes: int = 1 << 30
    answer_bytes: int = 1 << 30
    calls: Callable[[object], Message] | None = None
    streams: Mapping[str, Callable[[ServerStream], None]] = field(default_factory=dict)


class Permits:
    """A semaphore that can be opened to everybody. (A release of a million permits takes a third of a second.)"""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)
        self._open = False

    def acquire(self, timeout: float) -> bool:
        """Take a permit, within so many seconds."""
        if not self._semaphore.acquire(timeout=timeout):
            return False
        if self._open:
            self._semaphore.release()
        return True

    def release(self, permits: int = 1) -> None:
        self._semaphore.release(permits)

    def open(self) -> None:
        """From now on nobody waits for a permit."""
        self._open = True
        self._semaphore.release()  # Whoever has it hands it on.


class Rig:
    """Serves calls, once `calls_go_on` is set, and streams: "echo" answers each message, "refuse" refuses the first.

    "held" and "replica" put the size of each payload into `taken`, and then wait for a permit of `go_on`.
    """

    def __init__(self, settings: Settings) -> None:
        client_loop.get()  # Its descriptors are not the server's.
        self.bugs: list[BaseException] = []
        self.taken: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.go_on = Permits()
        self.calls_go_on = threading.Event()
        self.calls_go_on.set()
        self.calls = 0
        self.host = settings.host
        self._others = set(handlers())
        self._most_descriptors = 0
        limits = ServerLimits(
            settings.connections,
            settings.connections_per_ip,
            settings.idle_s,
            settings.queued_bytes,
            settings.answer_bytes,
        )
        kinds = {"echo": echo, "refuse": refuse, "held": self._held, "replica": self._held, **settings.streams}
        self.server = Server(
            settings.host,
            0,
            self._call if settings.calls is None else settings.calls,
            kinds,
            self.bugs.append,
            settings.max_request_bytes,
            settings.send_timeout_ms,
            limits,
        )
        self.serves()
        self.await_nothing_held()
        self._most_descriptors = descriptors()

    def _call(self, request: object) -> EmptyResponse:
        del request
        self.calls += 1
        expect_small_answer()
        assert self.calls_go_on.wait(WAIT_S)
        return EmptyResponse()

    def _held(self, stream: ServerStream) -> None:
        while (received := stream.receive()) is not None:
            self.taken.put((stream.kind, len(received[1])))
            assert self.go_on.acquire(timeout=WAIT_S)

    def peer(self, *, greet: bool = True, timeout_s: float = WAIT_S, receive_buffer: int = 0) -> RawPeer:
        """A raw connection."""
        return RawPeer(self.server.port, self.host, greet=greet, timeout_s=timeout_s, receive_buffer=receive_buffer)

    @property
    def used_bytes(self) -> int:
        """What is reserved of both budgets."""
        return self.server.of_clients.used_bytes + self.server.of_brokers.used_bytes

    def await_used(self, size: int) -> None:
        """Wait until so many bytes are reserved."""
        eventually(lambda: self.used_bytes == size, WAIT_S, f"{size} bytes are reserved, not {self.used_bytes}")

    def serves(self) -> None:
        """Raises unless a call and a stream of somebody else are served."""
        with self.peer() as peer:
            peer.call(CALL)
            peer.open("echo")
            peer.message(REQUEST)
            answers = {frame.header.operation for frame in (peer.receive(), peer.receive()) if frame is not None}
            assert answers == {Operation.ANSWER, Operation.MESSAGE}

    def await_nothing_held(self) -> None:
        """Wait until the server holds nothing for peers that have left."""
        self.await_used(0)
        answers = self.server.of_answers
        eventually(lambda: not answers.used_bytes, WAIT_S, f"no answers are held, not {answers.used_bytes} bytes")
        eventually(lambda: set(handlers()) <= self._others, WAIT_S, "no thread works for peers that have left")
        if self._most_descriptors:
            eventually(lambda: descriptors() <= self._most_descriptors, WAIT_S, "connections are closed")

    def let_go_on(self) -> None:
        """Let all handlers go on to their end."""
        self.calls_go_on.set()
        self.go_on.open()


@contextmanager
def rig(patch: pytest.MonkeyPatch, settings: Settings = Settings()) -> Iterator[Rig]:
    """A rig. Raises if its server holds anything for the block's peers, has met a bug, or does not serve any more."""
    patch.setattr(handler_threads, "IDLE_S", 0.05)
    made = Rig(settings)
    try:
        yield made
        made.let_go_on()
        made.await_nothing_held()
        made.serves()
        assert made.bugs == []
    finally:
        made.let_go_on()
        made.server.close()


def look_often(patch: pytest.MonkeyPatch, **constants: float) -> None:
    """Have servers look at their connections all the time, with these constants instead of their own."""
    patch.setattr(server, "LOOK_S", 0.02)
    for name, value in constants.items():
        patch.setattr(server_connection, name, value)


def echo(stream: ServerStream) -> None:
    while stream.receive() is not None:
        stream.send(FetchResponse(1, []))


def refuse(stream: ServerStream) -> None:
    stream.receive()
    raise InvalidRequestError("this handler refuses everything")


def handlers() -> list[threading.Thread]:
    """Threads that work for peers of any server in this process."""
    return [thread for thread in threading.enumerate() if thread.name == "handler"]


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
