"""A broker is stopped while clients wait for its answers. They wait no longer than until the controller fences it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from tests.support.process_cluster import ProcessCluster

T = [TopicPartition("t", number) for number in range(6)]
EARLY = datetime(2020, 1, 1, tzinfo=UTC)

REQUEST_S = 120
"""request.timeout.ms, and the deadline of a whole call: nobody must wait for either."""

LIMIT_S = 40
"""A session of three seconds, an election and back-off take five; the rest is for a busy machine."""

CREATORS = 8
"""A change goes to the controller through any broker. One of so many takes the one that is stopped."""


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("frozen"), 3, {"broker.session.timeout.ms": 3000}) as cluster:
        with Admin(cluster.bootstrap_servers) as admin, Producer(cluster.bootstrap_servers) as producer:
            admin.create_topic(NewTopic("t", len(T), 3))
            for partition in T:
                producer.append("t", [{"value": b"x"}] * 10, partition=partition.partition)
            producer.flush()
        yield cluster


def test_no_call_waits_for_a_frozen_broker_until_its_own_time_out(cluster: ProcessCluster) -> None:
    settings = {"request.timeout.ms": REQUEST_S * 1000, "default.api.timeout.ms": REQUEST_S * 1000}
    consumer = Consumer(cluster.bootstrap_servers, config=settings)
    admins = [Admin(cluster.bootstrap_servers, config=settings) for _ in range(CREATORS + 3)]
    creators, (deleter, lister, director) = admins[:CREATORS], admins[CREATORS:]
    calls: dict[str, Callable[[], object]] = {
        "end_offsets": lambda: consumer.end_offsets(T),
        "delete_records": lambda: deleter.delete_records(dict.fromkeys(T, 3)),
        "list_transactions": lister.list_transactions,
        "describe_log_dirs": director.describe_log_dirs,
    }

    def create(number: int) -> Callable[[], object]:
        return lambda: creators[number].create_topic(NewTopic(f"new-{number}", 1, 2))

    calls |= {f"create_topic {number}": create(number) for number in range(CREATORS)}
    consumer.beginning_offsets(T)
    for admin in admins:
        admin.describe_topic("t")
    with ThreadPoolExecutor(len(calls)) as threads:
        os.kill(cluster.pid(0), signal.SIGSTOP)
        try:
            since_s = time.monotonic()
            answers = {name: threads.submit(call) for name, call in calls.items()}
            found = {name: answer.result(REQUEST_S / 2) for name, answer in answers.items()}
            took_s = time.monotonic() - since_s
        finally:
            os.kill(cluster.pid(0), signal.SIGCONT)
    assert took_s < LIMIT_S
    assert found["end_offsets"] == dict.fromkeys(T, 10)
    assert found["delete_records"] == dict.fromkeys(T, 3)
    assert found["list_transactions"] == []
    assert len(found["describe_log_dirs"]) == 2  # type: ignore[arg-type]
    assert consumer.offsets_for_times(dict.fromkeys(T, EARLY)) == dict.fromkeys(T, 3)
    consumer.close()
    for admin in admins:
        admin.close()
