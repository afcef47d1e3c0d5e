"""What callers hand in, as what the clients work with: the one place that converts it, or says what is taken.

Whatever has `__index__` is an integer: numpy's integers are, and they must not get as far as a client's threads. Text
is text that UTF-8 can hold, of Python's own class. Anything else is an InvalidDataError in the caller.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TypeVar

from spark_broker.core.groups.requests import METADATA_MAX
from spark_broker.errors import (
    InvalidDataError,
    InvalidTimestampError,
    InvalidTopicError,
    OffsetMetadataTooLargeError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import (
    NAME_MAX,
    NO_EPOCH,
    GroupMetadata,
    NewTopic,
    OffsetAndMetadata,
    TopicPartition,
    known_epoch,
)
from spark_broker.setting_values import truth
from spark_broker.times import to_us
from spark_broker.visible import shown

Offsets = Mapping[TopicPartition, "int | OffsetAndMetadata"]

INT32_BITS = 32
INT64_BITS = 64
ANY_BITS = 2**16
"""For a number whose range is checked where it is used."""

_T = TypeVar("_T")


def _shown(value: object) -> str:
    return f"{shown(value)} is {type(value).__name__}"


def _is_array(value: object) -> bool:
    """Of numpy or pandas, with more than a number in it."""
    return getattr(value, "ndim", None) not in (None, 0)


def whole_number(value: object, what: str, bits: int = INT64_BITS) -> int:
    """Raises InvalidDataError for what is no integer, or has more than so many bits with its sign."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidDataError(f"{what} is {type(value).__name__}; it must be an integer") from None
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise InvalidDataError(f"{what} is not from -2**{bits - 1} to 2**{bits - 1} - 1")
    return number


def seconds(value: object, what: str) -> float:
    """A time-out. Raises InvalidDataError."""
    if isinstance(value, str | bytes | bytearray) or not hasattr(value, "__float__") or _is_array(value):
        raise InvalidDataError(f"{what} is {type(value).__name__}; it must be a number of seconds")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidDataError(f"{what} is {type(value).__name__}, not a number of seconds: {error}") from None
    if math.isnan(number):
        raise InvalidDataError(f"{what} is not a number")
    return number


def flag(value: object, what: str) -> bool:
    """True or False, also numpy's. Raises InvalidDataError: a text such as "false" would count as true."""
    found = truth(value)
    if found is None:
        raise InvalidDataError(f"{what} is {type(value).__name__}; it must be True or False")
    return found


def text(value: object, what: str) -> str:
    """Raises InvalidDataError for what is no text, or cannot be written as UTF-8."""
    if not isinstance(value, str):
        raise no_text(value, what)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidDataError(f"{what} is not Unicode text: {error}") from None
    return str.__str__(value)  # of a subclass (numpy's, an Enum), its text, and not what it shows


def no_text(value: object, what: str) -> InvalidDataError:
    """The error for what is no text."""
    return InvalidDataError(f"{what} is {type(value).__name__}; it must be text")


def is_hashable(value: object) -> bool:
    """Whether a dict can look it up. (`Hashable` says of a tuple of lists that it can.)"""
    try:
        hash(value)
    except (TypeError, ValueError):  # ValueError: of a memoryview
        return False
    return True


def texts(values: object, what: str) -> list[str]:
    """A list of texts; one text alone is a list of one. Raises InvalidDataError."""
    if isinstance(values, str):
        return [text(values, what)]
    return [text(value, f"one of {what}") for value in items(values, what, "text")]


def names(values: object, what: str) -> list[str]:
    """A list of texts, each of which counts once. Raises InvalidDataError."""
    return list(dict.fromkeys(texts(values, what)))


def items(values: object, what: str, of: str) -> list[object]:
    """The members of what can be iterated, but for bytes. Raises InvalidDataError."""
    if isinstance(values, str | bytes | bytearray | TopicPartition | NewTopic) or not isinstance(values, Iterable):
        raise InvalidDataError(f"{what}: {_shown(values)}; give a list of {of}")
    try:
        return list(values)
    except (TypeError, ValueError) as error:  # an array without a dimension, a view that was released
        raise InvalidDataError(f"{what}: {_shown(values)}; give a list of {of} ({error})") from None


def mapping(values: object, what: str, by: str) -> dict[object, object]:
    """Raises InvalidDataError for what is no mapping."""
    if not isinstance(values, Mapping):
        raise InvalidDataError(f"{what}: {_shown(values)}; give a dict by {by}")
    return dict(values)


def group(value: object) -> GroupMetadata:
    """The id of a group, or who its member is. Raises InvalidDataError."""
    return value if isinstance(value, GroupMetadata) else GroupMetadata(text(value, "group_id"))


def instance(value: object, kind: type[_T], what: str) -> _T:
    """Raises InvalidDataError for what is not of this class."""
    if not isinstance(value, kind):
        raise InvalidDataError(f"{what}: {_shown(value)}; give a {kind.__name__}")
    return value


def topic_name(value: object) -> str:
    """A topic's name. Raises InvalidDataError, and InvalidTopicError for a name that no topic can have."""
    name = text(value, "a topic's name")
    if not 1 <= len(name) <= NAME_MAX:
        raise InvalidTopicError(f"topic name {name[:300]!r} of {len(name)} characters")
    return name


def topic_names(values: object) -> list[str]:
    """Names of topics; one text alone is one name. Raises what `topic_name` raises."""
    return [topic_name(value) for value in ([values] if isinstance(values, str) else items(values, "topics", "names"))]


def moment_us(value: object, what: str) -> int:
    """A datetime as microseconds since 1970; without a zone it is UTC. Raises InvalidDataError."""
    if not isinstance(value, datetime):
        raise InvalidDataError(
            f"{what} is {type(value).__name__}; it must be a datetime",
            hint="For milliseconds since 1970: datetime.fromtimestamp(milliseconds / 1000, UTC).",
        )
    try:
        moment: object = to_us(value)
    except (TypeError, ValueError, OverflowError) as error:  # pandas has times of its own, as NaT
        raise InvalidTimestampError(f"{what}: {_shown(value)}: {error}") from None
    if not isinstance(moment, int):
        raise InvalidTimestampError(f"{what}: {_shown(value)}, which is no time")
    return moment


def partition_number(value: object, what: str) -> int:
    """Raises InvalidDataError, and UnknownTopicOrPartitionError below 0: -1 would be the last one of a list."""
    number = whole_number(value, what, INT32_BITS)
    if number < 0:
        raise UnknownTopicOrPartitionError(f"{what} is {number}: partitions count from 0")
    return number


def topic_partition(value: object) -> TopicPartition:
    """Raises InvalidDataError for what is no TopicPartition, and what its name or number raises."""
    if not isinstance(value, TopicPartition):
        raise InvalidDataError(f"{_shown(value)}; give a TopicPartition, as TopicPartition('t', 0)")
    name = topic_name(value.topic)
    return TopicPartition(name, partition_number(value.partition, f"the partition of {name!r}"))


def topic_partitions(values: object) -> list[TopicPartition]:
    """Raises what `topic_partition` raises."""
    return [topic_partition(value) for value in items(values, "partitions", "TopicPartition")]


def offset_and_metadata(value: object, tp: TopicPartition) -> OffsetAndMetadata:
    """An offset, alone or with its leader epoch and note. Raises InvalidDataError and OffsetMetadataTooLargeError."""
    if not isinstance(value, OffsetAndMetadata):
        return OffsetAndMetadata(whole_number(value, f"the offset of {tp}"))
    given = NO_EPOCH if value.leader_epoch is None else value.leader_epoch  # Kafka's clients write the number.
    epoch = whole_number(given, f"the leader epoch of {tp}", INT32_BITS)
    if epoch < NO_EPOCH:
        raise InvalidDataError(f"the leader epoch of {tp} is {epoch}; give it as it was committed, or None")
    note = text(value.metadata, f"the metadata of {tp}")
    if len(note) > METADATA_MAX:
        raise OffsetMetadataTooLargeError(f"{tp}: metadata of {len(note):,} characters")
    return OffsetAndMetadata(whole_number(value.offset, f"the offset of {tp}"), known_epoch(epoch), note)


def by_partition(values: object, what: str = "offsets") -> dict[TopicPartition, object]:
    """A mapping by partition, with partitions as they should be. Raises what `topic_partition` raises, and
    InvalidDataError where two keys are one partition (numbers of two classes, say).
    """
    found: dict[TopicPartition, object] = {}
    for key, value in mapping(values, what, "TopicPartition").items():
        tp = topic_partition(key)
        if tp in found:
            raise InvalidDataError(f"{what}: {tp} is named twice")
        found[tp] = value
    return found


def offsets(values: object) -> dict[TopicPartition, OffsetAndMetadata]:
    """Offsets by partition. Raises InvalidDataError."""
    return {tp: offset_and_metadata(value, tp) for tp, value in by_partition(values).items()}
