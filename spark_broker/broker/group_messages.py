"""Consumer groups on the wire and in the core: the same things, with topics by name and by id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from spark_broker.controller.image import MetadataImage
from spark_broker.core.groups.records import MemberValue, OffsetValue, Partition
from spark_broker.core.groups.requests import (
    Commit,
    CommitOffset,
    GroupDescription,
    Heartbeat,
    HeartbeatAnswer,
    MemberDescription,
)
from spark_broker.core.groups.topics import Topic, Topics
from spark_broker.errors import (
    InconsistentTopicIdError,
    InvalidRequestError,
    SparkBrokerError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from spark_broker.protocol.messages import (
    CommittedOffset,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DescribeGroupResponse,
    GroupMember,
    GroupRebalance,
    MemberAbout,
    OffsetCommitRequest,
    TopicPartitions,
    TransactionalOffsetCommitRequest,
)

NO_IDS: Mapping[str, str] = MappingProxyType({})


def topics_of(image: MetadataImage) -> Topics:
    """The topics of an image, with the racks of their replicas where brokers have racks."""
    racks = {broker.id: broker.rack for broker in image.brokers.values() if broker.rack}
    topics = (
        Topic(
            topic.topic_id,
            topic.name,
            len(topic.partitions),
            tuple(tuple(sorted({racks[r] for r in p.replicas if r in racks})) for p in topic.partitions)
            if racks
            else (),
        )
        for topic in image.topics.values()
    )
    return Topics(topics, image.next_offset)


def check_commit(request: OffsetCommitRequest | TransactionalOffsetCommitRequest) -> None:
    """Raises InvalidRequestError."""
    if not request.group_id:
        raise InvalidRequestError("a commit without a group id")
    if any(committed.offset < 0 for committed in request.offsets):
        raise InvalidRequestError("a commit of a negative offset")


def commit_of(
    request: OffsetCommitRequest | TransactionalOffsetCommitRequest, offsets: Mapping[Partition, CommitOffset]
) -> Commit:
    """The commit of these offsets, by the request's member."""
    return Commit(request.group_id, offsets, request.member_id, request.member_epoch, request.instance_id)


def offsets_to_commit(
    offsets: Iterable[CommittedOffset], image: MetadataImage
) -> tuple[dict[Partition, CommitOffset], SparkBrokerError | None]:
    """The offsets by partition; and the error of the first one whose partition is not there."""
    identified: dict[Partition, CommitOffset] = {}
    refusal: SparkBrokerError | None = None
    for committed in offsets:
        try:
            partition = _identified(committed, image)
        except SparkBrokerError as error:
            refusal = refusal or error
        else:
            identified[partition] = CommitOffset(committed.offset, committed.leader_epoch, committed.metadata)
    return identified, refusal


def _identified(committed: CommittedOffset, image: MetadataImage) -> Partition:
    """The partition by its topic's id. Raises InconsistentTopicIdError for a topic that was deleted."""
    topic = image.topics.get(committed.topic_id) if committed.topic_id else image.topic(committed.topic)
    if topic is None and committed.topic_id in image.tombstones:
        raise InconsistentTopicIdError(f"topic {committed.topic!r}, whose offset is committed, was deleted")
    if topic is None and committed.topic_id:
        raise UnknownTopicIdError(f"this broker knows no topic {committed.topic!r} with id {committed.topic_id}")
    if topic is None:
        raise UnknownTopicOrPartitionError(f"a commit of offsets: topic {committed.topic!r} does not exist")
    if committed.partition >= len(topic.partitions):
        there = f"topic {topic.name!r} has {len(topic.partitions)} partitions"
        raise UnknownTopicOrPartitionError(f"a commit of offsets: {there}, not {committed.partition + 1}")
    return topic.topic_id, committed.partition


def known_partitions(
    partitions: Iterable[tuple[str, int]], image: MetadataImage, topic_ids: Mapping[str, str] = NO_IDS
) -> list[Partition]:
    """The partitions by their topics' ids, without those whose topic is not there: they have no offset.

    `topic_ids`: of topics, by name, where the request says which one it means.
    """
    named = ((topic_ids.get(name) or _id_of(name, image), number) for name, number in partitions)
    return [(topic_id, number) for topic_id, number in named if topic_id]


def _id_of(name: str, image: MetadataImage) -> str:
    topic = image.topic(name)
    return "" if topic is None else topic.topic_id


def committed_offsets(offsets: Mapping[Partition, OffsetValue], topics: Topics) -> list[CommittedOffset]:
    """By name: what is committed of a topic that was deleted is none of a later topic's."""
    by_id = topics.by_id
    return [
        CommittedOffset(by_id[id_].name, number, value.offset, value.leader_epoch, value.metadata, id_)
        for (id_, number), value in offsets.items()
        if id_ in by_id
    ]


def heartbeat_of(request: ConsumerGroupHeartbeatRequest) -> Heartbeat:
    """The heartbeat as the core takes it."""
    about = request.about
    return Heartbeat(
        request.group_id,
        request.member_id,
        request.member_epoch,
        request.sequence,
        request.generation,
        None if request.owned is None else frozenset((t.topic_id, n) for t in request.owned for n in t.partitions),
        None if about is None else _member_value(about, request.instance_id),
        request.instance_id,
        request.reason,
    )


def _member_value(about: MemberAbout, instance_id: str) -> MemberValue:
    return MemberValue(
        tuple(about.topics),
        about.pattern,
        instance_id,
        about.rack,
        about.client_id,
        about.host,
        about.session_timeout_ms,
        about.rebalance_timeout_ms,
        about.assignor,
    )


def heartbeat_response(answer: HeartbeatAnswer, topics: Topics) -> ConsumerGroupHeartbeatResponse:
    """The answer of the core, with the names of topics."""
    return ConsumerGroupHeartbeatResponse(
        answer.sequence,
        answer.generation,
        answer.member_epoch,
        answer.heartbeat_interval_ms,
        None if answer.assignment is None else by_topic(answer.assignment, topics),
    )


def by_topic(partitions: Iterable[Partition], topics: Topics) -> list[TopicPartitions]:
    """The partitions of each topic, in order. A topic that is not known any more has no name."""
    grouped: dict[str, list[int]] = {}
    for topic_id, number in sorted(partitions):
        grouped.setdefault(topic_id, []).append(number)
    known = topics.by_id
    return [TopicPartitions(id_, numbers, known[id_].name if id_ in known else "") for id_, numbers in grouped.items()]


def description_of(
    group: GroupDescription, topics: Topics, coordinator: int, coordinator_epoch: int
) -> DescribeGroupResponse:
    """What people are told of a group."""
    return DescribeGroupResponse(
        group.group_id,
        group.phase.value,
        group.epoch,
        group.target_epoch,
        group.assignor,
        [_member(member, topics) for member in group.members],
        [GroupRebalance(each.epoch, each.time_ms, each.reason) for each in group.rebalances],
        coordinator,
        coordinator_epoch,
    )


def _member(member: MemberDescription, topics: Topics) -> GroupMember:
    about = member.about
    return GroupMember(
        member.member_id,
        about.instance_id,
        member.kind.value,
        member.epoch,
        MemberAbout(
            list(about.topics),
            about.pattern,
            about.rack,
            about.client_id,
            about.host,
            about.session_timeout_ms,
            about.rebalance_timeout_ms,
            about.assignor,
        ),
        by_topic(member.since.keys() - member.revoking, topics),
        by_topic(member.revoking, topics),
        by_topic(member.target, topics),
    )
