"""Tiering in a schedule: what a seed decides about it, and what must hold of tables and of the logs above them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

from spark_broker.broker.partition import Partition
from spark_broker.client.cluster_view import ClusterView, TopicView, merge
from spark_broker.client.consumer_effects import ReadHistory
from spark_broker.client.history_reader import check_start, to_the_end
from spark_broker.client.partition_position import Prefetched
from spark_broker.controller.image import MetadataImage, TopicState
from spark_broker.errors import OffsetOutOfRangeError, SparkBrokerError
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import MetadataRequest, MetadataResponse
from spark_broker.testing.simulation.consumer import SimConsumer
from spark_broker.testing.simulation.delta_table import Place, Row, SimTable
from spark_broker.testing.simulation.fetches import Values, prefetched
from spark_broker.testing.simulation.shadow import CommittedLog, Key
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.tierer import SimTierer
from spark_broker.testing.simulation.unclean import FAULT as UNCLEAN
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess
    from spark_broker.testing.simulation.world import World

SHARE = 0.12
"""Share of the schedules without compaction whose topics have tables."""

SHARE_OF_COMPACTION = 0.3
"""The share of those with compaction, which removes records that the table has to have first."""

SHARE_OF_UNCLEAN = 0.3
"""The share of those with unclean elections, after which tables may have to be cut back."""

FAULT = "kill tierer"
LATE_READER = "late reader"
READERS_MAX = 6

SLOW_READ_MS = 400.0

NO_ROW = Row(b"a record", -1)

PART_ROWS = 30
"""A consumer reads so many rows of a table at a time."""


@dataclass(frozen=True, slots=True)
class TieringDraw:
    """The draw of one seed. Times are virtual. `tiers_active`: tiers all that is committed, sealed or not."""

    topic_config: Mapping[str, str]
    tierers: int
    interval_ms: float
    step_ms: float
    tiers_active: bool
    kill_share: float
    retention_interval_ms: int

    @staticmethod
    def draw(seed: int, swarm: Swarm, *, compacts: bool, grouped: bool) -> TieringDraw | None:
        """None: the schedule has no tables. Nothing that a group may not have read yet is deleted."""
        rng = random.Random(f"{seed}/tiering draw")
        share = SHARE_OF_COMPACTION if compacts else SHARE_OF_UNCLEAN if UNCLEAN in swarm.faults else SHARE
        if rng.random() >= share:
            return None
        config = {"local.retention.bytes": rng.choice(["1", "1", "6000"])}
        if not compacts and rng.random() < 0.4:
            config = {"storage.format": "delta"}
        config["segment.bytes"] = "1024"  # only sealed segments are dropped
        if not compacts and not grouped and rng.random() < 0.4:
            config["retention.bytes"] = rng.choice(["2000", "6000"])
        return TieringDraw(
            topic_config=config,
            tierers=rng.choice([1, 2] if compacts else [1, 1, 2]),
            interval_ms=rng.choice([20.0, 80.0, 400.0]),
            step_ms=rng.choice([1.0, 4.0, 25.0]),
            tiers_active=rng.random() < 0.4,
            kill_share=rng.choice([0.05, 0.2]),
            retention_interval_ms=rng.choice([40, 200]),
        )

    def adapt(self, swarm: Swarm) -> Swarm:
        """The schedule's other settings."""
        interval_ms = self.retention_interval_ms
        cluster = replace(swarm.settings.cluster, log_retention_check_interval_ms=interval_ms)
        usual = sum(swarm.faults.values()) or 1.0
        return replace(
            swarm,
            settings=replace(swarm.settings, cluster=cluster),
            faults={**swarm.faults, FAULT: usual * self.kill_share, LATE_READER: usual * 0.15},
            partitions=min(2, swarm.partitions),
        )


class OpenTable(NamedTuple):
    """What a reader keeps open, as `HistoryParts` does. `recorded`: the topic, after the table was opened."""

    topic: TopicView
    recorded: TopicView
    rows: Mapping[Place, Row]


class Tiering:
    """The tierers of a schedule, their tables, and the rules."""

    def __init__(self, world: World, draw: TieringDraw) -> None:
        self._world = world
        self.draw = draw
        self._tables: dict[str, SimTable] = {}
        self._tierers: list[SimTierer] = []
        self._lives = 0
        self._read_to: dict[tuple[str, TopicPartition], int] = {}
        self._opened: dict[str, OpenTable] = {}  # by reader
        self._recorded: dict[Key, dict[int, Row]] = {}  # what the table had when the history was recorded, by offset
        self._leaders_checked: set[tuple[str, Key, int]] = set()

    def topic_config(self, name: str) -> dict[str, str]:
        """Of a topic with this name."""
        return {"delta.path": f"/lake/{name}", **self.draw.topic_config}

    def table_of(self, topic_id: str) -> SimTable:
        return self._tables.setdefault(topic_id, SimTable(f"table of {topic_id}"))

    def start(self) -> None:
        """The first tierers begin."""
        for _ in range(self.draw.tierers):
            self._begin()

    def _begin(self) -> None:
        self._lives += 1
        tierer = SimTierer(self._world, self, f"tierer#{self._lives}")
        self._tierers.append(tierer)
        tierer.start()

    def strike(self, rng: random.Random) -> str:
        """kill -9 of a tierer, whatever it is doing; another one begins a little later."""
        if not self._tierers:
            return ""
        tierer = rng.choice(self._tierers)
        self._tierers.remove(tierer)
        self._world.end_client(tierer)
        delay_ms = rng.choice([1, 50, 500]) * (0.5 + rng.random())
        self._world.scheduler.after(delay_ms, self._world.operator, "another tierer", self._begin)
        return f"kill -9 of {tierer}"

    def begin_reader(self) -> str:
        """Another consumer begins, when the beginning is in the table alone."""
        consumers = self._world.consumers
        if len(consumers) >= READERS_MAX:
            return ""
        consumers.append(SimConsumer(self._world, f"c{len(consumers)}"))
        consumers[-1].start()
        return f"{consumers[-1]} begins"

    def rows_deleted(self) -> None:
        """At times, a reader begins now: brokers may lag behind the deletion."""
        if self._world.client_rng.random() < 0.5:
            self.begin_reader()

    def _cut_is_decided(self) -> None:
        """At times, the tierer dies before it makes the cut, which another one has to make then."""
        world = self._world
        if world.client_rng.random() < 0.3 and not world.faults.over:
            delay_ms = self.draw.step_ms * world.client_rng.random()
            world.scheduler.after(delay_ms, world.operator, "kill tierer", lambda: self.strike(world.client_rng))

    def may_refuse(self, error: SparkBrokerError) -> bool:
        """Records may have been deleted, or tiered and dropped, since a try began."""
        return isinstance(error, OffsetOutOfRangeError)

    # What must hold.

    def check_start(self, process: BrokerProcess, partition: Partition) -> None:
        """Known bug 30: local records are deleted only once the controller has recorded that the table has them."""
        topic = self._world.invariants.image.topics.get(partition.key[0])
        if topic is None or topic.internal:
            return
        start, bound = partition.replica.log_start_offset, self._may_begin_at(topic, partition.key[1])
        if start > bound:
            text = f"{process.name}: the log begins at {start}, the table and deletions reach {bound}"
            raise ViolationError("what is deleted is in the table", text, str(partition))

    def _may_begin_at(self, topic: TopicState, number: int) -> int:
        tiered = 0 if topic.history is None else topic.history.range_of(number)[1]
        return max(tiered, self._world.deleted_before((topic.topic_id, number)))

    def recorded(self, before: MetadataImage, image: MetadataImage) -> None:
        """The metadata log holds something new: a history that it records is in the table."""
        for topic_id, topic in image.topics.items():
            earlier = before.topics.get(topic_id)
            if topic.history is not None and (earlier is None or earlier.history != topic.history):
                self._world.trace.count("commits of tierers recorded")
                self._check_table(topic)
                if topic.history.uncut:
                    self._cut_is_decided()

    def check_all(self) -> None:
        """At the end."""
        for topic in self._world.invariants.image.topics.values():
            if not topic.internal:
                self._check_table(topic)

    def _check_table(self, topic: TopicState) -> None:
        """Known bug 31: the table has every committed record of the recorded history, each once, as it was appended.

        After an unclean election the table itself says what was committed: what is recorded stays, and has no hole.
        """
        if topic.history is None:
            return
        rows = self.table_of(topic.topic_id).rows
        for number in range(len(topic.history.ends)):
            start, end = topic.history.range_of(number)
            key, name = (topic.topic_id, number), f"{topic.name}-{number}"
            start = max(start, self._world.deleted_before(key))
            there = {o: row for (p, o), row in rows.items() if p == number and start <= o < end}
            if key in self._world.unclean.released:
                expected = {o: there.get(o, NO_ROW) for o in range(start, end)}
                expected.update((o, row) for o, row in self._recorded.get(key, {}).items() if o >= start)
            else:
                expected = dict(self._visible(key, start, end))
            if there != expected:
                differing = sorted(o for o in expected.keys() | there.keys() if expected.get(o) != there.get(o))[:3]
                text = "; ".join(f"{o}: {there.get(o)} in the table, {expected.get(o)} committed" for o in differing)
                raise ViolationError("the table has what is committed", f"of {start} up to {end}: {text}", name)
            self._recorded[key] = there

    def check_log(self, process: BrokerProcess, partition: Partition) -> None:
        """Where a leader's log reaches back into the recorded history, it has what the table has."""
        recorded, start = self._recorded.get(partition.key, {}), partition.replica.log_start_offset
        place = process.name, partition.key, partition.replica.assignment.leader_epoch
        if place in self._leaders_checked:
            return
        self._leaders_checked.add(place)
        for header in partition.log.headers(start):
            for offset in range(max(start, header.base_offset), header.next_offset):
                row = recorded.get(offset)
                if row is not None and row.leader_epoch != header.leader_epoch:
                    text = f"{process.name} leads with {offset} of epoch {header.leader_epoch}; the table has {row}"
                    raise ViolationError("the table has what the leader has", text, str(partition))

    def _visible(self, key: Key, start: int, end: int) -> Iterator[tuple[int, Row]]:
        """The committed records in this range, without those of aborted transactions."""
        world = self._world
        committed = world.invariants.committed.get(key) or CommittedLog("")
        for base, values in committed.values.items():
            header = committed.at(base)
            if header is None or base >= end or header.next_offset <= start:
                continue
            if world.transactional is not None and not world.transactional.rules.is_committed(key, base):
                continue
            for offset, value in enumerate(values, base):
                if start <= offset < end:
                    yield offset, Row(value, header.leader_epoch)

    def check_begin(self, reader: SimConsumer, tp: TopicPartition, offset: int) -> None:
        """A reader begins with the history, or where that was deleted. It begins anew only if its place was deleted, or
        lost by an unclean election.
        """
        topic = self._world.invariants.image.topic(tp.topic)
        if topic is None:
            return
        deleted = self._world.deleted_before((topic.topic_id, tp.partition))
        if offset > deleted:
            text = f"{reader.name} begins at {offset}, records before {deleted} are deleted"
            raise ViolationError("readers begin with the history", text, str(tp))
        read_to = self._read_to.get((reader.name, tp), -1)
        lost = (topic.topic_id, tp.partition) in self._world.unclean.released
        if read_to >= deleted and read_to != offset and not lost:
            text = f"{reader.name} was at {read_to}, and begins anew at {offset}; records before {deleted} are deleted"
            raise ViolationError("readers begin anew only where records were deleted", text, str(tp))

    def has_read(self, reader: SimConsumer, tp: TopicPartition, offset: int) -> None:
        """The reader was handed the records before this offset."""
        self._read_to[reader.name, tp] = offset

    def missing(self) -> str:
        """What is not in the tables yet; everything is to be there at the end."""
        for topic, number, state in self._world.invariants.image.partitions():
            machine = self._world.machine_of(state.leader)
            process = None if machine is None else machine.process
            partition = None if process is None else process.manager.find(topic.topic_id, number)
            if topic.internal or partition is None:
                continue
            end = 0 if topic.history is None else topic.history.range_of(number)[1]
            if max(end, partition.replica.first_offset) < partition.replica.high_watermark:
                return f"the history of {topic.name}-{number} ends at {end} of {partition.replica.high_watermark}"
        return ""

    # Consumers read tables.

    def read_history(self, reader: SimConsumer, asked: ReadHistory) -> None:
        """As `HistoryParts` does: the table stays open while the topic's metadata does not change."""
        opened = self._opened.get(reader.name)
        if opened is not None and opened.topic is asked.topic:
            self._later(reader, lambda: self._hand_over(reader, asked, opened))
        else:
            self._later(reader, lambda: self._open(reader, asked))

    def _later(self, reader: SimConsumer, action: Callable[[], object]) -> None:
        """Much later at times: tables and logs go on meanwhile."""
        rng = self._world.client_rng
        delay_ms = (SLOW_READ_MS if rng.random() < 0.2 else self.draw.step_ms) * (0.5 + rng.random())
        self._world.scheduler.after(delay_ms, reader, "read the table", action)

    def _open(self, reader: SimConsumer, asked: ReadHistory) -> None:
        rows = self.table_of(asked.topic.topic_id).rows
        machine = self._world.client_rng.choice(self._world.machines)

        def answered(answer: object) -> None:
            if not isinstance(answer, MetadataResponse):
                self._failed(reader, asked, cast("SparkBrokerError", answer))
                return
            recorded = asked.topic.or_as(merge(ClusterView(), answer, None).topic(asked.topic.name))
            self._opened[reader.name] = opened = OpenTable(asked.topic, recorded, rows)
            self._hand_over(reader, asked, opened)

        self._world.network.call(
            reader,
            machine.host,
            machine.address,
            MetadataRequest(certain=True),
            timeout_ms=500,
            on_answer=answered,
            on_error=answered,
        )

    def _hand_over(self, reader: SimConsumer, asked: ReadHistory, opened: OpenTable) -> None:
        try:
            check_start(opened.recorded, asked.tp.partition, asked.start)
        except OffsetOutOfRangeError as error:
            self._failed(reader, asked, error)
            return
        self._world.trace.count("parts of tables read")
        reader.machine.history_came(asked, _part(asked, opened.rows))
        reader.advance()

    def _failed(self, reader: SimConsumer, asked: ReadHistory, error: SparkBrokerError) -> None:
        self._opened.pop(reader.name, None)
        reader.machine.history_failed(asked, error, reader.now_ms)
        reader.advance()


def _part(asked: ReadHistory, rows: Mapping[Place, Row]) -> list[Prefetched]:
    """The next rows, in runs of one leader epoch. The last entry of a table's end has no records."""
    partition = asked.tp.partition
    wanted = sorted((p.offset, row) for p, row in rows.items() if p.partition == partition)
    wanted = [(offset, row) for offset, row in wanted if asked.start <= offset < asked.end]
    part, rest = wanted[:PART_ROWS], wanted[PART_ROWS:]
    runs: list[list[tuple[int, Row]]] = []
    for offset, row in part:
        goes_on = runs and runs[-1][-1][0] == offset - 1 and runs[-1][-1][1].leader_epoch == row.leader_epoch
        if goes_on:
            runs[-1].append((offset, row))
        else:
            runs.append([(offset, row)])
    entries = []
    for run in runs:
        values = Values(asked.tp, [offset for offset, _ in run], tuple(row.value for _, row in run))
        entries.append(prefetched(values, run[-1][0] + 1, run[-1][1].leader_epoch))
    return entries if rest else to_the_end(entries, asked)
