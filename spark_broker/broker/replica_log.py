"""One partition's files: the log, and the checkpoints of what the log alone does not say."""

from __future__ import annotations

from pathlib import Path

from spark_broker.broker.topic import Topic
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.producers import NO_PRODUCER, ProducerEntry, ProducerStates, StoredBatch
from spark_broker.core.replica import BatchInfo, LogState
from spark_broker.errors import DamagedLogError, KafkaStorageError
from spark_broker.protocol.frame import BatchHeader, Frame
from spark_broker.protocol.messages import ProducerStateEntry
from spark_broker.storage.checkpoints import (
    read_checkpoint,
    read_leader_epochs,
    write_checkpoint,
    write_leader_epochs,
)
from spark_broker.storage.config import LogConfig
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.start_kind import StartKind

PRODUCERS_FILE = "producers.json"


def batch_info(header: BatchHeader) -> BatchInfo:
    return BatchInfo(
        base_offset=header.base_offset,
        next_offset=header.next_offset,
        leader_epoch=header.leader_epoch,
        append_time_ms=header.append_time_ms,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        sequence=header.base_sequence,
    )


class ReplicaLog:
    """The log of a replica with its epoch history and producer snapshot.

    The producer snapshot is the state at the log start: what retention has removed from the log is in there (KIP-360),
    and the rest is replayed from the index, so that truncation never leaves anything behind (KAFKA-5435).
    """

    def __init__(self, directory: Path, topic: Topic, start: StartKind) -> None:
        """Open and recover. Raises DamagedLogError when no crash explains what is there."""
        self._directory = directory
        self._topic = topic
        self._log = PartitionLog.open(directory, LogConfig.of_topic(topic.config), self._schema_bytes, start=start)
        last = self._log.last_header
        self.last_append_time_ms = last.append_time_ms if last else 0

    def _schema_bytes(self, schema_id: int) -> bytes:
        return self._topic.schema_bytes[schema_id]

    def configure(self, topic: Topic) -> None:
        if topic is not self._topic:
            self._topic = topic
            self._log.config = LogConfig.of_topic(topic.config)

    def state(self, *, high_watermark: int) -> LogState:
        """What the state machine starts from."""
        return LogState(
            log_start_offset=self._log.log_start_offset,
            log_end_offset=self._log.log_end_offset,
            high_watermark=high_watermark,
            epochs=self._epochs(),
            producers=self.rebuild_producers(),
        )

    def _epochs(self) -> EpochHistory:
        """The saved history, completed by the epochs that the batches themselves carry."""
        history = EpochHistory.from_pairs(read_leader_epochs(self._directory)).truncate_to(self._log.log_end_offset)
        known_to = history.entries[-1].start_offset if history.entries else self._log.log_start_offset
        for header in self._log.headers(known_to):
            if header.leader_epoch > history.latest_epoch:
                history = history.assign(header.leader_epoch, header.base_offset)
        return history

    # ---- the log -----------------------------------------------------------------------------------------------

    @property
    def log_end_offset(self) -> int:
        return self._log.log_end_offset

    @property
    def max_timestamp_us(self) -> int:
        return self._log.max_timestamp_us

    @property
    def size_bytes(self) -> int:
        return self._log.size_bytes

    def should_roll(self, length: int, schema_id: int, append_time_ms: int) -> bool:
        return self._log.should_roll(length, schema_id, append_time_ms)

    def append(self, frames: list[Frame]) -> None:
        """Raises StorageFullError (nothing was stored) or KafkaStorageError (the log is offline)."""
        self._log.append_many(frames)
        self.last_append_time_ms = max(self.last_append_time_ms, frames[-1].header.append_time_ms)

    def read(self, offset: int, max_bytes: int, end_offset: int) -> list[Frame]:
        return self._log.read(offset, max_bytes=max_bytes, end_offset=end_offset)

    def offset_for_timestamp(self, timestamp_us: int) -> int | None:
        """Base offset of the first batch that holds a record at or after the time."""
        found = self._log.offset_for_timestamp(timestamp_us)
        return None if found is None else found[0]

    def truncate_to(self, offset: int) -> None:
        self._log.truncate_to(offset)

    def flush(self) -> None:
        self._log.flush()

    def close(self, *, clean: bool) -> None:
        self._log.close(clean=clean)

    def retention_start(self, high_watermark: int, now_ms: int) -> int:
        """Where the log would start if retention were applied now."""
        return self._log.retention_start(high_watermark=high_watermark, now_ms=now_ms)

    def advance_log_start(self, offset: int) -> None:
        """Save what the removed part says of producers, then remove it."""
        self._save_producers(self.rebuild_producers(offset), offset)
        self._log.advance_log_start(offset)

    def restart_at(
        self, log_start_offset: int, epochs: list[tuple[int, int]], producers: list[ProducerStateEntry]
    ) -> None:
        """Drop everything and begin at the leader's log start, with what the leader says of the part before it."""
        states = ProducerStates((entry.producer_id, _from_wire(entry)) for entry in producers)
        self._save_producers(states, log_start_offset)
        self._log.truncate_fully_and_start_at(log_start_offset)
        self.save_epochs(EpochHistory.from_pairs([(e, s) for e, s in epochs if s <= log_start_offset]))

    # ---- epochs and producers ----------------------------------------------------------------------------------

    def save_epochs(self, history: EpochHistory) -> None:
        try:
            write_leader_epochs(self._directory, history.to_pairs())
        except OSError as error:
            raise KafkaStorageError(f"the epoch history of {self._directory.name}: {error}") from error

    def rebuild_producers(self, end_offset: int | None = None) -> ProducerStates:
        """The producers' state after the log up to `end_offset` (exclusive; None: all of it)."""
        states, start = self._saved_producers()
        for header in self._log.headers(max(start, self._log.log_start_offset)):
            if end_offset is not None and header.base_offset >= end_offset:
                break
            if header.producer_id != NO_PRODUCER and header.base_offset >= start:
                batch = StoredBatch(header.base_sequence, header.base_offset, header.last_offset)
                states.appended(header.producer_id, header.producer_epoch, batch, header.append_time_ms)
        return states

    def producers_at_log_start(self) -> list[ProducerStateEntry]:
        """For a follower that begins at the log start."""
        states = self.rebuild_producers(self._log.log_start_offset)
        return [_to_wire(producer_id, entry) for producer_id, entry in states.entries()]

    def _save_producers(self, states: ProducerStates, offset: int) -> None:
        entries = [
            [pid, e.producer_epoch, e.last_append_ms, [[b.sequence, b.base_offset, b.last_offset] for b in e.batches]]
            for pid, e in states.entries()
        ]
        try:
            write_checkpoint(self._directory / PRODUCERS_FILE, {"offset": offset, "producers": entries})
        except OSError as error:
            raise KafkaStorageError(f"the producer snapshot of {self._directory.name}: {error}") from error

    def _saved_producers(self) -> tuple[ProducerStates, int]:
        value = read_checkpoint(self._directory / PRODUCERS_FILE)
        if value is None:
            return ProducerStates(), 0
        if not isinstance(value, dict):
            raise DamagedLogError(f"{PRODUCERS_FILE} does not hold an object")
        entries = (
            (int(pid), ProducerEntry(int(epoch), tuple(StoredBatch(*batch) for batch in batches), int(time_ms)))
            for pid, epoch, time_ms, batches in value["producers"]
        )
        return ProducerStates(entries), int(value["offset"])


def _to_wire(producer_id: int, entry: ProducerEntry) -> ProducerStateEntry:
    batches = [(b.sequence, b.sequence, b.base_offset, b.last_offset) for b in entry.batches]
    return ProducerStateEntry(producer_id, entry.producer_epoch, entry.last_append_ms, batches)


def _from_wire(entry: ProducerStateEntry) -> ProducerEntry:
    batches = tuple(StoredBatch(first, base, last) for first, _, base, last in entry.batches)
    return ProducerEntry(entry.producer_epoch, batches, entry.last_append_ms)
