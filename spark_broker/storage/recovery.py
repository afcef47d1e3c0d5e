"""Opening the segments of a log after a clean stop, the crash of a process or the crash of a machine.

Recovery cuts only what the crash explains. When a process dies, every finished write is there, and only the last write
may be half done. When a machine dies, everything past the recovery point may be lost or torn. The index of that part is
rebuilt from the `.arrow` file, whose batches carry their own fields and CRCs. The rebuild ends at the first batch that
is missing or bad, or whose offset does not follow (KAFKA-3919). Other damage is reported, and nothing is cut.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spark_broker.errors import CorruptMessageError, DamagedLogError, UnknownSchemaError
from spark_broker.protocol.arrow_message import verify_stored
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.frame import ENTRY_BYTES, BatchHeader
from spark_broker.protocol.ipc_message import END_OF_STREAM, head_length, read_metadata
from spark_broker.protocol.schema_ids import is_schema
from spark_broker.storage.files import (
    TEMPORARY_SUFFIX,
    check_size,
    opened,
    read_fully,
    read_range,
    reading,
    write_atomically,
    write_fully,
)
from spark_broker.storage.filesystem import FileSystem
from spark_broker.storage.index import (
    INDEX_BYTES_MAX,
    EntryIndex,
    check_chain,
    count_below,
    end_position,
    header_at,
    pack_entries,
)
from spark_broker.storage.log_state import LOG_STATE_FILE, LogState
from spark_broker.storage.segment import (
    ARROW_SUFFIX,
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    PREFIX_BYTES,
    Segment,
    read_schema_message,
    remove_files,
    segment_paths,
    unlink_files,
)
from spark_broker.storage.segment_swap import CLEANED_SUFFIX, finish_swap
from spark_broker.storage.start_kind import StartKind

SchemaOf = Callable[[int], bytes]
"""Schema id to the bytes of its IPC schema message. Raises UnknownSchemaError."""

logger = logging.getLogger(__name__)

_REWRITE_BYTES = 1 << 20


def recover_segments(
    fs: FileSystem, directory: Path, start: StartKind, state: LogState, schemas: SchemaOf
) -> list[Segment]:
    """The segments in order. Only the last may be unsealed. Files that a crash left unfinished are cut or removed.

    After a machine crash everything returned is synced. Raises DamagedLogError, and then changes nothing further.
    """
    segments: list[Segment] = []
    try:
        _recover(fs, directory, start, state, schemas, segments)
    except BaseException:
        for segment in segments:  # A log that cannot be opened is tried again and again.
            segment.close()
        raise
    return segments


def _recover(
    fs: FileSystem, directory: Path, start: StartKind, state: LogState, schemas: SchemaOf, segments: list[Segment]
) -> None:
    """`segments`: those that are open so far, in order."""
    if start is not StartKind.CLEAN:
        # The name of the log-state file may not be synced yet. It must be, before segments are deleted because of it.
        fs.sync_directory(directory)
    finish_swap(fs, directory)
    _finish_deletions(fs, directory)
    bases = _drop_below_log_start(fs, directory, _base_offsets(fs, directory), state.log_start_offset)
    if start is StartKind.MACHINE_CRASH and len(bases) > 1 and not fs.exists(directory / LOG_STATE_FILE):
        # It is saved before a log gets its second segment. Without it, what was synced would count as lost.
        raise DamagedLogError(f"{LOG_STATE_FILE} is gone; there are segments from {bases[0]} to {bases[-1]}")
    # If the recovery point is not past the log start, nothing that is kept was synced. After the log was restarted at a
    # new offset, both may lie within a batch.
    synced_to = state.recovery_point if state.recovery_point > state.log_start_offset else 0
    if bases and bases[0] > state.log_start_offset:
        raise DamagedLogError(f"the first segment is {bases[0]}; the log starts at {state.log_start_offset}")
    if start is StartKind.MACHINE_CRASH:
        _after_machine_crash(fs, directory, bases, synced_to, schemas, segments)
        if segments and segments[-1].next_offset < state.log_start_offset and not synced_to:
            # The batches from the log start on were not synced and are lost. Retention has deleted what is left.
            while segments:
                segments.pop().remove()
        fs.sync_directory(directory)
    else:
        segments += [_intact(fs, directory, base) for base in bases[:-1]]
        segments += [s for base in bases[-1:] if (s := _last(fs, directory, base, start, synced_to)) is not None]
    for before, after in itertools.pairwise(segments):
        if before.next_offset != after.base_offset:
            raise DamagedLogError(f"segment {after.base_offset} does not follow offset {before.next_offset}")


def _base_offsets(fs: FileSystem, directory: Path) -> list[int]:
    names = (name.removesuffix(ARROW_SUFFIX).removesuffix(INDEX_SUFFIX) for name in fs.list_directory(directory))
    return sorted({int(name) for name in names if name.isdecimal()})


def _finish_deletions(fs: FileSystem, directory: Path) -> None:
    for name in fs.list_directory(directory):
        if name.endswith((TEMPORARY_SUFFIX, CLEANED_SUFFIX)):
            fs.unlink(directory / name)
        elif name.endswith(ARROW_SUFFIX + DELETED_SUFFIX):
            index = directory / (name.removesuffix(ARROW_SUFFIX + DELETED_SUFFIX) + INDEX_SUFFIX)
            if not fs.exists(directory / name.removesuffix(DELETED_SUFFIX)):  # Else it is that of a newer segment.
                with contextlib.suppress(FileNotFoundError):
                    fs.unlink(index)
            fs.unlink(directory / name)


def _drop_below_log_start(fs: FileSystem, directory: Path, bases: list[int], log_start_offset: int) -> list[int]:
    """Delete segments wholly below the log start. Retention saves the log start before it deletes them.

    The last one may have lost one of its files already. If it has both, the log that is opened deletes it.
    """
    while len(bases) > 1 and bases[1] <= log_start_offset:
        unlink_files(fs, directory, bases.pop(0))
    if bases and _is_half_deleted(fs, directory, bases[-1], log_start_offset):
        unlink_files(fs, directory, bases.pop())
    return bases


def _is_half_deleted(fs: FileSystem, directory: Path, base_offset: int, log_start_offset: int) -> bool:
    """Whether only the index is left, and says that all batches were below the log start."""
    arrow_path, index_path = segment_paths(directory, base_offset)
    count = fs.size_of(index_path) // ENTRY_BYTES
    if base_offset >= log_start_offset or fs.size_of(arrow_path) >= 0 or count <= 0:
        return False
    return _next_offset(_index_of(fs, index_path, count * ENTRY_BYTES)) <= log_start_offset


def _ends_with_mark(fs: FileSystem, path: Path, position: int) -> bool:
    return fs.size_of(path) == position + len(END_OF_STREAM) and _bytes_at(fs, path, position, 8) == END_OF_STREAM


def _bytes_at(fs: FileSystem, path: Path, position: int, length: int) -> bytes:
    return read_range(fs, path, length, position)


def _index_of(fs: FileSystem, index_path: Path, length: int) -> EntryIndex:
    """The first `length` bytes of an index file, a whole number of entries. Raises DamagedLogError, OSError."""
    check_size(index_path, length, INDEX_BYTES_MAX)
    return EntryIndex.from_bytes(_bytes_at(fs, index_path, 0, length))


def _truncate(fs: FileSystem, path: Path, length: int) -> None:
    """Cut the file durably: a later crash of the machine must not bring back what was cut."""
    size = fs.size_of(path)
    if size != length:
        fields = {"topic_partition": path.parent.name, "file": path.name, "bytes": length, "old_bytes": size}
        text = "%(topic_partition)s: recovery cuts %(file)s from %(old_bytes)d to %(bytes)d bytes"
        logger.info(text, {**fields, "offset": int(path.stem)})
        fs.truncate(path, length)
        _sync_file(fs, path)


def _remove(fs: FileSystem, directory: Path, base_offset: int, why: str) -> None:
    """Remove the files of a segment that the crash has made useless."""
    fields = {"topic_partition": directory.name, "offset": base_offset, "why": why}
    logger.info("%(topic_partition)s: recovery removes segment %(offset)d: %(why)s", fields)
    remove_files(fs, directory, base_offset)


def _intact(fs: FileSystem, directory: Path, base_offset: int) -> Segment:
    """Open a sealed segment. Raises DamagedLogError unless both files are there with the sizes that the index gives."""
    arrow_path, index_path = segment_paths(directory, base_offset)
    if fs.size_of(arrow_path) < 0 or fs.size_of(index_path) < 0:
        raise DamagedLogError(f"segment {base_offset} has lost a file")
    segment = Segment.open_sealed(fs, directory, base_offset)
    if not _ends_with_mark(fs, arrow_path, segment.end):
        raise DamagedLogError(f"{arrow_path.name} does not end where its index says")
    return segment


def _last(fs: FileSystem, directory: Path, base_offset: int, start: StartKind, recovery_point: int) -> Segment | None:
    """Open the last segment, whose last write may be unfinished after a process crash."""
    arrow_path, index_path = segment_paths(directory, base_offset)
    arrow_size, index_size = fs.size_of(arrow_path), fs.size_of(index_path)
    crashed = start is StartKind.PROCESS_CRASH
    if crashed and base_offset >= recovery_point and _never_committed(arrow_size, index_size):
        _remove(fs, directory, base_offset, "no batch was appended to it")
        fs.sync_directory(directory)
        return None
    count = index_size // ENTRY_BYTES
    if arrow_size < 0 or count <= 0 or (index_size % ENTRY_BYTES and not crashed):
        raise DamagedLogError(f"segment {base_offset} has files of {arrow_size} and {index_size} bytes")
    index = _index_of(fs, index_path, count * ENTRY_BYTES)
    check_chain(index.entries, base_offset)
    end = end_position(index.entries)
    if arrow_size < end:
        raise DamagedLogError(f"{arrow_path.name} has {arrow_size} bytes; its index promises {end}")
    sealed = _ends_with_mark(fs, arrow_path, end)
    if arrow_size != end and not sealed and not crashed:
        raise DamagedLogError(f"{arrow_path.name} does not end where its index says")
    if crashed:
        # These checks come before any cut: good batches must not be cut off because of a wrong entry.
        if _next_offset(index) < recovery_point:
            raise DamagedLogError(f"{index_path.name} ends before offset {recovery_point}, which was synced")
        _check_batch(fs, arrow_path, index, count - 1)
        _cut_unfinished(fs, directory, base_offset, count, end, sealed)
        _write_again(fs, directory, base_offset, index, recovery_point)
        if sealed:  # The process may have died before it synced these files. A log syncs only its active segment.
            _sync_file(fs, arrow_path)
            _sync_file(fs, index_path)
    return Segment.from_index(fs, directory, index, sealed=sealed)


def _check_batch(fs: FileSystem, arrow_path: Path, index: EntryIndex, at: int) -> None:
    """Check that the batch is where its entry says, with the CRC of the entry. Raises DamagedLogError."""
    header = header_at(index.entries, at)
    message = _bytes_at(fs, arrow_path, int(index.entries["position"][at]), header.length)
    if len(message) != header.length or crc32c(message) != header.message_crc:
        raise DamagedLogError(f"the stored batch at offset {header.base_offset} fails its CRC")


def _never_committed(arrow_size: int, index_size: int) -> bool:
    """Whether no batch was ever appended. Both files are created before any write, and the entry is written last."""
    return 0 <= index_size < ENTRY_BYTES if arrow_size >= 0 and index_size >= 0 else arrow_size == 0


def _cut_unfinished(fs: FileSystem, directory: Path, base_offset: int, count: int, end: int, sealed: bool) -> None:
    arrow_path, index_path = segment_paths(directory, base_offset)
    _truncate(fs, index_path, count * ENTRY_BYTES)
    _truncate(fs, arrow_path, end + (len(END_OF_STREAM) if sealed else 0))


def _write_again(fs: FileSystem, directory: Path, base_offset: int, index: EntryIndex, recovery_point: int) -> None:
    """Write the unsynced part again, unchanged (known bug 27).

    The process may have died of a failed fsync. The kernel then treats those pages as written. The next fsync would
    write nothing and succeed, and a crash of the machine would lose data that counts as synced.
    """
    synced = count_below(index.entries, recovery_point)
    arrow_path, index_path = segment_paths(directory, base_offset)
    # Where all batches are synced, the end-of-stream mark after them may not be.
    _rewrite(fs, arrow_path, end_position(index.entries, synced - 1) if synced else 0)
    _rewrite(fs, index_path, synced * ENTRY_BYTES)


def _rewrite(fs: FileSystem, path: Path, position: int) -> None:
    with opened(fs, path, os.O_RDWR) as fd:
        while data := read_fully(fs, fd, _REWRITE_BYTES, position):
            position = write_fully(fs, fd, [data], position)


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """The headers found in an `.arrow` file from byte `start` to byte `end` (exclusive).

    `sealed`: the end-of-stream mark follows.
    """

    headers: list[BatchHeader]
    start: int
    end: int
    sealed: bool


def _after_machine_crash(
    fs: FileSystem,
    directory: Path,
    bases: list[int],
    recovery_point: int,
    schemas: SchemaOf,
    segments: list[Segment],
) -> None:
    for position, base in enumerate(bases):
        following = bases[position + 1] if position + 1 < len(bases) else None
        if following is not None and following <= recovery_point:
            segments.append(_intact(fs, directory, base))
            continue
        segment = _rebuild(fs, directory, base, recovery_point, schemas) if _follows(segments, base) else None
        if segment is not None:
            segments.append(segment)
        if segment is None or not segment.sealed or segment.next_offset != following:
            _drop_unsynced(fs, directory, bases[position + (segment is not None) :], recovery_point)
            break


def _follows(segments: list[Segment], base_offset: int) -> bool:
    return not segments or segments[-1].next_offset == base_offset


def _drop_unsynced(fs: FileSystem, directory: Path, bases: list[int], recovery_point: int) -> None:
    for base in reversed(bases):
        if base < recovery_point:
            raise DamagedLogError(f"segment {base} was synced up to {recovery_point} and cannot be read")
        _remove(fs, directory, base, "the machine crashed before it, or what comes before it, was synced")


def _rebuild(
    fs: FileSystem, directory: Path, base_offset: int, recovery_point: int, schemas: SchemaOf
) -> Segment | None:
    """Rebuild a segment that may reach past the recovery point, and sync its files. None when it has no whole batch."""
    arrow_path, index_path = segment_paths(directory, base_offset)
    index = _synced_entries(fs, directory, base_offset, recovery_point)
    if fs.size_of(arrow_path) < 0:
        return None
    rebuilt = reading(arrow_path, lambda: _scan(fs, arrow_path, base_offset, index, schemas))
    index.extend(pack_entries(rebuilt.headers, rebuilt.start))
    if len(index) == 0:
        return None
    _replace_index(fs, index_path, index)
    _truncate(fs, arrow_path, rebuilt.end + (len(END_OF_STREAM) if rebuilt.sealed else 0))
    _sync_file(fs, arrow_path)
    return Segment.from_index(fs, directory, index, sealed=rebuilt.sealed)


def _synced_entries(fs: FileSystem, directory: Path, base_offset: int, recovery_point: int) -> EntryIndex:
    """The entries below the recovery point. Raises DamagedLogError when one is missing or wrong."""
    if base_offset >= recovery_point:
        return EntryIndex.empty()
    arrow_path, index_path = segment_paths(directory, base_offset)
    size = fs.size_of(index_path)
    if size < ENTRY_BYTES:
        raise DamagedLogError(f"{index_path.name} has {size} bytes; it was synced up to offset {recovery_point}")
    whole = _index_of(fs, index_path, size - size % ENTRY_BYTES)
    # Entries past the recovery point may be garbage, in any order. Take the entries that lead up to it, one by one.
    entries, expected, count = whole.entries, base_offset, 0
    while count < len(entries) and expected < recovery_point:
        if int(entries["base_offset"][count]) != expected:
            raise DamagedLogError(f"{index_path.name} is not contiguous at offset {expected}, which was synced")
        expected += int(entries["last_offset_delta"][count]) + 1
        count += 1
    if expected != recovery_point:
        raise DamagedLogError(f"{index_path.name} ends at offset {expected}; it was synced up to {recovery_point}")
    kept = whole.prefix(count)
    check_chain(kept.entries, base_offset)
    if fs.size_of(arrow_path) < end_position(kept.entries):
        raise DamagedLogError(f"{arrow_path.name} is shorter than what was synced")
    _check_batch(fs, arrow_path, kept, count - 1)
    return kept


def _scan(fs: FileSystem, arrow_path: Path, base_offset: int, known: EntryIndex, schemas: SchemaOf) -> _Rebuilt:
    """Read batches after the known ones up to the first that is missing, torn or out of order."""
    with opened(fs, arrow_path, os.O_RDONLY) as fd:
        size = fs.size(fd)
        schema_message = b"" if len(known) else read_schema_message(fs, fd, size)
        start = position = end_position(known.entries) if len(known) else len(schema_message)
        expected = _next_offset(known) if len(known) else base_offset
        headers: list[BatchHeader] = []
        while (header := _batch_at(fs, fd, position, size)) is not None and header.base_offset == expected:
            first = not headers and not len(known)
            if first and not _begins_with(schema_message, header.schema_id, schemas):
                break
            headers.append(header)
            position, expected = position + header.length, header.next_offset
        sealed = position + len(END_OF_STREAM) == size and read_fully(fs, fd, 8, position) == END_OF_STREAM
        return _Rebuilt(headers, start, position, sealed)


def _next_offset(index: EntryIndex) -> int:
    return int(index.entries["base_offset"][-1]) + int(index.entries["last_offset_delta"][-1]) + 1


def _begins_with(message: bytes, schema_id: int, schemas: SchemaOf) -> bool:
    """Whether this is the schema message of the id. Where that is not known, any schema is taken for it.

    Metadata that is older than the log, and was accepted, learns of the schema from this very segment.
    """
    try:
        return message == schemas(schema_id)
    except UnknownSchemaError:
        return is_schema(message)


def _batch_at(fs: FileSystem, fd: int, position: int, size: int) -> BatchHeader | None:
    """The header of the batch at this byte; None when no whole, valid batch is there."""
    prefix = read_fully(fs, fd, PREFIX_BYTES, position)
    head_bytes = PREFIX_BYTES + int.from_bytes(prefix[4:8], "little")
    if len(prefix) < PREFIX_BYTES or position + head_bytes > size:
        return None
    try:
        head = read_fully(fs, fd, head_bytes, position)
        head_length(head)
        length = head_bytes + read_metadata(head).body_bytes
        if length < head_bytes or position + length > size:
            return None
        return verify_stored(read_fully(fs, fd, length, position))
    except CorruptMessageError:
        # The error is used, not swallowed: the caller cuts the log here.
        return None


def _replace_index(fs: FileSystem, index_path: Path, index: EntryIndex) -> None:
    packed = index.entries.tobytes()
    if fs.size_of(index_path) == len(packed) and fs.read_bytes(index_path) == packed:
        _sync_file(fs, index_path)  # If nothing was lost, nothing is written, and a full disk does not matter.
    else:
        write_atomically(fs, index_path, packed)


def _sync_file(fs: FileSystem, path: Path) -> None:
    with opened(fs, path, os.O_RDWR) as fd:
        fs.fsync(fd)
