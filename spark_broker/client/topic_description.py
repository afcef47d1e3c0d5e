"""A topic as `Admin.describe_topic` shows it."""

from __future__ import annotations

from collections.abc import Mapping

from spark_broker.client.cluster_view import TopicView
from spark_broker.model import HistoryInfo, PartitionInfo, TopicDescription, TopicPartition, dead_letters_path
from spark_broker.protocol.messages import ListedOffset
from spark_broker.protocol.messages.common import known


def described(
    topic: TopicView, offsets: Mapping[TopicPartition, ListedOffset], next_run_ms: int | None = None
) -> TopicDescription:
    """The topic with what its leaders say of its partitions. `next_run_ms`: until the cluster tiers it, if known."""
    partitions = []
    for state in topic.partitions:
        begins, end = topic.history_of(state.partition)
        tiered = topic.history is not None and state.partition < len(topic.history.ends)
        ends = offsets.get(TopicPartition(topic.name, state.partition))
        local_start = None if ends is None else known(ends.log_start_offset)
        partitions.append(
            PartitionInfo(
                topic=topic.name,
                partition=state.partition,
                leader=known(state.leader),
                leader_epoch=state.leader_epoch,
                replicas=tuple(state.replicas),
                isr=tuple(state.isr),
                partition_epoch=state.partition_epoch,
                log_start_offset=None if local_start is None else topic.begins(state.partition, local_start),
                high_watermark=None if ends is None else known(ends.high_watermark),
                elr=tuple(state.elr),
                last_known_elr=tuple(state.last_known_elr),
                history_start_offset=begins if tiered else None,
                history_end_offset=end if tiered else None,
                sealed_offset=None if ends is None else known(ends.sealed_offset),
                local_log_start_offset=local_start,
                adding=tuple(state.adding),
            )
        )
    return TopicDescription(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=tuple(partitions),
        schema=topic.schema,
        schema_id=topic.schema_id,
        config=dict(topic.config),
        internal=topic.internal,
        history=_history(topic, None if next_run_ms is None else next_run_ms / 1000),
    )


def _history(topic: TopicView, next_run_s: float | None) -> HistoryInfo | None:
    path, history = topic.settings.delta_path, topic.history
    if not path and history is None:
        return None
    by_time = topic.settings.delta_commit_interval_ms >= 0
    if history is None:
        return HistoryInfo(path, None, next_run_s=next_run_s, by_time=by_time)
    return HistoryInfo(
        path=path,
        table_version=known(history.table_version),
        stopped=history.stopped or None,
        quarantined=history.quarantined,
        dead_letters=dead_letters_path(path) if history.quarantined else None,
        next_run_s=next_run_s,
        by_time=by_time,
    )
