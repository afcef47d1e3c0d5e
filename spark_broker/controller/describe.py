"""The image as clients see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from spark_broker.controller.image import BrokerState, MetadataImage, TopicState
from spark_broker.controller.topic_history import TopicHistory
from spark_broker.protocol.messages import (
    BrokerMetadata,
    ControllerMetadata,
    HistoryMetadata,
    MetadataResponse,
    PartitionMetadata,
    TopicMetadata,
)


def describe(
    image: MetadataImage,
    topics: Sequence[str] | None = None,
    described_one: Callable[[], object] = lambda: None,
    next_tiering_ms: Mapping[str, int] = MappingProxyType({}),
) -> MetadataResponse:
    """The answer to a MetadataRequest; a name that does not exist is absent from it. One that is asked for again and
    again is there once. `described_one` is called after each topic. `next_tiering_ms`: from now on, by topic id."""
    if topics is None:
        described = [image.topics[image.topic_ids[name]] for name in sorted(image.topic_ids)]
    else:
        described = [topic for name in dict.fromkeys(topics) if (topic := image.topic(name)) is not None]
    descriptions = []
    for topic in described:
        descriptions.append(_topic(topic, next_tiering_ms.get(topic.topic_id, -1)))
        described_one()
    return MetadataResponse(
        cluster_id=image.cluster_id,
        controller_epoch=image.controller_epoch,
        brokers=[_broker(image.brokers[id_]) for id_ in sorted(image.brokers)],
        topics=descriptions,
        controller=ControllerMetadata(image.controller_host, image.controller_pid, image.controller_started_ms),
        metadata_offset=image.next_offset,
    )


def _broker(broker: BrokerState) -> BrokerMetadata:
    return BrokerMetadata(
        id=broker.id,
        host=broker.host,
        port=broker.port,
        rack=broker.rack,
        epoch=broker.epoch,
        pid=broker.pid,
        executor_id=broker.executor_id,
        executor_pid=broker.executor_pid,
        fenced=broker.fenced,
        log=broker.log,
        directory=broker.directory,
    )


def _topic(topic: TopicState, next_tiering_ms: int) -> TopicMetadata:
    partitions = [
        PartitionMetadata(
            partition=p,
            leader=s.leader,
            leader_epoch=s.leader_epoch,
            replicas=list(s.replicas),
            isr=list(s.isr),
            partition_epoch=s.partition_epoch,
            elr=list(s.elr),
            last_known_elr=list(s.last_known_elr),
            adding=list(s.adding),
        )
        for p, s in enumerate(topic.partitions)
    ]
    history = None if topic.history is None else _history(topic.history)
    return TopicMetadata(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=partitions,
        schemas=list(topic.schemas),
        config=dict(topic.config),
        history=history,
        log_starts=list(topic.log_starts),
        next_tiering_ms=next_tiering_ms,
    )


def _history(history: TopicHistory) -> HistoryMetadata:
    return HistoryMetadata(
        history.table_id,
        history.version,
        history.table_version,
        list(history.starts),
        list(history.ends),
        history.stopped,
        history.quarantined,
        history.uncut,
        history.missing,
    )
