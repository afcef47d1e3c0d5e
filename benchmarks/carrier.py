"""The carrier alone: what a message and its answer cost between two processes, without a broker behind them.

A bare TCP socket, with a thread for each connection and blocking calls, shows what is possible in Python; the same with
the standard library's TLS shows what encryption would cost. The figures of a pair of processes count both of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.figures import Figure
from spark_broker.broker.process import SWITCH_INTERVAL_S
from spark_broker.protocol.messages import EmptyResponse, FetchRequest, FetchResponse
from spark_broker.transport.client_stream import ClientStream
from spark_broker.transport.server import Server
from spark_broker.transport.server_stream import ServerStream

HOST = "127.0.0.1"
REQUEST = FetchRequest(1, max_wait_ms=0, min_bytes=0, max_bytes=1, partitions=[])
ANSWER = FetchResponse(1, [])
SMALL, LARGE = bytes(200), bytes(1_200_000)
IN_FLIGHT = 50
ROUND_TRIPS, MESSAGES, LARGE_MESSAGES = 20_000, 100_000, 2_000
HEAD = 4
"""Bytes of the length that precedes a message on a bare socket."""


class CarrierFigures(msgspec.Struct, frozen=True):
    """`p50_us`, `p99_us`: of a round trip of 200 bytes. `per_s`: such messages, 50 at a time. `processor_us`: of one of
    them, client and server together. `gb_per_s`: messages of 1.2 MB, each answered by a short one.
    """

    name: str
    p50_us: float
    p99_us: float
    per_s: float
    processor_us: float
    gb_per_s: float


def measure_carrier() -> list[CarrierFigures]:
    """Ours, a bare socket, and a bare socket with TLS, if this machine has `openssl` to make a certificate."""
    measured = [_measured("our frames", _serve_frames, _frames), _measured("a bare socket", _serve_bare, _bare(None))]
    if shutil.which("openssl") is None:
        return measured
    with TemporaryDirectory(prefix="carrier-") as directory:
        certificate, key = Path(directory) / "certificate.pem", Path(directory) / "key.pem"
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
        make += ["-addext", f"subjectAltName=IP:{HOST}", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(make, check=True, capture_output=True)
        trusted = ssl.create_default_context(cafile=str(certificate))
        return [*measured, _measured("a bare socket, TLS", _serve_tls(certificate, key), _bare(trusted))]


Serve = Callable[[Pipe], None]
"""In a process of its own: send the port, then serve until the other end of the pipe is closed."""

Exchange = Callable[[bytes, int, int], float]
"""Exchange so many messages with this payload, of which so many are in flight; returns the seconds."""

Open = Callable[[int], contextlib.AbstractContextManager[Exchange]]


def _measured(name: str, serve: Serve, connect: Open) -> CarrierFigures:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        with connect(int(ours.recv())) as exchange:
            exchange(SMALL, ROUND_TRIPS // 10, 1)
            trips = sorted(exchange(SMALL, 1, 1) * 1e6 for _ in range(ROUND_TRIPS))
            used_s = _processor_s(server.pid)
            small_s = exchange(SMALL, MESSAGES, IN_FLIGHT)
            used_s = _processor_s(server.pid) - used_s
            large_s = exchange(LARGE, LARGE_MESSAGES, 4)
    finally:
        server.terminate()
        server.join()
    return CarrierFigures(
        name,
        round(statistics.median(trips), 1),
        round(trips[ROUND_TRIPS * 99 // 100], 1),
        round(MESSAGES / small_s),
        round(used_s / MESSAGES * 1e6, 1),
        round(LARGE_MESSAGES * len(LARGE) / large_s / 1e9, 2),
    )


def _processor_s(pid: int | None) -> float:
    """Of this process and that one."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
    theirs = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return theirs + mine.ru_utime + mine.ru_stime


def _exchange(send: Callable[[bytes], None], receive: Callable[[], object]) -> Exchange:
    """So many messages are sent, then as many answers received: the peer works on them meanwhile."""

    def exchange(payload: bytes, count: int, in_flight: int) -> float:
        began = time.perf_counter()
        for _ in range(count // in_flight):
            for _ in range(in_flight):
                send(payload)
            for _ in range(in_flight):
                receive()
        return time.perf_counter() - began

    return exchange


def _serve_frames(pipe: Pipe) -> None:
    def echo(stream: ServerStream) -> None:
        while stream.receive() is not None:
            stream.send(ANSWER)

    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as a broker does
    server = Server(HOST, 0, lambda _: EmptyResponse(), {"echo": echo}, _raise)
    pipe.send(server.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


@contextmanager
def _frames(port: int) -> Iterator[Exchange]:
    stream = ClientStream(HOST, port, "echo")
    try:
        yield _exchange(lambda payload: stream.send(REQUEST, payload), lambda: stream.receive(timeout_ms=60_000))
    finally:
        stream.close()


def _serve_bare(pipe: Pipe) -> None:
    _serve_sockets(pipe, lambda accepted: accepted)


def _serve_tls(certificate: Path, key: Path) -> Serve:
    def serve(pipe: Pipe) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        _serve_sockets(pipe, lambda accepted: context.wrap_socket(accepted, server_side=True))

    return serve


def _serve_sockets(pipe: Pipe, wrapped: Callable[[socket.socket], socket.socket]) -> None:
    listener = socket.create_server((HOST, 0))
    pipe.send(listener.getsockname()[1])
    accepted, _ = listener.accept()
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with wrapped(accepted) as connection, contextlib.suppress(ConnectionError):
        scratch = bytearray(len(LARGE))
        while _received(connection, scratch):
            connection.sendall(HEAD.to_bytes(HEAD, "little") + bytes(HEAD))


def _bare(trusted: ssl.SSLContext | None) -> Open:
    @contextmanager
    def connect(port: int) -> Iterator[Exchange]:
        connection = socket.create_connection((HOST, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if trusted is not None:
            connection = trusted.wrap_socket(connection, server_hostname=HOST)
        scratch = bytearray(64)
        with connection:
            yield _exchange(
                lambda payload: connection.sendall(len(payload).to_bytes(HEAD, "little") + payload),
                lambda: _received(connection, scratch),
            )

    return connect


def _received(connection: socket.socket, scratch: bytearray) -> bool:
    """Receive one message into the scratch. False: the peer has left."""
    view = memoryview(scratch)
    if not _filled(connection, view[:HEAD]):
        return False
    return _filled(connection, view[: int.from_bytes(view[:HEAD], "little")])


def _filled(connection: socket.socket, view: memoryview) -> bool:
    while view:
        count = connection.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


def _raise(error: BaseException) -> None:
    raise error


def figures(measured: list[CarrierFigures]) -> list[Figure]:
    """A line for each carrier."""
    return [
        Figure(
            f"a message of 200 bytes and its answer, {row.name}",
            f"p50 {row.p50_us:.0f}, p99 {row.p99_us:.0f} µs; {row.per_s:,.0f} messages/s in groups of {IN_FLIGHT}, "
            f"{row.processor_us:.1f} µs of processor time each (client and server); of 1.2 MB: {row.gb_per_s:.1f} GB/s",
        )
        for row in measured
    ]
