"""What a client knows of the cluster: an immutable view, and the rule by which a newer answer changes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa

from spark_broker.client.settings import Address
from spark_broker.config import TopicConfig
from spark_broker.errors import InvalidConfigError
from spark_broker.model import INTERNAL_PREFIX, NO_LEADER
from spark_broker.protocol.messages import (
    BrokerMetadata,
    ControllerMetadata,
    HistoryMetadata,
    MetadataResponse,
    PartitionMetadata,
    TopicMetadata,
)
from spark_broker.protocol.schema import DEFAULT_SCHEMA, LOG_COLUMNS
from spark_broker.protocol.schema_ids import UNKNOWN, parsed, schema_at

TIERER = "spark-broker/"
"""What the id of an application that tiers a topic begins with."""


@dataclass(frozen=True)
class TopicView:
    """A topic as the clients use it. Schemas and settings are decoded once, on first use."""

    name: str
    topic_id: str
    partitions: tuple[PartitionMetadata, ...]
    schema_bytes: tuple[bytes, ...]
    config: Mapping[str, str]
    history: HistoryMetadata | None = None
    log_starts: tuple[int, ...] = ()
    next_tiering_ms: int = -1  # only as the controller has just answered, and not as of now
    cluster_id: str = ""

    def or_as(self, found: TopicView | None) -> TopicView:
        """The topic as another answer shows it; as it is, where that has none or another topic of its name."""
        return self if found is None or found.topic_id != self.topic_id else found

    def history_of(self, partition: int) -> tuple[int, int]:
        """The offsets of the partition that are in the topic's Delta table: first, and end (exclusive).

        They are equal where there are none.
        """
        if self.history is None or not self.settings.delta_path or partition >= len(self.history.ends):
            return 0, 0
        end = self.history.ends[partition]
        return min(end, max(self.history.starts[partition], self.deleted_before(partition))), end

    @property
    def has_refused(self) -> bool:
        """Whether the topic's table lacks records: its own rules have refused them. The log may still have them."""
        return self.history is not None and self.history.quarantined > 0

    def from_table(self, partition: int, log_start: int) -> tuple[int, int]:
        """The offsets that a reader takes from the table: first, and end (exclusive).

        `log_start`: where the partition's log begins; -1: not known. From there on, the log also has what the table has
        refused.
        """
        start, end = self.history_of(partition)
        return start, max(start, min(end, log_start)) if self.has_refused and log_start >= 0 else end

    @property
    def tierer(self) -> str:
        """The application as which the topic's tierers write to its table."""
        return f"{TIERER}{self.cluster_id}/{self.topic_id}"

    def why_not_its_table(self, table_id: str, version: int, transaction: int | None) -> str:
        """Why a table of this id, at this version of Delta's, does not have the topic's history; empty: it has.

        `transaction`: the tierers' newest there; None: not known. An older version would have gaps, also if others have
        written to it since.
        """
        history = self.history
        if history is None or history.version < 0:
            return ""
        if table_id != history.table_id:
            return f"it was replaced, or delta.path was changed: its id is {table_id}, it was {history.table_id}"
        if version < history.table_version:
            return f"it was taken back to version {version}, and the history needs version {history.table_version}"
        if transaction is not None and transaction < history.version:
            return f"it was taken back to transaction {transaction}, and the history needs {history.version}"
        return ""

    def why_not_its_columns(self, table_id: str, columns: Iterable[str]) -> str:
        """Why a table of this id, with these columns, lacks what was tiered; empty: nothing shows it, or it is another.

        A column that came to the topic later may not be in the table yet. Those of its first schema always are, and so
        are those that say where each record was.
        """
        if self.history is None or self.history.version < 0 or table_id != self.history.table_id:
            return ""
        there = {name.lower() for name in columns}
        lost = [name for name in (*LOG_COLUMNS, *self.schemas[0].names) if name.lower() not in there]
        return f"it has no column {', '.join(lost)} any more, which was renamed or dropped" if lost else ""

    def deleted_before(self, partition: int) -> int:
        """Records of the partition before this offset were deleted, wherever they were; 0: none were."""
        return self.log_starts[partition] if partition < len(self.log_starts) else 0

    def begins(self, partition: int, log_start: int) -> int:
        """The first offset of the partition whose log begins here: it may be in the topic's table."""
        start, end = self.history_of(partition)
        return min(start, log_start) if start < end else log_start

    @property
    def schema_id(self) -> int:
        """Id of the current schema, the last one."""
        return max(0, len(self.schema_bytes) - 1)

    @cached_property
    def schemas(self) -> tuple[pa.Schema, ...]:
        """By schema id, as far as they are known (`schema_of`)."""
        return parsed(self.schema_bytes) or (DEFAULT_SCHEMA,)

    def schema_of(self, schema_id: int) -> pa.Schema:
        """Raises UnknownSchemaError (retriable): this client, or the broker that it asked, may lag behind."""
        return schema_at(self.schemas, schema_id, f"topic {self.name!r}")

    @property
    def schema(self) -> pa.Schema:
        return self.schemas[-1]

    @cached_property
    def has_default_schema(self) -> bool:
        return bool(self.schema.equals(DEFAULT_SCHEMA))

    @cached_property
    def settings(self) -> TopicConfig:
        """The topic's settings, without those of newer brokers that this client does not know."""
        names = TopicConfig.setting_names()
        try:
            return TopicConfig.parse({name: value for name, value in self.config.items() if name in names})
        except InvalidConfigError as error:
            raise InvalidConfigError(f"topic {self.name!r}: {error.message}") from None

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Columns that choose the partition: `key.columns`, or `key` of Kafka's record."""
        return self.settings.key_columns or (("key",) if self.has_default_schema else ())

    @property
    def timestamp_column(self) -> str:
        """Column with the record's timestamp; empty: append time."""
        return self.settings.timestamp_column or ("timestamp" if self.has_default_schema else "")

    @property
    def internal(self) -> bool:
        return self.name.startswith(INTERNAL_PREFIX)


@dataclass(frozen=True)
class ClusterView:
    """One state of the cluster. `version` rises with each answer that was taken.

    `metadata_offset`: the view holds what the metadata log says up to this offset (exclusive).
    """

    cluster_id: str = ""
    controller_epoch: int = -1
    brokers: Mapping[int, BrokerMetadata] = field(default_factory=dict)
    topics: Mapping[str, TopicView] = field(default_factory=dict)
    controller: ControllerMetadata = field(default_factory=ControllerMetadata)
    version: int = 0
    metadata_offset: int = -1

    def is_newer_than(self, answer: MetadataResponse) -> bool:
        """Whether the broker that answered lags behind. A broker that does not name its offset counts as current."""
        same_cluster = answer.cluster_id == self.cluster_id
        return same_cluster and 0 <= answer.metadata_offset < self.metadata_offset

    def only(self, names: Iterable[str] | None) -> ClusterView:
        """The view with only these topics (None: all)."""
        if names is None:
            return self
        return replace(self, topics={name: self.topics[name] for name in names if name in self.topics})

    def topic(self, name: str) -> TopicView | None:
        return self.topics.get(name)

    def partition(self, topic: str, partition: int) -> PartitionMetadata | None:
        view = self.topics.get(topic)
        return view.partitions[partition] if view and partition < len(view.partitions) else None

    def live_broker(self, broker_id: int) -> BrokerMetadata | None:
        """The broker, unless it is unknown or fenced (no client should wait for a fenced one)."""
        broker = self.brokers.get(broker_id)
        return None if broker is None or broker.fenced else broker

    def leader(self, topic: str, partition: int) -> tuple[BrokerMetadata, PartitionMetadata] | None:
        """The live leader of a partition with its state; None while there is none."""
        state = self.partition(topic, partition)
        if state is None or state.leader == NO_LEADER:
            return None
        broker = self.live_broker(state.leader)
        return None if broker is None else (broker, state)


def address_of(broker: BrokerMetadata) -> Address:
    return Address(broker.host, broker.port)


def merge(view: ClusterView, answer: MetadataResponse, asked: Iterable[str] | None) -> ClusterView:
    """The view after a broker's answer about the topics `asked` (None: all).

    Any broker may answer, and one that lags behind the metadata log knows less than the view. Its answer
    changes and removes nothing, and adds only topics that the view lacks. Leader epochs never go back. Of an answer
    that does not name its offset, the list of brokers is ignored if an older controller made it.
    """
    if view.is_newer_than(answer):
        added = {
            topic.name: _merged_topic(None, topic, answer.cluster_id)
            for topic in answer.topics
            if topic.name not in view.topics
        }
        return replace(view, topics={**added, **view.topics}, version=view.version + 1)
    answered = {topic.name: topic for topic in answer.topics}
    topics = dict(view.topics) if asked is not None else {}
    for name in asked or ():
        if name not in answered:
            topics.pop(name, None)
    for name, topic in answered.items():
        topics[name] = _merged_topic(view.topics.get(name), topic, answer.cluster_id)
    same_cluster = answer.cluster_id == view.cluster_id
    # An offset says more than an epoch: where older metadata was accepted, controllers count from a lower epoch again.
    later = answer.controller_epoch >= view.controller_epoch
    newer = not same_cluster or (
        later if answer.metadata_offset < 0 else answer.metadata_offset >= view.metadata_offset
    )
    return ClusterView(
        cluster_id=answer.cluster_id,
        controller_epoch=answer.controller_epoch if newer else view.controller_epoch,
        brokers={broker.id: broker for broker in answer.brokers} if newer else view.brokers,
        topics=topics,
        controller=answer.controller if newer else view.controller,
        version=view.version + 1,
        metadata_offset=max(answer.metadata_offset, view.metadata_offset if same_cluster else -1),
    )


def _merged_topic(old: TopicView | None, new: TopicMetadata, cluster_id: str) -> TopicView:
    partitions = sorted(new.partitions, key=lambda state: state.partition)
    if old is not None and old.topic_id == new.topic_id:
        partitions = [_newer(old, state) for state in partitions] + list(old.partitions[len(partitions) :])
        # Schemas are only ever added: a broker that has fewer of them lags behind.
        schemas = max(tuple(new.schemas), old.schema_bytes, key=lambda known: (len(known), -known.count(UNKNOWN)))
        unchanged = (old.schema_bytes, old.config, old.history, old.log_starts)
        if (schemas, new.config, new.history, tuple(new.log_starts)) == unchanged:
            return _with_partitions(old, tuple(partitions))
        return _topic_view(new, tuple(partitions), schemas, cluster_id)
    return _topic_view(new, tuple(partitions), tuple(new.schemas), cluster_id)


def _topic_view(
    new: TopicMetadata, partitions: tuple[PartitionMetadata, ...], schemas: tuple[bytes, ...], cluster_id: str
) -> TopicView:
    return TopicView(
        new.name,
        new.topic_id,
        partitions,
        schemas,
        new.config,
        new.history,
        tuple(new.log_starts),
        new.next_tiering_ms,
        cluster_id,
    )


def _newer(old: TopicView, state: PartitionMetadata) -> PartitionMetadata:
    if state.partition >= len(old.partitions):
        return state
    current = old.partitions[state.partition]
    return (
        current
        if (state.leader_epoch, state.partition_epoch) < (current.leader_epoch, current.partition_epoch)
        else state
    )


def _with_partitions(old: TopicView, partitions: tuple[PartitionMetadata, ...]) -> TopicView:
    """The topic with these partitions. It keeps what it has decoded already."""
    if partitions == old.partitions:
        return old
    new = replace(old, partitions=partitions)
    for name in ("schemas", "has_default_schema", "settings"):
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]
    return new
