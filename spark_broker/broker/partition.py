"""The shell of one partition replica: carries out the effects of `core.replica` with its log, under one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.lease import Lease
from spark_broker.broker.notifier import Notifier
from spark_broker.broker.replica_log import ReplicaLog, batch_info
from spark_broker.broker.topic import Topic
from spark_broker.core.effects import (
    Acknowledge,
    AdvanceLogStart,
    Effect,
    HighWatermarkAdvanced,
    ProposeIsr,
    Refuse,
    RestartLog,
    SaveEpochs,
    TruncateLog,
)
from spark_broker.core.producers import StoredBatch
from spark_broker.core.replica import (
    ACKS_ALL,
    Assignment,
    Diverging,
    Fetched,
    FetchPosition,
    Replica,
    Role,
)
from spark_broker.errors import (
    KafkaStorageError,
    MessageTooLargeError,
    NotLeaderOrFollowerError,
    RecordListTooLargeError,
    SchemaMismatchError,
    SparkBrokerError,
    StorageFullError,
)
from spark_broker.protocol.arrow_message import ParsedBatch, assign, decode_batch, validate
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.messages import ReplicaStateAnswer
from spark_broker.protocol.wire import Buffer

PartitionKey = tuple[str, int]
"""Topic id and partition number."""


class AppendToken(Protocol):
    """Who waits for an append. Called under the partition's lock: it must not block."""

    def acknowledge(self, base_offset: int) -> None: ...

    def refuse(self, error: SparkBrokerError) -> None: ...


@dataclass(frozen=True, slots=True)
class Append:
    """A batch from a client. `acks` is 0, 1 or -1; `deadline_ms` is on the boot-time clock."""

    message: Buffer
    leader_epoch: int
    acks: int
    schema_id: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class PartitionRead:
    """Frames, and what the leader knew when it read them."""

    frames: list[Frame]
    leader_epoch: int
    high_watermark: int
    log_start_offset: int


class Partition:
    """A replica that this broker hosts. Every public method takes the lock; reads of the log happen outside of it.

    `_log_listeners` are told of a longer log (followers' streams), `_commit_listeners` of a higher high watermark.
    """

    def __init__(
        self,
        key: PartitionKey,
        topic: Topic,
        log: ReplicaLog,
        replica: Replica,
        lease: Lease,
        propose_isr: Callable[[PartitionKey, ProposeIsr], None],
        on_storage_failure: Callable[[PartitionKey, SparkBrokerError], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.key = key
        self.topic = topic
        self.replica = replica
        self.restart_reason: str | None = None  # set: the log must be made anew from the leader's before it goes on
        self._log = log
        self._lease = lease
        self._propose_isr = propose_isr
        self._on_storage_failure = on_storage_failure
        self._clock = clock
        self._lock = threading.RLock()
        self._log_listeners: set[Notifier] = set()
        self._commit_listeners: set[Notifier] = set()

    def __str__(self) -> str:
        return f"{self.topic.name}-{self.key[1]}"

    # ---- metadata ----------------------------------------------------------------------------------------------

    def assign(self, assignment: Assignment, topic: Topic, broker_epochs: Mapping[int, int]) -> None:
        """What the controller says now; streams that wait are woken to see it."""
        with self._lock:
            self.topic = topic
            self._log.configure(topic)
            self._carry_out(self.replica.configure(topic.config.min_insync_replicas))
            leader_epoch = self.replica.assignment.leader_epoch
            self._carry_out(self.replica.assign(assignment, broker_epochs, self._clock.boottime_ms()))
            if self.replica.assignment.leader_epoch != leader_epoch:
                # Another leader may well have what follows our log: it is asked first.
                self.restart_reason = None
            for notifier in (*self._log_listeners, *self._commit_listeners):
                notifier.notify(self.key)

    def stop(self, error: SparkBrokerError) -> None:
        """Take the replica offline; appends that wait are refused with `error`."""
        with self._lock:
            self._carry_out(self.replica.stop(error))
            for notifier in (*self._log_listeners, *self._commit_listeners):
                notifier.notify(self.key)

    def close(self, *, clean: bool) -> None:
        with self._lock:
            self._log.close(clean=clean)

    def tick(self, broker_epochs: Mapping[int, int]) -> None:
        with self._lock:
            self._carry_out(self.replica.tick(broker_epochs, self._clock.boottime_ms()))

    def isr_refused(self, leader_epoch: int, partition_epoch: int, error_code: int) -> None:
        with self._lock:
            self._carry_out(self.replica.isr_refused(leader_epoch, partition_epoch, error_code))

    def is_current(self, proposal: ProposeIsr) -> bool:
        """Whether the proposal is still open."""
        with self._lock:
            now = self.replica.assignment
            current = (now.leader_epoch, now.partition_epoch) == (proposal.leader_epoch, proposal.partition_epoch)
            return current and self.replica.proposed_isr is not None

    def listen(self, notifier: Notifier, *, commits: bool) -> None:
        """Tell `notifier` of commits, or else of every append."""
        with self._lock:
            (self._commit_listeners if commits else self._log_listeners).add(notifier)

    def forget(self, notifier: Notifier) -> None:
        with self._lock:
            self._commit_listeners.discard(notifier)
            self._log_listeners.discard(notifier)

    # ---- the leader --------------------------------------------------------------------------------------------

    def append(self, append: Append, token: AppendToken | None) -> None:
        """Validate a client's batch in full, store it and answer `token` as its acks ask (None with acks=0).

        Raises the error that refuses the batch; nothing is stored then.
        """
        parsed = self._validate(append)
        with self._lock:
            self._check_lease(writing=True)
            header = parsed.header
            granted = self.replica.prepare_append(
                append.leader_epoch, append.acks, header.producer_id, header.producer_epoch, header.base_sequence
            )
            if isinstance(granted, StoredBatch):
                base_offset, next_offset = granted.base_offset, granted.last_offset + 1
            else:
                base_offset = granted.base_offset
                next_offset = self._write(append, parsed, granted.base_offset, granted.leader_epoch)
            if token is None:
                return
            if append.acks == ACKS_ALL:
                self._carry_out(self.replica.await_commit(token, base_offset, next_offset, append.deadline_ms))
            else:
                self._carry_out([Acknowledge(token, base_offset)])

    def _validate(self, append: Append) -> ParsedBatch:
        topic = self.topic
        limit = topic.config.max_message_bytes
        if len(append.message) > limit:
            raise MessageTooLargeError(f"a batch of {len(append.message)} bytes; {topic.name} takes {limit}")
        if len(append.message) > topic.config.segment_bytes:
            raise RecordListTooLargeError(f"a batch of {len(append.message)} bytes; a segment holds less")
        if not 0 <= append.schema_id < len(topic.schemas):
            raise SchemaMismatchError(f"the topic {topic.name} has no schema {append.schema_id}")
        return validate(append.message, topic.schemas[append.schema_id], max_uncompressed_bytes=limit)

    def _check_lease(self, *, writing: bool) -> None:
        if not (self._lease.allows_appends if writing else self._lease.allows_reads):
            raise NotLeaderOrFollowerError("this broker has no live session with the controller")

    def _write(self, append: Append, parsed: ParsedBatch, base_offset: int, leader_epoch: int) -> int:
        """Assign offsets, write both files, move the state machine on. Returns the offset after the batch."""
        append_time_ms = max(self._clock.wall_ms(), self._log.last_append_time_ms)
        newest = self.topic.max_timestamp_us(parsed.batch, append_time_ms)
        header, message = assign(
            append.message,
            base_offset=base_offset,
            leader_epoch=leader_epoch,
            append_time_ms=append_time_ms,
            max_timestamp_us=max(newest, self._log.max_timestamp_us),
            first_of_segment=self._log.should_roll(len(append.message), append.schema_id, append_time_ms),
            schema_id=append.schema_id,
        )
        self._guard_storage(lambda: self._log.append([Frame(header, message)]))
        self._carry_out(self.replica.appended(batch_info(header), self._clock.boottime_ms()))
        for notifier in self._log_listeners:
            notifier.notify(self.key)
        return header.next_offset

    def _guard_storage(self, write: Callable[[], None]) -> None:
        """A failed write takes the replica offline; a full disk only refuses this one."""
        try:
            write()
        except StorageFullError:
            raise
        except KafkaStorageError as error:
            self._carry_out(self.replica.stop(error))
            self._on_storage_failure(self.key, error)
            raise

    def follower_fetch(
        self, follower: int, broker_epoch: int, position: FetchPosition, live: Mapping[int, int]
    ) -> Diverging | None:
        """A follower says how far it is. Raises the error that it gets."""
        with self._lock:
            diverging, effects = self.replica.follower_fetch(
                follower, broker_epoch, position, live, self._clock.boottime_ms()
            )
            self._carry_out(effects)
            return diverging

    def follower_idle(self, follower: int, broker_epoch: int, live: Mapping[int, int]) -> None:
        """The follower still pulls, with nothing new to say of this partition."""
        with self._lock:
            self._carry_out(self.replica.follower_idle(follower, broker_epoch, live, self._clock.boottime_ms()))

    def read_for_follower(self, leader_epoch: int, offset: int, max_bytes: int) -> PartitionRead:
        with self._lock:
            self.replica.check_leader(leader_epoch)
            read = self._position(self.replica.log_end_offset)
            within = self.replica.log_start_offset <= offset < read[0]  # below it, the follower begins anew
        frames = self._log.read(offset, max_bytes, read[0]) if within else []
        return PartitionRead(frames, *read[1:])

    def leader_position(self, leader_epoch: int) -> PartitionRead:
        """What the leader knows, without records."""
        with self._lock:
            self.replica.check_leader(leader_epoch)
            return PartitionRead([], *self._position(0)[1:])

    def replica_state(self, leader_epoch: int) -> ReplicaStateAnswer:
        """What a follower needs that begins at this log's start."""
        with self._lock:
            self.replica.check_leader(leader_epoch)
            return ReplicaStateAnswer(
                self.replica.log_start_offset,
                self.replica.epochs.to_pairs(),
                self._log.producers_at_log_start(),
            )

    def read_committed(self, leader_epoch: int, offset: int, max_bytes: int) -> PartitionRead:
        """Committed batches from the one that holds `offset` on; none when there is nothing yet."""
        with self._lock:
            self._check_lease(writing=False)
            bound = self.replica.check_read(leader_epoch, offset)
            read = self._position(bound)
        frames = self._log.read(offset, max_bytes, bound) if offset < bound else []
        return PartitionRead(frames, *read[1:])

    def _position(self, end: int) -> tuple[int, int, int, int]:
        replica = self.replica
        return end, replica.assignment.leader_epoch, replica.high_watermark, replica.log_start_offset

    def offset_at(self, leader_epoch: int, timestamp_ms: int) -> tuple[int, int] | None:
        """Offset and timestamp (ms) of the first committed record at or after the time; None: there is none."""
        with self._lock:
            self._check_lease(writing=False)
            end = self.replica.latest_offset(leader_epoch)
            found = self._log.offset_for_timestamp(timestamp_ms * 1000)
        # The running maximum may stem from a batch that retention has removed: look at the rows, and go on if need be.
        while found is not None and found < end:
            frame = self._log.read(found, 1, end)[0]
            times = self.topic.timestamps_us(self.decode(frame), frame.header.append_time_ms)
            row = pc.index(pc.greater_equal(times, timestamp_ms * 1000), True).as_py()
            if row >= 0:
                return frame.header.base_offset + row, times[row].as_py() // 1000
            found = frame.header.next_offset
        return None

    def offsets(self, leader_epoch: int) -> tuple[int, int]:
        """Log start and high watermark, as the leader knows them."""
        with self._lock:
            self._check_lease(writing=False)
            high_watermark = self.replica.latest_offset(leader_epoch)
            return self.replica.log_start_offset, high_watermark

    def decode(self, frame: Frame) -> pa.RecordBatch:
        return decode_batch(frame.message, self.topic.schemas[frame.header.schema_id])

    def leader_epoch(self) -> int:
        with self._lock:
            return self.replica.assignment.leader_epoch

    # ---- the follower ------------------------------------------------------------------------------------------

    def fetch_position(self) -> FetchPosition | None:
        """What to ask the leader for; None when this replica does not follow."""
        with self._lock:
            return self.replica.fetch_position() if self.replica.role is Role.FOLLOWER else None

    def apply(self, answer: Fetched, frames: list[Frame]) -> None:
        """The leader's answer: truncate, or append its batches as they are. Old answers are ignored."""
        with self._lock:
            if not self.replica.awaits(answer):
                return
            self._carry_out(self.replica.fetched(answer))
            if answer.diverging is not None or self.restart_reason is not None:
                return
            fresh = [frame for frame in frames if frame.header.base_offset >= self.replica.log_end_offset]
            if fresh:
                self._guard_storage(lambda: self._log.append(fresh))
            infos = [batch_info(frame.header) for frame in fresh]
            self._carry_out(self.replica.follower_appended(infos, answer.high_watermark))

    def restart(self, leader_epoch: int, answer: ReplicaStateAnswer) -> None:
        """Begin anew at the leader's log start with the leader's epoch history and producers (DESIGN 5)."""
        start = answer.log_start_offset
        with self._lock:
            if self.replica.role is not Role.FOLLOWER or leader_epoch != self.replica.assignment.leader_epoch:
                return
            if self.restart_reason is None:
                return  # A fetcher that was replaced is late: dropped twice, the log would lose what was pulled since.
            self._guard_storage(lambda: self._log.restart_at(start, answer.epochs, answer.producers))
            self.replica.restarted(self._log.state(high_watermark=start))
            self.restart_reason = None

    # ---- maintenance -------------------------------------------------------------------------------------------

    def apply_retention(self) -> None:
        """The leader decides; followers move their log start when the leader's answer names it."""
        with self._lock:
            if self.replica.role is not Role.LEADER:
                return
            start = self._log.retention_start(self.replica.high_watermark, self._clock.wall_ms())
            self._carry_out(self.replica.advance_log_start(start))

    def advance_log_start(self, offset: int) -> None:
        """Drop everything below a committed offset."""
        with self._lock:
            self._carry_out(self.replica.advance_log_start(min(offset, self.replica.high_watermark)))

    def flush(self) -> None:
        with self._lock:
            self._guard_storage(self._log.flush)

    @property
    def log(self) -> ReplicaLog:
        return self._log

    # ---- effects -----------------------------------------------------------------------------------------------

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
                _token(token).refuse(error)
            case SaveEpochs(history):
                self._guard_storage(lambda: self._log.save_epochs(history))
            case TruncateLog(offset):
                self._guard_storage(lambda: self._log.truncate_to(offset))
                producers = self._log.rebuild_producers()
                self._carry_out(self.replica.producers_rebuilt(producers, self._log.log_end_offset))
            case AdvanceLogStart(offset):
                self._guard_storage(lambda: self._log.advance_log_start(offset))
            case RestartLog(reason):
                self.restart_reason = reason
            case ProposeIsr():
                self._propose_isr(self.key, effect)

    def _acknowledge(self, effect: Acknowledge) -> None:
        """The lease is checked here, just before the answer: a fenced incarnation acknowledges nothing."""
        token = _token(effect.token)
        if self._lease.allows_appends:
            token.acknowledge(effect.base_offset)
        else:
            token.refuse(NotLeaderOrFollowerError("this broker lost its session before the append was acknowledged"))


def _token(token: object) -> AppendToken:
    return token  # type: ignore[return-value]
