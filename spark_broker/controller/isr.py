"""ISR changes that leaders ask for. Each is a compare-and-set on the partition's epochs."""

from __future__ import annotations

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.effects import Decision
from spark_broker.controller.image import MetadataImage, PartitionRegistration, changed_partition
from spark_broker.controller.partition_change import change
from spark_broker.controller.reassignment import complete
from spark_broker.controller.records import MetadataRecord
from spark_broker.errors import (
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
from spark_broker.protocol.messages import (
    AlterIsr,
    AlterIsrResult,
    AlterPartitionRequest,
    AlterPartitionResponse,
    IsrMember,
)


def check_broker_epoch(image: MetadataImage, broker_id: int, broker_epoch: int) -> None:
    """Check that the registered incarnation asks. Raises BrokerIdNotRegisteredError, StaleBrokerEpochError."""
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise BrokerIdNotRegisteredError(f"broker {broker_id} is not registered")
    if broker.epoch != broker_epoch:
        raise StaleBrokerEpochError(f"broker {broker_id} has epoch {broker.epoch}, the request names {broker_epoch}")


def alter_partition(image: MetadataImage, request: AlterPartitionRequest, disks: Disks = ALL_WELL) -> Decision:
    """Every change is judged by itself; a refused one has its error in the result."""
    check_broker_epoch(image, request.broker_id, request.broker_epoch)
    records: list[MetadataRecord] = []
    results: list[AlterIsrResult] = []
    seen: set[tuple[str, int]] = set()
    for asked in request.changes:
        code, message = 0, ""
        try:
            if (asked.topic_id, asked.partition) in seen:
                raise InvalidUpdateVersionError("the request changes the partition twice")
            records += _alter(image, request.broker_id, asked, disks)
            seen.add((asked.topic_id, asked.partition))
        except SparkBrokerError as error:
            code, message = error.code, error.message
        results.append(AlterIsrResult(asked.topic_id, asked.partition, code, message))
    return Decision(tuple(records), AlterPartitionResponse(results))


def _alter(image: MetadataImage, leader_id: int, asked: AlterIsr, disks: Disks) -> list[MetadataRecord]:
    state = _partition(image, asked)
    _check_epochs(state, leader_id, asked)
    isr = [member.broker_id for member in asked.isr]
    if leader_id not in isr or len(set(isr)) != len(isr) or not set(isr) <= set(state.replicas):
        raise InvalidRequestError(f"ISR {isr} of leader {leader_id} with replicas {list(state.replicas)}")
    for member in asked.isr:
        if member.broker_id not in state.isr:
            _check_joins(image, member)
    in_order = tuple(broker for broker in state.replicas if broker in isr)
    topic = image.topics[asked.topic_id]
    same = set(isr) == set(state.isr)
    record = change(topic, asked.partition, state, isr=None if same else in_order, lost=_lacking(asked))
    if record is None:
        return []
    done = complete(image, topic, asked.partition, changed_partition(state, record), disks)
    return [record] if done is None else [record, done]


def _lacking(asked: AlterIsr) -> list[int]:
    """Replicas whose fetches showed that they lack committed records: they are not eligible either (KIP-966)."""
    members = {member.broker_id for member in asked.isr}
    return [broker_id for broker_id in asked.lacking if broker_id not in members]


def _partition(image: MetadataImage, asked: AlterIsr) -> PartitionRegistration:
    if asked.topic_id not in image.topics:
        raise UnknownTopicIdError(f"topic {asked.topic_id}")
    state = image.partition(asked.topic_id, asked.partition)
    if state is None:
        raise UnknownTopicOrPartitionError(f"{image.topics[asked.topic_id].name}-{asked.partition}")
    return state


def _check_epochs(state: PartitionRegistration, leader_id: int, asked: AlterIsr) -> None:
    if asked.leader_epoch < state.leader_epoch:
        raise FencedLeaderEpochError(f"leader epoch {asked.leader_epoch}, now {state.leader_epoch}")
    if asked.leader_epoch > state.leader_epoch:
        raise UnknownLeaderEpochError(f"leader epoch {asked.leader_epoch}, now {state.leader_epoch}")
    if leader_id != state.leader:
        raise NotLeaderOrFollowerError(f"broker {leader_id} does not lead the partition, {state.leader} does")
    if asked.partition_epoch != state.partition_epoch:
        raise InvalidUpdateVersionError(f"partition epoch {asked.partition_epoch}, now {state.partition_epoch}")


def _check_joins(image: MetadataImage, member: IsrMember) -> None:
    """KIP-903: a new incarnation, perhaps with an empty disk, never joins on what its predecessor had fetched."""
    broker = image.brokers.get(member.broker_id)
    if broker is None or not broker.live:
        raise IneligibleReplicaError(f"broker {member.broker_id} is not live")
    if broker.epoch != member.broker_epoch:
        raise IneligibleReplicaError(
            f"broker {member.broker_id} has epoch {broker.epoch}, the leader heard of {member.broker_epoch}"
        )
