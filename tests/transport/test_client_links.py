"""Calls of a client share a socket, and each stream has one: what happens to one of them holds no other up."""

from __future__ import annotations

import contextlib
import gc
import itertools
import queue
import socket
import threading
import weakref

import pytest

from spark_broker.errors import NetworkError, RequestTimedOutError
from spark_broker.protocol import wire
from spark_broker.protocol.messages import EmptyResponse, FetchResponse
from spark_broker.transport import client
from spark_broker.transport.client import Connection, Meanwhile
from spark_broker.transport.frames import UINT32_MAX, Operation, encode
from spark_broker.transport.hello import hello
from spark_broker.transport.server_stream import ServerStream
from tests.support.raw_peer import joined
from tests.support.waiting import eventually
from tests.transport.rig import CALL, HOST, REQUEST, Settings, rig

LARGE = bytes(1 << 20)


@pytest.mark.parametrize("leave", ["close", "forget"])
def test_a_stream_that_nobody_reads_holds_up_nobody_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    flooding: queue.SimpleQueue[ServerStream] = queue.SimpleQueue()

    def flood(stream: ServerStream) -> None:
        """Sends more than the systems of both sides take for a client that reads nothing."""
        flooding.put(stream)
        with contextlib.suppress(NetworkError):
            for _ in range(64):
                stream.send(FetchResponse(1, []), LARGE)
        stream.receive()

    with rig(monkeypatch, Settings(streams={"flood": flood})) as served:
        connection = Connection(HOST, served.server.port)
        stream, other = connection.open_stream("flood"), connection.open_stream("echo")
        freed, of_server = weakref.ref(stream), flooding.get(timeout=30)
        eventually(lambda: of_server.sending_for_s > 0.1, 30, "a client that takes nothing")
        assert connection.call(CALL, timeout_ms=20_000) == EmptyResponse()
        other.send(REQUEST)
        other.receive(timeout_ms=20_000)
        other.close()
        if leave == "close":
            stream.close()
        del stream

        def is_freed() -> bool:  # The thread that receives may hold it for a moment.
            gc.collect()
            return freed() is None

        eventually(is_freed, 30, "the stream is freed")
        connection.close()
        served.await_nothing_held()


def test_numbers_begin_again_when_they_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: after four thousand million calls, a header could not hold the number of the next one."""
    with rig(monkeypatch) as served:
        connection = Connection(HOST, served.server.port)
        connection.call(CALL, timeout_ms=20_000)
        link = connection._link
        assert link is not None
        served.calls_go_on.clear()
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()

        def call() -> None:
            answers.put(connection.call(CALL, timeout_ms=20_000))

        # They begin again while the call with the first number is not answered yet.
        for number, first in enumerate((0, UINT32_MAX - 1, 0, UINT32_MAX)):
            link._numbers = itertools.count(first)
            threading.Thread(target=call, daemon=True).start()
            eventually(lambda number=number: len(link._answers) == number + 1, 30, "a call")  # type: ignore[misc]
        assert sorted(link._answers) == [1, 2, 3, UINT32_MAX]
        served.calls_go_on.set()
        assert [answers.get(timeout=30) for _ in range(4)] == [EmptyResponse()] * 4
        connection.close()


def test_a_closed_connection_lets_what_is_under_way_end_and_then_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served:
        connection = Connection(HOST, served.server.port)
        stream = connection.open_stream("echo")
        connection.close()
        with pytest.raises(NetworkError, match="closed"):
            connection.call(CALL, timeout_ms=20_000)
        stream.send(REQUEST)
        stream.receive(timeout_ms=20_000)
        stream.close()
        served.await_nothing_held()


def test_a_connection_that_nobody_holds_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served:
        connection = Connection(HOST, served.server.port)
        connection.call(CALL, timeout_ms=20_000)
        del connection
        gc.collect()
        served.await_nothing_held()


def test_a_connection_that_broke_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served:
        connection = Connection(HOST, served.server.port)
        connection.call(CALL, timeout_ms=20_000)
        stream = connection.open_stream("echo")
        stream.send(REQUEST)
        stream.receive(timeout_ms=20_000)
        link = connection._link
        assert link is not None
        for of_server in list(served.server._connections):
            of_server.channel.close("the test breaks it")
        with pytest.raises(NetworkError):
            stream.receive(timeout_ms=20_000)
        eventually(lambda: link.closed, 30, "the end of the connection")
        assert connection.call(CALL, timeout_ms=20_000) == EmptyResponse()
        connection.close()


class SlowAnswer:
    """A peer whose answer comes in pieces: the next one when the caller's time is over once more."""

    def __init__(self, patch: pytest.MonkeyPatch, pieces: int) -> None:
        self._listening = socket.create_server((HOST, 0))
        answer = joined(encode(Operation.ANSWER, wire.encode(EmptyResponse()), LARGE, correlation=1))
        said, size = joined(hello()) + answer, len(answer) // 20 + 1
        self._pieces = [said[at : at + size] for at in range(0, len(said), size)][:pieces]
        self._peer: socket.socket | None = None
        self._first = client._first
        self.connection = Connection(*self._listening.getsockname())
        patch.setattr(client, "_first", self._time_is_over)

    def _time_is_over(
        self, answers: queue.SimpleQueue[object], deadline_s: float, meanwhile: Meanwhile | None
    ) -> object:
        if self._peer is None:
            self._peer, _ = self._listening.accept()
        if self._pieces:
            link = self.connection._link
            assert link is not None
            before = link.channel.received_bytes
            self._peer.sendall(self._pieces.pop(0))
            eventually(lambda: link.channel.received_bytes > before, 30, "it comes")
            return None
        return self._first(answers, deadline_s, meanwhile)

    def close(self) -> None:
        self.connection.close()
        self._listening.close()
        if self._peer is not None:
            self._peer.close()


def test_a_patient_caller_waits_while_the_answer_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(SlowAnswer(monkeypatch, 100)) as slow:
        assert slow.connection.call(CALL, timeout_ms=20_000, patient=True) == EmptyResponse()


@pytest.mark.parametrize(("patient", "pieces"), [(False, 100), (True, 3)])
def test_nobody_waits_longer_than_was_said(monkeypatch: pytest.MonkeyPatch, patient: bool, pieces: int) -> None:
    """Not while something comes, unless the caller is patient; and not when nothing comes any more."""
    with contextlib.closing(SlowAnswer(monkeypatch, pieces)) as slow, pytest.raises(RequestTimedOutError):
        slow.connection.call(CALL, timeout_ms=200, patient=patient)
