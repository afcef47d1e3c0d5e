"""Single records on their way to becoming a micro-batch: Kafka's record, gathered for one partition."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import NamedTuple

import pyarrow as pa

from spark_broker.errors import InvalidDataError, InvalidTimestampError
from spark_broker.model import RecordMetadata
from spark_broker.protocol.schema import DEFAULT_SCHEMA

Headers = Mapping[str, bytes | None] | Iterable[tuple[str, bytes | None]]

RECORD_OVERHEAD_BYTES = 32
"""What a record takes besides its bytes: offsets, timestamp, validity."""

_MAX_TIMESTAMP_MS = 2**63 // 1000 - 1


class Record(NamedTuple):
    """One record, checked."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    timestamp_us: int
    size_bytes: int


def make_record(
    value: bytes | str | None,
    key: bytes | str | None,
    headers: Headers | None,
    timestamp: datetime | int | None,
) -> Record:
    """Check what `send` was given; text becomes UTF-8. Raises InvalidDataError or InvalidTimestampError."""
    key_bytes, value_bytes, pairs = _to_bytes(key, "key"), _to_bytes(value, "value"), _to_headers(headers)
    size_bytes = len(key_bytes or b"") + len(value_bytes or b"") + RECORD_OVERHEAD_BYTES
    if pairs:
        size_bytes += sum(len(name) + len(data or b"") for name, data in pairs)
    return Record(key_bytes, value_bytes, pairs, _to_us(timestamp), size_bytes)


def _to_bytes(data: object, what: str) -> bytes | None:
    if data is None or isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise InvalidDataError(f"{what} is {type(data).__name__}; it must be bytes, text or None")


def _to_headers(headers: Headers | None) -> list[tuple[str, bytes | None]] | None:
    if headers is None:
        return None
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        found = [(name, _to_bytes(value, f"header {name!r}")) for name, value in pairs]
    except (TypeError, ValueError):
        raise InvalidDataError("headers are pairs of a name and bytes") from None
    if not all(isinstance(name, str) for name, _ in found):
        raise InvalidDataError("the name of a header is text")
    return found


def _to_us(timestamp: object) -> int:
    if timestamp is None:
        return time.time_ns() // 1000
    if isinstance(timestamp, datetime):
        # As everywhere in Python, a datetime without a zone is local time.
        moment = timestamp.astimezone(UTC)
        return int((moment - datetime(1970, 1, 1, tzinfo=UTC)) / _MICROSECOND)
    if isinstance(timestamp, bool) or not isinstance(timestamp, int):
        raise InvalidDataError(f"timestamp is {type(timestamp).__name__}; it must be a datetime or int milliseconds")
    if not 0 <= timestamp <= _MAX_TIMESTAMP_MS:
        raise InvalidTimestampError(f"{timestamp} is no time in milliseconds since 1970")
    return timestamp * 1000


_MICROSECOND = datetime.resolution


def _header_rows(record: Record) -> list[dict[str, object]] | None:
    return None if record.headers is None else [{"key": name, "value": data} for name, data in record.headers]


class RecordBuilder:
    """Records of one partition that wait for `linger.ms` or `batch.size`. Guarded by its slot's lock.

    `alone`: it holds one record, and takes no other.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self.records: list[Record] = []
        self.futures: list[Future[RecordMetadata]] = []
        self.size_bytes = 0
        self.first_at_s = time.monotonic()

    def fits(self, record: Record, limit_bytes: int, *, alone: bool) -> bool:
        return not (alone or self._alone) and self.size_bytes + record.size_bytes <= limit_bytes

    def add(self, record: Record) -> Future[RecordMetadata]:
        future: Future[RecordMetadata] = Future()
        future.set_running_or_notify_cancel()
        self.records.append(record)
        self.futures.append(future)
        self.size_bytes += record.size_bytes
        return future

    def build(self) -> pa.RecordBatch:
        """The records as one batch of Kafka's record."""
        columns = [
            [record.key for record in self.records],
            [record.value for record in self.records],
            [_header_rows(record) for record in self.records],
            [record.timestamp_us for record in self.records],
        ]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, DEFAULT_SCHEMA, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=DEFAULT_SCHEMA)


class Slot:
    """Where a partition's records gather. `order` is held while a builder is handed on: none overtakes another."""

    def __init__(self) -> None:
        self.order = threading.Lock()
        self.lock = threading.Lock()
        self.builder: RecordBuilder | None = None
