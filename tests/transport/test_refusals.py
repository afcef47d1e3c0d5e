"""What is refused is refused with a reason that reaches its sender, and concerns nobody else."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from spark_broker.errors import InvalidRequestError, NetworkError, SparkBrokerError, UnsupportedVersionError
from spark_broker.protocol import wire
from spark_broker.protocol.messages import PROTOCOL_VERSION, EmptyResponse
from spark_broker.transport.client import Connection
from spark_broker.transport.foreign_peers import SPEAKS, UPGRADE, foreign_peer
from spark_broker.transport.frames import FRAME_OVERHEAD_BYTES, HEADER_BYTES, Operation, encode
from spark_broker.transport.hello import Hello, hello
from spark_broker.transport.server import Server
from spark_broker.transport.server_stream import ServerStream
from tests.support.raw_peer import RawPeer, joined, refusal
from tests.support.waiting import eventually
from tests.transport.rig import CALL, HOST, REQUEST, WAIT_S, Settings, rig

OTHER_VERSION = joined(
    encode(Operation.HELLO, msgspec.msgpack.encode(Hello("spark-broker", PROTOCOL_VERSION + 1, "c", "s")))
)
BOTH_VERSIONS = f"version {PROTOCOL_VERSION + 1}, this process {PROTOCOL_VERSION}"


def refused(peer: RawPeer) -> SparkBrokerError:
    """Why the server has ended this connection, without a doubt: it says so, and nothing else, and closes it."""
    (frame,) = peer.frames()
    assert frame.header.operation is Operation.END
    assert not frame.header.stream
    return refusal(frame)


def test_a_hello_of_another_version_gets_both_versions_and_nothing_behind_it_is_worked_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Story: what came with the hello in one piece was served before the connection was closed."""
    with rig(monkeypatch) as served, served.peer(greet=False) as peer:
        before = served.calls
        call = joined(encode(Operation.CALL, wire.encode(CALL), correlation=1))
        peer.write(OTHER_VERSION + call * 10)
        error = refused(peer)
        assert type(error) is UnsupportedVersionError
        assert BOTH_VERSIONS in error.message
        assert served.calls == before


WITHOUT_A_PLACE = (
    (joined(encode(Operation.HELLO, b"\xc1")), "does not decode"),
    (joined(encode(Operation.HELLO, b"")), "does not decode"),
    (joined(encode(Operation.HELLO, msgspec.msgpack.encode(Hello("kafka", 4)))), "a hello of 'kafka'"),
    (joined(encode(Operation.HELLO, bytes(5000))), "begins with a hello"),
    (joined(encode(Operation.HELLO, b"", bytes(2**20)))[:100], "begins with a hello"),
    (joined(encode(Operation.CALL, wire.encode(CALL))), "begins with a hello"),
    (joined(encode(Operation.OPEN, b"echo", stream=1)), "begins with a hello"),
    (joined(hello() + hello()), "sends no HELLO"),
    (joined(hello() + encode(Operation.ANSWER)), "sends no ANSWER"),
    (joined(hello() + encode(Operation.END, stream=1)), "sends no END"),
    (joined(hello()) + b"GET / HTTP/1.1\r\n\r\n..", "begins with b'GET / HT"),
    (joined(hello()) + b"SB\x03\x01" + bytes(16), "flags 0x1"),
    (joined(hello()) + b"SB\x63\x00" + bytes(16), "operation 99"),
    (joined(hello()) + b"SB\x05\x00" + (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + bytes(8), "frame of"),
    (joined(hello() + encode(Operation.OPEN, b"echo", stream=0)), "open already"),
    (joined(hello() + encode(Operation.OPEN, b"echo", stream=1) * 2), "open already"),
)


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_a_frame_that_has_no_place_ends_its_connection_and_says_why(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    with rig(monkeypatch) as served:
        for sent, says in WITHOUT_A_PLACE:
            with served.peer(greet=False) as peer:
                write_in_pieces(peer, sent, piece)
                error = refused(peer)
            assert type(error) is InvalidRequestError
            assert says in error.message


def write_in_pieces(peer: RawPeer, data: bytes, piece: int) -> None:
    peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(0, len(data), piece):
        peer.write(data[at : at + piece])


def test_a_message_that_is_too_large_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    header = joined(encode(Operation.CALL, wire.encode(CALL)))[:HEADER_BYTES]
    with rig(monkeypatch, Settings(max_request_bytes=1000)) as served:
        for size in (1001, 2**27, 2**32 - 1):
            with served.peer() as peer:
                peer.write(header[:4] + size.to_bytes(4, "little") + header[8:])
                assert f"a message of {size} bytes; 1000 are allowed" in refused(peer).message
                assert not served.used_bytes


def test_a_client_that_is_writing_a_message_that_is_too_large_reads_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed at once, the connection would be reset, and what was said before would be lost."""
    with rig(monkeypatch, Settings(max_request_bytes=1000)) as served:
        connection = Connection(HOST, served.server.port)
        for _ in range(20):
            stream = connection.open_stream("held")
            with contextlib.suppress(InvalidRequestError):  # Everything may have been thrown away by then.
                stream.send(REQUEST, bytes(20_000_000))
            with pytest.raises(InvalidRequestError, match="1000 are allowed"):
                stream.receive(timeout_ms=20_000)
        assert connection.call(CALL, timeout_ms=20_000) == EmptyResponse()
        connection.close()


def test_answers_that_come_after_a_refusal_do_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the handler of another stream wrote behind the refusal, the connection broke, and the reason was lost."""
    with rig(monkeypatch) as served, served.peer() as peer:
        served.calls_go_on.clear()
        peer.call(CALL)
        peer.open("held")
        peer.message(REQUEST)
        assert served.taken.get(timeout=WAIT_S)
        peer.write(b"no frame at all, but bytes")
        said = peer.receive()
        served.calls_go_on.set()
        served.await_used(len(wire.encode(REQUEST)) + FRAME_OVERHEAD_BYTES)  # The call was worked on.
        peer.write(bytes(100_000))
        assert "a frame that begins with b'no frame" in refusal(said).message
        assert peer.receive() is None


def test_the_error_of_a_handler_reaches_a_client_that_keeps_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served:
        connection = Connection(HOST, served.server.port)
        stream, other = connection.open_stream("refuse"), connection.open_stream("echo")
        stop = threading.Event()

        def write() -> None:
            with contextlib.suppress(InvalidRequestError):  # whoever sends learns it, too
                while not stop.is_set():
                    stream.send(REQUEST, bytes(100_000))

        writer = threading.Thread(target=write)
        writer.start()
        with pytest.raises(InvalidRequestError, match="this handler refuses everything"):
            stream.receive(timeout_ms=20_000)
        for _ in range(100):
            other.send(REQUEST)
            other.receive(timeout_ms=20_000)
        stop.set()
        writer.join(WAIT_S)
        connection.close()
        stream.close()
        other.close()


@contextmanager
def answering(said: bytes, *, closes: bool = False) -> Iterator[int]:
    """A server that says one thing to whoever connects, and may hang up once it was spoken to. Yields its port."""
    with socket.create_server((HOST, 0)) as listening:

        def serve() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.sendall(said)
                while peer.recv(65_536) and not closes:
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(WAIT_S)


@pytest.mark.parametrize(
    ("said", "who"),
    [
        (b"\0\0\x18\x04\0\0\0\0\0" + bytes(24), r"a broker of spark-broker before version 4 \(upgrade it\)"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a web server"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "a server of SSH"),
        (b"220 mail.example.org ESMTP\r\n", "a frame that begins with b'220 mail'"),
    ],
)
def test_a_client_says_who_seems_to_answer_in_the_place_of_a_broker(said: bytes, who: str) -> None:
    """A broker before version 4 says first what gRPC says: SETTINGS of HTTP/2."""
    with answering(said) as port:
        connection = Connection(HOST, port)
        with pytest.raises(NetworkError, match=who):
            connection.call(CALL, timeout_ms=20_000)
        connection.close()


ALERT = b"\x15\x03\x03\0\x02\x02\x46"


@pytest.mark.parametrize(
    ("said", "who"),
    [(ALERT, "a server of TLS"), (b"220 \r\n", "a frame that begins with b'220"), (b"\0", "begins with b'.x00'")],
)
@pytest.mark.parametrize("closes", [True, False])
def test_a_client_says_who_has_answered_however_little_that_was(said: bytes, who: str, closes: bool) -> None:
    """Story: an alert of TLS has seven bytes. A client waited for twelve, and told of a broker that is overloaded."""
    with answering(said, closes=closes) as port:
        connection = Connection(HOST, port)
        with pytest.raises(NetworkError, match=who) as caught:
            connection.call(CALL, timeout_ms=20_000 if closes else 300)
        connection.close()
    assert caught.value.foreign


@pytest.mark.parametrize("said", [ALERT, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_stream_says_who_has_answered(said: bytes) -> None:
    with answering(said, closes=True) as port:
        stream = Connection(HOST, port).open_stream("echo")
        with pytest.raises(NetworkError, match=r"a server of TLS|a web server") as caught:
            stream.receive(timeout_ms=20_000)
        stream.close()
    assert caught.value.foreign


@pytest.mark.parametrize("said", [b"", b"S", b"SB\x01", joined(hello()), joined(hello()) + b"220 \r\n"])
def test_a_peer_that_may_be_a_broker_is_not_called_another_server(said: bytes) -> None:
    """It may just be ending."""
    with answering(said, closes=True) as port:
        connection = Connection(HOST, port)
        with pytest.raises(NetworkError) as caught:
            connection.call(CALL, timeout_ms=20_000)
        connection.close()
    assert not caught.value.foreign


def test_a_client_says_which_versions_it_and_its_server_speak() -> None:
    with answering(OTHER_VERSION) as port:
        connection = Connection(HOST, port)
        with pytest.raises(UnsupportedVersionError, match=BOTH_VERSIONS):
            connection.call(CALL, timeout_ms=20_000)
        connection.close()


@pytest.mark.parametrize(
    "said",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18), b"SB" + bytes(30)],
)
def test_a_client_of_something_else_gets_an_error_at_once(said: bytes) -> None:
    with answering(said) as port:
        connection = Connection(HOST, port)
        with pytest.raises(NetworkError, match="a frame"):
            connection.call(CALL, timeout_ms=60_000)
        connection.close()


OLD_CLIENT = """
import sys
import pyarrow.flight as flight

client = flight.FlightClient(f"grpc://127.0.0.1:{sys.argv[1]}")
append = flight.FlightDescriptor.for_command(b"append/3")
for _ in range(3):
    for use in (
        lambda: next(iter(client.do_action(flight.Action("call", b"x"), flight.FlightCallOptions(timeout=20)))),
        lambda: client.do_exchange(append, flight.FlightCallOptions(timeout=20))[1].read_chunk(),
    ):
        try:
            use()
        except flight.FlightError as error:
            print(type(error).__name__, str(error).splitlines()[0], flush=True)
"""


def test_a_client_of_an_earlier_version_shows_its_user_that_it_is_to_be_upgraded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: it was refused as a whole, and connected a thousand times a second until its own deadline, silently."""
    caplog.set_level(logging.INFO)
    with rig(monkeypatch) as served:
        command = [sys.executable, "-c", OLD_CLIENT, str(served.server.port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        lines = ended.stdout.splitlines()
        assert len(lines) == 6
        assert all(line.startswith("FlightUnavailableError") and UPGRADE in line for line in lines), lines
    assert caplog.text.count("a client of spark-broker before version 4") == 1


@pytest.mark.parametrize("piece", [1, 5, 23, 24, 25, 40, 1000])
def test_each_call_of_an_old_client_is_refused_however_its_bytes_arrive(piece: int) -> None:
    frames = [(4, 0, b""), (8, 0, bytes(4)), (1, 1, b"h" * 20), (0, 1, b"d" * 90), (1, 3, b""), (6, 0, bytes(8))]
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(http2(*frame) for frame in frames)
    first = max(piece, 12)
    peer = foreign_peer(sent[:first])
    assert peer.answer is not None
    said = peer.said + b"".join(peer.answer(sent[at : at + piece]) for at in range(first, len(sent), piece))
    answers = list(http2_frames(said))
    assert [(kind, flags, stream) for kind, flags, stream, _ in answers] == [(4, 0, 0), (4, 1, 0), (1, 5, 1), (1, 5, 3)]
    assert all(UPGRADE.encode() in payload for kind, _, _, payload in answers if kind == 1)


def test_an_old_client_that_calls_without_end_is_answered_a_bounded_number_of_times() -> None:
    peer = foreign_peer(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert peer.answer is not None
    said = b"".join(peer.answer(http2(1, 2 * number + 1, b"") * 10) for number in range(1000))
    assert len(list(http2_frames(said))) == 100
    assert (
        foreign_peer(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff" + bytes(10_000)).said.count(UPGRADE.encode()) == 0
    )


def http2(kind: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") + payload


def http2_frames(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    while data:
        end = 9 + int.from_bytes(data[:3], "big")
        yield data[3], data[4], int.from_bytes(data[5:9], "big"), data[9:end]
        data = data[end:]


def test_a_browser_reads_what_this_port_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served:
        for method in ("GET", "POST", "HEAD", "PUT", "OPTIONS", "DELETE", "PATCH", "CONNECT"):
            browser = http.client.HTTPConnection(HOST, served.server.port, timeout=WAIT_S)
            browser.request(method, "/", body=b"x" * 100_000 if method == "POST" else None)
            answer = browser.getresponse()
            assert answer.status == 400
            assert answer.read().decode() == ("" if method == "HEAD" else f"{SPEAKS}, not HTTP\n")
            browser.close()


def test_a_request_of_http_is_answered_however_short_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served:
        for sent in (b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.0\r\nHost: x\r\n\r\n"):
            for piece in (1, 4, 11, 100):
                with served.peer(greet=False) as peer:
                    write_in_pieces(peer, sent, piece)
                    assert SPEAKS.encode() in peer.bytes_until_closed()


def test_a_client_of_tls_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        rig(monkeypatch) as served,
        served.peer(greet=False) as peer,
        pytest.raises(OSError, match=r"EOF|reset|closed"),
    ):
        context.wrap_socket(peer.sock)
    assert "a client of TLS" in caplog.text


def test_a_stream_of_a_kind_that_does_not_exist_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served, served.peer() as peer:
        peer.open("x" * 4000, stream=7)
        end = peer.receive()
        assert end is not None
        assert (end.header.operation, end.header.stream) == (Operation.END, 7)
        assert "unknown stream 'xxx" in refusal(end).message
        peer.open("echo", stream=7)
        peer.message(REQUEST, stream=7)
        assert peer.receive() is not None


@pytest.mark.parametrize("where", ["gone", "sent"])
def test_an_error_of_ours_while_bytes_are_moved_ends_the_server(where: str) -> None:
    """asyncio alone would log it, and go on without the connection."""
    planted = RuntimeError("planted")
    bugs: list[BaseException] = []

    def fail() -> None:
        raise planted

    def handler(stream: ServerStream) -> None:
        stream.on_gone = fail if where == "gone" else None
        stream.receive()
        stream.post(EmptyResponse(), fail if where == "sent" else lambda: None)
        stream.receive()

    server = Server(HOST, 0, lambda request: EmptyResponse(), {"fails": handler}, bugs.append)
    with RawPeer(server.port) as peer, RawPeer(server.port) as other:
        peer.open("fails")
        peer.message(REQUEST)
        assert peer.receive() is not None
        peer.frame(Operation.CANCEL, stream=1)
        assert other.receive() is None
    eventually(lambda: bugs, WAIT_S, "the error")
    assert bugs == [planted]
    with pytest.raises(ConnectionRefusedError):
        RawPeer(server.port)
