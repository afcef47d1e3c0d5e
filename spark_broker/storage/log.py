"""The log of one partition replica: its segments, in order, as one run of batches.

Threads: the caller holds the partition's lock for everything that writes (append, truncate, retention, close); `read`,
`headers`, `offset_for_timestamp` and `flush` may run beside it. Readers work on snapshots: the tuple of segments and
the entries of an index are replaced, never changed. A read checks the CRCs of what it got against its snapshot, so a
cut in between can only make it fail, never give wrong bytes; it is then tried once more under the lock that cuts hold.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from spark_broker.errors import (
    DamagedLogError,
    KafkaStorageError,
    OffsetOutOfRangeError,
    SparkBrokerError,
    StorageFullError,
    invariant,
)
from spark_broker.protocol.crc32c import Buffer
from spark_broker.protocol.frame import ENTRY_BYTES, NO_TIMESTAMP, BatchHeader, Frame
from spark_broker.storage.config import LogConfig
from spark_broker.storage.extent import extent
from spark_broker.storage.files import is_full
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.index import (
    Entries,
    count_below,
    count_within,
    end_position,
    find_timestamp,
    header_at,
    headers_of,
)
from spark_broker.storage.log_state import LogState, read_log_state, write_log_state
from spark_broker.storage.recovery import SchemaOf, recover_segments
from spark_broker.storage.retention import RetentionClock, expired_segments
from spark_broker.storage.segment import Segment
from spark_broker.storage.start_kind import StartKind
from spark_broker.storage.stored_run import StoredRun

MAX_LOADED_INDEXES = 4
"""Indexes of sealed segments kept in memory, of one log."""

T = TypeVar("T")


class PartitionLog:
    """An append-only log of batches. Offsets: `log_start_offset` inclusive, `log_end_offset` exclusive."""

    def __init__(
        self,
        fs: FileSystem,
        directory: Path,
        config: LogConfig,
        schemas: SchemaOf,
        segments: Sequence[Segment],
        state: LogState,
    ) -> None:
        self._fs = fs
        self.directory = directory
        self.config = config
        """May be replaced while the log is open."""
        self._schemas = schemas
        self._segments = tuple(segments)
        self._log_start_offset = state.log_start_offset
        self._log_end_offset = segments[-1].next_offset if segments else state.log_start_offset
        self._recovery_point = state.recovery_point
        self._saved_state = state
        self._directory_unsynced = False
        self._cut_lock = threading.RLock()
        self._loaded_lock = threading.Lock()
        self._loaded: list[Segment] = []
        self._unusable: SparkBrokerError | None = None
        self._closed = False

    @staticmethod
    def open(
        directory: Path, config: LogConfig, schemas: SchemaOf, *, start: StartKind, fs: FileSystem = LOCAL
    ) -> PartitionLog:
        """Recover the log of a partition's directory; nothing but a small read when it is empty.

        `schemas` gives the schema message of a schema id. Raises DamagedLogError (set the directory aside and fetch the
        replica again), StorageFullError (recovery had to write) or KafkaStorageError.
        """
        try:
            state = read_log_state(directory, start, fs=fs)
            segments = recover_segments(fs, directory, start, state, schemas)
        except OSError as error:
            kind = StorageFullError if is_full(error) else KafkaStorageError
            raise kind(f"cannot open the log in {directory}: {error}") from error
        log = PartitionLog(fs, directory, config, schemas, segments, state)
        # The process that made the last segment may have died before it synced the name.
        log._directory_unsynced = start is StartKind.PROCESS_CRASH
        if log._log_end_offset < max(state.log_start_offset, state.recovery_point):
            log.close(clean=False)
            raise DamagedLogError(f"the log ends at {log._log_end_offset}; {state} was saved")
        if start is StartKind.MACHINE_CRASH and segments:
            log._recovery_point = log._log_end_offset  # Recovery has synced it.
            with suppress(StorageFullError), log._failing("open"):
                log._save_state()  # It is saved later, when there is room: a lower point on the disk is safe.
        return log

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
        """Whether the leader's next batch, of `length` bytes, begins a segment (it then sets FIRST_OF_SEGMENT)."""
        segments = self._segments
        if not segments or segments[-1].sealed:
            return True
        active = segments[-1]
        return (
            active.size_bytes + length > self.config.segment_bytes
            or active.index_bytes + ENTRY_BYTES > self.config.segment_index_bytes
            or schema_id != active.last.schema_id
            or append_time_ms - active.first.append_time_ms >= self.config.segment_ms
        )

    def append(self, header: BatchHeader, message: Buffer) -> None:
        """Append one batch at the log end. See `append_many`."""
        self.append_many((Frame(header, message),))

    def append_many(self, frames: Sequence[Frame]) -> None:
        """Append consecutive batches from the log end on, as they are; when this returns, they are written.

        A batch that is FIRST_OF_SEGMENT begins one. Raises StorageFullError (the batches that did not fit are gone
        without a trace, the log goes on) or KafkaStorageError (the log refuses everything from then on).
        """
        self._check_usable()
        self._check_contiguous(frames)
        for group in _by_segment(frames):
            with self._failing("append"):
                self._append_group(group)
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
            # The batches after the mark were cut off. The new leader did not roll here, so this replica must not.
            active = active.reopened()
            self._segments = (*segments[:-1], active)
        invariant(header.schema_id == active.last.schema_id, "a batch of another schema begins a segment")
        active.append(group)

    def _roll(self, group: Sequence[Frame]) -> None:
        segments = self._segments
        if segments and not segments[-1].sealed:
            self._seal(segments[-1])
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
        expected = self._log_end_offset
        # An empty log may be given less than what lies below its start: the leader was empty there, too.
        latest_us = self.max_timestamp_us if expected > self._log_start_offset else NO_TIMESTAMP
        for number, (header, message) in enumerate(frames):
            # A replica that starts at the leader's log start may get the batch that this offset lies within.
            first = number == 0 and not self._segments and header.base_offset <= expected < header.next_offset
            follows = first or header.base_offset == expected
            invariant(follows, "a batch at %d in a log that ends at %d", header.base_offset, expected)
            invariant(header.length == len(message), "a header's length is its message's")
            invariant(header.max_timestamp_us >= latest_us, "the maximum timestamp of a partition never falls")
            expected, latest_us = header.next_offset, header.max_timestamp_us

    def read(self, offset: int, *, max_bytes: int, end_offset: int) -> list[Frame]:
        """Whole batches from the one that contains `offset` on, all of them below `end_offset` (exclusive).

        At least one batch, however large, if there is one; otherwise at most `max_bytes`. Messages are views of what
        was read, their CRCs checked. Raises OffsetOutOfRangeError, DamagedLogError or KafkaStorageError.
        """
        return self._consistently(lambda: self._read(offset, max_bytes, end_offset))

    def locate(self, offset: int, *, max_bytes: int, end_offset: int) -> list[StoredRun]:
        """Where the batches lie that `read` would return, from the indexes alone. Raises as `read` does."""
        return self._consistently(
            lambda: [
                segment.locate(entries, start, stop)
                for segment, entries, start, stop in self._runs(offset, max_bytes, end_offset)
            ]
        )

    def _read(self, offset: int, max_bytes: int, end_offset: int) -> list[Frame]:
        frames: list[Frame] = []
        for segment, entries, start, stop in self._runs(offset, max_bytes, end_offset):
            frames += segment.read(entries, start, stop)
        return frames

    def _runs(self, offset: int, max_bytes: int, end_offset: int) -> Iterator[tuple[Segment, Entries, int, int]]:
        """Segments with their entries: the batches from one entry up to another (exclusive)."""
        log_end_offset = self._log_end_offset
        if not self._log_start_offset <= offset <= log_end_offset:
            raise OffsetOutOfRangeError(f"offset {offset}; the log has {self._log_start_offset} to {log_end_offset}")
        limit = min(end_offset, log_end_offset)
        segments = self._segments
        first = True
        for segment in segments[max(0, _segment_of(segments, offset)) :]:
            if offset >= limit or (not first and max_bytes <= 0):
                break
            entries = self._entries(segment)
            start = count_below(entries, offset)
            if start == len(entries):
                break  # It was cut off since the log end was read.
            fitting = max(count_within(entries, start, max_bytes), start + 1 if first else start)
            stop = min(fitting, count_below(entries, limit))
            if stop <= start:
                break
            yield segment, entries, start, stop
            first = False
            max_bytes -= end_position(entries, stop - 1) - int(entries["position"][start])
            offset = header_at(entries, stop - 1).next_offset
            if stop < len(entries):
                break

    def headers(self, from_offset: int = 0) -> Iterator[BatchHeader]:
        """Headers of all batches from the one that contains `from_offset` on, from the indexes alone: a snapshot."""
        return iter(self._consistently(lambda: self._headers(from_offset)))

    def _headers(self, from_offset: int) -> list[BatchHeader]:
        segments = self._segments
        headers: list[BatchHeader] = []
        for segment in segments[max(0, _segment_of(segments, from_offset)) :]:
            entries = self._entries(segment)
            headers += headers_of(entries[count_below(entries, from_offset) :])
        return headers

    def extent(self, start: int, end: int, max_bytes: int) -> tuple[int, int]:
        """Bytes stored from `start` to `end` (exclusive), and how far `max_bytes` of them reach."""
        return self._consistently(lambda: extent(self._segments, self._entries, start, end, max_bytes))

    def offset_for_timestamp(self, timestamp_us: int) -> tuple[int, BatchHeader] | None:
        """Base offset and header of the first batch whose running maximum reaches the timestamp; None if none does.

        After retention the maximum may come from a deleted batch: the caller looks at the rows, and on from there.
        """
        return self._consistently(lambda: self._offset_for_timestamp(timestamp_us))

    def _offset_for_timestamp(self, timestamp_us: int) -> tuple[int, BatchHeader] | None:
        segments, log_start_offset = self._segments, self._log_start_offset
        first = max(_segment_of(segments, log_start_offset), 0)  # The maximum may have been higher before it.
        position = bisect_left(segments, timestamp_us, lo=first, key=lambda segment: segment.max_timestamp_us)
        if position >= len(segments):
            return None
        entries = self._entries(segments[position])
        entry = max(find_timestamp(entries, timestamp_us), count_below(entries, log_start_offset))
        if entry >= len(entries):
            return None
        header = header_at(entries, entry)
        return header.base_offset, header

    def _entries(self, segment: Segment) -> Entries:
        if segment.sealed and not segment.loaded:
            with self._loaded_lock:
                self._loaded.append(segment)
                if len(self._loaded) > MAX_LOADED_INDEXES:
                    self._loaded.pop(0).unload()
        return segment.entries()

    def _consistently(self, read: Callable[[], T]) -> T:
        self._check_usable()
        try:
            return read()
        except (DamagedLogError, FileNotFoundError):
            pass  # A cut or a deletion may have come in between. None can while this thread holds the lock.
        except OSError as error:
            self._fail("read", error)
        with self._cut_lock:
            try:
                return read()
            except FileNotFoundError as error:
                raise DamagedLogError(f"a file of the log in {self.directory} is gone: {error}") from None
            except OSError as error:
                self._fail("read", error)

    def truncate_to(self, offset: int) -> None:
        """Make `offset` the log end; a batch that contains it goes entirely. Nothing when the log ends there or before.

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
            position = _segment_of(segments, offset)
            entries = self._entries(segments[position])
            count = count_below(entries, offset)
            boundary = header_at(entries, count).base_offset
            # The saved state goes back before anything else does: what is appended next is not synced, and a log that
            # ends before its start (the cut is in the batch that holds it) would pass for damage.
            state = LogState(min(self._log_start_offset, boundary), min(self._recovery_point, boundary))
            self._save(state)
            self._log_start_offset, self._recovery_point = state.log_start_offset, state.recovery_point
            for _ in segments[position + bool(count) :]:
                self._drop_last()
            if count:
                self._segments = (*segments[:position], segments[position].cut(count))
                self._log_end_offset = boundary
            self._fs.sync_directory(self.directory)

    def _drop_last(self) -> None:
        *kept, last = self._segments
        self._segments = tuple(kept)
        self._log_end_offset = last.base_offset
        last.remove()

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Drop everything; the log is empty and begins at `offset`."""
        self._check_usable()
        with self._cut_lock:
            with self._failing("truncate"):
                state = LogState(self._log_start_offset, min(self._recovery_point, self._log_start_offset))
                self._save(state)
                self._recovery_point = state.recovery_point
            with self._failing("restart"):
                while self._segments:
                    self._drop_last()
                # This comes before the state changes: segments that a crash brings back must still be recognised.
                self._fs.sync_directory(self.directory)
                self._log_start_offset = self._log_end_offset = self._recovery_point = offset
                self._save_state()

    def advance_log_start(self, offset: int) -> list[int]:
        """Raise the log start; delete segments wholly below it, but never the last. Returns their base offsets.

        Raises OffsetOutOfRangeError past the log end; an offset at or below the log start changes nothing.
        """
        self._check_usable()
        if offset > self._log_end_offset:
            raise OffsetOutOfRangeError(f"log start {offset}; the log ends at {self._log_end_offset}")
        if offset <= self._log_start_offset:
            return []
        with self._cut_lock, self._failing("delete"):
            self._save(LogState(offset, self._recovery_point))
            self._log_start_offset = offset
            segments = self._segments
            count = sum(segment.next_offset <= offset for segment in segments[:-1])
            self._segments = segments[count:]
            for segment in segments[:count]:
                segment.remove()
            if count:
                self._fs.sync_directory(self.directory)
            return [segment.base_offset for segment in segments[:count]]

    def retention_start(self, *, high_watermark: int, clock: RetentionClock) -> int:
        """Where the log would start if retention.ms (append time) and retention.bytes were applied now.

        Only segments wholly below the high watermark would go, and never the last.
        """
        segments = self._segments
        count = expired_segments(segments, self.config, high_watermark=high_watermark, clock=clock)
        return max(segments[count].base_offset, self._log_start_offset) if count else self._log_start_offset

    def apply_retention(self, *, high_watermark: int, clock: RetentionClock) -> int:
        """Delete what retention does not keep. Returns the log start offset."""
        self.advance_log_start(self.retention_start(high_watermark=high_watermark, clock=clock))
        return self._log_start_offset

    def flush(self) -> None:
        """Sync what is not synced and move the recovery point. May run beside appends.

        Raises KafkaStorageError when fsync fails; it is never tried again (the page cache may have dropped the data),
        and the log refuses everything from then on.
        """
        self._check_usable()
        with self._cut_lock:
            segments = self._segments
            if segments and segments[-1].next_offset > self._recovery_point:
                end = segments[-1].next_offset
                self._sync(segments[-1])
                self._recovery_point = max(self._recovery_point, end)

    def close(self, *, clean: bool) -> None:
        """Close the files. `clean`: sync everything first, so that the next start may be CLEAN."""
        if self._closed:
            return
        self._closed = True
        try:
            if clean:
                self.flush()
                with self._failing("close"):
                    self._save_state()
        finally:
            with self._cut_lock:
                for segment in self._segments:
                    segment.close()
                self._unusable = self._unusable or KafkaStorageError(f"the log in {self.directory} is closed")

    def _sync(self, segment: Segment) -> None:
        try:
            segment.sync()
            # Cleared before the sync: a segment that is made meanwhile sets it again.
            unsynced, self._directory_unsynced = self._directory_unsynced, False
            if unsynced:
                self._fs.sync_directory(self.directory)
        except OSError as error:
            self._unusable = KafkaStorageError(f"fsync failed in {self.directory}: {error}")
            raise self._unusable from error

    def _save_state(self) -> None:
        self._save(LogState(self._log_start_offset, self._recovery_point))

    def _save(self, state: LogState) -> None:
        if state != self._saved_state:
            write_log_state(self.directory, state, fs=self._fs)
            self._saved_state = state

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise type(self._unusable)(self._unusable.message)

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fail(action, error)
        except KafkaStorageError as error:
            self._unusable = error
            raise

    def _fail(self, action: str, error: OSError) -> NoReturn:
        """A full disk refuses one action, which has changed nothing; any other error of the disk ends the log's use."""
        message = f"{action} in {self.directory}: {error}"
        if is_full(error) and action != "restart":
            raise StorageFullError(message) from error
        self._unusable = KafkaStorageError(message)
        raise self._unusable from error


def _by_segment(frames: Sequence[Frame]) -> Iterator[Sequence[Frame]]:
    """Runs of frames that go into one segment."""
    start = 0
    for position, frame in enumerate(frames):
        if position > start and frame.header.first_of_segment:
            yield frames[start:position]
            start = position
    if frames:
        yield frames[start:]


def _segment_of(segments: Sequence[Segment], offset: int) -> int:
    """Index of the segment that contains the offset, if one does; -1 when it lies before them all."""
    return bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1
