"""Every log that compaction can leave of the log of a coordinator's shard."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeVar


class Keyed(Protocol):
    """A record with a key, and a value or none (a tombstone)."""

    @property
    def key(self) -> object: ...

    @property
    def value(self) -> object: ...


R = TypeVar("R", bound=Keyed)


def compacted(log: Sequence[R], random: Random) -> list[R]:
    """A pass may stop anywhere, and another one go on elsewhere: any record may be gone that a later one replaces.

    A tombstone may be gone once nothing is left before it that it deletes.
    """
    keep = random.choice([0.0, 0.3, 0.7])
    last = {record.key: at for at, record in enumerate(log)}
    left: set[object] = set()
    result: list[R] = []
    for at, record in enumerate(log):
        superseded = last[record.key] != at
        gone = (superseded or (record.value is None and record.key not in left)) and random.random() >= keep
        if not gone:
            result.append(record)
            left.add(record.key)
    return result


def in_any_order(log: Sequence[R], random: Random) -> list[R]:
    """The last value of each key, loaded in any order."""
    last = list({record.key: record for record in log}.values())
    random.shuffle(last)
    return last
