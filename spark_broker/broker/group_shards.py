"""The shards of `__consumer_offsets` that this broker leads: they are loaded, their decisions appended, answers given.

Nothing waits here. `group_coordinator` has the requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.commit_order import CommitOrder
from spark_broker.broker.coordinator_runtime import REFUSED_AGAIN_MS, CoordinatorRuntime, Led, check_takes
from spark_broker.broker.group_messages import (
    heartbeat_response,
    topics_of,
)
from spark_broker.broker.internal_records import row_batches, rows_of
from spark_broker.broker.parked_heartbeats import Parked, ParkedHeartbeats, ParkedKey
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Answer, Reply
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import EMPTY_IMAGE
from spark_broker.core.batch import NO_PRODUCER
from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.records import (
    GroupRecord,
    OldCommit,
    OldOffsetKey,
    OldOffsetValue,
    decode_record,
    encode_record,
)
from spark_broker.core.groups.requests import (
    ComputeTarget,
    Decision,
    GroupSettings,
    HeartbeatAnswer,
    Now,
    TargetReady,
    Wake,
    held_at_most_ms,
)
from spark_broker.core.groups.topics import Topics
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.frame import ABORT, CONTROL, TRANSACTIONAL, BatchHeader, Frame

logger = logging.getLogger(__name__)

LOADS_BITS = 24
"""A generation of a shard: the leader epoch, then how many shards this broker has loaded."""

WAITING_MAX = 20_000
"""Requests that may wait at a time for what they have appended; beyond it, they are refused."""

READ_BARRIER = encode_record(OldCommit(OldOffsetKey("", "", 0), OldOffsetValue(0, -1, "")))
"""A record of no group. A coordinator appends it to learn whether it still leads: once the record is committed, no
later leader had been elected when it was appended.
"""


A = TypeVar("A")

Compute = Callable[[str, Callable[[], None]], None]
"""Runs work, named by whose it is, in another thread. It may leave out what was asked for earlier by the same name."""


def compute_here(name: str, work: Callable[[], None]) -> None:
    """A `Compute` of tests."""
    del name
    work()


class _Held(NamedTuple):
    """An answer that is given when so many appends of the shard are committed."""

    appends: int
    reply: Reply
    answer: Answer


class GroupShards(CoordinatorRuntime[GroupShard]):
    """A shard for each partition that this broker leads.

    Batches of transactions, and their markers, are taken from the log when the shard is next asked, also before they
    are committed: nothing that depends on them is answered sooner than they are. What a shard decides, it has at once.
    So a shard asks before it writes (`_check_takes`). One whose append is refused all the same is thrown away, and
    loaded again from its log, which may be long.
    """

    topic_name = CONSUMER_OFFSETS_TOPIC

    def __init__(
        self,
        manager: ReplicaManager,
        config: ClusterConfig,
        *,
        wake: Callable[[], None] = lambda: None,
        compute: Compute = compute_here,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`compute` runs work that takes long elsewhere."""
        super().__init__(manager, wake=wake, clock=clock)
        self._settings = settings_of(config)
        self._compute = compute
        self._held: dict[int, deque[_Held]] = {}  # by partition of the topic
        self._parked = ParkedHeartbeats()
        self._orders: dict[int, CommitOrder] = {}  # by partition of the topic
        self._standstills: set[int] = set()  # partitions whose shards may not write since they were asked, or loaded
        self._loads = 0
        self._image = EMPTY_IMAGE  # of which `_topics` are
        self._topics = Topics()

    def compute_beyond(self, inline_size_max: int) -> None:
        """Compute the targets of groups elsewhere that are larger (members times partitions). For tests."""
        self._settings = replace(self._settings, inline_size_max=inline_size_max)

    # What the runtime asks for.

    def _new_shard(self, partition: Partition) -> GroupShard:
        self._loads += 1
        leader_epoch = partition.leader_epoch()
        check_takes = partial(self._check_takes, partition, leader_epoch)
        return GroupShard(self._settings, (leader_epoch << LOADS_BITS) + self._loads, str(partition), check_takes)

    def _check_takes(self, partition: Partition, leader_epoch: int) -> None:
        """Called by a shard before it writes. Raises CoordinatorNotAvailableError while the log takes no appends."""
        try:
            check_takes(partition, leader_epoch)
        except SparkBrokerError as error:
            self._standstills.add(partition.key[1])
            raise CoordinatorNotAvailableError(error.message) from None

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
        order = self._orders.get(led.number)
        if order is None or order.leader_epoch != led.leader_epoch:  # Else it was loaded anew in the same leadership.
            self._orders[led.number] = CommitOrder(led.leader_epoch)
        self._take_image()
        try:
            loaded = led.shard.loaded(self._topics, self._now())
        except CoordinatorNotAvailableError as error:
            self._drop_refused(led, error)
            raise
        self._carry_out(led, loaded)
        self._standstills.add(led.number)
        with _later(led):
            self._catch_up(led)

    def _unloaded(self, led: Led[GroupShard]) -> None:
        self._standstills.discard(led.number)
        if not led.is_current(led.partition):
            self._orders.pop(led.number, None)
        waiting = (*self._held.pop(led.number, ()), *self._parked.take_of(led.number))
        self._outbox.extend(partial(each.reply, _moved()) for each in waiting)

    def _committed(self, led: Led[GroupShard]) -> None:
        held = self._held.get(led.number)
        while held and held[0].appends <= led.committed:
            self._outbox.append(partial(held[0].reply, held.popleft().answer))

    def _time_passes(self) -> None:
        """Topics change; sessions end; offsets of groups that nobody uses expire; held heartbeats are answered."""
        for led in list(self._shards.values()):
            try:
                self._bring_up_to_date(led)
                if led.shard.next_due_ms <= self._clock.boottime_ms():
                    self._carry_out(led, led.shard.clock(self._now(), self._keeps_offsets(led)))
            except SparkBrokerError as error:
                # A failed disk has stopped the partition already. Anything else is tried again.
                logger.debug("%s: what is due waits: %s", led.partition, error)
        for key, parked in list(self._parked.take_due(self._clock.boottime_ms())):
            self._resume(self._shards.get(key.number), key, parked)

    def _has_open_transaction(self, led: Led[GroupShard]) -> Callable[[str], bool]:
        return lambda group_id: led.shard.state.undecided.of(group_id) is not None

    def _keeps_offsets(self, led: Led[GroupShard]) -> Callable[[str], bool]:
        """Which groups' offsets do not expire now: by a clock that was not checked, none do."""
        return self._has_open_transaction(led) if led.partition.lease.allows_expiry else lambda _: True

    # What decisions have in common.

    def _now(self) -> Now:
        return Now(self._clock.boottime_ms(), self._clock.wall_ms())

    def _asked(self, group_id: str, *, writes: bool = False) -> Led[GroupShard]:
        """The group's shard, up to date. Raises the error that says why there is none, or why it is not asked now: if
        it `writes` for certain, also that its log takes no appends.
        """
        led = self._shard_of(group_id)
        if writes:
            led.check_takes()
        if len(self._held.get(led.number, ())) >= WAITING_MAX:
            raise CoordinatorNotAvailableError(f"{WAITING_MAX:,} requests wait at this coordinator")
        with nullcontext() if writes else _later(led):
            self._bring_up_to_date(led)
        return led

    def _bring_up_to_date(self, led: Led[GroupShard]) -> None:
        """Take what transactions have written since the last time, and the topics as they are now (`_catch_up`)."""
        log, taken_to = led.partition.log, led.read_to
        if taken_to < log.log_end_offset:
            for header in led.partition.guard_storage(lambda: list(log.headers(taken_to)), reads=True):
                if header.base_offset >= taken_to and _is_of_transaction(header):
                    for frame in led.partition.read_log(header.base_offset, header.length, header.next_offset):
                        self._replay(led, frame)
                led.read_to = header.next_offset
        self._take_image()
        self._catch_up(led)

    def _catch_up(self, led: Led[GroupShard]) -> None:
        """Take the topics as they are now, and what was refused while the log took no appends. Raises
        CoordinatorNotAvailableError while it takes none: that waits on.
        """
        if led.number in self._standstills:
            self._carry_out(led, led.shard.writes_begin(self._now()))
            tombstones = self._image.tombstones  # Topics may have been deleted before the shard was loaded.
            self._carry_out(led, led.shard.topics_changed(self._topics, tombstones, self._now()))
            self._standstills.discard(led.number)
        elif led.shard.topics is not self._topics:
            deleted = led.shard.topics.by_id.keys() - self._topics.by_id.keys()
            gone = {topic_id for topic_id in deleted if topic_id in self._image.tombstones}
            self._carry_out(led, led.shard.topics_changed(self._topics, gone, self._now()))

    def _take_image(self) -> None:
        image = self._manager.image
        if image is not self._image:
            topics = topics_of(image)
            if topics.by_id != self._topics.by_id:
                self._topics = topics
            self._image = image

    def _carry_out(self, led: Led[GroupShard], decision: Decision[object]) -> None:
        """Append what the shard has decided, and has already. When it is refused, that has not happened."""
        for move in decision.moves:
            logger.log(logging.INFO if move.epoch else logging.DEBUG, "%s", move)  # debug: it has never had a member
        try:
            for rows in row_batches([encode_record(record) for record in decision.records]):
                self._append(led, rows)
        except SparkBrokerError as error:
            self._drop_refused(led, error)
            raise
        for effect in decision.effects:
            match effect:
                case ComputeTarget(group_id):
                    self._compute(f"{led.number}/{group_id}", partial(self._compute_target, led, effect))
                case Wake(group_id, member_ids):
                    for member_id in member_ids:
                        key = ParkedKey(led.number, group_id, member_id)
                        parked = self._parked.take(key)
                        if parked is not None:
                            self._events.append(partial(self._resume, led, key, parked))

    def _drop_refused(self, led: Led[GroupShard], error: SparkBrokerError) -> None:
        self._unload(led)
        if not isinstance(error, NotLeaderOrFollowerError):
            self._pause(led.number, REFUSED_AGAIN_MS)

    def _compute_target(self, led: Led[GroupShard], effect: ComputeTarget) -> None:
        """Runs where `compute` has it run."""
        ready = effect.compute()
        self.note(partial(self._target_ready, led, ready))

    def _target_ready(self, led: Led[GroupShard], ready: TargetReady) -> None:
        """Event: a large group's target is there."""
        if self._shards.get(led.number) is not led:
            return
        try:
            self._carry_out(led, led.shard.target_ready(ready, self._now()))
        except SparkBrokerError as error:
            logger.debug("%s: the target is made again when the shard writes: %s", led.partition, error)

    def _resume(self, led: Led[GroupShard] | None, key: ParkedKey, parked: Parked) -> None:
        """Event: something changed for a member whose heartbeat is held back, or it was held back long enough.

        A shard that was loaded since has not heard the heartbeat.
        """
        if led is None or self._shards.get(key.number) is not led:
            self._outbox.append(partial(parked.reply, _moved()))
            return
        try:
            decision = led.shard.resume(key.group_id, key.member_id, parked.sequence, self._now())
            self._carry_out(led, decision)
        except CoordinatorNotAvailableError as error:  # It rests on no record, so it waits for none.
            self._outbox.append(partial(parked.reply, error))
        except SparkBrokerError as error:
            self._answer(led, parked.reply, error)
        else:
            self._answer_heartbeat(led, key, parked, decision.answer)

    def _overtake(self, led: Led[GroupShard], key: ParkedKey, sequence: int) -> None:
        """A member has sent another heartbeat: nobody waits for the answer to the one before."""
        before = self._parked.take(key)
        if before is not None and before.sequence > sequence:
            self._parked.park(key, before)
        elif before is not None:
            self._events.append(partial(self._resume, led, key, replace(before, due_ms=0)))

    def _hold_ms(self, led: Led[GroupShard], key: ParkedKey) -> int:
        """How long an answer may be held back."""
        member = led.shard.state.group(key.group_id).members.get(key.member_id)
        return 0 if member is None else held_at_most_ms(member.session_timeout_ms)

    def _answer_heartbeat(self, led: Led[GroupShard], key: ParkedKey, parked: Parked, answer: HeartbeatAnswer) -> None:
        """Answer now, or hold the answer back while the member has nothing to do."""
        is_due = parked.due_ms <= self._clock.boottime_ms() or len(self._parked) >= WAITING_MAX
        if answer.settled and not is_due:
            self._parked.park(key, parked)
        else:
            self._answer(led, parked.reply, heartbeat_response(answer, led.shard.topics))

    def reply_later(self, reply: Reply, answer: Answer) -> None:
        """Event: the answer is known. It leaves outside of the lock."""
        self._outbox.append(partial(reply, answer))

    def _answer_certainly(self, led: Led[GroupShard], reply: Reply, answer: Answer) -> None:
        """Answer with what was read, once it is certain that this broker still leads (see `fetch`)."""
        if led.partition.is_replaceable():
            self._append(led, [READ_BARRIER])
        else:
            led.check_leadership()
        self._answer(led, reply, answer)

    def _answer(self, led: Led[GroupShard], reply: Reply, answer: Answer) -> None:
        """Answer once everything is committed that was appended so far: the answer may show it."""
        if self._shards.get(led.number) is not led:
            self._outbox.append(partial(reply, _moved()))
        elif led.appended == led.committed:
            self._outbox.append(partial(reply, answer))
        else:
            self._held.setdefault(led.number, deque()).append(_Held(led.appended, reply, answer))


def _is_of_transaction(header: BatchHeader) -> bool:
    """Whether a batch was written by a transaction. What compaction leaves of one that was committed is no part of it
    any more, and has its producer's id.
    """
    return bool(header.attributes & (CONTROL | TRANSACTIONAL)) or header.producer_id != NO_PRODUCER


@contextmanager
def _later(led: Led[GroupShard]) -> Iterator[None]:
    """What cannot be written now waits. Whoever writes nothing is served meanwhile."""
    try:
        yield
    except CoordinatorNotAvailableError as error:
        logger.debug("%s: what has changed waits: %s", led.partition, error)


def settings_of(config: ClusterConfig) -> GroupSettings:
    """The settings of groups, from those of the cluster."""
    return GroupSettings(
        group_size_max=config.group_max_size,
        session_timeout_min_ms=config.group_min_session_timeout_ms,
        session_timeout_max_ms=config.group_max_session_timeout_ms,
        heartbeat_interval_ms=config.group_consumer_heartbeat_interval_ms,
        offsets_retention_ms=config.offsets_retention_minutes * 60_000,
    )


def _moved() -> SparkBrokerError:
    return NotLeaderOrFollowerError("the coordinator moved before it could answer")
