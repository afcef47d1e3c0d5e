"""The checker finds no violation on a correct log, whatever clients do, and finds what is changed afterwards.

The log here is a tiny model: partitions are lists of cells, and a transaction's cells are shown up to the last stable
offset.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from spark_broker.model import TopicPartition
from spark_broker.testing.checker import ViolationKind, check_history
from spark_broker.testing.history import History, Isolation, Run, Snapshot, Stored
from spark_broker.testing.recorder import HistoryRecorder

PARTITIONS = [TopicPartition("t", n) for n in range(2)]
WRITERS = 2
STEPS = (
    "append",
    "append and fail",
    "append and lose",
    "begin",
    "append in transaction",
    "commit",
    "commit unheard",
    "abort",
    "poll",
    "poll uncommitted",
    "commit offsets",
    "rejoin",
    "latest",
    "snapshot",
)


@dataclass
class Cell:
    """One offset: a value, or a marker (None). `transaction` is None for a plain append."""

    value: bytes | None
    transaction: int | None = None


@dataclass
class PerfectLog:
    """A cluster that does everything right, and clients that record what it does."""

    recorder: HistoryRecorder = field(default_factory=HistoryRecorder)
    cells: dict[TopicPartition, list[Cell]] = field(default_factory=lambda: {p: [] for p in PARTITIONS})
    open: dict[int, int] = field(default_factory=dict)  # writer to its transaction
    committed: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    positions: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)
    group: dict[TopicPartition, int] = field(default_factory=dict)
    reader: int = 0
    values: int = 0
    snapshots: int = 0

    def __post_init__(self) -> None:
        self.recorder.opened("uncommitted", isolation=Isolation.READ_UNCOMMITTED)
        self.join()

    def join(self) -> None:
        """A new member of the group begins where the group has committed."""
        self.reader += 1
        name = f"member-{self.reader}"
        self.recorder.opened(name, group="g")
        for partition in PARTITIONS:
            offset = self.group.get(partition)
            self.recorder.offsets_fetched("g", partition, offset)
            self.recorder.positioned(name, partition, offset or 0)
            self.positions[name, partition] = offset or 0

    def step(self, what: str, writer: int, number: int, rows: int) -> None:
        partition = PARTITIONS[number]
        match what:
            case "append":
                self.recorder.acknowledged(self.append(f"w{writer}", partition, rows), self.end(partition) - rows)
            case "append and fail":
                self.recorder.failed(self.append(f"w{writer}", partition, rows), ValueError("timed out"))
            case "append and lose":
                self.recorder.failed(self.append(f"w{writer}", partition, rows, stored=False), ValueError("refused"))
            case "begin" if writer not in self.open:
                self.open[writer] = self.recorder.began(f"x{writer}")
            case "append in transaction" if writer in self.open:
                operation = self.append(f"x{writer}", partition, rows, self.open[writer])
                self.recorder.acknowledged(operation, self.end(partition) - rows)
            case "commit" | "commit unheard" if writer in self.open:
                commit = self.recorder.committing([self.open[writer]])
                self.close(writer, committed=True)
                if what == "commit":
                    self.recorder.committed(commit)
                else:
                    self.recorder.commit_unknown(commit, ValueError("timed out"))
            case "abort" if writer in self.open:
                transaction = self.open[writer]
                self.close(writer, committed=False)
                self.recorder.aborted(transaction)
            case _:
                self.read(what, partition, rows)

    def read(self, what: str, partition: TopicPartition, rows: int) -> None:
        match what:
            case "poll":
                self.poll(f"member-{self.reader}", partition, Isolation.READ_COMMITTED, rows)
            case "poll uncommitted":
                self.poll("uncommitted", partition, Isolation.READ_UNCOMMITTED, rows)
            case "commit offsets":
                self.group[partition] = self.positions[f"member-{self.reader}", partition]
                self.recorder.offsets_committed("g", partition, self.group[partition])
            case "rejoin":
                self.join()
            case "latest":
                self.recorder.latest_shown("observer", partition, self.end(partition))
            case "snapshot":
                self.snapshots += 1
                self.recorder.snapshot_began(f"df-{self.snapshots}")
                self.snapshot(f"df-{self.snapshots}", Isolation.READ_COMMITTED, final=False)
            case _:
                pass

    def append(
        self, writer: str, partition: TopicPartition, rows: int, transaction: int | None = None, *, stored: bool = True
    ) -> int:
        values = [b"%d" % (self.values + at) for at in range(rows)]
        self.values += rows
        operation = self.recorder.invoked(writer, partition, values, transaction)
        if stored:
            self.cells[partition] += [Cell(value, transaction) for value in values]
        return operation

    def close(self, writer: int, *, committed: bool) -> None:
        transaction = self.open.pop(writer)
        self.ended.add(transaction)
        if committed:
            self.committed.add(transaction)
        for cells in self.cells.values():
            if any(cell.transaction == transaction for cell in cells):
                cells.append(Cell(None))

    def end(self, partition: TopicPartition) -> int:
        return len(self.cells[partition])

    def shown(self, partition: TopicPartition, isolation: Isolation) -> list[Stored]:
        """What a reader of the whole partition is given."""
        cells = self.cells[partition]
        if isolation is Isolation.READ_UNCOMMITTED:
            return [Stored(partition, at, cell.value) for at, cell in enumerate(cells) if cell.value is not None]
        undecided = (at for at, cell in enumerate(cells) if cell.transaction in self.open.values())
        stable = next(undecided, len(cells))
        return [
            Stored(partition, at, cell.value)
            for at, cell in enumerate(cells[:stable])
            if cell.value is not None and (cell.transaction is None or cell.transaction in self.committed)
        ]

    def poll(self, reader: str, partition: TopicPartition, isolation: Isolation, rows: int) -> None:
        due = self.positions.get((reader, partition), 0)
        for row in [row for row in self.shown(partition, isolation) if row.offset >= due][:rows]:
            self.recorder.polled(reader, partition, row.offset, [row.value])
            self.positions[reader, partition] = row.offset + 1

    def snapshot(self, name: str, isolation: Isolation, *, final: bool = True) -> None:
        rows = [row for partition in PARTITIONS for row in self.shown(partition, isolation)]
        self.recorder.snapshot(name, rows, isolation=isolation, final=final)

    def history(self) -> History:
        """End every transaction and read everything."""
        for writer in list(self.open):
            self.close(writer, committed=False)
        for isolation in Isolation:
            self.snapshot(f"last {isolation}", isolation)
        return self.recorder.history()


def recorded(steps: list[tuple[str, int, int, int]]) -> History:
    log = PerfectLog()
    for step in steps:
        log.step(*step)
    return log.history()


histories = st.lists(
    st.tuples(
        st.sampled_from(STEPS),
        st.integers(0, WRITERS - 1),
        st.integers(0, len(PARTITIONS) - 1),
        st.integers(1, 3),
    ),
    max_size=60,
).map(recorded)


@given(histories)
def test_a_log_that_does_everything_right_has_no_violation(history: History) -> None:
    result = check_history(history)

    assert result.ok, str(result)


@given(histories, st.integers(0, 1000))
def test_a_row_that_is_missing_at_the_end_is_found_wherever_it_was_promised_or_read(
    history: History, choice: int
) -> None:
    committed = history.events[-2]
    assert isinstance(committed, Snapshot)
    rows = [(run, at) for run in committed.runs for at in range(len(run.values))]
    if not rows:
        return
    run, at = rows[choice % len(rows)]
    kept = [other for other in committed.runs if other is not run]
    kept += [
        Run(run.partition, run.base_offset, run.values[:at]),
        Run(run.partition, run.base_offset + at + 1, run.values[at + 1 :]),
    ]
    without = Snapshot(committed.source, tuple(other for other in kept if other.values))
    before = check_history(history)

    result = check_history(History((*history.events[:-2], without)))

    # Only a value that was neither promised nor read may be missing.
    if result.ok:
        assert result.acknowledged_values == before.acknowledged_values
        assert run.values[at] not in promised_or_read(history)
    else:
        kinds = {violation.kind for violation in result.violations}
        assert kinds & {
            ViolationKind.LOST,
            ViolationKind.CHANGED,
            ViolationKind.TORN_BATCH,
            ViolationKind.TORN_TRANSACTION,
            ViolationKind.SKIPPED,
        }


def promised_or_read(history: History) -> set[bytes]:
    from spark_broker.testing.checks.facts import Facts

    facts = Facts(history.events)
    values = {value for invoked in facts.required() for value in invoked.values}
    return values | {value for read in facts.reads if not read.final for value in read.run.values}
