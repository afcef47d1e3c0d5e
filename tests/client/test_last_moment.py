"""Calls whose last round has only milliseconds: they tell what went wrong before, and not that nobody answered then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from spark_broker import Admin, NewTopic
from spark_broker.client.retry import SHORT_ROUND_MS, Backoff, Deadline, Rounds
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    LeaderNotAvailableError,
    NotLeaderOrFollowerError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, TopicPartition
from spark_broker.protocol.messages import (
    CallRequest,
    CreateTopicRequest,
    DeleteRecordsRequest,
    DescribeGroupRequest,
    EmptyResponse,
    ListOffsetsRequest,
    Message,
    MetadataRequest,
)
from tests.client.fake_broker import CallHook, FakeCluster

TIMEOUT_MS = 1000
TP = TopicPartition("t", 0)


class Stall:
    """In the last moments of a call no request of these kinds is answered."""

    def __init__(self, *kinds: type[CallRequest]) -> None:
        self._kinds = kinds
        self._released = threading.Event()
        self.was_met = False
        self._at_s = time.monotonic() + (TIMEOUT_MS - 0.6 * SHORT_ROUND_MS) / 1000

    def __call__(self, broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, self._kinds) and time.monotonic() > self._at_s:
            self.was_met = True
            self._released.wait(30)
        return None

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    fake_cluster = FakeCluster(1)
    fake_cluster.create("t")
    fake_cluster.create(CONSUMER_OFFSETS_TOPIC, 2)
    yield fake_cluster
    fake_cluster.close()


def failure(
    cluster: FakeCluster, stall: Stall, call: Callable[[Admin], object], hook: CallHook | None = None
) -> SparkBrokerError:
    """What the call raises. `hook` calls `stall` itself."""
    cluster.call_hook = hook or stall
    try:
        with (
            Admin(cluster.bootstrap, default_api_timeout_ms=TIMEOUT_MS, retry_backoff_max_ms=100) as admin,
            pytest.raises(SparkBrokerError) as caught,
        ):
            call(admin)
        assert stall.was_met
        return caught.value
    finally:
        stall.release()


@pytest.mark.parametrize(
    "call",
    [
        lambda admin: admin.list_offsets({TP: "latest"}),
        lambda admin: admin.delete_records({TP: -1}),
    ],
    ids=["list_offsets", "delete_records"],
)
def test_a_partition_without_a_leader_is_the_reason(cluster: FakeCluster, call: Callable[[Admin], object]) -> None:
    cluster.elect("t", 0, -1)
    error = failure(cluster, Stall(MetadataRequest), call)
    assert isinstance(error, LeaderNotAvailableError)
    assert "t-0 has no leader" in error.message


def test_a_new_topic_without_a_leader_is_the_reason(cluster: FakeCluster) -> None:
    stall = Stall(MetadataRequest)

    def created_without_a_leader(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, CreateTopicRequest):
            cluster.create(request.name)
            cluster.elect(request.name, 0, -1)
            return EmptyResponse()
        return stall(broker, request)

    error = failure(cluster, stall, lambda admin: admin.create_topic(NewTopic("new")), created_without_a_leader)
    assert isinstance(error, LeaderNotAvailableError)
    assert "'new'" in error.message


def test_a_partition_of_the_groups_without_a_leader_is_the_reason(cluster: FakeCluster) -> None:
    cluster.elect(CONSUMER_OFFSETS_TOPIC, 1, -1)
    error = failure(cluster, Stall(MetadataRequest), lambda admin: admin.list_groups())
    assert isinstance(error, CoordinatorNotAvailableError)
    assert f"{CONSUMER_OFFSETS_TOPIC}-1" in error.message


def test_a_coordinator_that_refused_is_the_reason(cluster: FakeCluster) -> None:
    stall = Stall(MetadataRequest, DescribeGroupRequest)

    def refused(broker: int, request: CallRequest) -> Message | None:
        stall(broker, request)
        if isinstance(request, DescribeGroupRequest):
            raise NotLeaderOrFollowerError("another broker has it")
        return None

    error = failure(cluster, stall, lambda admin: admin.describe_group("g"), refused)
    assert isinstance(error, NotLeaderOrFollowerError)


@pytest.mark.parametrize(
    ("request_", "call"),
    [
        (ListOffsetsRequest, lambda admin: admin.list_offsets({TP: "latest"})),
        (DeleteRecordsRequest, lambda admin: admin.delete_records({TP: -1})),
    ],
    ids=["list_offsets", "delete_records"],
)
def test_a_leader_that_refused_is_the_reason(
    cluster: FakeCluster, request_: type[CallRequest], call: Callable[[Admin], object]
) -> None:
    stall = Stall(request_)

    def refused(broker: int, request: CallRequest) -> Message | None:
        stall(broker, request)
        if isinstance(request, request_):
            raise NotLeaderOrFollowerError("it leads no more")
        return None

    assert isinstance(failure(cluster, stall, call, refused), NotLeaderOrFollowerError)


def test_what_is_given_the_rest_of_a_deadline_ends_after_it() -> None:
    """The time was cut to whole milliseconds: an attempt ended in the last one, and there seemed to be time left."""
    for left_ms in (0.2, 1.0, 1.7):
        deadline = Deadline.after_ms(left_ms)
        remaining_ms = deadline.remaining_ms
        assert time.monotonic() + remaining_ms / 1000 >= deadline.at_s


def test_a_round_of_full_length_is_a_reason_itself() -> None:
    earlier, late = NotLeaderOrFollowerError("before"), RequestTimedOutError("nobody answered")
    closing, backoff = threading.Event(), Backoff(1, 1)
    rounds = Rounds(Deadline.after_ms(60 * SHORT_ROUND_MS), backoff, closing)
    assert rounds.next()
    assert rounds.reason(late, earlier) is late
    short = Rounds(Deadline.after_ms(0.5 * SHORT_ROUND_MS), backoff, closing)
    assert short.reason(late, earlier) is late  # The first round: there was no other.
    assert short.next()
    assert short.reason(late, earlier) is earlier
    assert short.reason(late, None) is late
    assert short.reason(other := LeaderNotAvailableError("now"), earlier) is other
