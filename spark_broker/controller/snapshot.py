"""Snapshots: an image as records that build it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spark_broker.controller.image import EMPTY_IMAGE, BrokerState, MetadataImage, PartitionRegistration, TopicState
from spark_broker.controller.records import (
    BrokerChangeRecord,
    BrokerIdsRecord,
    ClusterRecord,
    ControllerEpochRecord,
    LaunchRecord,
    LogStartsRecord,
    MetadataRecord,
    OlderMetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    SchemaIdsRecord,
    SchemaRecord,
    TombstonesRecord,
    TopicRecord,
)
from spark_broker.controller.topic_history import history_records
from spark_broker.model import NO_EPOCH
from spark_broker.protocol.schema_ids import UNKNOWN


def image_from_snapshot(records: Sequence[MetadataRecord], next_offset: int) -> MetadataImage:
    """The image that `to_records` was given; a snapshot does not carry its own `next_offset`."""
    return replace(EMPTY_IMAGE.apply(records), next_offset=next_offset)


def to_records(image: MetadataImage) -> list[MetadataRecord]:
    """A snapshot: records that rebuild an equal image with `image_from_snapshot`."""
    records: list[MetadataRecord] = [
        ClusterRecord(image.cluster_id),
        *_writer_records(image),
        LaunchRecord(image.last_launch),
        BrokerIdsRecord(image.next_broker_id),
        ProducerIdsRecord(image.next_producer_id),
        TombstonesRecord(list(image.tombstones)),
    ]
    if image.older_accepted_epoch != NO_EPOCH:
        records.append(OlderMetadataRecord(image.older_accepted_epoch))
    for broker in image.brokers.values():
        records += [_registration(broker), _liveness(broker)]
    for topic in image.topics.values():
        records += _topic_records(topic)
    return records


def _writer_records(image: MetadataImage) -> list[MetadataRecord]:
    current = ControllerEpochRecord(
        image.controller_epoch,
        image.controller_writer,
        image.controller_host,
        image.controller_pid,
        image.controller_started_ms,
        begins=image.writers[-1].begins if image.writers else 0,
    )
    earlier = [ControllerEpochRecord(w.epoch, w.name, begins=w.begins) for w in image.writers[:-1]]
    return [*earlier, current]


def _registration(broker: BrokerState) -> RegisterBrokerRecord:
    return RegisterBrokerRecord(
        broker_id=broker.id,
        broker_epoch=broker.epoch,
        directory_id=broker.directory_id,
        incarnation=broker.incarnation,
        launch=broker.launch,
        host=broker.host,
        port=broker.port,
        rack=broker.rack,
        machine=broker.machine,
        executor_id=broker.executor_id,
        executor_pid=broker.executor_pid,
        pid=broker.pid,
        pid_start_time=broker.pid_start_time,
        start_kind=broker.start_kind,
        log=broker.log,
        directory=broker.directory,
        recorded=broker.recorded,
    )


def _liveness(broker: BrokerState) -> BrokerChangeRecord:
    return BrokerChangeRecord(broker.id, broker.epoch, broker.fenced, broker.in_controlled_shutdown)


def _topic_records(topic: TopicState) -> list[MetadataRecord]:
    records: list[MetadataRecord] = [TopicRecord(topic.name, topic.topic_id, dict(topic.config), topic.internal)]
    if topic.schema_ids:
        records.append(SchemaIdsRecord(topic.topic_id, topic.schema_ids))
    records += [SchemaRecord(topic.topic_id, i, schema) for i, schema in enumerate(topic.schemas) if schema != UNKNOWN]
    records += [partition_record(topic.topic_id, p, state) for p, state in enumerate(topic.partitions)]
    records += history_records(topic.topic_id, topic.history)
    if topic.log_starts:
        records.append(LogStartsRecord(topic.topic_id, list(topic.log_starts)))
    return records


def partition_record(topic_id: str, partition: int, state: PartitionRegistration) -> PartitionRecord:
    """The record that creates this partition."""
    return PartitionRecord(
        topic_id=topic_id,
        partition=partition,
        replicas=list(state.replicas),
        isr=list(state.isr),
        leader=state.leader,
        leader_epoch=state.leader_epoch,
        partition_epoch=state.partition_epoch,
        adding=list(state.adding),
        removing=list(state.removing),
        damaged=list(state.damaged),
        elr=list(state.elr),
        last_known_elr=list(state.last_known_elr),
        unclean_epoch=state.unclean_epoch,
        lacking=state.lacking,
    )
