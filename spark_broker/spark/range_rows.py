"""A stream whose rows are ranges of offsets and no records (`ranges=true`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from spark_broker.protocol.arrays import array_of
from spark_broker.spark.ranges import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

COLUMNS = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("topicId", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("startOffset", pa.int64()),
        pa.field("endOffset", pa.int64()),
    ]
)
"""What the rows of a stream have with `ranges=true`. `endOffset` is exclusive."""


class Ranges(NamedTuple):
    """What the only task of a micro-batch of ranges gets."""

    parts: tuple[OffsetRange, ...]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The ranges as rows."""
        rows = [(part.topic, part.topic_id, part.partition, part.start, part.end) for part in self.parts]
        values = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
        arrays = [array_of(list(column), field.type) for column, field in zip(values, COLUMNS, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=COLUMNS)


def ranges_schema() -> StructType:
    """The schema of a stream with `ranges=true`."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(COLUMNS)
