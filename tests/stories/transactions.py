"""The stage of transactions: one partition of `__transaction_state`, whose commits and markers are commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from spark_broker.core.transaction_changes import (
    AnyChange,
    Ended,
    Ending,
    ExecutionStarted,
    Forgotten,
    Initialized,
    Opened,
    PartitionAdded,
    Restored,
    Settled,
    WriterJoined,
)
from spark_broker.core.transaction_coordinator import (
    AnswerRequest,
    AppendRecords,
    CoordinatorRequest,
    Effect,
    MarkerTarget,
    ProducerIdPool,
    WriteMarkers,
)
from spark_broker.core.transaction_state import TransactionMetadata
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    AddPartitionToTransactionRequest,
    AddPartitionToTransactionResponse,
    CommitTransactionRequest,
    EndTransactionRequest,
    InitProducerIdResponse,
    InitTransactionsRequest,
    JoinTransactionRequest,
)
from tests.stories.script import Stage
from tests.unit.core.transaction_driver import Answer, Driver, Log

TOPIC = "ab" * 16
TIMEOUT_MS = 60_000


class TracedDriver(Driver):
    """Says what its shard asks of the shell. `earlier`: requests that other leaders were sent."""

    def __init__(
        self, say: Callable[[str], None], log: Log | None = None, ids: ProducerIdPool | None = None, earlier: int = 0
    ) -> None:
        self._say = say
        self.earlier = earlier
        super().__init__(log, ids, auto=False)

    def run(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case AppendRecords():
                    for change in effect.changes:
                        self._say(f"appends to {effect.transactional_id}: {_change(change)}")
                case AnswerRequest(token, answer):
                    self._say(f"answers {cast('int', token) + self.earlier}: {_answer(answer)}")
                case WriteMarkers(targets):
                    for target in targets:
                        self._say(f"asks for a marker: {_marker(target)}")
            super().run([effect])


class TransactionStage(Stage):
    """Producers are written as `producer id/epoch`, and requests have numbers. Nothing is committed before `replicate`,
    no marker is written before `write-markers`."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = TracedDriver(self.say)
        self._requests = 0
        self._shown: dict[str, str] = {}

    def after(self) -> None:
        """Say whose state has changed."""
        for name, transactions in self.driver.shard.transactions.items():
            if self._shown.get(name) != (state := _state(transactions)):
                self.say(f"{name} is {state}")
                self._shown[name] = state

    def _send(self, request: CoordinatorRequest) -> None:
        self._requests += 1
        self.say(f"request {self._requests}: {type(request).__name__}")
        self.driver.send(request)

    def do_init(self, name: str) -> None:
        """A new producer of the transactional id."""
        self._send(InitTransactionsRequest(name, TIMEOUT_MS))

    def do_add(self, name: str, producer: str, partition: str) -> None:
        """A leader asks, before it appends the producer's first batch."""
        self._send(AddPartitionToTransactionRequest(name, *_identity(producer), TOPIC, int(partition)))

    def do_commit(self, name: str, producer: str) -> None:
        self._send(EndTransactionRequest(name, *_identity(producer), True))

    def do_abort(self, name: str, producer: str) -> None:
        self._send(EndTransactionRequest(name, *_identity(producer), False))

    def do_join(self, name: str, *, version: str, run: str) -> None:
        """A task attempt of this run (execution) joins the version."""
        self._send(JoinTransactionRequest(name, int(version), run, TIMEOUT_MS))

    def do_commit_version(self, name: str, *winners: str, version: str, run: str) -> None:
        self._send(CommitTransactionRequest(name, int(version), run, [int(winner) for winner in winners]))

    def do_abort_version(self, name: str, *, version: str, run: str) -> None:
        self._send(AbortTransactionRequest(name, int(version), run))

    def do_replicate(self) -> None:
        """The followers have everything that was appended."""
        self.driver.commit()

    def do_write_markers(self, *partitions: str) -> None:
        """The markers of these partitions are committed there; without any, all markers."""
        for target in list(self.driver.targets):
            if not partitions or str(target.partition) in partitions:
                self.driver.targets.remove(target)
                self.driver.run(self.driver.shard.marked(target))

    def do_pass(self, ms: str) -> None:
        self.driver.tick(self.driver.now_ms + int(ms))

    def do_fail_over(self) -> None:
        """Another broker leads the partition. It has what was committed, and nothing else."""
        before = self.driver
        before.run(list(before.shard.dropped()))
        log = Log(before.log.records[: before.log.committed])
        self.driver = TracedDriver(self.say, log, before.ids, self._requests)
        self.driver.now_ms = before.now_ms
        self._shown.clear()


def _identity(producer: str) -> tuple[int, int]:
    producer_id, epoch = producer.split("/")
    return int(producer_id), int(epoch)


def _answer(answer: Answer) -> str:
    match answer:
        case SparkBrokerError():
            return f"{type(answer).__name__}: {answer.message}"
        case InitProducerIdResponse(producer_id, producer_epoch):
            return f"producer {producer_id}/{producer_epoch}"
        case AddPartitionToTransactionResponse():
            return f"added; again after {answer.repeat_after_ms} ms"
        case _:
            return "done"


def _marker(target: MarkerTarget) -> str:
    outcome = "commit" if target.committed else "abort"
    return f"{outcome} of {target.producer_id}/{target.producer_epoch} in partition {target.partition}"


def _change(change: AnyChange) -> str:
    match change:
        case Initialized(producer_id, producer_epoch, _):
            return f"producer {producer_id}/{producer_epoch}"
        case ExecutionStarted(execution):
            return f"run {execution} begins"
        case Opened(version, execution, _):
            return f"version {version} of {execution} is open"
        case WriterJoined(producer_id):
            return f"writer {producer_id} joins"
        case PartitionAdded(producer_id, _, partition):
            return f"partition {partition} of producer {producer_id}"
        case Ending(committed, winners):
            decided = "commit" if committed else "abort"
            return f"decided: {decided}{''.join(f', {winner} wins' for winner in winners)}"
        case Ended():
            return "ended everywhere"
        case Forgotten():
            return "forgotten"
        case Settled() | Restored():
            return "a part of the end"


def _state(transactions: TransactionMetadata) -> str:
    state = transactions.state.value
    if transactions.grouped:
        committed = f", version {transactions.last_committed} is committed" if transactions.last_committed >= 0 else ""
        return f"{state}{committed}"
    return f"{state}, producer {transactions.identity.producer_id}/{transactions.identity.producer_epoch}"
