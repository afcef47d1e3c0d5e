"""The schemas of a topic by their ids. That of an id may not be known: who looks for it gets a typed error.

Ids are given out in order, and never twice. A client or a follower may lag behind. And metadata that is older than the
logs lacks schemas in the middle, until a broker has told of them (`controller.topic_schema.adopted`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import TypeVar

import pyarrow as pa

from spark_broker.errors import InvalidSchemaError, UnknownSchemaError
from spark_broker.protocol.schema import schema_from_bytes

UNKNOWN = b""
"""In the place of the schema message of an id: this schema is not known."""

UNKNOWN_SCHEMA = pa.schema([])
"""`UNKNOWN` as it is parsed. A topic's schema has a column at least."""

S = TypeVar("S", bound=Sized)


def parsed(messages: Iterable[bytes]) -> tuple[pa.Schema, ...]:
    """The schemas of these messages. Raises InvalidSchemaError."""
    return tuple(UNKNOWN_SCHEMA if message == UNKNOWN else schema_from_bytes(message) for message in messages)


def is_known(schemas: Sequence[Sized], schema_id: int) -> bool:
    """Whether the schema of this id, or its message, is among these."""
    return 0 <= schema_id < len(schemas) and len(schemas[schema_id]) > 0


def schema_at(schemas: Sequence[S], schema_id: int, whose: str = "the topic") -> S:
    """The schema of this id, or its message. Raises UnknownSchemaError."""
    if not is_known(schemas, schema_id):
        raise UnknownSchemaError(f"schema {schema_id} of {whose} is not known here")
    return schemas[schema_id]


def with_schema(messages: Sequence[bytes], schema_id: int, message: bytes) -> tuple[bytes, ...]:
    """These messages, and one more. Ids between them and the new one stay unknown."""
    unknown = [UNKNOWN] * (schema_id + 1 - len(messages))
    return (*messages[:schema_id], *unknown[1:], message, *messages[schema_id + 1 :])


def is_schema(message: bytes) -> bool:
    """Whether the bytes are one whole schema message."""
    try:
        schema_from_bytes(message)
    except InvalidSchemaError:
        return False
    return True
