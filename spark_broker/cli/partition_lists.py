"""Partitions as a person writes and reads them: `t` is a whole topic, `t:0,3-5` some partitions of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spark_broker.digits import digits
from spark_broker.errors import InvalidConfigError
from spark_broker.model import TopicPartition

if TYPE_CHECKING:
    from spark_broker.client.admin import Admin

PARTITIONS_MAX = 100_000
"""More than a topic has. A range that is mistyped ends here, and not when memory does."""


def parse_topic(text: str) -> tuple[str, list[int] | None]:
    """A topic, and the numbers of some of its partitions; None: all. Raises InvalidConfigError."""
    topic, colon, numbers = text.partition(":")
    if not topic or (colon and not numbers):
        raise _not_a_list(text)
    return topic, sorted({n for part in numbers.split(",") for n in _range(part, text)}) if colon else None


def _range(part: str, text: str) -> range:
    first, dash, last = part.partition("-")
    begin, end = digits(first), digits(last if dash else first)
    if begin is None or end is None or not begin <= end < PARTITIONS_MAX:
        raise _not_a_list(text)
    return range(begin, end + 1)


def partition_numbers(admin: Admin, topic: str) -> list[int]:
    """The numbers of a topic's partitions. Raises UnknownTopicOrPartitionError."""
    return [partition.partition for partition in admin.describe_topic(topic, with_offsets=False).partitions]


def chosen_partitions(admin: Admin, topics: Iterable[str]) -> list[TopicPartition]:
    """The partitions that these texts name, in order. Raises InvalidConfigError, UnknownTopicOrPartitionError."""
    chosen: set[TopicPartition] = set()
    for name, numbers in [parse_topic(text) for text in topics]:
        if numbers is None:
            numbers = partition_numbers(admin, name)
        chosen |= {TopicPartition(name, number) for number in numbers}
    return sorted(chosen)


def _not_a_list(text: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"--topic {text!r} is not TOPIC or TOPIC:PARTITIONS", hint="Write it like `flights`, or `flights:0,3-5`."
    )


def listed(partitions: Iterable[TopicPartition]) -> str:
    """The partitions of each topic, as `parse_topic` takes them; `-` for none."""
    by_topic: dict[str, list[int]] = {}
    for tp in sorted(partitions):
        by_topic.setdefault(tp.topic, []).append(tp.partition)
    return " ".join(f"{topic}:{','.join(_runs(numbers))}" for topic, numbers in by_topic.items()) or "-"


def _runs(numbers: list[int]) -> list[str]:
    """Ascending numbers; three or more that follow one another as `first-last`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs]
