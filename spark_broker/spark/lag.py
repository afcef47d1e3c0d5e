"""Lag: how many offsets a streaming query, or a group, is behind the end of each partition."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from spark_broker.config import ConsumerConfig
from spark_broker.errors import GroupIdNotFoundError, InvalidConfigError, InvalidDataError, UnknownTopicOrPartitionError
from spark_broker.model import TopicPartition
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.spark.stream_offset import StreamOffset, parse_offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.connect.streaming.query import StreamingQuery as ConnectQuery
    from pyspark.sql.streaming.query import StreamingQuery

VIEW_SCHEMA = "topic STRING, partition INT, position BIGINT, latest BIGINT, lag BIGINT"


@dataclass(frozen=True)
class PartitionLag:
    """`position`: the first offset that is not read yet; `latest`: the end; `lag`: the offsets between, 0 or more.

    Ends of transactions and aborted records count as offsets.
    """

    topic: str
    partition: int
    position: int
    latest: int
    lag: int


def lag(query: StreamingQuery | ConnectQuery) -> list[PartitionLag]:
    """The lag of the topics that this query reads. The query's last progress says what it had read, and where the logs
    ended.

    Empty before its first batch, and for a query that reads no topic.
    """
    if not hasattr(query, "lastProgress"):
        raise InvalidDataError(f"the query is {type(query).__name__}; give a StreamingQuery, as `start` returns it")
    progress = query.lastProgress
    if progress is None:
        return []
    lags: list[PartitionLag] = []
    for source in progress.sources:
        end, latest = _offset(source.endOffset), _offset(source.latestOffset)
        if end is not None:
            lags += _lags_of_query(end, end if latest is None else latest)
    return lags


def _lags_of_query(end: StreamOffset, latest: StreamOffset) -> list[PartitionLag]:
    """What was read of an earlier topic of the same name counts for nothing."""
    read = {
        tp: offset for tp, offset in end.offsets.items() if end.topic_ids[tp.topic] == latest.topic_ids.get(tp.topic)
    }
    return lags_of(read, latest.offsets)


def group_lag(bootstrap_servers: str, group: str) -> list[PartitionLag]:
    """The current lag of a group, in every partition of the topics of which it has committed offsets (a query with the
    option `group` publishes them).

    A partition without a committed offset is counted from its first record, in the topic's table or in the log. Topics
    that were deleted are left out. Raises GroupIdNotFoundError for a group that has committed nothing, and typed errors
    of the cluster.
    """
    from spark_broker.client import given
    from spark_broker.client.group_offsets import GroupOffsets
    from spark_broker.client.offset_lookup import all_at, try_lookup_offsets
    from spark_broker.client.retry import Deadline
    from spark_broker.spark.cluster import connected, existing_topics, partitions_of
    from spark_broker.spark.selection import SubscribedTopics
    from spark_broker.times import LATEST

    settings = ConsumerConfig.parse({"bootstrap.servers": bootstrap_servers})
    deadline = Deadline.after_ms(settings.default_api_timeout_ms)
    with connected(settings) as metadata:
        name = given.text(group, "the group")
        offsets = GroupOffsets(metadata, name)
        read = SubscribedTopics(tuple(sorted({tp.topic for tp in offsets.fetch(None, deadline)})))
        if not read.topics:
            raise GroupIdNotFoundError(f"group {group!r} has committed no offset of a topic that exists")
        topics = {topic.name: topic for topic in existing_topics(metadata, read, {}, deadline)}
        partitions = partitions_of(read, list(topics.values()))
        committed = offsets.fetch(partitions, deadline)  # The ids of the topics are known now: old commits are none.
        infos, failures = try_lookup_offsets(metadata, all_at(partitions, LATEST), deadline)
    for error in failures.values():
        if not isinstance(error, UnknownTopicOrPartitionError):
            raise error
    begins = {tp: topics[tp.topic].begins(tp.partition, info.log_start_offset) for tp, info in infos.items()}
    positions = begins | {tp: offset.offset for tp, offset in committed.items()}
    return lags_of(positions, {tp: info.offset for tp, info in infos.items()})


def create_lag_view(spark: SparkSession, lags: Iterable[PartitionLag], name: str = "lag") -> DataFrame:
    """Make or replace a temporary view with these lags. It has a row for each: `topic, partition, position, latest,
    lag`.
    """
    frame = spark.createDataFrame([tuple(asdict(each).values()) for each in lags], VIEW_SCHEMA)
    frame.createOrReplaceTempView(name)
    return frame


def lags_of(positions: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int]) -> list[PartitionLag]:
    """The lag of every partition that has an end. Nothing was read of a partition without a position."""
    return [
        PartitionLag(tp.topic, tp.partition, positions.get(tp, 0), end, max(0, end - positions.get(tp, 0)))
        for tp, end in sorted(latest.items())
    ]


def _offset(text: str) -> StreamOffset | None:
    """The offsets of this source. None: there are none, or they belong to another source."""
    try:
        return parse_offset(json.loads(text))
    except (InvalidConfigError, *UNDECODABLE):
        return None
