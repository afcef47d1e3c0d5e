"""Times of day: `datetime` in the public interface, integers since 1970 (UTC) on the wire and on disk.

A datetime without a zone is UTC, as it is for Arrow.
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


def to_us(moment: datetime) -> int:
    """Microseconds since 1970."""
    aware = moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)
    return (aware - EPOCH) // datetime.resolution


def from_us(microseconds: int) -> datetime:
    """The time, with the zone UTC."""
    return EPOCH + timedelta(microseconds=microseconds)


def from_ms(milliseconds: int) -> datetime:
    """The time, with the zone UTC."""
    return EPOCH + timedelta(milliseconds=milliseconds)
