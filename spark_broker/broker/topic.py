"""A topic as a broker uses it: schemas parsed, settings resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_broker.config import INT64_MAX, TopicConfig
from spark_broker.controller.image import TopicState
from spark_broker.controller.topic_history import TopicHistory
from spark_broker.core.compaction import CompactionPolicy
from spark_broker.core.events import Beginning
from spark_broker.errors import DivergedLogError
from spark_broker.protocol.arrays import scalar_of, to_numpy
from spark_broker.protocol.arrow_message import ParsedBatch
from spark_broker.protocol.frame import NO_TIMESTAMP
from spark_broker.protocol.schema import DEFAULT_SCHEMA, columns_stored
from spark_broker.protocol.schema_ids import is_known, parsed, schema_at
from spark_broker.storage.keyed_rows import KeyedRows

DEFAULT_TIMESTAMP_COLUMN = "timestamp"

FEW_ROWS = 128
"""For so few numbers, Python is quicker than numpy."""

Timestamps = npt.NDArray[np.int64]


class NewestTimestamp(NamedTuple):
    """Of a batch. `us`: UTC microseconds; NO_TIMESTAMP: no record has one. `lacks_some`: not every record has one."""

    us: int
    lacks_some: bool

    def with_append_time(self, append_time_ms: int) -> int:
        """The newest timestamp, where the append time counts for a record that has none."""
        return max(self.us, append_time_ms * 1000) if self.lacks_some else self.us


@dataclass(frozen=True, slots=True)
class Topic:
    """`schemas[i]` is the schema of id i, as far as it is known (`schema_of`); the last one is current.

    `history`: what is in the topic's Delta table; None: the topic has no table. `log_starts`: before which offset each
    partition's records were deleted; a partition beyond these lost none so.
    """

    name: str
    topic_id: str
    schemas: tuple[pa.Schema, ...]
    schema_bytes: tuple[bytes, ...]
    config: TopicConfig
    timestamp_column: str
    history: TopicHistory | None = None
    log_starts: tuple[int, ...] = ()

    @staticmethod
    def of(state: TopicState) -> Topic:
        config = TopicConfig.parse(state.config)
        schemas = parsed(state.schemas)
        column = config.timestamp_column
        if not column and schemas and schemas[-1].equals(DEFAULT_SCHEMA):
            column = DEFAULT_TIMESTAMP_COLUMN
        has_table = bool(config.delta_path) and not state.internal
        history = (state.history or TopicHistory()) if has_table else None
        return Topic(state.name, state.topic_id, schemas, state.schemas, config, column, history, state.log_starts)

    @property
    def drops_what_is_tiered(self) -> bool:
        """Brokers keep no segment that is in the topic's table (storage.format=delta)."""
        return self.history is not None and self.config.storage_format == "delta"

    @property
    def is_compacted(self) -> bool:
        """Whether brokers keep only the last record of each key (cleanup.policy=compact)."""
        return "compact" in self.config.cleanup_policy

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Columns of a record's key: `key.columns`, or `key` of Kafka's record."""
        return self.config.key_columns or (("key",) if self.schemas[-1].equals(DEFAULT_SCHEMA) else ())

    @property
    def keyed_rows(self) -> KeyedRows:
        return KeyedRows(self.schemas, self.schema_bytes, self.key_columns, self.timestamp_column)

    @property
    def compaction_policy(self) -> CompactionPolicy:
        return CompactionPolicy(
            self.config.min_cleanable_dirty_ratio,
            self.config.min_compaction_lag_ms,
            self.config.max_compaction_lag_ms,
            self.config.delete_retention_ms,
        )

    @property
    def schema_id(self) -> int:
        """Of the current schema."""
        return len(self.schemas) - 1

    def knows_schema(self, schema_id: int) -> bool:
        return is_known(self.schemas, schema_id)

    def schema_of(self, schema_id: int) -> pa.Schema:
        """Raises UnknownSchemaError."""
        return schema_at(self.schemas, schema_id, f"topic {self.name}")

    def schema_message(self, schema_id: int) -> bytes:
        """The IPC message of the schema. Raises UnknownSchemaError."""
        return schema_at(self.schema_bytes, schema_id, f"topic {self.name}")

    def deleted_before(self, partition: int) -> int:
        """Records of the partition before this offset were deleted; 0: none were."""
        return self.log_starts[partition] if partition < len(self.log_starts) else 0

    @property
    def table_ends(self) -> tuple[int, ...] | None:
        """Up to which offset (exclusive) brokers may delete, by partition, because the topic's table has it.

        None: the topic has no table. Empty, too, where a tierer did not find the history in the table: what brokers
        have may be the last copy then.
        """
        if self.history is None:
            return None
        return () if self.history.missing else self.history.ends

    def check_table_is_found(self, has_records: bool) -> None:
        """Raises DivergedLogError where a log would be emptied for what the table has, and was not found there."""
        if has_records and self.history is not None and self.history.missing:
            raise DivergedLogError("its topic's table was not found: these may be the last copies of its records")

    def history_end(self, partition: int) -> int:
        """Up to which offset (exclusive) the partition is in the topic's table; -1: the topic has none."""
        return -1 if self.history is None else self.history.range_of(partition)[1]

    def has_in_table(self, partition: int, offset: int) -> bool:
        """Whether the topic's table has this offset of the partition, as far as this broker knows."""
        start, end = (0, 0) if self.history is None else self.history.range_of(partition)
        return max(start, self.deleted_before(partition)) <= offset < end

    def beginning(self, partition: int) -> Beginning:
        """A log of the partition begins there at least: below it are the table's rows, or deleted records."""
        end, epoch = self.history_end(partition), -1 if self.history is None else self.history.end_epoch(partition)
        return Beginning(max(end, self.deleted_before(partition)), end, epoch)

    def retained_from(self, partition: int) -> int:
        """Retention deletes nothing from this offset on: it is not in the topic's table. Without a table: no offset."""
        ends = self.table_ends
        if ends is None:
            return INT64_MAX
        return ends[partition] if partition < len(ends) else 0

    def newest_timestamp(self, parsed: ParsedBatch) -> NewestTimestamp:
        """The newest timestamp of a batch. Rows of an older schema may not have the column.

        Without Arrow's kernels: two of them cost as much as the rest of a small batch.
        """
        column = parsed.column(self.timestamp_column) if self.timestamp_column else None
        if column is None or column.null_count == len(column):
            return NewestTimestamp(NO_TIMESTAMP, lacks_some=True)
        if column.null_count or len(column) > FEW_ROWS:
            return NewestTimestamp(int(_in_us(column, NO_TIMESTAMP).max()), lacks_some=column.null_count > 0)
        start = 8 * column.offset
        times = memoryview(column.buffers()[1])[start : start + 8 * len(column)].cast("q")
        return NewestTimestamp(max(times), lacks_some=False)

    def timestamp_columns(self, schema_id: int) -> list[str] | None:
        """The columns from which the timestamps of rows of this schema come; None: each is as good as another."""
        if not self.timestamp_column:
            return None
        return columns_stored(self.schema_of(schema_id), [self.timestamp_column])

    def timestamps_us(self, batch: pa.RecordBatch, append_time_ms: int) -> Timestamps:
        """Every record's timestamp, UTC microseconds; the append time where a record has none."""
        index = batch.schema.get_field_index(self.timestamp_column) if self.timestamp_column else -1
        if index < 0:  # Rows of an older schema may not have the column.
            return np.full(batch.num_rows, append_time_ms * 1000, np.int64)
        return _in_us(batch.column(index), append_time_ms * 1000)

    def first_since(self, timestamp_us: int, batch: pa.RecordBatch, append_time_ms: int) -> tuple[int, int] | None:
        """Row and timestamp (us) of the batch's first record at or after the time; None: there is none.

        In numpy: a client may ask for ten thousand partitions in one call, and Arrow's kernels take ten times as long.
        """
        times = self.timestamps_us(batch, append_time_ms)
        since = times >= timestamp_us
        row = int(since.argmax()) if len(since) else 0
        return (row, int(times[row])) if since[row : row + 1].any() else None


def _in_us(column: pa.Array, null_us: int) -> Timestamps:
    """`null_us`: the time of a row that has none."""
    if column.null_count or not len(column):
        times = pc.fill_null(column.view(pa.int64()), scalar_of(null_us, pa.int64()))
        in_us: Timestamps = to_numpy(times)
        return in_us
    return np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)


Topics = Mapping[str, Topic]
