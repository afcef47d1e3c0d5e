"""Records of `send` leave their slot in the order in which they came, and in batches of the size that was asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spark_broker import TopicPartition
from spark_broker.client.lingering import Dispatch, Lingering
from spark_broker.client.record_builder import RecordBuilder
from spark_broker.client.retry import Deadline
from spark_broker.client.unseen import Unseen
from spark_broker.errors import SparkBrokerError
from tests.conftest import WaitUntil

WAIT_S = 30.0
NEVER_MS = 3_600_000


def values_of(builder: RecordBuilder) -> list[bytes | None]:
    column: list[bytes | None] = builder.build().column("value").to_pylist()
    return column


class Sends:
    """A Lingering with one slot, and what it handed on."""

    def __init__(self, linger_ms: int = NEVER_MS, dispatch: Dispatch | None = None) -> None:
        self.handed_on: list[list[bytes | None]] = []
        self.died = list[BaseException]()
        self.lost = list[SparkBrokerError]()
        self.lingering = Lingering(
            dispatch or self._dispatch,
            linger_ms=linger_ms,
            name="test",
            died=self.died.append,
            unseen=Unseen(),
            lost=self.lost.append,
        )
        self._slot = self.lingering.slot(TopicPartition("t", 0))

    def send(self, value: bytes, size_bytes: int, batch_bytes: int = 100) -> None:
        self.lingering.add(self._slot, batch_bytes, None, value, None, 0, size_bytes)

    def _dispatch(self, partition: TopicPartition, builder: RecordBuilder, deadline: Deadline | None) -> None:
        self.handed_on.append(values_of(builder))


@pytest.fixture
def sends() -> Iterator[Sends]:
    recorder = Sends()
    yield recorder
    recorder.lingering.close()


def test_a_batch_does_not_overtake_one_that_is_being_handed_on() -> None:
    entered, release = threading.Event(), threading.Event()
    handed_on: list[list[bytes | None]] = []

    def dispatch(partition: TopicPartition, builder: RecordBuilder, deadline: Deadline | None) -> None:
        values = values_of(builder)
        if values == [b"first"]:
            entered.set()
            release.wait(WAIT_S)
        handed_on.append(values)

    sends = Sends(dispatch=dispatch)

    def send(value: bytes) -> threading.Thread:
        thread = threading.Thread(target=lambda: sends.send(value, 1000))
        thread.start()
        return thread

    first = send(b"first")
    assert entered.wait(WAIT_S)
    second = send(b"second")
    second.join(0.2)  # long enough for it to overtake, if it could
    release.set()
    first.join(WAIT_S)
    second.join(WAIT_S)
    assert handed_on == [[b"first"], [b"second"]]
    sends.lingering.close()


def test_a_batch_is_handed_on_when_it_is_full_or_the_next_record_does_not_fit(sends: Sends) -> None:
    sends.send(b"a", 60)
    sends.send(b"b", 40)
    assert sends.handed_on == [[b"a", b"b"]]
    sends.send(b"c", 60)
    sends.send(b"d", 41)
    assert sends.handed_on[1:] == [[b"c"]]


def test_a_record_larger_than_a_batch_goes_alone(sends: Sends) -> None:
    sends.send(b"small", 10)
    sends.send(b"large", 101)
    sends.send(b"next", 10)
    assert sends.handed_on == [[b"small"], [b"large"]]
    sends.send(b"no room for any", 10, batch_bytes=-1)
    sends.lingering.hand_on()
    assert sends.handed_on[2:] == [[b"next", b"no room for any"]]


def test_records_that_come_after_a_pause_are_handed_on_too(wait_until: WaitUntil) -> None:
    """The thread that hands on goes to sleep between them."""
    sends = Sends(linger_ms=1)
    for count in range(1, 4):
        sends.send(b"a", 10)
        wait_until(lambda count=count: len(sends.handed_on) == count, "the batch")  # type: ignore[misc]
    sends.lingering.close()


def test_a_record_that_comes_after_the_end_is_handed_on_at_once(sends: Sends) -> None:
    """`send` may have found the producer open just before it was closed."""
    sends.send(b"before", 10)
    sends.lingering.close()
    sends.send(b"after", 10)
    assert sends.handed_on == [[b"before"], [b"after"]]


def test_nothing_waits_where_linger_ms_is_0() -> None:
    sends = Sends(linger_ms=0)
    sends.send(b"a", 10)
    sends.send(b"b", 10)
    assert sends.handed_on == [[b"a"], [b"b"]]
