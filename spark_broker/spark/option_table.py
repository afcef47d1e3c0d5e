"""The options of a read, in one table: names and defaults of Spark's Kafka source, and the options that this source
adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Query(Enum):
    """The kind of a query. Spark asks for the schema before it says which kind the query will be."""

    BATCH = "batch"
    STREAM = "stream"
    EITHER = "either"


@dataclass(frozen=True)
class Option:
    """One option. `queries`: the kinds of query in which it counts.

    `default`: the value of an absent option, as a user would write it; empty: none. `stream_default`: the default of a
    streaming query, if it differs.
    """

    name: str
    default: str = ""
    stream_default: str | None = None
    queries: Query = Query.EITHER
    in_kafka: bool = True

    def default_in(self, query: Query) -> str:
        """The default in a query of this kind."""
        return self.stream_default if query is Query.STREAM and self.stream_default is not None else self.default


TABLE = (
    Option("subscribe"),
    Option("subscribePattern"),
    Option("assign"),
    Option("path", in_kafka=False),
    Option("paths", in_kafka=False),
    Option("startingTimestamp"),
    Option("startingOffsetsByTimestamp"),
    Option("startingOffsetsByTimestampStrategy", "error"),
    Option("startingOffsets", "earliest", stream_default="latest"),
    Option("endingTimestamp", queries=Query.BATCH),
    Option("endingOffsetsByTimestamp", queries=Query.BATCH),
    Option("endingOffsets", "latest", queries=Query.BATCH),
    Option("failOnDataLoss", "true"),
    Option("minPartitions"),
    Option("maxRecordsPerPartition"),
    Option("recordsPerTask", "100000", in_kafka=False),
    Option("bytesPerTask", "16777216", in_kafka=False),
    Option("includeHeaders", "false"),
    Option("includeLeaderEpoch", "false", in_kafka=False),
    Option("maxOffsetsPerTrigger", queries=Query.STREAM),
    Option("minOffsetsPerTrigger", queries=Query.STREAM),
    Option("maxTriggerDelay", "15m", queries=Query.STREAM),
    Option("maxBytesPerTrigger", queries=Query.STREAM, in_kafka=False),
    Option("columns", in_kafka=False),
    Option("localReads", "true", in_kafka=False),
    Option("group", queries=Query.STREAM, in_kafka=False),
    Option("ranges", "false", in_kafka=False),
)
"""Options that only the source itself understands. `path` and `paths` are the argument of `load`."""

SETTINGS = (Option("kafka.bootstrap.servers"), Option("isolation.level", "read_committed"))
"""Settings of a consumer that the documentation lists beside the options. Every other setting may be given, too."""

WITHOUT_EFFECT = (
    *("groupIdPrefix", "kafka.group.id", "group.id"),  # No query joins a consumer group. `group` publishes progress.
    *("kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),  # Deadlines limit these.
)
"""Options of Spark's Kafka source that a job may keep when it changes the format."""

INTERNAL = (Option("topicId"), Option("otherPartitions", "none", queries=Query.BATCH))
"""Options of the reads of a log that `read_topic` joins with the topic's table.

Spark plans such a read when it is first used. `topicId`: another topic may have the name by then. `otherPartitions`:
the topic may have grown; partitions that `assign` does not name are read as a whole (`all`), refused (`refused from 2`,
if it had two) or left out (`none`).
"""

REFUSED_FROM = "refused from "

OPTIONS = tuple(option.name for option in TABLE)

DEFAULTS = {option.name: option for option in (*TABLE, *INTERNAL)}
