"""The values of the public interface: frozen, typed objects that clients pass in and get back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from html import escape
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from spark_broker.addresses import address_text
from spark_broker.errors import RecordNotShowableError
from spark_broker.times import from_us, shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql.types import StructType

NO_LEADER = -1
"""Leader id of a partition that has none."""

NO_EPOCH = -1
"""Leader epoch where none is known."""


def known_epoch(leader_epoch: int) -> int | None:
    """The epoch, or None for NO_EPOCH."""
    return None if leader_epoch == NO_EPOCH else leader_epoch


NAME_MAX = 249
"""Longest name of a topic, a group or a transactional id, in characters."""

FILE_NAME_BYTES_MAX = 255
"""Of the file systems that brokers and tables use."""

INTERNAL_PREFIX = "__"
CONSUMER_OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTION_STATE_TOPIC = "__transaction_state"


@dataclass(frozen=True, order=True, slots=True)
class TopicPartition:
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True)
class RecordMetadata:
    """Where an acknowledged micro-batch (or record) is: rows `base_offset` up to `base_offset + count`, exclusive.

    `base_offset` is None where no broker returned it: with acks=0, and for a retry of a batch that was stored too long
    ago.
    """

    topic: str
    partition: int
    base_offset: int | None
    count: int = 1

    @property
    def offset(self) -> int | None:
        """Offset of the first record. In a result of `send` it is the offset of the record itself."""
        return self.base_offset


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """A registered broker. `pid` is its process, `executor_pid` the executor's JVM; `fenced` brokers lead nothing.

    `log`: path of the broker's log file on its machine, `directory`: of its log directory; None where it is not known.
    """

    id: int
    host: str
    port: int
    rack: str | None
    epoch: int
    pid: int
    executor_id: str
    executor_pid: int
    fenced: bool = False
    log: str | None = None
    directory: str | None = None

    @property
    def address(self) -> str:
        return address_text(self.host, self.port)


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create.

    `schema`: an Arrow schema, a Spark StructType, or its DDL ("dest STRING NOT NULL, delay INT"). None: Kafka's record
    (key, value, headers, timestamp).
    """

    name: str
    partitions: int | None = None
    replication_factor: int | None = None
    schema: pa.Schema | StructType | str | None = None
    config: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """One partition as its leader sees it. `high_watermark` is exclusive.

    `leader`: None while there is none. Offsets that the leader says are None when it did not answer. `adding`: replicas
    that a move adds. `log_start_offset`: the first one that readers get. `local_log_start_offset`: the first one that
    brokers have; what lies before it is in the topic's table. `elr`: eligible leader replicas (KIP-966). They have left
    an ISR that is below the minimum, and have everything that was committed. `last_known_elr`: replicas that were in
    the ISR or the ELR and may have lost records since.
    """

    topic: str
    partition: int
    leader: int | None
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    partition_epoch: int = 0
    log_start_offset: int | None = None
    high_watermark: int | None = None
    elr: tuple[int, ...] = ()
    last_known_elr: tuple[int, ...] = ()
    history_start_offset: int | None = None
    history_end_offset: int | None = None
    sealed_offset: int | None = None
    local_log_start_offset: int | None = None
    adding: tuple[int, ...] = ()

    @property
    def history_text(self) -> str | None:
        """The offsets in the history, `first..end` (exclusive); None: there are none."""
        if self.history_end_offset is None:
            return None
        return f"{self.history_start_offset}..{self.history_end_offset}"

    @property
    def untiered(self) -> int | None:
        """How many committed offsets are in the log and not in the history yet; None: it is not known."""
        if self.high_watermark is None or self.local_log_start_offset is None:
            return None
        return max(0, self.high_watermark - max(self.local_log_start_offset, self.history_end_offset or 0))

    @property
    def tiering_lag(self) -> int | None:
        """How many offsets are sealed and not in the history yet; None: it is not known, or there is no history."""
        if self.sealed_offset is None or self.history_end_offset is None:
            return None
        return max(0, self.sealed_offset - self.history_end_offset)


def dead_letters_path(path: str) -> str:
    """Beside a topic's table: the table of the records that it has refused."""
    return path.rstrip("/") + "_dead_letters"


@dataclass(frozen=True, slots=True)
class HistoryInfo:
    """The Delta table that holds a topic's history: its URL, Delta's version of the newest confirmed commit, and why
    tiering has stopped (None: it has not). `table_version` is None before the first commit.

    `quarantined`: how many records the table has refused. They are in the table `dead_letters`. `next_run_s`: in how
    many seconds the cluster's own schedule comes to the topic; None: it does not, or the controller did not answer.
    `by_time`: it appends all that is committed then, and not only what is sealed.
    """

    path: str
    table_version: int | None
    stopped: str | None = None
    quarantined: int = 0
    dead_letters: str | None = None
    next_run_s: float | None = None
    by_time: bool = True

    @property
    def next_run_text(self) -> str:
        """When the next run comes, and what it waits for."""
        if self.next_run_s is None:
            return (
                "no run of the cluster's own is known: its driver has just begun, its session has no Delta, or "
                "tiering.interval.ms is -1; jobs/tier.py is a run"
            )
        seconds = round(self.next_run_s)
        when = f"the cluster's next run begins in {seconds} s" if seconds else "a run has begun, or is due"
        if self.by_time:
            return f"{when}, and appends what is committed then"
        return (
            f"{when}, and appends what is sealed: a record seals a segment that is full (segment.bytes) or old "
            "(segment.ms). delta.commit.interval.ms=60000 appends what is committed"
        )


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic with its partitions, in order of their number. `history`: None for a topic without `delta.path`."""

    name: str
    topic_id: str
    partitions: tuple[PartitionInfo, ...]
    schema: pa.Schema
    schema_id: int
    config: Mapping[str, str]
    internal: bool = False
    history: HistoryInfo | None = None

    def _repr_html_(self) -> str:
        columns = ["partition", "leader", "epoch", "replicas", "isr", "elr", "log start", "high watermark"]
        rows: list[list[object]] = [
            [p.partition, p.leader, p.leader_epoch, p.replicas, p.isr, p.elr, p.log_start_offset, p.high_watermark]
            for p in self.partitions
        ]
        title = f"topic {self.name}"
        if self.history is not None:
            columns += ["history", "not in the table"]
            for row, p in zip(rows, self.partitions, strict=True):
                row += [p.history_text, p.untiered]
            title += f", history in {self.history.path}: {self.history.next_run_text}"
        return html_table(title, columns, rows)


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """The current controller: its epoch, its driver's machine and pid, and when it took over (by its clock)."""

    epoch: int
    host: str
    pid: int
    started: datetime

    def __str__(self) -> str:
        since = shown(self.started)
        return f"epoch {self.epoch}, of the driver with pid {self.pid} on {self.host}, since {since}"


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The cluster: its id, the controller (None while there is none) and the registered brokers."""

    cluster_id: str
    controller_epoch: int
    brokers: tuple[BrokerInfo, ...]
    controller: ControllerInfo | None = None

    def _repr_html_(self) -> str:
        columns = ("broker", "address", "rack", "epoch", "executor", "pid", "state")
        rows = [
            (b.id, b.address, b.rack, b.epoch, b.executor_id, b.pid, "fenced" if b.fenced else "live")
            for b in self.brokers
        ]
        return html_table(f"cluster {self.cluster_id}, controller epoch {self.controller_epoch}", columns, rows)


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """A transactional id, or an application with many writers, as its coordinator knows it.

    `state`: Empty, Ongoing, PrepareCommit or PrepareAbort. `version`: None with one writer, and while none is open.
    `execution`: None with one writer. `last_committed`: the newest version, None before the first. `timeout`, `idle`:
    seconds. `writers` are producer ids with their epochs. A deleted topic shows as its id.
    """

    transactional_id: str
    state: str
    version: int | None
    execution: str | None
    last_committed: int | None
    timeout: float
    idle: float
    writers: tuple[tuple[int, int], ...]
    partitions: tuple[TopicPartition, ...]
    coordinator: int
    coordinator_epoch: int


@dataclass(frozen=True, slots=True)
class SetAside:
    """A replica that a broker keeps under another name, for an operator to look at. `path`: on the broker's machine.

    `kind`: "stray" (whole; the metadata neither knows it nor says that it may go), "damaged", or "diverged" (whole, and
    not what its leader has). `since`: when it was set aside, where that is known.
    """

    broker_id: int
    topic_partition: TopicPartition
    kind: str
    path: str
    since: datetime | None


@dataclass(frozen=True, slots=True)
class LogDirInfo:
    """A broker's log directory: the bytes of each replica's segments, and what was set aside there."""

    broker_id: int
    path: str
    replicas: Mapping[TopicPartition, int]
    set_aside: tuple[SetAside, ...]

    @property
    def size_bytes(self) -> int:
        """Of all replicas, without what was set aside."""
        return sum(self.replicas.values())


@dataclass(frozen=True, slots=True)
class OffsetAndMetadata:
    """A committed position: the next offset to read, the leader epoch of the last record read, and a note.

    `leader_epoch`: None where it is not known.
    """

    offset: int
    leader_epoch: int | None = None
    metadata: str = ""


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """Who commits offsets of a group: a member in an epoch (`Consumer.group_metadata`), or nobody in particular.

    Without a member, commits are taken only while the group has no members. `topic_ids`: of the topics that were read.
    An offset of a topic that was deleted since is none of a later topic with its name.
    """

    group_id: str
    member_id: str = ""
    member_epoch: int = -1
    instance_id: str = ""
    topic_ids: Mapping[TopicPartition, str] = field(default_factory=dict, repr=False, compare=False)


class ConsumedRecord(NamedTuple):
    """One record of a topic. In a typed topic `value` is a dict by column, `key` is None and `headers` is empty.

    `timestamp` has the zone UTC. `headers` are pairs of a name and a value.
    """

    topic: str
    partition: int
    offset: int
    timestamp: datetime
    key: bytes | None
    value: bytes | dict[str, object] | None
    headers: tuple[tuple[str, bytes | None], ...]


NOT_SHOWABLE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""What Arrow and `datetime` raise for a value that has no form in Python."""

RECORDS_AT_ONCE = 1000
"""How many rows of a batch are converted to Python objects at a time."""


@dataclass(frozen=True, slots=True)
class ConsumedBatch:
    """Consecutive records of one partition: row i has offset `base_offset + i`.

    `data` has the topic's columns, or those that the consumer asked for. `timestamps` are the records' (Arrow's
    timestamp[us, UTC]). `append_time`: when the leader stored them, by its clock. `typed`: the topic has a schema of
    its own.

    `sparse`: int64, the offset of each row of a batch from which compaction has removed rows. The library splits such a
    batch into its `runs` before it hands it out, so `poll` returns none. Its `base_offset` is that of its first row.
    """

    topic: str
    partition: int
    base_offset: int
    data: pa.RecordBatch
    leader_epoch: int
    append_time: datetime
    timestamps: pa.Array
    typed: bool = False
    sparse: pa.Array | None = None

    @property
    def next_offset(self) -> int:
        if self.sparse is not None and len(self.sparse):
            return int(self.sparse[-1].as_py()) + 1
        return self.base_offset + int(self.data.num_rows)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The offset of each row."""
        import numpy as np  # Commands that read no record start without it.

        rows = int(self.data.num_rows)
        if self.sparse is None:
            return np.arange(self.base_offset, self.base_offset + rows, dtype=np.int64)
        return np.frombuffer(self.sparse.buffers()[1], np.int64, rows, self.sparse.offset * 8)

    def rows_below(self, offset: int) -> int:
        """How many rows have an offset below this one."""
        if self.sparse is not None:
            return int(self.offsets.searchsorted(offset))
        return max(0, min(offset - self.base_offset, int(self.data.num_rows)))

    def slice(self, offset: int = 0, length: int | None = None) -> Self:
        """The rows from `offset` on, as Arrow's `slice`: `length` rows at most, without a copy."""
        data, timestamps = self.data.slice(offset, length), self.timestamps.slice(offset, length)
        if self.sparse is None:
            return replace(self, base_offset=self.base_offset + offset, data=data, timestamps=timestamps)
        sparse = self.sparse.slice(offset, length)
        base_offset = int(sparse[0].as_py()) if len(sparse) else self.next_offset
        return replace(self, base_offset=base_offset, data=data, timestamps=timestamps, sparse=sparse)

    def runs(self) -> Iterator[Self]:
        """The batch in parts whose offsets are consecutive."""
        if self.sparse is None:
            yield self
            return
        offsets = self.offsets
        gaps = (offsets[1:] - offsets[:-1] != 1).nonzero()[0]
        bounds = [0, *(gaps + 1).tolist(), len(offsets)]
        for first, end in pairwise(bounds):
            if end > first:
                yield replace(self.slice(first, end - first), sparse=None)

    def records(self) -> Iterator[ConsumedRecord]:
        """The records one at a time. Where columns are enough, `data` is a hundred times faster.

        Raises RecordNotShowableError at a record that has no form in Python.
        """
        for start in range(0, self.data.num_rows, RECORDS_AT_ONCE):
            part = self.slice(start, RECORDS_AT_ONCE)
            try:
                records = part._shown()
            except NOT_SHOWABLE:
                for number in range(part.data.num_rows):
                    yield part.slice(number, 1)._shown_alone()
            else:
                yield from records

    def _shown(self) -> list[ConsumedRecord]:
        rows = self.data.num_rows
        headers: list[tuple[tuple[str, bytes | None], ...]]
        if self.typed:
            keys, values, headers = [None] * rows, self.data.to_pylist(), [()] * rows
        else:
            keys, values = self._column("key"), self._column("value")
            headers = [_pairs(of) if of else () for of in self._column("headers")]
        times = map(from_us, self.timestamps.cast("int64").to_pylist())
        topics, partitions = [self.topic] * rows, [self.partition] * rows
        columns = zip(topics, partitions, self.offsets.tolist(), times, keys, values, headers, strict=True)
        return list(starmap(ConsumedRecord, columns))

    def _column(self, name: str) -> list[Any]:
        """A column's values; nulls, where the consumer did not ask for it."""
        index = self.data.schema.get_field_index(name)
        if index < 0 or (column := self.data.column(index)).null_count == len(column):
            return [None] * self.data.num_rows
        return cast("list[Any]", column.to_pylist())

    def _shown_alone(self) -> ConsumedRecord:
        """The record of a batch of one. Raises RecordNotShowableError, which names its offset and the column."""
        try:
            return self._shown()[0]
        except NOT_SHOWABLE as error:
            columns = dict(zip(self.data.schema.names, self.data.columns, strict=True))
            name = next((name for name, column in columns.items() if not _is_showable(column)), "timestamp")
            where = f"{self.topic}-{self.partition} offset {self.base_offset}, column {name}"
            raise RecordNotShowableError(f"{where}: {type(error).__name__}: {error}") from error


def _is_showable(column: pa.Array) -> bool:
    try:
        column.to_pylist()
    except NOT_SHOWABLE:
        return False
    return True


def _pairs(headers: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((header["key"], header["value"]) for header in headers)


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A description as an HTML table for notebooks; every text in it is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_cell(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    caption = f"<caption style='text-align: left'>{escape(title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
