"""What must hold of transactions after every event, compared with a small model that knows only committed headers.

The checks are incremental: a batch is checked once, when it is first seen to be committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_broker.broker.partition import Partition
from spark_broker.core.batch import batch_info
from spark_broker.core.producers import ProducerStates
from spark_broker.core.replica import Role
from spark_broker.errors import OffsetNotAvailableError
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.frame import ABORT, CONTROL, TRANSACTIONAL, BatchHeader
from spark_broker.protocol.messages import InitProducerIdResponse, JoinTransactionRequest
from spark_broker.testing.simulation.shadow import Key
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess
    from spark_broker.testing.simulation.scheduler import Process
    from spark_broker.testing.simulation.world import World


@dataclass(slots=True)
class _Open:
    """A producer's undecided batches in one partition."""

    producer_epoch: int
    first_offset: int
    batches: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Decided:
    """The state of one partition that follows from its committed batches."""

    name: str
    end_offset: int = 0
    open: dict[int, _Open] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    begun: dict[int, int] = field(default_factory=dict)  # by producer id: the epoch that its last marker began
    shown: dict[int, tuple[int, int]] = field(default_factory=dict)  # by leader epoch: first and last stable offset

    ended: list[tuple[int, int]] = field(default_factory=list)  # first offset and marker, in order of markers

    @property
    def last_stable_offset(self) -> int:
        return min((transaction.first_offset for transaction in self.open.values()), default=self.end_offset)

    def last_stable_offset_at(self, high_watermark: int) -> int:
        """The last stable offset of a replica with this high watermark, which may be behind."""
        stable = min(high_watermark, self.last_stable_offset)
        for first_offset, marker_offset in reversed(self.ended):
            if marker_offset < high_watermark:
                break
            stable = min(stable, first_offset)
        return stable


class TransactionRules:
    """All rules, and what they remember from event to event."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._partitions: dict[Key, _Decided] = {}
        self._outcomes: dict[tuple[int, int], bool] = {}  # by producer id and the epoch that ended
        self._joins: dict[int, JoinTransactionRequest] = {}
        self._versions: dict[tuple[str, int], str] = {}  # the execution that committed it

    def committed(self, key: Key, name: str, headers: Iterable[BatchHeader]) -> None:
        """These batches are seen to be committed for the first time."""
        decided = self._partitions.setdefault(key, _Decided(name))
        for header in headers:
            decided.end_offset = header.next_offset
            if header.attributes & CONTROL:
                self._marker(decided, header)
            elif header.attributes & TRANSACTIONAL:
                self._batch(decided, header)
            elif header.producer_id in decided.open:
                raise ViolationError(
                    "inside a transaction all is transactional", f"a plain batch at {header.base_offset}", name
                )

    def _batch(self, known: _Decided, header: BatchHeader) -> None:
        """Known bug 24: a late batch never joins a newer transaction, and never reopens one that is over."""
        producer_id, epoch = header.producer_id, header.producer_epoch
        transaction = known.open.setdefault(producer_id, _Open(epoch, header.base_offset))
        transaction.batches.append(header.base_offset)
        if epoch != transaction.producer_epoch:
            raise ViolationError(
                "a transaction has one epoch",
                f"producer {producer_id}: epoch {epoch} at {header.base_offset} "
                f"joins one of {transaction.producer_epoch}",
                known.name,
            )
        if epoch < known.begun.get(producer_id, 0):
            raise ViolationError(
                "what has ended takes nothing more",
                f"producer {producer_id}, epoch {epoch}: a batch at {header.base_offset} comes after the marker",
                known.name,
            )

    def _marker(self, known: _Decided, header: BatchHeader) -> None:
        """Known bug 24: a marker ends the transaction whose epoch is right before its own, and no newer one."""
        producer_id, committed = header.producer_id, not header.attributes & ABORT
        if producer_id in known.open:
            known.ended.append((known.open[producer_id].first_offset, header.base_offset))
        known.begun[producer_id] = max(header.producer_epoch, known.begun.get(producer_id, 0))
        ended = known.open.pop(producer_id, None)
        if ended is None:
            return
        if header.producer_epoch != ended.producer_epoch + 1:
            raise ViolationError(
                "a marker ends its own transaction",
                f"producer {producer_id}: the marker at {header.base_offset} begins epoch {header.producer_epoch}; "
                f"what it ends is of epoch {ended.producer_epoch}",
                known.name,
            )
        if not committed:
            known.aborted.update(ended.batches)
        self._decided(known, producer_id, ended.producer_epoch, committed=committed)

    def _decided(self, known: _Decided, producer_id: int, epoch: int, *, committed: bool) -> None:
        """A transaction has one outcome in all its partitions; a version is committed by one execution."""
        if self._outcomes.setdefault((producer_id, epoch), committed) != committed:
            raise ViolationError(
                "a transaction has one outcome",
                f"producer {producer_id}, epoch {epoch}: committed={committed} here, elsewhere not",
                known.name,
            )
        join = self._joins.get(producer_id)
        if join is None or not committed:
            return
        execution = self._versions.setdefault((join.application, join.version), join.execution)
        if execution != join.execution:
            raise ViolationError(
                "a version is committed once",
                f"version {join.version} of {join.application}: by {execution} and by {join.execution}",
                known.name,
            )

    def check_replica(self, process: BrokerProcess, partition: Partition) -> None:
        """Known bug 24: nothing undecided lies below the last stable offset, and nothing decided holds it back."""
        replica = partition.replica
        decided = self._partitions.get(partition.key)
        if decided is None:
            return
        if replica.role is Role.STOPPED:
            return
        stable = replica.last_stable_offset
        expected = most = max(decided.last_stable_offset_at(replica.high_watermark), replica.log_start_offset)
        if partition.topic.is_compacted:  # what is decided is so without its marker, which this replica may lack yet
            most = max(min(replica.high_watermark, decided.last_stable_offset), replica.log_start_offset)
        if not expected <= stable <= most:
            raise ViolationError(
                "the last stable offset is what the markers say",
                f"{process.name}: {stable} where it is {expected}, high watermark {replica.high_watermark}",
                decided.name,
            )
        if replica.role is Role.LEADER:
            self._check_shown(decided, partition)

    @staticmethod
    def _check_shown(known: _Decided, partition: Partition) -> None:
        """The last stable offset never falls for a client that goes from a leader to a newer one."""
        epoch = partition.replica.assignment.leader_epoch
        try:
            stable = partition.replica.latest_offset(epoch, read_committed=True)
        except OffsetNotAvailableError:
            return
        known.shown[epoch] = (known.shown.get(epoch, (stable, stable))[0], stable)
        for other, (first, last) in known.shown.items():
            if (other < epoch and last > known.shown[epoch][0]) or (other > epoch and stable > first):
                raise ViolationError(
                    "the last stable offset never falls",
                    f"epoch {other} showed {first} to {last}, epoch {epoch} shows {stable}",
                    known.name,
                )

    def joined(self, producer_id: int, join: JoinTransactionRequest) -> None:
        """A task attempt was given its producer id: no other attempt has it."""
        if producer_id in self._joins:
            raise ViolationError(
                "producer ids are given once", f"{join} has {producer_id}, as {self._joins[producer_id]}"
            )
        self._joins[producer_id] = join

    def repeated(self, client: Process, first: InitProducerIdResponse, second: InitProducerIdResponse) -> None:
        """The same end of a transaction was requested twice."""
        if first != second:
            raise ViolationError("a repetition gets the same answer", f"{client}: {first}, then {second}")

    def handed_out(self, reader: str, key: Key, header: BatchHeader) -> None:
        """A reader of committed records was given this batch."""
        decided = self._partitions.get(key)
        if self._world.invariants.is_blind(key):
            return  # not every decision is known here
        if decided is None or header.base_offset >= decided.last_stable_offset:
            message = f"{reader}: the batch at {header.base_offset} of {decided}"
            raise ViolationError("nothing undecided is handed out", message, str(key))
        if header.base_offset in decided.aborted:
            raise ViolationError(
                "nothing aborted is handed out", f"{reader}: the batch at {header.base_offset}", decided.name
            )

    def is_aborted(self, key: Key, base_offset: int) -> bool:
        """Whether the batch was part of an aborted transaction."""
        decided = self._partitions.get(key)
        return decided is not None and base_offset in decided.aborted

    def is_committed(self, key: Key, base_offset: int) -> bool:
        """Whether the batch is part of no transaction, or of one that was committed."""
        decided = self._partitions.get(key)
        if decided is None or base_offset in decided.aborted:
            return False
        return not any(base_offset in transaction.batches for transaction in decided.open.values())

    def undecided(self) -> str:
        """A transaction that has not ended; empty: there is none."""
        if self._world.invariants.image.topic(TRANSACTION_STATE_TOPIC) is None:
            return f"there is no {TRANSACTION_STATE_TOPIC}"
        for decided in self._partitions.values():
            for producer_id, transaction in decided.open.items():
                return (
                    f"{decided.name}: producer {producer_id} has an open transaction from {transaction.first_offset} on"
                )
        return ""


def check_opened(process: BrokerProcess, partition: Partition, headers: list[BatchHeader], *, expire: bool) -> None:
    """Known bug 19: a snapshot and the rest of the log give the same producers' state as the whole log.

    `headers`: of the whole log, as it was without compaction. `expire`: as in `same_producers`.
    """
    if partition.replica.log_start_offset > 0:
        return
    rebuilt = ProducerStates()
    for header in headers:
        rebuilt.replay(batch_info(header))
    if not same_producers(partition, rebuilt, expire=expire):
        raise ViolationError(
            "producers follow the log", f"{process.name} opened another state than the log's", str(partition)
        )


def same_producers(partition: Partition, rebuilt: ProducerStates, *, expire: bool) -> bool:
    """Whether a replica's state is the one that was rebuilt.

    With `expire`, it may have forgotten producers. So may the process before this one, in a snapshot that is newer than
    the one with which this process began.
    """
    rebuilt.start_at(partition.replica.log_start_offset)  # on a full disk, records below it may still be there
    producers, there = partition.replica.producers, dict(rebuilt.entries())
    here = dict(producers.entries())
    same_transactions = producers.transactions == rebuilt.transactions
    if partition.topic.is_compacted:  # What was aborted is removed, and what is decided counts so without its marker.
        same_transactions = {*producers.transactions.ongoing()} <= {*rebuilt.transactions.ongoing()}
    if not same_transactions or any(there.get(producer_id, entry) != entry for producer_id, entry in here.items()):
        return False
    return expire or here.keys() == there.keys()
