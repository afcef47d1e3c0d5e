"""A data source of few lines, which reads and writes Arrow files: no data source in Python is faster in Spark."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

NAME = "bare_arrow"
BATCH_ROWS = 10_000
"""Rows of a batch, as Spark's own. Larger batches were no faster."""


class BareSource(DataSource):
    """Options: `schema` (DDL) and `directory`, whose files are one partition each."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return self.options["schema"]

    def reader(self, schema: StructType) -> BareReader:
        return BareReader(self.options["directory"])

    def streamReader(self, schema: StructType) -> BareStreamReader:
        return BareStreamReader(self.options["directory"])

    def writer(self, schema: StructType, overwrite: bool) -> BareWriter:
        return BareWriter(self.options["directory"])


class BareReader(DataSourceReader):
    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(str(path)) for path in sorted(self._directory.iterdir())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return batches_of(partition.value)


class BareStreamReader(DataSourceStreamReader):
    """Its offset is 0 before everything, and 1 after."""

    def __init__(self, directory: str) -> None:
        self._batch = BareReader(directory)

    def initialOffset(self) -> dict[str, Any]:
        return {"offset": 0}

    def latestOffset(self, start: dict[str, Any] | None = None, limit: object = None) -> dict[str, Any]:
        return {"offset": 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return self._batch.partitions() if start != end else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return batches_of(partition.value)


class BareWriter(DataSourceArrowWriter):
    """Each task writes one file."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        first = next(iterator)
        with pa.ipc.new_stream(self._directory / uuid.uuid4().hex, first.schema) as file:
            file.write_batch(first)
            for batch in iterator:
                file.write_batch(batch)
        return WriterCommitMessage()


def batches_of(path: str) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(path) as file, pa.ipc.open_stream(file) as batches:
        yield from batches


def write_files(rows: DataFrame, directory: Path, files: int) -> None:
    """Write the rows as this many Arrow files."""
    table = rows.toArrow()
    directory.mkdir()
    size = -(-table.num_rows // files)
    for number in range(files):
        part = table.slice(number * size, size).combine_chunks()
        with pa.ipc.new_stream(directory / f"{number}.arrow", table.schema) as file:
            file.write_table(part, max_chunksize=BATCH_ROWS)


def bare_options(spark: SparkSession, schema: StructType, directory: Path) -> dict[str, str]:
    """Register the source. Returns its options for these files."""
    spark.dataSource.register(BareSource)
    columns = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in schema.fields)
    return {"schema": columns, "directory": str(directory)}


def read_files(spark: SparkSession, schema: StructType, directory: Path) -> DataFrame:
    """The rows of these files, each file a partition."""
    return spark.read.format(NAME).options(**bare_options(spark, schema, directory)).load()
