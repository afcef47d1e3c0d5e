"""How much of a topic one batch of a streaming query takes: the options, and how partitions share a limit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from spark_broker.digits import digits
from spark_broker.spark.refusals import invalid_option

P = TypeVar("P")

_UNITS_MS = {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"([0-9]+)\s*([a-z]*)")


@dataclass(frozen=True)
class Limits:
    """0 means no such limit. A batch waits for `min_offsets`, but no longer than `max_delay_ms` after the last one."""

    max_offsets: int = 0
    max_bytes: int = 0
    min_offsets: int = 0
    max_delay_ms: int = 900_000

    # Invariant: min_offsets <= max_offsets, unless max_offsets is 0.


def checked(limits: Limits) -> Limits:
    """The limits. Raises InvalidConfigError if no batch could ever have enough records."""
    if 0 < limits.max_offsets < limits.min_offsets:
        raise invalid_option(
            f"minOffsetsPerTrigger = {limits.min_offsets} is more than maxOffsetsPerTrigger = {limits.max_offsets}"
        )
    return limits


def parse_duration_ms(option: str, text: str) -> int:
    """`15m`, `90s` or `1500` (milliseconds), as Spark reads durations. Raises InvalidConfigError."""
    match = _DURATION.fullmatch(text.strip().lower())
    number = None if match is None else digits(match[1])
    if match is None or number is None or (match[2] and match[2] not in _UNITS_MS):
        raise invalid_option(f"{option} = {text!r} is not a duration such as 30s, 15m or 1h")
    return int(number * _UNITS_MS[match[2] or "ms"])


def shares(limit: int, backlogs: Mapping[P, int]) -> dict[P, int]:
    """The limit, shared in proportion to the backlogs. A partition without a backlog gets nothing.

    Each other partition gets at least 1, so that none starves. So if the limit is below their number, the sum is above
    it.
    """
    sizes = {partition: size for partition, size in backlogs.items() if size > 0}
    total, count = sum(sizes.values()), len(sizes)
    if max(limit, count) >= total:
        return sizes
    rest = max(limit, count) - count  # What is left when each has its 1.
    return {partition: 1 + (size - 1) * rest // (total - count) for partition, size in sizes.items()}
