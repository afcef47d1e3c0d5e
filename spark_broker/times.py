"""Times of day: `datetime` in the public interface, integers since 1970 (UTC) on the wire and on disk.

A datetime without a zone is UTC, as it is for Arrow. So is a time that a person types or reads.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, Literal

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

LogEdge = Literal["earliest", "latest"]
"""Where a partition begins, and where it ends."""

Moment = int | LogEdge
"""What an offset is looked up by: an edge of the log, or a time, for the first record at or after it.

Times are microseconds since 1970. Every int64 is one, those before 1970 and -1, too.
"""


EARLIEST_US = (datetime.min.replace(tzinfo=UTC) - EPOCH) // datetime.resolution
"""The beginning of the year 1: Python's first moment."""

LATEST_US = (datetime.max.replace(tzinfo=UTC) - EPOCH) // datetime.resolution
"""The end of the year 9999: Python's last moment."""


def to_us(moment: datetime) -> int:
    """Microseconds since 1970."""
    aware = moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)
    return (aware - EPOCH) // datetime.resolution


def from_us(microseconds: int) -> datetime:
    """The time, with the zone UTC."""
    return EPOCH + timedelta(microseconds=microseconds)


def nearest_to_us(microseconds: int) -> datetime:
    """The time, or the nearest one that Python has: in a column of a typed topic, any 64 bits are a time."""
    return from_us(min(max(microseconds, EARLIEST_US), LATEST_US))


def from_ms(milliseconds: int) -> datetime:
    """The time, with the zone UTC."""
    return EPOCH + timedelta(milliseconds=milliseconds)


def parsed(text: str) -> datetime:
    """The time that a person typed, such as `2026-01-31T12:00` or `2026-01-31 12:00:00+01:00`; UTC where it names no
    zone. Raises ValueError.
    """
    moment = datetime.fromisoformat(text)
    try:
        return moment.replace(tzinfo=UTC) if moment.utcoffset() is None else moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{text} is not within the years 1 to 9999 in UTC") from None


def shown(moment: datetime) -> str:
    """The time as people read it, `2026-01-31 12:00:00.123Z`: in UTC, and it says so. `parsed` takes it, too."""
    return from_us(to_us(moment)).replace(tzinfo=None).isoformat(sep=" ", timespec="milliseconds") + "Z"


def shown_ms(milliseconds: int) -> str:
    """Milliseconds since 1970 as people read them; the number itself where no calendar has it."""
    try:
        return shown(from_ms(milliseconds))
    except OverflowError:
        return f"{milliseconds} ms"
