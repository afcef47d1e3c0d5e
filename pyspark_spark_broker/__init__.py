"""What Spark itself finds: `format("spark_broker")` works without `register()`.

Spark imports every top-level module named `pyspark_*` unguarded, so this one imports only pyspark: whatever else were
missing would break every Python data source of the session.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """Topics of a spark-broker cluster as DataFrames. The options are those of Spark's Kafka source."""

    @classmethod
    def name(cls) -> str:
        return "spark_broker"

    def schema(self) -> StructType:
        from spark_broker.spark.source import read_schema

        return read_schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from spark_broker.spark.source import batch_reader

        return batch_reader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from spark_broker.spark.source import stream_reader

        return stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from spark_broker.spark.writer import batch_writer

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        # `overwrite`: of the output mode `complete`, whose rows are appended as in Kafka's sink.
        from spark_broker.spark.writer import stream_writer

        return stream_writer(self.options, schema)
