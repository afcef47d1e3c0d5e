"""Clients in signal handlers and in done-callbacks: a call works, or says at once that it cannot."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from spark_broker import Admin, Consumer, Producer, TopicPartition
from spark_broker.client.record_builder import RecordBuilder
from spark_broker.client.sender_machine import SenderMachine
from spark_broker.errors import (
    ClosedError,
    InvalidRecordError,
    MessageTooLargeError,
    ReentrantCallError,
    SparkBrokerError,
)
from spark_broker.model import RecordMetadata
from tests.client.fake_broker import FakeCluster
from tests.client.test_producer import Script

WAIT_S = 30.0
AT_ONCE_S = 5.0


class Attempt:
    """A call whose result, error and time are kept."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.done = threading.Event()
        self.error: SparkBrokerError | None = None
        self.took_s = 0.0

    def __call__(self, *_: object) -> None:
        if self.done.is_set():
            return
        began_s = time.monotonic()
        try:
            self._call()
        except SparkBrokerError as error:
            self.error = error
        self.took_s = time.monotonic() - began_s
        self.done.set()

    def check(self, error: type[SparkBrokerError] | None) -> None:
        assert self.done.wait(WAIT_S), "it does not return"
        assert type(self.error) is (error or type(None)), self.error
        assert self.took_s < AT_ONCE_S


@contextmanager
def on_signal(attempt: Attempt) -> Iterator[Callable[[], None]]:
    """The attempt is made in the handler of a signal that the given function raises."""
    before = signal.signal(signal.SIGUSR1, attempt)
    try:
        yield lambda: signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def interrupting(monkeypatch: pytest.MonkeyPatch, kind: type[object], name: str, attempt: Attempt) -> Iterator[None]:
    """A signal comes in the middle of this method, when the main thread is in it for the first time."""
    original, comes = getattr(kind, name), [True]

    with on_signal(attempt) as raise_signal:

        def interrupted(self: object, *given: object, **named: object) -> object:
            if threading.current_thread() is threading.main_thread() and comes:
                comes.clear()
                raise_signal()
            return original(self, *given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(kind, name, interrupted)
            yield


PRODUCER_CALLS: list[Callable[[Producer], object]] = [
    lambda producer: producer.flush(),
    lambda producer: producer.close(),
    lambda producer: producer.append("t", [{"value": b"x"}]),
]


@pytest.mark.parametrize("call", PRODUCER_CALLS)
def test_a_handler_between_calls_does_what_it_wants(cluster: FakeCluster, call: Callable[[Producer], object]) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        sent = producer.send("t", b"a")
        attempt = Attempt(lambda: call(producer))
        with on_signal(attempt) as raise_signal:
            raise_signal()
        attempt.check(None)
        assert sent.result(WAIT_S).offset == 0


def send(producer: Producer) -> object:
    return producer.send("t", b"y", partition=0)


@pytest.mark.parametrize("call", [*PRODUCER_CALLS, send])
@pytest.mark.parametrize(("kind", "name"), [(RecordBuilder, "add"), (SenderMachine, "enqueue")])
def test_a_handler_that_interrupts_a_call_is_refused_at_once(
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[object],
    name: str,
    call: Callable[[Producer], object],
) -> None:
    """Story: a deadlock, or 125 s and then REQUEST_TIMED_OUT."""
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=0) as producer:
        producer.send("t", b"first", partition=0).result(WAIT_S)
        attempt = Attempt(lambda: call(producer))
        with interrupting(monkeypatch, kind, name, attempt):
            sent = producer.send("t", b"a", partition=0)
        if call is send and kind is SenderMachine:
            attempt.check(None)  # The handler is called when the micro-batch was handed on.
        else:
            attempt.check(ReentrantCallError)
            assert "signal handler" in str(attempt.error)
        assert sent.result(WAIT_S).offset == 1
        producer.flush()


@pytest.mark.parametrize("call", PRODUCER_CALLS)
def test_a_handler_works_while_flush_waits(cluster: FakeCluster, call: Callable[[Producer], object]) -> None:
    cluster.create("t")
    gate = threading.Event()
    cluster.append_hook = Script(gate=gate)
    with Producer(cluster.bootstrap) as producer:
        sent = producer.send("t", b"a")

        def goes_on() -> None:
            gate.set()
            call(producer)

        attempt = Attempt(goes_on)
        with on_signal(attempt):
            main = threading.main_thread().ident or 0
            timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGUSR1))
            timer.start()
            producer.flush()
        attempt.check(None)
        assert sent.result(WAIT_S).offset == 0


def test_a_handler_flushes_one_producer_while_it_interrupts_another(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=60_000) as one, Producer(cluster.bootstrap) as other:
        sent = one.send("t", b"a")
        attempt = Attempt(one.flush)
        with interrupting(monkeypatch, RecordBuilder, "add", attempt):
            other.send("t", b"b")
        attempt.check(None)
        assert sent.done()


def called_back(future: Future[Any], call: Callable[[], object]) -> Attempt:
    attempt = Attempt(call)
    future.add_done_callback(attempt)
    return attempt


@pytest.mark.parametrize("call", [lambda producer: producer.flush(), lambda producer: producer.close()])
@pytest.mark.parametrize(
    "sends",
    [lambda producer: producer.send("t", b"a"), lambda producer: producer.append("t", [{"value": b"a"}], partition=0)],
)
@pytest.mark.parametrize("outcome", [None, InvalidRecordError("refused")])
def test_in_a_callback_there_is_nothing_to_wait_for_or_it_is_said_at_once(
    cluster: FakeCluster,
    call: Callable[[Producer], object],
    sends: Callable[[Producer], Future[Any]],
    outcome: SparkBrokerError | None,
) -> None:
    cluster.create("t")
    gate = threading.Event()
    with Producer(cluster.bootstrap, linger_ms=0, max_in_flight_requests_per_connection=1) as producer:
        cluster.append_hook = Script(outcome, None, outcome, gate=gate)
        busy = called_back(sends(producer), lambda: call(producer))
        later = producer.send("t", b"b")
        gate.set()
        busy.check(ReentrantCallError)
        assert "done-callback" in str(busy.error)
        assert later.result(WAIT_S).offset is not None
        producer.flush()
        gate.clear()
        last = called_back(sends(producer), lambda: call(producer))
        gate.set()
        last.check(None)


def test_close_at_once_works_in_a_callback_and_fails_the_rest(cluster: FakeCluster) -> None:
    cluster.create("t")
    gate = threading.Event()
    producer = Producer(cluster.bootstrap, linger_ms=0, max_in_flight_requests_per_connection=1)
    cluster.append_hook = Script(None, gate=gate)
    first = called_back(producer.send("t", b"a"), lambda: producer.close(0))
    second = producer.send("t", b"b")
    gate.set()
    first.check(None)
    assert isinstance(second.exception(WAIT_S), ClosedError)


def test_a_callback_of_a_record_that_fails_in_send_may_append_to_the_same_partition(cluster: FakeCluster) -> None:
    """Story: the callback ran while its thread handed the partition's records on, and waited for itself."""
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        again: list[Future[RecordMetadata]] = []
        failing = producer.send("t", b"x", partition=0)
        failing.add_done_callback(lambda _: again.append(producer.send("t", b"y" * 9000, partition=0)))
        cluster.topics["t"].config["max.message.bytes"] = "100"
        cluster.create("u")
        producer.append("u", [{"value": b"new metadata"}]).result(WAIT_S)
        producer.flush()
        assert isinstance(failing.exception(0), MessageTooLargeError)
        assert isinstance(again[0].exception(0), MessageTooLargeError)


CONSUMER_CALLS: list[Callable[[Consumer], object]] = [
    lambda consumer: consumer.close(),
    lambda consumer: consumer.commit(),
    lambda consumer: consumer.seek(TopicPartition("t", 0), 0),
]


@pytest.mark.parametrize("call", CONSUMER_CALLS)
def test_a_handler_may_close_a_consumer_that_waits(cluster: FakeCluster, call: Callable[[Consumer], object]) -> None:
    cluster.create("t")
    with Consumer(cluster.bootstrap, topics=["t"], group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.position(TopicPartition("t", 0))
        attempt = Attempt(lambda: call(consumer))
        with on_signal(attempt):
            main = threading.main_thread().ident or 0
            threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGUSR1)).start()
            try:
                assert consumer.poll(1.5) == []
            except ClosedError:
                assert call is CONSUMER_CALLS[0]
        attempt.check(None)


@pytest.mark.parametrize("call", [*CONSUMER_CALLS, lambda consumer: consumer.poll(0)])
def test_a_handler_that_interrupts_a_consumers_call_is_refused_at_once(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, call: Callable[[Consumer], object]
) -> None:
    cluster.create("t")
    with Consumer(cluster.bootstrap, topics=["t"], group_id="g", auto_offset_reset="earliest") as consumer:
        attempt = Attempt(lambda: call(consumer))
        with interrupting(monkeypatch, type(consumer._machine), "poll", attempt):
            consumer.poll(0)
        attempt.check(ReentrantCallError)
        consumer.poll(0)


def test_a_handler_that_interrupts_a_call_of_admin_is_refused_at_once(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create("t")
    with Admin(cluster.bootstrap) as admin:
        attempt = Attempt(admin.list_topics)
        with interrupting(monkeypatch, type(admin._metadata), "fetch", attempt):
            assert admin.list_topics() == ["t"]
        attempt.check(ReentrantCallError)


def test_a_handler_is_called_with_the_frame_that_it_interrupted() -> None:
    """What the rule rests on: the handler runs on the stack of what it interrupts."""
    frames: list[FrameType | None] = []
    before = signal.signal(signal.SIGUSR1, lambda _, frame: frames.append(frame))
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert frames[0] is not None
    assert frames[0].f_code.co_name == "test_a_handler_is_called_with_the_frame_that_it_interrupted"
