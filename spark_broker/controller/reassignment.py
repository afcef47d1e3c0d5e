"""Moving a partition's replicas: the new ones join, and once they are in sync the old ones leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.effects import Decision
from spark_broker.controller.election import Election, elect
from spark_broker.controller.image import MetadataImage, PartitionRegistration, TopicState, changed_partition
from spark_broker.controller.named_topic import named_partition
from spark_broker.controller.partition_change import change
from spark_broker.controller.records import MetadataRecord, PartitionChangeRecord
from spark_broker.controller.topic_config import min_insync_replicas
from spark_broker.errors import InvalidReplicaAssignmentError
from spark_broker.model import NO_LEADER
from spark_broker.protocol.messages import EmptyResponse, ReassignPartitionRequest


def reassign(image: MetadataImage, request: ReassignPartitionRequest, disks: Disks = ALL_WELL) -> Decision:
    """Start to move a partition to these replicas (preferred leader first). Raises UnknownTopicOrPartitionError,
    InconsistentTopicIdError, InvalidReplicaAssignmentError."""
    topic, state = named_partition(image, request.topic, request.partition, request.topic_id)
    check_assignment(image, request.replicas)
    moved = move(image, topic, request.partition, state, request.replicas, disks, lacking=0)
    return Decision(tuple(moved), EmptyResponse())


def check_assignment(image: MetadataImage, replicas: Sequence[int]) -> None:
    """Check that these are distinct, registered brokers. Raises InvalidReplicaAssignmentError."""
    unknown = [id_ for id_ in replicas if id_ not in image.brokers]
    if not replicas or unknown or len(set(replicas)) != len(replicas):
        problem = f"unknown brokers {unknown}" if unknown else "not distinct brokers"
        raise InvalidReplicaAssignmentError(f"replicas {list(replicas)}: {problem}")


def move(
    image: MetadataImage,
    topic: TopicState,
    partition: int,
    state: PartitionRegistration,
    target: Sequence[int],
    disks: Disks = ALL_WELL,
    *,
    lacking: int | None = None,
) -> list[MetadataRecord]:
    """The records that start the move (and end it, where no replica has to be created). It replaces a running move.
    `lacking`: how many replicas the partition is to get later; None: as many as before.

    Current replicas that are not targets stay until the end as `removing`; so do ISR members of a replaced move.
    """
    record = change(
        topic,
        partition,
        state,
        replicas=(*target, *(r for r in state.replicas if r not in target and _stays(state, r))),
        adding=tuple(r for r in target if r not in state.isr and (r not in state.replicas or r in state.adding)),
        removing=tuple(r for r in state.replicas if r not in target and _stays(state, r)),
        lacking=lacking,
    )
    if record is None:
        return []
    done = complete(image, topic, partition, changed_partition(state, record), disks)
    return [record] if done is None else [record, done]


def _stays(state: PartitionRegistration, replica: int) -> bool:
    """Whether a replica that is not a target stays. One that a replaced move was still building is not needed."""
    return replica not in state.adding or replica in (*state.isr, *state.elr, *state.last_known_elr)


def complete(
    image: MetadataImage, topic: TopicState, partition: int, state: PartitionRegistration, disks: Disks = ALL_WELL
) -> PartitionChangeRecord | None:
    """The end of the move, once every added replica is in sync and one that stays can lead; else None.

    Of the replicas that stay, enough for min.insync.replicas must be in sync: those that leave are not eligible
    (KIP-966).
    """
    if not state.reassigning or not set(state.adding) <= set(state.isr):
        return None
    replicas = state.target_replicas
    isr = tuple(broker for broker in state.isr if broker in replicas)
    if len(isr) < min(min_insync_replicas(topic), len(replicas)):
        return None
    election = Election(state.leader, isr)
    if state.leader not in isr:
        electable = disks.electable(image, (topic.topic_id, partition))
        election = elect(replace(state, replicas=replicas, isr=isr, elr=()), electable, disks)
    if election.leader == NO_LEADER:
        return None
    return change(topic, partition, state, leader=election.leader, isr=isr, replicas=replicas, adding=(), removing=())


def moves_in_progress(image: MetadataImage, disks: Disks = ALL_WELL) -> int:
    """How many partitions are being moved: what the throttle counts. Not those that copy nothing, as the broker of each
    new replica is away or without room: they must not keep other partitions from being healed.
    """
    moving = (((t.topic_id, number), state) for t, number, state in image.partitions() if state.reassigning)
    return sum(_copies(image, key, state, disks) for key, state in moving)


def _copies(image: MetadataImage, key: tuple[str, int], state: PartitionRegistration, disks: Disks) -> bool:
    can_copy = disks.electable(image, key, without=disks.full)
    return state.leader != NO_LEADER and any(can_copy(broker) for broker in state.adding if broker not in state.isr)


def retry_completions(image: MetadataImage, disks: Disks = ALL_WELL) -> tuple[MetadataRecord, ...]:
    """Ends of moves that had to wait for something other than an ISR change (a live leader among those that stay)."""
    moving = ((t, p, s) for t, p, s in image.partitions() if s.reassigning)
    return tuple(done for t, p, s in moving if (done := complete(image, t, p, s, disks)) is not None)
