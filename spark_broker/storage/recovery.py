"""Opening the segments of a log after a clean stop, the crash of a process or the crash of a machine.

What may be cut depends on what the crash explains. A process that dies leaves every finished write behind: only the
last may be half done. A machine that dies may lose or tear anything past the recovery point: there the index is made
again from the `.arrow` file, whose batches carry their own fields and CRCs, up to the first that is missing or bad
(KAFKA-3919: also when offsets do not follow one another). Anything else is damage: reported, never cleaned.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spark_broker.errors import CorruptMessageError, DamagedLogError
from spark_broker.protocol.arrow_message import verify_stored
from spark_broker.protocol.frame import ENTRY_BYTES, BatchHeader
from spark_broker.protocol.ipc_message import END_OF_STREAM, head_length, read_metadata
from spark_broker.storage.checkpoints import LogState
from spark_broker.storage.files import TEMPORARY_SUFFIX, read_fully, sync_directory, write_atomically
from spark_broker.storage.index import EntryIndex, check_chain, count_below, end_position, pack_entries
from spark_broker.storage.segment import ARROW_SUFFIX, DELETED_SUFFIX, INDEX_SUFFIX, Segment, segment_paths
from spark_broker.storage.start_kind import StartKind

SchemaOf = Callable[[int], bytes]
"""Schema id to the bytes of its IPC schema message."""

_PREFIX_BYTES = 8


def recover_segments(directory: Path, start: StartKind, state: LogState, schemas: SchemaOf) -> list[Segment]:
    """The segments in order, all sealed but perhaps the last; files that a crash left unfinished are cut or removed.

    After a machine crash everything returned is synced. Raises DamagedLogError, and then changes nothing further.
    """
    _finish_deletions(directory)
    bases = _drop_below_log_start(directory, _base_offsets(directory), state.log_start_offset)
    if bases and bases[0] > state.log_start_offset:
        raise DamagedLogError(f"the first segment is {bases[0]}; the log starts at {state.log_start_offset}")
    if start is StartKind.MACHINE_CRASH:
        segments = _after_machine_crash(directory, bases, state.recovery_point, schemas)
    else:
        segments = [_intact(directory, base) for base in bases[:-1]]
        segments += [s for base in bases[-1:] if (s := _last(directory, base, start, state.recovery_point)) is not None]
    for before, after in itertools.pairwise(segments):
        if before.next_offset != after.base_offset:
            raise DamagedLogError(f"segment {after.base_offset} does not follow offset {before.next_offset}")
    return segments


# ---- files that are there ------------------------------------------------------------------------------------------


def _base_offsets(directory: Path) -> list[int]:
    names = {path.stem for suffix in (ARROW_SUFFIX, INDEX_SUFFIX) for path in directory.glob("*" + suffix)}
    return sorted(int(name) for name in names if name.isdecimal())


def _finish_deletions(directory: Path) -> None:
    for path in directory.glob("*" + TEMPORARY_SUFFIX):
        path.unlink()
    for path in directory.glob("*" + ARROW_SUFFIX + DELETED_SUFFIX):
        index = directory / (path.name.removesuffix(ARROW_SUFFIX + DELETED_SUFFIX) + INDEX_SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            index.unlink()
        path.unlink()


def _drop_below_log_start(directory: Path, bases: list[int], log_start_offset: int) -> list[int]:
    """Retention saves the log start before it deletes: what is wholly below it was being deleted."""
    while len(bases) > 1 and bases[1] <= log_start_offset:
        _remove_files(directory, bases.pop(0))
    return bases


def _remove_files(directory: Path, base_offset: int) -> None:
    for path in segment_paths(directory, base_offset):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _size(path: Path) -> int:
    """Bytes of a file; -1 when there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _ends_with_mark(path: Path, position: int) -> bool:
    return path.stat().st_size == position + len(END_OF_STREAM) and _bytes_at(path, position, 8) == END_OF_STREAM


def _bytes_at(path: Path, position: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_fully(fd, length, position)
    finally:
        os.close(fd)


def _truncate(path: Path, length: int) -> None:
    if path.stat().st_size != length:
        os.truncate(path, length)


# ---- clean stop, process crash -------------------------------------------------------------------------------------


def _intact(directory: Path, base_offset: int) -> Segment:
    """A sealed segment: both files are there and their sizes agree with the index."""
    arrow_path, index_path = segment_paths(directory, base_offset)
    if _size(arrow_path) < 0 or _size(index_path) < 0:
        raise DamagedLogError(f"segment {base_offset} has lost a file")
    segment = Segment.open_sealed(directory, base_offset)
    if not _ends_with_mark(arrow_path, segment.end):
        raise DamagedLogError(f"{arrow_path.name} does not end where its index says")
    return segment


def _last(directory: Path, base_offset: int, start: StartKind, recovery_point: int) -> Segment | None:
    """The last segment, whose last write may be unfinished after a process crash."""
    arrow_path, index_path = segment_paths(directory, base_offset)
    arrow_size, index_size = _size(arrow_path), _size(index_path)
    crashed = start is StartKind.PROCESS_CRASH
    if crashed and base_offset >= recovery_point and _never_committed(arrow_size, index_size):
        _remove_files(directory, base_offset)
        return None
    count = index_size // ENTRY_BYTES
    if arrow_size < 0 or count <= 0 or (index_size % ENTRY_BYTES and not crashed):
        raise DamagedLogError(f"segment {base_offset} has files of {arrow_size} and {index_size} bytes")
    index = EntryIndex.from_bytes(_bytes_at(index_path, 0, count * ENTRY_BYTES))
    check_chain(index.entries, base_offset, verify_from=min(count_below(index.entries, recovery_point), count - 1))
    end = end_position(index.entries)
    if arrow_size < end:
        raise DamagedLogError(f"{arrow_path.name} has {arrow_size} bytes; its index promises {end}")
    sealed = _ends_with_mark(arrow_path, end)
    if arrow_size != end and not sealed and not crashed:
        raise DamagedLogError(f"{arrow_path.name} does not end where its index says")
    if crashed:
        _cut_unfinished(directory, base_offset, count, end, sealed)
    segment = Segment.from_index(directory, index, sealed=sealed)
    if crashed:
        segment.read(index.entries, count - 1, count)  # Its CRC: the last batch is the likeliest victim.
    return segment


def _never_committed(arrow_size: int, index_size: int) -> bool:
    """No batch was ever appended: both files are made before anything is written, the entry last."""
    return 0 <= index_size < ENTRY_BYTES if arrow_size >= 0 and index_size >= 0 else arrow_size == 0


def _cut_unfinished(directory: Path, base_offset: int, count: int, end: int, sealed: bool) -> None:
    arrow_path, index_path = segment_paths(directory, base_offset)
    _truncate(index_path, count * ENTRY_BYTES)
    _truncate(arrow_path, end + (len(END_OF_STREAM) if sealed else 0))


# ---- machine crash -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """The headers found in an `.arrow` file, the byte after the last, and whether the end-of-stream mark follows."""

    headers: list[BatchHeader]
    start: int
    end: int
    sealed: bool


def _after_machine_crash(directory: Path, bases: list[int], recovery_point: int, schemas: SchemaOf) -> list[Segment]:
    segments: list[Segment] = []
    for position, base in enumerate(bases):
        following = bases[position + 1] if position + 1 < len(bases) else None
        if following is not None and following <= recovery_point:
            segments.append(_intact(directory, base))
            continue
        segment = _rebuild(directory, base, recovery_point, schemas) if _follows(segments, base) else None
        if segment is not None:
            segments.append(segment)
        if segment is None or not segment.sealed or segment.next_offset != following:
            _drop_unsynced(directory, bases[position + (segment is not None) :], recovery_point)
            break
    sync_directory(directory)
    return segments


def _follows(segments: list[Segment], base_offset: int) -> bool:
    return not segments or segments[-1].next_offset == base_offset


def _drop_unsynced(directory: Path, bases: list[int], recovery_point: int) -> None:
    for base in reversed(bases):
        if base < recovery_point:
            raise DamagedLogError(f"segment {base} was synced up to {recovery_point} and cannot be read")
        _remove_files(directory, base)


def _rebuild(directory: Path, base_offset: int, recovery_point: int, schemas: SchemaOf) -> Segment | None:
    """A segment that may reach past the recovery point; None when nothing of it is whole. Its files are synced."""
    arrow_path, index_path = segment_paths(directory, base_offset)
    index = _synced_entries(directory, base_offset, recovery_point)
    if _size(arrow_path) < 0:
        return None
    rebuilt = _scan(arrow_path, base_offset, index, schemas)
    index.extend(pack_entries(rebuilt.headers, rebuilt.start))
    if len(index) == 0:
        return None
    _replace_index(index_path, index)
    _truncate(arrow_path, rebuilt.end + (len(END_OF_STREAM) if rebuilt.sealed else 0))
    _sync_file(arrow_path)
    return Segment.from_index(directory, index, sealed=rebuilt.sealed)


def _synced_entries(directory: Path, base_offset: int, recovery_point: int) -> EntryIndex:
    """The entries below the recovery point, which must be there."""
    if base_offset >= recovery_point:
        return EntryIndex.empty()
    arrow_path, index_path = segment_paths(directory, base_offset)
    size = _size(index_path)
    if size < ENTRY_BYTES:
        raise DamagedLogError(f"{index_path.name} has {size} bytes; it was synced up to offset {recovery_point}")
    whole = EntryIndex.from_bytes(_bytes_at(index_path, 0, size - size % ENTRY_BYTES))
    # Entries past the recovery point may be garbage, in any order: take those that lead up to it, one by one.
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
    if _size(arrow_path) < end_position(kept.entries):
        raise DamagedLogError(f"{arrow_path.name} is shorter than what was synced")
    return kept


def _scan(arrow_path: Path, base_offset: int, known: EntryIndex, schemas: SchemaOf) -> _Rebuilt:
    """Read batches after the known ones up to the first that is missing, torn or out of order."""
    fd = os.open(arrow_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        schema_message = b"" if len(known) else _schema_message(fd, size)
        start = position = end_position(known.entries) if len(known) else len(schema_message)
        expected = _next_offset(known) if len(known) else base_offset
        headers: list[BatchHeader] = []
        while (header := _batch_at(fd, position, size)) is not None and header.base_offset == expected:
            if not headers and schema_message != (schemas(header.schema_id) if not len(known) else b""):
                break
            headers.append(header)
            position, expected = position + header.length, header.next_offset
        sealed = position + len(END_OF_STREAM) == size and read_fully(fd, 8, position) == END_OF_STREAM
        return _Rebuilt(headers, start, position, sealed)
    finally:
        os.close(fd)


def _next_offset(index: EntryIndex) -> int:
    return int(index.entries["base_offset"][-1]) + int(index.entries["last_offset_delta"][-1]) + 1


def _schema_message(fd: int, size: int) -> bytes:
    prefix = read_fully(fd, _PREFIX_BYTES, 0)
    length = _PREFIX_BYTES + int.from_bytes(prefix[4:8], "little")
    return read_fully(fd, length, 0) if len(prefix) == _PREFIX_BYTES and length <= size else b""


def _batch_at(fd: int, position: int, size: int) -> BatchHeader | None:
    """The header of the batch at this byte; None when no whole, valid batch is there."""
    prefix = read_fully(fd, _PREFIX_BYTES, position)
    head_bytes = _PREFIX_BYTES + int.from_bytes(prefix[4:8], "little")
    if len(prefix) < _PREFIX_BYTES or position + head_bytes > size:
        return None
    try:
        head = read_fully(fd, head_bytes, position)
        head_length(head)
        length = head_bytes + read_metadata(head).body_bytes
        if length < head_bytes or position + length > size:
            return None
        return verify_stored(read_fully(fd, length, position))
    except CorruptMessageError:
        # Not swallowed: the caller cuts the log here, which is what recovery is for.
        return None


def _replace_index(index_path: Path, index: EntryIndex) -> None:
    write_atomically(index_path, index.entries.tobytes())


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
