"""The controller's log lines about topics: one for each topic that is created, changed or deleted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spark_broker.controller.effects import Note
from spark_broker.controller.image import MetadataImage, TopicState
from spark_broker.controller.records import (
    HistoryRecord,
    HistoryStatusRecord,
    LogStartsRecord,
    MetadataRecord,
    PartitionRecord,
    RemoveTopicRecord,
    SchemaRecord,
    TopicConfigRecord,
    TopicRecord,
)
from spark_broker.controller.topic_history import TopicHistory
from spark_broker.protocol.schema_ids import is_known

OF_TOPICS = (
    TopicRecord
    | SchemaRecord
    | TopicConfigRecord
    | RemoveTopicRecord
    | PartitionRecord
    | HistoryRecord
    | HistoryStatusRecord
    | LogStartsRecord
)


def topic_notes(before: MetadataImage, after: MetadataImage, records: Sequence[MetadataRecord]) -> list[Note]:
    """The lines about these records, which turned `before` into `after`."""
    ids = dict.fromkeys(record.topic_id for record in records if isinstance(record, OF_TOPICS))
    return [note for topic_id in ids for note in _notes(before.topics.get(topic_id), after.topics.get(topic_id))]


def _notes(before: TopicState | None, after: TopicState | None) -> list[Note]:
    if after is None:
        return [] if before is None else [_note(before, "is deleted")]
    if before is None:
        settings = f", {_settings(after.config)}" if after.config else ""
        return [_note(after, f"is created with {len(after.partitions)} partitions{settings}")]
    changes = []
    if len(after.partitions) != len(before.partitions):
        changes.append(f"has {len(after.partitions)} partitions (was {len(before.partitions)})")
    if after.config != before.config:
        changes.append(f"has settings {_settings(after.config)} (was {_settings(before.config)})")
    if after.schemas != before.schemas:
        new = [n for n in range(len(after.schemas)) if is_known(after.schemas, n) and not is_known(before.schemas, n)]
        changes.append(f"has schema {', '.join(map(str, new))}")
    if after.history != before.history and after.history is not None:
        changes.append(_of_history(before.history or TopicHistory(), after.history))
    if after.log_starts != before.log_starts:
        changes.append(f"has no records before offsets {after.log_starts} any more (was {before.log_starts})")
    return [_note(after, change) for change in changes]


def _of_history(before: TopicHistory, after: TopicHistory) -> str:
    if after.missing != before.missing:
        found = f"is not found in its table: {after.stopped}. Brokers keep what they have of it"
        return f"has a history that {found if after.missing else 'is found in its table again'}"
    if after.stopped != before.stopped:
        return f"is not tiered any more: {after.stopped}" if after.stopped else "is tiered again"
    return f"has history in version {after.table_version} of its table: offsets {after.starts} to {after.ends}"


def _settings(config: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(config.items())) or "none"


def _note(topic: TopicState, what: str) -> Note:
    fields = {"topic": topic.name, "topic_id": topic.topic_id, "partitions": len(topic.partitions)}
    return Note(f"topic {topic.name} ({topic.topic_id}) {what}", expected=True, fields=fields)
