"""What open transactions would commit of groups' offsets: as of the records that are not decided yet."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from spark_broker.core.groups.records import GroupRecord, OffsetKey, OffsetValue, Partition


class _Commit(NamedTuple):
    """`rank`: rises with each record of the log."""

    rank: int
    value: OffsetValue


class UndecidedOffsets:
    """A transaction's offset ranks where it was written, not where it is decided (known bug 36).

    So whatever a later record says of the same partition supersedes it, though the decision comes afterwards:
    compaction keeps the last record of each key. Invariant: each commit that is here is the last record of its key, but
    for commits of other open transactions.
    """

    def __init__(self) -> None:
        self._commits: dict[int, dict[OffsetKey, _Commit]] = {}  # by producer id
        self._written = 0

    def write(self, producer_id: int, record: GroupRecord) -> None:
        """A record of a producer's transaction. Only commits of offsets are part of transactions."""
        key, value = record
        if isinstance(key, OffsetKey) and isinstance(value, OffsetValue):
            self._written += 1
            self._commits.setdefault(producer_id, {})[key] = _Commit(self._written, value)

    def supersede(self, key: OffsetKey) -> None:
        """A record that is no transaction's says what is committed of this partition."""
        self._drop(key, before=self._written + 1)

    def decide(self, producer_id: int, *, committed: bool) -> list[GroupRecord]:
        """The producer's transaction is decided, if it has one here. Returns what it has committed."""
        commits = self._commits.pop(producer_id, {})
        if not committed:
            return []
        for key, commit in commits.items():
            self._drop(key, before=commit.rank)
        return [GroupRecord(key, commit.value) for key, commit in commits.items()]

    def _drop(self, key: OffsetKey, *, before: int) -> None:
        for producer_id, commits in list(self._commits.items()):
            if key in commits and commits[key].rank < before:
                del commits[key]
            if not commits:
                del self._commits[producer_id]

    def of(self, group_id: str, partitions: Collection[Partition] | None = None) -> Partition | None:
        """One of these partitions, or of all, whose offset an open transaction of the group may still commit."""
        for commits in self._commits.values():
            for key in commits:
                partition = (key.topic_id, key.partition)
                if key.group_id == group_id and (partitions is None or partition in partitions):
                    return partition
        return None
