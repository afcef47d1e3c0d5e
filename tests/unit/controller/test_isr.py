"""ISR changes are compare-and-sets that name broker epochs."""

from __future__ import annotations

import pytest

from spark_broker.controller.events import PortProbed
from spark_broker.errors import (
    ERRORS,
    BrokerIdNotRegisteredError,
    FencedLeaderEpochError,
    IneligibleReplicaError,
    InvalidRequestError,
    InvalidUpdateVersionError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    StaleBrokerEpochError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from spark_broker.protocol.messages import AlterIsr, AlterPartitionRequest, AlterPartitionResponse, IsrMember
from tests.unit.controller.cluster import Cluster, registration


@pytest.fixture
def cluster() -> Cluster:
    """Broker 0 leads; broker 2 was lost and is back, outside the ISR."""
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic()
    cluster.end_session(2)
    cluster.handle(PortProbed(2, cluster.session_of[2], refused=True))
    cluster.register(registration(cluster.new_launch(), "directory-2", broker_id=2))
    cluster.beat(2)
    assert cluster.partition().isr == (0, 1)
    return cluster


def members(cluster: Cluster, *brokers: int) -> list[IsrMember]:
    return [IsrMember(b, cluster.image.brokers[b].epoch) for b in brokers]


def ask(cluster: Cluster, isr: list[IsrMember], **changes: object) -> type[SparkBrokerError] | None:
    """The error of the change, or None."""
    state = cluster.partition()
    values: dict[str, object] = {
        "topic_id": cluster.topic().topic_id,
        "partition": 0,
        "leader_epoch": state.leader_epoch,
        "partition_epoch": state.partition_epoch,
        "isr": isr,
    }
    requester = changes.pop("requester", 0)
    assert isinstance(requester, int)
    change = AlterIsr(**{**values, **changes})  # type: ignore[arg-type]
    epoch = cluster.image.brokers[requester].epoch
    answer = cluster.call(AlterPartitionRequest(requester, epoch, [change]))
    assert isinstance(answer, AlterPartitionResponse)
    code = answer.results[0].error_code
    return ERRORS[code] if code else None


def test_a_follower_that_caught_up_joins(cluster: Cluster) -> None:
    before = cluster.partition()
    assert ask(cluster, members(cluster, 0, 1, 2)) is None
    after = cluster.partition()
    assert (after.isr, after.leader_epoch, after.partition_epoch) == ((0, 1, 2), 0, before.partition_epoch + 1)


def test_a_follower_that_lags_leaves(cluster: Cluster) -> None:
    assert ask(cluster, members(cluster, 0)) is None
    assert cluster.partition().isr == (0,)


def test_an_older_incarnation_never_joins(cluster: Cluster) -> None:
    stale = [*members(cluster, 0, 1), IsrMember(2, cluster.image.brokers[2].epoch - 1)]
    assert ask(cluster, stale) is IneligibleReplicaError


def test_a_fenced_broker_never_joins(cluster: Cluster) -> None:
    cluster.register(registration(cluster.new_launch(), "directory-2", broker_id=2))
    assert ask(cluster, members(cluster, 0, 1, 2)) is IneligibleReplicaError


def test_a_broker_that_shuts_down_never_joins(cluster: Cluster) -> None:
    cluster.beat(2, wants_shutdown=True)
    assert ask(cluster, members(cluster, 0, 1, 2)) is IneligibleReplicaError


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"partition_epoch": 0}, InvalidUpdateVersionError),
        ({"partition_epoch": 99}, InvalidUpdateVersionError),
        ({"leader_epoch": -1}, FencedLeaderEpochError),
        ({"leader_epoch": 7}, UnknownLeaderEpochError),
        ({"requester": 1}, NotLeaderOrFollowerError),
        ({"topic_id": "f" * 32}, UnknownTopicIdError),
        ({"partition": 1}, UnknownTopicOrPartitionError),
    ],
)
def test_a_change_on_an_old_state_is_refused(
    cluster: Cluster, changes: dict[str, object], error: type[SparkBrokerError]
) -> None:
    before = cluster.image
    assert ask(cluster, members(cluster, 0, 1, 2), **changes) is error
    assert cluster.image == before


@pytest.mark.parametrize("isr", [[], [1, 2], [0, 0, 1], [0, 7]])
def test_an_isr_that_is_none_is_refused(cluster: Cluster, isr: list[int]) -> None:
    assert ask(cluster, [IsrMember(b, 1) for b in isr]) is InvalidRequestError


def test_a_later_incarnation_fences_the_earlier_ones_requests(cluster: Cluster) -> None:
    with pytest.raises(StaleBrokerEpochError):
        cluster.call(AlterPartitionRequest(0, cluster.image.brokers[0].epoch - 1, []))
    with pytest.raises(BrokerIdNotRegisteredError):
        cluster.call(AlterPartitionRequest(9, 1, []))


def test_one_refused_change_does_not_stop_the_others(cluster: Cluster) -> None:
    state, topic_id = cluster.partition(), cluster.topic().topic_id
    good = AlterIsr(topic_id, 0, state.leader_epoch, state.partition_epoch, members(cluster, 0))
    answer = cluster.call(
        AlterPartitionRequest(0, cluster.image.brokers[0].epoch, [AlterIsr("f" * 32, 0, 0, 0, []), good, good])
    )
    assert isinstance(answer, AlterPartitionResponse)
    codes = [result.error_code for result in answer.results]
    assert codes == [UnknownTopicIdError.code, 0, InvalidUpdateVersionError.code]
