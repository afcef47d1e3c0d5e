"""A moment without threads in a client's process: what got no thread begins when there is one, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from spark_broker import Consumer, Producer, TopicPartition
from spark_broker.errors import NoThreadError, RequestTimedOutError
from spark_broker.model import ConsumedBatch
from tests.client.fake_broker import FakeCluster
from tests.conftest import WaitUntil
from tests.support.no_threads import no_threads

WAIT_S = 20.0
T0 = TopicPartition("t", 0)


def named(part: str) -> Callable[[threading.Thread], bool]:
    return lambda thread: part in thread.name


def values(cluster: FakeCluster) -> list[object]:
    return [row["value"] for row in cluster.rows("t", 0)]


@pytest.mark.parametrize("thread", ["-send-", "-receive-"])
def test_a_batch_whose_stream_got_no_thread_is_stored_once_there_is_one(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil, thread: str
) -> None:
    """Story: the Future said that nothing was done. The next append sent the batch all the same: a caller who had
    appended the records again had them twice.
    """
    cluster.create("t", 1)
    with Producer(cluster.bootstrap, linger_ms=0) as producer:
        with no_threads(monkeypatch, named(thread)) as refused:
            first = producer.append("t", [{"value": b"a"}])
            wait_until(lambda: len(refused) > 1, "it is tried again")
            assert not first.done()
            assert values(cluster) == []
        assert first.result(WAIT_S)[0].base_offset == 0
        assert producer.append("t", [{"value": b"b"}]).result(WAIT_S)[0].base_offset == 1
    assert values(cluster) == [b"a", b"b"]


def test_a_batch_that_gets_no_thread_in_time_says_why(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.create("t", 1)
    with Producer(cluster.bootstrap, linger_ms=0, request_timeout_ms=500, delivery_timeout_ms=500) as producer:
        with no_threads(monkeypatch, named("-send-")):
            late = producer.append("t", [{"value": b"a"}])
            with pytest.raises(RequestTimedOutError, match=r"the last attempt: \[NO_THREAD\]"):
                late.result(WAIT_S)
        producer.append("t", [{"value": b"b"}]).result(WAIT_S)
    assert values(cluster) == [b"b"]


@pytest.mark.parametrize(("group", "thread"), [("", "fetch-"), ("g", "fetch-"), ("g", "-heartbeat")])
def test_a_consumer_that_got_no_thread_reads_once_there_is_one(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil, group: str, thread: str
) -> None:
    """Story: it read nothing any more, without an error, and its close failed."""
    cluster.create("t", 1)
    with Producer(cluster.bootstrap, linger_ms=0) as producer:
        producer.append("t", [{"value": b"a"}]).result(WAIT_S)
    with no_threads(monkeypatch, named(thread)):
        consumer = Consumer(cluster.bootstrap, auto_offset_reset="earliest", group_id=group, topics=["t"])
        with pytest.raises(NoThreadError):
            consumer.poll(WAIT_S)
    with consumer:
        assert [batch.base_offset for batch in polled(consumer)] == [0]
    wait_until(lambda: not left("consumer", "fetch-"), "its threads end")


def test_a_consumer_that_is_closed_without_a_thread_for_its_leader_ends(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    cluster.create("t", 1)
    with no_threads(monkeypatch, named("fetch-")):
        consumer = Consumer(cluster.bootstrap)
        consumer.assign([T0])
        with pytest.raises(NoThreadError):
            consumer.poll(WAIT_S)
        consumer.close()
    wait_until(lambda: not left("consumer", "fetch-"), "its threads end")


def polled(consumer: Consumer) -> list[ConsumedBatch]:
    """What comes next. What a try without a thread has left is raised once."""
    try:
        return consumer.poll(WAIT_S)
    except NoThreadError:
        return consumer.poll(WAIT_S)


def left(*names: str) -> list[str]:
    """The threads of clients that still run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


def test_a_client_that_cannot_begin_leaves_no_thread(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: each try at the limit kept the one thread that it had got."""
    with no_threads(monkeypatch, named("-recovery")), pytest.raises(NoThreadError):
        Producer(cluster.bootstrap, client_id="p1")
    with no_threads(monkeypatch, named("-group")), pytest.raises(NoThreadError):
        Consumer(cluster.bootstrap, client_id="c1", group_id="g")
    for thread in threading.enumerate():
        if thread.name.startswith(("p1-", "c1-")):
            thread.join(WAIT_S)
    assert not left("p1-", "c1-")
