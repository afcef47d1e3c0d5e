"""Replicas of a compacted topic, compared by what they say: each compacts for itself, so their files differ."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from spark_broker.core.batch import BatchInfo, batch_info
from spark_broker.errors import DamagedLogError
from spark_broker.model import TopicPartition
from spark_broker.protocol.arrow_message import decode_batch, row_deltas
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from spark_broker.storage.filesystem import LOCAL
from spark_broker.storage.segment_swap import unfinished_swap
from spark_broker.testing.replicas import (
    LogDirs,
    ReplicaDifference,
    ReplicaDirectory,
    find_replicas,
    read_batches,
)

SWAP_S = 30.0
"""A swap syncs a directory twice, which a busy disk makes slow."""


class KeyedRecord(NamedTuple):
    """A record of a topic with Kafka's record."""

    key: bytes
    value: bytes | None


Records = Mapping[int, KeyedRecord]
"""By offset."""


def compare_compacted_replicas(
    log_dirs: LogDirs, partition: TopicPartition, brokers: Sequence[int], *, up_to_offset: int
) -> tuple[ReplicaDifference, ...]:
    """How the replicas on these brokers differ below `up_to_offset`, the high watermark; empty when they do not.

    Every replica must have offsets without a hole, the same record wherever two have one, and the same last record of
    each key; a tombstone that is last may be gone. Only committed records count. Raises DamagedLogError for a replica
    that cannot be read.
    """
    here = {replica.broker_id: replica for replica in find_replicas(log_dirs, partition)}
    differences = [ReplicaDifference(partition, 0, f"broker {b} has no replica") for b in brokers if b not in here]
    present = [here[broker] for broker in brokers if broker in here]
    for replica in present:
        differences += _holes(replica, up_to_offset)
    records = {replica.broker_id: committed_records(replica, up_to_offset) for replica in present}
    for one, other in pairwise(present):
        names = f"brokers {one.broker_id} and {other.broker_id}"
        for offset, detail in _compare(records[one.broker_id], records[other.broker_id]):
            differences.append(ReplicaDifference(partition, offset, f"{names} differ in {detail}"))
    return tuple(differences)


def compacted_batches(replica: ReplicaDirectory, up_to_offset: int) -> list[Frame]:
    """As `read_batches`. Its broker may be running: a read that met a swap of segments is made again.

    Raises DamagedLogError or FileNotFoundError for a replica that is damaged, whose swap does not end in `SWAP_S`, or
    that is compacted faster than it can be read.
    """
    deadline, pause = time.monotonic() + SWAP_S, threading.Event()
    while True:
        before = _files(replica)
        try:
            return list(read_batches(replica, up_to_offset))
        except (FileNotFoundError, DamagedLogError):
            # In this order: a swap that ends in between has changed the files.
            met_a_swap = unfinished_swap(LOCAL, replica.path) or _files(replica) != before
            if not met_a_swap or time.monotonic() > deadline:
                raise
        pause.wait(0.01)


def _files(replica: ReplicaDirectory) -> set[tuple[str, int]]:
    """Names and inodes."""
    with os.scandir(replica.path) as entries:
        return {(entry.name, entry.inode()) for entry in entries}


def committed_records(replica: ReplicaDirectory, up_to_offset: int) -> dict[int, KeyedRecord]:
    """The replica's records below `up_to_offset`, without those of aborted and of open transactions."""
    records: dict[int, KeyedRecord] = {}
    open_: dict[int, dict[int, KeyedRecord]] = {}
    for frame in compacted_batches(replica, up_to_offset):
        batch = batch_info(frame.header)
        if batch.control:
            records.update(_ended(open_, batch))
        elif batch.transactional:
            open_.setdefault(batch.producer_id, {}).update(_rows(frame))
        else:
            records.update(_rows(frame))
    return records


def _ended(open_: dict[int, dict[int, KeyedRecord]], marker: BatchInfo) -> dict[int, KeyedRecord]:
    records = open_.pop(marker.producer_id, {})
    return {} if marker.aborted else records


def _rows(frame: Frame) -> dict[int, KeyedRecord]:
    batch = decode_batch(frame.message, DEFAULT_SCHEMA, ["key", "value"])
    offsets = (frame.header.base_offset + row_deltas(*frame)).tolist()
    records = zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
    return {offset: KeyedRecord(*record) for offset, record in zip(offsets, records, strict=True)}


def _holes(replica: ReplicaDirectory, up_to_offset: int) -> Iterator[ReplicaDifference]:
    end: int | None = None
    for frame in compacted_batches(replica, up_to_offset):
        if end is not None and frame.header.base_offset != end:
            yield ReplicaDifference(replica.partition, end, f"broker {replica.broker_id} has a hole")
        end = frame.header.next_offset
    if end != up_to_offset:
        yield ReplicaDifference(replica.partition, end or 0, f"broker {replica.broker_id}'s replica ends there")


def _compare(one: Records, other: Records) -> Iterator[tuple[int, str]]:
    """Where two replicas differ, and in what."""
    for offset in sorted(one.keys() & other.keys()):
        if one[offset] != other[offset]:
            yield offset, f"the record: {one[offset]} and {other[offset]}"
    last, other_last = _last_values(one), _last_values(other)
    for key in sorted(last.keys() | other_last.keys()):
        if last.get(key) != other_last.get(key):
            offset, _ = last.get(key) or other_last[key]
            yield offset, f"the last record of key {key!r}: {last.get(key)} and {other_last.get(key)}"


def _last_values(records: Records) -> dict[bytes, tuple[int, bytes]]:
    """Offset and value of the last record of each key that is not deleted."""
    last = {record.key: (offset, record.value) for offset, record in sorted(records.items())}
    return {key: (offset, value) for key, (offset, value) in last.items() if value is not None}
