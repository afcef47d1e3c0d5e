"""Changes of a topic's schema."""

from __future__ import annotations

from spark_broker.controller.effects import Decision
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import SchemaRecord
from spark_broker.errors import InvalidSchemaError, InvalidTopicError, UnknownTopicOrPartitionError
from spark_broker.protocol.messages import AlterTopicSchemaRequest, EmptyResponse
from spark_broker.protocol.schema import DEFAULT_SCHEMA, MAX_SCHEMA_BYTES, schema_from_bytes, schema_to_bytes
from spark_broker.protocol.schema_evolution import evolved
from spark_broker.protocol.table_columns import why_not_in_table

SCHEMAS_MAX = 1000
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

    Raises UnknownTopicOrPartitionError, InvalidTopicError (internal topics) and InvalidSchemaError.
    """
    topic = image.topic(request.name)
    if topic is None:
        raise UnknownTopicOrPartitionError(f"topic {request.name!r}")
    if topic.internal:
        raise InvalidTopicError(f"{topic.name} is an internal topic: its schema stays")
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
    if len(topic.schemas) >= SCHEMAS_MAX:
        raise InvalidSchemaError(f"topic {topic.name} has had {SCHEMAS_MAX} schemas, and takes no more")
    return Decision((SchemaRecord(topic.topic_id, len(topic.schemas), schema),), EmptyResponse())
