"""Threads that ask for metadata at the same time share one question, as far as it is theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from spark_broker import Admin, Consumer, Producer, TopicPartition
from spark_broker.client.metadata import ATTEMPT_TIMEOUT_MS, ClusterMetadata
from spark_broker.client.retry import UNKNOWN_TOPIC_GRACE_MS, Deadline
from spark_broker.config import ProducerConfig
from spark_broker.errors import BootstrapUnreachableError, RequestTimedOutError
from spark_broker.protocol.messages import CallRequest, Message, MetadataRequest
from tests.client.fake_broker import FakeCluster
from tests.support.ports import refused_address
from tests.support.waiting import eventually

WAIT_S = 30.0
THREADS = 3


class Gate:
    """Answers to metadata requests wait for it while it is closed. `asked`: the topics of those that have come."""

    def __init__(self) -> None:
        self.asked: list[list[str] | None] = []
        self.open = threading.Event()

    def __call__(self, broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, MetadataRequest):
            self.asked.append(request.topics)
            assert self.open.wait(WAIT_S)
        return None


@pytest.fixture
def metadata(cluster: FakeCluster) -> ClusterMetadata:
    return ClusterMetadata.connect(ProducerConfig(bootstrap_servers=tuple(cluster.bootstrap.split(","))))


def in_threads(call: Callable[[], object]) -> list[BaseException | None]:
    with ThreadPoolExecutor(THREADS) as pool:
        return [future.exception(WAIT_S) for future in [pool.submit(call) for _ in range(THREADS)]]


def test_a_thread_that_wants_another_topic_asks_for_it_itself(cluster: FakeCluster, metadata: ClusterMetadata) -> None:
    """Story: it took the answer to a question of which its topic was no part, and said that the topic did not exist."""
    cluster.create("a", 1)
    cluster.create("b", 1)
    cluster.call_hook = gate = Gate()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(metadata.topic, "a", Deadline.after_ms(20_000))
        eventually(lambda: gate.asked == [["a"]], WAIT_S, "the first question is under way")
        second = pool.submit(metadata.topic, "b", Deadline.after_ms(20_000))
        eventually(lambda: "b" in metadata._topics, WAIT_S, "the second thread waits")
        gate.open.wait(UNKNOWN_TOPIC_GRACE_MS / 1000)  # The topic's absence would be believed by now.
        gate.open.set()
        assert (first.result(WAIT_S).name, second.result(WAIT_S).name) == ("a", "b")


def test_threads_that_want_nothing_else_share_one_answer(cluster: FakeCluster, metadata: ClusterMetadata) -> None:
    cluster.create("a", 1)
    cluster.call_hook = gate = Gate()
    metadata.use(["a"])
    waiting: list[Future[object]] = []
    with ThreadPoolExecutor(THREADS) as pool:
        waiting += [pool.submit(metadata.refresh, Deadline.after_ms(20_000)) for _ in range(THREADS)]
        eventually(
            lambda: gate.asked and len(vars(metadata._landed)["_waiters"]) == THREADS - 1, WAIT_S, "the others wait"
        )
        gate.open.set()
        assert all(future.result(WAIT_S) is metadata.view for future in waiting)
    assert len(gate.asked) == 1


def test_a_question_that_timed_out_is_asked_again_by_whoever_has_time(
    cluster: FakeCluster, metadata: ClusterMetadata
) -> None:
    cluster.create("a", 1)
    cluster.call_hook = gate = Gate()
    metadata.use(["a"])
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(metadata.refresh, Deadline.after_ms(ATTEMPT_TIMEOUT_MS // 2))
        eventually(lambda: gate.asked, WAIT_S, "the first question is under way")
        long = pool.submit(metadata.refresh, Deadline.after_ms(20_000))
        with pytest.raises(RequestTimedOutError):
            short.result(WAIT_S)
        gate.open.set()
        assert long.result(WAIT_S).topic("a") is not None


def test_an_answer_that_takes_longer_than_the_grace_begins_it(cluster: FakeCluster, metadata: ClusterMetadata) -> None:
    """The broker that answers late may lag behind as any other one may."""
    answers: list[int] = []

    def hook(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, MetadataRequest):
            answers.append(broker)
            if len(answers) == 3:
                cluster.create("late", 1)
            else:
                threading.Event().wait(0.6 * UNKNOWN_TOPIC_GRACE_MS / 1000)
        return None

    cluster.call_hook = hook
    assert metadata.topic("late", Deadline.after_ms(20_000)).name == "late"


@pytest.mark.full
def test_where_nobody_answers_each_thread_is_told_so() -> None:
    """Story: one was told, and the others got an empty list of groups, and that the topic does not exist."""
    with Admin(refused_address()) as admin:
        assert [type(error) for error in in_threads(admin.list_groups)] == [BootstrapUnreachableError] * THREADS
    with Producer(refused_address()) as producer:
        told = in_threads(lambda: producer.append("t", [{"value": b"x"}]).result(WAIT_S))
    assert [type(error) for error in told] == [BootstrapUnreachableError] * THREADS
    with Consumer(refused_address(), topics=["t"]) as consumer, pytest.raises(BootstrapUnreachableError):
        consumer.end_offsets([TopicPartition("t", 0)])
