"""The consumer: whole micro-batches by offset, from the leaders of the partitions that it reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from spark_broker.client.assignment import Assignment, PartitionState, Start
from spark_broker.client.connections import ConnectionPool
from spark_broker.client.consumer_work import ConsumerWork
from spark_broker.client.group_offsets import GroupOffsets
from spark_broker.client.keywords import ConsumerSettings
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import at_time, lookup_offsets
from spark_broker.client.retry import Backoff, Deadline
from spark_broker.client.settings import client_config, parse_addresses
from spark_broker.config import ConsumerConfig
from spark_broker.errors import (
    ClosedError,
    InvalidConfigError,
    OffsetOutOfRangeError,
    PolicyViolationError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.model import NO_EPOCH, ConsumedBatch, OffsetAndMetadata, TopicPartition
from spark_broker.protocol.messages import EARLIEST_TIMESTAMP_MS, LATEST_TIMESTAMP_MS

CLOSE_TIMEOUT_S = 10.0

Offsets = Mapping[TopicPartition, "int | OffsetAndMetadata"]


class Consumer:
    """Reads all partitions of `topics`, or those given to `assign`. For one thread; `close` may come from another.

    Settings are ConsumerConfig's, as keywords (`auto_offset_reset="earliest"`) or as
    `config={"auto.offset.reset": ...}`. `columns`: only these columns of each topic are sent by the brokers. Records of
    transactions come once these are committed; `isolation_level="read_uncommitted"` hands out all of them at once.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        group_id: str | None = None,
        topics: Sequence[str] | str | None = None,
        columns: Sequence[str] | None = None,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self._config = client_config(ConsumerConfig, bootstrap_servers, config, {**settings, "group_id": group_id})
        self._assignment = Assignment()
        self._metadata = ClusterMetadata(
            parse_addresses(self._config.bootstrap_servers),
            ConnectionPool(),
            Backoff(self._config.retry_backoff_ms, self._config.retry_backoff_max_ms),
            request_timeout_ms=self._config.request_timeout_ms,
            max_age_ms=self._config.metadata_max_age_ms,
            on_change=self._assignment.wake,
        )
        self._group = GroupOffsets(self._metadata, self._config.group_id) if self._config.group_id else None
        self._work = ConsumerWork(self._assignment, self._metadata, self._config, self._group, columns)
        self._close_lock = threading.Lock()
        self._auto_committed_s = time.monotonic()
        if topics:
            self._subscribe([topics] if isinstance(topics, str) else list(topics))

    # ---- what to read -----------------------------------------------------------------------------------------------

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions and no others. Those that were assigned before keep their positions."""
        wanted = [TopicPartition(tp.topic, tp.partition) for tp in partitions]
        with self._open():
            self._assignment.topics = set()
            self._assignment.replace(wanted, self._work.first_start, self._work.reset)
            self._work.interrupt_fetchers()

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read now."""
        with self._assignment.lock:
            return sorted(self._assignment.partitions)

    def seek(self, partition: TopicPartition, offset: int | OffsetAndMetadata) -> None:
        """Read on from this offset. What was fetched from elsewhere is never handed out.

        Given with the leader epoch of the record before it (as `committed_metadata` returns it), poll raises
        LogTruncationError where the log was cut below it since (KIP-320).
        """
        to = offset if isinstance(offset, OffsetAndMetadata) else OffsetAndMetadata(offset)
        if to.offset < 0:
            raise OffsetOutOfRangeError(f"{partition}: offset {to.offset}")
        self._on_state(partition, lambda state: state.move_to(to.offset, to.leader_epoch))

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Read on from the log start; of every assigned partition when none is named."""
        for tp in partitions or self.assignment():
            self._on_state(tp, lambda state: state.find_start(Start.EARLIEST))

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Read on from the end (see `end_offsets`); of every assigned partition when none is named."""
        for tp in partitions or self.assignment():
            self._on_state(tp, lambda state: state.find_start(Start.LATEST))

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these until `resume`."""
        for tp in partitions:
            self._set_paused(tp, paused=True)

    def resume(self, *partitions: TopicPartition) -> None:
        """The opposite of `pause`."""
        for tp in partitions:
            self._set_paused(tp, paused=False)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def poll(self, timeout: float = 1.0) -> list[ConsumedBatch]:
        """Batches from the positions on, as soon as there are any; empty after `timeout` seconds.

        A batch is a micro-batch as it was appended, or the rest of it when the position lies inside. Offsets may be
        missing between batches: markers of transactions take one each, and read_committed leaves out what was aborted.
        Where only such offsets were passed, poll is empty at once, as Kafka's is. Moves of leaders
        are not noticed here. Raises LogTruncationError when an unclean election cut the log below the position: once,
        and the position is then where the log parts, or, with auto.offset.reset=none, until the next seek. Raises
        OffsetOutOfRangeError (auto.offset.reset=none), UnknownTopicOrPartitionError,
        InconsistentTopicIdError (the topic was created anew), CorruptMessageError, BootstrapUnreachableError and
        ClosedError.
        """
        self._commit_when_due()
        deadline = Deadline.after_ms(timeout * 1000)
        with self._open():
            while True:
                self._raise_error()
                taken, moved = self._assignment.take()
                if moved or deadline.expired:
                    return taken
                self._assignment.changed.wait(deadline.remaining_s)
                self._check_open()

    def position(self, partition: TopicPartition) -> int:
        """Offset of the next record that poll hands out. Waits for it up to default.api.timeout.ms."""
        deadline = self._api_deadline()
        with self._open():
            state = self._state(partition, deadline)
            while not state.has_position:
                self._raise_error()
                if not self._assignment.changed.wait(deadline.remaining_s):
                    raise RequestTimedOutError(f"the position of {partition} could not be looked up in time")
                self._check_open()
            return state.position

    # ---- committed offsets ------------------------------------------------------------------------------------------

    def commit(self, offsets: Offsets | None = None) -> None:
        """Store positions (or these offsets) under the group and wait for it.

        A commit never passes records that were not handed out: an offset beyond the position raises
        PolicyViolationError. Raises RequestTimedOutError when no coordinator answers within default.api.timeout.ms.
        """
        group = self._require_group()
        chosen = self._positions() if offsets is None else self._checked(offsets)
        if chosen:
            self._work.commit_now(group, chosen, self._api_deadline())

    def commit_async(self) -> None:
        """Store the positions of now from the background."""
        self._require_group()
        self._work.commit_later(self._positions())

    def committed(self, partition: TopicPartition) -> int | None:
        """The group's committed offset: the next one to read. None: there is none."""
        found = self.committed_metadata(partition)
        return None if found is None else found.offset

    def committed_metadata(self, partition: TopicPartition) -> OffsetAndMetadata | None:
        """The committed offset with its leader epoch and note."""
        return self._require_group().fetch([partition], self._api_deadline()).get(partition)

    # ---- offsets of the log -----------------------------------------------------------------------------------------

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Log start offsets."""
        return self._lookup(at_time(partitions, EARLIEST_TIMESTAMP_MS))

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offsets after the last that can be read: last stable offsets; high watermarks with read_uncommitted."""
        return self._lookup(at_time(partitions, LATEST_TIMESTAMP_MS))

    def offsets_for_times(self, timestamps_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Offset of the first record at or after each time (ms since 1970); None: there is none."""
        return {tp: None if found < 0 else found for tp, found in self._lookup(timestamps_ms).items()}

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Commit what was handed out (enable.auto.commit), and end; at most about `timeout` seconds."""
        with self._close_lock:
            if self._assignment.closed:
                return
            try:
                if self._group is not None and self._config.enable_auto_commit:
                    self._work.commit_last(self._group, self._positions(), Deadline.after_ms(timeout * 1000))
            finally:
                self._work.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _subscribe(self, topics: list[str]) -> None:
        with self._open():
            self._assignment.topics = set(topics)
            self._assignment.refresh_wanted = True
            self._assignment.changed.notify_all()

    def _open(self) -> threading.Condition:
        """The assignment's lock, of a consumer that is open."""
        self._check_open()
        return self._assignment.changed

    def _check_open(self) -> None:
        if self._assignment.closed:
            raise ClosedError("the consumer is closed")

    def _api_deadline(self) -> Deadline:
        return Deadline.after_ms(self._config.default_api_timeout_ms)

    def _raise_error(self) -> None:
        error = self._assignment.first_error()
        if error is None:
            return
        if error is self._assignment.failure and isinstance(error, SparkBrokerError):
            self._assignment.failure = None
        raise error

    def _state(self, partition: TopicPartition, deadline: Deadline) -> PartitionState:
        """Under the lock. A partition of `topics` is assigned once metadata is there: wait for that."""
        while partition not in self._assignment.partitions and partition.topic in self._assignment.unresolved:
            self._raise_error()
            if not self._assignment.changed.wait(deadline.remaining_s):
                raise RequestTimedOutError(f"no metadata of topic {partition.topic!r} in time")
            self._check_open()
        return self._assignment.state(partition)

    def _on_state(self, partition: TopicPartition, change: Callable[[PartitionState], None]) -> None:
        with self._open():
            change(self._state(partition, self._api_deadline()))
            self._work.interrupt_fetchers([partition])

    def _set_paused(self, partition: TopicPartition, *, paused: bool) -> None:
        with self._open():
            self._state(partition, self._api_deadline()).paused = paused
            if not paused:
                self._work.interrupt_fetchers([partition])

    def _positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        with self._assignment.lock:
            return {
                tp: OffsetAndMetadata(state.position, state.last_epoch)
                for tp, state in self._assignment.partitions.items()
                if state.has_position
            }

    def _checked(self, offsets: Offsets) -> dict[TopicPartition, OffsetAndMetadata]:
        chosen = {
            tp: one if isinstance(one, OffsetAndMetadata) else OffsetAndMetadata(one, self._epoch_at(tp, one))
            for tp, one in offsets.items()
        }
        with self._assignment.lock:
            for tp, one in chosen.items():
                state = self._assignment.partitions.get(tp)
                if one.offset < 0:
                    raise OffsetOutOfRangeError(f"{tp}: a commit of offset {one.offset}")
                if state is not None and state.has_position and one.offset > state.position:
                    raise PolicyViolationError(
                        f"{tp}: a commit of {one.offset} would pass records from {state.position} on, "
                        "which were not handed out"
                    )
        return chosen

    def _epoch_at(self, partition: TopicPartition, offset: int) -> int:
        """KAFKA-20507: the leader epoch of the last record before a committed offset, where it is known."""
        with self._assignment.lock:
            state = self._assignment.partitions.get(partition)
            return state.last_epoch if state is not None and state.position == offset else NO_EPOCH

    def _require_group(self) -> GroupOffsets:
        self._check_open()
        if self._group is None:
            raise InvalidConfigError("committed offsets belong to a group, and group.id is not set")
        return self._group

    def _lookup(self, timestamps_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        self._check_open()
        found = lookup_offsets(
            self._metadata, timestamps_ms, self._api_deadline(), read_committed=self._config.read_committed
        )
        return {tp: found[tp].offset for tp in timestamps_ms}

    def _commit_when_due(self) -> None:
        """Positions here are those that earlier polls handed out: what this poll returns is not committed by it."""
        if self._group is None or not self._config.enable_auto_commit:
            return
        now_s = time.monotonic()
        if (now_s - self._auto_committed_s) * 1000 >= self._config.auto_commit_interval_ms:
            self._auto_committed_s = now_s
            self._work.commit_later(self._positions())
