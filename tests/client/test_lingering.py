"""Records of `send` leave their slot in the order in which they came."""

from __future__ import annotations

import threading

from spark_broker import TopicPartition
from spark_broker.client.lingering import Lingering
from spark_broker.client.record_builder import RecordBuilder, make_record

WAIT_S = 30.0


def test_a_batch_does_not_overtake_one_that_is_being_handed_on() -> None:
    entered, release = threading.Event(), threading.Event()
    handed_on: list[bytes | None] = []

    def dispatch(partition: TopicPartition, builder: RecordBuilder) -> None:
        value = builder.records[0].value
        if value == b"first":
            entered.set()
            release.wait(WAIT_S)
        handed_on.append(value)

    lingering = Lingering(dispatch, linger_ms=3_600_000, batch_size_bytes=1000, name="test")

    def send(value: str) -> threading.Thread:
        record = make_record(value, None, None, None)
        thread = threading.Thread(target=lambda: lingering.add(TopicPartition("t", 0), record, alone=True))
        thread.start()
        return thread

    first = send("first")
    assert entered.wait(WAIT_S)
    second = send("second")
    second.join(0.2)  # long enough for it to overtake, were it free to
    release.set()
    first.join(WAIT_S)
    second.join(WAIT_S)
    assert handed_on == [b"first", b"second"]
    lingering.close()
