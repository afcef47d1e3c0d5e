"""The log of a shard, and every log that compaction can leave of it."""

from __future__ import annotations

from random import Random

from spark_broker.core.groups.records import GroupRecord, OldCommit, decode_record, encode_record
from spark_broker.core.groups.state import Group, Groups

Record = GroupRecord | OldCommit


def stored(record: Record) -> Record:
    """The record once it was written and read."""
    return decode_record(*encode_record(record))


def compacted(log: list[Record], random: Random) -> list[Record]:
    """A pass may stop anywhere, and another one go on elsewhere: any record may be gone that a later one replaces.

    A tombstone may be gone once nothing is left before it that it deletes.
    """
    keep = random.choice([0.0, 0.3, 0.7])
    last = {record.key: at for at, record in enumerate(log)}
    left: set[object] = set()
    result: list[Record] = []
    for at, record in enumerate(log):
        superseded = last[record.key] != at
        gone = (superseded or (record.value is None and record.key not in left)) and random.random() >= keep
        if not gone:
            result.append(record)
            left.add(record.key)
    return result


def in_any_order(log: list[Record], random: Random) -> list[Record]:
    """The last value of each key, loaded in any order."""
    last = list({record.key: record for record in log}.values())
    random.shuffle(last)
    return last


def loaded(log: list[Record]) -> dict[str, Group]:
    """The groups that the records give."""
    state = Groups()
    for record in log:
        if isinstance(record, GroupRecord):
            state.apply(record)
    state.loaded()
    return state.groups
