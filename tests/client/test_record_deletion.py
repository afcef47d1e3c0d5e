"""Records that are deleted on demand: those that were there when the call began, of the topic that was there then."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa
import pytest

from spark_broker import Admin, TopicPartition
from spark_broker.errors import (
    InconsistentTopicIdError,
    NetworkError,
    NotLeaderOrFollowerError,
    UnknownTopicOrPartitionError,
)
from spark_broker.protocol.messages import (
    CallRequest,
    DeleteRecordsRequest,
    ListOffsetsRequest,
    Message,
    MetadataRequest,
)
from tests.client.fake_broker import FakeCluster

Values = Callable[..., pa.RecordBatch]

T0 = TopicPartition("t", 0)


def at_first(cluster: FakeCluster, kind: type[CallRequest], then: Callable[[int, CallRequest], Message | None]) -> None:
    """`then` is called for the first request of this kind, before it is answered."""
    met = threading.Event()

    def hook(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, kind) and not met.is_set():
            met.set()
            return then(broker, request)
        return None

    cluster.call_hook = hook


def create_again(cluster: FakeCluster, values: Values) -> None:
    del cluster.topics["t"]
    cluster.create("t")
    cluster.store("t", 0, values("new"))


@pytest.mark.parametrize(
    ("kind", "offset"), [(DeleteRecordsRequest, -1), (DeleteRecordsRequest, 1), (ListOffsetsRequest, -1)]
)
def test_nothing_of_the_next_topic_of_the_name_is_deleted(
    cluster: FakeCluster, values: Values, kind: type[CallRequest], offset: int
) -> None:
    """Story: the leader moved, and the topic was created again before the second try, which deleted from that one."""
    cluster.create("t")
    cluster.store("t", 0, values("old"))

    def replaced(broker: int, request: CallRequest) -> None:
        create_again(cluster, values)
        raise NotLeaderOrFollowerError("it has moved")

    at_first(cluster, kind, replaced)
    with Admin(cluster.bootstrap) as admin, pytest.raises(InconsistentTopicIdError, match="nothing"):
        admin.delete_records({T0: offset})
    assert cluster.topics["t"].partitions[0].log_start_offset == 0


def test_a_topic_that_is_deleted_meanwhile_is_the_reason(cluster: FakeCluster) -> None:
    cluster.create("t")

    def deleted(broker: int, request: CallRequest) -> None:
        del cluster.topics["t"]
        raise NotLeaderOrFollowerError("it has moved")

    at_first(cluster, DeleteRecordsRequest, deleted)
    with Admin(cluster.bootstrap) as admin, pytest.raises(UnknownTopicOrPartitionError):
        admin.delete_records({T0: -1})


def test_a_repetition_deletes_nothing_that_was_appended_since_the_call_began(
    cluster: FakeCluster, values: Values
) -> None:
    """Story: the answer was lost. All that was committed by the second try was deleted, too, and nobody had read it."""
    cluster.create("t")
    cluster.store("t", 0, values("a", "b"))

    def lost(broker: int, request: CallRequest) -> None:
        cluster.store("t", 0, values("c"))
        raise NetworkError("the answer was lost")

    at_first(cluster, DeleteRecordsRequest, lost)
    with Admin(cluster.bootstrap) as admin:
        assert admin.delete_records({T0: -1}) == {T0: 2}


def test_a_broker_that_still_shows_the_topic_before_is_asked_again(cluster: FakeCluster, values: Values) -> None:
    """The controller knows which one is there. A view that is late is no other topic."""
    before = cluster.create("t")
    cluster.store("t", 0, values("old"))
    late = cluster.metadata(["t"])
    create_again(cluster, values)
    answers = iter([late, late])

    def hook(broker: int, request: CallRequest) -> Message | None:
        return next(answers, None) if isinstance(request, MetadataRequest) and not request.certain else None

    cluster.call_hook = hook
    with Admin(cluster.bootstrap) as admin:
        assert admin.delete_records({T0: -1}) == {T0: 1}
    assert before.partitions[0].log_start_offset == 0


def test_a_partition_that_does_not_exist_is_refused_at_once(cluster: FakeCluster) -> None:
    cluster.create("t")
    with Admin(cluster.bootstrap) as admin:
        for partition in (TopicPartition("t", 9), TopicPartition("nothing", 0)):
            with pytest.raises(UnknownTopicOrPartitionError):
                admin.delete_records({partition: -1})
    assert not any(isinstance(request, DeleteRecordsRequest) for _, request in cluster.calls)
