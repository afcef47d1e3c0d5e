"""The log of one partition replica: its segments, in order, as one run of batches.

Threads: the caller holds the partition's lock for every write (append, truncate, retention, close). `read`, `headers`,
`offset_for_timestamp` and `flush` may run at the same time. Readers work on snapshots: the tuple of segments and the
entries of an index are replaced, never changed. A read checks its bytes against the CRCs of its snapshot. A cut
meanwhile can make the read fail, but never return wrong bytes. A failed read is repeated once, under the lock of cuts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from spark_broker.core.compaction import NEVER_CLEANED, Cleaned
from spark_broker.errors import (
    DamagedLogError,
    KafkaStorageError,
    OffsetOutOfRangeError,
    StorageRefusedError,
    invariant,
)
from spark_broker.protocol.crc32c import Buffer
from spark_broker.protocol.frame import NO_TIMESTAMP, BatchHeader, Frame
from spark_broker.storage.config import LogConfig
from spark_broker.storage.files import half_done_if_refused, storage_error
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.index import count_below, header_at
from spark_broker.storage.loaded_indexes import LoadedIndexes
from spark_broker.storage.log_failures import FailingLog
from spark_broker.storage.log_state import LogState, read_log_state, write_log_state
from spark_broker.storage.log_view import LogView, segment_of
from spark_broker.storage.next_batches import begins_segment, check_contiguous
from spark_broker.storage.recovery import SchemaOf, recover_segments
from spark_broker.storage.retention import RetentionClock, expired_segments
from spark_broker.storage.segment import Segment, by_segment, unlink_files
from spark_broker.storage.segment_swap import (
    CompactedSegment,
    begin_compaction,
    forget_cleaned,
    recover_cleaned,
    swap_segments,
    write_cleaned,
)
from spark_broker.storage.start_kind import StartKind
from spark_broker.storage.stored_run import StoredRun

T = TypeVar("T")

UNSAID_BYTES_MAX = 32 << 20
"""So many bytes may be synced without the file of the log's state saying so: a start after a kill writes them again."""


class PartitionLog(FailingLog):
    """An append-only log of batches. Offsets: `log_start_offset` inclusive, `log_end_offset` exclusive."""

    def __init__(
        self,
        fs: FileSystem,
        directory: Path,
        config: LogConfig,
        schemas: SchemaOf,
        segments: Sequence[Segment],
        state: LogState,
        indexes: LoadedIndexes,
    ) -> None:
        super().__init__(directory)
        self._fs = fs
        self.config = config
        """May be replaced while the log is open."""
        self._schemas = schemas
        self._log_start_offset = state.log_start_offset
        self._log_end_offset = segments[-1].next_offset if segments else state.log_start_offset
        is_spent = self._log_start_offset == self._log_end_offset
        self._segments = () if is_spent else tuple(segments)
        self._recovery_point = state.recovery_point
        self._saved_state = state
        self._directory_unsynced = False
        self._below_start = list(segments) if is_spent else []  # Out of the log; they have files yet.
        self._cut_lock = threading.RLock()
        self._indexes = indexes
        self._closed = False
        self.cleaned = NEVER_CLEANED
        """How far the log has been compacted."""

        self.beginnings = 0
        """How often all batches were removed since the log was opened."""

    @staticmethod
    def open(
        directory: Path,
        config: LogConfig,
        schemas: SchemaOf,
        *,
        start: StartKind,
        fs: FileSystem = LOCAL,
        indexes: LoadedIndexes | None = None,
    ) -> PartitionLog:
        """Recover the log of a partition's directory. An empty directory costs only a small read.

        `schemas` gives the schema message of a schema id; `indexes` is shared by logs with one bound.

        Raises DamagedLogError (quarantine the directory and fetch the replica again), StorageRefusedError (recovery had
        to write) or KafkaStorageError.
        """
        try:
            state = read_log_state(directory, start, fs=fs)
            segments = recover_segments(fs, directory, start, state, schemas)
            log = PartitionLog(fs, directory, config, schemas, segments, state, indexes or LoadedIndexes())
            log._check_against(state)
        except OSError as error:
            raise storage_error(error, f"cannot open the log in {directory}") from error
        # The process that made the last segment may have died before it synced the name.
        log._directory_unsynced = start is StartKind.PROCESS_CRASH
        if start is StartKind.MACHINE_CRASH and segments:
            log._recovery_point = log._log_end_offset  # Recovery has synced the whole log.
            with suppress(StorageRefusedError), log._failing("open"):
                log._save_state()  # On a full disk it is saved later: a lower recovery point is safe.
        return log

    def _check_against(self, state: LogState) -> None:
        with ExitStack() as undo:
            undo.callback(self.close, clean=False)
            if self._log_end_offset < max(state.log_start_offset, state.recovery_point):
                raise DamagedLogError(f"the log ends at {self._log_end_offset}; {state} was saved")
            found = recover_cleaned(self._fs, self.directory, state, is_empty=not self._segments)
            self.cleaned, self._saved_state = found
            undo.pop_all()

    @property
    def log_start_offset(self) -> int:
        return self._log_start_offset

    @property
    def log_end_offset(self) -> int:
        """The offset that the next batch gets."""
        return self._log_end_offset

    @property
    def recovery_point(self) -> int:
        """Everything below it is synced."""
        return self._recovery_point

    @property
    def max_timestamp_us(self) -> int:
        """The running maximum of record timestamps; -1 for an empty log."""
        segments = self._segments
        return segments[-1].max_timestamp_us if segments else NO_TIMESTAMP

    @property
    def last_header(self) -> BatchHeader | None:
        """The header of the last batch; None for an empty log."""
        segments = self._segments
        return segments[-1].last if segments else None

    @property
    def size_bytes(self) -> int:
        """Bytes of batches on disk, indexes not counted."""
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def segment_base_offsets(self) -> tuple[int, ...]:
        return tuple(segment.base_offset for segment in self._segments)

    def should_roll(self, length: int, schema_id: int, append_time_ms: int) -> bool:
        """Whether the leader's next batch, of `length` bytes, begins a segment (and gets FIRST_OF_SEGMENT)."""
        return begins_segment(self._segments, self.config, length, schema_id, append_time_ms)

    def append(self, header: BatchHeader, message: Buffer) -> None:
        """Append one batch at the log end. See `append_many`."""
        self.append_many((Frame(header, message),))

    def append_many(self, frames: Sequence[Frame]) -> None:
        """Append consecutive batches at the log end, unchanged. They are written when this returns.

        A batch with FIRST_OF_SEGMENT begins a segment. Raises StorageRefusedError: nothing is left of the batches that
        did not fit. After one by a limit of the process, and after KafkaStorageError, every later call is refused.
        """
        self._check_usable()
        self._check_contiguous(frames)
        for group in by_segment(frames):
            try:
                self._append_group(group)
            except (OSError, KafkaStorageError) as error:
                self._fail("append", error)
            self._log_end_offset = group[-1].header.next_offset
        if self._log_end_offset - self._recovery_point >= self.config.flush_messages:
            self.flush()

    def _append_group(self, group: Sequence[Frame]) -> None:
        header = group[0].header
        segments = self._segments
        if not segments or header.first_of_segment:
            self._roll(group)
            return
        active = segments[-1]
        if active.sealed:
            # The segments after this one were cut off. The new leader did not roll here, so this replica must not.
            active = active.reopened()
            self._segments = (*segments[:-1], active)
        invariant(header.schema_id == active.last.schema_id, "a batch of another schema begins a segment")
        active.append(group)

    def _roll(self, group: Sequence[Frame]) -> None:
        segments = self._segments
        if segments and not segments[-1].sealed:
            self._seal(segments[-1])
        elif segments:  # A full disk, or a crash, may have kept the state from being saved.
            self.flush()
            self._save_state()
        created = Segment.create(self._fs, self.directory, self._schemas(group[0].header.schema_id), group)
        self._directory_unsynced = True
        self._segments = (*segments, created)

    def _seal(self, segment: Segment) -> None:
        segment.write_end_of_stream()
        self._sync(segment)
        segment.seal()
        self._recovery_point = segment.next_offset
        self._save_state()

    def _check_contiguous(self, frames: Sequence[Frame]) -> None:
        # An empty log accepts a lower maximum: the leader may have begun there without the batches below the log start.
        latest_us = self.max_timestamp_us if self._log_end_offset > self._log_start_offset else NO_TIMESTAMP
        check_contiguous(frames, self._log_end_offset, latest_us, begins=not self._segments)

    def read(self, offset: int, *, max_bytes: int, end_offset: int) -> list[Frame]:
        """Whole batches from the one that contains `offset` on, all of them below `end_offset` (exclusive).

        The first batch may be larger than `max_bytes`; otherwise the batches have at most `max_bytes` in all. Messages
        are views of checked bytes (CRC). Raises OffsetOutOfRangeError, DamagedLogError or UnreadableLogError.
        """
        return self._consistently(lambda view: view.read(offset, max_bytes, end_offset))

    def locate(self, offset: int, *, max_bytes: int, end_offset: int) -> list[StoredRun]:
        """Where the batches that `read` would return lie. Only indexes are read. Raises as `read` does."""
        return self._consistently(lambda view: view.locate(offset, max_bytes, end_offset))

    def headers(self, from_offset: int = 0) -> Iterator[BatchHeader]:
        """A snapshot of the headers from the batch that contains `from_offset` on. Only indexes are read."""
        return iter(self._consistently(lambda view: view.headers(from_offset)))

    def header_of(self, offset: int) -> BatchHeader | None:
        """The header of the batch that contains the offset; None when no batch does."""
        return self._consistently(lambda view: view.header_of(offset))

    def extent(self, start: int, end: int, max_bytes: int) -> tuple[int, int]:
        """Bytes stored from `start` to `end` (exclusive), and the offset that the first `max_bytes` of them reach."""
        return self._consistently(lambda view: view.extent(start, end, max_bytes))

    def offset_for_timestamp(self, timestamp_us: int) -> tuple[int, BatchHeader] | None:
        """Base offset and header of the first batch whose running maximum reaches the timestamp; None if none does.

        After retention or compaction the maximum may come from a batch that is gone. The caller must search the rows
        from this batch on.
        """
        return self._consistently(lambda view: view.offset_for_timestamp(timestamp_us))

    def view(self) -> LogView:
        """The log as it is now, for a long read. It fails when the log is cut or compacted meanwhile."""
        # The end is taken first: a batch that is appended meanwhile is in the segments, and above the end.
        end = self._log_end_offset
        return LogView(self._segments, self._log_start_offset, end, self._indexes)

    def _consistently(self, read: Callable[[LogView], T]) -> T:
        self._check_usable()
        try:
            return read(self.view())
        except (DamagedLogError, FileNotFoundError):
            pass  # A cut or a deletion may have run meanwhile. None can while this thread holds `_cut_lock`.
        except OSError as error:
            raise storage_error(error, f"read in {self.directory}") from error
        with self._cut_lock:
            try:
                return read(self.view())
            except FileNotFoundError as error:
                raise DamagedLogError(f"a file of the log in {self.directory} is gone: {error}") from None
            except OSError as error:
                raise storage_error(error, f"read in {self.directory}") from error

    def truncate_to(self, offset: int) -> None:
        """Cut the log at `offset`, or before the batch that contains it. A log that ends there or earlier stays as is.

        The cut is synced: a crash of the machine does not bring back what was cut.
        """
        self._check_usable()
        if offset >= self._log_end_offset:
            return
        segments = self._segments
        if not segments or offset < segments[0].base_offset:
            self.truncate_fully_and_start_at(offset)
            return
        with self._cut_lock, self._failing("truncate"):
            self._remove_below_start()
            position = segment_of(segments, offset)
            entries = self._indexes.entries(segments[position])
            count = count_below(entries, offset)
            boundary = header_at(entries, count).base_offset
            # The saved state is lowered before the cut: later appends are not synced, and a log that ends below its
            # saved start (the start may be within the batch that is cut) would count as damaged.
            state = self._saved_state.at(min(self._log_start_offset, boundary), min(self._recovery_point, boundary))
            self._save(state)
            self._log_start_offset, self._recovery_point = state.log_start_offset, state.recovery_point
            self._drop_behind(position + bool(count))
            if count:
                self._segments = (*segments[:position], segments[position].cut(count))
                self._log_end_offset = boundary

    def _drop_behind(self, kept: int) -> None:
        """Remove what follows the first `kept` segments, durably. The log's first segment goes last, whatever a crash
        of the machine leaves of the others: a log that lacks the segment with its start is a damaged one.
        """
        while len(self._segments) > max(kept, 1):
            self._drop_last()
        self._fs.sync_directory(self.directory)
        if self._segments and not kept:
            self._drop_last()
            self._fs.sync_directory(self.directory)

    def _drop_last(self) -> None:
        *kept, last = self._segments
        self._segments = tuple(kept)
        self._log_end_offset = last.base_offset
        last.remove()

    def truncate_fully_and_start_at(self, offset: int, *, purge_offset: int = 0) -> None:
        """Remove all batches. The empty log then begins at `offset`. `purge_offset`: of the log that it will copy."""
        self._check_usable()
        with self._cut_lock:
            with self._failing("truncate"):
                self._remove_below_start()
                self._recovery_point = min(self._recovery_point, self._log_start_offset)
                self._save_state()
            with self._failing("restart"), half_done_if_refused():
                # Removals are synced before the state changes: no crash may bring old segments back after that.
                self._drop_behind(0)
                self._forget_cleaned()
                self.beginnings += 1
                self._log_start_offset = self._log_end_offset = self._recovery_point = offset
                self._save(LogState(offset, offset))
            if purge_offset:
                with self._failing("truncate"):
                    self._remember(Cleaned(purge_offset=purge_offset))

    def _forget_cleaned(self) -> None:
        if self.cleaned != NEVER_CLEANED:
            forget_cleaned(self._fs, self.directory)
            self.cleaned = NEVER_CLEANED

    def sealed_below(self, offset: int) -> tuple[Segment, ...]:
        """The sealed segments that end at `offset` or below it, without the last segment of the log."""
        segments = self._segments[:-1]
        count = sum(segment.sealed and segment.next_offset <= offset for segment in segments)
        return segments[:count]

    def begin_compaction(self) -> None:
        """Call this before files are written for `swap`. Raises StorageRefusedError."""
        self._check_usable()
        with self._failing("compact"):
            begin_compaction(self._fs, self.directory)

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Whether these segments, one after the other, are still part of the log."""
        present = self._segments
        first = present.index(segments[0]) if segments[0] in present else len(present)
        return present[first : first + len(segments)] == tuple(segments)

    def swap(self, replaced: Sequence[Segment], compacted: CompactedSegment, cleaned: Cleaned) -> None:
        """Put a compacted segment in the place of these, which the log `holds`, and remember `cleaned`.

        A crash leaves the old segments or the new one. Raises StorageRefusedError (nothing has changed) or
        KafkaStorageError.
        """
        self._check_usable()
        invariant(self.holds(replaced), "segments that are not in the log are replaced")
        with self._cut_lock, self._failing("compact"):
            # First: who reads the new segment must know what it may lack.
            self._remember(cleaned, [segment.base_offset for segment in replaced])
            segment = swap_segments(self._fs, self.directory, compacted)
            segments = self._segments
            first = segments.index(replaced[0])
            self._segments = (*segments[:first], segment, *segments[first + len(replaced) :])

    def mark_cleaned(self, cleaned: Cleaned) -> None:
        """Remember how far the log is compacted. Raises StorageRefusedError or KafkaStorageError."""
        self._check_usable()
        with self._failing("compact"):
            self._remember(cleaned)

    def _remember(self, cleaned: Cleaned, swap: Sequence[int] = ()) -> None:
        """The file is written first: after a crash in between, its state must not know more than is there."""
        write_cleaned(self._fs, self.directory, cleaned, swap)
        self.cleaned = cleaned
        with half_done_if_refused():
            self._save(self._saved_state.knowing(cleaned))

    def advance_log_start(self, offset: int) -> list[int]:
        """Raise the log start, and delete the segments wholly below it. Returns their base offsets.

        Raises OffsetOutOfRangeError if `offset` is past the log end. After StorageRefusedError, what is not deleted is
        out of the log, and each later call tries it again, also one with the same offset.
        """
        self._check_usable()
        if offset > self._log_end_offset:
            raise OffsetOutOfRangeError(f"log start {offset}; the log ends at {self._log_end_offset}")
        if offset <= self._log_start_offset and not self._below_start:
            return []
        with self._cut_lock, self._failing("delete"):
            if offset > self._log_start_offset:
                self._save(self._saved_state.at(offset, self._recovery_point))
                self._log_start_offset = offset
                count = sum(segment.next_offset <= offset for segment in self._segments)
                self._below_start += self._segments[:count]
                self._segments = self._segments[count:]
            return self._remove_below_start()

    def _remove_below_start(self) -> list[int]:
        removed: list[int] = []
        while self._below_start:
            self._below_start[0].close()
            unlink_files(self._fs, self.directory, self._below_start[0].base_offset)
            removed.append(self._below_start.pop(0).base_offset)
        if removed:
            self._fs.sync_directory(self.directory)
        return removed

    def retention_start(self, *, high_watermark: int, clock: RetentionClock) -> int:
        """Where the log would start if retention.ms (append time) and retention.bytes were applied now.

        Only segments wholly below the high watermark would be deleted.
        """
        segments = self._segments
        count = expired_segments(segments, self.config, high_watermark=high_watermark, clock=clock)
        return max(segments[count - 1].next_offset, self._log_start_offset) if count else self._log_start_offset

    def flush(self) -> None:
        """Sync what is not synced and move the recovery point. May run beside appends.

        Raises KafkaStorageError when fsync fails. The fsync is never repeated (the page cache may have dropped the
        data), and the log refuses every later call.
        """
        self._check_usable()
        with self._cut_lock:
            segments = self._segments
            if segments and segments[-1].next_offset > self._recovery_point:
                end = segments[-1].next_offset
                self._sync(segments[-1])
                self._recovery_point = max(self._recovery_point, end)

    def save_recovery_point(self) -> None:
        """Save how far the log is synced, where that spares the next start much. Not beside appends.

        Raises KafkaStorageError. On a full disk it is saved later: a lower recovery point is safe.
        """
        self._check_usable()
        said = max(self._saved_state.recovery_point, self._log_start_offset)
        if said < self._recovery_point and self.extent(said, self._recovery_point, 0)[0] > UNSAID_BYTES_MAX:
            with suppress(StorageRefusedError), self._failing("flush"):
                self._save_state()

    def close(self, *, clean: bool) -> None:
        """Close the files. `clean`: sync everything first, so that the next start may be CLEAN."""
        if self._closed:
            return
        self._closed = True
        try:
            if clean:
                self.flush()
                with suppress(StorageRefusedError), self._failing("close"):
                    self._save_state()  # As in `open`: what is synced is synced, whether the file says so or not.
        finally:
            with self._cut_lock:
                for segment in (*self._segments, *self._below_start):
                    segment.close()
                self._unusable = self._unusable or KafkaStorageError(f"the log in {self.directory} is closed")

    def _sync(self, segment: Segment) -> None:
        try:
            segment.sync()
            # The flag is cleared before the sync: a segment that is created meanwhile sets it again.
            unsynced, self._directory_unsynced = self._directory_unsynced, False
            if unsynced:
                self._fs.sync_directory(self.directory)
        except OSError as error:
            self._unusable = storage_error(error, f"fsync failed in {self.directory}")
            raise self._unusable from error

    def _save_state(self) -> None:
        self._save(self._saved_state.at(self._log_start_offset, self._recovery_point))

    def _save(self, state: LogState) -> None:
        if state != self._saved_state:
            write_log_state(self.directory, state, fs=self._fs)
            self._saved_state = state
