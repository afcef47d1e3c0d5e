"""Connections are bounded, in all and of one address, and closed if nobody uses them or their peer is too slow."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import queue
import socket
import subprocess
import sys

import pytest

from spark_broker.client.settings import parse_addresses
from spark_broker.errors import NetworkError, NoThreadError, ThrottlingQuotaExceededError
from spark_broker.protocol import wire
from spark_broker.protocol.messages import EmptyResponse, ErrorResponse
from spark_broker.transport import server
from spark_broker.transport.client import Connection
from spark_broker.transport.frames import Operation, encode
from spark_broker.transport.hello import hello
from spark_broker.transport.server import Server
from spark_broker.transport.server_stream import ServerStream
from tests.support.raw_peer import RawPeer, joined, refusal
from tests.support.waiting import eventually
from tests.transport.rig import CALL, HOST, REQUEST, WAIT_S, Rig, Settings, look_often, rig

LARGE = ErrorResponse(1, "x" * 60_000)


def is_refused(served: Rig) -> bool:
    """Whether the next connection is closed at once."""
    with served.peer() as peer:
        try:
            peer.call(CALL)
            return peer.receive() is None
        except ConnectionError:
            return True


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Settings(connections=3), "broker.max.connections = 3 is reached"),
        (Settings(connections_per_ip=3), "127.0.0.1 has max.connections.per.ip = 3"),
    ],
)
def test_a_connection_beyond_the_bound_is_refused_until_another_one_has_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, settings: Settings, said: str
) -> None:
    with rig(monkeypatch, settings) as served:
        peers = [served.peer() for _ in range(3)]
        for peer in peers:
            peer.call(CALL)
            assert peer.receive() is not None
        assert is_refused(served)
        assert is_refused(served)
        assert said in caplog.text
        for peer in peers:
            peer.sock.close()
        served.await_nothing_held()
        assert not is_refused(served)


def test_streams_of_clients_are_bounded_and_those_of_brokers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread. One connection may open a thousand, so that a few could take all that a process may have."""
    with rig(monkeypatch, Settings(connections=8)) as served, served.peer() as greedy:
        for number in range(1, 9):
            greedy.open("held", stream=number)
        for _ in range(2):
            greedy.open("held", stream=9)
            end = greedy.receive()
            assert end is not None
            assert end.header.operation is Operation.END
            assert isinstance(refusal(end), ThrottlingQuotaExceededError)
        with served.peer() as broker:
            broker.open("replica")
            broker.message(REQUEST)
            assert served.taken.get(timeout=WAIT_S) == ("replica", 0)
        greedy.frame(Operation.CANCEL, stream=1)
        served.go_on.release(100)
        with served.peer() as client:
            eventually(lambda: served.server._client_streams < 8, WAIT_S, "one has left")
            client.open("echo")
            client.message(REQUEST)
            answer = client.receive()
            assert answer is not None
            assert answer.header.operation is Operation.MESSAGE


def test_another_address_is_not_refused_for_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch, Settings(connections_per_ip=1)) as served, served.peer() as one:
        one.call(CALL)
        assert one.receive() is not None
        with socket.socket() as other:
            other.bind(("127.0.0.2", 0))
            other.settimeout(WAIT_S)
            other.connect((HOST, served.server.port))
            other.sendall(joined(hello()))
            assert other.recv(100)
        assert is_refused(served)


def test_a_connection_without_use_is_closed_and_one_with_a_stream_or_a_call_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_often(monkeypatch)
    with (
        rig(monkeypatch, Settings(idle_s=0.5)) as served,
        served.peer() as calls,
        served.peer() as streams,
        served.peer() as idle,
    ):
        served.calls_go_on.clear()
        calls.call(CALL)
        streams.open("echo")
        assert idle.receive() is None
        served.calls_go_on.set()
        assert calls.receive() is not None
        streams.message(REQUEST)
        assert streams.receive() is not None
        assert calls.receive() is None
        streams.frame(Operation.CANCEL, stream=1)
        assert streams.receive() is None


def test_who_says_no_hello_in_time_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch, HELLO_TIMEOUT_S=0.3)
    with (
        rig(monkeypatch) as served,
        served.peer() as greeted,
        served.peer(greet=False) as silent,
        served.peer(greet=False) as slow,
    ):
        slow.write(joined(hello())[:-1])
        assert silent.receive() is None
        assert slow.receive() is None
        greeted.call(CALL)
        assert greeted.receive() is not None


@pytest.mark.parametrize("sent", [19, *(pytest.param(sent, marks=pytest.mark.full) for sent in (1, 20, 25, 100_000))])
def test_a_frame_that_is_begun_and_not_finished_in_time_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent: int
) -> None:
    look_often(monkeypatch, FRAME_TIMEOUT_S=0.3)
    with rig(monkeypatch) as served, served.peer() as whole, served.peer() as peer:
        whole.open("held")
        whole.message(REQUEST)
        peer.open("held")
        peer.write(joined(encode(Operation.MESSAGE, wire.encode(REQUEST), bytes(200_000), stream=1))[:sent])
        assert peer.receive() is None
        assert "to send one message: disconnected" in caplog.text
        assert served.taken.get(timeout=WAIT_S) == ("held", 0)
        served.go_on.release()
        whole.message(REQUEST)
        assert served.taken.get(timeout=WAIT_S) == ("held", 0)


def test_one_byte_after_the_other_does_not_make_more_time_for_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch, FRAME_TIMEOUT_S=0.3)
    with rig(monkeypatch) as served, served.peer() as peer, served.peer() as other:
        peer.open("held")
        peer.write(joined(encode(Operation.MESSAGE, wire.encode(REQUEST), bytes(1 << 20), stream=1))[:100])
        for _ in range(100_000):
            try:
                peer.write(b"\0")
            except ConnectionError:
                break
            other.call(CALL)  # about a millisecond
            assert other.receive() is not None
        else:
            pytest.fail("the server waits for ever")


def test_a_peer_that_takes_nothing_is_dropped_and_each_answer_is_counted_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look_often(monkeypatch)
    count = 200
    sent: queue.SimpleQueue[int] = queue.SimpleQueue()
    posted: queue.SimpleQueue[ServerStream] = queue.SimpleQueue()

    def post(stream: ServerStream) -> None:
        for number in range(count):
            stream.post(LARGE, functools.partial(sent.put, number))
        posted.put(stream)
        stream.receive()

    with rig(monkeypatch, Settings(send_timeout_ms=500, streams={"post": post})) as served:
        with served.peer(receive_buffer=4096) as peer:
            peer.open("post")
            stream = posted.get(timeout=WAIT_S)
            assert sent.qsize() < count
            eventually(lambda: stream.cancelled, WAIT_S, "the end of the stream")
            stream.post(LARGE, functools.partial(sent.put, count))
            with pytest.raises(NetworkError):
                stream.send(LARGE)
        assert "has taken nothing of its post stream for" in caplog.text
        served.await_nothing_held()
        assert sorted(sent.get_nowait() for _ in range(sent.qsize())) == list(range(count + 1))


def test_a_call_that_gets_no_thread_is_refused_and_the_next_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the thread that moves bytes waited for a client that took nothing, or ended because it had left."""
    with rig(monkeypatch) as served, served.peer() as peer:

        def no_thread(_: object) -> None:
            raise NoThreadError("the process has no thread left")

        with monkeypatch.context() as patch:
            patch.setattr(served.server.threads, "run", no_thread)
            for _ in range(3):
                peer.call(CALL)
                with pytest.raises(NoThreadError):
                    raise refusal(peer.receive())
            peer.open("echo")
            with pytest.raises(NoThreadError):
                raise refusal(peer.receive())
            with served.peer(receive_buffer=4096, timeout_s=1.0) as reads_nothing:
                with pytest.raises(TimeoutError):
                    reads_nothing.write(joined(encode(Operation.CALL, wire.encode(CALL))) * 1_000_000)
                peer.sock.settimeout(10.0)
                peer.call(CALL)
                with pytest.raises(NoThreadError):
                    raise refusal(peer.receive())
        served.await_used(0)
        peer.call(CALL)
        assert peer.receive() is not None


@pytest.mark.parametrize("number", [errno.ENETDOWN, errno.EPROTO, errno.EHOSTUNREACH, errno.EPERM, errno.EMFILE])
def test_a_connection_that_cannot_be_accepted_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Linux hands on what a pending connection has met in the network as an error of `accept`."""
    monkeypatch.setattr(server, "NO_DESCRIPTOR_PAUSE_S", 0.05)
    failed: queue.SimpleQueue[int] = queue.SimpleQueue()
    accept = socket.socket.accept

    def fails_once(self: socket.socket) -> object:
        if failed.empty():
            failed.put(number)
            raise OSError(number, "planted")
        return accept(self)

    with rig(monkeypatch) as served:
        monkeypatch.setattr(socket.socket, "accept", fails_once)
        served.serves()
        assert not failed.empty()
    assert "no connection can be accepted: planted" in caplog.text


STARVED = f"""
import json, os, resource, socket, sys
from spark_broker.protocol.messages import EmptyResponse
from spark_broker.transport.server import Server
from spark_broker.transport import server as server_module
server_module.DESCRIPTORS_SPARED = 0  # nobody is refused before

bugs = []
server = Server({HOST!r}, 0, lambda request: EmptyResponse(), {{}}, bugs.append)
accepting = server._pause_accepting
pauses = []
server._pause_accepting = lambda error: (pauses.append(error.errno), accepting(error))
holes = [socket.socket() for _ in range(20)]
spare = holes.pop().detach()
resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, spare + 1))  # All below it are taken.
os.close(spare)
print(server.port, flush=True)
sys.stdin.readline()
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([pauses, len(bugs), used.ru_utime + used.ru_stime]), flush=True)
for hole in holes:
    hole.close()
sys.stdin.readline()
print(json.dumps([len(bugs)]), flush=True)
"""


def test_without_descriptors_nothing_is_accepted_for_a_while_and_everybody_later() -> None:
    command = [sys.executable, "-c", STARVED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with RawPeer(port) as fits, RawPeer(port) as waits:
            fits.call(CALL)
            assert fits.receive() is not None
            waits.call(CALL)
            waits.sock.settimeout(2.0)
            with pytest.raises(TimeoutError):
                waits.receive()
            process.stdin.write("\n")
            process.stdin.flush()
            pauses, bugs, used_s = json.loads(process.stdout.readline())
            assert set(pauses) == {errno.EMFILE}
            assert 2 <= len(pauses) <= 10, "it is tried twice a second"
            assert bugs == 0
            assert used_s < 20
            waits.sock.settimeout(WAIT_S)
            assert waits.receive() is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == [0]


def test_ipv6_is_served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), rig(monkeypatch, Settings(host="::1")) as served:
        (address,) = parse_addresses((f"[::1]:{served.server.port}",))
        connection = Connection(*address)
        assert connection.address == str(address)
        assert connection.call(CALL, timeout_ms=20_000) == EmptyResponse()
        with served.peer() as peer:
            peer.frame(Operation.ANSWER)
            assert peer.receive() is not None
        assert "[::1]:" in caplog.text
        connection.close()


def test_a_port_that_is_taken_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served, pytest.raises(OSError, match="in use"):
        Server(HOST, served.server.port, lambda request: EmptyResponse(), {}, served.bugs.append)


def test_the_last_descriptors_are_for_what_the_process_itself_connects_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: silent clients had every descriptor, and a broker could not reach the controller."""
    monkeypatch.setattr("spark_broker.transport.server.DESCRIPTORS_SPARED", 1 << 40)
    server = Server(HOST, 0, lambda request: EmptyResponse(), {}, lambda error: None)
    with RawPeer(server.port) as refused, contextlib.suppress(ConnectionError):
        assert refused.receive() is None
    eventually(lambda: "hardly any descriptors left" in caplog.text, WAIT_S, "the line in the log")
    server.close()
