"""Reads segment files as they lie on a disk, also while a broker writes them, and checks every checksum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from spark_broker.errors import CorruptMessageError, DamagedLogError, InvalidDataError, SparkBrokerError
from spark_broker.protocol.arrow_message import decode_batch, row_deltas, verify_stored
from spark_broker.protocol.frame import ENTRY_BYTES, Attributes, BatchHeader, unpack_header
from spark_broker.protocol.ipc_message import head_length
from spark_broker.protocol.schema import schema_from_bytes
from spark_broker.storage.files import read_whole
from spark_broker.storage.filesystem import LOCAL
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


def read_segment(directory: Path, base_offset: int) -> Iterator[DumpedBatch]:
    """The batches of a segment, in order, damaged ones included. Raises DamagedLogError where the index is unusable."""
    arrow_path, index_path = segment_paths(directory, base_offset)
    try:
        packed = read_whole(LOCAL, index_path, INDEX_BYTES_MAX)
        # A broker may be writing: a last entry that is there only in part is not an entry yet.
        index = EntryIndex.from_bytes(packed[: len(packed) // ENTRY_BYTES * ENTRY_BYTES])
        with arrow_path.open("rb") as file:
            for at, entry in enumerate(index.entries):
                header = unpack_header(entry.tobytes(), verify=False)
                position = int(entry["position"])
                file.seek(max(position, 0))
                message = file.read(max(header.length, 0))
                problem = _entry_problem(index, at) or _message_problem(header, message)
                yield DumpedBatch(header, position, message, problem)
    except FileNotFoundError as error:
        raise DamagedLogError(f"segment {base_offset} has lost a file: {error.filename}") from None


def chain_problem(directory: Path, base_offset: int) -> str:
    """What is wrong with a segment's index as a whole: gaps in offsets or positions. Empty when nothing is."""
    packed = read_whole(LOCAL, segment_paths(directory, base_offset)[1], INDEX_BYTES_MAX)
    index = EntryIndex.from_bytes(packed[: len(packed) // ENTRY_BYTES * ENTRY_BYTES])
    if not len(index):
        return "the index is empty"
    try:
        check_chain(index.entries, base_offset, verify_from=len(index))
    except DamagedLogError as error:
        return error.message
    return ""


def segment_schema(directory: Path, base_offset: int) -> pa.Schema:
    """The schema at the head of the `.arrow` file. Raises InvalidSchemaError or CorruptMessageError."""
    with segment_paths(directory, base_offset)[0].open("rb") as file:
        prefix = file.read(PREFIX_BYTES)
        if len(prefix) < PREFIX_BYTES:
            raise CorruptMessageError("the file is shorter than a schema message")
        size = PREFIX_BYTES + int.from_bytes(prefix[4:], "little")
        return schema_from_bytes(prefix + file.read(size - PREFIX_BYTES))


def rows_of(batch: DumpedBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of an undamaged batch."""
    return decode_batch(batch.message, schema)


def offsets_of(batch: DumpedBatch) -> list[int]:
    """The offsets of these rows."""
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
