"""One partition's files: the log, and the checkpoints of what the log alone does not say."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spark_broker.broker.topic import Topic
from spark_broker.core.batch import batch_info
from spark_broker.core.compaction import Cleaned
from spark_broker.core.epochs import UNDEFINED_EPOCH, EpochHistory
from spark_broker.core.producers import ProducerEntry, ProducerStates, StoredBatch
from spark_broker.core.replica import RecoveredLog
from spark_broker.core.transaction_index import TransactionIndex
from spark_broker.errors import DamagedLogError, KafkaStorageError, StorageRefusedError, invariant
from spark_broker.protocol.arrow_message import restamp
from spark_broker.protocol.frame import NO_PRODUCER_ID, ROW_OFFSETS, BatchHeader, Frame
from spark_broker.protocol.messages import ProducerStateEntry
from spark_broker.storage.checkpoints import read_leader_epochs, write_leader_epochs
from spark_broker.storage.cleaner import Swap
from spark_broker.storage.config import LogConfig
from spark_broker.storage.files import is_full, storage_error
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.loaded_indexes import LoadedIndexes
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.log_view import LogView
from spark_broker.storage.producer_snapshots import ProducerSnapshots
from spark_broker.storage.retention import RetentionClock
from spark_broker.storage.segment import Segment, by_segment
from spark_broker.storage.start_kind import StartKind
from spark_broker.storage.stored_run import StoredRun

logger = logging.getLogger(__name__)


def to_append(frames: list[Frame], offset: int, leader_epoch: int) -> list[Frame]:
    """Of what a leader sent as of this epoch, the batches for a log that ends at `offset`.

    A leader that was deposed while it read may send what it has copied from the next one. In an answer of the older
    epoch, that would get a place that no comparison of epochs checks.
    """
    return [f for f in frames if f.header.base_offset >= offset and f.header.leader_epoch <= leader_epoch]


def from_offset(frames: list[Frame], offset: int) -> list[Frame]:
    """The batches, for a log that ends at `offset`: a gap that reaches below it is cut to begin there.

    A log that was compacted may have one gap where the log that copies it has several batches. Others are cut nowhere:
    a log begins within a batch only where nothing is below.
    """
    if not frames or frames[0].header.base_offset >= offset or frames[0].header.row_count:
        return frames
    (header, message), *others = frames
    if not header.attributes & ROW_OFFSETS or header.producer_id != NO_PRODUCER_ID:
        return frames
    cut = header._replace(base_offset=offset, last_offset_delta=header.last_offset - offset)
    return [restamp(message, cut), *others]


class _Schemas:
    """The schemas of a topic, by id, as the topic is now."""

    __slots__ = ("topic",)

    def __init__(self, topic: Topic) -> None:
        self.topic = topic

    def __call__(self, schema_id: int) -> bytes:
        return self.topic.schema_message(schema_id)


class ReplicaLog:
    """The log of a replica with its epoch history and producer snapshots.

    Invariant: unless the log start is 0, there is a producer snapshot at the log start. It has the producers of the
    batches that retention has removed (KIP-360). Later batches are replayed from the index, so that truncation never
    leaves anything behind (KAFKA-5435).
    """

    def __init__(
        self,
        directory: Path,
        topic: Topic,
        start: StartKind,
        *,
        fs: FileSystem = LOCAL,
        indexes: LoadedIndexes | None = None,
    ) -> None:
        """Open and recover. `indexes`: of all replicas of the broker.

        Raises DamagedLogError when no crash explains what is there.
        """
        self.fs = fs
        self.directory = directory
        self._schemas = _Schemas(topic)
        # What the file says, and what it must say by the next flush, or by the next append with `_epochs_due`.
        self._saved_epochs = EpochHistory()
        self._unsaved_epochs: EpochHistory | None = None
        self._epochs_due = False
        config = LogConfig.of_topic(topic.config)
        self._log = PartitionLog.open(directory, config, self._schemas, start=start, fs=fs, indexes=indexes)
        last = self._log.last_header
        self.last_append_time_ms = last.append_time_ms if last else 0
        try:
            with self._disk():
                self._snapshots = ProducerSnapshots(directory, fs=fs)
                # A machine crash may have cut the log below some snapshots, and other batches may follow.
                self._snapshots.remove_above(self._log.log_end_offset)
                if self._log.log_start_offset > 0:
                    self._snapshots.read(self._log.log_start_offset)
        except Exception:
            self._log.close(clean=False)
            raise

    def configure(self, topic: Topic) -> None:
        if topic is not self._schemas.topic:
            self._schemas.topic = topic
            self._log.config = LogConfig.of_topic(topic.config)

    def state(self, *, high_watermark: int) -> RecoveredLog:
        """What the state machine starts from."""
        high_watermark = self._committed(high_watermark)
        return RecoveredLog(
            log_start_offset=self._log.log_start_offset,
            log_end_offset=self._log.log_end_offset,
            high_watermark=high_watermark,
            epochs=self._epochs(),
            producers=self.rebuild_producers(high_watermark),
            purge_offset=self._log.cleaned.purge_offset,
        )

    def _committed(self, high_watermark: int) -> int:
        """What is committed as far as the log itself shows: compaction touches nothing else.

        A high watermark within a gap would be one at which the log cannot be cut.
        """
        high_watermark = max(high_watermark, self._log.cleaned.committed_to)
        header = self._log.header_of(high_watermark)
        return header.next_offset if header is not None and header.attributes & ROW_OFFSETS else high_watermark

    def _epochs(self) -> EpochHistory:
        """The saved history, completed by the epochs that the batches themselves carry."""
        with self._disk("the epoch history"):
            saved = self._saved_epochs = EpochHistory.from_pairs(read_leader_epochs(self.directory, fs=self.fs))
        log_start = self._log.log_start_offset
        history = saved.start_at(log_start).truncate_to(self._log.log_end_offset)
        last = self._log.last_header
        if last is not None and last.leader_epoch != history.latest_epoch:  # It lacks the newest, or is an older one.
            history = self._agreed(history)
            known_to = history.entries[-1].start_offset if history.entries else log_start
            for header in self._log.headers(max(known_to, log_start)):
                if header.leader_epoch > history.latest_epoch:
                    history = history.assign(header.leader_epoch, header.base_offset)
        history = history.start_at(log_start)
        if history != saved:  # The batches that carry these epochs may be removed before the next epoch.
            self.save_epochs(history)
        return history

    def _agreed(self, history: EpochHistory) -> EpochHistory:
        """The part of the history that the batches agree with. No epoch begins at two offsets, or after two logs: where
        one epoch is right, all before it are.
        """
        log_start = self._log.log_start_offset
        while history.entries:
            newest = history.entries[-1]
            header = self._log.header_of(max(newest.start_offset, log_start))
            epoch = UNDEFINED_EPOCH if header is None else header.leader_epoch
            if epoch == newest.epoch or (epoch > newest.epoch and newest.start_offset < log_start):
                break
            history = history.truncate_to(newest.start_offset)
        return history

    def lost_schemas(self) -> dict[int, bytes]:
        """The schemas of stored batches that the topic lacks. Raises DamagedLogError or OSError."""
        segments, topic = self._log.view().by_schema(), self._schemas.topic
        return {id_: segment.schema_message() for id_, segment in segments.items() if not topic.knows_schema(id_)}

    @property
    def log_end_offset(self) -> int:
        return self._log.log_end_offset

    @property
    def max_timestamp_us(self) -> int:
        return self._log.max_timestamp_us

    @property
    def recovery_point(self) -> int:
        """Everything below it is synced."""
        return self._log.recovery_point

    @property
    def sealed_offset(self) -> int:
        """Where the active segment begins: what is before it is sealed. A log without a segment: its end."""
        bases = self._log.segment_base_offsets
        return bases[-1] if bases else self._log.log_end_offset

    @property
    def size_bytes(self) -> int:
        return self._log.size_bytes

    def should_roll(self, length: int, schema_id: int, append_time_ms: int) -> bool:
        return self._log.should_roll(length, schema_id, append_time_ms)

    @property
    def is_gone(self) -> bool:
        """Whether the directory was removed: open files would go on taking writes for ever. A disk that fails does not
        say so: what is read or written next has the error."""
        try:
            return not self.fs.is_directory(self.directory)
        except OSError:
            return False

    def check(self) -> None:
        """Raises DamagedLogError where the directory was removed."""
        if self.is_gone:
            raise DamagedLogError(f"{self.directory} was removed under the live broker")

    def append(self, frames: Sequence[Frame], producers: ProducerStates) -> None:
        """`producers` is the producers' state before these batches. Only the first batch may begin a segment.

        Raises StorageRefusedError (nothing was stored), KafkaStorageError (the log is offline) or DamagedLogError.
        """
        try:
            self._append(frames, producers)
        except KafkaStorageError:
            self.check()
            raise

    @property
    def cleaned(self) -> Cleaned:
        """How far the log has been compacted."""
        return self._log.cleaned

    def sealed_below(self, offset: int) -> tuple[Segment, ...]:
        """The sealed segments that end at `offset` or below it."""
        return self._log.sealed_below(offset)

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Whether these segments are still part of the log."""
        return self._log.holds(segments)

    @property
    def beginnings(self) -> int:
        """How often the log began anew since it was opened."""
        return self._log.beginnings

    def begin_pass(self) -> LogView:
        """The log as a pass of compaction is to work on. Raises StorageRefusedError."""
        self._log.begin_compaction()
        return self._log.view()

    def swap(self, swap: Swap) -> None:
        """Put a compacted segment in its place.

        Snapshots within it go first: they may name transactions as open whose markers are gone from it.
        """
        with self._disk():
            self._snapshots.remove_between(self._log.log_start_offset, swap.segments[-1].next_offset)
        self._log.swap(swap.segments, swap.compacted, swap.cleaned)

    def mark_cleaned(self, cleaned: Cleaned) -> None:
        """A pass has ended."""
        self._log.mark_cleaned(cleaned)

    def unended_at_log_start(self) -> list[int]:
        """Producers whose transaction began below the log start, and ends above it or not at all."""
        return [producer for producer, _ in self.producers_at(self._log.log_start_offset).transactions.ongoing()]

    def _append(self, frames: Sequence[Frame], producers: ProducerStates) -> None:
        invariant(len(by_segment(frames)) == 1, "a segment begins with an append")
        rolls = frames[0].header.first_of_segment
        log_end = self._log.log_end_offset
        follows = rolls and log_end > self._log.log_start_offset
        if self._epochs_due or follows:  # at a roll, so that opening the log reads no more than its last segment
            self._save_epochs()
        if follows:
            with self._disk():
                self._snapshots.write(log_end, producers)
        self._log.append_many(frames)
        self.last_append_time_ms = max(self.last_append_time_ms, frames[-1].header.append_time_ms)

    def read(self, offset: int, max_bytes: int, end_offset: int) -> list[Frame]:
        try:
            return self._log.read(offset, max_bytes=max_bytes, end_offset=end_offset)
        except KafkaStorageError:
            self.check()
            raise

    def locate(self, offset: int, max_bytes: int, end_offset: int) -> list[StoredRun]:
        try:
            return self._log.locate(offset, max_bytes=max_bytes, end_offset=end_offset)
        except KafkaStorageError:
            self.check()
            raise

    def headers(self, from_offset: int) -> Iterator[BatchHeader]:
        """Headers of all batches from the one that holds `from_offset` on."""
        return self._log.headers(from_offset)

    def header_for_timestamp(self, timestamp_us: int) -> BatchHeader | None:
        """Of the first batch that holds a record at or after the time, or did before retention or compaction."""
        found = self._log.offset_for_timestamp(timestamp_us)
        return None if found is None else found[1]

    def extent(self, start: int, end: int, max_bytes: int) -> tuple[int, int]:
        """Bytes stored from `start` to `end` (exclusive), and how far `max_bytes` of them reach."""
        return self._log.extent(start, end, max_bytes)

    def truncate_to(self, offset: int) -> None:
        """Cut to the beginning of the batch that holds `offset`."""
        with self._disk():
            self._snapshots.remove_above(offset)  # First: a snapshot that is left over would be used for later batches.
        self._log.truncate_to(offset)

    def flush(self) -> None:
        """Sync. Raises DamagedLogError when the directory was removed, because its files cannot be found again."""
        self.check()
        self._log.flush()
        self._log.save_recovery_point()
        self._save_epochs_if_there_is_room()

    def close(self, *, clean: bool) -> None:
        try:
            if clean:
                self._save_epochs_if_there_is_room()
        finally:
            self._log.close(clean=clean)

    def retention_start(self, bound: int, clock: RetentionClock) -> int:
        """Where the log would start if retention were applied now. It deletes nothing from `bound` on."""
        return self._log.retention_start(high_watermark=bound, clock=clock)

    def removable_to(self, offset: int) -> int:
        """The end of the segments that lie wholly below `offset`; the log start: there are none."""
        ends = [base for base in self._log.segment_base_offsets if base <= offset]
        return max([self._log.log_start_offset, *ends])

    def advance_log_start(self, offset: int) -> None:
        """Save the producers and epochs of the part to be removed, unless a roll has saved them. Then remove it."""
        if offset > self._log.log_start_offset:
            self._save_epochs_if_there_is_room()
            with self._disk():
                if self._snapshots.newest(offset, offset) is None:
                    self._write_snapshot(offset)
        with self._disk():
            self._log.advance_log_start(offset)  # Also where it is there: a file may have been kept.
            self._snapshots.remove_below(self._log.log_start_offset)

    def _write_snapshot(self, offset: int) -> None:
        """On a full disk it takes the room of later ones, which only spare a replay: the removal makes more room.

        Raises OSError.
        """
        producers = self.producers_at(offset)
        try:
            self._snapshots.write(offset, producers)
        except OSError as error:
            if not is_full(error) or not self._snapshots.remove_above(offset):
                raise
            self._snapshots.write(offset, producers)

    @property
    def is_unusable(self) -> bool:
        """Whether every later call is refused: the log must be closed, and opened anew."""
        return self._log.is_unusable

    def restart_at(
        self,
        log_start_offset: int,
        epochs: list[tuple[int, int]],
        producers: list[ProducerStateEntry],
        purge_offset: int = 0,
    ) -> None:
        """Drop everything and begin at the leader's log start, with the leader's epochs and producers from before it.

        A crash after any step leaves a log that can be opened: full, then empty at its old log start, then empty at the
        leader's log start.
        """
        began_at = self._log.log_start_offset
        with self._disk():
            self._snapshots.remove_above(began_at)
        # `truncate_to` would start the log where the batch with `began_at` begins, and there is no snapshot for that.
        self._log.truncate_fully_and_start_at(began_at)
        with self._disk():
            self._snapshots.write(log_start_offset, from_wire(producers))
            self._log.truncate_fully_and_start_at(log_start_offset, purge_offset=purge_offset)
            self._snapshots.remove_above(log_start_offset)
            self._snapshots.remove_below(log_start_offset)
        # Last: if a crash leaves the log empty before this, its old history shows that it diverges from the leader's.
        self.save_epochs(EpochHistory.from_pairs([(e, s) for e, s in epochs if s <= log_start_offset]))
        self._save_epochs_if_there_is_room()

    def save_epochs(self, history: EpochHistory) -> None:
        """The file is written with the next flush, so that an election waits for no sync. `_epochs` completes one that
        only lacks the newest epochs from the batches. A wrong one is replaced before the next append: until then, what
        is wrong in it begins at the log end or above it, or is another epoch than the batches there have.
        """
        self._unsaved_epochs = history
        self._epochs_due = not self._saved_epochs.only_lacks_the_newest_of(history, self._log.log_end_offset)

    def _save_epochs_if_there_is_room(self) -> None:
        try:
            self._save_epochs()
        except StorageRefusedError as error:
            logger.debug("saved later: %s", error.message)

    def _save_epochs(self) -> None:
        if self._unsaved_epochs is None:
            return
        try:
            write_leader_epochs(self.directory, self._unsaved_epochs.to_pairs(), fs=self.fs)
        except OSError as error:
            raise storage_error(error, f"the epoch history of {self.directory.name}") from error
        self._saved_epochs, self._unsaved_epochs, self._epochs_due = self._unsaved_epochs, None, False

    def rebuild_producers(self, high_watermark: int) -> ProducerStates:
        """The producers' state after the whole log.

        The replay begins with a snapshot at or below the high watermark. A later snapshot would not say where a
        transaction ended whose marker is not committed yet.
        """
        log = self._log
        newest = min(max(high_watermark, log.log_start_offset), log.log_end_offset)
        return self._replay(newest, log.log_end_offset)

    def producers_for(self, offset: int) -> list[ProducerStateEntry]:
        """The producers' state for a follower that begins at `offset`. The files may begin below it: a full disk keeps
        what was removed.
        """
        return _to_wire(self.producers_at(offset))

    def producers_at(self, offset: int) -> ProducerStates:
        """The producers' state after all batches below `offset`."""
        return self._replay(offset, offset)

    def _replay(self, newest: int, end_offset: int) -> ProducerStates:
        """Replay from the newest snapshot at or below `newest` up to `end_offset` (exclusive)."""
        log_start = self._log.log_start_offset
        with self._disk():
            snapshot = self._snapshots.newest(log_start, newest)
        if snapshot is None and log_start > 0:
            raise DamagedLogError(f"no producer snapshot for the log start {log_start}")
        start, states = snapshot or (0, ProducerStates())
        for header in self._log.headers(start) if start < end_offset else ():
            if header.base_offset >= end_offset:
                break
            if header.base_offset >= start:
                states.replay(batch_info(header))
        states.start_at(log_start)
        return states

    @contextmanager
    def _disk(self, what: str = "a producer snapshot") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, f"{what} of {self.directory.name}") from error


def _to_wire(states: ProducerStates) -> list[ProducerStateEntry]:
    return [
        ProducerStateEntry(
            producer_id,
            entry.producer_epoch,
            entry.last_append_ms,
            [(b.sequence, b.sequence, b.base_offset, b.last_offset) for b in entry.batches],
            states.transactions.first_offset(producer_id),
        )
        for producer_id, entry in states.entries()
    ]


def from_wire(entries: list[ProducerStateEntry]) -> ProducerStates:
    """The producers' state that a leader has sent."""
    ongoing = ((e.producer_id, e.transaction_start) for e in entries if e.transaction_start >= 0)
    states = (
        (
            e.producer_id,
            ProducerEntry(
                e.producer_epoch,
                tuple(StoredBatch(first, base, last) for first, _, base, last in e.batches),
                e.last_append_ms,
            ),
        )
        for e in entries
    )
    return ProducerStates(states, TransactionIndex(ongoing))
