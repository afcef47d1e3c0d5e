"""The keys of a topic's stored rows, and which rows are tombstones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_broker.protocol.arrays import to_numpy
from spark_broker.protocol.arrow_message import decode_batch
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.keys import key_array
from spark_broker.protocol.schema import DEFAULT_SCHEMA

Mask = npt.NDArray[np.bool_]


class KeyedRows:
    """A tombstone is a row with a key and nothing else: of Kafka's record one whose value is null; of a typed topic one
    whose columns are all null, but those of the key and of the timestamp.
    """

    def __init__(self, schemas: Sequence[pa.Schema], key_columns: Sequence[str], timestamp_column: str = "") -> None:
        """`schemas[i]` is the schema of id i."""
        self.schemas = tuple(schemas)
        self._key_columns = tuple(key_columns)
        self._timestamp_column = timestamp_column

    def schema_of(self, frame: Frame) -> pa.Schema:
        """The schema in which the batch is stored."""
        return self.schemas[frame.header.schema_id]

    def keys(self, frame: Frame) -> pa.Array:
        """Each row's key, null where it has none. Raises CorruptMessageError."""
        schema = self.schema_of(frame)
        if not set(self._key_columns) <= set(schema.names):
            return pa.nulls(frame.header.row_count, pa.binary())
        return key_array(decode_batch(frame.message, schema, self._key_columns), self._key_columns)

    def tombstones(self, frame: Frame) -> Mask:
        """Which rows delete their key. Raises CorruptMessageError."""
        names = self._value_columns(self.schema_of(frame))
        if not names:
            return np.zeros(frame.header.row_count, np.bool_)
        columns = decode_batch(frame.message, self.schema_of(frame), names).columns
        return reduce(np.logical_and, [to_numpy(column.is_null()) for column in columns])

    def _value_columns(self, schema: pa.Schema) -> list[str]:
        if schema.equals(DEFAULT_SCHEMA):
            return ["value"]
        return [name for name in schema.names if name not in (*self._key_columns, self._timestamp_column)]
