"""The coordinator of consumer groups: a shard for each partition of `__consumer_offsets` that this broker leads.

Only `confirm` waits, for a transaction's first commit. So simulated brokers run the same class.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.confirmation import CONFIRMATIONS_MAX, Confirm, no_coordinator
from spark_broker.broker.coordinator_runtime import CoordinatorRuntime, Led
from spark_broker.broker.internal_records import encode_rows, row_batches, rows_of
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Answer, Reply
from spark_broker.broker.request_queue import GiveWay, keep_on, pieces
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage
from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.records import (
    GroupRecord,
    OldCommit,
    OldOffsetKey,
    OldOffsetValue,
    decode_record,
    encode_record,
)
from spark_broker.core.groups.records import Partition as TopicPartitionId
from spark_broker.core.groups.requests import Commit, CommitOffset, Decision, GroupSettings, Now
from spark_broker.core.groups.topics import Topic, Topics
from spark_broker.core.replica import ACKS_ALL
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InconsistentTopicIdError,
    InvalidRequestError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
    UnstableOffsetCommitError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.frame import ABORT, CONTROL, TRANSACTIONAL, Frame
from spark_broker.protocol.messages import (
    CommittedOffset,
    EmptyResponse,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    TransactionalOffsetCommitRequest,
)

logger = logging.getLogger(__name__)

LOADS_BITS = 24
"""A generation of a shard: the leader epoch, then how many shards this broker has loaded."""

WAITING_MAX = 20_000
"""Requests that may wait at a time for what they have appended; beyond it, they are refused."""

READ_BARRIER = encode_record(OldCommit(OldOffsetKey("", "", 0), OldOffsetValue(0, -1, "")))
"""A record of no group. A coordinator appends it to learn whether it still leads: once the record is committed, no
later leader had been elected when it was appended.
"""


class _Held(NamedTuple):
    """An answer that is given when so many appends of the shard are committed."""

    appends: int
    reply: Reply
    answer: Answer


class GroupCoordinator(CoordinatorRuntime[GroupShard]):
    """Offsets of groups live in the log: a new leader reads them from it. `commit` and `fetch` are safe from any
    thread.

    Batches of transactions, and their markers, are taken from the log when the shard is next asked, also before they
    are committed: nothing that depends on them is answered sooner than they are. What a shard decides, it has at once.
    """

    topic_name = CONSUMER_OFFSETS_TOPIC

    def __init__(
        self,
        manager: ReplicaManager,
        config: ClusterConfig,
        confirm: Confirm = no_coordinator,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(manager, wake=wake, clock=clock)
        self._settings = GroupSettings(offsets_retention_ms=config.offsets_retention_minutes * 60_000)
        self._confirm = confirm
        self._held: dict[int, deque[_Held]] = {}  # by partition of the topic
        self._loads = 0
        self._image = EMPTY_IMAGE  # of which `_topics` are
        self._topics = Topics()

    def commit(
        self,
        request: OffsetCommitRequest | TransactionalOffsetCommitRequest,
        deadline_ms: int,
        reply: Reply,
        give_way: GiveWay = keep_on,
    ) -> None:
        """Append the offsets; those of a transaction count once it is committed. `deadline_ms` (boot-time clock): for
        the transaction's coordinator.

        `reply` gets EmptyResponse once the offsets are committed in the log, or the error. Of some that may not be
        committed (their topics were deleted) it gets the error of the first one, once the others are: a group reads on
        what is there. Those of a transaction are all committed, or none. Raises the error that the client gets when
        nothing was appended.
        """
        if not request.group_id:
            raise InvalidRequestError("a commit without a group id")
        if any(committed.offset < 0 for committed in request.offsets):
            raise InvalidRequestError("a commit of a negative offset")
        if not request.offsets:
            reply(EmptyResponse())
            return
        transaction = request if isinstance(request, TransactionalOffsetCommitRequest) else None
        offsets, refusal = self._identify(request, give_way)
        if refusal is not None and (transaction is not None or not offsets):
            raise refusal
        commit = Commit(request.group_id, offsets)
        with _coordinator_errors():
            if transaction is not None:
                self._commit_in_transaction(transaction, commit, deadline_ms, reply)
                return
            with self._turn():
                led = self._asked(commit.group_id)
                decision = led.shard.commit(commit, self._now())
                self._append_decided(led, decision)
                refusal = refusal or next(iter(decision.answer.refused.values()), None)
                self._answer(led, reply, refusal or EmptyResponse())

    def _identify(
        self, request: OffsetCommitRequest | TransactionalOffsetCommitRequest, give_way: GiveWay
    ) -> tuple[dict[TopicPartitionId, CommitOffset], SparkBrokerError | None]:
        """The offsets by partition; and the error of the first one whose partition is not there."""
        offsets: dict[TopicPartitionId, CommitOffset] = {}
        refusal: SparkBrokerError | None = None
        for committed in pieces(request.offsets, give_way):
            try:
                partition, offset = self._identified(committed)
            except SparkBrokerError as error:
                refusal = refusal or error
            else:
                offsets[partition] = offset
        return offsets, refusal

    def _identified(self, committed: CommittedOffset) -> tuple[TopicPartitionId, CommitOffset]:
        """The partition by its topic's id. Raises InconsistentTopicIdError for a topic that was deleted."""
        image = self._manager.image
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
        offset = CommitOffset(committed.offset, committed.leader_epoch, committed.metadata)
        return (topic.topic_id, committed.partition), offset

    def _check(self, led: Led[GroupShard], commit: Commit) -> None:
        """Raises the error of the first offset that is refused: a transaction is done as a whole, or not at all."""
        for refusal in led.shard.refused_offsets(commit).values():
            raise refusal

    def _commit_in_transaction(
        self, request: TransactionalOffsetCommitRequest, commit: Commit, deadline_ms: int, reply: Reply
    ) -> None:
        """The first batch of a transaction waits for the transaction's coordinator, outside of the lock."""
        partition: Partition | None = None
        for _ in range(CONFIRMATIONS_MAX):
            with self._turn():
                led = self._asked(commit.group_id)
                self._check(led, commit)
                append = self._transactional(led, commit, request, deadline_ms)
                partition = led.partition
                awaited = partition.append(append, _TransactionalCommit(self, reply))
            if awaited is None:
                return
            if not request.transactional_id:
                raise InvalidRequestError("offsets in a transaction without a transactional id")
            self._confirm(partition, awaited, request.transactional_id, deadline_ms)
        raise CoordinatorNotAvailableError(f"{partition}: the transaction was confirmed and changed again")

    def _transactional(
        self, led: Led[GroupShard], commit: Commit, request: TransactionalOffsetCommitRequest, deadline_ms: int
    ) -> Append:
        topic = led.partition.topic
        message = encode_rows(
            [encode_record(GroupRecord(*record)) for record in led.shard.offset_records(commit, self._now())],
            topic.schemas[-1],
            topic.schema_id,
            self._clock.wall_ms(),
            producer_id=request.producer_id,
            producer_epoch=request.producer_epoch,
            sequence=request.sequence,
            attributes=TRANSACTIONAL,
        )
        return Append(message, led.leader_epoch, ACKS_ALL, topic.schema_id, deadline_ms)

    def fetch(self, request: OffsetFetchRequest, reply: Reply) -> None:
        """Answer with what the group has committed, once it is certain that this broker still leads.

        A group's next member must not begin before what the last one has committed, nor before what a transaction may
        still commit (`require_stable`). `reply` and errors: as of `commit`, and UnstableOffsetCommitError.

        The controller may move the leadership of a live broker, which learns of it later. Until then, the broker can
        read, but not commit: the other replicas follow the new leader. So it appends a barrier, unless it is alone in
        the ISR (docs/adr/0013-read-barriers.md).
        """
        wanted = None if request.partitions is None else self._known(request.partitions)
        with _coordinator_errors(), self._turn():
            led = self._asked(request.group_id)
            undecided = led.shard.state.undecided.of(request.group_id, wanted) if request.require_stable else None
            if undecided is not None:
                topic = led.shard.topics.by_id.get(undecided[0])
                moves = f"{topic.name if topic else undecided[0]}-{undecided[1]}"
                raise UnstableOffsetCommitError(
                    f"a transaction of group {request.group_id!r} that is open moves {moves}"
                )
            answer = OffsetFetchResponse(self._committed_of(led, request.group_id, wanted))
            if led.partition.is_replaceable():
                self._append(led, [READ_BARRIER])
            else:
                led.check_leadership()
            self._answer(led, reply, answer)

    def _known(self, partitions: Iterable[tuple[str, int]]) -> list[TopicPartitionId]:
        """The partitions by their topics' ids. One whose topic is not there has no offset."""
        topics = ((self._manager.image.topic(name), number) for name, number in partitions)
        return [(topic.topic_id, number) for topic, number in topics if topic is not None]

    def _committed_of(
        self, led: Led[GroupShard], group_id: str, partitions: list[TopicPartitionId] | None
    ) -> list[CommittedOffset]:
        """By name: what is committed of a topic that was deleted is none of a later topic's."""
        by_id, offsets = led.shard.topics.by_id, led.shard.offsets(group_id, partitions)
        committed = [
            CommittedOffset(by_id[id_].name, number, value.offset, value.leader_epoch, value.metadata, id_)
            for (id_, number), value in offsets.items()
            if id_ in by_id
        ]
        return committed if partitions is not None else sorted(committed, key=lambda c: (c.topic, c.partition))

    # What the runtime asks for.

    def _new_shard(self, partition: Partition) -> GroupShard:
        self._loads += 1
        return GroupShard(self._settings, (partition.leader_epoch() << LOADS_BITS) + self._loads, str(partition))

    def _replay(self, led: Led[GroupShard], frame: Frame) -> None:
        header = frame.header
        if header.attributes & CONTROL:
            led.shard.decide(header.producer_id, committed=not header.attributes & ABORT)
        elif header.attributes & TRANSACTIONAL:
            led.shard.write_undecided(header.producer_id, self._records_of(led, frame))
        else:
            for record in self._records_of(led, frame):
                led.shard.replay(record)

    def _records_of(self, led: Led[GroupShard], frame: Frame) -> list[GroupRecord | OldCommit]:
        return [decode_record(key, value) for key, value in rows_of(led.partition.reader.decode(frame))]

    def _loaded(self, led: Led[GroupShard]) -> None:
        logger.info("coordinates %s groups of %s", len(led.shard.state.groups), led.partition)
        self._take_image()
        self._append_decided(led, led.shard.loaded(self._topics, self._now()))
        self._append_decided(led, led.shard.topics_changed(self._topics, self._image.tombstones, self._now()))

    def _unloaded(self, led: Led[GroupShard]) -> None:
        moved = NotLeaderOrFollowerError("the coordinator moved before it could answer")
        self._outbox.extend(partial(held.reply, moved) for held in self._held.pop(led.number, ()))

    def _committed(self, led: Led[GroupShard]) -> None:
        held = self._held.get(led.number)
        while held and held[0].appends <= led.committed:
            self._outbox.append(partial(held[0].reply, held.popleft().answer))

    def _time_passes(self) -> None:
        """Topics change; sessions end; offsets of groups that nobody uses expire."""
        for led in list(self._shards.values()):
            try:
                self._bring_up_to_date(led)
                if led.shard.next_due_ms <= self._clock.boottime_ms():
                    is_open = self._has_open_transaction(led)
                    self._append_decided(led, led.shard.clock(self._now(), is_open))
            except SparkBrokerError as error:
                # A failed disk has stopped the partition already. Anything else is tried again.
                logger.debug("%s: what is due waits: %s", led.partition, error)

    def _has_open_transaction(self, led: Led[GroupShard]) -> Callable[[str], bool]:
        return lambda group_id: led.shard.state.undecided.of(group_id) is not None

    # What decisions have in common.

    def _now(self) -> Now:
        return Now(self._clock.boottime_ms(), self._clock.wall_ms())

    def _asked(self, group_id: str) -> Led[GroupShard]:
        """The group's shard, up to date. Raises the error that says why there is none, or why it is not asked now."""
        led = self._shard_of(group_id)
        if len(self._held.get(led.number, ())) >= WAITING_MAX:
            raise CoordinatorNotAvailableError(f"{WAITING_MAX:,} requests wait at this coordinator")
        self._bring_up_to_date(led)
        return led

    def _bring_up_to_date(self, led: Led[GroupShard]) -> None:
        """Take what transactions have written since the last time, and the topics as they are now."""
        log, taken_to = led.partition.log, led.read_to
        if taken_to < log.log_end_offset:
            for header in led.partition.guard_storage(lambda: list(log.headers(taken_to))):
                if header.base_offset >= taken_to and header.attributes & (CONTROL | TRANSACTIONAL):
                    for frame in led.partition.read_log(header.base_offset, header.length, header.next_offset):
                        self._replay(led, frame)
                led.read_to = header.next_offset
        self._take_image()
        if led.shard.topics is not self._topics:
            deleted = led.shard.topics.by_id.keys() - self._topics.by_id.keys()
            gone = {topic_id for topic_id in deleted if topic_id in self._image.tombstones}
            self._append_decided(led, led.shard.topics_changed(self._topics, gone, self._now()))

    def _take_image(self) -> None:
        image = self._manager.image
        if image is not self._image:
            topics = topics_of(image)
            if topics.by_id != self._topics.by_id:
                self._topics = topics
            self._image = image

    def _append_decided(self, led: Led[GroupShard], decision: Decision[object]) -> None:
        """Append what the shard has decided, and has already. When it is refused, that has not happened."""
        for move in decision.moves:
            logger.log(logging.INFO if move.epoch else logging.DEBUG, "%s", move)  # debug: it has never had a member
        try:
            for rows in row_batches([encode_record(record) for record in decision.records]):
                self._append(led, rows)
        except SparkBrokerError:
            self._unload(led)
            raise

    def reply_later(self, reply: Reply, answer: Answer) -> None:
        """Event: the answer is known. It leaves outside of the lock."""
        self._outbox.append(partial(reply, answer))

    def _answer(self, led: Led[GroupShard], reply: Reply, answer: Answer) -> None:
        """Answer once everything is committed that was appended so far: the answer may show it."""
        if led.appended == led.committed:
            self._outbox.append(partial(reply, answer))
        else:
            self._held.setdefault(led.number, deque()).append(_Held(led.appended, reply, answer))


class _TransactionalCommit:
    """A transaction's offsets on their way. Called under the partition's lock.

    It does not count among the shard's appends: a batch that is repeated may be committed long before them.
    """

    def __init__(self, coordinator: GroupCoordinator, reply: Reply) -> None:
        self._coordinator = coordinator
        self._reply = reply

    def acknowledge(self, base_offset: int) -> None:
        del base_offset
        self._coordinator.note(partial(self._coordinator.reply_later, self._reply, EmptyResponse()))

    def refuse(self, error: SparkBrokerError) -> None:
        self._coordinator.note(partial(self._coordinator.reply_later, self._reply, error))


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


@contextmanager
def _coordinator_errors() -> Iterator[None]:
    try:
        yield
    except (NotLeaderOrFollowerError, NotEnoughReplicasError) as error:
        raise CoordinatorNotAvailableError(error.message) from None
