"""Topics: create, delete, grow, change settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from spark_broker.config import ClusterConfig, ClusterSettings, TopicConfig
from spark_broker.controller import lineage
from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.effects import Decision
from spark_broker.controller.image import MetadataImage, PartitionRegistration, TopicState
from spark_broker.controller.named_topic import named_topic
from spark_broker.controller.partition_change import change
from spark_broker.controller.placement import loads_of, place
from spark_broker.controller.reassignment import check_assignment
from spark_broker.controller.records import (
    MetadataRecord,
    RemoveTopicRecord,
    SchemaRecord,
    TopicConfigRecord,
    TopicRecord,
)
from spark_broker.controller.snapshot import partition_record
from spark_broker.controller.topic_config import OF_ROWS, altered_config, stored_config, tables_of, without_rows
from spark_broker.controller.topic_schema import check_size
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InvalidConfigError,
    InvalidPartitionsError,
    InvalidReplicaAssignmentError,
    InvalidTopicError,
    StorageFullError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, INTERNAL_PREFIX, NAME_MAX, TRANSACTION_STATE_TOPIC
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    EmptyResponse,
)

MAX_PARTITIONS = 10_000
"""Most partitions of one topic: one careless request must not fill the metadata log."""

INTERNAL_INDEX_BYTES = 65_536
"""`segment.index.bytes` of internal topics: about 800 batches."""

INTERNAL_MESSAGE_BYTES = TopicConfig().max_message_bytes
"""`max.message.bytes` of internal topics, at least: what they are made with. Coordinators know no smaller bound. The
offsets that a transaction commits at once are one batch, and a member with the names of 10,000 topics is one row.
"""

_LEGAL_NAME = re.compile(rf"[a-zA-Z0-9._-]{{1,{NAME_MAX}}}")


@dataclass(frozen=True, slots=True)
class NewTopicValues:
    """What a pure decision cannot make up: the id (32 hex digits) and the stored form of the schema."""

    topic_id: str
    schema: bytes


def create_topic(
    image: MetadataImage,
    request: CreateTopicRequest,
    values: NewTopicValues,
    settings: ClusterSettings,
    disks: Disks = ALL_WELL,
) -> Decision:
    """Create a topic. Brokers with room lead it, and have its replicas, where possible.

    Raises InvalidTopicError, TopicAlreadyExistsError, InvalidPartitionsError, InvalidReplicationFactorError,
    InvalidReplicaAssignmentError, InvalidConfigError, InvalidSchemaError, or StorageFullError: no live replica's disk
    has room.
    """
    check_topic_name(request.name, internal=request.internal)
    if image.topic(request.name) is not None:
        raise TopicAlreadyExistsError(f"topic {request.name}")
    config = stored_config(defaults_of(settings, request.name, internal=request.internal), request.config)
    if not request.internal:
        check_size(image, values.schema)
        _check_own_table(image, values.topic_id, config)
    replicas = _assignment(image, request, settings, disks)
    records: list[MetadataRecord] = [
        TopicRecord(request.name, values.topic_id, config, request.internal),
        SchemaRecord(values.topic_id, 0, values.schema),
    ]
    lacking = max(_internal_factor(settings.cluster, request.name) - len(replicas[0]), 0) if request.internal else 0
    records += _new_partitions(image, values.topic_id, 0, replicas, disks, lacking)
    return Decision(tuple(records), EmptyResponse())


def _check_own_table(image: MetadataImage, topic_id: str, config: Mapping[str, str]) -> None:
    """A table, and the table of the records that it refuses, are one topic's. Raises InvalidConfigError."""
    wanted = tables_of(config)
    for other in image.topics.values() if wanted else ():
        if other.topic_id != topic_id and wanted & tables_of(other.config):
            raise InvalidConfigError(
                f"delta.path: {config['delta.path']!r} is a table of topic {other.name!r}; give each topic its own"
            )


def check_topic_name(name: str, *, internal: bool) -> None:
    """Raises InvalidTopicError unless the name is legal; names that begin with `__` belong to internal topics."""
    if not _LEGAL_NAME.fullmatch(name) or name in (".", ".."):
        raise InvalidTopicError(f"topic name {name[:300]!r}")
    if name.startswith(INTERNAL_PREFIX) != internal:
        raise InvalidTopicError(f"topic name {name!r}: the prefix '__' is for internal topics, and only for them")


def _assignment(
    image: MetadataImage, request: CreateTopicRequest, settings: ClusterSettings, disks: Disks
) -> list[list[int]]:
    cluster = settings.cluster
    if request.assignment:
        return _explicit_assignment(image, request)
    partitions = cluster.num_partitions if request.partitions == -1 else request.partitions
    # The start of a cluster puts a number in the place of 0.
    default = max(cluster.default_replication_factor, 1)
    factor = default if request.replication_factor == -1 else request.replication_factor
    _check_partitions(partitions)
    return _place(image, partitions, factor, disks)


def _place(image: MetadataImage, partitions: int, factor: int, disks: Disks) -> list[list[int]]:
    live = image.live_brokers()
    with_room = [broker for broker in live if broker.id not in disks.full]
    return place(with_room if len(with_room) >= factor else live, loads_of(image), partitions, factor)


def _explicit_assignment(image: MetadataImage, request: CreateTopicRequest) -> list[list[int]]:
    _check_partitions(len(request.assignment))
    if request.partitions not in (-1, len(request.assignment)):
        raise InvalidReplicaAssignmentError(f"{request.partitions} partitions, {len(request.assignment)} assigned")
    factor = request.replication_factor if request.replication_factor != -1 else len(request.assignment[0])
    for replicas in request.assignment:
        check_assignment(image, replicas)
        if len(replicas) != factor:
            raise InvalidReplicaAssignmentError(f"replicas {replicas}: the replication factor is {factor}")
        if not any(image.is_live(broker) for broker in replicas):
            raise InvalidReplicaAssignmentError(f"replicas {replicas}: none of these brokers is live")
    return request.assignment


def _check_partitions(partitions: int) -> None:
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidPartitionsError(f"{partitions} partitions; a topic has from 1 to {MAX_PARTITIONS}")


def _new_partitions(
    image: MetadataImage,
    topic_id: str,
    first: int,
    assignment: Sequence[Sequence[int]],
    disks: Disks,
    lacking: int = 0,
) -> list[MetadataRecord]:
    """Partitions from number `first` on. `lacking`: how many more replicas each is to have, once there are brokers.

    An older copy of the metadata may have been accepted that did not know partitions of the topic with these numbers.
    What is left of those has epochs that began at 0. It must neither be taken for a part of the new ones, nor go for
    them.
    """
    epoch = lineage.acceptances(image) * lineage.NUMBERS_SPARED if first else 0
    records: list[MetadataRecord] = []
    for number, replicas in enumerate(assignment, start=first):
        isr = tuple(broker for broker in replicas if image.is_live(broker))
        leader = min(isr, key=disks.full.__contains__)
        if leader in disks.full:
            raise StorageFullError(f"no disk has room for new partitions: brokers {sorted(disks.full)} are full")
        unclean_epoch = epoch if epoch else -1
        state = PartitionRegistration(
            tuple(replicas), isr, leader, epoch, 0, unclean_epoch=unclean_epoch, lacking=lacking
        )
        records.append(partition_record(topic_id, number, state))
    return records


def internal_topic_request(
    image: MetadataImage, settings: ClusterSettings, expected_brokers: int, name: str
) -> CreateTopicRequest | None:
    """The request that creates `__consumer_offsets` or `__transaction_state`; None when it exists.

    `expected_brokers`: how many are live or likely to be back soon. Raises CoordinatorNotAvailableError while fewer are
    live. The replicas that even these cannot have are built on brokers that come later (`healing.fill_up`).
    """
    if image.topic(name) is not None:
        return None
    cluster = settings.cluster
    config = _internal_config(settings, name)
    partitions = cluster.offsets_topic_num_partitions
    live = len(image.live_brokers())
    wanted = min(_internal_factor(cluster, name), max(expected_brokers, 1))
    if live < wanted:
        raise CoordinatorNotAvailableError(f"{name} waits for {wanted} brokers, {live} are live")
    if name == TRANSACTION_STATE_TOPIC:
        partitions = cluster.transaction_state_log_num_partitions
        config["min.insync.replicas"] = str(cluster.transaction_state_log_min_isr)
    return CreateTopicRequest(
        name=name, partitions=partitions, replication_factor=wanted, schema=b"", config=config, internal=True
    )


def _internal_factor(cluster: ClusterConfig, name: str) -> int:
    """How many replicas the internal topic is to have, where there are brokers enough."""
    if name == TRANSACTION_STATE_TOPIC:
        return cluster.transaction_state_log_replication_factor
    return cluster.offsets_topic_replication_factor


def defaults_of(settings: ClusterSettings, name: str, *, internal: bool) -> TopicConfig:
    """What holds for a topic where nothing is set for it: the cluster's `[topic]`, or what internal topics need."""
    if not internal:
        return settings.topic
    return without_rows(settings.topic).with_values(_internal_config(settings, name))


def _internal_config(settings: ClusterSettings, name: str) -> dict[str, str]:
    """What is set for an internal topic, whatever the defaults of the cluster's topics are: coordinators must be able
    to append what they decide. Retention deletes none of their records. Batches are small and many, and every broker
    keeps the newest segment's index in memory. A decision about a transaction must not be lost (Kafka, too).
    """
    cluster, segment_bytes, certain = settings.cluster, settings.cluster.offsets_topic_segment_bytes, {}
    if name == TRANSACTION_STATE_TOPIC:
        segment_bytes = cluster.transaction_state_log_segment_bytes
        certain = {"unclean.leader.election.enable": "false"}
    return {
        **certain,
        "cleanup.policy": "compact",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "segment.bytes": str(segment_bytes),
        "segment.index.bytes": str(INTERNAL_INDEX_BYTES),
        "max.message.bytes": str(INTERNAL_MESSAGE_BYTES),
    }


def complete_internal(image: MetadataImage, settings: ClusterSettings) -> list[MetadataRecord]:
    """Earlier versions made internal topics with the defaults of `[topic]`: with cleanup.policy=delete, sizes that are
    too small, columns and a table that they do not have, and unclean elections.
    """
    records: list[MetadataRecord] = []
    for name in (CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC):
        topic = image.topic(name)
        if topic is not None:
            wanted = _internal_config(settings, name)
            stored = stored_config(defaults_of(settings, name, internal=True), wanted)
            missing = {setting: stored[setting] for setting in wanted if setting in stored}
            kept = {setting: value for setting, value in topic.config.items() if setting not in OF_ROWS}
            config = {**missing, **kept, "cleanup.policy": "compact"}
            if name == TRANSACTION_STATE_TOPIC:
                config.pop("unclean.leader.election.enable", None)  # It is false where it is not stored.
            if config != topic.config:
                records.append(TopicConfigRecord(topic.topic_id, config))
    return records


def delete_topic(image: MetadataImage, request: DeleteTopicRequest) -> Decision:
    """Delete a topic and its records; nothing, if that topic was deleted already. Raises UnknownTopicOrPartitionError,
    InvalidTopicError."""
    if request.topic_id in image.tombstones:
        return Decision((), EmptyResponse())
    topic = named_topic(image, request.name, "")
    if request.topic_id not in ("", topic.topic_id):
        raise UnknownTopicOrPartitionError(f"topic {topic.name!r} is not the one with id {request.topic_id}")
    if topic.internal:
        raise InvalidTopicError(f"the internal topic {topic.name} cannot be deleted")
    return Decision((RemoveTopicRecord(topic.topic_id),), EmptyResponse())


def create_partitions(image: MetadataImage, request: CreatePartitionsRequest, disks: Disks = ALL_WELL) -> Decision:
    """Grow a topic to `total` partitions, with the replication factor of its first partition.

    Raises UnknownTopicOrPartitionError, InconsistentTopicIdError, InvalidTopicError, InvalidPartitionsError,
    InvalidReplicationFactorError or StorageFullError."""
    topic = named_topic(image, request.name, request.topic_id)
    if topic.internal:
        raise InvalidTopicError(f"the internal topic {topic.name} cannot grow: keys would change their partition")
    have = len(topic.partitions)
    if request.total <= have:
        raise InvalidPartitionsError(f"topic {topic.name} has {have} partitions, {request.total} were asked for")
    _check_partitions(request.total)
    first = topic.partitions[0]
    factor = len(first.target_replicas) + first.lacking
    replicas = _place(image, request.total - have, factor, disks)
    return Decision(tuple(_new_partitions(image, topic.topic_id, have, replicas, disks)), EmptyResponse())


def alter_topic_config(image: MetadataImage, request: AlterTopicConfigRequest, settings: ClusterSettings) -> Decision:
    """Set or reset settings. Raises UnknownTopicOrPartitionError, InconsistentTopicIdError, InvalidConfigError."""
    topic = named_topic(image, request.name, request.topic_id)
    config = altered_config(defaults_of(settings, topic.name, internal=topic.internal), topic.config, request.values)
    if topic.internal:
        _check_internal(topic.name, config)
        _check_internal_sizes(topic.name, config, {name for name, value in request.values.items() if value is not None})
    if config == topic.config:
        return Decision((), EmptyResponse())
    if request.values.get("delta.path"):
        _check_own_table(image, topic.topic_id, config)
    record = TopicConfigRecord(topic.topic_id, config)
    return Decision((record, *_eligible_anew(image.apply([record]).topics[topic.topic_id])), EmptyResponse())


def _check_internal(name: str, config: Mapping[str, str]) -> None:
    """Raises InvalidConfigError for what would keep coordinators from appending, or lose what they decided."""
    settings = TopicConfig.parse(config)
    if of_rows := sorted(OF_ROWS & config.keys()):
        raise InvalidConfigError(f"{', '.join(of_rows)}: the internal topic {name} has neither columns nor a table")
    if settings.cleanup_policy != ("compact",):
        raise InvalidConfigError(f"cleanup.policy: {name} is compacted, and keeps the newest record of each key")
    if name == TRANSACTION_STATE_TOPIC and settings.unclean_leader_election_enable:
        raise InvalidConfigError("unclean.leader.election.enable: decisions about transactions must not be lost")


def _check_internal_sizes(name: str, config: Mapping[str, str], changed: Collection[str]) -> None:
    """Raises InvalidConfigError for a size that is changed and too small for what a coordinator appends. One that was
    set before stays: it does not keep other settings from being changed.
    """
    sizes = TopicConfig.parse(config)
    for setting, size in (("max.message.bytes", sizes.max_message_bytes), ("segment.bytes", sizes.segment_bytes)):
        if setting in changed and size < INTERNAL_MESSAGE_BYTES:
            raise InvalidConfigError(
                f"{setting}: coordinators append up to {INTERNAL_MESSAGE_BYTES:,} bytes to {name} at once",
                hint=f"Set {INTERNAL_MESSAGE_BYTES} or more, or leave it as it is.",
            )


def _eligible_anew(topic: TopicState) -> list[MetadataRecord]:
    """Under a lower min.insync.replicas the high watermark advances with fewer replicas, so ELRs may become empty."""
    changes = (change(topic, number, state) for number, state in enumerate(topic.partitions))
    return [record for record in changes if record is not None]
