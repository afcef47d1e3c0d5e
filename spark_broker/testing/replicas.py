"""Replicas as they lie on the disks: read without a broker, and compared byte for byte, batch by batch.

The brokers may be running: what lies below the high watermark no longer changes, and nothing above it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from spark_broker.errors import DamagedLogError, InvalidDataError, UnknownTopicOrPartitionError
from spark_broker.model import TopicPartition
from spark_broker.protocol.arrow_message import decode_batch, row_deltas, verify_stored
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.frame import ENTRY_BYTES, Frame, pack_header, unpack_header
from spark_broker.storage.directory_meta import read_meta
from spark_broker.storage.index import EntryIndex, check_chain, header_at
from spark_broker.storage.segment import INDEX_SUFFIX, segment_paths
from spark_broker.storage.slots import SLOT_PREFIX
from spark_broker.testing.history import Stored


@dataclass(frozen=True, slots=True)
class ReplicaDirectory:
    """One replica of a partition on a disk."""

    broker_id: int
    partition: TopicPartition
    path: Path


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Where two replicas of a partition do not hold the same. `offset` is the first of the batch."""

    partition: TopicPartition
    offset: int
    detail: str

    def __str__(self) -> str:
        return f"{self.partition}, offset {self.offset}: {self.detail}"


LogDirs = str | Path | Sequence[Path]
"""`log.dirs` of a cluster; several where its brokers have different ones."""


def find_replicas(log_dirs: LogDirs, partition: TopicPartition) -> list[ReplicaDirectory]:
    """The partition's replicas under `log.dirs`, by broker id. Deleted and damaged ones are not among them."""
    replicas = []
    bases = [Path(log_dirs)] if isinstance(log_dirs, str | Path) else log_dirs
    for slot in sorted(slot for base in bases for slot in base.glob(SLOT_PREFIX + "*")):
        path = slot / str(partition)
        meta = read_meta(slot)
        if meta is not None and path.is_dir():
            replicas.append(ReplicaDirectory(meta.broker_id, partition, path))
    return sorted(replicas, key=lambda replica: (replica.broker_id, replica.path))


def read_batches(replica: ReplicaDirectory, up_to_offset: int) -> Iterator[Frame]:
    """The stored batches that end at or below `up_to_offset` (exclusive), in order, their CRCs checked.

    Raises DamagedLogError.
    """
    for base_offset in _segments(replica.path):
        if base_offset >= up_to_offset:
            return
        yield from _segment_batches(replica.path, base_offset, up_to_offset)


def _segments(path: Path) -> list[int]:
    return sorted(int(file.stem) for file in path.glob("*" + INDEX_SUFFIX) if file.stem.isdecimal())


def _segment_batches(path: Path, base_offset: int, up_to_offset: int) -> Iterator[Frame]:
    arrow_path, index_path = segment_paths(path, base_offset)
    packed = index_path.read_bytes()
    # A broker may be writing: a last entry that is there only in part is not an entry yet.
    entries = EntryIndex.from_bytes(packed[: len(packed) // ENTRY_BYTES * ENTRY_BYTES]).entries
    count = sum(header_at(entries, at).next_offset <= up_to_offset for at in range(len(entries)))
    if not count:
        return
    check_chain(entries[:count], base_offset)
    with arrow_path.open("rb") as file:
        for entry in entries[:count]:
            header = unpack_header(entry.tobytes())
            file.seek(int(entry["position"]))
            message = file.read(header.length)
            if len(message) != header.length or crc32c(message) != header.message_crc:
                raise DamagedLogError(f"{arrow_path}: the batch at offset {header.base_offset} fails its CRC")
            yield Frame(header, message)


def compare_replicas(
    log_dirs: LogDirs, partition: TopicPartition, brokers: Sequence[int], *, up_to_offset: int
) -> tuple[ReplicaDifference, ...]:
    """How the replicas on these brokers differ below `up_to_offset`, the high watermark; empty when they do not.

    It compares the index entries (except the position), the messages, and the base offsets of the segments. Raises
    DamagedLogError for a replica that cannot be read.
    """
    here = {replica.broker_id: replica for replica in find_replicas(log_dirs, partition)}
    missing = [ReplicaDifference(partition, 0, f"broker {b} has no replica") for b in brokers if b not in here]
    present = [here[broker] for broker in brokers if broker in here]
    if not present:
        return tuple(missing)
    first, *others = present
    differences = list(missing)
    for other in others:
        differences += _compare(first, other, up_to_offset)
    if _end(first, up_to_offset) < up_to_offset:
        differences.append(
            ReplicaDifference(partition, up_to_offset, f"broker {first.broker_id}'s replica ends before")
        )
    return tuple(differences)


def _end(replica: ReplicaDirectory, up_to_offset: int) -> int:
    end = 0
    for frame in read_batches(replica, up_to_offset):
        end = frame.header.next_offset
    return end


def _compare(one: ReplicaDirectory, other: ReplicaDirectory, up_to_offset: int) -> Iterator[ReplicaDifference]:
    names = f"brokers {one.broker_id} and {other.broker_id}"
    for left, right in zip_longest(read_batches(one, up_to_offset), read_batches(other, up_to_offset)):
        if left is None or right is None:
            short, present = (one, right) if left is None else (other, left)
            yield ReplicaDifference(
                one.partition, present.header.base_offset, f"broker {short.broker_id} lacks the batch"
            )
            return  # What follows is missing as well.
        if pack_header(left.header) != pack_header(right.header):
            differing = [f for f in left.header._fields if getattr(left.header, f) != getattr(right.header, f)]
            detail = f"{names} differ in the entry's {', '.join(differing)}"
            yield ReplicaDifference(one.partition, left.header.base_offset, detail)
        elif bytes(left.message) != bytes(right.message):
            yield ReplicaDifference(one.partition, left.header.base_offset, f"{names} differ in the message")
    if [b for b in _segments(one.path) if b < up_to_offset] != [b for b in _segments(other.path) if b < up_to_offset]:
        yield ReplicaDifference(one.partition, 0, f"{names} have rolled at different offsets")


def stored_values(replica: ReplicaDirectory, column: str, up_to_offset: int) -> Iterator[Stored]:
    """Every record's value of a binary column, as it lies on the disk, to tell a lost value from one not delivered.

    Raises UnknownTopicOrPartitionError when the replica is not there, InvalidDataError for a column of another type.
    """
    if not replica.path.is_dir():
        raise UnknownTopicOrPartitionError(f"{replica.path} does not exist")
    where = f"broker {replica.broker_id}"
    for base_offset in _segments(replica.path):
        schema = _schema(replica.path, base_offset)
        for frame in _segment_batches(replica.path, base_offset, up_to_offset):
            if verify_stored(frame.message) != frame.header:
                raise DamagedLogError(f"{replica.path}: message and index disagree at {frame.header.base_offset}")
            values = decode_batch(frame.message, schema, [column]).column(0).to_pylist()
            for delta, value in zip(row_deltas(*frame).tolist(), values, strict=True):
                if not isinstance(value, bytes):
                    raise InvalidDataError(f"column {column!r} holds {value!r}, which is not binary")
                yield Stored(replica.partition, frame.header.base_offset + delta, value, where)


def _schema(path: Path, base_offset: int) -> pa.Schema:
    try:
        with segment_paths(path, base_offset)[0].open("rb") as file:
            return pa.ipc.open_stream(file).schema
    except pa.ArrowException as error:
        raise DamagedLogError(f"{path}: segment {base_offset} has no schema: {error}") from None
