"""Replicas that a test drives step by step. Nothing moves by itself, and the same steps give the same run.

A fetch is three steps, so that messages may be late, lost or overtaken:

    ask(follower) -> Request      serve(request) -> Answer      apply(answer)

`fetch` does all three. Metadata waits at every broker until `deliver`; proposals wait at the leader until `decide`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from spark_broker.core.batch import NO_PRODUCER, BatchInfo
from spark_broker.core.divergence import FetchPosition
from spark_broker.core.effects import (
    Acknowledge,
    AdvanceLogStart,
    Effect,
    HighWatermarkAdvanced,
    ProposeIsr,
    Refuse,
    RestartLog,
    SaveEpochs,
    TruncateLog,
)
from spark_broker.core.events import AwaitTransaction, Fetched
from spark_broker.core.producers import StoredBatch
from spark_broker.core.replica import ACKS_ALL, Replica, Role
from spark_broker.errors import SparkBrokerError
from tests.unit.core.memory_log import Entry, MemoryLog
from tests.unit.core.model_controller import Metadata, ModelController

LAG_MAX_MS = 30_000
APPEND_TIMEOUT_MS = 120_000
NO_VALUE = -1
"""The value of a repeated marker. It is not stored."""


@dataclass(frozen=True, slots=True)
class Producer:
    """The producer of a batch, and the batch's place in its sequence."""

    id: int = NO_PRODUCER
    epoch: int = -1
    sequence: int = -1
    transactional: bool = False


NOBODY = Producer()


@dataclass(slots=True, eq=False)
class Outcome:
    """One append: unanswered, acknowledged at `base_offset`, or refused with `error`.

    `awaits`: nothing was stored. The append waits for the transaction coordinator's answer.
    """

    value: int
    acks: int
    base_offset: int | None = None
    error: SparkBrokerError | None = None
    awaits: bool = False

    @property
    def answered(self) -> bool:
        return self.base_offset is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class Request:
    """A follower's fetch under way; `run` is the process that sent it."""

    follower: int
    run: int
    broker_epoch: int
    leader: int
    position: FetchPosition


@dataclass(frozen=True, slots=True)
class Answer:
    """A leader's answer under way."""

    request: Request
    fetched: Fetched
    entries: tuple[Entry, ...]


@dataclass(slots=True)
class Node:
    """A broker: its disk, and a replica while its process runs. `run` counts processes."""

    id: int
    broker_epoch: int = 1
    run: int = 0
    log: MemoryLog = field(default_factory=MemoryLog)
    replica: Replica | None = None
    metadata: Metadata | None = None
    heard: int = 0  # index of the newest metadata that was delivered
    restart_reason: str | None = None
    proposal: ProposeIsr | None = None
    forgot: bool = False  # idle producers were expired since the producer state was last rebuilt
    said: Request | None = None  # the last fetch; the leader's stream remembers it
    data_lost: bool = False  # its machine crashed, and the broker has not registered since


class Cluster:
    """Brokers 1, 2, ... with one partition that all of them replicate; broker 1 leads first."""

    def __init__(self, brokers: int = 3, min_insync_replicas: int = 2) -> None:
        self.controller = ModelController.of(tuple(range(1, brokers + 1)), min_insync_replicas)
        self.min_insync_replicas = min_insync_replicas
        self.now_ms = 0
        self.acknowledged: dict[int, int] = {}  # with acks=all: value to base offset
        self.machines_lost = 0
        self.nodes = {broker: Node(broker) for broker in range(1, brokers + 1)}
        for broker in self.nodes:
            self._open(broker)
            self.deliver(broker)

    def replica(self, broker: int) -> Replica:
        """The replica of a running broker."""
        replica = self.nodes[broker].replica
        assert replica is not None, f"broker {broker} does not run"
        return replica

    def running(self) -> list[int]:
        return [broker for broker, node in self.nodes.items() if node.replica is not None]

    def leaders(self) -> list[int]:
        """Every broker that takes itself for the leader, zombies included."""
        return [broker for broker in self.running() if self.replica(broker).role is Role.LEADER]

    def values(self, broker: int) -> list[int]:
        return [entry.value for entry in self.nodes[broker].log.entries]

    def append(
        self, broker: int, value: int, *, acks: int = ACKS_ALL, rows: int = 1, producer: Producer = NOBODY,
        epoch: int | None = None,
    ) -> Outcome:  # fmt: skip
        """Send a batch to a broker. `epoch`: the request's leader epoch; by default the one that the broker knows."""
        replica, outcome = self.replica(broker), Outcome(value, acks)
        leader_epoch = replica.assignment.leader_epoch if epoch is None else epoch
        granted = replica.prepare_append(
            leader_epoch, acks, producer.id, producer.epoch, producer.sequence,
            transactional=producer.transactional, now_ms=self.now_ms,
        )  # fmt: skip
        if isinstance(granted, AwaitTransaction):
            assert producer.transactional, "only a transactional batch waits"
            outcome.awaits = True
            return outcome
        if isinstance(granted, StoredBatch):
            base_offset, next_offset = granted.base_offset, granted.last_offset + 1
        else:
            base_offset, next_offset = granted.base_offset, granted.base_offset + rows
            self._write(broker, value, base_offset, next_offset, producer)
        if acks == ACKS_ALL:
            deadline_ms = self.now_ms + APPEND_TIMEOUT_MS
            self._carry_out(broker, replica.await_commit(outcome, base_offset, next_offset, deadline_ms))
        else:
            outcome.base_offset = base_offset
        return outcome

    def append_unjudged(self, broker: int, value: int, producer: Producer) -> None:
        """A leader of another version stores a batch by other rules for sequence numbers. Followers copy it."""
        base_offset = self.replica(broker).log_end_offset
        self._write(broker, value, base_offset, base_offset + 1, producer)

    def append_marker(
        self, broker: int, value: int, producer_id: int, producer_epoch: int, *, committed: bool
    ) -> Outcome:
        """The coordinator ends a transaction; `producer_epoch` begins after it."""
        replica = self.replica(broker)
        leader_epoch = replica.assignment.leader_epoch
        granted = replica.prepare_marker(leader_epoch, producer_id, producer_epoch)
        outcome = Outcome(value if granted else NO_VALUE, ACKS_ALL)
        base_offset = replica.log_end_offset
        if granted is not None:
            base_offset = granted.base_offset
            self._store(broker, value, BatchInfo(
                base_offset, base_offset + 1, leader_epoch, self.now_ms, producer_id, producer_epoch,
                transactional=True, control=True, aborted=not committed,
            ))  # fmt: skip
        deadline_ms = self.now_ms + APPEND_TIMEOUT_MS
        self._carry_out(broker, replica.await_commit(outcome, base_offset, replica.log_end_offset, deadline_ms))
        return outcome

    def _write(self, broker: int, value: int, base_offset: int, next_offset: int, producer: Producer) -> None:
        replica = self.replica(broker)
        info = BatchInfo(
            base_offset, next_offset, replica.assignment.leader_epoch, self.now_ms,
            producer.id, producer.epoch, producer.sequence, producer.transactional,
        )  # fmt: skip
        self._store(broker, value, info)

    def _store(self, broker: int, value: int, info: BatchInfo) -> None:
        self.nodes[broker].log.append([Entry(info, value)])
        self._carry_out(broker, self.replica(broker).appended(info, self.now_ms))

    def ask(self, follower: int) -> Request | None:
        """The next fetch. None: the broker follows no leader."""
        node = self.nodes[follower]
        if node.replica is None or node.replica.role is not Role.FOLLOWER or node.replica.assignment.leader == -1:
            return None
        leader = node.replica.assignment.leader
        return Request(follower, node.run, node.broker_epoch, leader, node.replica.fetch_position())

    def serve(self, request: Request, max_batches: int = 100) -> Answer | None:
        """None: the leader does not run, or answers with an error."""
        try:
            return self.serve_or_raise(request, max_batches)
        except SparkBrokerError:
            return None

    def serve_or_raise(self, request: Request, max_batches: int = 100) -> Answer | None:
        node = self.nodes[request.leader]
        if node.replica is None or node.metadata is None:
            return None
        replica, position = node.replica, request.position
        diverging, effects = replica.follower_fetch(
            request.follower, request.broker_epoch, position, node.metadata.live_epochs, self.now_ms
        )
        self._carry_out(request.leader, effects)
        self.nodes[request.follower].said = request if diverging is None else None
        entries: list[Entry] = []
        if diverging is None and position.fetch_offset >= replica.log_start_offset:
            entries = node.log.read(position.fetch_offset, replica.log_end_offset)[:max_batches]
        fetched = Fetched(
            position=position,
            leader_epoch=replica.assignment.leader_epoch,
            high_watermark=replica.high_watermark,
            log_start_offset=replica.log_start_offset,
            diverging=diverging,
        )
        return Answer(request, fetched, tuple(entries))

    def apply(self, answer: Answer) -> None:
        """As the shell does: truncate, restart the log, or store what follows the log end."""
        node = self.nodes[answer.request.follower]
        if node.replica is None or node.run != answer.request.run or not node.replica.awaits(answer.fetched):
            return
        replica = node.replica
        self._carry_out(node.id, replica.fetched(answer.fetched))
        if node.restart_reason is not None:
            self.restart_log(node.id)
            return
        if answer.fetched.diverging is not None:
            return
        fresh = [entry for entry in answer.entries if entry.base_offset >= replica.log_end_offset]
        node.log.append(fresh)
        effects = replica.follower_appended([entry.info for entry in fresh], answer.fetched.high_watermark)
        self._carry_out(node.id, effects)

    def restart_log(self, follower: int) -> None:
        """Install the state of the leader's replica, if the leader can be asked."""
        node, replica = self.nodes[follower], self.replica(follower)
        leader = self.nodes.get(replica.assignment.leader)
        if leader is None or leader.replica is None:
            return
        try:
            leader.replica.check_leader(replica.assignment.leader_epoch)
        except SparkBrokerError:
            return
        node.log.restart_at(leader.replica.log_start_offset, leader.replica.epochs, leader.log.producers_at_start)
        node.restart_reason, node.forgot = None, False
        replica.restarted(node.log.state())

    def fetch(self, follower: int, max_batches: int = 100) -> None:
        """Ask, serve and apply at once."""
        request = self.ask(follower)
        answer = self.serve(request, max_batches) if request else None
        if answer is not None:
            self.apply(answer)

    def idle(self, follower: int, broker_epoch: int | None = None) -> None:
        """The follower's position has not changed, so it sends none. The leader's stream takes the last one again."""
        said = self.nodes[follower].said
        if said is not None and said.run == self.nodes[follower].run:
            self.serve(replace(said, broker_epoch=broker_epoch or said.broker_epoch), max_batches=0)

    def replicate(self, *followers: int, rounds: int = 8) -> None:
        """Fetch until all followers have all records and know the high watermark."""
        for _ in range(rounds):
            for follower in followers or tuple(self.nodes):
                self.fetch(follower)

    def deliver(self, broker: int, up_to: int | None = None) -> None:
        """Give a broker the newest metadata. `up_to`: an earlier one, by its index in the controller's history."""
        node = self.nodes[broker]
        index = len(self.controller.history) - 1 if up_to is None else up_to
        if node.replica is None or index < node.heard:
            return
        node.heard, node.metadata = index, self.controller.history[index]
        before = node.replica.assignment.leader_epoch
        metadata = node.metadata
        self._carry_out(broker, node.replica.assign(metadata.assignment, metadata.broker_epochs, self.now_ms))
        if node.replica.assignment.leader_epoch != before:
            node.restart_reason = None
        if node.replica.proposed_isr is None:
            node.proposal = None

    def deliver_all(self) -> None:
        for broker in self.nodes:
            self.deliver(broker)

    def decide(self, broker: int, *, answer_lost: bool = False) -> SparkBrokerError | None:
        """The controller answers the broker's proposal. If the answer is lost, the broker proposes again."""
        node = self.nodes[broker]
        if node.replica is None or node.proposal is None:
            return None
        proposal = node.proposal
        error = self.controller.alter_isr(broker, node.broker_epoch, proposal)
        if error is not None and not answer_lost:
            effects = node.replica.isr_refused(proposal.leader_epoch, proposal.partition_epoch, error.code)
            if node.replica.proposed_isr is None:
                node.proposal = None
            self._carry_out(broker, effects)
        return error

    def settle(self, rounds: int = 4) -> None:
        """Deliver everything that is under way, until nothing changes any more."""
        for _ in range(rounds):
            self.deliver_all()
            self.replicate()
            for broker in self.running():
                self.decide(broker)
        self.deliver_all()
        self.replicate()

    def elect(self, broker: int) -> None:
        """Make a live ISR member the leader, and give all brokers the new metadata."""
        assert self.controller.move_leader(broker), f"broker {broker} cannot lead"
        self.deliver_all()

    def _open(self, broker: int) -> None:
        node = self.nodes[broker]
        node.run += 1
        node.forgot = False
        node.replica = Replica(
            broker, node.log.state(), min_insync_replicas=self.min_insync_replicas, lag_max_ms=LAG_MAX_MS
        )

    def checkpoint(self, broker: int) -> None:
        """Write the high watermark to disk. After a crash, the replica starts with the last one written."""
        self.nodes[broker].log.high_watermark_checkpoint = self.replica(broker).high_watermark

    def crash(self, broker: int, *, lost_batches: int = 0) -> None:
        """The process ends. If the machine crashes with it, the newest batches are lost."""
        node = self.nodes[broker]
        node.replica = node.metadata = node.restart_reason = node.proposal = None
        if lost_batches:
            node.data_lost = True
            self.machines_lost += 1
            kept = node.log.entries[: max(0, len(node.log.entries) - lost_batches)]
            node.log.truncate_to(kept[-1].info.next_offset if kept else node.log.log_start_offset)

    def start(self, broker: int) -> None:
        """A new process starts on what is on disk. It registers, gets the metadata and is ready."""
        node = self.nodes[broker]
        node.broker_epoch = self.controller.register(broker, data_lost=node.data_lost)
        node.data_lost = False
        self._open(broker)
        self.deliver(broker)
        self.controller.unfence(broker)
        self.deliver(broker)

    def tick(self, passed_ms: int = 0) -> None:
        """Time passes everywhere."""
        self.now_ms += passed_ms
        for broker in self.running():
            metadata = self.nodes[broker].metadata
            if metadata is not None:
                self._carry_out(broker, self.replica(broker).tick(metadata.broker_epochs, self.now_ms))

    def expire_producers(self, broker: int, before_ms: int) -> None:
        """Maintenance at one broker."""
        if self.replica(broker).expire_producers(before_ms, before_ms):
            self.nodes[broker].forgot = True

    def advance_log_start(self, broker: int, offset: int) -> None:
        """Retention at a leader: up to the beginning of a batch, if all below it is committed and decided."""
        replica = self.replica(broker)
        if offset <= replica.last_stable_offset:
            self._carry_out(broker, replica.advance_log_start(offset))

    def _carry_out(self, broker: int, effects: list[Effect]) -> None:
        for effect in effects:
            self._carry_out_one(self.nodes[broker], effect)

    def _carry_out_one(self, node: Node, effect: Effect) -> None:
        match effect:
            case SaveEpochs(history):
                node.log.saved_epochs = history
            case TruncateLog(offset, _):
                node.log.truncate_to(offset)
                rebuilt = node.log.rebuilt_producers()
                node.forgot = False
                self._carry_out(node.id, self.replica(node.id).truncated(rebuilt, node.log.log_end_offset))
            case AdvanceLogStart(offset):
                node.log.advance_log_start(offset)
            case RestartLog(reason):
                node.restart_reason = reason
            case Acknowledge(token, base_offset):
                self._acknowledge(_outcome(token), base_offset)
            case Refuse(token, error):
                outcome = _outcome(token)
                assert not outcome.answered, "an append was answered twice"
                outcome.error = error
            case ProposeIsr():
                assert node.proposal is None, "two proposals of one partition at once"
                node.proposal = effect
            case HighWatermarkAdvanced(offset):
                assert offset == self.replica(node.id).high_watermark

    def _acknowledge(self, outcome: Outcome, base_offset: int) -> None:
        assert not outcome.answered, "an append was answered twice"
        outcome.base_offset = base_offset
        if outcome.value == NO_VALUE:
            return
        if outcome.value not in self.acknowledged:
            logs = [node.log for node in self.nodes.values()]
            copies = sum(
                base_offset < log.log_start_offset or outcome.value in map(_value, log.entries) for log in logs
            )
            needed = min(self.min_insync_replicas, len(logs)) - self.machines_lost
            assert copies >= needed, f"{outcome.value} was acknowledged with {copies} copies"
        earlier_offset = self.acknowledged.setdefault(outcome.value, base_offset)
        assert earlier_offset == base_offset, (
            f"{outcome.value} was acknowledged at {earlier_offset} and at {base_offset}"
        )


def _value(entry: Entry) -> int:
    return entry.value


def _outcome(token: object) -> Outcome:
    assert isinstance(token, Outcome)
    return token
