"""Ctrl-C and alarms in the middle of a producer's calls: it goes on, and nothing is lost, stored twice or mixed up."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import pytest

from spark_broker import Producer, RecordMetadata
from spark_broker.interrupts import Turn, interruptible, uninterrupted, wait_no_more
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.messages import AppendRequest, CallRequest, EndTransactionRequest, Message
from tests.client.fake_broker import FakeCluster
from tests.support.alarms import Stop, alarms_stop

ROUNDS = 150

pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function (WeakSet|gc_cumulative_time):pytest.PytestUnraisableExceptionWarning"
)
"""Where the signal comes in the callback of a weak reference, or of the garbage collector (Hypothesis has one), Python
itself throws away what its handler raises.
"""


@pytest.fixture(autouse=True)
def _alarms() -> Iterator[None]:
    with alarms_stop():
        yield


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """What is in the block may be ended by Stop. Stop may also come while the block is entered or left: `suppress` it
    around this.
    """
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def headers_of(value: object) -> list[dict[str, object]]:
    return [{"key": "h", "value": value}]


@pytest.mark.parametrize(("linger_ms", "buffer_memory"), [(0, 1 << 25), (5, 1 << 25), (5, 20_000)])
def test_a_producer_that_is_interrupted_anywhere_goes_on(
    cluster: FakeCluster, linger_ms: int, buffer_memory: int
) -> None:
    """Story: after one Ctrl-C in `send`, the next `send` waited for ever for a lock that nobody held any more."""
    cluster.create("t", 2)
    chance = random.Random(linger_ms + buffer_memory)
    futures: dict[bytes, Future[RecordMetadata] | None] = {}
    sent = 0

    def send_some() -> None:
        nonlocal sent
        for _ in range(chance.choice([1, 50, 300])):
            value = b"%d" % sent
            sent += 1
            futures[value] = None
            futures[value] = producer.send("t", value, key=value, headers={"h": value})

    with Producer(cluster.bootstrap, linger_ms=linger_ms, batch_size=500, buffer_memory=buffer_memory) as producer:
        for _ in range(ROUNDS):
            with suppress(Stop), interrupted_after(chance.uniform(1e-5, 0.01)):
                chance.choice([send_some, send_some, producer.flush])()
        producer.flush(30)
        results = {value: future for value, future in futures.items() if future is not None}
        assert all(future.done() for future in results.values())
        assert [str(future.exception()) for future in results.values() if future.exception()] == []
    rows = [row for number in (0, 1) for row in cluster.rows("t", number)]
    assert [row for row in rows if row["key"] != row["value"] or row["headers"] != headers_of(row["value"])] == []
    stored = Counter(row["value"] for row in rows)
    assert set(results) <= set(stored), "what was handed out is stored"
    assert set(stored) <= set(futures)
    assert stored.total() == len(stored), "once"


def test_a_close_that_is_interrupted_is_finished_by_the_next(cluster: FakeCluster) -> None:
    cluster.create("t", 1)
    producer = Producer(cluster.bootstrap, linger_ms=60_000)
    gate = threading.Event()

    def wait(broker: int, request: AppendRequest, header: BatchHeader) -> None:
        gate.wait(60)

    cluster.append_hook = wait
    future = producer.send("t", b"x")
    with suppress(Stop), interrupted_after(0.2):
        producer.close()
    assert not future.done()
    gate.set()
    producer.close()
    assert future.result(0).offset == 0
    assert [row["value"] for row in cluster.rows("t", 0)] == [b"x"]


def test_a_step_ends_before_a_handler_is_called_and_a_wait_does_not() -> None:
    done = []
    with pytest.raises(Stop), uninterrupted():  # noqa: PT012
        signal.raise_signal(signal.SIGALRM)
        done.append("the step")
    assert done == ["the step"]
    with pytest.raises(Stop) as raised, uninterrupted() as block, interruptible():  # noqa: PT012
        signal.raise_signal(signal.SIGALRM)
        done.append("never")
    assert raised.value is block.raised
    assert done == ["the step"]
    with pytest.raises(Stop):
        signal.raise_signal(signal.SIGALRM)


def test_every_signal_that_came_is_handled() -> None:
    """Story: an alarm and Ctrl-C came within one step. The alarm's handler raised, and Ctrl-C was gone."""
    came = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        raise Stop

    before = {number: signal.signal(number, note) for number in (signal.SIGALRM, signal.SIGUSR1)}
    try:
        with suppress(Stop), suppress(Stop), uninterrupted():
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGALRM, signal.SIGUSR1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_part_that_has_to_be_done_as_a_whole_ends_with_its_block() -> None:
    with pytest.raises(Stop), uninterrupted():  # noqa: PT012
        with uninterrupted():
            wait_no_more()
            with interruptible():
                signal.raise_signal(signal.SIGALRM)
        with interruptible():
            pytest.fail("the handler is called before")


def test_a_users_code_can_be_ended_again_on_the_way_out() -> None:
    """Story: the second Ctrl-C in a consumer's `close` did not end its listener, which waited for a dead database."""
    with pytest.raises(Stop), uninterrupted():  # noqa: PT012
        try:
            with interruptible():
                signal.raise_signal(signal.SIGALRM)
        finally:
            with suppress(Stop), interruptible(anew=True):
                signal.raise_signal(signal.SIGALRM)
                pytest.fail("the handler is called at once")


def test_a_wait_that_catches_what_a_handler_raised_can_be_ended_again() -> None:
    with pytest.raises(Stop), uninterrupted():  # noqa: PT012
        with interruptible(), suppress(Stop):
            signal.raise_signal(signal.SIGALRM)
        with interruptible():
            signal.raise_signal(signal.SIGALRM)
            pytest.fail("the handler is called at once")


def test_a_turn_that_an_interrupted_thread_has_got_is_the_next_ones() -> None:
    """Story: the thread that was notified left by Ctrl-C, and the next one waited for ever."""
    turn, got = Turn(), threading.Event()
    assert turn.take()

    def wait_for_it() -> None:
        turn.take()
        got.set()

    def give_back_and_interrupt(number: int, frame: object) -> None:
        turn.give_back()  # This thread is notified, and leaves all the same.
        raise Stop

    signal.signal(signal.SIGALRM, give_back_and_interrupt)
    waiting = threading.Timer(0.2, wait_for_it)
    waiting.start()
    with suppress(Stop), interrupted_after(0.5), uninterrupted():
        turn.take()
    assert got.wait(10.0)
    waiting.join()


@pytest.mark.parametrize("ends", ["commit_transaction", "abort_transaction"])
def test_the_end_of_a_transaction_can_be_ended_while_brokers_are_frozen(cluster: FakeCluster, ends: str) -> None:
    """Story: after `send`, Ctrl-C did nothing for minutes."""
    cluster.create("t", 1)
    gate = threading.Event()

    def wait(broker: int, request: AppendRequest, header: BatchHeader) -> None:
        gate.wait(60)

    def hold(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, EndTransactionRequest):
            gate.wait(60)
        return None

    with Producer(cluster.bootstrap, transactional_id="x", linger_ms=60_000) as producer:
        producer.begin_transaction()
        producer.send("t", b"x")
        cluster.append_hook = wait
        cluster.call_hook = hold
        began_s = time.monotonic()
        with suppress(Stop), interrupted_after(0.3):
            getattr(producer, ends)()
        assert time.monotonic() - began_s < 10, "it waits on"
        gate.set()
        if ends == "commit_transaction":
            producer.abort_transaction()


def test_a_child_that_another_thread_forks_has_the_callers_handlers() -> None:
    """Story: in a child that a thread had forked while the main thread polled, Ctrl-C did nothing."""
    command = [sys.executable, "-c", FORKS_IN_A_THREAD]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == ["handled"], ended.stderr


FORKS_IN_A_THREAD = """
import os, signal, threading
from spark_broker.interrupts import uninterrupted

def fork():
    if not os.fork():
        signal.raise_signal(signal.SIGUSR1)
        os._exit(0)
    os.wait()

signal.signal(signal.SIGUSR1, lambda number, frame: print("handled", flush=True))
with uninterrupted():
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
"""


def test_the_callers_handlers_are_as_they_were() -> None:
    before: list[Callable[..., object] | int | None] = [signal.getsignal(n) for n in signal.valid_signals()]
    with uninterrupted():
        assert signal.getsignal(signal.SIGALRM) not in before
    assert [signal.getsignal(n) for n in signal.valid_signals()] == before


def test_a_handler_that_replaces_itself_stays_replaced() -> None:
    """The first Ctrl-C ends in order, the second one at once."""
    came = []

    def first(number: int, frame: object) -> None:
        came.append("first")
        signal.signal(signal.SIGALRM, lambda number, frame: came.append("second"))

    signal.signal(signal.SIGALRM, first)
    with uninterrupted(), interruptible():
        signal.raise_signal(signal.SIGALRM)
    signal.raise_signal(signal.SIGALRM)
    assert came == ["first", "second"]
