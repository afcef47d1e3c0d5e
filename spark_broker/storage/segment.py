"""One segment: an Arrow IPC stream (`.arrow`) and its dense index (`.index`).

The files of the active segment are open for reads and writes. A sealed segment ends in Arrow's end-of-stream mark and
is immutable. It is never cut in place, because other processes may map it: a page that is cut off under a map causes
SIGBUS. Its files are replaced instead. Every segment has at least one batch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from spark_broker.errors import CorruptMessageError, DamagedLogError, KafkaStorageError, invariant
from spark_broker.protocol.crc32c import Buffer
from spark_broker.protocol.frame import ENTRY_BYTES, BatchHeader, Frame, verified_frames
from spark_broker.protocol.ipc_message import END_OF_STREAM
from spark_broker.protocol.schema_ids import is_schema
from spark_broker.storage.files import (
    TEMPORARY_SUFFIX,
    SharedFile,
    copy_prefix,
    half_done_if_refused,
    is_refusal,
    opened,
    read_fully,
    read_range,
    read_whole,
    reading,
    storage_error,
    write_fully,
)
from spark_broker.storage.filesystem import FileSystem
from spark_broker.storage.index import (
    INDEX_BYTES_MAX,
    Entries,
    EntryIndex,
    check_chain,
    end_position,
    header_at,
    headers_of,
    pack_entries,
    unpack_entry_checked,
)
from spark_broker.storage.stored_run import StoredRun

ARROW_SUFFIX = ".arrow"
INDEX_SUFFIX = ".index"
DELETED_SUFFIX = ".deleted"


PREFIX_BYTES = 8
"""What an Arrow message begins with: a mark, and how many bytes of metadata follow."""


def read_schema_message(fs: FileSystem, fd: int, size: int) -> bytes:
    """The first message of an `.arrow` file that has `size` bytes; empty where it is not whole."""
    prefix = read_fully(fs, fd, PREFIX_BYTES, 0)
    length = PREFIX_BYTES + int.from_bytes(prefix[4:8], "little")
    return read_fully(fs, fd, length, 0) if len(prefix) == PREFIX_BYTES and length <= size else b""


def segment_paths(directory: Path, base_offset: int) -> tuple[Path, Path]:
    """The `.arrow` and the `.index` file of a segment."""
    stem = f"{base_offset:020d}"
    return directory / (stem + ARROW_SUFFIX), directory / (stem + INDEX_SUFFIX)


def by_segment(frames: Sequence[Frame]) -> Sequence[Sequence[Frame]]:
    """The batches in runs, each within one segment."""
    if len(frames) <= 1:
        return (frames,) if frames else ()
    starts = [at for at, frame in enumerate(frames) if at == 0 or frame.header.first_of_segment]
    return [frames[start:end] for start, end in zip(starts, [*starts[1:], len(frames)], strict=True)]


def remove_files(fs: FileSystem, directory: Path, base_offset: int) -> None:
    """Delete those of a segment's files that exist. Raises OSError; where it is refused, HalfDoneError.

    The `.arrow` file is renamed before any file is deleted. Recovery can then tell half a deletion from a lost file.
    """
    arrow_path, index_path = segment_paths(directory, base_offset)
    deleted = arrow_path.with_name(arrow_path.name + DELETED_SUFFIX)
    with half_done_if_refused():
        with contextlib.suppress(FileNotFoundError):
            fs.rename(arrow_path, deleted)
        for path in (index_path, deleted):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(path)


def unlink_files(fs: FileSystem, directory: Path, base_offset: int) -> None:
    """Delete those files that exist of a segment below the log start. Raises OSError.

    Recovery deletes the rest, so that no file needs another name: a full disk may have no room for one.
    """
    for path in segment_paths(directory, base_offset):
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)


class Segment:
    """A run of batches in one pair of files. One writer; `entries` and `read` may be called from any thread."""

    def __init__(
        self,
        fs: FileSystem,
        directory: Path,
        first: BatchHeader,
        last: BatchHeader,
        end: int,
        *,
        index: EntryIndex | None,
        sealed: bool,
    ) -> None:
        self.fs = fs
        self.directory = directory
        self.base_offset = first.base_offset
        self.arrow_path, self.index_path = segment_paths(directory, first.base_offset)
        self.first = first
        self.last = last
        self.end = end  # Bytes of the `.arrow` file up to the last batch, without the end-of-stream mark.
        self.sealed = sealed
        self._index = index
        self._arrow_file: SharedFile | None = None
        self._index_file: SharedFile | None = None
        if not sealed:
            invariant(index is not None, "an active segment has its index in memory")
            self._arrow_file = SharedFile(fs, self.arrow_path, os.O_RDWR)
            try:
                self._index_file = SharedFile(fs, self.index_path, os.O_RDWR)
            except OSError:
                self.close()
                raise

    @classmethod
    def create(cls, fs: FileSystem, directory: Path, schema_message: bytes, frames: Sequence[Frame]) -> Segment:
        """A new active segment with these first batches. Raises OSError, and then leaves no file behind: HalfDoneError
        where it does.
        """
        headers = [frame.header for frame in frames]
        paths = segment_paths(directory, headers[0].base_offset)
        packed = pack_entries(headers, len(schema_message))
        contents: tuple[list[Buffer], list[Buffer]] = ([schema_message, *(f.message for f in frames)], [packed])
        made = 0
        try:
            for path in paths:
                fs.close(fs.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
                made += 1
            for path, parts in zip(paths, contents, strict=True):
                with opened(fs, path, os.O_WRONLY) as fd:
                    write_fully(fs, fd, parts, 0)
            index = EntryIndex.empty()
            index.extend(packed)
            return cls(fs, directory, headers[0], headers[-1], end_position(index.entries), index=index, sealed=False)
        except OSError:
            if made:
                remove_files(fs, directory, headers[0].base_offset)
                fs.sync_directory(directory)  # See `_take_back`.
            raise

    @classmethod
    def from_index(cls, fs: FileSystem, directory: Path, index: EntryIndex, *, sealed: bool) -> Segment:
        """A segment whose files exist and agree with the index."""
        headers = headers_of(index.entries[[0, -1]])
        return cls(fs, directory, headers[0], headers[1], end_position(index.entries), index=index, sealed=sealed)

    @classmethod
    def open_sealed(cls, fs: FileSystem, directory: Path, base_offset: int) -> Segment:
        """Open a sealed segment by its first and last entries. The index is loaded on use. Raises DamagedLogError."""
        outer = _outer_entries(fs, segment_paths(directory, base_offset)[1])
        first, last = (unpack_entry_checked(outer, at, base_offset) for at in (0, ENTRY_BYTES))
        if first.base_offset != base_offset:
            raise DamagedLogError(f"segment {base_offset} begins with offset {first.base_offset}")
        end = end_position(EntryIndex.from_bytes(outer).entries)
        return cls(fs, directory, first, last, end, index=None, sealed=True)

    @property
    def next_offset(self) -> int:
        """The offset after the last batch."""
        return self.last.next_offset

    @property
    def max_timestamp_us(self) -> int:
        """The partition's running maximum at the segment's end."""
        return self.last.max_timestamp_us

    @property
    def size_bytes(self) -> int:
        """Bytes of the `.arrow` file, without an end-of-stream mark."""
        return self.end

    @property
    def index_bytes(self) -> int:
        """Bytes of the index while it is in memory, else 0."""
        return 0 if self._index is None else len(self._index) * ENTRY_BYTES

    @property
    def loaded(self) -> bool:
        return self._index is not None

    def entries(self) -> Entries:
        """A snapshot of the index. Raises FileNotFoundError when the segment has been deleted, DamagedLogError."""
        index = self._index
        if index is None:
            index = self._index = self._load_index()
        return index.entries

    def _load_index(self) -> EntryIndex:
        """Load and check the whole index of a sealed segment: entries are served without reading their batches."""
        data = read_whole(self.fs, self.index_path, INDEX_BYTES_MAX)
        if not data or len(data) % ENTRY_BYTES:
            raise DamagedLogError(f"{self.index_path.name} has {len(data)} bytes")
        index = EntryIndex.from_bytes(data)
        check_chain(index.entries, self.base_offset)
        if header_at(index.entries, -1) != self.last or end_position(index.entries) != self.end:
            raise DamagedLogError(f"{self.index_path.name} does not end as it did when the segment was opened")
        return index

    def unload(self) -> None:
        """Forget the index of a sealed segment."""
        if self.sealed:
            self._index = None

    def schema_message(self) -> bytes:
        """The IPC message of the schema, with which the file begins. Raises DamagedLogError where it is none."""
        message = reading(self.arrow_path, self._read_schema_message)
        if not is_schema(message):
            raise DamagedLogError(f"{self.arrow_path.name} does not begin with a schema")
        return message

    def _read_schema_message(self) -> bytes:
        with opened(self.fs, self.arrow_path, os.O_RDONLY) as fd:
            return read_schema_message(self.fs, fd, self.end)

    def read(self, entries: Entries, start: int, stop: int) -> list[Frame]:
        """Batches `start` up to `stop` of the snapshot, in one read, CRCs checked.

        Raises DamagedLogError when the bytes are not the batches', FileNotFoundError when the segment has been deleted,
        and ReadError.
        """
        return self.read_run(entries, start, stop)[0]

    def read_run(self, entries: Entries, start: int, stop: int) -> tuple[list[Frame], bytes]:
        """What `read` returns, and the messages in one piece."""
        position = int(entries["position"][start])
        length = end_position(entries, stop - 1) - position
        data = self._pread(length, position)
        if len(data) != length:
            raise DamagedLogError(f"{self.arrow_path.name} ends before byte {position + length}")
        try:
            return verified_frames(headers_of(entries[start:stop]), data), data
        except CorruptMessageError as error:
            raise DamagedLogError(f"{self.arrow_path.name}: {error.message}") from None

    def locate(self, entries: Entries, start: int, stop: int) -> StoredRun:
        """Where batches `start` up to `stop` of the snapshot lie. Raises FileNotFoundError as `read` does."""
        file_id = reading(self.arrow_path, lambda: self.fs.file_id(self.arrow_path))
        return StoredRun(self.arrow_path, file_id, int(entries["position"][start]), headers_of(entries[start:stop]))

    def _pread(self, length: int, position: int) -> bytes:
        file = self._arrow_file  # Read once: the writer sets it to None when it seals the segment.
        if file is not None:
            with file.pinned() as fd:
                if fd is not None:
                    return reading(self.arrow_path, lambda: read_fully(self.fs, fd, length, position))
        return read_range(self.fs, self.arrow_path, length, position)

    def append(self, frames: Sequence[Frame]) -> None:
        """Write the messages, then their entries. On a full disk both files are cut back before OSError is raised.

        Raises KafkaStorageError when they could not be cut back.
        """
        index, arrow_fd, index_fd = self._writable()
        headers = [frame.header for frame in frames]
        packed = pack_entries(headers, self.end)
        try:
            end = write_fully(self.fs, arrow_fd, [frame.message for frame in frames], self.end)
            write_fully(self.fs, index_fd, [packed], len(index) * ENTRY_BYTES)
        except OSError as error:
            if is_refusal(error):
                self._take_back()
            raise
        index.extend(packed)
        self.last, self.end = headers[-1], end

    def write_end_of_stream(self) -> None:
        """Write the mark that ends an Arrow stream. Raises OSError; on a full disk the mark is cut off again."""
        _, arrow_fd, _ = self._writable()
        try:
            write_fully(self.fs, arrow_fd, [END_OF_STREAM], self.end)
        except OSError as error:
            if is_refusal(error):
                self._take_back()
            raise

    def sync(self) -> None:
        """fsync both files. Raises OSError, after which the page cache can no longer be trusted."""
        arrow_file, index_file = self._arrow_file, self._index_file
        if arrow_file is None or index_file is None:
            return
        with arrow_file.pinned() as arrow_fd, index_file.pinned() as index_fd:
            if arrow_fd is not None and index_fd is not None:
                self.fs.fsync(arrow_fd)
                self.fs.fsync(index_fd)

    def seal(self) -> None:
        """Make the segment immutable. The caller has written and synced the end-of-stream mark."""
        self.sealed = True
        self.close()
        self.unload()

    def cut(self, count: int) -> Segment:
        """An active segment with the first `count` batches of this one, synced. Raises OSError or KafkaStorageError."""
        index = EntryIndex(self.entries()).prefix(count)
        end = end_position(index.entries)
        if self.sealed:
            self._replace_files(count, end)
        else:
            self._cut_files(count, end)
            self.sync()
            self.close()
        return Segment.from_index(self.fs, self.directory, index, sealed=False)

    def reopened(self) -> Segment:
        """An active segment with all batches of this sealed one. Raises OSError."""
        return self.cut(len(self.entries()))

    def remove(self) -> None:
        """Delete both files. Raises OSError; where it is refused, HalfDoneError."""
        self.close()
        remove_files(self.fs, self.directory, self.base_offset)

    def close(self) -> None:
        """Release the files. A read that is under way keeps its file open until it ends."""
        for file in (self._arrow_file, self._index_file):
            if file is not None:
                file.release()
        self._arrow_file = self._index_file = None

    def _writable(self) -> tuple[EntryIndex, int, int]:
        invariant(not self.sealed, "segment %d is sealed", self.base_offset)
        if self._index is None or self._arrow_file is None or self._index_file is None:
            raise KafkaStorageError(f"segment {self.arrow_path} is closed")
        return self._index, self._arrow_file.fd, self._index_file.fd

    def _take_back(self) -> None:
        """Cut off what did not fit, durably.

        Otherwise a crash of the machine might undo the cut. The refused batch would be back, at the offset and with the
        epoch of the batch that was appended after it: the replicas would differ, and no epoch would show it.
        """
        self._cut_files(len(self.entries()), self.end)
        try:
            self.sync()
        except OSError as error:
            raise storage_error(error, f"cannot sync {self.arrow_path}") from error

    def _cut_files(self, count: int, end: int) -> None:
        # The index is cut first: an entry promises that its message is there.
        _, arrow_fd, index_fd = self._writable()
        try:
            self.fs.ftruncate(index_fd, count * ENTRY_BYTES)
            self.fs.ftruncate(arrow_fd, end)
        except OSError as error:
            raise KafkaStorageError(f"cannot cut back {self.arrow_path}: {error}") from error

    def _replace_files(self, count: int, end: int) -> None:
        temporary = [path.with_name(path.name + TEMPORARY_SUFFIX) for path in (self.index_path, self.arrow_path)]
        try:
            copy_prefix(self.fs, self.index_path, temporary[0], count * ENTRY_BYTES)
            copy_prefix(self.fs, self.arrow_path, temporary[1], end)
        except OSError:
            for path in temporary:
                with contextlib.suppress(FileNotFoundError):
                    self.fs.unlink(path)
            raise
        with half_done_if_refused():
            self.fs.rename(temporary[0], self.index_path)
            self.fs.rename(temporary[1], self.arrow_path)
            self.fs.sync_directory(self.directory)


def _outer_entries(fs: FileSystem, index_path: Path) -> bytes:
    """The first and the last entry of an index file."""
    with opened(fs, index_path, os.O_RDONLY) as fd:
        size = fs.size(fd)
        if size == 0 or size % ENTRY_BYTES:
            raise DamagedLogError(f"{index_path.name} has {size} bytes")
        return read_fully(fs, fd, ENTRY_BYTES, 0) + read_fully(fs, fd, ENTRY_BYTES, size - ENTRY_BYTES)
