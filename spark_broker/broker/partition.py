"""The shell of one partition replica: carries out the effects of `core.replica` with its log, under one lock.

What producers, followers and the controller do with a replica; what readers do: `broker/partition_reader.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TypeVar, cast

from spark_broker.broker.append import Append, AppendToken, AwaitedTransaction, Marker, ValidBatch
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.guarded_storage import GuardedStorage
from spark_broker.broker.lease import Lease
from spark_broker.broker.notifier import Notifier
from spark_broker.broker.partition_events import PartitionEvents, PartitionKey
from spark_broker.broker.partition_reader import LastLookup, PartitionRead, PartitionReader
from spark_broker.broker.replica_lines import ReplicaLines
from spark_broker.broker.replica_log import ReplicaLog, from_offset, to_append
from spark_broker.broker.topic import Topic
from spark_broker.core.batch import batch_info
from spark_broker.core.effects import (
    Acknowledge,
    AdvanceLogStart,
    Effect,
    HighWatermarkAdvanced,
    ProposeIsr,
    Refuse,
    RestartLog,
    SaveEpochs,
    SetAside,
    TruncateLog,
)
from spark_broker.core.leadership import CONFIRMATION_MS
from spark_broker.core.producers import StoredBatch
from spark_broker.core.replica import (
    ACKS_ALL,
    AppendGrant,
    AwaitTransaction,
    Diverging,
    Fetched,
    FetchPosition,
    LeaderAndIsr,
    Replica,
    Role,
)
from spark_broker.errors import (
    DivergedLogError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    StorageRefusedError,
)
from spark_broker.protocol.arrow_message import assign
from spark_broker.protocol.frame import NO_TIMESTAMP, TRANSACTIONAL, Frame
from spark_broker.protocol.message_head import Head
from spark_broker.protocol.messages import LogEnd, ReplicaStateResponse
from spark_broker.protocol.wire import Buffer
from spark_broker.storage.retention import RetentionClock
from spark_broker.storage.segment import by_segment
from spark_broker.storage.stored_run import StoredRun

T = TypeVar("T")


class Partition(GuardedStorage):
    """A replica that this broker hosts. Its methods take `lock`; the log is read outside of it.

    `_log_listeners` (followers' streams) are notified of a longer log, `_commit_listeners` of a higher high watermark.
    """

    def __init__(
        self,
        key: PartitionKey,
        topic: Topic,
        log: ReplicaLog,
        replica: Replica,
        lease: Lease,
        events: PartitionEvents,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(key, log, replica, events)
        self.topic = topic
        self.lines = ReplicaLines(str(self), replica)
        self.restart_reason: str | None = None  # set: the log must be rebuilt from the leader's before it goes on
        self.lease = lease
        self._clock = clock
        self._log_listeners: dict[Notifier, None] = {}  # ordered: in the order of addresses, no two runs would be alike
        self._commit_listeners: dict[Notifier, None] = {}
        self._last_lookup = LastLookup()

    def __str__(self) -> str:
        return f"{self.topic.name}-{self.key[1]}"

    @property
    def reader(self) -> PartitionReader:
        """What readers ask."""
        return PartitionReader(self, self._last_lookup)  # not kept: a replica holds no reference to itself

    def assign(self, assignment: LeaderAndIsr, topic: Topic, broker_epochs: Mapping[int, int]) -> bool:
        """Carry out the controller's assignment, and wake the streams that wait. Whether records may go by now:
        `apply_retention` is to remove them, in another thread, as the broker's lease does not wait for disks.
        """
        with self.lock:
            dropping = topic.drops_what_is_tiered and topic.table_ends != self.topic.table_ends
            self.topic = topic
            self._log.configure(topic)
            self.replica.configure(topic.config.min_insync_replicas, topic.deleted_before(self.key[1]))
            before = self.lines.before()
            if self.replica.begins_anew(assignment, beginning := topic.beginning(self.key[1])):
                self._begin_at(beginning.offset)
            self._carry_out(self.replica.assign(assignment, broker_epochs, self._clock.boottime_ms()))
            self.lines.assigned(before)
            if self.replica.assignment.leader_epoch != before.assignment.leader_epoch:
                # Another leader may have the batches that follow our log, so it is asked first.
                self.restart_reason = None
            self.wake_listeners()
            deleted = self.replica.deleted_before > self.replica.log_start_offset
            return self.replica.role is Role.LEADER and (dropping or deleted)

    def _begin_at(self, offset: int) -> None:
        """Drop the log and begin at `offset`. A replica that cannot do so stops: it must not lead with what it has."""
        began = self.replica.log_end_offset
        try:
            self.guard_storage(lambda: self.topic.check_table_is_found(began > self.replica.log_start_offset))
            with self._lowering(offset):
                self.guard_storage(lambda: self._log.restart_at(offset, [], []))
                self._restarted(offset, began, "the topic's records below are in its table, or deleted")
        except StorageRefusedError as error:
            self._give_up(error)
        except SparkBrokerError:
            self.replica.invariant(self.replica.role is Role.STOPPED, "it goes on with a failed disk")

    @contextmanager
    def _lowering(self, offset: int) -> Iterator[None]:
        """Until this block ends, the log begins anew at `offset`.

        It is emptied first, from its end on: a crash in the midst of that leaves what is not removed yet.
        """
        lowest = min(offset, self.replica.log_start_offset)
        with ExitStack() as stack:
            self.guard_storage(lambda: stack.enter_context(self._events.lowering(self.key, lowest)))
            yield

    def _restarted(self, high_watermark: int, began: int, why: str) -> None:
        self.replica.restarted(self._learn(lambda: self._log.state(high_watermark=high_watermark)))
        self.lines.restarted(began, why)

    def stop(self, error: SparkBrokerError) -> None:
        """Take the replica offline; appends that wait are refused with `error`."""
        with self.lock:
            self.lines.stopping(error.message)
            self._carry_out(self.replica.stop(error))
            self.wake_listeners()

    def close(self, *, clean: bool) -> None:
        with self.lock:
            self._log.close(clean=clean)

    def tick(self, broker_epochs: Mapping[int, int]) -> None:
        with self.lock:
            self._carry_out(self.replica.tick(broker_epochs, self._clock.boottime_ms()))

    def isr_refused(self, leader_epoch: int, partition_epoch: int, error_code: int) -> None:
        with self.lock:
            self._carry_out(self.replica.isr_refused(leader_epoch, partition_epoch, error_code))

    def is_current(self, proposal: ProposeIsr) -> bool:
        """Whether the proposal is still open."""
        made_at = (proposal.leader_epoch, proposal.partition_epoch)
        with self.lock:
            now = self.replica.assignment
            return made_at == (now.leader_epoch, now.partition_epoch) and self.replica.proposed_isr is not None

    def listen(self, notifier: Notifier, *, commits: bool) -> None:
        """Notify `notifier` of commits, or else of every append."""
        with self.lock:
            (self._commit_listeners if commits else self._log_listeners)[notifier] = None

    def wake_listeners(self) -> None:
        """Whoever waits for records here is to look again: there may never be any."""
        with self.lock:
            for notifier in (*self._log_listeners, *self._commit_listeners):
                notifier.notify(self.key)

    def forget(self, notifier: Notifier) -> None:
        with self.lock:
            self._commit_listeners.pop(notifier, None)
            self._log_listeners.pop(notifier, None)

    def append(self, append: Append, token: AppendToken | None) -> AwaitedTransaction | None:
        """Validate a client's batch in full, store it and answer `token` as its acks ask (None with acks=0).

        If it returns an AwaitedTransaction, nothing is stored and `token` is not answered: ask the coordinator to add
        this partition to the transaction, `confirm`, and append again. Raises the error that refuses the batch; nothing
        is stored then.
        """
        batch = append.validated(self.topic)
        with self.lock:
            self.check_lease(writing=True)
            header = batch.head.header
            now_ms = self._clock.boottime_ms()
            granted = self.replica.prepare_append(
                append.leader_epoch,
                append.acks,
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                transactional=bool(header.attributes & TRANSACTIONAL),
                now_ms=now_ms,
            )
            if isinstance(granted, AwaitTransaction):
                epoch = self.replica.assignment.leader_epoch
                return AwaitedTransaction(header.producer_id, header.producer_epoch, epoch, now_ms)
            if isinstance(granted, StoredBatch):
                base_offset, next_offset = granted.base_offset, granted.last_offset + 1
            else:
                base_offset, next_offset = granted.base_offset, self._write(append, batch, granted)
            if token is None:
                return None
            if append.acks == ACKS_ALL:
                self._await_commit(token, base_offset, next_offset, append.deadline_ms)
            else:
                self._carry_out([Acknowledge(token, base_offset)])
            return None

    def confirm(self, awaited: AwaitedTransaction, valid_ms: int = CONFIRMATION_MS) -> None:
        """The coordinator has this partition in the transaction. It must be asked again after `valid_ms`."""
        with self.lock:
            self.replica.transaction_confirmed(
                awaited.leader_epoch, awaited.producer_id, awaited.producer_epoch, awaited.asked_ms, valid_ms
            )

    def append_marker(self, marker: Marker, token: AppendToken) -> None:
        """Write the marker that ends a producer's transaction here; answer `token` when it is committed.

        A repetition is answered without writing anything. Raises the error that refuses the marker.
        """
        with self.lock:
            self.check_lease(writing=True)
            leader_epoch = self.replica.assignment.leader_epoch
            granted = self.replica.prepare_marker(leader_epoch, marker.producer_id, marker.producer_epoch)
            if granted is None:
                base_offset = next_offset = self.replica.log_end_offset
            else:
                message, base_offset = marker.message(self.topic), granted.base_offset
                next_offset = self._store(message, self.topic.schema_id, granted, self._append_time_ms())
            self._await_commit(token, base_offset, next_offset, marker.deadline_ms)

    def _await_commit(self, token: AppendToken, base_offset: int, next_offset: int, deadline_ms: int) -> None:
        self._carry_out(self.replica.await_commit(token, base_offset, next_offset, deadline_ms))
        if self.replica.pending:
            self._events.on_wait(self)

    def check_lease(self, *, writing: bool) -> None:
        if not (self.lease.allows_appends if writing else self.lease.allows_reads):
            raise NotLeaderOrFollowerError("this broker has no live session with the controller")

    def _write(self, append: Append, batch: ValidBatch, granted: AppendGrant) -> int:
        append_time_ms = self._append_time_ms()
        newest_us = batch.newest.with_append_time(append_time_ms)
        return self._store(append.message, append.schema_id, granted, append_time_ms, newest_us, batch.head)

    def _append_time_ms(self) -> int:
        return max(self._clock.wall_ms(), self._log.last_append_time_ms)

    def _store(
        self,
        message: Buffer,
        schema_id: int,
        granted: AppendGrant,
        append_time_ms: int,
        newest_us: int = NO_TIMESTAMP,
        head: Head | None = None,
    ) -> int:
        """Assign offsets, write both files, move the state machine on. Returns the offset after the batch.

        `head`: what the message is known to say about itself.
        """
        header, message = assign(
            message,
            base_offset=granted.base_offset,
            leader_epoch=granted.leader_epoch,
            append_time_ms=append_time_ms,
            max_timestamp_us=max(newest_us, self._log.max_timestamp_us),
            first_of_segment=self._log.should_roll(len(message), schema_id, append_time_ms),
            schema_id=schema_id,
            head=head,
        )
        self.guard_storage(lambda: self._log.append([Frame(header, message)], self.replica.producers))
        self._carry_out(self.replica.appended(batch_info(header), self._clock.boottime_ms()))
        self.replica.check_log_end(self._log.log_end_offset)
        for notifier in self._log_listeners:
            notifier.notify(self.key)
        return header.next_offset

    def read_log(self, offset: int, max_bytes: int, end_offset: int) -> list[Frame]:
        """Read outside the lock. An error stops the replica where another one can lead in its place."""
        return self.guard_storage(lambda: self._log.read(offset, max_bytes, end_offset), reads=True)

    def locate(self, offset: int, max_bytes: int, end_offset: int) -> list[StoredRun]:
        """Where the batches lie that `read_log` would return. Outside the lock."""
        return self.guard_storage(lambda: self._log.locate(offset, max_bytes, end_offset), reads=True)

    def follower_fetch(
        self, follower: int, broker_epoch: int, position: FetchPosition, live: Mapping[int, int]
    ) -> Diverging | None:
        """A follower reports its position. Raises the error that the follower gets."""
        with self.lock:
            now_ms = self._clock.boottime_ms()
            diverging, effects = self.replica.follower_fetch(follower, broker_epoch, position, live, now_ms)
            self._carry_out(effects)
            return diverging

    def read_for_follower(self, leader_epoch: int, offset: int, max_bytes: int) -> PartitionRead:
        with self.lock.reading:
            self.replica.check_leader(leader_epoch)
            read = self.position(self.replica.log_end_offset)
            within = self.replica.log_start_offset <= offset < read[0]  # below the log start, the follower is rebuilt
        frames = self.read_log(offset, max_bytes, read[0]) if within else []
        with self.lock.reading:
            self.replica.check_leader(leader_epoch)  # What was read since may be a later leader's.
        # Afterwards: compaction may have replaced meanwhile what was read.
        return PartitionRead(from_offset(frames, offset), *read[1:], purge_offset=self._log.cleaned.purge_offset)

    def leader_position(self, leader_epoch: int) -> PartitionRead:
        """What the leader knows, without records."""
        with self.lock.reading:
            self.replica.check_leader(leader_epoch)
            return PartitionRead([], *self.position(0)[1:])

    def replica_state(self, leader_epoch: int) -> ReplicaStateResponse:
        """The state that a follower needs to begin at this log's start."""
        with self.lock.reading:
            self.replica.check_leader(leader_epoch)
            start, epochs = self.replica.log_start_offset, self.replica.epochs.to_pairs()
            producers = self.guard_storage(partial(self._log.producers_for, start), reads=True)
            return ReplicaStateResponse(start, epochs, producers, self.replica.purge_offset)

    def position(self, end: int) -> tuple[int, int, int, int]:
        """`end`, and this replica's leader epoch, high watermark and log start. Called under the lock."""
        return end, self.replica.assignment.leader_epoch, self.replica.high_watermark, self.replica.log_start_offset

    def log_end(self) -> LogEnd:
        """How far this replica reaches, for choosing a leader when no replica is known to be complete."""
        with self.lock:
            position, mark = self.replica.fetch_position(), self.replica.high_watermark
        return LogEnd(*self.key, position.leader_epoch, position.last_fetched_epoch, position.fetch_offset, mark)

    def leader_epoch(self) -> int:
        with self.lock:
            return self.replica.assignment.leader_epoch

    def is_replaceable(self) -> bool:
        """See `Replica.is_replaceable`."""
        with self.lock:
            return self.replica.is_replaceable

    def fetch_position(self) -> FetchPosition | None:
        """What to ask the leader for; None when this replica does not follow."""
        with self.lock:
            return self.replica.fetch_position() if self.replica.role is Role.FOLLOWER else None

    def apply(self, answer: Fetched, frames: list[Frame]) -> bool:
        """Carry out the leader's answer: truncate, or append its batches unchanged. False: it is old and ignored."""
        with self.lock:
            if not self.replica.awaits(answer):
                return False
            self.lines.fetched(self._clock.boottime_ms())
            self._carry_out(self.replica.fetched(answer, batch_info(frames[0].header) if frames else None))
            if answer.diverging is not None or self.restart_reason is not None:
                return True
            for run in by_segment(to_append(frames, self.replica.log_end_offset, answer.leader_epoch)) or ((),):
                if self.replica.role is not Role.FOLLOWER:
                    break  # What the answer asked for was refused half-way: the log is to be opened anew.
                self._append_run(run, answer.high_watermark)
            return True

    def _append_run(self, frames: Sequence[Frame], leader_high_watermark: int) -> None:
        """Append the leader's batches; only the first may begin a segment. Without any, take its high watermark."""
        if frames:
            self.guard_storage(lambda: self._log.append(frames, self.replica.producers))
        self._carry_out(self.replica.follower_appended([batch_info(f.header) for f in frames], leader_high_watermark))
        self.replica.check_log_end(self._log.log_end_offset)

    def restart(self, leader_epoch: int, answer: ReplicaStateResponse) -> None:
        """Rebuild the log: begin at the leader's log start, with the leader's epoch history and producers."""
        with self.lock:
            followed = self.replica.role is Role.FOLLOWER and leader_epoch == self.replica.assignment.leader_epoch
            if not followed or self.restart_reason is None:
                return  # A replaced fetcher is late: dropping the log again would lose what was pulled since.
            began, why = self.replica.log_end_offset, self.restart_reason
            state = (answer.log_start_offset, answer.epochs, answer.producers, answer.purge_offset)
            begin = partial(self._log.restart_at, *state)
            with self._lowering(answer.log_start_offset):
                try:
                    self.guard_storage(begin)
                    self.restart_reason = None
                finally:  # The dropped log no longer counts, even if a full disk refused the rest.
                    if self.replica.role is Role.FOLLOWER:
                        self._restarted(self.replica.high_watermark, began, why)

    def apply_retention(self, clock_skew_max_ms: int = 0) -> None:
        """Apply retention if this replica leads; by age, only if its broker may go by its clock. Those of earlier
        leaders may have been `clock_skew_max_ms` behind. Followers move their log start when the leader names it.
        """
        with self.lock:
            self._remove_below_log_start()  # Files that a full disk has kept.
            if self.replica.role is not Role.LEADER or not self.lease.allows_appends:
                return
            now_ms = self._clock.wall_ms() if self.lease.allows_expiry else None
            clock = RetentionClock(now_ms, self.replica.assignment.leader_epoch, clock_skew_max_ms)
            bound = min(self.replica.last_stable_offset, self.topic.retained_from(self.key[1]))
            start = self.guard_storage(lambda: self._log.retention_start(bound, clock))
            self._carry_out(self.replica.advance_log_start(start))
            self._drop_deleted()

    def _remove_below_log_start(self) -> None:
        """Remove what is below the log start, out of readers' reach. A full disk keeps it until there is room."""
        with suppress(StorageRefusedError):  # `Room` logs it.
            self.guard_storage(lambda: self._log.advance_log_start(self.replica.log_start_offset))

    def records_deleted(self, offset: int) -> int:
        """The controller has recorded that records before `offset` are deleted. Returns where the partition begins."""
        with self.lock:
            self.replica.configure(self.replica.min_insync_replicas, offset)
            self._drop_deleted()
            self.wake_listeners()  # A reader may wait at an undecided transaction that is deleted.
            return self.replica.first_offset

    def _drop_deleted(self) -> None:
        """Drop the segments whose records were deleted, but those of undecided transactions."""
        if self.replica.role is Role.LEADER and self.replica.deleted_before > self.replica.log_start_offset:
            bound = min(self.replica.first_offset, self.replica.last_stable_offset)
            self.advance_log_start(self._log.removable_to(bound))

    def advance_log_start(self, offset: int) -> None:
        """Drop everything below a committed offset, but nothing from the last stable offset on."""
        with self.lock:
            self._carry_out(self.replica.advance_log_start(min(offset, self.replica.last_stable_offset)))

    def expire_producers(self, expiration_ms: int, ended_ms: int) -> None:
        """Forget producers by a clock that was checked. They have appended nothing, or have ended, for so long."""
        with self.lock:
            if self.lease.allows_expiry:
                self.replica.expire_producers(self._clock.wall_ms() - expiration_ms, self._clock.wall_ms() - ended_ms)

    def flush(self) -> None:
        with self.lock:
            self.guard_storage(self._log.flush)

    @property
    def log(self) -> ReplicaLog:
        return self._log

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._carry_out_one(effect)

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case HighWatermarkAdvanced():
                for notifier in self._commit_listeners:
                    notifier.notify(self.key)
            case Acknowledge():
                self._acknowledge(effect)
            case Refuse(token, error):
                cast("AppendToken", token).refuse(error)
            case SaveEpochs(history):
                self.guard_storage(lambda: self._log.save_epochs(history))
            case TruncateLog(offset, reason):
                self._truncate(offset, reason)
            case AdvanceLogStart():
                self._remove_below_log_start()
            case RestartLog(reason):
                self.restart_reason = reason
            case SetAside(reason):
                self._broken(DivergedLogError(reason))
            case ProposeIsr():
                self._events.propose_isr(self.key, effect)

    def _truncate(self, offset: int, reason: str) -> None:
        began = self.replica.log_end_offset
        try:
            self.guard_storage(lambda: self._log.truncate_to(offset))
        finally:  # A full disk may refuse only the last step: the segments above the offset are gone.
            if self.replica.role is not Role.STOPPED and self._log.log_end_offset < self.replica.log_end_offset:
                producers = self._learn(lambda: self._log.rebuild_producers(self.replica.high_watermark))
                self._carry_out(self.replica.truncated(producers, self._log.log_end_offset))
                self.lines.truncated(began, reason)
                self.replica.check_log_end(self._log.log_end_offset)

    def _acknowledge(self, effect: Acknowledge) -> None:
        """The lease is checked here, just before the answer: a fenced incarnation acknowledges nothing."""
        token = cast("AppendToken", effect.token)
        if self.lease.allows_appends:
            token.acknowledge(effect.base_offset)
        else:
            token.refuse(NotLeaderOrFollowerError("this broker lost its session before the append was acknowledged"))
