"""A simulated tierer: it carries out the production steps of a try, over the simulated network and a simulated table.

Each step takes a while. So others act in between, and the process may die there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.offset_lookup import OffsetLookup, Reach, all_at
from spark_broker.errors import SparkBrokerError, TieringStoppedError, UnknownTopicOrPartitionError
from spark_broker.history.attempt import Attempt, TieredTopic, confirmation
from spark_broker.history.plan import TableCommit, TieringRange
from spark_broker.history.steps import (
    START_OVER,
    AppendRecords,
    CompareWithLogs,
    Confirm,
    CutTable,
    DeleteRows,
    ListLogs,
    RaiseLogStarts,
    ReadClock,
    ReadRecords,
    ReadTable,
    Step,
    Steps,
)
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import (
    CallRequest,
    MetadataRequest,
    RaiseLogStartsRequest,
)
from spark_broker.testing.simulation.client import Client
from spark_broker.testing.simulation.delta_table import Place, Row, SimTable
from spark_broker.testing.simulation.lookups import look_up
from spark_broker.testing.simulation.machine import EPOCH_MS
from spark_broker.testing.simulation.range_reads import RangeReads
from spark_broker.testing.simulation.trace import TraceKind
from spark_broker.testing.simulation.violation import ViolationError
from spark_broker.times import LATEST

if TYPE_CHECKING:
    from spark_broker.testing.simulation.tiering import Tiering
    from spark_broker.testing.simulation.world import World

CALL_TIMEOUT_MS = 1000
TELL_TRIES = 8
"""How often a call to the controller is repeated while nobody answers."""


class SimTierer(Client):
    """Tiers all topics that have a table, again and again."""

    def __init__(self, world: World, tiering: Tiering, name: str) -> None:
        super().__init__(world, name)
        self._tiering = tiering
        self._topics: list[str] = []  # still to be tiered in this round
        self._topic = TopicView("", "", (), (), {})
        self._table = SimTable("")
        self._steps: Steps[TieredTopic] | None = None
        self._rows: dict[Place, Row] = {}  # for the next append
        self._ids = 0

    def start(self) -> None:
        self._rest()

    def refreshed(self) -> bool:
        return False

    def _rest(self) -> None:
        self._steps = None
        interval_ms = 50.0 if self.world.faults.over else self._tiering.draw.interval_ms
        self._later(interval_ms, "tier", self._begin_round)

    def _later(self, mean_ms: float, label: str, action: Callable[[], object]) -> None:
        delay_ms = mean_ms * (0.5 + self.world.client_rng.random())
        self.world.scheduler.after(delay_ms, self, label, action)

    def _begin_round(self) -> None:
        self._topics = []
        self._refresh()

    def _refresh(self) -> None:
        """Every try begins with the newest metadata that a broker has."""
        self.ask_any(MetadataRequest(), self._metadata_came, lambda _: self._rest())

    def _metadata_came(self, answer: object) -> None:
        self.learn(answer)
        tiered = [topic for topic in self.view.topics.values() if topic.settings.delta_path]
        if not self._topics:
            self._topics = [topic.name for topic in tiered]
        names = {topic.name: topic for topic in tiered}
        topic = names.get(self._topics.pop(0)) if self._topics else None
        if topic is None:
            self._rest()
            return
        self._topic, self._table = topic, self._tiering.table_of(topic.topic_id)
        everything = self.world.faults.over or self._tiering.draw.tiers_active
        self._steps = Attempt(topic, include_active_segments=everything, new_id=self._new_id).steps()
        self._go_on()

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self.name}/{self._ids}"

    def _go_on(self) -> None:
        """The next step."""
        if self._steps is None:
            return
        try:
            step = next(self._steps)
        except StopIteration:
            self._ended("")
            return
        except TieringStoppedError as error:
            raise ViolationError("tiering goes on", f"{self}: {error.message}", self._topic.name) from error
        except START_OVER as error:
            self._failed(error)
            return
        self._later(self._tiering.draw.step_ms, type(step).__name__, lambda: self._carry_out(step))

    def _ended(self, why: str) -> None:
        self.world.trace.count("tries of tiering that failed" if why else "tries of tiering")
        if why:
            self.world.note(self.name, TraceKind.CLIENT, f"a try for {self._topic.name} ends: {why}")
        if self._topics:
            self._refresh()
        else:
            self._rest()

    def _failed(self, error: Exception) -> None:
        """The next round tries again. Only what others did meanwhile may refuse a step."""
        known = isinstance(error, SparkBrokerError) and (error.retriable or self._tiering.may_refuse(error))
        if not known and not isinstance(error, START_OVER):
            raise ViolationError("the cluster takes what was tiered", f"{self}: {error}", self._topic.name)
        self._steps = None
        self._ended(f"{type(error).__name__}: {error}")

    def _answered(self, step: Step[Any], answer: object) -> None:
        step.answer = answer
        self._go_on()

    def _carry_out(self, step: Step[Any]) -> None:
        match step:
            case ReadTable():
                self._answered(step, self._table.snapshot(step.recorded))
            case ReadClock():
                self._answered(step, EPOCH_MS + self.world.scheduler.now_ms)
            case ListLogs():
                self._list(step)
            case CompareWithLogs():
                self._read(step.in_logs, lambda rows: self._answered(step, self._departures(step.ranges, rows)))
            case ReadRecords():
                self._read(step.ranges, lambda rows: self._made_ready(step, rows))
            case AppendRecords():
                began = self._table.newest
                self._later(self._tiering.draw.step_ms, "commit", lambda: self._append(step, began))
            case Confirm():
                epoch = self.view.controller_epoch
                self._tell(confirmation(self._topic, epoch, step), lambda: self._answered(step, None))
            case RaiseLogStarts():
                request = RaiseLogStartsRequest(self._topic.topic_id, list(step.starts))
                self._tell(request, lambda: self._answered(step, None))
            case DeleteRows():
                self._table.delete_before(step.before)
                self._tiering.rows_deleted()
                self._answered(step, None)
            case CutTable():
                self._check_cut(step)
                began = self._table.newest
                self._later(self._tiering.draw.step_ms, "cut", lambda: self._cut(step, began))
            case _:
                raise ViolationError("every record has room in the table", f"{self}: {step}", self._topic.name)

    def _list(self, step: ListLogs) -> None:
        topic = self._topic
        partitions = [TopicPartition(topic.name, state.partition) for state in topic.partitions]
        starts = [*step.ends, *[0] * (len(partitions) - len(step.ends))]
        reaches = {tp: Reach(start, max_bytes=1) for tp, start in zip(partitions, starts, strict=False)}
        lookup = OffsetLookup(all_at(partitions, LATEST), read_committed=True, reaches=reaches)

        def listed() -> None:
            errors = [*lookup.failures.values()]
            if not errors and any(info.topic_id != topic.topic_id for info in lookup.found.values()):
                errors = [UnknownTopicOrPartitionError("created again")]
            if errors:
                self._failed(errors[0])
            else:
                self._answered(step, [lookup.found[tp] for tp in partitions])

        look_up(self.world.network, self, lookup, self.view, listed, CALL_TIMEOUT_MS)

    def _read(self, ranges: Iterable[TieringRange], done: Callable[[dict[Place, Row]], None]) -> None:
        RangeReads(self, self._topic.name, list(ranges), done, self._failed).start()

    def _departures(self, ranges: Sequence[TieringRange], in_logs: dict[Place, Row]) -> dict[int, int]:
        """As `HistoryTable.departures`."""
        first: dict[int, int] = {}
        for place, row in self._table.rows.items():
            within = any(r.partition == place.partition and r.start <= place.offset < r.end for r in ranges)
            there = in_logs.get(place)
            if within and (there is None or there.leader_epoch != row.leader_epoch):
                first[place.partition] = min(place.offset, first.get(place.partition, place.offset))
        return first

    def _made_ready(self, step: ReadRecords, rows: dict[Place, Row]) -> None:
        self._rows = rows
        self._answered(step, 0)

    def _append(self, step: AppendRecords, began: int) -> None:
        ends = list(step.commit.ends)
        self._write(step, lambda: self._table.append(self._rows, step.commit, began=began), f"up to {ends}")

    def _cut(self, step: CutTable, began: int) -> None:
        self._rows = {}
        self._write(step, lambda: self._table.cut(step.offsets, step.commit, began=began), f"cuts it at {step.offsets}")

    def _write(self, step: AppendRecords | CutTable, write: Callable[[], None], what: str) -> None:
        try:
            write()
        except START_OVER as error:
            self._failed(error)
            return
        text = f"transaction {step.commit.version} of {self._topic.name} {what}"
        self.world.note(self.name, TraceKind.CLIENT, text)
        self._later(self._tiering.draw.step_ms, "read back", lambda: self._read_back(step, step.commit))

    def _check_cut(self, step: CutTable) -> None:
        """Only what a log may have lost is cut."""
        beyond = {p.partition for p in self._table.rows if p.offset >= step.offsets.get(p.partition, p.offset + 1)}
        if any((self._topic.topic_id, number) not in self.world.unclean.released for number in beyond):
            text = f"{self}: {step.offsets}"
            raise ViolationError("nothing is cut without an unclean election", text, self._topic.name)
        self.world.trace.count("tables cut back")

    def _read_back(self, step: AppendRecords | CutTable, commit: TableCommit) -> None:
        try:
            written = self._table.read_back(commit, len(self._rows))
        except START_OVER as error:
            self._failed(error)
            return
        self._answered(step, written)

    def _tell(self, request: CallRequest, done: Callable[[], object], tries: int = TELL_TRIES) -> None:
        """Ask the controller through any broker, again and again while nobody answers."""

        def failed(error: SparkBrokerError) -> None:
            if error.retriable and tries > 1:
                self._later(100.0, "tell again", lambda: self._tell(request, done, tries - 1))
            else:
                self._failed(error)

        def answered(_: object) -> None:
            done()

        self.ask_any(request, answered, failed, CALL_TIMEOUT_MS)
