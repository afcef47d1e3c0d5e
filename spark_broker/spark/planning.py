"""Turns options into ranges of offsets, once for each query. So a retried task reads what its first attempt would have
read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.history_reader import first_in_tables
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import EVERY_BYTE, Reach, all_at, lookup_offsets
from spark_broker.client.retry import Deadline
from spark_broker.errors import OffsetOutOfRangeError
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import ListedOffset
from spark_broker.spark.bounds import EARLIEST_OFFSET, LATEST_OFFSET, Bound, ByOffset, ByTimestamp, Earliest, Latest
from spark_broker.spark.cluster import partitions_of
from spark_broker.spark.option_table import REFUSED_FROM
from spark_broker.spark.options import ReadOptions
from spark_broker.spark.ranges import OffsetRange, TaskRanges, tasks_of
from spark_broker.spark.refusals import invalid_option
from spark_broker.spark.selection import Assign
from spark_broker.times import LATEST, Moment

Infos = Mapping[TopicPartition, ListedOffset]
"""Where each partition ends for this read (`offset`), and its log start."""


def plan_tasks(
    metadata: ClusterMetadata, options: ReadOptions, topics: Sequence[TopicView], deadline: Deadline
) -> list[TaskRanges]:
    """The ranges that each task reads. They end at last stable offsets, or with read_uncommitted at high watermarks.

    Raises InvalidConfigError for offsets that do not name exactly the partitions of the read, or that end before they
    start. Raises OffsetOutOfRangeError for offsets that the partition does not have (unless failOnDataLoss is false).
    Raises UnknownTopicOrPartitionError.
    """
    partitions = partitions_of(options.selection, topics)
    check_named(options.end, partitions)
    infos = _look_up(metadata, options, all_at(partitions, LATEST), deadline, sizes=True)
    starts = resolve_starts(metadata, options, infos, topics)
    ends = resolve_bound(metadata, options, options.end, infos, topics)
    ranges = []
    for tp in partitions:
        if starts[tp] > ends[tp] and isinstance(options.start, ByOffset) and isinstance(options.end, ByOffset):
            raise invalid_option(f"{tp}: startingOffsets {starts[tp]} is after endingOffsets {ends[tp]}")
        latest = infos[tp]
        ranges.append(
            OffsetRange(
                topic=tp.topic,
                topic_id=latest.topic_id,
                partition=tp.partition,
                start=starts[tp],
                end=ends[tp],
                read_to=latest.offset,
                read_epoch=latest.last_epoch,
            )
        )
    sizes = {tp: info.size_bytes / max(1, info.offset - info.log_start_offset) for tp, info in infos.items()}
    return tasks_of(ranges, options.tasks, sizes)


def with_others(read: ReadOptions, topic: TopicView) -> ReadOptions:
    """The read of assigned partitions of one topic, by offsets, as its `otherPartitions` has it now.

    Raises InvalidConfigError where it refuses them.
    """
    start, end, selection = read.start, read.end, read.selection
    if not (isinstance(selection, Assign) and isinstance(start, ByOffset) and isinstance(end, ByOffset)):
        return read
    assigned = selection.partitions[topic.name]
    others = [state.partition for state in topic.partitions if state.partition not in assigned]
    if not others or read.other_partitions == "none":
        return read
    if read.other_partitions != "all":
        # Of those that were there, what is wanted may be in the table as a whole.
        others = [number for number in others if number >= int(read.other_partitions.removeprefix(REFUSED_FROM))]
        if not others:
            return read
        raise invalid_option(
            f"topic {topic.name!r} has {len(others)} more partitions than when this DataFrame was made, and its range "
            "does not say what to read of them; make the DataFrame again"
        )
    tps = [TopicPartition(topic.name, number) for number in others]
    return replace(
        read,
        selection=Assign({topic.name: (*assigned, *others)}),
        start=replace(start, offsets={**start.offsets, **dict.fromkeys(tps, EARLIEST_OFFSET)}),
        end=replace(end, offsets={**end.offsets, **dict.fromkeys(tps, LATEST_OFFSET)}),
    )


def resolve_starts(
    metadata: ClusterMetadata, options: ReadOptions, infos: Infos, topics: Sequence[TopicView]
) -> dict[TopicPartition, int]:
    """The first offset to read of each partition. Raises as `plan_tasks` does."""
    check_named(options.start, list(infos))
    return resolve_bound(metadata, options, options.start, infos, topics)


def _look_up(
    metadata: ClusterMetadata,
    options: ReadOptions,
    wanted: Mapping[TopicPartition, Moment],
    deadline: Deadline,
    *,
    sizes: bool = False,
) -> dict[TopicPartition, ListedOffset]:
    """`sizes`: ask also how much is stored, from the logs' starts to the offsets."""
    reaches = dict.fromkeys(wanted, Reach(0, EVERY_BYTE)) if sizes else None
    return lookup_offsets(metadata, wanted, deadline, read_committed=options.settings.read_committed, reaches=reaches)


def check_named(bound: Bound, partitions: Sequence[TopicPartition]) -> None:
    """Offsets must name every partition of the read, as in Spark's Kafka source. A missing one is a mistake."""
    named: Mapping[TopicPartition, int] | None = None
    if isinstance(bound, ByOffset):
        named = bound.offsets
    elif isinstance(bound, ByTimestamp):
        named = bound.times_us
    if named is None:
        return
    option = bound.option if isinstance(bound, ByOffset | ByTimestamp) else ""
    missing = sorted(set(partitions) - set(named))
    if missing:
        raise invalid_option(f"{option} lacks {missing[0]}; name every partition (-1: latest, -2: earliest)")
    extra = sorted(set(named) - set(partitions))
    if extra:
        raise invalid_option(f"{option} names {extra[0]}, which is not among the partitions that are read")


def resolve_bound(
    metadata: ClusterMetadata,
    options: ReadOptions,
    bound: Bound,
    logs: Infos,
    topics: Sequence[TopicView],
) -> dict[TopicPartition, int]:
    """The offset of each partition that a bound stands for; what is in a topic's table counts as part of its log.

    `logs`: of the partitions to resolve. Raises as `plan_tasks` does. Brokers have default.api.timeout.ms for their
    answer, however long tables took before.
    """
    topics = newest(metadata, topics)
    infos = whole(logs, topics)
    match bound:
        case Earliest():
            return {tp: info.log_start_offset for tp, info in infos.items()}
        case Latest():
            return {tp: info.offset for tp, info in infos.items()}
        case ByOffset():
            return {tp: _named(bound, tp, infos[tp], fail=options.fail_on_data_loss) for tp in infos}
        case ByTimestamp():
            times_us = {tp: bound.of(tp) for tp in infos}
            deadline = Deadline.after_ms(options.settings.default_api_timeout_ms)
            offsets = _look_up(metadata, options, times_us, deadline)
            named = {topic.name: topic for topic in newest(metadata, topics)}
            first = first_in_tables(named, times_us, offsets)
            later = {tp: info for tp, info in offsets.items() if tp not in first}
            return first | {tp: _timed(options, bound, tp, info, infos[tp]) for tp, info in later.items()}


def newest(metadata: ClusterMetadata, topics: Sequence[TopicView]) -> list[TopicView]:
    """The topics as metadata shows them now. After a lookup, that is as much of their history as their leaders know."""
    return [topic.or_as(metadata.view.topic(topic.name)) for topic in topics]


def whole(logs: Infos, topics: Sequence[TopicView]) -> dict[TopicPartition, ListedOffset]:
    """The partitions as if their logs began where the history in the topic's table begins."""
    by_name = {topic.name: topic for topic in topics}
    infos = {}
    for tp, info in logs.items():
        begins = by_name[tp.topic].begins(tp.partition, info.log_start_offset)
        infos[tp] = msgspec.structs.replace(info, log_start_offset=begins)
    return infos


def _named(bound: ByOffset, tp: TopicPartition, info: ListedOffset, *, fail: bool) -> int:
    offset = bound.offsets[tp]
    if offset == LATEST_OFFSET:
        return info.offset
    if offset == EARLIEST_OFFSET:
        return info.log_start_offset
    if info.log_start_offset <= offset <= info.offset:
        return offset
    if fail:
        undecided = ""
        if info.offset < offset <= info.high_watermark:
            undecided = f"; a transaction from {info.offset} on is not decided yet"
        raise OffsetOutOfRangeError(
            f"{bound.option}: {tp} has offsets {info.log_start_offset} to {info.offset}, not {offset}{undecided}"
            " (failOnDataLoss=false reads what there is)"
        )
    return min(max(offset, info.log_start_offset), info.offset)


def _timed(
    options: ReadOptions, bound: ByTimestamp, tp: TopicPartition, listed: ListedOffset, info: ListedOffset
) -> int:
    """There is no record at or after the moment. An end is the latest offset then. A start is an error, unless the
    options say otherwise.
    """
    if listed.offset >= 0:
        # A record that was committed between the two lookups belongs to the next read.
        return min(listed.offset, info.offset)
    if bound is options.end or options.latest_if_no_timestamp:
        return info.offset
    raise OffsetOutOfRangeError(
        f"{bound.option}: {tp} has no record at or after {bound.of(tp) // 1000}"
        " (startingOffsetsByTimestampStrategy=latest begins at its end)"
    )
