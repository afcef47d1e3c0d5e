"""The immutable image of the cluster that metadata records build: in the controller, in every broker, and on replay.

An image shares with its predecessor whatever did not change, so `delta.MetadataDelta` finds changes by identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from spark_broker.controller.records import (
    BrokerChangeRecord,
    BrokerIdsRecord,
    ClusterRecord,
    ControllerEpochRecord,
    HistoryRecord,
    HistoryStatusRecord,
    LaunchRecord,
    LogStartsRecord,
    MetadataRecord,
    OffsetRecord,
    OlderMetadataRecord,
    PartitionChangeRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    RemoveTopicRecord,
    SchemaIdsRecord,
    SchemaRecord,
    TombstonesRecord,
    TopicConfigRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)
from spark_broker.controller.tombstones import Tombstones
from spark_broker.controller.topic_history import TopicHistory, not_below, replayed
from spark_broker.errors import InvariantError, invariant
from spark_broker.model import NO_EPOCH, NO_LEADER
from spark_broker.protocol.schema_ids import is_known, with_schema

WRITERS_MAX = 1000
"""Controllers that an image remembers."""


@dataclass(frozen=True, slots=True)
class MetadataWriter:
    """A controller that wrote the metadata log from offset `begins` on, until the next one began."""

    epoch: int
    name: str
    begins: int


@dataclass(frozen=True, slots=True)
class BrokerState:
    """A registered broker. `epoch` is the offset of its registration in the metadata log."""

    id: int
    epoch: int
    directory_id: str
    incarnation: str
    launch: int
    host: str
    port: int
    rack: str | None
    machine: str
    executor_id: str
    executor_pid: int
    pid: int
    pid_start_time: int
    start_kind: str
    log: str = ""
    directory: str = ""
    recorded: str = ""  # the newest incarnation that the directory is known to know
    fenced: bool = True
    in_controlled_shutdown: bool = False

    @property
    def live(self) -> bool:
        """Whether it may lead and join an ISR."""
        return not self.fenced and not self.in_controlled_shutdown


@dataclass(frozen=True, slots=True)
class PartitionRegistration:
    """A partition. `replicas` is in order of preference. In a reassignment the new ones come first, then `removing`.

    `isr`, `elr` and `last_known_elr` are disjoint subsets of `replicas`. Every member of the ISR and of the ELR has
    everything that was committed (KIP-966). A replica joins the ELR when it leaves an ISR that is then below the
    minimum: the high watermark stands still from then on. The minimum is `min(min.insync.replicas, len(replicas))`.
    """

    replicas: tuple[int, ...]
    isr: tuple[int, ...]  # Invariant: empty only without a leader, and when its last member may lack records
    leader: int  # Invariant: a member of isr, or NO_LEADER
    leader_epoch: int  # Invariant: rises with every election and with every replica that leaves, never falls
    partition_epoch: int  # Invariant: rises with every change, never falls
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()  # those of last_known_elr whose quarantined log may hold more than any other
    elr: tuple[int, ...] = ()  # Invariant: empty while the ISR has the minimum
    last_known_elr: tuple[int, ...] = ()  # left ISR or ELR and may lack records; empty while the ISR has the minimum
    unclean_epoch: int = -1  # the newest leader epoch that began uncleanly; -1: there was none
    lacking: int = 0  # Invariant: never below 0. How many more replicas it is to have, once there are brokers

    @property
    def target_replicas(self) -> tuple[int, ...]:
        """The replicas once the reassignment that runs (if any) is done."""
        return tuple(broker for broker in self.replicas if broker not in self.removing)

    @property
    def reassigning(self) -> bool:
        return bool(self.adding or self.removing)


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic. `partitions[p]` is partition p, `schemas[i]` the IPC schema message of schema id i (`UNKNOWN`: none is).

    Records before `log_starts[p]` of partition p were deleted, on demand or by the topic's retention, wherever they
    were: in the log or in the topic's table. A partition beyond these lost none so.
    """

    name: str
    topic_id: str
    config: Mapping[str, str]
    internal: bool = False
    schemas: tuple[bytes, ...] = ()
    partitions: tuple[PartitionRegistration, ...] = ()
    history: TopicHistory | None = None
    log_starts: tuple[int, ...] = ()  # Invariant: never fall
    schema_ids: int = 0  # those below it may have been given out by records that this log lacks; see `lineage`

    @property
    def next_schema_id(self) -> int:
        """The id of the next schema: none was given this one."""
        return max(len(self.schemas), self.schema_ids)

    def log_start(self, partition: int) -> int:
        """The first offset of the partition that was not deleted; 0: none was."""
        return self.log_starts[partition] if partition < len(self.log_starts) else 0


@dataclass(frozen=True, slots=True)
class MetadataImage:
    """Everything that the metadata log up to `next_offset` (exclusive) says."""

    cluster_id: str = ""
    controller_epoch: int = NO_EPOCH
    controller_writer: str = ""
    controller_host: str = ""  # host and pid are those of its driver
    controller_pid: int = -1
    controller_started_ms: int = 0
    next_offset: int = 0
    last_launch: int = 0
    next_broker_id: int = 0
    next_producer_id: int = 0
    writers: tuple[MetadataWriter, ...] = ()  # the newest ones, in order; see `lineage`
    tombstones: Tombstones = field(default_factory=Tombstones)
    older_accepted_epoch: int = NO_EPOCH  # the newest controller that may go on with an older log; see `lineage`
    brokers: Mapping[int, BrokerState] = field(default_factory=lambda: MappingProxyType({}))
    topics: Mapping[str, TopicState] = field(default_factory=lambda: MappingProxyType({}))  # by topic id
    topic_ids: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # name to topic id

    def apply(self, records: Sequence[MetadataRecord]) -> MetadataImage:
        """The image after these records. The first of them has the offset `next_offset`.

        Each has the offset after the one before it, but for what an OffsetRecord skips.
        """
        builder = _Builder(self)
        for record in records:
            builder.replay(record)
        return builder.build()

    def topic(self, name: str) -> TopicState | None:
        topic_id = self.topic_ids.get(name)
        return None if topic_id is None else self.topics[topic_id]

    def partition(self, topic_id: str, partition: int) -> PartitionRegistration | None:
        topic = self.topics.get(topic_id)
        if topic is None or not 0 <= partition < len(topic.partitions):
            return None
        return topic.partitions[partition]

    def partitions(self) -> Iterator[tuple[TopicState, int, PartitionRegistration]]:
        """Every partition as (topic, number, state)."""
        for topic in self.topics.values():
            for number, state in enumerate(topic.partitions):
                yield topic, number, state

    def is_live(self, broker_id: int) -> bool:
        """Whether the broker is registered, unfenced and not shutting down."""
        broker = self.brokers.get(broker_id)
        return broker is not None and broker.live

    def live_brokers(self) -> list[BrokerState]:
        """Live brokers in order of their ids."""
        return [self.brokers[id_] for id_ in sorted(self.brokers) if self.brokers[id_].live]

    def broker_of_directory(self, directory_id: str) -> BrokerState | None:
        return next((b for b in self.brokers.values() if b.directory_id == directory_id), None)


EMPTY_IMAGE = MetadataImage()


def _registered(record: RegisterBrokerRecord) -> BrokerState:
    return BrokerState(
        id=record.broker_id,
        epoch=record.broker_epoch,
        directory_id=record.directory_id,
        incarnation=record.incarnation,
        launch=record.launch,
        host=record.host,
        port=record.port,
        rack=record.rack,
        machine=record.machine,
        executor_id=record.executor_id,
        executor_pid=record.executor_pid,
        pid=record.pid,
        pid_start_time=record.pid_start_time,
        start_kind=record.start_kind,
        log=record.log,
        directory=record.directory,
        recorded=record.recorded,
    )


class _Builder:
    """Replays records. Copies only the maps that they change."""

    def __init__(self, image: MetadataImage) -> None:
        self._image = image
        self._offset = image.next_offset
        self._brokers: dict[int, BrokerState] | None = None
        self._topics: dict[str, TopicState] | None = None
        self._topic_ids: dict[str, str] | None = None
        self._partitions: dict[str, list[PartitionRegistration]] = {}

    def build(self) -> MetadataImage:
        for topic_id, partitions in self._partitions.items():
            self.topics[topic_id] = replace(self.topics[topic_id], partitions=tuple(partitions))
        image = self._image
        return replace(
            image,
            next_offset=self._offset,
            brokers=image.brokers if self._brokers is None else MappingProxyType(self._brokers),
            topics=image.topics if self._topics is None else MappingProxyType(self._topics),
            topic_ids=image.topic_ids if self._topic_ids is None else MappingProxyType(self._topic_ids),
        )

    @property
    def brokers(self) -> dict[int, BrokerState]:
        if self._brokers is None:
            self._brokers = dict(self._image.brokers)
        return self._brokers

    @property
    def topics(self) -> dict[str, TopicState]:
        if self._topics is None:
            self._topics = dict(self._image.topics)
        return self._topics

    @property
    def topic_ids(self) -> dict[str, str]:
        if self._topic_ids is None:
            self._topic_ids = dict(self._image.topic_ids)
        return self._topic_ids

    def _partitions_of(self, topic_id: str) -> list[PartitionRegistration]:
        if topic_id not in self._partitions:
            self._partitions[topic_id] = list(self._topic(topic_id).partitions)
        return self._partitions[topic_id]

    def _topic(self, topic_id: str) -> TopicState:
        invariant(topic_id in self.topics, "a record names the unknown topic %s", topic_id)
        return self.topics[topic_id]

    def _broker(self, broker_id: int, epoch: int) -> BrokerState:
        broker = self.brokers.get(broker_id)
        registered = broker is not None and broker.epoch == epoch
        invariant(registered, "a record names broker %d of epoch %d", broker_id, epoch)
        return self.brokers[broker_id]

    def replay(self, record: MetadataRecord) -> None:
        match record:
            case PartitionChangeRecord():
                self._change_partition(record)
            case PartitionRecord():
                self._add_partition(record)
            case RegisterBrokerRecord():
                self._register(record)
            case BrokerChangeRecord():
                self._change_broker(record)
            case UnregisterBrokerRecord():
                self._broker(record.broker_id, record.broker_epoch)
                del self.brokers[record.broker_id]
            case TopicRecord() | TopicConfigRecord() | RemoveTopicRecord():
                self._replay_topic(record)
            case SchemaRecord() | SchemaIdsRecord():
                self._replay_schema(record)
            case HistoryRecord() | HistoryStatusRecord():
                self._replay_history(record)
            case LogStartsRecord():
                self._raise_log_starts(record)
            case OffsetRecord():
                invariant(record.next_offset > self._offset, "the metadata offset never falls")
                self._offset = record.next_offset - 1
            case ControllerEpochRecord():
                self._image = _begun(self._image, record, self._offset)
            case _:
                self._image = _replay_scalar(self._image, record)
        self._offset += 1

    def _register(self, record: RegisterBrokerRecord) -> None:
        self.brokers[record.broker_id] = _registered(record)
        next_id = max(self._image.next_broker_id, record.broker_id + 1)
        self._image = replace(self._image, next_broker_id=next_id)

    def _change_broker(self, record: BrokerChangeRecord) -> None:
        broker = self._broker(record.broker_id, record.broker_epoch)
        if record.fenced is not None:
            broker = replace(broker, fenced=record.fenced)
        if record.in_controlled_shutdown is not None:
            broker = replace(broker, in_controlled_shutdown=record.in_controlled_shutdown)
        self.brokers[broker.id] = broker

    def _replay_topic(self, record: TopicRecord | TopicConfigRecord | RemoveTopicRecord) -> None:
        match record:
            case TopicRecord():
                invariant(record.name not in self.topic_ids, "the topic %s is created twice", record.name)
                self.topic_ids[record.name] = record.topic_id
                config = MappingProxyType(dict(record.config))
                self.topics[record.topic_id] = TopicState(record.name, record.topic_id, config, record.internal)
            case TopicConfigRecord():
                config = MappingProxyType(dict(record.config))
                self.topics[record.topic_id] = replace(self._topic(record.topic_id), config=config)
            case RemoveTopicRecord():
                del self.topic_ids[self._topic(record.topic_id).name]
                del self.topics[record.topic_id]
                self._partitions.pop(record.topic_id, None)
                self._image = replace(self._image, tombstones=self._image.tombstones.with_one(record.topic_id))

    def _replay_schema(self, record: SchemaRecord | SchemaIdsRecord) -> None:
        topic = self._topic(record.topic_id)
        if isinstance(record, SchemaIdsRecord):
            schema_ids = max(topic.schema_ids, record.next_schema_id)
            self.topics[record.topic_id] = replace(topic, schema_ids=schema_ids)
            return
        new = record.schema_id <= topic.next_schema_id and not is_known(topic.schemas, record.schema_id)
        invariant(new, "schema %d of %s: a gap, or known", record.schema_id, topic.name)
        self.topics[record.topic_id] = replace(
            topic, schemas=with_schema(topic.schemas, record.schema_id, record.schema)
        )

    def _replay_history(self, record: HistoryRecord | HistoryStatusRecord) -> None:
        topic = self._topic(record.topic_id)
        self.topics[record.topic_id] = replace(topic, history=replayed(topic.history, record))

    def _raise_log_starts(self, record: LogStartsRecord) -> None:
        topic, starts = self._topic(record.topic_id), tuple(record.starts)
        risen = not_below(starts, topic.log_starts)
        invariant(risen, "log starts of %s fall from %s to %s", topic.name, topic.log_starts, starts)
        self.topics[record.topic_id] = replace(topic, log_starts=starts)

    def _add_partition(self, record: PartitionRecord) -> None:
        partitions = self._partitions_of(record.topic_id)
        follows = record.partition == len(partitions)
        invariant(follows, "partition %d of %s: a gap", record.partition, record.topic_id)
        partitions.append(
            _checked(
                PartitionRegistration(
                    replicas=tuple(record.replicas),
                    isr=tuple(record.isr),
                    leader=record.leader,
                    leader_epoch=record.leader_epoch,
                    partition_epoch=record.partition_epoch,
                    adding=tuple(record.adding),
                    removing=tuple(record.removing),
                    damaged=tuple(record.damaged),
                    elr=tuple(record.elr),
                    last_known_elr=tuple(record.last_known_elr),
                    unclean_epoch=record.unclean_epoch,
                    lacking=record.lacking,
                )
            )
        )

    def _change_partition(self, record: PartitionChangeRecord) -> None:
        partitions = self._partitions_of(record.topic_id)
        exists = record.partition < len(partitions)
        invariant(exists, "partition %d of %s is unknown", record.partition, record.topic_id)
        before = partitions[record.partition]
        try:
            partitions[record.partition] = changed_partition(before, record)
        except InvariantError as error:
            error.concerning(f"{self._topic(record.topic_id).name}-{record.partition}", str(before), [str(record)])
            raise


def changed_partition(state: PartitionRegistration, record: PartitionChangeRecord) -> PartitionRegistration:
    """The partition after the change: its partition epoch rises, and with an election its leader epoch."""
    next_leader_epoch = state.leader_epoch + 1 if record.leader_epoch is None else record.leader_epoch
    invariant(next_leader_epoch > state.leader_epoch, "%s falls", next_leader_epoch)
    return _checked(
        PartitionRegistration(
            replicas=state.replicas if record.replicas is None else tuple(record.replicas),
            isr=state.isr if record.isr is None else tuple(record.isr),
            leader=state.leader if record.leader is None else record.leader,
            leader_epoch=state.leader_epoch if record.leader is None else next_leader_epoch,
            partition_epoch=state.partition_epoch + 1,
            adding=state.adding if record.adding is None else tuple(record.adding),
            removing=state.removing if record.removing is None else tuple(record.removing),
            damaged=state.damaged if record.damaged is None else tuple(record.damaged),
            elr=state.elr if record.elr is None else tuple(record.elr),
            last_known_elr=state.last_known_elr if record.last_known_elr is None else tuple(record.last_known_elr),
            unclean_epoch=next_leader_epoch if record.unclean else state.unclean_epoch,
            lacking=state.lacking if record.lacking is None else record.lacking,
        )
    )


def _checked(state: PartitionRegistration) -> PartitionRegistration:
    state = _without_damaged_members(state)
    sets = (state.isr, state.elr, state.last_known_elr)
    for members in sets:
        within = set(members) <= set(state.replicas)
        invariant(within, "%s is not within the replicas %s", members, state.replicas)
    disjoint = len({*state.isr, *state.elr, *state.last_known_elr}) == sum(map(len, sets))
    invariant(disjoint, "not disjoint: ISR %s, ELR %s, last known ELR %s", *sets)
    damaged_known = set(state.damaged) <= set(state.last_known_elr)
    invariant(damaged_known, "damaged %s of %s", state.damaged, state.last_known_elr)
    leads_in_sync = state.leader == NO_LEADER or state.leader in state.isr
    invariant(leads_in_sync, "leader %d not in %s", state.leader, state.isr)
    moving = set(state.adding) <= set(state.replicas) and set(state.removing) <= set(state.replicas)
    invariant(moving, "adding %s and removing %s of the replicas %s", state.adding, state.removing, state.replicas)
    invariant(bool(state.replicas) and len(set(state.replicas)) == len(state.replicas), "replicas %s", state.replicas)
    invariant(state.lacking >= 0, "%d replicas are lacking", state.lacking)
    return state


def _without_damaged_members(state: PartitionRegistration) -> PartitionRegistration:
    """Take damaged members out of the ISR: records from before the ELR existed kept a damaged last member there."""
    damaged = tuple(broker for broker in state.isr if broker in state.damaged)
    if not damaged:
        return state
    return replace(
        state,
        isr=tuple(broker for broker in state.isr if broker not in damaged),
        last_known_elr=(*state.last_known_elr, *damaged),
    )


def _begun(image: MetadataImage, record: ControllerEpochRecord, offset: int) -> MetadataImage:
    """A controller took over. Images from snapshots of earlier versions know only that one, from the beginning on."""
    invariant(record.epoch >= image.controller_epoch, "the controller epoch never falls")
    writer = MetadataWriter(record.epoch, record.writer, offset if record.begins < 0 else record.begins)
    return replace(
        image,
        controller_epoch=record.epoch,
        controller_writer=record.writer,
        controller_host=record.host,
        controller_pid=record.pid,
        controller_started_ms=record.started_ms,
        writers=(*image.writers, writer)[-WRITERS_MAX:],
    )


def _replay_scalar(image: MetadataImage, record: MetadataRecord) -> MetadataImage:
    match record:
        case ClusterRecord():
            invariant(image.cluster_id in ("", record.cluster_id), "a cluster's id never changes")
            return replace(image, cluster_id=record.cluster_id)
        case LaunchRecord():
            return replace(image, last_launch=max(image.last_launch, record.launch))
        case BrokerIdsRecord():
            return replace(image, next_broker_id=max(image.next_broker_id, record.next_broker_id))
        case ProducerIdsRecord():
            invariant(record.next_producer_id >= image.next_producer_id, "producer ids are given out once")
            return replace(image, next_producer_id=record.next_producer_id)
        case TombstonesRecord():
            return replace(image, tombstones=Tombstones(record.topic_ids))
        case OlderMetadataRecord():
            return replace(image, older_accepted_epoch=record.epoch)
        case _:
            raise InvariantError(f"no rule for the record {type(record).__name__}")
