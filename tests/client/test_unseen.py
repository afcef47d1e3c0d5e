"""Who looks at no Future is told at close what failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from spark_broker import Producer
from spark_broker.errors import InvalidRecordError, SparkBrokerError
from tests.client.fake_broker import FakeCluster
from tests.client.test_producer import Script

TIMEOUT_S = 30.0


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def small_topic(cluster: FakeCluster) -> None:
    cluster.create("t", config={"max.message.bytes": "2000"})


def test_a_warning_says_how_many_failed_and_the_first_reason(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: `with Producer: send("nosuch", ...)` ended in silence."""
    small_topic(cluster)
    with Producer(cluster.bootstrap, max_block_ms=200) as producer:
        producer.append("t", pa.record_batch({"value": [b"x" * 9000]}))
        producer.send("t", b"x" * 9000, partition=0)
        producer.send("nosuch", "a")
        producer.append("nosuch", [{"value": b"a"}])
        producer.send("t", b"good").result(TIMEOUT_S)
    (warning,) = warnings_of(caplog)
    said = "4 sends and appends failed, and nobody looked at their Futures; the first of them: [MESSAGE_TOO_LARGE]"
    assert warning.startswith(said)


async def awaited(future: Future[Any]) -> None:
    await asyncio.wrap_future(future)


def result_in_time(future: Future[Any]) -> None:
    future.result(TIMEOUT_S)


def result_of_what_is_done(future: Future[Any]) -> None:
    wait([future], TIMEOUT_S)
    future.result()


LOOKS: list[Callable[[Future[Any]], object]] = [
    result_in_time,
    result_of_what_is_done,
    lambda future: future.exception(TIMEOUT_S),
    lambda future: future.add_done_callback(lambda done: None),
    lambda future: asyncio.run(awaited(future)),
]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    "fail",
    [
        lambda producer: producer.send("nosuch", "a"),
        lambda producer: producer.append("nosuch", [{"value": b"a"}]),
        lambda producer: producer.send("t", b"x" * 9000),
        lambda producer: producer.append("t", [{"value": b"x" * 9000}]),
    ],
)
def test_who_looks_at_the_future_gets_no_warning(
    cluster: FakeCluster,
    caplog: pytest.LogCaptureFixture,
    fail: Callable[[Producer], Future[Any]],
    look: Callable[[Future[Any]], object],
) -> None:
    small_topic(cluster)
    with Producer(cluster.bootstrap, max_block_ms=200) as producer, suppress(SparkBrokerError):
        look(fail(producer))
    assert not warnings_of(caplog)


def test_of_a_micro_batch_each_record_counts_that_nobody_looked_at(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        records = [producer.send("t", b"x", partition=0) for _ in range(5)]
        records[1].add_done_callback(lambda done: None)
        cluster.append_hook = Script(InvalidRecordError("refused"))
        producer.flush()
        for _ in range(2):
            assert records[3].exception(TIMEOUT_S) is not None
    (warning,) = warnings_of(caplog)
    assert warning.startswith("3 sends")


def test_a_transaction_that_fails_raises_it_and_warns_of_nothing(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    small_topic(cluster)
    producer = Producer(cluster.bootstrap, transactional_id="x")
    with producer, pytest.raises(SparkBrokerError), producer.transaction():
        producer.send("t", b"x" * 9000)
    assert not warnings_of(caplog)
