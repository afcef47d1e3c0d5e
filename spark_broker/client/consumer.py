"""The consumer: whole micro-batches by offset, from the leaders of the partitions that it reads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Self, Unpack

from spark_broker.client import given
from spark_broker.client.collected import make_ready
from spark_broker.client.committing import Committing
from spark_broker.client.consumer_machine import ConsumerMachine
from spark_broker.client.consumer_threads import ConsumerThreads
from spark_broker.client.group_offsets import GroupOffsets
from spark_broker.client.history_reader import offsets_with_history
from spark_broker.client.keywords import ConsumerSettings
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import all_at, lookup_offsets
from spark_broker.client.one_process import OfOneProcess
from spark_broker.client.partition_position import PartitionPosition, Start
from spark_broker.client.rebalance_listener import Listens
from spark_broker.client.rebalancing import Rebalancing
from spark_broker.client.reentry import Within, refuse_within
from spark_broker.client.retry import Deadline
from spark_broker.client.settings import client_config
from spark_broker.client.subscription import Subscription, membership_of, subscription_of
from spark_broker.config import ConsumerConfig
from spark_broker.errors import (
    ClosedError,
    InvalidConfigError,
    InvalidSubscriptionError,
    LogTruncationError,
    OffsetOutOfRangeError,
    PolicyViolationError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.interrupts import Turn, uninterrupted
from spark_broker.model import (
    ConsumedBatch,
    ConsumedRecord,
    GroupMetadata,
    OffsetAndMetadata,
    TopicPartition,
)
from spark_broker.threads import LONGEST_WAIT_S
from spark_broker.times import EARLIEST, LATEST, Moment
from spark_broker.transport.origin import Origin

CLOSE_TIMEOUT_S = 10.0

ERROR_AFTER_S = 1.0
"""How long an iteration has no record before it raises the error of a partition that stands still."""

_log = logging.getLogger(__name__)

Offsets = Mapping[TopicPartition, "int | OffsetAndMetadata"]


class Consumer(OfOneProcess):
    """Reads all partitions of `topics`, or those given to `assign`. For one thread; `close` may come from another.

    Settings are ConsumerConfig's, as keywords (`auto_offset_reset="earliest"`) or as
    `config={"auto.offset.reset": ...}`. Consumers with one `group_id` share the partitions of what they subscribe to,
    and continue from what the group has committed; `listener` is told which partitions come and go. `pattern`: of names
    of topics, also of those that are created later; in groups only. `columns`: only these columns of each topic are
    sent by the brokers. Records of transactions come once these are committed; `isolation_level="read_uncommitted"`
    hands out all of them at once.

    ```python
    with Consumer(servers, topics=["greetings"], auto_offset_reset="earliest") as consumer:
        for batch in consumer.poll(timeout=10.0):
            print(batch.partition, batch.base_offset, batch.data["value"].to_pylist())
    ```
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        group_id: str | None = None,
        topics: Sequence[str] | str | None = None,
        pattern: str | None = None,
        listener: Listens | None = None,
        columns: Sequence[str] | None = None,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self._config = client_config(ConsumerConfig, bootstrap_servers, config, {**settings, "group_id": group_id})
        subscription = self._subscription(topics, pattern, listener)
        wanted_columns = None if columns is None else given.texts(columns, "columns")
        make_ready()
        self._metadata = ClusterMetadata.connect(self._config)
        self._group = GroupOffsets(self._metadata, self._config.group_id) if self._config.group_id else None
        membership = membership_of(self._config, self._metadata.backoff)
        self._origin = Origin()
        self._machine = ConsumerMachine(self._config, wanted_columns, self._metadata.backoff, membership=membership)
        self._threads = ConsumerThreads(self._machine, self._metadata, self._config, self._group)
        self._threads.belong_to(self)
        self._rebalancing = Rebalancing(self._machine, self._threads, self._config, self._check_open)
        self._lock = self._threads.lock
        self._closing = Turn()
        self._committing = Committing(self._machine, self._threads, self._config, self._check_open)
        self._told: dict[TopicPartition, str] = {}  # of which partitions that stand still the log has told, and why
        if subscription.topics or subscription.pattern:
            self._subscribe(subscription)

    def subscribe(
        self,
        topics: Sequence[str] | str | None = None,
        *,
        pattern: str | None = None,
        listener: Listens | None = None,
    ) -> None:
        """Read these topics, and those that match the pattern, and no others. In a group: a share of their partitions.

        Raises InvalidSubscriptionError, and InvalidConfigError for a pattern or a listener without group.id.
        """
        subscription = self._subscription(topics, pattern, listener)
        if not subscription.topics and not subscription.pattern:
            raise InvalidSubscriptionError("a subscription without a topic and without a pattern")
        self._subscribe(subscription)

    def unsubscribe(self) -> None:
        """Read nothing any more, and leave the group. Positions are committed before (enable.auto.commit)."""
        self._check_open()
        self._refuse_reentry()
        self._rebalancing.refuse_while_telling()
        deadline = self._api_deadline()
        with uninterrupted():
            if self._machine.is_member:
                self._rebalancing.leave(deadline, "it has unsubscribed", partial(self._committing.last, deadline))
            self._committing.last_of_assigned(deadline)
            with self._open():
                self._machine.unsubscribe()
                self._threads.advance()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions and no others. Those that stay keep their positions; those that go are committed.

        A group gives out no partitions to a consumer that assigns its own. Such a consumer commits only while the group
        has no members. Raises PolicyViolationError for a member of a group: `unsubscribe` first.
        """
        wanted = given.topic_partitions(partitions)
        with self._open():
            if self._machine.is_member:
                raise PolicyViolationError("the group assigns the partitions of its members: call unsubscribe() first")
            self._committing.before_assignment()
            self._machine.assign(wanted)
            self._threads.advance()

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read now."""
        self._origin.check()
        with self._lock:
            return sorted(self._machine.partitions)

    def seek(self, partition: TopicPartition, offset: int | OffsetAndMetadata) -> None:
        """Read on from this offset. What was fetched from elsewhere is never handed out.

        Given with the leader epoch of the record before it (as `committed` returns it), poll raises
        LogTruncationError where the log was cut below it since (KIP-320).
        """
        partition = given.topic_partition(partition)
        to = given.offset_and_metadata(offset, partition)
        if to.offset < 0:
            raise OffsetOutOfRangeError(f"{partition}: offset {to.offset}")
        self._change(partition, lambda: self._machine.seek(partition, to))

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Read on from the log start; of every partition when none is named: those that are here, or come first."""
        self._seek_to(partitions, Start.EARLIEST)

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Read on from the end (see `end_offsets`); of every partition when none is named, as `seek_to_beginning`."""
        self._seek_to(partitions, Start.LATEST)

    def _seek_to(self, partitions: Sequence[TopicPartition], start: Start) -> None:
        if not partitions:
            with self._open():
                self._machine.seek_all_to(start)
                self._threads.advance()
        for tp in given.topic_partitions(partitions):
            self._change(tp, partial(self._machine.seek_to, tp, start))

    def errors(self) -> dict[TopicPartition, SparkBrokerError]:
        """The partitions that stand still, and why. `poll` raises these errors when it has nothing else to hand out.

        A `seek` lets a partition go on.
        """
        self._origin.check()
        with self._lock:
            return self._machine.errors()

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these until `resume`."""
        for tp in given.topic_partitions(partitions):
            self._change(tp, partial(self._machine.pause, tp, paused=True))

    def resume(self, *partitions: TopicPartition) -> None:
        """The opposite of `pause`."""
        for tp in given.topic_partitions(partitions):
            self._change(tp, partial(self._machine.pause, tp, paused=False))

    def poll(self, timeout: float = 1.0) -> list[ConsumedBatch]:
        """Batches from the positions on, as soon as there are any; empty after `timeout` seconds.

        A batch is a micro-batch as it was appended, or the rest of it when the position lies inside. Offsets may be
        missing between batches: markers of transactions take one each, and read_committed leaves out what was aborted.
        Where only such offsets were passed, poll is empty at once, as Kafka's is. Moves of leaders
        are not noticed here. Raises LogTruncationError when an unclean election cut the log below the position: once,
        and the position is then where the log diverges, or, with auto.offset.reset=none, until the next seek. Raises
        OffsetOutOfRangeError (auto.offset.reset=none), UnknownTopicOrPartitionError,
        InconsistentTopicIdError (the topic was created again), CorruptMessageError, BootstrapUnreachableError and
        ClosedError.
        """
        self._origin.check()  # before any lock: in a child, the thread that holds it does not exist
        self._refuse_reentry()
        self._rebalancing.refuse_while_telling()
        deadline = Deadline.after_ms(given.seconds(timeout, "timeout") * 1000)
        try:
            with uninterrupted():
                self._committing.when_due()
                batches = self._polled(deadline)
            # From here to the return no signal is handled: either the caller gets the batches, or they are taken back.
            self._machine.handed = ()
            return batches
        except BaseException:
            with uninterrupted(self._lock):
                self._machine.take_back()
            raise

    def _polled(self, deadline: Deadline) -> list[ConsumedBatch]:
        self._check_open()
        while self._rebalancing.go_on(deadline):
            batches = self._polled_unless_rebalancing(deadline)
            if batches is not None:
                return batches
        return []

    def _polled_unless_rebalancing(self, deadline: Deadline) -> list[ConsumedBatch] | None:
        """None: partitions come or go before anything else is handed out."""
        with self._lock:
            while self._group is None or not self._rebalancing.comes_first():
                batches, moved = self._poll_now()
                if moved:
                    self._tell_of_errors()
                    return batches
                if deadline.expired or self._machine.stands_still:
                    self._machine.raise_error()
                if deadline.expired:
                    return batches
                self._rebalancing.wait(deadline.remaining_s)
                self._check_open()
        return None

    def _tell_of_errors(self) -> None:
        """Under the lock. Log each partition that stands still while others are read, once."""
        errors = self._machine.errors()
        for tp, error in errors.items():
            if self._told.get(tp) != error.message:
                _log.warning("%s stands still, and others are read on: %s", tp, error)
        self._told = {tp: error.message for tp, error in errors.items()}

    def _poll_now(self) -> tuple[list[ConsumedBatch], bool]:
        """Under the lock. What was handed out, or a truncation that was notified of, makes room for fetches."""
        try:
            batches, moved = self._machine.poll()
        except LogTruncationError:
            self._threads.advance()
            raise
        if moved:
            self._threads.advance()
        return batches, moved

    def __iter__(self) -> Iterator[ConsumedRecord]:
        """Records one at a time, for ever; it ends when another thread closes the consumer.

        Positions move record by record: a commit never passes a record that was not handed out. Raises as `poll` does.
        """
        self._check_open()
        while not self._machine.closed:
            self._origin.check()  # Before any lock: in a child, the thread that holds it does not exist.
            self._committing.when_due()
            self._machine.record_came()
            try:
                with self._lock:
                    record = self._next_record()
                if record is None and self._rebalancing.is_due:
                    self._rebalancing.refuse_while_telling()
                    with uninterrupted():
                        self._rebalancing.go_on(Deadline.after_ms(ERROR_AFTER_S * 1000))
            except BaseException:
                with uninterrupted(self._lock):
                    self._machine.take_record_back()
                raise
            if record is not None:
                yield record

    def _next_record(self) -> ConsumedRecord | None:
        """Under the lock. None: the consumer was closed, or only offsets without records were passed, or partitions
        come or go first.
        """
        idle = None
        while not self._machine.closed and (self._group is None or not self._rebalancing.comes_first()):
            try:
                record, has_room = self._machine.next_record()
            except LogTruncationError:
                self._threads.advance()
                raise
            if has_room:
                self._threads.advance()
            if record is not None or has_room:
                return record
            due_in_s = self._committing.due_in_s()
            if due_in_s == 0:
                return None
            idle = idle or Deadline.after_ms(ERROR_AFTER_S * 1000)
            if idle.expired or self._machine.stands_still:
                self._machine.raise_error()
            soon_s = ERROR_AFTER_S if self._machine.errors() else LONGEST_WAIT_S
            self._rebalancing.wait(min(soon_s, LONGEST_WAIT_S if due_in_s is None else due_in_s))
        return None

    def position(self, partition: TopicPartition) -> int:
        """Offset of the next record that poll hands out. Waits for it up to default.api.timeout.ms."""
        partition, deadline = given.topic_partition(partition), self._api_deadline()
        self._await_first(deadline)
        with self._open():
            position = self._await_partition(partition, deadline)
            while not position.has_position:
                self._machine.raise_error_of(position)
                self._await_change(deadline, f"the position of {partition} could not be looked up in time")
            return position.position

    def commit(self, offsets: Offsets | None = None) -> None:
        """Store positions (or these offsets) under the group and wait for it.

        A commit never passes records that were not handed out: an offset beyond the position raises
        PolicyViolationError. A commit waits while the group takes this consumer in. Raises RequestTimedOutError when
        no coordinator answers within default.api.timeout.ms.
        """
        self._require_group()
        deadline = self._api_deadline()
        with self._open():
            self._committing.commit(offsets, deadline)

    def group_metadata(self) -> GroupMetadata:
        """Who this member is now, for `Producer.send_offsets_to_transaction`.

        Raises UnknownMemberIdError when the group has gone on without it; the next `poll` tells the listener.
        """
        self._require_group()
        with self._open():
            return replace(self._machine.identity(), topic_ids=self._machine.topic_ids())

    def commit_async(self) -> None:
        """Store the current positions under the group, without waiting for the answer.

        A commit that no coordinator answers is logged; the next commit stores its positions or later ones. Any other
        error is raised by the next `poll`.
        """
        self._require_group()
        with self._open():
            self._committing.later()

    def committed(self, partition: TopicPartition) -> OffsetAndMetadata | None:
        """The group's committed offset (the next one to read), with its leader epoch and note. None: there is none.

        An open transaction of the group may commit another one later. A consumer that begins waits for it
        (`isolation.level=read_committed`).
        """
        partition = given.topic_partition(partition)
        return self._require_group().fetch([partition], self._api_deadline()).get(partition)

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Where the records begin: in the topic's Delta table, or at the log start."""
        return self._lookup(all_at(given.topic_partitions(partitions), EARLIEST))

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offsets after the last that can be read: last stable offsets; high watermarks with read_uncommitted."""
        return self._lookup(all_at(given.topic_partitions(partitions), LATEST))

    def offsets_for_times(self, times: Mapping[TopicPartition, datetime]) -> dict[TopicPartition, int | None]:
        """Offset of the first record at or after each time (UTC where it has no zone); None: there is none."""
        moments = {
            tp: given.moment_us(moment, f"the time of {tp}")
            for tp, moment in given.by_partition(times, "times").items()
        }
        return {tp: None if offset < 0 else offset for tp, offset in self._lookup(moments).items()}

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Commit what was handed out (enable.auto.commit), and end; at most about `timeout` seconds.

        A signal handler may call it: a `poll` that it interrupted raises ClosedError then. Raises ReentrantCallError
        where the handler has interrupted a call that does not wait.
        """
        deadline = Deadline.after_ms(given.seconds(timeout, "timeout") * 1000)
        if self._origin.is_elsewhere:
            return  # the parent's, whose threads hold its locks
        place = self._refuse_reentry()
        if self._closing.is_taken and place is not Within.NOTHING:
            return  # the handler of a signal has interrupted `close`, which goes on afterwards
        with uninterrupted(), self._closing:
            if self._machine.closed:
                return
            try:
                if self._machine.is_member:
                    self._rebalancing.leave(deadline, "it was closed", partial(self._committing.last, deadline))
                else:
                    self._committing.last(deadline)
            finally:
                self._threads.close()

    def _refuse_reentry(self) -> Within:
        """Raises ReentrantCallError in the handler of a signal that interrupted more than a wait of this consumer."""
        return refuse_within(self, self._threads, self._rebalancing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _subscription(
        self, topics: Sequence[str] | str | None, pattern: str | None, listener: Listens | None
    ) -> Subscription:
        subscription = subscription_of(topics, pattern, listener)
        if not self._config.group_id and (subscription.pattern or listener is not None):
            raise InvalidConfigError("a pattern and a listener are for members of a group, and group.id is not set")
        return subscription

    def _subscribe(self, subscription: Subscription) -> None:
        with self._open():
            self._committing.last_of_assigned(self._api_deadline())
            if subscription.listener is not None:
                self._rebalancing.listen(subscription.listener)
            self._machine.subscribe(subscription.topics, subscription.pattern, now_ms=self._threads.now_ms())
            self._threads.advance()

    def _open(self) -> uninterrupted:
        """With the machine's lock, of a consumer that is open. Raises ClosedError and ReentrantCallError."""
        self._check_open()
        self._refuse_reentry()
        return uninterrupted(self._lock)

    def _check_open(self) -> None:
        self._origin.check()
        if self._machine.closed:
            raise ClosedError("the consumer is closed")

    def _api_deadline(self) -> Deadline:
        return Deadline.after_ms(self._config.default_api_timeout_ms)

    def _await_change(self, deadline: Deadline, late: str) -> None:
        """Under the lock. Raises RequestTimedOutError with the text `late`, and ClosedError."""
        if deadline.expired:
            raise RequestTimedOutError(late)
        self._threads.wait(deadline.remaining_s)
        self._check_open()

    def _await_partition(self, partition: TopicPartition, deadline: Deadline) -> PartitionPosition:
        """Under the lock. A partition of `topics` is assigned once metadata is there: wait for that."""
        while partition not in self._machine.partitions and self._machine.is_unresolved(partition):
            self._machine.raise_error()
            self._await_change(deadline, f"no metadata of topic {partition.topic!r} in time")
        return self._machine.partition(partition)

    def _await_first(self, deadline: Deadline) -> None:
        if self._machine.is_member and not self._rebalancing.telling:
            self._check_open()
            self._refuse_reentry()
            with uninterrupted():
                self._rebalancing.await_first(deadline)

    def _change(self, partition: TopicPartition, change: Callable[[], None]) -> None:
        deadline = self._api_deadline()
        self._await_first(deadline)
        with self._open():
            self._await_partition(partition, deadline)
            change()
            self._threads.advance()

    def _require_group(self) -> GroupOffsets:
        self._check_open()
        if self._group is None:
            raise InvalidConfigError("committed offsets belong to a group, and group.id is not set")
        return self._group

    def _lookup(self, moments: Mapping[TopicPartition, Moment]) -> dict[TopicPartition, int]:
        self._check_open()
        read_committed = self._config.read_committed
        listed = lookup_offsets(self._metadata, moments, self._api_deadline(), read_committed=read_committed)
        return offsets_with_history(self._metadata.view, moments, listed)
