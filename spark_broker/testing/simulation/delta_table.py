"""A simulated Delta table: versions that come one after the other, and the newest transaction of a topic in each.

It keeps the two rules of Delta that tiering rests on. A transaction that the table has seen when a write begins is left
out, silently. Of two writes of one transaction that begin before either has ended, the second one fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spark_broker.history.plan import TableCommit, TableSnapshot, Written
from spark_broker.history.steps import ConflictError
from spark_broker.testing.simulation.violation import ViolationError


class Place(NamedTuple):
    """`_partition` and `_offset` of a row."""

    partition: int
    offset: int


class Row(NamedTuple):
    """The rest of it. `leader_epoch`: `_leader_epoch`."""

    value: bytes
    leader_epoch: int


Rows = Mapping[Place, Row]


@dataclass(frozen=True, slots=True)
class TableVersion:
    """`transaction`: the newest one of the topic. `commit`: ours, if this version is one of ours."""

    rows: Rows
    transaction: int = -1
    commit: TableCommit | None = None


@dataclass(slots=True)
class SimTable:
    """`versions[n]` is version n. There is no table before the first one."""

    table_id: str
    versions: list[TableVersion] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """The number of the newest version; -1: there is no table."""
        return len(self.versions) - 1

    @property
    def rows(self) -> Rows:
        """What is in the table now."""
        return self.versions[-1].rows if self.versions else {}

    @property
    def transaction(self) -> int:
        return self.versions[-1].transaction if self.versions else -1

    def snapshot(self, recorded: int) -> TableSnapshot | None:
        """As `HistoryTable.snapshot`."""
        if not self.versions:
            return None
        commits = {v.commit.version: v.commit for v in self.versions if v.commit and v.commit.version >= recorded}
        return TableSnapshot(self.table_id, self.newest, self.transaction, commits)

    def append(self, rows: Rows, commit: TableCommit, *, began: int) -> None:
        """Commit these rows, in a write that began when `began` was the newest version. Raises ConflictError."""
        if self._is_known(commit, began):
            return
        doubled = sorted(rows.keys() & self.rows.keys())
        if doubled:
            raise ViolationError("each offset is in the table once", f"{doubled[0]} comes again with {commit}")
        self._commit({**self.rows, **rows}, commit)

    def cut(self, offsets: Mapping[int, int], commit: TableCommit, *, began: int) -> None:
        """As `HistoryTable.cut`. Raises ConflictError."""
        if not self._is_known(commit, began):
            rows = self.rows.items()
            kept = {p: row for p, row in rows if p.offset < offsets.get(p.partition, p.offset + 1)}
            self._commit(kept, commit)

    def _is_known(self, commit: TableCommit, began: int) -> bool:
        """Whether a write that began at this version leaves the transaction out. Raises ConflictError."""
        if began >= 0 and self.versions[began].transaction >= commit.version:
            return True
        changed = self.newest != began if began < 0 else self.transaction != self.versions[began].transaction
        if changed:
            raise ConflictError(f"transaction {commit.version} was committed meanwhile")
        return False

    def _commit(self, rows: Rows, commit: TableCommit) -> None:
        made = replace(commit, table_version=self.newest + 1)
        self.versions.append(TableVersion(rows, commit.version, made))

    def read_back(self, commit: TableCommit, rows: int) -> Written:
        """As `HistoryTable._read_back`. Raises ConflictError."""
        for version in reversed(self.versions):
            if version.commit is not None and version.commit.version < commit.version:
                break
            if version.commit is not None and version.commit.attempt == commit.attempt:
                return Written(self.table_id, version.commit, rows, 1, rows)
        raise ConflictError(f"transaction {commit.version} was committed by another tierer")

    def delete_before(self, starts: Mapping[int, int]) -> None:
        """As `HistoryTable.delete_before`."""
        kept = {place: row for place, row in self.rows.items() if place.offset >= starts.get(place.partition, 0)}
        if len(kept) < len(self.rows):
            self.versions.append(TableVersion(kept, self.transaction))
