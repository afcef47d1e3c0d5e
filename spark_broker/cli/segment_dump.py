"""Reads segment files as they lie on a disk, also while a broker writes them, and checks every checksum."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from spark_broker.errors import (
    CorruptMessageError,
    DamagedLogError,
    InvalidDataError,
    InvalidSchemaError,
    SparkBrokerError,
)
from spark_broker.protocol.arrow_message import decode_batch, row_deltas, verify_stored
from spark_broker.protocol.frame import ENTRY_BYTES, Attributes, BatchHeader, unpack_header
from spark_broker.protocol.ipc_message import head_length
from spark_broker.protocol.schema import schema_from_bytes
from spark_broker.storage.files import is_refusal, read_range, read_whole
from spark_broker.storage.filesystem import LOCAL, ReadError
from spark_broker.storage.index import INDEX_BYTES_MAX, EntryIndex, check_chain
from spark_broker.storage.segment import ARROW_SUFFIX, INDEX_SUFFIX, segment_paths

PREFIX_BYTES = 8

WHAT_TO_GIVE = f"Give a partition's directory, like broker-0/flights-3, or one of its segments, <offset>{ARROW_SUFFIX}."


@dataclass(frozen=True)
class DumpedBatch:
    """One entry of an index with its message. `problem`: what is wrong with it, empty when nothing is."""

    header: BatchHeader
    position: int
    message: bytes
    problem: str = ""

    @property
    def attributes(self) -> list[str]:
        """Names of the flags that are set."""
        return [flag.name or "" for flag in Attributes(self.header.attributes)]


def segments_at(path: Path) -> list[tuple[Path, int]]:
    """(directory, base offset) of the segment that a file belongs to, or of all in a partition's directory.

    Raises InvalidDataError for a path that is neither.
    """
    if path.is_dir():
        names = {file.stem for suffix in (ARROW_SUFFIX, INDEX_SUFFIX) for file in path.glob("*" + suffix)}
        versions = sorted((path, int(name)) for name in names if name.isdecimal())
        if not versions:
            raise InvalidDataError(f"{path} holds no segments", hint=WHAT_TO_GIVE)
        return versions
    if path.suffix not in (ARROW_SUFFIX, INDEX_SUFFIX) or not path.stem.isdecimal():
        raise InvalidDataError(f"{path} is no segment and no directory of segments", hint=WHAT_TO_GIVE)
    if not path.exists():
        raise InvalidDataError(f"{path} does not exist", hint=WHAT_TO_GIVE)
    return [(path.parent, int(path.stem))]


def read_segment(directory: Path, base_offset: int) -> tuple[list[DumpedBatch], str]:
    """The batches of a segment, in order, damaged ones included; and what is wrong with its index as a whole, such as a
    gap in offsets or positions. Empty when nothing is.
    """
    arrow_path, index_path = segment_paths(directory, base_offset)
    try:
        packed = read_whole(LOCAL, index_path, INDEX_BYTES_MAX)
        # A broker may be writing: a last entry that is there only in part is not an entry yet.
        index = EntryIndex.from_bytes(packed[: len(packed) // ENTRY_BYTES * ENTRY_BYTES])
        size = arrow_path.stat().st_size
        batches = [_batch(index, at, arrow_path, size) for at in range(len(index))]
    except FileNotFoundError as error:
        return [], f"it has lost a file: {error.filename}"
    except (DamagedLogError, OSError) as error:
        return [], _why_unreadable(error)
    return batches, _chain_problem(index, base_offset)


def _batch(index: EntryIndex, at: int, arrow_path: Path, size: int) -> DumpedBatch:
    """One batch. Whatever its entry says, nothing is read that the file, of so many bytes, does not have."""
    entry = index.entries[at]
    header, position = unpack_header(entry.tobytes(), verify=False), int(entry["position"])
    message, problem = b"", _entry_problem(index, at)
    if not 0 <= position <= size or header.length < 0:
        problem = problem or "the entry names bytes that the file does not have"
    elif position + header.length > size:
        problem = problem or f"the .arrow file ends after {size - position} of {header.length} bytes"
    else:
        try:
            message = read_range(LOCAL, arrow_path, header.length, position)
        except ReadError as error:
            problem = problem or _why_unreadable(error)
        else:
            problem = problem or _message_problem(header, message)
    return DumpedBatch(header, position, message, problem)


def _why_unreadable(error: OSError | SparkBrokerError) -> str:
    """Raises the error of a limit of this process: it says nothing of the file."""
    if isinstance(error, SparkBrokerError):
        return error.message
    if is_refusal(error):
        raise error
    return f"it cannot be read: {error.strerror}"


def _chain_problem(index: EntryIndex, base_offset: int) -> str:
    if not len(index):
        return "the index is empty"
    try:
        check_chain(index.entries, base_offset, verify_from=len(index))
    except DamagedLogError as error:
        return error.message
    return ""


def segment_schema(directory: Path, base_offset: int) -> tuple[pa.Schema | None, str]:
    """The schema at the head of the `.arrow` file; None, and why it is not there."""
    path = segment_paths(directory, base_offset)[0]
    try:
        prefix = read_range(LOCAL, path, PREFIX_BYTES, 0)
        size = PREFIX_BYTES + int.from_bytes(prefix[4:], "little")
        if len(prefix) < PREFIX_BYTES or size > path.stat().st_size:
            return None, "the file is shorter than its schema message"
        return schema_from_bytes(read_range(LOCAL, path, size, 0)), ""
    except (InvalidSchemaError, OSError) as error:
        return None, _why_unreadable(error)


def rows_of(batch: DumpedBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of an undamaged batch. Raises CorruptMessageError where they are not of this schema."""
    return decode_batch(batch.message, schema)


def offsets_of(batch: DumpedBatch) -> list[int]:
    """The offsets of these rows. Raises CorruptMessageError."""
    offsets: list[int] = (batch.header.base_offset + row_deltas(batch.header, batch.message)).tolist()
    return offsets


def _entry_problem(index: EntryIndex, at: int) -> str:
    try:
        unpack_header(index.entries[at].tobytes())
    except SparkBrokerError as error:
        return f"index entry: {error.message}"
    return ""


def _message_problem(header: BatchHeader, message: bytes) -> str:
    if len(message) < header.length:
        return f"the .arrow file ends after {len(message)} of {header.length} bytes"
    try:
        head_length(message)
        stored = verify_stored(message)
    except CorruptMessageError as error:
        return error.message
    if stored != header:
        differing = [name for name, a, b in zip(header._fields, stored, header, strict=True) if a != b]
        return f"message and index disagree about {', '.join(differing)}"
    return ""
