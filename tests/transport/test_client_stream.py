"""A client's stream carries whole messages in order, or breaks: whatever interrupts whoever sends, waits or closes."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import random
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from spark_broker.errors import NetworkError, RequestTimedOutError, SparkBrokerError
from spark_broker.protocol import wire
from spark_broker.protocol.messages import FetchRequest, FetchResponse
from spark_broker.transport import client_stream
from spark_broker.transport.client_stream import ClientStream
from spark_broker.transport.frames import Frame, FrameReader, Operation, encode
from spark_broker.transport.sockets import OwnSocket, connected, prepare
from tests.support.alarms import Stop, alarms_stop
from tests.support.raw_peer import joined
from tests.transport.rig import HOST, REQUEST, WAIT_S, descriptors, rig

if TYPE_CHECKING:
    from _typeshed import TraceFunction

LARGE = bytes(1 << 20)


class InterruptError(BaseException):
    """What a signal's handler raises here."""


class Planted(socket.socket):
    """A signal comes when the system has done its part, and Python has not counted it."""

    interrupts_in = ""
    holds: threading.Barrier | None = None
    """Whoever receives waits here twice."""
    on_received: Callable[[], object] | None = None

    def sendmsg(self, buffers: object, *rest: object) -> int:
        if self.interrupts_in == "send":
            super().sendmsg([list(buffers)[0][:10]])  # type: ignore[call-overload] # noqa: RUF015
            raise InterruptError
        return super().sendmsg(buffers, *rest)  # type: ignore[arg-type]

    def recv_into(self, room: memoryview, *rest: int) -> int:  # type: ignore[override]
        count = super().recv_into(room, *rest)
        if self.holds is not None:
            self.holds.wait()
            self.holds.wait()
        if self.interrupts_in == "receive":
            raise InterruptError
        if self.on_received is not None:
            self.on_received()
        return count


class Peer:
    """The other end of one stream, which does only what it is told."""

    def __init__(self, listening: socket.socket) -> None:
        self.sock, _ = listening.accept()
        self.sock.settimeout(WAIT_S)

    def say(self, message: FetchResponse, payload: bytes = b"") -> None:
        self.sock.sendall(joined(encode(Operation.MESSAGE, wire.encode(message), payload, stream=1)))

    def numbers(self) -> list[int]:
        """Of the messages that come until the connection ends. Raises InvalidRequestError for what is none."""
        reader, frames = FrameReader(lambda header: True), list[Frame]()
        with contextlib.suppress(ConnectionError):
            while data := self.sock.recv(1 << 20):
                frames += reader.feed(memoryview(data))
        messages = [wire.decode_message(f.message) for f in frames if f.header.operation is Operation.MESSAGE]
        return [message.correlation_id for message in messages if isinstance(message, FetchRequest)]


@contextmanager
def streaming() -> Iterator[tuple[ClientStream, Peer]]:
    with socket.create_server((HOST, 0)) as listening:
        stream = ClientStream(HOST, listening.getsockname()[1], "s")
        peer = Peer(listening)
        with peer.sock:
            yield stream, peer
            stream.close()


def request(number: int) -> FetchRequest:
    return FetchRequest(number, max_wait_ms=0, min_bytes=0, max_bytes=1, partitions=[])


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[Planted]:
    """The sockets of the test's streams."""
    made: list[Planted] = []

    def connected(host: str, port: int) -> Planted:
        sock = Planted(socket.AF_INET, socket.SOCK_STREAM)
        sock.connect((host, port))
        prepare(sock)
        made.append(sock)
        return sock

    monkeypatch.setattr(client_stream, "connected", connected)
    return made


def test_nothing_follows_a_message_of_which_an_interrupt_left_a_part_with_the_system(planted: list[Planted]) -> None:
    with streaming() as (stream, peer):
        stream.send(request(0))
        planted[0].interrupts_in = "send"
        with pytest.raises(InterruptError):
            stream.send(request(1))
        planted[0].interrupts_in = ""
        with pytest.raises(NetworkError, match="interrupted while it sent"):
            stream.send(request(2))
        with pytest.raises(NetworkError, match="interrupted while it sent"):
            stream.receive(timeout_ms=None)
        assert peer.numbers() == [0]


def test_nothing_is_received_behind_bytes_that_an_interrupt_has_lost(planted: list[Planted]) -> None:
    with streaming() as (stream, peer):
        planted[0].interrupts_in = "receive"
        peer.say(FetchResponse(0, []))
        with pytest.raises(InterruptError):
            stream.receive(timeout_ms=20_000)
        planted[0].interrupts_in = ""
        peer.say(FetchResponse(1, []))
        with pytest.raises(NetworkError, match="interrupted while it received"):
            stream.receive(timeout_ms=20_000)


def test_interrupts_at_any_moment_leave_whole_messages_in_order() -> None:
    draw = random.Random(7)
    with alarms_stop() as alarms:
        for _ in range(40):
            with streaming() as (stream, peer):
                got: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
                reading = threading.Thread(target=lambda peer=peer, got=got: got.put(peer.numbers()))
                reading.start()
                sent = 0
                with contextlib.suppress(Stop):
                    alarms.stop_in(draw.uniform(0.0005, 0.004))
                    while not alarms.rang:
                        stream.send(request(sent), LARGE[:5000])
                        sent += 1
                with contextlib.suppress(NetworkError):
                    stream.send(request(10**9))
                stream.close()
                reading.join(WAIT_S)
            numbers = got.get(timeout=WAIT_S)
            seen = [number for number in numbers if number != 10**9]
            assert seen == list(range(len(seen)))
            assert len(seen) in (sent, sent + 1)
            assert 10**9 not in numbers[:-1]


def test_an_interrupt_of_whoever_waits_loses_nothing() -> None:
    with streaming() as (stream, peer), alarms_stop() as alarms:
        for number in range(5):
            alarms.stop_in(0.02)
            with pytest.raises(Stop):
                stream.receive(timeout_ms=None)
            peer.say(FetchResponse(number, []), LARGE)
            message, payload = stream.receive(timeout_ms=20_000)
            assert message == FetchResponse(number, [])
            assert len(payload) == len(LARGE)


def send_for_ever(stream: ClientStream) -> None:
    while True:
        stream.send(REQUEST, LARGE)


def receive_for_ever(stream: ClientStream) -> None:
    while True:
        stream.receive(timeout_ms=None)


@pytest.mark.parametrize("use", [send_for_ever, receive_for_ever])
def test_a_stream_that_another_thread_closes_ends_the_wait_and_its_descriptor(
    use: Callable[[ClientStream], None],
) -> None:
    before = descriptors()
    errors: queue.SimpleQueue[SparkBrokerError] = queue.SimpleQueue()

    def wait(stream: ClientStream, begun: threading.Event) -> None:
        begun.set()
        with pytest.raises(SparkBrokerError) as error:
            use(stream)
        errors.put(error.value)

    for _ in range(20):
        begun = threading.Event()
        with streaming() as (stream, _):
            waiting = threading.Thread(target=wait, args=(stream, begun))
            waiting.start()
            assert begun.wait(WAIT_S)
            stream.close()
            waiting.join(WAIT_S)
        error = errors.get_nowait()
        assert type(error) is NetworkError
        assert "the stream is closed" in error.message
    assert descriptors() <= before


def test_a_peer_that_takes_nothing_in_time_gets_nothing_more() -> None:
    """It has a part of a message."""
    with streaming() as (stream, peer):
        stream.send(request(0))
        with pytest.raises(RequestTimedOutError):
            stream.send(request(1), LARGE * 64, timeout_ms=200)
        with pytest.raises(RequestTimedOutError):
            stream.send(request(2))
        assert peer.numbers() == [0]


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_message_that_comes_slowly_is_waited_for(planted: list[Planted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the time of a follower was for the whole answer. Behind a slow link it threw away what had come, asked for
    the same 16 MiB again, and never caught up.
    """
    with streaming() as (stream, peer):
        clock, came = Clock(), threading.Semaphore(0)
        monkeypatch.setattr(client_stream, "time", clock)

        def time_passes() -> None:
            clock.now_s += 15
            came.release()

        planted[0].on_received = time_passes
        said = joined(encode(Operation.MESSAGE, wire.encode(FetchResponse(1, [])), LARGE[:20_000], stream=1))

        def speak() -> None:
            for at in range(0, len(said), 1000):
                peer.sock.sendall(said[at : at + 1000])
                assert came.acquire(timeout=WAIT_S)

        speaking = threading.Thread(target=speak)
        speaking.start()
        message, payload = stream.receive(timeout_ms=20_000)
        speaking.join(WAIT_S)
        assert (message, len(payload)) == (FetchResponse(1, []), 20_000)
        assert clock.now_s > 200


def test_a_peer_that_falls_silent_within_a_message_has_not_answered() -> None:
    with streaming() as (stream, peer):
        said = joined(encode(Operation.MESSAGE, wire.encode(FetchResponse(1, [])), LARGE, stream=1))
        peer.sock.sendall(said[:100_000])
        with pytest.raises(RequestTimedOutError):
            stream.receive(timeout_ms=200)
        assert stream.closed


def test_a_descriptor_is_closed_by_the_last_thread_that_uses_it(planted: list[Planted]) -> None:
    """Closed under a thread, it could be another connection's by the time that this thread reads from it."""
    with streaming() as (stream, peer):
        sock, barrier = planted[0], threading.Barrier(2, timeout=WAIT_S)
        sock.holds = barrier
        peer.say(FetchResponse(1, []))
        waiting = threading.Thread(target=stream.receive, kwargs={"timeout_ms": None})
        waiting.start()
        barrier.wait()
        stream.close()
        assert sock.fileno() != -1
        barrier.wait()
        waiting.join(WAIT_S)
        assert sock.fileno() == -1


def test_streams_that_come_and_go_in_many_threads_hear_only_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that was closed too early would be another stream's by then."""
    with rig(monkeypatch) as served:
        failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def come_and_go(seed: int) -> None:
            draw = random.Random(seed)
            try:
                for _ in range(40):
                    stream = ClientStream(HOST, served.server.port, "echo")
                    closing = threading.Timer(draw.uniform(0, 0.01), stream.close)
                    closing.start()
                    with contextlib.suppress(NetworkError):
                        while True:
                            stream.send(REQUEST)
                            assert stream.receive(timeout_ms=20_000)[0] == FetchResponse(1, [])
                    closing.join()
            except BaseException as error:  # noqa: BLE001 (the test raises it)
                failed.put(error)

        threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert failed.empty(), failed.get()


def test_a_connection_that_is_interrupted_at_any_line_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the signal came within `socket.__init__`, and what was to close the socket failed for want of a field."""
    lines, stop_at = 0, 0
    said: list[object] = []
    traced = sys.gettrace()  # by a measurement of coverage

    def trace(frame: FrameType, event: str, arg: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        if lines == stop_at and event == "line":
            raise InterruptError
        return trace

    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with socket.create_server((HOST, 0)) as server, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        port = server.getsockname()[1]
        connected(HOST, port).close()  # What is loaded once, is.
        gc.collect()
        before, ended = descriptors(), False
        while not ended:
            lines, stop_at = 0, stop_at + 1
            sys.settrace(trace)
            try:
                connected(HOST, port).close()
                ended = True
            except InterruptError:
                pass
            finally:
                sys.settrace(traced)
            gc.collect()
    assert stop_at > 20
    assert (said, warned, descriptors()) == ([], [], before - 1)


def test_a_socket_that_an_interrupt_leaves_to_nobody_is_closed_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the signal came while a producer connected, and Python warned of a socket that nobody had closed."""
    opened: list[int] = []

    def interrupted(sock: socket.socket, address: object) -> None:
        del address
        opened.append(sock.fileno())
        raise InterruptError

    monkeypatch.setattr(OwnSocket, "connect", interrupted)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(InterruptError):
            connected(HOST, 1)
        gc.collect()
    assert warned == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
