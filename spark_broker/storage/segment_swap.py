"""Puts a compacted segment in the place of the segments that it was made from, so that a crash leaves either.

The new files lie beside the old ones, under names of their own, synced. Then the swap is recorded: that is its commit.
Then the old files go, and the new ones get their names; the `.arrow` file gets it last. A start that finds the record
and that file under its own name repeats all of this. A start that finds no record removes the new files.

The record is part of the file that says how far the log is compacted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from spark_broker.core.compaction import NEVER_CLEANED, Cleaned, CleanPass
from spark_broker.errors import DamagedLogError
from spark_broker.protocol.frame import BatchHeader, Frame
from spark_broker.protocol.ipc_message import END_OF_STREAM
from spark_broker.storage.checkpoints import read_checkpoint_as, write_checkpoint
from spark_broker.storage.files import half_done_if_refused, is_refusal, opened, write_fully
from spark_broker.storage.filesystem import FileSystem
from spark_broker.storage.index import EntryIndex, end_position, pack_entries
from spark_broker.storage.log_state import LogState, write_log_state
from spark_broker.storage.segment import Segment, remove_files, segment_paths

COMPACTION_FILE = "compaction.json"
CLEANED_SUFFIX = ".cleaned"


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`passes`: offset and time. `swap`: base offsets of segments that the first one's new files replace."""

    passes: list[tuple[int, int]]
    purge_offset: int
    swept_to: int
    committed_to: int
    swap: list[int]


@dataclass(frozen=True, slots=True)
class CompactedSegment:
    """A segment that was written and has not taken its place."""

    base_offset: int
    index: EntryIndex

    @property
    def size_bytes(self) -> int:
        """Bytes of the `.arrow` file, without the end-of-stream mark."""
        return end_position(self.index.entries)


def read_cleaned(fs: FileSystem, directory: Path) -> Cleaned:
    """How far a log has been compacted. Raises DamagedLogError, OSError."""
    return _read(fs, directory)[0]


def write_cleaned(fs: FileSystem, directory: Path, cleaned: Cleaned, swap: Sequence[int] = ()) -> None:
    """Save it, durably; with `swap`, that commits the swap. Raises OSError: on a full disk nothing has changed."""
    passes = [(one.offset, one.at_ms) for one in cleaned.passes]
    saved = _Saved(passes, cleaned.purge_offset, cleaned.swept_to, cleaned.committed_to, list(swap))
    write_checkpoint(directory / COMPACTION_FILE, msgspec.to_builtins(saved), fs=fs)


def forget_cleaned(fs: FileSystem, directory: Path) -> None:
    """The log is empty: nothing was compacted. Raises OSError; a full disk does not stop it."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(directory / COMPACTION_FILE)
        fs.sync_directory(directory)


def recover_cleaned(fs: FileSystem, directory: Path, state: LogState, *, is_empty: bool) -> tuple[Cleaned, LogState]:
    """How far a log that is opened has been compacted, and its state, which says so, too, from now on.

    Raises DamagedLogError where the file is gone, or an older one. It is not known then which deletions the log does
    not name any more: followers would keep what was deleted. Raises OSError.
    """
    cleaned = read_cleaned(fs, directory)
    if is_empty:
        if cleaned != NEVER_CLEANED:
            forget_cleaned(fs, directory)  # before batches follow, of which it is not true
        cleaned = NEVER_CLEANED
    elif state.knows_more_than(cleaned):
        is_there = fs.exists(directory / COMPACTION_FILE)
        raise DamagedLogError(f"{COMPACTION_FILE} is {'an older one' if is_there else 'gone'}; {state} was saved")
    agreed = state.knowing(cleaned)
    try:
        if agreed != state:
            write_log_state(directory, agreed, fs=fs)
    except OSError as error:
        if not is_refusal(error):
            raise
        return cleaned, state  # On a full disk it is saved later.
    return cleaned, agreed


def write_compacted(
    fs: FileSystem, directory: Path, base_offset: int, schema_message: bytes, parts: Iterable[Sequence[Frame]]
) -> CompactedSegment:
    """Write a sealed segment under names of its own, synced. Raises OSError, or what `parts` raises; nothing is left
    then."""
    arrow_path, index_path = map(_cleaned, segment_paths(directory, base_offset))
    headers: list[BatchHeader] = []
    try:
        with opened(fs, arrow_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            end = write_fully(fs, fd, [schema_message], 0)
            for frames in parts:
                headers += [frame.header for frame in frames]
                end = write_fully(fs, fd, [frame.message for frame in frames], end)
            write_fully(fs, fd, [END_OF_STREAM], end)
            fs.fsync(fd)
        packed = pack_entries(headers, len(schema_message))
        with opened(fs, index_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            write_fully(fs, fd, [packed], 0)
            fs.fsync(fd)
        fs.sync_directory(directory)  # A record of the swap must not outlive one of the names.
    except Exception:
        discard_compacted(fs, directory, base_offset)
        raise
    return CompactedSegment(base_offset, EntryIndex.from_bytes(packed))


def discard_compacted(fs: FileSystem, directory: Path, base_offset: int) -> None:
    """Remove a segment that was written and takes no place. Raises OSError."""
    for path in map(_cleaned, segment_paths(directory, base_offset)):
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)


def swap_segments(fs: FileSystem, directory: Path, compacted: CompactedSegment) -> Segment:
    """Put `compacted` in the place of the segments that `write_cleaned` has recorded, durably. Returns the new segment.

    Raises OSError; where it is refused, HalfDoneError. The log must be opened again.
    """
    with half_done_if_refused():
        finish_swap(fs, directory)
    segment = Segment.from_index(fs, directory, compacted.index, sealed=True)
    segment.unload()
    return segment


def finish_swap(fs: FileSystem, directory: Path) -> None:
    """Carry out the swap that is recorded, if it is not done. Raises DamagedLogError, OSError."""
    swap = unfinished_swap(fs, directory)
    if not swap:
        return
    arrow_path, index_path = segment_paths(directory, swap[0])
    for base_offset in reversed(swap[1:]):
        remove_files(fs, directory, base_offset)
    if fs.exists(_cleaned(index_path)):
        fs.rename(_cleaned(index_path), index_path)
    fs.sync_directory(directory)
    fs.rename(_cleaned(arrow_path), arrow_path)
    fs.sync_directory(directory)


def unfinished_swap(fs: FileSystem, directory: Path) -> list[int]:
    """Base offsets of the segments of a swap that is recorded and not done; empty when there is none.

    Raises DamagedLogError, OSError.
    """
    _, swap = _read(fs, directory)
    # The `.arrow` file gets its name in the last step.
    return swap if swap and fs.exists(_cleaned(segment_paths(directory, swap[0])[0])) else []


def begin_compaction(fs: FileSystem, directory: Path) -> None:
    """Forget the last swap, which is done: its record must not be taken for that of files that are written now. Remove
    what a pass that was left has written.

    Raises OSError.
    """
    cleaned, swap = _read(fs, directory)
    if swap:
        write_cleaned(fs, directory, cleaned)
    for name in fs.list_directory(directory):
        if name.endswith(CLEANED_SUFFIX):
            fs.unlink(directory / name)


def _read(fs: FileSystem, directory: Path) -> tuple[Cleaned, list[int]]:
    saved = read_checkpoint_as(directory / COMPACTION_FILE, _Saved, fs=fs)
    if saved is None:
        return Cleaned(), []
    passes = tuple(CleanPass(offset, at_ms) for offset, at_ms in saved.passes)
    return Cleaned(passes, saved.purge_offset, saved.swept_to, saved.committed_to), saved.swap


def _cleaned(path: Path) -> Path:
    return path.with_name(path.name + CLEANED_SUFFIX)
