"""Times of day: `datetime` in the public interface, integers since 1970 (UTC) on the wire and on disk.

A datetime without a zone is UTC, as it is for Arrow.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_us(moment: datetime) -> int:
    """Microseconds since 1970."""
    aware = moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)
    return (aware - EPOCH) // datetime.resolution


def to_ms(moment: datetime) -> int:
    """Milliseconds since 1970, rounded down."""
    return to_us(moment) // 1000


def to_ms_rounded_up(moment: datetime) -> int:
    """Milliseconds since 1970, rounded up."""
    return -(-to_us(moment) // 1000)


def from_us(microseconds: int) -> datetime:
    """The time, with the zone UTC."""
    return EPOCH + timedelta(microseconds=microseconds)


def from_ms(milliseconds: int) -> datetime:
    """The time, with the zone UTC."""
    return EPOCH + timedelta(milliseconds=milliseconds)
