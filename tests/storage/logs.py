"""Logs of small batches for the storage tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from spark_broker.protocol.arrow_message import assign, encode_batch
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.schema import schema_to_bytes
from spark_broker.storage.config import LogConfig
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.retention import RetentionClock
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import SimFileSystem

SCHEMAS = {
    0: pa.schema([pa.field("n", pa.int64())]),
    1: pa.schema([pa.field("n", pa.int64()), pa.field("text", pa.string())]),
}


def schema_message(schema_id: int) -> bytes:
    return schema_to_bytes(SCHEMAS[schema_id])


def make_frame(
    base_offset: int,
    rows: int = 3,
    *,
    timestamp_us: int = 0,
    append_time_ms: int = 0,
    leader_epoch: int = 0,
    first: bool = False,
    schema_id: int = 0,
    value: int | None = None,
) -> Frame:
    """The batch at these offsets, as a leader would store it; row i of it holds its own offset, or `value`."""
    numbers = [base_offset + i if value is None else value for i in range(rows)]
    columns: list[pa.Array] = [pa.array(numbers, pa.int64())]
    if schema_id:
        columns.append(pa.array([f"row {n}" for n in numbers]))
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMAS[schema_id])
    header, message = assign(
        encode_batch(batch, schema_id=schema_id, max_timestamp_us=timestamp_us),
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        append_time_ms=append_time_ms,
        max_timestamp_us=timestamp_us,
        first_of_segment=first,
    )
    return Frame(header, bytes(message))


def open_log(
    directory: Path,
    start: StartKind = StartKind.CLEAN,
    config: LogConfig | None = None,
    fs: FileSystem = LOCAL,
) -> PartitionLog:
    return PartitionLog.open(directory, config or LogConfig(), schema_message, start=start, fs=fs)


def sim_directory() -> tuple[SimFileSystem, Path]:
    """A simulated machine, and an empty partition directory on its disk, durable."""
    fs, directory = SimFileSystem(), Path("/p-0")
    fs.mkdir(directory)
    fs.sync_directory(directory.parent)
    return fs, directory


def append_batch(
    log: PartitionLog,
    rows: int = 3,
    *,
    timestamp_us: int = 0,
    append_time_ms: int = 0,
    leader_epoch: int = 0,
    roll: bool = False,
    schema_id: int = 0,
    value: int | None = None,
) -> Frame:
    """Append as a leader does: it asks the log whether to roll, and keeps the running maximum timestamp."""
    frame = make_frame(log.log_end_offset, rows, schema_id=schema_id)
    first = roll or log.should_roll(len(frame.message), schema_id, append_time_ms)
    frame = make_frame(
        log.log_end_offset,
        rows,
        timestamp_us=max(timestamp_us, log.max_timestamp_us),
        append_time_ms=append_time_ms,
        leader_epoch=leader_epoch,
        first=first,
        schema_id=schema_id,
        value=value,
    )
    log.append(frame.header, frame.message)
    return frame


def filled(
    directory: Path, batches: Iterable[bool], config: LogConfig | None = None, fs: FileSystem = LOCAL
) -> tuple[PartitionLog, list[Frame]]:
    """A log with one batch for each item; a true item rolls first."""
    log = open_log(directory, config=config, fs=fs)
    return log, [append_batch(log, roll=roll) for roll in batches]


def apply_retention(log: PartitionLog, *, high_watermark: int, clock: RetentionClock) -> int:
    """Delete what retention does not keep. Returns the log start offset."""
    log.advance_log_start(log.retention_start(high_watermark=high_watermark, clock=clock))
    return log.log_start_offset


def everything(log: PartitionLog) -> list[Frame]:
    """All batches of the log."""
    frames: list[Frame] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        frames += log.read(offset, max_bytes=1 << 20, end_offset=log.log_end_offset)
        offset = frames[-1].header.next_offset
    return frames


def same(left: list[Frame], right: list[Frame]) -> bool:
    """Whether two runs of batches are equal, byte for byte."""
    return [(f.header, bytes(f.message)) for f in left] == [(f.header, bytes(f.message)) for f in right]
