"""Gathers single records of one partition, as Kafka's record, for a micro-batch."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType

import numpy as np
import pyarrow as pa

from spark_broker.client import given
from spark_broker.client.send_result import FutureRecordMetadata, SendResult
from spark_broker.client.unseen import Unseen
from spark_broker.errors import InvalidDataError, InvalidTimestampError, MessageTooLargeError
from spark_broker.interrupts import Turn
from spark_broker.model import TopicPartition
from spark_broker.pages import page
from spark_broker.protocol.arrays import nulls
from spark_broker.protocol.schema import DEFAULT_SCHEMA, TIMESTAMP_TYPE
from spark_broker.times import LATEST_US

Headers = Mapping[str, bytes | None] | Iterable[tuple[str, bytes | None]]

Pairs = list[tuple[bytes, bytes | None]]
"""The headers of a record: names in UTF-8, and values."""

RECORD_OVERHEAD_BYTES = 32
"""What a record takes besides its bytes: offsets, timestamp, validity."""

HEADER_OVERHEAD_BYTES = 9
"""What a header takes besides its bytes: two offsets, validity."""

_ENCODE_HINT = (
    f"Encode it (`str(x)`, `json.dumps(x)`), or create the topic with columns and use append(): {page('typed-topics')}."
)
_MAX_COLUMN_BYTES = 2**31 - 1
_HEADERS_TYPE = DEFAULT_SCHEMA.field("headers").type


def to_bytes(data: object, what: str) -> bytes | None:
    """Text becomes UTF-8. Raises InvalidDataError."""
    if data is None or isinstance(data, bytes):
        return data
    if isinstance(data, str):
        try:
            return data.encode()
        except UnicodeEncodeError as error:
            raise InvalidDataError(f"{what} is not Unicode text: {error}") from None
    if isinstance(data, bytearray | memoryview):
        try:
            return bytes(data)
        except ValueError as error:
            raise InvalidDataError(f"{what}: {error}") from None  # a view that was released
    raise InvalidDataError(f"{what} is {type(data).__name__}; it must be bytes, text or None", hint=_ENCODE_HINT)


def to_pairs(headers: Headers) -> tuple[Pairs, int]:
    """The headers and the bytes that they take. Raises InvalidDataError."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        named = [(name, value) for name, value in pairs]
    except (TypeError, ValueError):
        raise InvalidDataError("headers are pairs of a name and bytes") from None
    if not all(isinstance(name, str) for name, _ in named):
        raise InvalidDataError("the name of a header is text")
    checked = [(name, to_bytes(value, f"header {name!r}")) for name, value in named]
    encoded = [(to_bytes(name, "the name of a header") or b"", value) for name, value in checked]
    return encoded, sum(len(name) + len(value or b"") + HEADER_OVERHEAD_BYTES for name, value in encoded)


def to_timestamp_us(timestamp: object) -> int:
    """Microseconds since 1970. Raises InvalidDataError or InvalidTimestampError."""
    timestamp_us = given.moment_us(timestamp, "timestamp")
    if timestamp_us < 0:
        raise InvalidTimestampError(f"timestamp {timestamp} is before 1970")
    if timestamp_us > LATEST_US:
        raise InvalidTimestampError(f"timestamp {timestamp} is after the year 9999 of UTC: no reader could show it")
    return timestamp_us


class RecordBuilder:
    """Records of one partition that wait for `linger.ms` or `batch.size`. Guarded by its slot's lock.

    `room_bytes` is what is left of `batch.size`. It is negative where a single record is larger.
    """

    __slots__ = ("_headers", "_keys", "_timestamps_us", "_values", "first_at_s", "result", "room_bytes")

    def __init__(self, room_bytes: int, unseen: Unseen) -> None:
        self.room_bytes = room_bytes
        self.first_at_s = time.monotonic()
        self.result = SendResult(unseen)
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._headers: dict[int, Pairs] = {}  # by the record's index; most records have none
        self._timestamps_us = array("q")

    def add(
        self, key: bytes | None, value: bytes | None, headers: Pairs | None, timestamp_us: int, size_bytes: int
    ) -> FutureRecordMetadata:
        """Take a record, whether there is room or not. What a signal handler raises meanwhile leaves none of it."""
        values = self._values
        index = len(values)
        try:
            future = FutureRecordMetadata(self.result, index)
            if headers is not None:
                self._headers[index] = headers
            values.append(value)
            self._keys.append(key)
            self._timestamps_us.append(timestamp_us)
        except BaseException:
            self._headers.pop(index, None)
            for column in (values, self._keys, self._timestamps_us):
                del column[index:]
            raise
        self.room_bytes -= size_bytes
        return future

    def seal(self) -> None:
        """No record is added any more."""
        self.result.records = len(self._values)

    def build(self) -> pa.RecordBatch:
        """The records as one batch of Kafka's record. Raises MessageTooLargeError for more than Arrow takes."""
        timestamps = pa.py_buffer(self._timestamps_us)
        arrays = [
            _binary_array(self._keys),
            _binary_array(self._values),
            self._header_array(),
            pa.Array.from_buffers(TIMESTAMP_TYPE, len(self._values), [None, timestamps], 0),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=DEFAULT_SCHEMA)

    def _header_array(self) -> pa.Array:
        count = len(self._values)
        if not self._headers:
            return nulls(count, _HEADERS_TYPE)
        records = [self._headers.get(index) for index in range(count)]
        pairs = [pair for record in records for pair in record or ()]
        names = _binary_array([name for name, _ in pairs], pa.string())
        values = _binary_array([value for _, value in pairs])
        structs = pa.StructArray.from_arrays([names, values], fields=list(_HEADERS_TYPE.value_type))
        offsets = _offsets([len(record or ()) for record in records])
        return pa.Array.from_buffers(_HEADERS_TYPE, count, [_validity(records), offsets], children=[structs])


def _binary_array(items: Sequence[bytes | None], kind: pa.DataType = pa.binary()) -> pa.Array:  # noqa: B008
    """The items as an array. `pa.array` would be slower, and would import pandas."""
    kinds = set(map(type, items))
    if kinds == {NoneType}:
        return pa.nulls(len(items), kind)
    validity = _validity(items) if NoneType in kinds else None
    values = [item or b"" for item in items]
    return pa.Array.from_buffers(
        kind, len(items), [validity, _offsets([*map(len, values)]), pa.py_buffer(b"".join(values))]
    )


def _offsets(lengths: Sequence[int]) -> pa.Buffer:
    """Where each item begins, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > _MAX_COLUMN_BYTES:
        raise MessageTooLargeError(f"{offsets[-1]} bytes are more than a column of a batch takes")
    return pa.py_buffer(offsets.astype(np.int32))


def _validity(items: Sequence[object]) -> pa.Buffer:
    return pa.py_buffer(np.packbits([item is not None for item in items], bitorder="little"))


class Slot:
    """Where a partition's records gather. `order` is taken while a builder is handed on: none overtakes another.

    `order_of`: the thread that holds it; 0: none. `sealed`: builders that are full or due, the oldest first, until they
    are handed on; changed under `lock`, and taken off under `order`.
    """

    __slots__ = ("builder", "lock", "order", "order_of", "sealed", "topic_partition")

    def __init__(self, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self.order = Turn()
        self.order_of = 0
        self.lock = threading.Lock()
        self.builder: RecordBuilder | None = None
        self.sealed: list[RecordBuilder] = []
