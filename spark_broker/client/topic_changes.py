"""What an administrator hands in to create or change a topic, as the requests have it."""

from __future__ import annotations

from spark_broker.client import given
from spark_broker.client.topic_schema import arrow_schema
from spark_broker.errors import InvalidRequestError, SparkBrokerError
from spark_broker.model import NewTopic
from spark_broker.protocol.messages import CreateTopicRequest
from spark_broker.protocol.schema import normalize_schema, schema_to_bytes
from spark_broker.setting_values import to_text


def creation_of(topic: object) -> CreateTopicRequest:
    """The request for a NewTopic. Raises InvalidDataError, InvalidTopicError and InvalidSchemaError."""
    topic = given.instance(topic, NewTopic, "a topic")
    schema = b"" if topic.schema is None else schema_to_bytes(normalize_schema(arrow_schema(topic.schema)))
    return CreateTopicRequest(
        name=given.topic_name(topic.name),
        partitions=_number(topic.partitions, "partitions"),
        replication_factor=_number(topic.replication_factor, "replication_factor"),
        schema=schema,
        config={name: value for name, value in settings_of(topic.config).items() if value is not None},
    )


def creations_of(topics: object) -> dict[str, NewTopic]:
    """Topics to create, by name; one that is named twice counts once. Raises InvalidDataError, and InvalidRequestError
    for two of one name that are not the same.
    """
    by_name: dict[str, NewTopic] = {}
    for each in given.items(topics, "topics", "NewTopic"):
        topic = given.instance(each, NewTopic, "a topic")
        other = by_name.setdefault(given.text(topic.name, "one of names"), topic)
        if other is not topic and _wanted(other) != _wanted(topic):
            raise InvalidRequestError(
                f"two topics are to be called {topic.name!r}, and they are not the same",
                hint="No topic was created. Leave one of the two out, or give it another name.",
            )
    return by_name


def _wanted(topic: NewTopic) -> CreateTopicRequest | str:
    """What is asked for, or why that cannot be."""
    try:
        return creation_of(topic)
    except SparkBrokerError as error:
        return str(error)


def settings_of(values: object) -> dict[str, str | None]:
    """Settings as the wire has them; None stays None. Raises InvalidDataError."""
    return {
        given.text(name, "a setting's name"): None if value is None else given.text(_as_text(value), f"{name}")
        for name, value in given.mapping(values, "settings", "dotted name").items()
    }


def _as_text(value: object) -> str:
    return to_text(tuple(value) if isinstance(value, list) else value)


def _number(value: int | None, what: str) -> int:
    """As the wire has it; None: the cluster's default."""
    return -1 if value is None else given.whole_number(value, what, given.INT32_BITS)
