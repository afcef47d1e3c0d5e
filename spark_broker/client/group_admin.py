"""Consumer groups as an administrator sees them: what coordinators know, and offsets that are set from outside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial

from spark_broker.client import given
from spark_broker.client.cluster_view import ClusterView, TopicView, address_of
from spark_broker.client.coordinator import PATIENCE_MS, CoordinatorClient
from spark_broker.client.group_offsets import GroupOffsets
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import all_at, lookup_offsets, try_lookup_offsets
from spark_broker.client.retry import Deadline, Rounds, failure_of
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    GroupIdNotFoundError,
    InvalidDataError,
    InvalidGroupIdError,
    NonEmptyGroupError,
    RequestTimedOutError,
    SparkBrokerError,
    UnknownMemberIdError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
)
from spark_broker.group_model import (
    GROUP_STATES,
    GroupDescription,
    GroupListing,
    GroupOffset,
    GroupRebalance,
    MemberDescription,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, NAME_MAX, OffsetAndMetadata, TopicPartition
from spark_broker.protocol.messages import (
    BrokerMetadata,
    DeleteGroupOffsetsRequest,
    DeleteGroupRequest,
    DescribeGroupRequest,
    DescribeGroupResponse,
    EmptyResponse,
    GroupMember,
    ListedOffset,
    ListGroupsRequest,
    ListGroupsResponse,
    TopicPartitions,
)
from spark_broker.protocol.messages import GroupListing as ListedGroup
from spark_broker.protocol.murmur2 import group_partition
from spark_broker.times import LATEST, from_ms
from spark_broker.visible import shown

DEAD = "Dead"
"""What a coordinator calls a group that is not there."""

PARTITIONS_AT_ONCE = 10_000
"""So many offsets fit into one request."""

ENDS_MS = 2000
"""How long offsets of a group wait for the ends of partitions. A leader that has not answered by then gives none."""

KNOWN_GROUPS = "`spark-broker groups list` shows the groups and the state of each."


class GroupAdmin(ABC):
    """The part of `Admin` that is about consumer groups. Safe for use by many threads."""

    _metadata: ClusterMetadata

    @abstractmethod
    def _deadline(self) -> Deadline:
        """Of a call that begins now."""

    def list_groups(self, states: Iterable[str] | None = None) -> list[GroupListing]:
        """Every group of the cluster, sorted by id; or only those in these states (of GROUP_STATES).

        The list is whole: raises CoordinatorNotAvailableError when some group's coordinator does not answer within
        default.api.timeout.ms.
        """
        deadline, wanted = self._deadline(), GROUP_STATES if states is None else _states(states)
        return [group for group in _Survey(self._metadata).run(deadline) if group.state in wanted]

    def describe_group(self, group_id: str) -> GroupDescription:
        """The group with its members and its last rebalances. Raises GroupIdNotFoundError."""
        deadline, name = self._deadline(), _group_id(group_id)
        return _describe(self._metadata, name, deadline)

    def group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, GroupOffset]:
        """Where the group stands in each partition that it has committed, or whose partition is a member's.

        With `partitions`: in these, also if the group has nothing to do with them, or is not there yet. A leader that
        does not answer at once gives no ends. Raises GroupIdNotFoundError, UnknownTopicOrPartitionError.
        """
        deadline, name = self._deadline(), _group_id(group_id)
        chosen = None if partitions is None else given.topic_partitions(partitions)
        return _offsets(self._metadata, name, chosen, deadline)

    def alter_group_offsets(self, group_id: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]) -> None:
        """Set committed offsets of a group that has no members. All are checked before one is set. A group that is not
        there begins with them. More than 10,000 are set one part after the other.

        Raises NonEmptyGroupError while the group has members (it says whether something may have been set before one
        came), OffsetOutOfRangeError for an offset before the first
        record or beyond the end, UnknownTopicOrPartitionError.
        """
        deadline, name, wanted = self._deadline(), _group_id(group_id), given.offsets(offsets)
        _alter(self._metadata, name, wanted, deadline)

    def delete_group(self, group_id: str) -> None:
        """Forget a group that has no members, with its committed offsets.

        Raises NonEmptyGroupError, GroupIdNotFoundError (also when the first answer of a retried request was lost), and
        UnstableOffsetCommitError when a transaction that commits offsets of the group stays open.
        """
        deadline, name = self._deadline(), _group_id(group_id)
        _existing(self._metadata, name, deadline).ask(DeleteGroupRequest(name), EmptyResponse, deadline)

    def delete_groups(self, group_ids: Iterable[str]) -> dict[str, SparkBrokerError | None]:
        """Delete several groups. Returns for each id None, or the reason why that group was not deleted.

        Raises ClosedError and BootstrapUnreachableError. Some groups were not tried then.
        """
        return {group_id: failure_of(self.delete_group, group_id) for group_id in given.names(group_ids, "group_ids")}

    def delete_group_offsets(self, group_id: str, partitions: Iterable[TopicPartition]) -> None:
        """Forget committed offsets of topics that no member reads. A partition without an offset is no error.

        Raises GroupSubscribedToTopicError, GroupIdNotFoundError, UnknownTopicOrPartitionError, and
        UnstableOffsetCommitError as `delete_group` does.
        """
        deadline, name = self._deadline(), _group_id(group_id)
        chosen = list(dict.fromkeys(given.topic_partitions(partitions)))
        _check_there(self._metadata, chosen, deadline)
        topic_ids = _topic_ids(self._metadata, chosen, deadline)
        coordinator = _existing(self._metadata, name, deadline)
        for first in range(0, len(chosen), PARTITIONS_AT_ONCE):
            some = [(tp.topic, tp.partition) for tp in chosen[first : first + PARTITIONS_AT_ONCE]]
            try:
                ids = {topic: topic_ids[topic] for topic, _ in some}
                coordinator.ask(DeleteGroupOffsetsRequest(name, some, topic_ids=ids), EmptyResponse, deadline)
            except GroupIdNotFoundError:
                if first == 0:
                    raise
                return  # It went with the last of its offsets: there are no others.


def _group_id(value: object) -> str:
    """Raises InvalidDataError and InvalidGroupIdError."""
    group_id = given.text(value, "group_id")
    if not 1 <= len(group_id) <= NAME_MAX:
        raise InvalidGroupIdError(f"a group id has from 1 to {NAME_MAX} characters, and this one {len(group_id):,}")
    return group_id


def _states(values: object) -> list[str]:
    """Raises InvalidDataError."""
    states = given.texts(values, "states")
    unknown = next((state for state in states if state not in GROUP_STATES), None)
    if unknown is not None:
        raise InvalidDataError(f"no group is {shown(unknown)}", hint=f"States are {', '.join(GROUP_STATES)}.")
    return states


class _Survey:
    """One list of all groups: the coordinators are asked until each partition of `__consumer_offsets` is in an answer.

    A broker that leads a partition and does not know it yet says nothing of it. One that has led it until now may say
    something: the answer of the later leader epoch counts.
    """

    def __init__(self, metadata: ClusterMetadata) -> None:
        self._metadata = metadata
        self._epochs: dict[int, int] = {}  # by partition: the leader epoch of the answer that has it
        self._groups: dict[int, list[GroupListing]] = {}  # by partition
        self._failures: dict[int, SparkBrokerError] = {}  # by broker: of the last round

    def run(self, deadline: Deadline) -> list[GroupListing]:
        """Raises CoordinatorNotAvailableError at the deadline, and what no other try mends."""
        self._metadata.use([CONSUMER_OFFSETS_TOPIC])
        attempt, rounds, failure = 0, Rounds(deadline, self._metadata.backoff, self._metadata.closing), None
        while True:
            try:
                view = self._metadata.refresh(deadline)
            except RequestTimedOutError as error:
                raise rounds.reason(error, failure) from None
            topic = view.topic(CONSUMER_OFFSETS_TOPIC)
            missing = [] if topic is None else self._missing(topic)
            if topic is not None:
                self._ask_leaders(view, topic, missing, attempt, deadline)
                missing = self._missing(topic)
            if not missing:
                groups = (group for of_partition in self._groups.values() for group in of_partition)
                return sorted(groups, key=lambda group: group.group_id)
            failure, attempt = self._incomplete(missing), attempt + 1
            if not rounds.next():
                raise failure

    def _missing(self, topic: TopicView) -> list[int]:
        return [partition.partition for partition in topic.partitions if partition.partition not in self._epochs]

    def _ask_leaders(
        self, view: ClusterView, topic: TopicView, missing: list[int], attempt: int, deadline: Deadline
    ) -> None:
        """Each leader of a missing partition is asked once. A frozen one is not waited for: it may lead no longer."""
        leaders = (view.leader(topic.name, number) for number in missing)
        brokers = {leader[0].id: leader[0] for leader in leaders if leader is not None}
        self._failures.clear()
        for broker in sorted(brokers.values(), key=lambda broker: broker.id):
            patience = Deadline.after_ms(PATIENCE_MS << min(attempt, 16))
            self._ask(broker, len(topic.partitions), patience.or_sooner(deadline))

    def _ask(self, broker: BrokerMetadata, partitions: int, limit: Deadline) -> None:
        try:
            answer = self._metadata.call(address_of(broker), ListGroupsRequest(), limit)
        except SparkBrokerError as error:
            if not error.retriable:
                raise
            self._failures[broker.id] = error
            return
        if not isinstance(answer, ListGroupsResponse):
            raise UnknownServerError(f"ListGroups was answered with {type(answer).__name__}")
        by_partition: dict[int, list[ListedGroup]] = {}
        for group in answer.groups:
            by_partition.setdefault(group_partition(group.group_id, partitions), []).append(group)
        for number, leader_epoch in answer.partitions:
            if leader_epoch >= self._epochs.get(number, -1):
                self._epochs[number] = leader_epoch
                self._groups[number] = [
                    GroupListing(group.group_id, group.state, group.members, broker.id)
                    for group in by_partition.get(number, ())
                ]

    def _incomplete(self, missing: list[int]) -> CoordinatorNotAvailableError:
        why = "; ".join(f"broker {broker_id}: {error.message}" for broker_id, error in sorted(self._failures.items()))
        names = ", ".join(f"{CONSUMER_OFFSETS_TOPIC}-{number}" for number in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        return CoordinatorNotAvailableError(
            f"nobody lists the groups of {names}{more} ({why or 'no broker leads there, or its log is being read'})",
            hint=f"`spark-broker topics describe {CONSUMER_OFFSETS_TOPIC}` shows who leads; ask again once all have a "
            "leader. Groups elsewhere can be described by their ids.",
        )


def _existing(metadata: ClusterMetadata, group_id: str, deadline: Deadline) -> CoordinatorClient:
    """The group's coordinator. Raises GroupIdNotFoundError where no group was ever kept: nobody is to create the topic
    of the groups for a question.
    """
    if metadata.fetch([CONSUMER_OFFSETS_TOPIC], deadline).topic(CONSUMER_OFFSETS_TOPIC) is None:
        raise _unknown(group_id)
    return CoordinatorClient(metadata, CONSUMER_OFFSETS_TOPIC, group_id)


def _unknown(group_id: str) -> GroupIdNotFoundError:
    return GroupIdNotFoundError(f"there is no group {group_id!r}", hint=KNOWN_GROUPS)


def _describe(metadata: ClusterMetadata, group_id: str, deadline: Deadline) -> GroupDescription:
    """Raises GroupIdNotFoundError."""
    coordinator = _existing(metadata, group_id, deadline)
    answer = coordinator.ask(DescribeGroupRequest(group_id), DescribeGroupResponse, deadline, patient=False)
    if answer.state == DEAD:
        raise _unknown(group_id)
    return GroupDescription(
        answer.group_id,
        answer.state,
        answer.epoch,
        answer.target_epoch,
        answer.assignor or None,
        tuple(_member(member) for member in answer.members),
        tuple(GroupRebalance(each.epoch, from_ms(each.time_ms), each.reason) for each in answer.rebalances),
        answer.coordinator,
        answer.coordinator_epoch,
    )


def _member(member: GroupMember) -> MemberDescription:
    about = member.about
    return MemberDescription(
        member.member_id,
        member.instance_id or None,
        about.client_id,
        about.host,
        about.rack or None,
        member.kind,
        member.epoch,
        tuple(about.topics),
        about.pattern or None,
        about.assignor or None,
        about.session_timeout_ms / 1000,
        about.rebalance_timeout_ms / 1000,
        _partitions(member.assigned),
        _partitions(member.revoking),
        _partitions(member.target),
    )


def _partitions(topics: Iterable[TopicPartitions]) -> tuple[TopicPartition, ...]:
    named = ((topic.topic or topic.topic_id, number) for topic in topics for number in topic.partitions)
    return tuple(sorted(TopicPartition(name, number) for name, number in named))


def _offsets(
    metadata: ClusterMetadata, group_id: str, chosen: list[TopicPartition] | None, deadline: Deadline
) -> dict[TopicPartition, GroupOffset]:
    """Offsets of the chosen partitions; None: of those that are the group's."""
    committed: dict[TopicPartition, OffsetAndMetadata] = {}
    owners: dict[TopicPartition, str] = {}
    try:
        description = _describe(metadata, group_id, deadline)
    except GroupIdNotFoundError:
        if chosen is None:
            raise
    else:
        committed = GroupOffsets(metadata, group_id).fetch(None, deadline)
        owners = {tp: m.member_id for m in description.members for tp in (*m.assigned, *m.revoking)}
    partitions = sorted({*committed, *owners} if chosen is None else set(chosen))
    patience = Deadline.after_ms(min(ENDS_MS, deadline.remaining_ms))
    ends, failures = try_lookup_offsets(metadata, all_at(partitions, LATEST), patience)
    gone = {tp for tp, error in failures.items() if isinstance(error, UnknownTopicOrPartitionError)}
    if gone and chosen is not None:
        raise failures[min(gone)]
    return {
        tp: _group_offset(metadata.view, tp, committed.get(tp), ends.get(tp), owners.get(tp))
        for tp in partitions
        if tp not in gone
    }


def _group_offset(
    view: ClusterView,
    tp: TopicPartition,
    committed: OffsetAndMetadata | None,
    end: ListedOffset | None,
    member_id: str | None,
) -> GroupOffset:
    return GroupOffset(
        tp.topic,
        tp.partition,
        None if committed is None else committed.offset,
        None if committed is None else committed.leader_epoch,
        "" if committed is None else committed.metadata,
        None if end is None else _start(view, tp, end),
        None if end is None else end.offset,
        None if end is None else end.high_watermark,
        member_id,
    )


def _start(view: ClusterView, tp: TopicPartition, listed: ListedOffset) -> int:
    topic = view.topic(tp.topic)
    return listed.log_start_offset if topic is None else topic.begins(tp.partition, listed.log_start_offset)


def _check_there(metadata: ClusterMetadata, partitions: Iterable[TopicPartition], deadline: Deadline) -> None:
    """Raises UnknownTopicOrPartitionError."""
    for tp in partitions:
        metadata.topic(tp.topic, deadline, partition=tp.partition)


def _topic_ids(metadata: ClusterMetadata, partitions: Iterable[TopicPartition], deadline: Deadline) -> dict[str, str]:
    """Of the topics that have these names now. Raises UnknownTopicOrPartitionError."""
    names = list(dict.fromkeys(tp.topic for tp in partitions))
    topics = metadata.all_recorded(names, deadline)
    for name in names:
        if name not in topics:
            raise UnknownTopicOrPartitionError(f"topic {name!r} does not exist any more")
    return {name: topics[name].topic_id for name in names}


def _alter(
    metadata: ClusterMetadata, group_id: str, offsets: Mapping[TopicPartition, OffsetAndMetadata], deadline: Deadline
) -> None:
    """The coordinator takes a commit of nobody only while the group has no members, and decides that for each request.
    A consumer may join between two of them, or after one that was stored and whose answer was lost.
    """
    if not offsets:
        return
    _check_there(metadata, offsets, deadline)
    listed = lookup_offsets(metadata, all_at(offsets, LATEST), deadline)
    for tp, wanted in sorted(offsets.items(), key=lambda item: item[0]):
        _group_offset(metadata.view, tp, None, listed[tp], None).check(wanted.offset)
    topic_ids = {tp: listed[tp].topic_id for tp in offsets}
    items = list(offsets.items())
    tries: list[int] = []
    try:
        for first in range(0, len(items), PARTITIONS_AT_ONCE):
            some = dict(items[first : first + PARTITIONS_AT_ONCE])
            trying = partial(tries.append, first)
            GroupOffsets(metadata, group_id).commit(some, deadline, topic_ids, trying=trying)
    except UnknownMemberIdError:
        if len(tries) > 1:
            raise NonEmptyGroupError(
                f"the group {group_id!r} has members by now, and only they commit; some of the offsets may have been "
                "set before",
                hint="Stop the group's consumers, see with `spark-broker groups describe` where the group is, and set "
                "the offsets again.",
            ) from None
        raise NonEmptyGroupError(
            f"the group {group_id!r} has members, and only they commit; nothing was changed",
            hint="Stop the group's consumers first (`spark-broker groups describe` shows them), or wait until their "
            "sessions end. A consumer of the group moves itself with `seek`.",
        ) from None
