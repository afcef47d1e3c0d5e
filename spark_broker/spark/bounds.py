"""Where a read begins and ends. Options say it by name, by offset or by time, for all partitions or for each one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spark_broker.digits import digits
from spark_broker.model import TopicPartition
from spark_broker.spark.option_table import DEFAULTS, Query
from spark_broker.spark.refusals import invalid_option
from spark_broker.spark.selection import PARTITION_MAX, is_int, parse_json

LATEST_OFFSET = -1
"""In JSON, it stands for the end of the partition."""

EARLIEST_OFFSET = -2
"""In JSON, it stands for the beginning of the partition."""

ENDS = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")

_INT64_MAX = 2**63 - 1
_TIME_MAX_MS = _INT64_MAX // 1000  # in microseconds it is an int64


@dataclass(frozen=True)
class Earliest:
    """The log start of every partition."""


@dataclass(frozen=True)
class Latest:
    """The end of every partition: its last stable offset; with read_uncommitted, its high watermark."""


@dataclass(frozen=True)
class ByOffset:
    """An offset for each partition; `LATEST_OFFSET` and `EARLIEST_OFFSET` have their meaning."""

    option: str
    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True)
class ByTimestamp:
    """The first record at or after a time (us since 1970). There is one time for all partitions, or for each.

    The options have milliseconds, as those of Spark's Kafka source.
    """

    option: str
    for_all_us: int | None = None
    times_us: Mapping[TopicPartition, int] | None = None

    def of(self, tp: TopicPartition) -> int:
        if self.times_us is not None:
            return self.times_us[tp]
        return self.for_all_us or 0


Bound = Earliest | Latest | ByOffset | ByTimestamp


def parse_start(values: Mapping[str, str], query: Query) -> Bound:
    """The start of the read, from options by their canonical name.

    Of several options, the first of startingTimestamp, startingOffsetsByTimestamp and startingOffsets counts, as in
    Spark's Kafka source. Raises InvalidConfigError.
    """
    timed = _timed(values, "starting")
    if timed is not None:
        return timed
    text = values.get("startingOffsets", DEFAULTS["startingOffsets"].default_in(query)).strip()
    if text.lower() == "earliest":
        return Earliest()
    if text.lower() == "latest":
        if query is Query.BATCH:
            raise invalid_option("startingOffsets = 'latest': a batch read would always be empty; name offsets")
        return Latest()
    refused = LATEST_OFFSET if query is Query.BATCH else None
    return ByOffset("startingOffsets", _offsets("startingOffsets", text, refused=refused))


def parse_end(values: Mapping[str, str], query: Query) -> Bound:
    """The end (exclusive) of the read, in the same way. A streaming query has none. Raises InvalidConfigError."""
    if query is Query.STREAM:
        given = [name for name in ENDS if name in values]
        if given:
            raise invalid_option(f"{given[0]}: a streaming query has no end; leave it out, or read as a batch")
        return Latest()
    timed = _timed(values, "ending")
    if timed is not None:
        return timed
    text = values.get("endingOffsets", DEFAULTS["endingOffsets"].default).strip()
    if text.lower() == "latest":
        return Latest()
    if text.lower() == "earliest":
        raise invalid_option("endingOffsets = 'earliest': a batch read would always be empty; name offsets")
    return ByOffset("endingOffsets", _offsets("endingOffsets", text, refused=EARLIEST_OFFSET))


def _timed(values: Mapping[str, str], which: str) -> ByTimestamp | None:
    option = f"{which}Timestamp"
    if option in values:
        text = values[option].strip()
        time_ms = digits(text)
        if time_ms is None or time_ms > _TIME_MAX_MS:
            raise invalid_option(f"{option} = {text!r} is not a time in milliseconds since 1970")
        return ByTimestamp(option, for_all_us=time_ms * 1000)
    option = f"{which}OffsetsByTimestamp"
    if option not in values:
        return None
    times_ms = _by_partition(option, values[option], lambda ms: 0 <= ms <= _TIME_MAX_MS)
    return ByTimestamp(option, times_us={tp: ms * 1000 for tp, ms in times_ms.items()})


def _offsets(option: str, text: str, *, refused: int | None) -> dict[TopicPartition, int]:
    offsets = _by_partition(option, text, lambda offset: EARLIEST_OFFSET <= offset <= _INT64_MAX)
    for tp, offset in offsets.items():
        if offset == refused:
            name = "latest" if refused == LATEST_OFFSET else "earliest"
            raise invalid_option(f"{option}: {tp} has {refused} ({name}), which a batch read cannot use there")
    return offsets


def _by_partition(option: str, text: str, legal: Callable[[int], bool]) -> dict[TopicPartition, int]:
    """`{"flights":{"0":23,"1":-2}}`. Raises InvalidConfigError."""
    value = parse_json(option, text)
    if not isinstance(value, dict) or not all(isinstance(numbers, dict) for numbers in value.values()):
        raise invalid_option(f'{option} = {text!r} is not of the form {{"flights":{{"0":23,"1":45}}}}')
    values: dict[TopicPartition, int] = {}
    for topic, numbers in value.items():
        for partition, number in numbers.items():
            place = digits(partition)
            if place is None or place > PARTITION_MAX:
                raise invalid_option(f"{option}: {topic!r} cannot have a partition {partition!r}")
            if not is_int(number) or not legal(number):
                raise invalid_option(f"{option}: {topic}-{partition} cannot be at {number!r}")
            values[TopicPartition(topic, place)] = number
    return values
