"""A server holds a bounded number of bytes of answers to calls, and whoever leaves them keeps nobody else waiting."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from spark_broker.protocol import wire
from spark_broker.protocol.messages import (
    CallResponse,
    DescribeLogDirResponse,
    EmptyResponse,
    ErrorResponse,
    Message,
    MetadataRequest,
    ReplicaSetAside,
)
from spark_broker.transport import answer_room
from spark_broker.transport.answer_room import (
    MAKING_BYTES,
    MAKING_MAX,
    UNTAKEN_MAX_BYTES,
    ConnectionAnswers,
    expect_small_answer,
    lend_room,
)
from spark_broker.transport.byte_budget import ByteBudget
from spark_broker.transport.client import Connection
from spark_broker.transport.frames import Operation, encode
from spark_broker.transport.server_connection import ServerConnection
from tests.support.raw_peer import RawPeer, joined
from tests.support.waiting import eventually
from tests.transport.rig import CALL, HOST, REQUEST, WAIT_S, Rig, Settings, handlers, look_often, rig

MUCH = MetadataRequest(["much"])
ANSWER_BYTES = 500_000
SYSTEM_BYTES = 8 << 20
"""What the systems of both sides may take of what a peer does not read."""


class Calls:
    """Answers `MUCH` with much, and counts how often; "waits" once `go_on` is set, "lends" and "small" after a word."""

    def __init__(self, size: int = ANSWER_BYTES) -> None:
        self.made = self.begun = 0
        self.go_on = threading.Event()
        self._size = size

    def __call__(self, request: object) -> Message:
        assert isinstance(request, MetadataRequest)
        match request.topics:
            case ["much"]:
                self.made += 1
                aside = ReplicaSetAside("much", 0, "stray", "x" * 1000)
                return DescribeLogDirResponse("much", [], [aside] * (self._size // 1000))
            case [*waits] if waits:
                if waits == ["lends"]:
                    lend_room()
                elif waits == ["small"]:
                    expect_small_answer()
                self.begun += 1
                assert self.go_on.wait(WAIT_S)
        return EmptyResponse()


def written(peer: RawPeer, count: int, request: Message = MUCH) -> None:
    """So many calls in one piece."""
    peer.write(b"".join(joined(encode(Operation.CALL, wire.encode(request), correlation=n + 1)) for n in range(count)))


def untaken(served: Rig) -> int:
    """Bytes of answers that wait in the server."""
    return sum(connection._answers.untaken_bytes for connection in served.server._connections)


def nothing_more_is_made(served: Rig, calls: Calls) -> int:
    """How many answers were made, once no connection goes on."""
    eventually(lambda: untaken(served) > UNTAKEN_MAX_BYTES, WAIT_S, "answers wait")
    eventually(lambda: all(not c._answers._making for c in served.server._connections), WAIT_S, "none is being made")
    return calls.made


def test_calls_in_one_piece_are_not_begun_while_their_peer_takes_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: two connections of 250 calls, 10 KB each, took a gigabyte of a broker for 30 seconds."""
    calls = Calls()
    with rig(monkeypatch, Settings(calls=calls)) as served, served.peer(receive_buffer=4096) as deaf:
        written(deaf, 250)
        made = nothing_more_is_made(served, calls)
        served.serves()
        assert calls.made == made <= (SYSTEM_BYTES + UNTAKEN_MAX_BYTES) / ANSWER_BYTES + MAKING_MAX
        assert untaken(served) <= UNTAKEN_MAX_BYTES + MAKING_MAX * ANSWER_BYTES * 1.1
        correlations = [frame.header.correlation for frame in (deaf.receive() for _ in range(250)) if frame]
        assert sorted(correlations) == list(range(1, 251))


def test_an_answer_that_its_peer_does_not_take_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: each held its thread, its request and what the answer was made of, which is larger than its bytes."""
    calls = Calls(size=20_000_000)
    others = set(handlers())
    with rig(monkeypatch, Settings(calls=calls)) as served, served.peer(receive_buffer=4096) as deaf:
        written(deaf, 1)
        eventually(lambda: untaken(served) > ANSWER_BYTES, WAIT_S, "the answer waits")
        eventually(lambda: set(handlers()) <= others, WAIT_S, "no thread waits with it")
        assert deaf.receive() is not None


@pytest.mark.parametrize("pace", ["nothing", pytest.param("a little", marks=pytest.mark.full)])
def test_answers_are_bounded_in_all_and_whoever_leaves_them_is_disconnected_while_others_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pace: str
) -> None:
    """Each connection is below its own bound."""
    look_often(monkeypatch, PATIENCE_S=0.5)
    calls = Calls(size=20_000_000)
    limit = 2 * MAKING_BYTES
    with rig(monkeypatch, Settings(calls=calls, answer_bytes=limit)) as served, ExitStack() as stack:
        deaf = [stack.enter_context(served.peer(receive_buffer=4096)) for _ in range(20)]
        for peer in deaf:
            written(peer, 1)
        eventually(lambda: served.server.of_answers.is_awaited, WAIT_S, "there is room for no more")
        assert calls.made <= 2
        over = threading.Event()

        def trickle() -> None:
            while pace == "a little" and not over.wait(0.05):
                for peer in deaf:
                    try:
                        peer.sock.recv(1)
                    except OSError:
                        continue

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with served.peer() as honest:
                honest.call(CALL)
                answer = honest.receive()
                assert answer is not None
                assert answer.header.operation is Operation.ANSWER
        finally:
            over.set()
            thread.join()
        assert "bytes of answers to its calls; others wait for room: disconnected" in caplog.text


def test_whoever_leaves_its_answers_is_waited_for_while_nobody_needs_their_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And is ended when it has taken nothing until the deadline."""
    look_often(monkeypatch, PATIENCE_S=0.0)
    calls = Calls(size=20_000_000)
    with rig(monkeypatch, Settings(calls=calls, send_timeout_ms=1500)) as served:
        with served.peer(receive_buffer=4096) as deaf:
            written(deaf, 3)
            served.serves()
            eventually(lambda: not untaken(served), WAIT_S, "it is ended")
        assert "has taken nothing of its calls stream for" in caplog.text
        assert "others wait" not in caplog.text


def test_hundreds_of_clients_that_ask_for_much_at_the_same_time_are_all_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_often(monkeypatch, PATIENCE_S=WAIT_S)
    calls = Calls()
    with (
        rig(monkeypatch, Settings(calls=calls, answer_bytes=2 * MAKING_BYTES)) as served,
        served.peer(receive_buffer=4096) as deaf,
        ThreadPoolExecutor(32) as pool,
    ):
        written(deaf, 250)
        connections = [Connection(HOST, served.server.port) for _ in range(300)]

        def ask(connection: Connection) -> CallResponse:
            return connection.call(MUCH, timeout_ms=60_000)

        assert all(isinstance(answer, DescribeLogDirResponse) for answer in pool.map(ask, connections))
        assert untaken(served) <= 2 * MAKING_BYTES
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("same_connection", [True, pytest.param(False, marks=pytest.mark.full)])
def test_handlers_that_wait_for_something_keep_no_other_call_waiting_for_long(
    monkeypatch: pytest.MonkeyPatch, *, same_connection: bool
) -> None:
    monkeypatch.setattr(answer_room, "MAKING_S", 0.2)
    look_often(monkeypatch)
    calls = Calls()
    settings = Settings(calls=calls, answer_bytes=MAKING_BYTES * (MAKING_MAX if same_connection else 1))
    with rig(monkeypatch, settings) as served, served.peer() as waits, served.peer() as other:
        written(waits, 20, MetadataRequest(["waits"]))
        peer = waits if same_connection else other
        peer.call(CALL, correlation=100)
        answer = peer.receive()
        assert answer is not None
        assert answer.header.correlation == 100
        if same_connection:
            assert calls.begun == 20
        calls.go_on.set()
        assert all(waits.receive() is not None for _ in range(20))


@pytest.mark.parametrize(("what", "begun"), [("small", 20), ("lends", MAKING_MAX)])
def test_a_handler_may_say_that_others_need_not_wait_for_its_call(
    monkeypatch: pytest.MonkeyPatch, what: str, begun: int
) -> None:
    """Those that lend their room have others of their connection wait: their answers may be large."""
    monkeypatch.setattr(answer_room, "MAKING_S", 10 * WAIT_S)
    calls = Calls()
    with (
        rig(monkeypatch, Settings(calls=calls, answer_bytes=MAKING_BYTES)) as served,
        served.peer() as waits,
        served.peer() as other,
    ):
        written(waits, 20, MetadataRequest([what]))
        eventually(lambda: calls.begun == begun, WAIT_S, "calls have begun")
        other.call(CALL)
        assert other.receive() is not None
        assert calls.begun == begun
        calls.go_on.set()
        assert all(waits.receive() is not None for _ in range(20))


def waiting_call(served: Rig) -> ServerConnection:
    """The connection whose call waits for room for its answer."""
    found: list[ServerConnection] = []

    def look() -> bool:
        found[:] = [connection for connection in served.server._connections if connection._waiting is not None]
        return bool(found)

    eventually(look, WAIT_S, "a call waits")
    return found[0]


ONE_IS_MADE = MetadataRequest(["waits"])


@pytest.mark.parametrize("leaves", [True, False])
def test_a_call_that_waits_for_room_is_served_before_what_follows_it_or_forgotten_with_its_peer(
    monkeypatch: pytest.MonkeyPatch, *, leaves: bool
) -> None:
    monkeypatch.setattr(answer_room, "MAKING_S", 10 * WAIT_S)
    calls = Calls()
    with (
        rig(monkeypatch, Settings(calls=calls, answer_bytes=MAKING_BYTES)) as served,
        served.peer() as waits,
        served.peer() as second,
    ):
        waits.call(ONE_IS_MADE)
        eventually(lambda: calls.begun == 1, WAIT_S, "it is made")
        second.call(CALL)
        connection = waiting_call(served)
        if leaves:
            second.sock.close()
            eventually(lambda: connection._waiting is None, WAIT_S, "it is forgotten")
            assert not served.server.of_answers.is_awaited
        else:
            second.open("echo")
            second.message(REQUEST)
            calls.go_on.set()
            answers = [second.receive(), second.receive()]
            kinds = {answer.header.operation for answer in answers if answer is not None}
            assert kinds == {Operation.ANSWER, Operation.MESSAGE}
        calls.go_on.set()
        assert waits.receive() is not None


def test_a_large_call_that_waits_because_its_peer_takes_no_answers_does_not_keep_the_room_for_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_often(monkeypatch, PATIENCE_S=0.3)
    monkeypatch.setattr(answer_room, "MAKING_S", 10 * WAIT_S)
    calls = Calls(size=20_000_000)
    settings = Settings(calls=calls, queued_bytes=300_000)
    with rig(monkeypatch, settings) as served, served.peer(receive_buffer=4096) as deaf:
        written(deaf, MAKING_MAX, ONE_IS_MADE)
        eventually(lambda: calls.begun == MAKING_MAX, WAIT_S, "they are made")
        deaf.call(MetadataRequest(["x" * 200] * 1200))
        connection = waiting_call(served)
        sent = joined(encode(Operation.ANSWER, wire.encode(ErrorResponse(1, "x" * 20_000_000))))
        connection.channel.loop.soon(lambda: connection.channel.send([sent]))
        with served.peer() as other:
            other.open("echo")
            other.message(REQUEST, bytes(200_000))
            assert other.receive() is not None
        calls.go_on.set()


def test_what_a_call_counts_as() -> None:
    budget = ByteBudget(10 * MAKING_BYTES)
    told: list[None] = []
    answers = ConnectionAnswers(budget, lambda: told.append(None))
    rooms = [room for _ in range(MAKING_MAX) if (room := answers.begin("me")) is not None]
    assert len(rooms) == MAKING_MAX
    assert answers.begin("me") is None
    first, second, third, fourth = rooms
    first.made(10 * UNTAKEN_MAX_BYTES)
    first.is_small()  # A look that came late does not undo it.
    assert answers.untaken_bytes == 10 * UNTAKEN_MAX_BYTES
    assert budget.used_bytes == 3 * MAKING_BYTES + 10 * UNTAKEN_MAX_BYTES
    second.lend()
    third.is_small()
    assert budget.used_bytes == MAKING_BYTES + 10 * UNTAKEN_MAX_BYTES
    assert not told, "it leaves too much"
    assert first.end()
    assert len(told) == 1
    assert not first.end()
    first.made(5)
    for room, size in ((second, 7), (third, 8), (fourth, 9)):
        room.made(size)
    assert answers.untaken_bytes == budget.used_bytes == 24
    assert all(room.end() for room in (second, third, fourth))
    assert answers.untaken_bytes == budget.used_bytes == 0
    assert len(told) == 1
