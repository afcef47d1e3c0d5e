"""A server holds a bounded number of bytes of requests: what does not fit stays with its sender, and breaks nobody."""

from __future__ import annotations

import threading

import pytest

from spark_broker.protocol import wire
from spark_broker.protocol.messages import FetchResponse
from spark_broker.transport import server_connection
from spark_broker.transport.byte_budget import ByteBudget
from spark_broker.transport.channel import UNSENT
from spark_broker.transport.frames import FRAME_OVERHEAD_BYTES, HEADER_BYTES, Operation, encode
from spark_broker.transport.io_loop import SCRATCH_BYTES
from spark_broker.transport.server_connection import ServerConnection
from spark_broker.transport.server_stream import ServerStream
from tests.support.raw_peer import joined
from tests.support.waiting import eventually
from tests.transport.rig import CALL, REQUEST, WAIT_S, Rig, Settings, look_often, rig

PAYLOAD = bytes(200_000)
SIZE = len(wire.encode(REQUEST)) + len(PAYLOAD) + FRAME_OVERHEAD_BYTES
ONE_FITS = Settings(queued_bytes=300_000)
MESSAGE = joined(encode(Operation.MESSAGE, wire.encode(REQUEST), PAYLOAD, stream=1))


def nothing_more_is_taken(of: Rig) -> None:
    """Whatever has arrived, the server has taken no more of it than fits."""
    serves_after_what_arrived_before(of)
    assert of.taken.empty()
    assert of.used_bytes <= 300_000


def serves_after_what_arrived_before(of: Rig) -> None:
    """A new connection is served, and so everything that had arrived has been looked at."""
    with of.peer() as peer:
        peer.open("nonsense")
        assert peer.receive() is not None


def test_what_does_not_fit_is_received_when_others_bytes_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as first, served.peer() as second, served.peer() as third:
        for peer in (first, second, third):
            peer.open("held")
            peer.write(MESSAGE)
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        for _ in range(2):
            nothing_more_is_taken(served)
            served.go_on.release()
            assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        nothing_more_is_taken(served)


def test_a_client_whose_bytes_do_not_fit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as first, served.peer(timeout_s=1.0) as second:
        first.open("held")
        first.write(MESSAGE)
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        second.open("held")
        with pytest.raises(TimeoutError):
            second.write(MESSAGE * 100)  # more than the system holds between them
        nothing_more_is_taken(served)


def test_clients_that_send_too_much_do_not_keep_brokers_from_replicating(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as one, served.peer() as other, served.peer() as broker:
        for client in (one, other):
            client.open("held")
            client.write(MESSAGE)
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        broker.open("replica")
        broker.write(MESSAGE)
        assert served.taken.get(timeout=WAIT_S) == ("replica", len(PAYLOAD))
        assert served.used_bytes == 2 * SIZE


def test_a_message_to_a_stream_that_has_ended_counts_as_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that is ahead of its leader must not wait for clients."""
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as client, served.peer() as broker:
        client.open("held")
        client.write(MESSAGE)
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        broker.open("replica", stream=2)
        broker.frame(Operation.CANCEL, stream=2)
        broker.write(MESSAGE)
        broker.open("replica", stream=3)
        broker.message(REQUEST, stream=3)
        assert served.taken.get(timeout=WAIT_S) == ("replica", 0)


def test_messages_of_streams_that_do_not_exist_are_bounded_as_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as first, served.peer() as second:
        first.open("held")
        first.write(MESSAGE)
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        second.write(MESSAGE)
        second.call(CALL)
        nothing_more_is_taken(served)
        assert served.calls == 1  # of the rig
        served.go_on.release()
        assert second.receive() is not None


@pytest.mark.parametrize("operation", [Operation.OPEN, Operation.CANCEL])
def test_what_counts_against_no_budget_is_small(monkeypatch: pytest.MonkeyPatch, operation: Operation) -> None:
    """Story: a frame that no handler reads could have a body of 100 MB, which was received for nothing."""
    with rig(monkeypatch) as served, served.peer() as peer:
        peer.write(joined(encode(operation, b"replica", PAYLOAD, stream=1))[:100])
        (end,) = peer.frames()
        assert end.header.operation is Operation.END


def test_a_message_that_is_larger_than_the_budget_is_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch, Settings(queued_bytes=1000)) as served, served.peer() as small, served.peer() as large:
        small.open("held")
        small.message(REQUEST)
        assert served.taken.get(timeout=WAIT_S) == ("held", 0)
        large.open("held")
        large.write(MESSAGE)
        serves_after_what_arrived_before(served)
        assert served.taken.empty()
        served.go_on.release()
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))


@pytest.mark.parametrize("reset", [True, False])
def test_a_connection_that_breaks_in_the_middle_of_a_message_gives_its_bytes_back(
    monkeypatch: pytest.MonkeyPatch, *, reset: bool
) -> None:
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as leaves, served.peer() as waits:
        leaves.open("held")
        leaves.write(MESSAGE[:100_000])
        served.await_used(SIZE)
        waits.open("held")
        waits.write(MESSAGE)
        if reset:
            leaves.reset()
        else:
            leaves.sock.close()
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        assert served.used_bytes == SIZE


def test_a_connection_that_waits_for_room_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as holds:
        holds.open("held")
        holds.write(MESSAGE)
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        with served.peer() as leaves:
            leaves.open("held")
            leaves.write(MESSAGE)
            nothing_more_is_taken(served)


def test_a_connection_that_is_closed_while_it_waits_for_room_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as holds, served.peer() as waits:
        holds.open("held")
        holds.write(MESSAGE)
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        waits.open("held")
        waits.write(MESSAGE)
        waiting = served.server.of_clients._waiting
        eventually(lambda: waiting, WAIT_S, "it waits")
        for connection in list(waiting):
            assert isinstance(connection, ServerConnection)
            connection.channel.close("the test is over")
        assert waits.receive() is None
        eventually(lambda: not waiting, WAIT_S, "it is forgotten")


def test_messages_that_their_stream_has_not_read_are_given_back_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served, served.peer() as peer:
        peer.open("refuse")
        peer.write(MESSAGE * 4)
        end = peer.receive()
        assert end is not None
        assert end.header.operation is Operation.END
        served.await_used(0)


def test_a_call_counts_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served, served.peer() as peer:
        served.calls_go_on.clear()
        peer.call(CALL)
        served.await_used(len(wire.encode(CALL)) + FRAME_OVERHEAD_BYTES)
        served.calls_go_on.set()
        assert peer.receive() is not None
        served.await_used(0)


def test_no_more_calls_of_a_connection_are_worked_on_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: what one read of the socket brought was worked on at once: thousands of threads."""
    monkeypatch.setattr(server_connection, "CALLS_MAX", 8)
    with rig(monkeypatch) as served, served.peer() as peer:
        served.calls_go_on.clear()
        before = served.calls
        call = joined(encode(Operation.CALL, wire.encode(CALL), correlation=1))
        peer.write(call * 100)
        eventually(lambda: served.calls == before + 8, WAIT_S, "calls up to the bound")
        nothing_more_is_taken(served)
        assert served.calls == before + 8
        served.calls_go_on.set()
        assert all(peer.receive() is not None for _ in range(100))


def test_a_large_message_has_its_turn_however_many_small_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as first, served.peer() as large, served.peer() as small:
        first.open("held")
        first.write(joined(encode(Operation.MESSAGE, wire.encode(REQUEST), bytes(100_000), stream=1)))
        assert served.taken.get(timeout=WAIT_S) == ("held", 100_000)
        large.open("held")
        large.write(joined(encode(Operation.MESSAGE, wire.encode(REQUEST), bytes(290_000), stream=1)))
        eventually(lambda: served.server.of_clients.is_awaited, WAIT_S, "the large one waits")
        small.open("held")
        small.message(REQUEST)
        nothing_more_is_taken(served)
        served.go_on.release()
        assert served.taken.get(timeout=WAIT_S) == ("held", 290_000)


def test_whoever_reads_no_answers_does_not_keep_others_from_the_room_that_it_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stops being read when too many answers wait for it. It may have been the first who waits for room then."""
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as holds, served.peer(receive_buffer=4096) as deaf:
        holds.open("held")
        holds.write(MESSAGE)
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        deaf.open("held")
        deaf.write(MESSAGE)
        eventually(lambda: served.server.of_clients.is_awaited, WAIT_S, "the deaf one waits")
        (connection,) = served.server.of_clients._waiting
        assert isinstance(connection, ServerConnection)
        connection.channel.loop.soon(lambda: connection.channel.pause("unsent"))
        with served.peer() as other:
            other.open("held")
            other.write(MESSAGE)
            nothing_more_is_taken(served)
            served.go_on.release()
            assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
            connection.channel.loop.soon(lambda: connection.channel.resume("unsent"))
            nothing_more_is_taken(served)
            served.go_on.release()
            assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))


@pytest.mark.parametrize("pace", ["nothing", pytest.param("a little", marks=pytest.mark.full)])
def test_a_message_that_comes_slowly_does_not_keep_the_room_while_others_wait(
    monkeypatch: pytest.MonkeyPatch, pace: str
) -> None:
    """A few peers that each began a message as large as may be, and sent no more of it, kept every client out."""
    look_often(monkeypatch, PATIENCE_S=0.3)
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as slow, served.peer() as other:
        slow.open("held")
        slow.write(MESSAGE[:1000])
        served.await_used(SIZE)
        if pace == "a little":
            for at in range(1000, 1100):
                slow.write(MESSAGE[at : at + 1])
        other.open("held")
        other.write(MESSAGE)
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))
        assert slow.receive() is None


def test_a_slow_message_is_waited_for_while_nobody_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch, PATIENCE_S=0.0)
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as slow, served.peer() as other:
        slow.open("held")
        slow.write(MESSAGE[:1000])
        served.await_used(SIZE)
        for _ in range(50):
            other.call(CALL)
            assert other.receive() is not None
        slow.write(MESSAGE[1000:])
        assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))


def polls(stream: ServerStream) -> None:
    """Each message makes its handler wait for as long as the client wants: for ever."""
    over = threading.Event()
    stream.on_gone = over.set
    while stream.receive() is not None and not stream.cancelled:
        with stream.waiting_for_client():
            over.wait(WAIT_S)


def is_served(of: Rig) -> None:
    """Somebody else's message, which needs nearly all of the room, is received and answered."""
    with of.peer(timeout_s=10.0) as other:
        other.open("echo")
        other.write(MESSAGE)
        assert other.receive() is not None


POLLS = Settings(queued_bytes=300_000, streams={"polls": polls})


@pytest.mark.parametrize("streams", [pytest.param(1, marks=pytest.mark.full), 3])
def test_what_is_sent_behind_a_long_poll_does_not_keep_the_room_while_others_wait(
    monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    """One connection could keep all clients out for as long as it wanted to wait: nothing was wrong with it."""
    look_often(monkeypatch, PATIENCE_S=0.3)
    with rig(monkeypatch, POLLS) as served, served.peer() as greedy:
        for stream in range(1, streams + 1):
            greedy.open("polls", stream)
            greedy.message(REQUEST, stream=stream)
            greedy.message(REQUEST, bytes(240_000 // streams), stream=stream)
        eventually(lambda: served.used_bytes > 240_000, WAIT_S, "its bytes are held")
        is_served(served)


def test_a_large_message_that_wants_to_wait_does_not_keep_the_room_while_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_often(monkeypatch, PATIENCE_S=0.3)
    settings = Settings(queued_bytes=1_200_000, streams={"polls": polls})
    with rig(monkeypatch, settings) as served, served.peer() as greedy:
        greedy.open("polls")
        greedy.message(REQUEST, bytes(1_100_000))
        eventually(lambda: served.used_bytes > 1_100_000, WAIT_S, "its bytes are held")
        is_served(served)


def answers_much(stream: ServerStream) -> None:
    while stream.receive() is not None:
        stream.send(FetchResponse(1, []), bytes(20_000_000))


def test_what_is_sent_by_who_takes_no_answers_does_not_keep_the_room_while_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_often(monkeypatch, PATIENCE_S=0.3)
    both_are_held = threading.Event()

    def answers(stream: ServerStream) -> None:
        both_are_held.wait(WAIT_S)
        answers_much(stream)

    settings = Settings(queued_bytes=300_000, streams={"much": answers})
    with rig(monkeypatch, settings) as served, served.peer(receive_buffer=4096) as deaf:
        deaf.open("much")
        deaf.message(REQUEST, bytes(100_000))
        deaf.message(REQUEST, bytes(150_000))
        eventually(lambda: served.used_bytes > 240_000, WAIT_S, "its bytes are held")
        both_are_held.set()
        is_served(served)


def test_a_message_that_was_begun_does_not_keep_the_room_while_its_peer_takes_no_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not read then, and the time of its message did not count: a little now and then was enough."""
    look_often(monkeypatch, PATIENCE_S=0.3)
    with rig(monkeypatch, ONE_FITS) as served, served.peer() as slow:
        slow.open("echo")
        slow.write(MESSAGE[:1000])
        served.await_used(SIZE)
        (connection,) = (c for c in served.server._connections if c._reserved is not None)
        connection.channel.loop.soon(lambda: connection.channel.pause(UNSENT))
        is_served(served)


@pytest.mark.parametrize("waits_first", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_waits_for_a_slow_broker_is_no_reason_to_disconnect(
    monkeypatch: pytest.MonkeyPatch, waits_first: bool
) -> None:
    """`waits_first`: two threads have waited for the client before, for a moment."""
    taken, go_on = threading.Event(), threading.Event()

    def slow(stream: ServerStream) -> None:
        while stream.receive() is not None:
            if waits_first:
                with stream.waiting_for_client(), stream.waiting_for_client():
                    stream.send(FetchResponse(0, []))
            taken.set()
            assert go_on.wait(WAIT_S)
            stream.send(FetchResponse(1, []))

    look_often(monkeypatch, PATIENCE_S=0.1)
    settings = Settings(queued_bytes=300_000, streams={"slow": slow})
    with rig(monkeypatch, settings) as served, served.peer() as client, served.peer() as other:
        client.open("slow")
        client.message(REQUEST, bytes(100_000))
        client.message(REQUEST, bytes(150_000))
        assert taken.wait(WAIT_S)
        eventually(lambda: served.used_bytes > 250_000, WAIT_S, "both are held")
        other.open("echo")
        other.write(MESSAGE)
        eventually(lambda: served.server.of_clients.is_awaited, WAIT_S, "the other one waits")
        looked = threading.Event()  # for many times its patience
        served.server.loop.soon(lambda: served.server.loop.loop.call_later(0.5, looked.set))
        assert looked.wait(WAIT_S)
        go_on.set()
        answers = [client.receive() for _ in range(4 if waits_first else 2)]
        assert None not in answers
        assert other.receive() is not None


def test_a_connection_is_read_no_further_when_all_of_its_streams_together_are_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of its thousand streams could be behind by a megabyte."""
    with rig(monkeypatch, Settings()) as served, served.peer() as peer:
        for stream in range(1, 21):
            peer.open("held", stream)
            peer.write(joined(encode(Operation.MESSAGE, wire.encode(REQUEST), PAYLOAD, stream=stream)))
        eventually(lambda: served.used_bytes > server_connection.UNREAD_MAX_BYTES, WAIT_S, "they are behind")
        serves_after_what_arrived_before(served)
        nothing_more = served.used_bytes
        serves_after_what_arrived_before(served)
        assert served.used_bytes == nothing_more <= server_connection.UNREAD_MAX_BYTES + SIZE
        served.go_on.release(20)
        for _ in range(20):
            assert served.taken.get(timeout=WAIT_S) == ("held", len(PAYLOAD))


@pytest.mark.parametrize("body", [b"", pytest.param(b"x", marks=pytest.mark.full)])
def test_messages_without_content_are_not_free(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """Story: a client whose handler waited sent frames of 0 or 1 bytes. Each took 200 bytes of memory and counted as
    what it had in it, so that an idle-looking connection filled a broker's memory.
    """
    waits, go_on = threading.Event(), threading.Event()

    def wait(stream: ServerStream) -> None:
        waits.set()
        assert go_on.wait(WAIT_S)

    with rig(monkeypatch, Settings(streams={"waits": wait})) as served, served.peer(timeout_s=1.0) as peer:
        peer.open("waits")
        assert waits.wait(WAIT_S)
        frames = joined(encode(Operation.MESSAGE, body, stream=1)) * 1_000_000
        with pytest.raises(TimeoutError):
            peer.write(frames)
        serves_after_what_arrived_before(served)  # The loop may be in the midst of what it has read at once.
        held, read_at_once = served.used_bytes, SCRATCH_BYTES // HEADER_BYTES * (FRAME_OVERHEAD_BYTES + 1)
        assert server_connection.UNREAD_MAX_BYTES < held <= server_connection.UNREAD_MAX_BYTES + read_at_once
        serves_after_what_arrived_before(served)
        assert served.used_bytes == held, "the client is not read"
        go_on.set()


def test_room_is_given_in_the_order_of_the_first_tries() -> None:
    budget = ByteBudget(10)
    told: list[str] = []

    def reserve(name: str, size: int) -> bool:
        return budget.reserve(size, name, lambda: told.append(name))

    assert reserve("first", 6)
    assert not reserve("large", 8)
    assert not reserve("small", 2), "it would fit, but the large one was there before"
    assert not reserve("smaller", 1)
    budget.release(6)
    assert told == ["large"]
    assert not reserve("small", 2), "the large one has not been there yet"
    assert reserve("large", 8)
    assert told == ["large", "small"]
    budget.forget("small")
    assert told == ["large", "small", "smaller"]
    assert reserve("smaller", 1)
    assert not budget.is_awaited


def test_whoever_waits_for_room_is_called_once() -> None:
    budget = ByteBudget(10)
    told: list[str] = []
    assert budget.reserve(8, "first", lambda: told.append("first"))
    for _ in range(2):
        assert not budget.reserve(8, "second", lambda: told.append("second"))
    assert not budget.reserve(8, "third", lambda: told.append("third"))
    budget.forget("third")
    budget.release(0)
    assert told == []
    budget.release(8)
    budget.release(0)
    assert (told, budget.used_bytes) == (["second"], 0)
