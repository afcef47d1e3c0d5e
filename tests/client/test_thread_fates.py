"""A thread of a client that dies is an error of the user's next call, and no Future is left open."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from spark_broker import Consumer, Producer, TopicPartition
from spark_broker.client import reachability
from spark_broker.client.fetcher import LeaderFetcher
from spark_broker.client.reachability import Unanswered, explained, no_broker_answered
from spark_broker.client.settings import Address
from spark_broker.errors import ClientEndedError, NetworkError, RequestTimedOutError
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.messages import AppendRequest
from tests.client.fake_broker import FakeCluster, StoreSilently
from tests.support.no_threads import no_threads

WAIT_S = 20.0


def fail(*_: object, **__: object) -> None:
    raise ValueError("nobody expects this")


def out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError


def poll_on(consumer: Consumer) -> None:
    """Poll until it raises."""
    for _ in range(20):
        consumer.poll(1.0)


def break_deadlines(producer: Producer, patch: pytest.MonkeyPatch) -> None:
    sender = producer._sender
    patch.setattr(sender._machine, "tick", fail)
    with sender.lock:
        sender._machine.due_ms = 0
        sender._sooner.notify()


def break_receiving(producer: Producer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(producer._sender, "answered", fail)


BREAK = {"deadlines": break_deadlines, "receive": break_receiving}


@pytest.mark.parametrize("thread", BREAK)
def test_what_waits_fails_and_so_does_the_next_append(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    cluster.create("t", 1)
    producer = Producer(cluster.bootstrap, linger_ms=0, delivery_timeout_ms=40_000, request_timeout_ms=30_000)
    producer.append("t", [{"value": b"x"}]).result(WAIT_S)
    cluster.append_hook = lambda broker, request, header: StoreSilently() if thread == "deadlines" else None
    BREAK[thread](producer, monkeypatch)
    future = producer.append("t", [{"value": b"x"}])
    with pytest.raises(ClientEndedError, match=f"{thread}.* ended: ValueError: nobody expects this"):
        future.result(WAIT_S)
    with pytest.raises(ClientEndedError):
        producer.append("t", [{"value": b"x"}]).result(WAIT_S)
    with pytest.raises(ClientEndedError):
        producer.flush()
    producer.close()


@pytest.mark.parametrize("error", [fail, out_of_memory])
def test_records_of_send_that_wait_fail_too(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, error: Callable[..., None]
) -> None:
    cluster.create("t", 1)
    producer = Producer(cluster.bootstrap, linger_ms=20)
    monkeypatch.setattr(producer._sender, "enqueue", error)
    futures: list[Future[object]] = [producer.send("t", value=b"x") for _ in range(3)]  # type: ignore[misc]
    for future in futures:
        with pytest.raises(ClientEndedError, match="linger ended"):
            future.result(WAIT_S)
    with pytest.raises(ClientEndedError):
        producer.flush()
    producer.close()


def test_poll_raises_what_ended_a_fetching_thread(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.create("t", 1)
    monkeypatch.setattr(LeaderFetcher, "_carry_out", fail)
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition("t", 0)])
        for _ in range(2):
            with pytest.raises(ClientEndedError, match=r"fetch-.* ended: ValueError"):
                poll_on(consumer)


def test_poll_raises_what_ended_the_thread_that_asks(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.create("t", 1)
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        monkeypatch.setattr(consumer._threads, "_ask", out_of_memory)
        consumer.assign([TopicPartition("t", 0)])
        with pytest.raises(ClientEndedError, match="work ended: MemoryError; "):
            poll_on(consumer)


def test_a_probe_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability._Probe, "_look", fail)
    asked = [Unanswered(Address("127.0.0.1", 1), RequestTimedOutError("late"))]
    assert "could not be probed: ValueError" in str(explained(no_broker_answered(asked), asked))


def test_without_a_thread_for_a_probe_the_error_is_the_one_that_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Unanswered(Address("127.0.0.1", 1), RequestTimedOutError("late"))]
    with no_threads(monkeypatch):
        error = explained(no_broker_answered(asked), asked)
    assert isinstance(error, RequestTimedOutError)
    assert "127.0.0.1:1 could not be probed: NoThreadError" in str(error)


def leave() -> None:
    sys.exit(1)


def stop() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", [leave, stop])
@pytest.mark.parametrize("kind", ["send", "append"])
def test_a_callback_that_wants_to_end_the_process_ends_no_thread_of_the_client(
    cluster: FakeCluster, end: Callable[[], None], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: `sys.exit` in a callback ended the thread that reports outcomes, without a word."""
    cluster.create("t", 1)
    gate = threading.Event()

    def wait(broker: int, request: AppendRequest, header: BatchHeader) -> None:
        gate.wait(60)

    cluster.append_hook = wait
    with Producer(cluster.bootstrap, linger_ms=50) as producer:
        first = producer.send("t", b"a") if kind == "send" else producer.append("t", [{"value": b"a"}])
        beside = producer.send("t", b"b")
        first.add_done_callback(lambda future: end())
        gate.set()
        assert beside.result(30).offset == 1
        assert producer.send("t", b"c").result(30).offset == 2
        producer.flush(30)
    assert "a done-callback raised" in caplog.text


def test_a_client_without_descriptors_does_not_call_a_machine_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "create_connection", refuse)
    asked = [Unanswered(Address("127.0.0.1", 1), NetworkError("127.0.0.1:1: Too many open files"))]
    said = str(explained(no_broker_answered(asked), asked))
    assert "127.0.0.1:1 cannot be asked: this process has no descriptor left" in said
