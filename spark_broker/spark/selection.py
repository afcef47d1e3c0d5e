"""Which topics and partitions a read names: `subscribe`, `subscribePattern`, `assign` or the path of `load`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.spark.refusals import invalid_option

PARTITION_MAX = 2**31 - 1


@dataclass(frozen=True)
class SubscribedTopics:
    """All partitions of these topics."""

    topics: tuple[str, ...]


@dataclass(frozen=True)
class SubscribePattern:
    """All partitions of the topics whose whole name matches. Internal topics never match."""

    pattern: str


@dataclass(frozen=True)
class Assign:
    """These partitions, by topic."""

    partitions: Mapping[str, tuple[int, ...]]


Selection = SubscribedTopics | SubscribePattern | Assign

_KINDS = ("subscribe", "subscribePattern", "assign")


def parse_selection(values: Mapping[str, str]) -> Selection:
    """The selection, from options by their canonical name. Raises InvalidConfigError unless there is exactly one."""
    given = [name for name in (*_KINDS, "path", "paths") if name in values]
    if len(given) != 1:
        which = f"not {' and '.join(given)}" if given else "none was given"
        raise invalid_option(f"give one of {', '.join(_KINDS)} or a topic to load(); {which}")
    name, value = given[0], values[given[0]]
    if name == "subscribePattern":
        return _pattern(value)
    if name == "assign":
        return Assign(parse_assign(value))
    return SubscribedTopics(_topics(name, _paths(value) if name == "paths" else value.split(",")))


def _topics(name: str, names: list[str]) -> tuple[str, ...]:
    topics = tuple(dict.fromkeys(topic.strip() for topic in names if topic.strip()))
    if not topics:
        raise invalid_option(f"{name} names no topic")
    return topics


def _paths(text: str) -> list[str]:
    """`load(["a", "b"])` arrives as a JSON list."""
    value = parse_json("paths", text)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise invalid_option(f"paths = {text!r} is not a JSON list of topics")
    return value


def _pattern(text: str) -> SubscribePattern:
    try:
        re.compile(text)
    except re.error as error:
        raise invalid_option(f"subscribePattern = {text!r} is not a regular expression: {error}") from None
    return SubscribePattern(text)


def parse_assign(text: str) -> dict[str, tuple[int, ...]]:
    """`{"flights":[0,1]}`: sorted partitions by topic. Raises InvalidConfigError."""
    value = parse_json("assign", text)
    if not isinstance(value, dict) or not value:
        raise invalid_option(f'assign = {text!r} is not of the form {{"flights":[0,1]}}')
    return {topic: _partitions(topic, numbers) for topic, numbers in value.items()}


def _partitions(topic: str, numbers: object) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not numbers or not all(is_int(number) for number in numbers):
        raise invalid_option(f"assign: the partitions of {topic!r} are not a list of numbers")
    outside = [number for number in numbers if not 0 <= number <= PARTITION_MAX]
    if outside:
        raise invalid_option(f"assign: {topic!r} cannot have a partition {outside[0]}")
    return tuple(sorted(set(numbers)))


def parse_json(name: str, text: str) -> object:
    """The value of an option in JSON. Raises InvalidConfigError with the position of the first character that is not
    JSON.
    """
    try:
        value: object = json.loads(text)
    except UNDECODABLE as error:
        raise invalid_option(f"{name} = {text[:200]!r} is not JSON: {error}") from None
    return value


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
