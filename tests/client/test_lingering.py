"""`send`'s slots: every record that was taken is handed on, whenever the producer is closed."""

from __future__ import annotations

import contextlib
import threading

import pytest

from spark_broker.client.lingering import Lingering
from spark_broker.client.record_builder import Record, RecordBuilder, make_record
from spark_broker.errors import ClosedError
from spark_broker.model import TopicPartition

PARTITION = TopicPartition("t", 0)


def record() -> Record:
    return make_record(b"v", None, None, None)


def test_a_record_that_comes_while_its_producer_is_closed_is_handed_on_or_refused() -> None:
    """Not taken and forgotten: its Future would never be done."""
    handed_on: list[int] = []
    taken = [0] * 8
    lock = threading.Lock()

    def dispatch(partition: TopicPartition, builder: RecordBuilder) -> None:
        with lock:
            handed_on.append(len(builder.records))

    lingering = Lingering(dispatch, linger_ms=60_000, batch_size_bytes=1 << 30, name="test")

    def send(thread: int) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                lingering.add(PARTITION, record())
                taken[thread] += 1

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(taken))]
    for thread in threads:
        thread.start()
    while not all(taken):
        threading.Event().wait(0.001)
    lingering.close()
    for thread in threads:
        thread.join(30)

    assert sum(handed_on) == sum(taken)


def test_nothing_is_taken_once_it_is_closed() -> None:
    lingering = Lingering(lambda partition, builder: None, linger_ms=60_000, batch_size_bytes=1 << 30, name="test")
    lingering.close()
    with pytest.raises(ClosedError):
        lingering.add(PARTITION, record())
