"""Real streams: clients that leave are noticed, clients that read nothing delay no other, ended streams are freed."""

from __future__ import annotations

import functools
import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from spark_broker.errors import InvariantError, NetworkError, RequestTimedOutError, UnknownServerError
from spark_broker.protocol.messages import EmptyResponse, FetchRequest, FetchResponse, MetadataRequest
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream
from spark_broker.transport.server import Server
from spark_broker.transport.server_stream import ServerStream
from tests.support.waiting import eventually

HOST = "127.0.0.1"
LARGE = b"x" * (1 << 20)
REQUEST = FetchRequest(1, max_wait_ms=0, min_bytes=0, max_bytes=1, partitions=[])

Handler = Callable[[ServerStream], None]


@contextmanager
def serving(handler: Handler, send_timeout_ms: int = 30_000) -> Iterator[Connection]:
    """A server of one kind of stream, and a connection to it. The server ends with the process."""
    bugs: list[BaseException] = []
    server = Server(
        HOST, 0, lambda request: EmptyResponse(), {"s": handler}, bugs.append, send_timeout_ms=send_timeout_ms
    )
    connection = Connection(HOST, server.port)
    yield connection
    connection.close()
    assert not bugs


def read(stream: ClientStream, count: int) -> list[object]:
    """Receive so many messages."""
    return [stream.receive(timeout_ms=30_000)[0] for _ in range(count)]


def test_a_handler_that_waits_is_told_when_its_client_leaves() -> None:
    gone = threading.Event()
    waiting = threading.Event()

    def handler(stream: ServerStream) -> None:
        stream.on_gone = gone.set
        waiting.set()
        assert gone.wait(30)
        assert stream.cancelled

    with serving(handler) as connection:
        stream = connection.open_stream("s")
        stream.send(REQUEST)
        assert waiting.wait(30)
        assert not gone.wait(1.0)  # longer than the server's check, which must not take a present client for gone
        stream.close()
        assert gone.wait(30)


def test_whoever_posts_answers_does_not_wait_for_a_client_that_reads_none() -> None:
    count, ahead = 100, 60
    posted = threading.Event()
    sent: queue.SimpleQueue[int] = queue.SimpleQueue()

    def send_ahead(stream: ServerStream) -> None:
        for _ in range(ahead):
            stream.send(FetchResponse(-1, []), LARGE)

    def handler(stream: ServerStream) -> None:
        blocked = threading.Thread(target=send_ahead, args=(stream,))
        blocked.start()
        eventually(lambda: stream.sending_for_s > 0.2, 30, "a client that takes nothing")
        for number in range(count):
            stream.post(FetchResponse(number, []), functools.partial(sent.put, number))
        posted.set()
        blocked.join()
        stream.receive()

    with serving(handler) as connection:
        stream = connection.open_stream("s")
        assert posted.wait(30)
        assert sent.empty()
        answers = read(stream, ahead + count)
        stream.close()

    assert [answer for answer in answers if answer != FetchResponse(-1, [])] == [
        FetchResponse(n, []) for n in range(count)
    ]
    assert [sent.get(timeout=30) for _ in range(count)] == list(range(count))


def test_a_client_that_takes_nothing_is_disconnected_and_the_sender_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    failed: queue.SimpleQueue[NetworkError] = queue.SimpleQueue()

    def handler(stream: ServerStream) -> None:
        try:
            for _ in range(200):
                stream.send(FetchResponse(1, []), LARGE)
        except NetworkError as error:
            failed.put(error)

    with serving(handler, send_timeout_ms=500) as connection:
        stream = connection.open_stream("s")
        failed.get(timeout=30)
        with pytest.raises(NetworkError):
            read(stream, 200)

    assert "has taken nothing of its s stream" in caplog.text


def test_a_client_that_reads_slowly_is_not_disconnected() -> None:
    """The time-out applies to each message, however many there are."""
    done = threading.Event()

    def handler(stream: ServerStream) -> None:
        for _ in range(60):
            stream.send(FetchResponse(1, []), LARGE)
        done.set()

    with serving(handler, send_timeout_ms=3000) as connection:
        stream = connection.open_stream("s")
        pause = threading.Event()
        for _ in range(60):
            pause.wait(0.1)
            read(stream, 1)
        assert done.wait(30)


def test_a_stream_that_is_over_and_forgotten_is_freed() -> None:
    with serving(lambda stream: stream.receive() and None) as connection:
        streams = [connection.open_stream("s") for _ in range(10)]
        left = [weakref.ref(stream) for stream in streams]
        for stream in streams:
            stream.close()
        del stream, streams

        def freed() -> bool:
            gc.collect()
            return not any(reference() for reference in left)

        eventually(freed, 30, "the end of every stream")


@pytest.mark.parametrize(("error", "ends"), [(TypeError("nobody thought of it"), False), (InvariantError("x"), True)])
def test_an_error_that_nobody_expects_ends_the_call_and_a_broken_invariant_the_process(
    error: Exception, ends: bool
) -> None:
    """Story: what one peer sent ended a broker for everybody."""
    bugs: list[BaseException] = []

    def fail(_: object) -> NoReturn:
        raise error

    server = Server(HOST, 0, fail, {"s": fail}, bugs.append)
    connection = Connection(HOST, server.port)
    with pytest.raises(UnknownServerError, match=type(error).__name__):
        connection.call(MetadataRequest(None), timeout_ms=30_000)
    stream = connection.open_stream("s")
    with pytest.raises(UnknownServerError, match=type(error).__name__):
        stream.receive(timeout_ms=30_000)
    connection.close()
    assert bugs == [error, error][: 2 * ends]


def test_a_deadline_beyond_every_clock_is_no_error() -> None:
    """Story: the thread that looks at deadlines ended with an OverflowError, and no call of the process timed out."""
    received: queue.SimpleQueue[object] = queue.SimpleQueue()

    def handler(stream: ServerStream) -> None:
        while stream.receive() is not None:
            stream.send(FetchResponse(1, []))

    with serving(handler) as connection:
        patient, stream = connection.open_stream("s"), connection.open_stream("s")
        waiting = threading.Thread(target=lambda: received.put(patient.receive(timeout_ms=1 << 62)), daemon=True)
        waiting.start()
        with pytest.raises(RequestTimedOutError):
            stream.receive(timeout_ms=200)
        patient.send(REQUEST)
        waiting.join(30)
        assert not received.empty()
