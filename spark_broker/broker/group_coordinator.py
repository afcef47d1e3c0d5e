"""The coordinator of consumer groups: a shard for each partition of `__consumer_offsets` that this broker leads.

Only `confirm` waits, for a transaction's first commit. So simulated brokers run the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.confirmation import CONFIRMATIONS_MAX, Confirm, no_coordinator
from spark_broker.broker.coordinator_runtime import Led
from spark_broker.broker.group_messages import (
    check_commit,
    commit_of,
    committed_offsets,
    description_of,
    heartbeat_of,
    known_partitions,
    offsets_to_commit,
)
from spark_broker.broker.group_shards import Compute, GroupShards, compute_here
from spark_broker.broker.internal_records import encode_rows
from spark_broker.broker.parked_heartbeats import Parked, ParkedKey
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Answer, Reply
from spark_broker.broker.request_queue import GiveWay, keep_on, pieces
from spark_broker.config import ClusterConfig
from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.records import (
    GroupRecord,
    encode_record,
)
from spark_broker.core.groups.requests import (
    Commit,
    CommitAnswer,
    Decision,
)
from spark_broker.core.replica import ACKS_ALL
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InvalidRequestError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    UnstableOffsetCommitError,
)
from spark_broker.protocol.frame import TRANSACTIONAL
from spark_broker.protocol.messages import (
    CallRequest,
    ConsumerGroupHeartbeatRequest,
    DeleteGroupOffsetsRequest,
    DeleteGroupRequest,
    DescribeGroupRequest,
    EmptyResponse,
    GroupListing,
    ListGroupsRequest,
    ListGroupsResponse,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    TransactionalOffsetCommitRequest,
)

A = TypeVar("A")


class GroupCoordinator(GroupShards):
    """Offsets of groups live in the log: a new leader reads them from it. All of it is safe from any thread."""

    def __init__(
        self,
        manager: ReplicaManager,
        config: ClusterConfig,
        confirm: Confirm = no_coordinator,
        *,
        wake: Callable[[], None] = lambda: None,
        compute: Compute = compute_here,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(manager, config, wake=wake, compute=compute, clock=clock)
        self._confirm = confirm

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
        check_commit(request)
        if not request.offsets:
            reply(EmptyResponse())
            return
        offsets, refusal = offsets_to_commit(pieces(request.offsets, give_way), self._manager.image)
        if refusal is not None and (isinstance(request, TransactionalOffsetCommitRequest) or not offsets):
            raise refusal
        commit = commit_of(request, offsets)
        if isinstance(request, TransactionalOffsetCommitRequest):
            with _coordinator_errors():
                self._commit_in_transaction(request, commit, deadline_ms, reply)
            return
        plain = request

        def answer(taken: CommitAnswer) -> Answer:
            return refusal or next(iter(taken.refused.values()), None) or EmptyResponse()

        def event(led: Led[GroupShard]) -> Decision[CommitAnswer]:
            self._orders[led.number].check(plain)
            return led.shard.commit(commit, self._now())

        self._ask(commit.group_id, reply, event, answer)

    def _commit_in_transaction(
        self, request: TransactionalOffsetCommitRequest, commit: Commit, deadline_ms: int, reply: Reply
    ) -> None:
        """The first batch of a transaction waits for the transaction's coordinator, outside of the lock."""
        partition: Partition | None = None
        for _ in range(CONFIRMATIONS_MAX):
            with self._turn():
                led = self._asked(commit.group_id, writes=True)
                refusal = _refusal_of(led, commit)
                if refusal is not None:
                    self._answer(led, reply, refusal)
                    return
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
        image = self._manager.image
        wanted = None if request.partitions is None else known_partitions(request.partitions, image)
        with _coordinator_errors(), self._turn():
            led = self._asked(request.group_id)
            undecided = led.shard.state.undecided.of(request.group_id, wanted) if request.require_stable else None
            if undecided is not None:
                topic = led.shard.topics.by_id.get(undecided[0])
                moves = f"{topic.name if topic else undecided[0]}-{undecided[1]}"
                raise UnstableOffsetCommitError(
                    f"a transaction of group {request.group_id!r} that is open moves {moves}"
                )
            member = (request.member_id, request.member_epoch)
            try:
                offsets = committed_offsets(led.shard.offsets(request.group_id, wanted, *member), led.shard.topics)
            except SparkBrokerError as error:
                self._answer(led, reply, error)
                return
            if wanted is None:
                offsets.sort(key=lambda committed: (committed.topic, committed.partition))
            self._answer_certainly(led, reply, OffsetFetchResponse(offsets))

    def _ask(
        self,
        group_id: str,
        reply: Reply,
        event: Callable[[Led[GroupShard]], Decision[A]],
        answer: Callable[[A], Answer],
    ) -> None:
        """One event of the group's shard, and its answer. A refusal is an answer, too: it rests on records that may
        not be committed yet.
        """
        with _coordinator_errors(), self._turn():
            led = self._asked(group_id, writes=True)  # A commit that is refused is not the last of its committer.
            try:
                decision = event(led)
            except SparkBrokerError as error:
                self._answer(led, reply, error)
            else:
                self._carry_out(led, decision)
                self._answer(led, reply, answer(decision.answer))

    def answer(self, request: CallRequest, reply: Reply) -> bool:
        """Answer a request about groups, now or later. False: it is none. Commits and fetches are not among them."""
        match request:
            case ConsumerGroupHeartbeatRequest():
                self.heartbeat(request, reply)
            case ListGroupsRequest():
                self.list_groups(reply)
            case DescribeGroupRequest():
                self.describe(request, reply)
            case DeleteGroupRequest() | DeleteGroupOffsetsRequest():
                self.delete(request, reply)
            case _:
                return False
        return True

    def heartbeat(self, request: ConsumerGroupHeartbeatRequest, reply: Reply) -> None:
        """A member joins, goes on or leaves. `reply` gets ConsumerGroupHeartbeatResponse or the error: later, while the
        member has nothing to do.
        """
        beat = heartbeat_of(request)
        with _coordinator_errors(), self._turn():
            led = self._asked(beat.group_id)
            key = ParkedKey(led.number, beat.group_id, beat.member_id)
            try:
                decision = led.shard.heartbeat(beat, self._now())
            except CoordinatorNotAvailableError:
                raise  # The log takes no appends. That rests on no record, so it waits for none.
            except SparkBrokerError as error:
                self._answer(led, reply, error)
            else:
                self._carry_out(led, decision)
                self._overtake(led, key, beat.sequence)
                parked = Parked(beat.sequence, reply, self._clock.boottime_ms() + self._hold_ms(led, key))
                self._answer_heartbeat(led, key, parked, decision.answer)

    def list_groups(self, reply: Reply) -> None:
        """Every group of the partitions that this broker leads, as it is now, and which partitions these are."""
        groups: list[GroupListing] = []
        partitions: list[tuple[int, int]] = []
        with self._turn():
            self._follow_leadership()
            for number, led in sorted(self._shards.items()):
                try:
                    led.check_leadership()
                except NotLeaderOrFollowerError:
                    continue  # Another broker may lead already: this one says nothing of the partition.
                partitions.append((number, led.leader_epoch))
                groups += [
                    GroupListing(group_id, phase.value, len(led.shard.state.group(group_id).members))
                    for group_id, phase in led.shard.phases().items()
                ]
        reply(ListGroupsResponse(sorted(groups, key=lambda each: each.group_id), partitions))

    def describe(self, request: DescribeGroupRequest, reply: Reply) -> None:
        """Describe a group, once it is certain that this broker still leads. Errors: as of `commit`."""
        with _coordinator_errors(), self._turn():
            led = self._asked(request.group_id)
            group = led.shard.describe(request.group_id)
            answer = description_of(group, led.shard.topics, self._manager.broker_id, led.leader_epoch)
            self._answer_certainly(led, reply, answer)

    def delete(self, request: DeleteGroupRequest | DeleteGroupOffsetsRequest, reply: Reply) -> None:
        """Forget a group, or some of its offsets. `reply` and errors: as of `commit`."""
        group_id = request.group_id

        def delete(led: Led[GroupShard]) -> Decision[None]:
            self._orders[led.number].check_epoch(request.coordinator_epoch)
            is_open = self._has_open_transaction(led)
            if isinstance(request, DeleteGroupRequest):
                return led.shard.delete_group(group_id, self._now(), is_open)
            partitions = known_partitions(request.partitions, self._manager.image, request.topic_ids)
            return led.shard.delete_offsets(group_id, partitions, self._now(), is_open)

        self._ask(group_id, reply, delete, lambda _: EmptyResponse())


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


def _refusal_of(led: Led[GroupShard], commit: Commit) -> SparkBrokerError | None:
    """Why a transaction may not commit these offsets: it is done as a whole, or not at all."""
    try:
        return next(iter(led.shard.refused_offsets(commit).values()), None)
    except SparkBrokerError as error:
        return error


@contextmanager
def _coordinator_errors() -> Iterator[None]:
    try:
        yield
    except (NotLeaderOrFollowerError, NotEnoughReplicasError) as error:
        raise CoordinatorNotAvailableError(error.message) from None
