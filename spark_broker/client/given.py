"""What callers hand in, as what the clients work with: the one place that converts it, or says what is taken.

Whatever has `__index__` is an integer: numpy's integers are, and they must not get as far as a client's threads.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping

from spark_broker.errors import InvalidDataError
from spark_broker.model import OffsetAndMetadata, TopicPartition

Offsets = Mapping[TopicPartition, "int | OffsetAndMetadata"]


def whole_number(value: object, what: str) -> int:
    """Raises InvalidDataError for what is no integer."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidDataError(f"{what} is {type(value).__name__}; it must be an integer") from None


def seconds(value: object, what: str) -> float:
    """A time-out. Raises InvalidDataError."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise InvalidDataError(f"{what} is {type(value).__name__}; it must be a number of seconds")
    number = float(value)
    if math.isnan(number):
        raise InvalidDataError(f"{what} is not a number")
    return number


def topic_partition(value: object) -> TopicPartition:
    """Raises InvalidDataError for what is no TopicPartition with a name and a number."""
    if not isinstance(value, TopicPartition):
        raise InvalidDataError(f"{value!r} is {type(value).__name__}; give a TopicPartition, as TopicPartition('t', 0)")
    if type(value.topic) is str and type(value.partition) is int:
        return value
    if not isinstance(value.topic, str):
        raise InvalidDataError(f"{value!r}: a topic's name is text")
    return TopicPartition(str(value.topic), whole_number(value.partition, f"the partition of {value.topic!r}"))


def topic_partitions(values: object) -> list[TopicPartition]:
    """Raises InvalidDataError."""
    if isinstance(values, TopicPartition | str | bytes) or not isinstance(values, Iterable):
        raise InvalidDataError(f"{values!r} is {type(values).__name__}; give a list of TopicPartition")
    return [topic_partition(value) for value in values]


def offset_and_metadata(value: object, tp: TopicPartition) -> OffsetAndMetadata:
    """An offset, alone or with its leader epoch and note. Raises InvalidDataError."""
    if not isinstance(value, OffsetAndMetadata):
        return OffsetAndMetadata(whole_number(value, f"the offset of {tp}"))
    epoch = value.leader_epoch
    return OffsetAndMetadata(
        whole_number(value.offset, f"the offset of {tp}"),
        None if epoch is None else whole_number(epoch, f"the leader epoch of {tp}"),
        str(value.metadata),
    )


def by_partition(values: object) -> dict[TopicPartition, object]:
    """A mapping by partition, with partitions as they should be. Raises InvalidDataError."""
    if not isinstance(values, Mapping):
        raise InvalidDataError(f"{values!r} is {type(values).__name__}; give a dict by TopicPartition")
    return {topic_partition(tp): value for tp, value in values.items()}


def offsets(values: object) -> dict[TopicPartition, OffsetAndMetadata]:
    """Offsets by partition. Raises InvalidDataError."""
    return {tp: offset_and_metadata(value, tp) for tp, value in by_partition(values).items()}
