"""The log of a shard, and every log that compaction can leave of it."""

from __future__ import annotations

from spark_broker.core.groups.records import GroupRecord, OldCommit, decode_record, encode_record
from spark_broker.core.groups.state import Group, Groups

Record = GroupRecord | OldCommit


def stored(record: Record) -> Record:
    """The record once it was written and read."""
    return decode_record(*encode_record(record))


def loaded(log: list[Record]) -> dict[str, Group]:
    """The groups that the records give."""
    state = Groups()
    for record in log:
        if isinstance(record, GroupRecord):
            state.apply(record)
    state.loaded()
    return state.groups
