"""Batches of Kafka's record, whole and with rows removed, as logs of compacted topics hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from spark_broker.protocol.arrow_message import assign, decode_batch, encode_batch, encode_compacted, encode_marker
from spark_broker.protocol.frame import TRANSACTIONAL, Frame
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.storage.config import LogConfig
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.start_kind import StartKind

KeyedRow = tuple[bytes | None, bytes | None]


def keyed_frame(
    base_offset: int,
    *rows: KeyedRow,
    pid: int = -1,
    sequence: int = -1,
    txn: bool = False,
    first: bool = False,
    compression: str | None = None,
) -> Frame:
    """A batch of these keys and values, as a leader stores it. `pid`: of the producer, whose epoch is 0."""
    batch = pa.RecordBatch.from_pylist([{"key": key, "value": value} for key, value in rows], schema=DEFAULT_SCHEMA)
    message = encode_batch(
        batch,
        producer_id=pid,
        producer_epoch=0 if pid >= 0 else -1,
        base_sequence=sequence,
        attributes=TRANSACTIONAL if txn else 0,
        compression=compression,
    )
    return stored(message, base_offset, first=first)


def marker_frame(base_offset: int, pid: int, *, committed: bool) -> Frame:
    message = encode_marker(DEFAULT_SCHEMA, producer_id=pid, producer_epoch=1, committed=committed, schema_id=0)
    return stored(message, base_offset)


def stored(message: bytes, base_offset: int, *, first: bool = False) -> Frame:
    """What an encoded batch becomes in the log."""
    header, assigned = assign(
        message, base_offset=base_offset, leader_epoch=0, append_time_ms=0, max_timestamp_us=0, first_of_segment=first
    )
    return Frame(header, bytes(assigned))


def only(frame: Frame, kept: Sequence[int]) -> Frame:
    """The batch with only these of its rows left."""
    left = decode_batch(frame.message, DEFAULT_SCHEMA).take(pa.array(kept, pa.int64()))
    return encode_compacted(left, frame.header, np.array(kept, np.int64))


def keyed_log(directory: Path, frames: Sequence[Frame] = ()) -> PartitionLog:
    """A log that holds these batches."""
    log = PartitionLog.open(directory, LogConfig(), lambda _: schema_to_bytes(DEFAULT_SCHEMA), start=StartKind.CLEAN)
    for header, message in frames:
        log.append(header, message)
    return log
