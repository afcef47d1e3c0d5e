"""The keys of a topic's stored rows, and which rows are tombstones: of many batches at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from spark_broker.errors import CorruptMessageError
from spark_broker.native_calls import native_calls
from spark_broker.protocol.arrays import to_numpy
from spark_broker.protocol.arrow_message import row_deltas
from spark_broker.protocol.frame import ROW_OFFSETS
from spark_broker.protocol.keys import key_array, with_key_columns
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from spark_broker.protocol.schema_ids import schema_at
from spark_broker.storage.log_view import Chunk

Mask = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]


class KeyedRows:
    """A tombstone is a row with a key and nothing else: of Kafka's record one whose value is null; of a typed topic one
    whose columns are all null, but those of the key and of the timestamp.
    """

    def __init__(
        self,
        schemas: Sequence[pa.Schema],
        schema_messages: Sequence[bytes],
        key_columns: Sequence[str],
        timestamp_column: str = "",
    ) -> None:
        """`schemas[i]` and `schema_messages[i]` are those of schema id i, as far as it is known."""
        self._schemas = tuple(schemas)
        self._schema_messages = tuple(schema_messages)
        self._key_columns = tuple(key_columns)
        self._timestamp_column = timestamp_column

    def schema_of(self, schema_id: int) -> pa.Schema:
        """Raises UnknownSchemaError. So does everything here that looks at rows."""
        return schema_at(self._schemas, schema_id)

    def schema_message(self, schema_id: int) -> bytes:
        """The IPC message of the schema. Raises UnknownSchemaError."""
        return schema_at(self._schema_messages, schema_id)

    def keys(self, chunk: Chunk) -> pa.Array:
        """The key of each row (binary), null where it has none. Raises CorruptMessageError."""
        stored = self.schema_of(chunk.schema_id)
        there = [name for name in self._key_columns if name in stored.names]
        if not there:
            return pa.nulls(chunk.row_count, pa.binary())
        rows = with_key_columns(self._columns(chunk, there), self._key_columns, self._schemas[-1])
        return key_array(rows, self._key_columns)

    def tombstones(self, chunk: Chunk) -> Mask:
        """Which rows have no value. Those without a key are no tombstones. Raises CorruptMessageError."""
        names = self._value_columns(self.schema_of(chunk.schema_id))
        if not names:
            return np.zeros(chunk.row_count, np.bool_)
        columns = self._columns(chunk, names).columns
        return reduce(np.logical_and, [to_numpy(column.is_null()) for column in columns])

    def _value_columns(self, schema: pa.Schema) -> list[str]:
        if schema.equals(DEFAULT_SCHEMA):
            return ["value"]
        return [name for name in schema.names if name not in (*self._key_columns, self._timestamp_column)]

    def _columns(self, chunk: Chunk, names: Sequence[str]) -> pa.RecordBatch:
        """These columns of all rows. The messages lie one after the other, as in a stream; only these are inflated."""
        schema = self.schema_of(chunk.schema_id)
        stream = pa.py_buffer(b"".join((self.schema_message(chunk.schema_id), chunk.data)))
        fields = sorted({schema.get_field_index(name) for name in names})
        try:
            with native_calls:
                table = _read_stream(stream, fields)
            columns = [table.column(name).combine_chunks() for name in names]
        except MemoryError:
            raise  # It says nothing of the bytes. ArrowMemoryError is an ArrowException, too.
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptMessageError(f"stored batches do not decode: {error}") from None
        return pa.RecordBatch.from_arrays(columns, names=list(names))


def _read_stream(stream: pa.Buffer, fields: list[int]) -> pa.Table:
    with pa.ipc.open_stream(stream, options=pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)) as reader:
        return reader.read_all()


def offsets_of(chunk: Chunk) -> Offsets:
    """The offset of each row."""
    counts = chunk.row_counts
    starts = np.cumsum(counts) - counts
    bases = np.array([frame.header.base_offset for frame in chunk.frames], np.int64)
    offsets: Offsets = np.arange(chunk.row_count, dtype=np.int64) + np.repeat(bases - starts, counts)
    for frame, start in zip(chunk.frames, starts.tolist(), strict=True):
        header = frame.header
        if header.attributes & ROW_OFFSETS and header.row_count:
            offsets[start : start + header.row_count] = header.base_offset + row_deltas(*frame)
    return offsets
