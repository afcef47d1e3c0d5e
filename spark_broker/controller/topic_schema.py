"""Changes of a topic's schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from spark_broker.controller.effects import Decision
from spark_broker.controller.image import MetadataImage, TopicState
from spark_broker.controller.lineage import SCHEMA_IDS_SPARED
from spark_broker.controller.named_topic import named_topic
from spark_broker.controller.records import SchemaRecord
from spark_broker.controller.unclean import awaits_comparison
from spark_broker.errors import (
    InvalidSchemaError,
    InvalidTopicError,
    LeaderNotAvailableError,
)
from spark_broker.protocol.messages import AlterTopicSchemaRequest, EmptyResponse, TopicSchema
from spark_broker.protocol.schema import DEFAULT_SCHEMA, MAX_SCHEMA_BYTES, schema_from_bytes, schema_to_bytes
from spark_broker.protocol.schema_evolution import evolved
from spark_broker.protocol.schema_ids import UNKNOWN, is_known, is_schema, with_schema
from spark_broker.protocol.table_columns import why_not_in_table

SCHEMAS_MAX = SCHEMA_IDS_SPARED
"""Most schemas of one topic: every client gets all of them."""


SCHEMAS_BYTES_MAX = 24 << 20
"""Most bytes of the schemas of all topics. Brokers and clients that ask for all topics get them in one message."""

SMALL_BYTES = 4096
SMALL_BYTES_MAX = 32 << 20
"""Small schemas are taken up to this limit: a few large ones must not keep others from making topics."""


def check_size(image: MetadataImage, schema: bytes) -> None:
    """Raises InvalidSchemaError for a schema that no broker would read, or that does not fit beside the others."""
    if len(schema) > MAX_SCHEMA_BYTES:
        raise InvalidSchemaError(f"a schema message of {len(schema)} bytes; the limit is {MAX_SCHEMA_BYTES}")
    limit = SMALL_BYTES_MAX if len(schema) <= SMALL_BYTES else SCHEMAS_BYTES_MAX
    total = len(schema) + sum(len(each) for topic in image.topics.values() for each in topic.schemas)
    if total > limit:
        raise InvalidSchemaError(
            f"the schemas of all topics would have {total} bytes; the limit is {limit}",
            hint="A topic keeps every schema that it had: delete topics whose large schema has changed often.",
        )


def alter_topic_schema(image: MetadataImage, request: AlterTopicSchemaRequest) -> Decision:
    """Add columns, or widen types. A schema that changes nothing is not recorded.

    Raises UnknownTopicOrPartitionError, InconsistentTopicIdError, InvalidTopicError (internal topics),
    InvalidSchemaError and LeaderNotAvailableError (older metadata was accepted, and brokers may still tell of newer
    schemas).
    """
    topic = named_topic(image, request.name, request.topic_id)
    if topic.internal:
        raise InvalidTopicError(f"{topic.name} is an internal topic: its schema stays")
    _check_compared(topic)
    current = schema_from_bytes(topic.schemas[-1])
    if current.equals(DEFAULT_SCHEMA):
        hint = "Create a topic with columns of its own."
        raise InvalidSchemaError(f"topic {topic.name} has Kafka's record, which stays as it is", hint=hint)
    new = evolved(current, schema_from_bytes(request.schema))
    why = why_not_in_table(new) if topic.config.get("delta.path") else ""
    if why and not why_not_in_table(current):
        raise InvalidSchemaError(f"topic {topic.name} has a delta.path: {why}")
    schema = schema_to_bytes(new)
    if schema == topic.schemas[-1]:
        return Decision((), EmptyResponse())
    check_size(image, schema)
    if len(topic.schemas) - topic.schemas.count(UNKNOWN) >= SCHEMAS_MAX:
        raise InvalidSchemaError(f"topic {topic.name} has had {SCHEMAS_MAX} schemas, and takes no more")
    return Decision((SchemaRecord(topic.topic_id, topic.next_schema_id, schema),), EmptyResponse())


def _check_compared(topic: TopicState) -> None:
    """Raises LeaderNotAvailableError while a replica may have schemas that this topic had, and lacks.

    Columns of both would otherwise have to be those of one topic. No id was given out since ids were spared.
    """
    if topic.schema_ids <= len(topic.schemas):
        return
    waiting = next((number for number, state in enumerate(topic.partitions) if awaits_comparison(state)), None)
    if waiting is not None:
        raise LeaderNotAvailableError(
            f"older metadata was accepted, and the replicas of {topic.name}-{waiting} were not compared yet: they may "
            "have columns of the topic that the metadata lacks"
        )


def adopted(image: MetadataImage, told: Iterable[TopicSchema]) -> Sequence[SchemaRecord]:
    """The schemas of which a broker tells, as far as this log lacks them: it is an older copy that was accepted.

    Their batches can be read then. An id that was never given out is not taken, and a schema that is known stays. The
    schemas were within all limits when they were made, and so they are taken whatever the limits are now.
    """
    by_topic: dict[str, dict[int, bytes]] = {}
    for each in told:
        topic = image.topics.get(each.topic_id)
        lacks = topic is not None and not is_known(topic.schemas, each.schema_id)
        if topic is not None and lacks and each.schema_id < topic.schema_ids and is_schema(each.schema):
            by_topic.setdefault(each.topic_id, {})[each.schema_id] = each.schema
    return [record for topic_id, new in by_topic.items() for record in _taken_in(image.topics[topic_id], new)]


def _taken_in(topic: TopicState, new: dict[int, bytes]) -> Iterable[SchemaRecord]:
    schemas = topic.schemas
    for schema_id in sorted(new):
        schemas = with_schema(schemas, schema_id, new[schema_id])
        yield SchemaRecord(topic.topic_id, schema_id, new[schema_id])
    united = _united(schemas)
    if united != schemas[-1] and len(united) <= MAX_SCHEMA_BYTES:
        yield SchemaRecord(topic.topic_id, max(len(schemas), topic.schema_ids), united)


def _united(schemas: Sequence[bytes]) -> bytes:
    """A schema under which all records can be read. It is the last one, unless that one was made without the others.

    Where two of them have one column with types that do not go together, records of the older one cannot be read.
    """
    *older, newest = [message for message in schemas if message != UNKNOWN]
    columns = {field.name.lower(): field for field in schema_from_bytes(newest)}
    count = len(columns)
    for message in older:
        for field in schema_from_bytes(message):
            columns.setdefault(field.name.lower(), field.with_nullable(True))
    return newest if len(columns) == count else schema_to_bytes(pa.schema(list(columns.values())))
