"""Ctrl-C and alarms in the middle of a producer's calls: it goes on, and nothing is lost, stored twice or mixed up."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import pytest

from spark_broker import Producer, RecordMetadata
from spark_broker.interrupts import interruptible, uninterrupted
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.messages import AppendRequest
from tests.client.fake_broker import FakeCluster

ROUNDS = 150

pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function (WeakSet|gc_cumulative_time):pytest.PytestUnraisableExceptionWarning"
)
"""Where the signal comes in the callback of a weak reference, or of the garbage collector (Hypothesis has one), Python
itself throws away what its handler raises.
"""


class Stop(BaseException):
    """As KeyboardInterrupt: no `except Exception` stops it."""


@pytest.fixture(autouse=True)
def _alarms() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


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
