"""Random schedules for the transaction coordinator: failovers, lost and repeated messages, zombies, late batches.

Partitions are models around the real `ProducerStates`; the coordinator is the real one, over a log whose uncommitted
end may be lost with its leader. Everything is drawn from one seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from spark_broker.core.batch import BatchInfo
from spark_broker.core.producers import ProducerStates
from spark_broker.core.transaction_coordinator import CoordinatorRequest, MarkerTarget
from spark_broker.errors import (
    AlreadyCommittedError,
    CoordinatorNotAvailableError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    NotLeaderOrFollowerError,
    ProducerFencedError,
    SparkBrokerError,
    TransactionAbortableError,
)
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    AddPartitionToTransactionRequest,
    CommitTransactionRequest,
    EmptyResponse,
    EndTransactionRequest,
    InitProducerIdResponse,
    InitTransactionsRequest,
    JoinTransactionRequest,
    Message,
)
from tests.unit.core.compacted_logs import compacted
from tests.unit.core.transaction_driver import Driver

TOPIC = "ef" * 16
TIMEOUT_MS = 400
PARTITIONS = 3

OnAnswer = Callable[[Message | SparkBrokerError], None]
OnAppended = Callable[[SparkBrokerError | None], None]


class ViolationError(AssertionError):
    """An invariant does not hold."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise ViolationError(what)


@dataclass(frozen=True)
class Entry:
    """An entry of a partition's log: a batch with its value, or a marker (value "") with its decision."""

    producer_id: int
    producer_epoch: int
    value: str
    committed: bool = False


class PartitionModel:
    """The leader's checks as `core.replica` makes them. A change of `leadership` forgets what was confirmed."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.states = ProducerStates()
        self.log: list[Entry] = []
        self.leadership = 0
        self.confirmed: dict[int, int] = {}

    def append(self, id_: str, who: InitProducerIdResponse, sequence: int, value: str, done: OnAppended) -> None:
        try:
            stored = self.states.check(who.producer_id, who.producer_epoch, sequence, transactional=True)
        except SparkBrokerError as error:
            done(error)
            return
        if stored is not None:
            done(None)
        elif self.confirmed.get(who.producer_id) == who.producer_epoch:
            self._write(Entry(who.producer_id, who.producer_epoch, value), sequence)
            done(None)
        else:
            self._confirm(id_, who, lambda: self.append(id_, who, sequence, value, done), done)

    def _confirm(self, id_: str, who: InitProducerIdResponse, then: Callable[[], None], done: OnAppended) -> None:
        leadership = self.leadership

        def answered(answer: Message | SparkBrokerError) -> None:
            if isinstance(answer, SparkBrokerError):
                done(answer)
                return
            if self.leadership != leadership:
                done(NotLeaderOrFollowerError("another leader"))
                return
            self.confirmed[who.producer_id] = who.producer_epoch
            then()

        request = AddPartitionToTransactionRequest(id_, who.producer_id, who.producer_epoch, TOPIC, self.number)
        self.world.ask(request, answered)

    def mark(self, target: MarkerTarget) -> None:
        try:
            if self.states.check_marker(target.producer_id, target.producer_epoch):
                self.confirmed.pop(target.producer_id, None)
                self._write(Entry(target.producer_id, target.producer_epoch, "", target.committed), -1)
        except InvalidProducerEpochError:
            return

    def _write(self, entry: Entry, sequence: int) -> None:
        offset = len(self.log)
        self.log.append(entry)
        marker = not entry.value
        self.states.replay(
            BatchInfo(
                offset,
                offset + 1,
                0,
                0,
                entry.producer_id,
                entry.producer_epoch,
                sequence,
                transactional=True,
                control=marker,
                aborted=marker and not entry.committed,
            )
        )

    def outcome(self) -> dict[str, bool]:
        """Whether each value is committed; an undecided value is a violation."""
        outcomes: dict[str, bool] = {}
        open_: dict[int, list[str]] = {}
        for entry in self.log:
            if entry.value:
                open_.setdefault(entry.producer_id, []).append(entry.value)
            else:
                outcomes |= dict.fromkeys(open_.pop(entry.producer_id, []), entry.committed)
        expect(not open_, f"undecided in partition {self.number}: {open_}")
        return outcomes


class World:
    """`loss` is the share of requests, answers and markers that are lost; 0 once the schedule heals."""

    def __init__(self, seed: int, driver: type[Driver] = Driver) -> None:
        self.random = Random(seed)
        self.loss = self.random.choice([0.0, 0.05, 0.2])
        self.fail_overs = self.random.choice([0.0, 0.01, 0.05])
        self.commit_pace = self.random.choice([1.0, 0.4, 0.1])  # how soon appends are committed
        self.crashes = self.random.choice([0.0, 0.01, 0.05])  # of clients
        self.network: list[Callable[[], None]] = []
        self.driver = driver(auto=False)
        self.compactions = Random(f"{seed}/compactions")
        self.compacts = driver is Driver and self.compactions.random() < 0.5
        self.markers: dict[MarkerTarget, None] = {}
        self.waiting: dict[object, OnAnswer] = {}  # of the present coordinator, by token
        self.partitions = [PartitionModel(self, number) for number in range(PARTITIONS)]
        self.identities: set[tuple[int, int]] = set()
        self.fates: dict[str, bool] = {}  # value to the outcome that its writer learned
        self.commits: dict[tuple[str, int], list[tuple[str, frozenset[int]]]] = {}  # that were answered with success
        self.healing = False
        self.asked: list[_Asked] = []
        self._values = 0

    def new_value(self, prefix: str) -> str:
        self._values += 1
        return f"{prefix}/{self._values}"

    def send(self, deliver: Callable[[], None]) -> None:
        """A message: lost, late, or delivered twice."""
        if self.random.random() < self.loss:
            return
        self.network.append(deliver)
        if self.random.random() < self.loss / 2:
            self.network.append(deliver)

    def ask(self, request: CoordinatorRequest, answered: OnAnswer, owner: Client | None = None) -> None:
        """Ask until there is an answer: `step` repeats what was lost, as a client would after its time-out."""
        asked = _Asked(self, lambda settle: self.request(request, settle), answered, owner)
        self.asked.append(asked)
        asked.send()

    def ask_append(self, append: Callable[[OnAppended], None], done: OnAppended, owner: Client) -> None:
        """Like `ask`, but to a partition's leader."""

        def deliver(settle: OnAnswer) -> None:
            append(lambda error: settle(error or EmptyResponse()))

        def settled(answer: Message | SparkBrokerError) -> None:
            done(answer if isinstance(answer, SparkBrokerError) else None)

        asked = _Asked(self, deliver, settled, owner)
        self.asked.append(asked)
        asked.send()

    def step(self) -> None:
        """One thing happens."""
        if self.random.random() < self.fail_overs:
            self.fail_over()
        driver = self.driver
        self._take_answers()
        choices: list[Callable[[], None]] = []
        if self.network:
            choices += [self.deliver] * 4
        behind = driver.shard.committed_count < driver.shard.appended_count
        if behind and self.random.random() < self.commit_pace:
            low, high = driver.shard.committed_count + 1, driver.shard.appended_count
            choices.append(lambda: driver.commit(self.random.randint(low, high)))
        if self.markers or driver.targets:
            choices.append(self.send_marker)
        self.asked = [asked for asked in self.asked if not asked.answered and not asked.abandoned]
        if self.asked and len(self.network) < 20:
            choices.append(self.random.choice(self.asked).send)
        choices.append(lambda: driver.tick(driver.now_ms + self.random.choice([1, 5, 20])))
        if self.random.random() < 0.02 and not self.healing:
            partition = self.random.choice(self.partitions)
            partition.leadership += 1
            partition.confirmed.clear()
        self.random.choice(choices)()
        self._take_answers()

    def deliver(self) -> None:
        self.network.pop(self.random.randrange(len(self.network)))()

    def fail_over(self) -> None:
        """Another coordinator takes over, with some of the uncommitted records."""
        old = self.driver
        now_ms = old.now_ms
        compact = partial(compacted, random=self.compactions) if self.compacts else list
        self.driver = old.fail_over(kept=self.random.randint(0, 3), compact=compact)
        self.driver.now_ms = now_ms
        for transaction in self.driver.shard.transactions.values():
            transaction.active_ms = now_ms
        self._take_answers(old)
        self.waiting.clear()
        self.markers.clear()

    def _take_answers(self, driver: Driver | None = None) -> None:
        driver = driver or self.driver
        for token in list(driver.answers):
            answered, answer = self.waiting.pop(token), driver.answers.pop(token)
            self.send(lambda answered=answered, answer=answer: answered(answer))  # type: ignore[misc]

    def request(self, request: CoordinatorRequest, answered: OnAnswer) -> None:
        """The request has reached the coordinator."""
        driver = self.driver
        self.waiting[driver.send(request)] = answered

    def send_marker(self) -> None:
        driver = self.driver
        while driver.targets:
            self.markers[driver.targets.popleft()] = None
        target = self.random.choice(list(self.markers))

        def acknowledged() -> None:
            if self.driver is driver:
                self.markers.pop(target, None)
                driver.run(driver.shard.marked(target))

        def written() -> None:
            self.partitions[target.partition].mark(target)
            self.send(acknowledged)

        self.send(written)

    def heal(self) -> None:
        """No message is lost any more, and every transaction ends, at the latest by its time-out."""
        self.loss = self.fail_overs = 0.0
        self.commit_pace = 1.0
        self.healing = True
        for _ in range(60):
            for _ in range(100):
                self.step()
            self.driver.tick(self.driver.now_ms + TIMEOUT_MS + 1)
            busy = any(transaction.writers for transaction in self.driver.shard.transactions.values())
            if not self.network and not self.markers and not busy and all(asked.answered for asked in self.asked):
                break

    def check(self) -> None:
        """Outcomes agree in all partitions and with what writers learned."""
        outcomes: dict[str, bool] = {}
        by_writer: dict[tuple[int, int], set[bool]] = {}
        for partition in self.partitions:
            partition_outcomes = partition.outcome()
            outcomes |= partition_outcomes
            epochs: dict[int, int] = {}
            for entry in partition.log:
                expect(entry.producer_epoch >= epochs.get(entry.producer_id, -1), "an epoch fell")
                epochs[entry.producer_id] = entry.producer_epoch
                if entry.value:
                    key = (entry.producer_id, entry.producer_epoch)
                    by_writer.setdefault(key, set()).add(partition_outcomes[entry.value])
        for key, seen in by_writer.items():
            expect(len(seen) == 1, f"the transaction of {key} is committed in one partition and aborted in another")
        for value, committed in self.fates.items():
            expect(outcomes.get(value, False) == committed, f"{value} should be committed: {committed}")
        self._check_versions(by_writer)

    def _check_versions(self, by_writer: dict[tuple[int, int], set[bool]]) -> None:
        for (application, version), told in self.commits.items():
            expect(len(set(told)) == 1, f"version {version} of {application} was committed twice: {told}")
        winners = {winner for told in self.commits.values() for _, ids in told for winner in ids}
        for producer_id in winners:
            expect(by_writer.get((producer_id, 0), {True}) == {True}, f"winner {producer_id} was aborted")


@dataclass
class _Asked:
    """A request that a client repeats until it has an answer; late answers to earlier copies are ignored."""

    world: World
    deliver: Callable[[OnAnswer], None]
    on_answer: OnAnswer
    owner: Client | None
    answered: bool = False

    @property
    def abandoned(self) -> bool:
        """Whether its client has crashed."""
        return self.owner is not None and self.owner.dead

    def send(self) -> None:
        self.world.send(lambda: self.deliver(self.take))

    def take(self, answer: Message | SparkBrokerError) -> None:
        if self.answered or self.abandoned:
            return
        if isinstance(answer, CoordinatorNotAvailableError | NotLeaderOrFollowerError):
            self.send()
            return
        self.answered = True
        self.on_answer(answer)


@dataclass
class ProducerClient:
    """A producer with a transactional id; several share one, so that most of them are zombies at some time."""

    world: World
    id: str
    who: InitProducerIdResponse | None = None
    dead: bool = False
    busy: bool = False
    outstanding: int = 0
    failed: bool = False
    values: list[str] = field(default_factory=list)
    sequences: dict[int, int] = field(default_factory=dict)

    def act(self) -> None:
        if self.dead or self.busy:
            return
        random = self.world.random
        if self.who is None:
            self.busy = True
            self.world.ask(InitTransactionsRequest(self.id, TIMEOUT_MS), self.initialized, self)
        elif len(self.values) < 4 and random.random() < 0.6:
            self.append()
        elif self.failed or random.random() < 0.3:
            self.end(committed=False)
        elif not self.outstanding:
            self.end(committed=True)

    def initialized(self, answer: Message | SparkBrokerError) -> None:
        self.busy = False
        if isinstance(answer, SparkBrokerError):
            self.dead = True
            return
        assert isinstance(answer, InitProducerIdResponse)
        key = (answer.producer_id, answer.producer_epoch)
        expect(key not in self.world.identities, f"identity {key} was given to two producers")
        self.world.identities.add(key)
        self.begin(answer)

    def begin(self, who: InitProducerIdResponse) -> None:
        self.who, self.failed, self.busy = who, False, False
        self.values, self.sequences = [], {}
        self.outstanding = 0

    def append(self) -> None:
        assert self.who is not None
        who = self.who
        partition = self.world.random.choice(self.world.partitions)
        sequence = self.sequences.get(partition.number, 0)
        self.sequences[partition.number] = sequence + 1
        value = self.world.new_value(self.id)
        self.values.append(value)
        self.outstanding += 1

        def done(error: SparkBrokerError | None) -> None:
            if self.who == who:
                self.outstanding -= 1
                self.failed |= error is not None

        self.world.ask_append(lambda settle: partition.append(self.id, who, sequence, value, settle), done, self)

    def end(self, *, committed: bool) -> None:
        assert self.who is not None
        self.busy = True
        who = self.who
        request = EndTransactionRequest(self.id, who.producer_id, who.producer_epoch, committed)
        self.world.ask(request, lambda answer: self.ended(answer, committed), self)

    def ended(self, answer: Message | SparkBrokerError, committed: bool) -> None:
        if isinstance(answer, InitProducerIdResponse):
            self.world.fates |= dict.fromkeys(self.values, committed)
            key = (answer.producer_id, answer.producer_epoch)
            expect(key not in self.world.identities, f"identity {key} was given to two producers")
            self.world.identities.add(key)
            self.begin(answer)
        elif isinstance(answer, TransactionAbortableError):
            self.end(committed=False)
        else:
            allowed = (ProducerFencedError,)
            expect(isinstance(answer, allowed), f"an end was refused: {answer!r}")
            self.dead = True


@dataclass
class Execution:
    """A run of an application: tasks join and write, its driver commits some of them."""

    world: World
    application: str
    name: str
    version: int = 0
    dead: bool = False
    committing: bool = False
    joining: int = 0
    writers: dict[int, list[str]] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)

    def act(self) -> None:
        if self.dead or self.committing:
            return
        random = self.world.random
        if random.random() < 0.4 and self.joining + len(self.writers) < 4:
            self.joining += 1
            version = self.version
            request = JoinTransactionRequest(self.application, version, self.name, TIMEOUT_MS)
            self.world.ask(request, lambda answer: self.joined(answer, version), self)
        elif self.writers and random.random() < 0.7:
            self.append()
        elif self.writers or random.random() < 0.1:
            self.commit()

    def joined(self, answer: Message | SparkBrokerError, version: int) -> None:
        if self.version != version:
            return
        self.joining -= 1
        if isinstance(answer, InitProducerIdResponse):
            if not self.committing:
                self.writers[answer.producer_id] = []
        elif isinstance(answer, AlreadyCommittedError):
            self.next_version()
        else:
            self.dead = True

    def append(self) -> None:
        producer_id = self.world.random.choice(list(self.writers))
        if self.writers[producer_id]:
            return
        partition = self.world.random.choice(self.world.partitions)
        value = self.world.new_value(self.application)
        self.writers[producer_id].append(value)

        def done(error: SparkBrokerError | None) -> None:
            if error is None:
                self.acknowledged.add(value)

        who = InitProducerIdResponse(producer_id, 0)
        self.world.ask_append(lambda settle: partition.append(self.application, who, 0, value, settle), done, self)

    def commit(self) -> None:
        self.committing = True
        good = [id_ for id_, values in self.writers.items() if set(values) <= self.acknowledged]
        winners = frozenset(id_ for id_ in good if self.world.random.random() < 0.7)
        key = (self.application, self.version)
        if self.world.random.random() < 0.1:
            self.world.ask(AbortTransactionRequest(*key, self.name), lambda answer: self.over(), self)
            return

        def answered(answer: Message | SparkBrokerError) -> None:
            if isinstance(answer, SparkBrokerError):
                self.refused(answer)
                return
            self.world.commits.setdefault(key, []).append((self.name, winners))
            for id_, values in self.writers.items():
                self.world.fates |= dict.fromkeys(values, id_ in winners)
            self.next_version()

        self.world.ask(CommitTransactionRequest(*key, self.name, sorted(winners)), answered, self)

    def refused(self, error: SparkBrokerError) -> None:
        if isinstance(error, AlreadyCommittedError):
            self.next_version()
            return
        expect(isinstance(error, ProducerFencedError | InvalidTxnStateError), f"a commit was refused: {error!r}")
        self.over()

    def over(self) -> None:
        self.dead = True

    def next_version(self) -> None:
        self.version += 1
        self.committing = False
        self.joining = 0
        self.writers, self.acknowledged = {}, set()


Client = ProducerClient | Execution


def run_schedule(seed: int, steps: int = 250, world: World | None = None) -> World:
    """One random schedule, healed and checked. Raises ViolationError."""
    world = world or World(seed)
    random = world.random
    clients: list[Client] = []
    for _ in range(steps):
        if all(client.dead for client in clients[-4:]) or random.random() < 0.02:
            number = len(clients)
            if random.random() < 0.5:
                clients.append(ProducerClient(world, random.choice(["p", "q"])))
            else:
                clients.append(Execution(world, random.choice(["app", "bpp"]), f"run-{number}"))
        actor = random.choice(clients[-4:])
        if random.random() < world.crashes:
            actor.dead = True
        actor.act()
        for _ in range(3):
            world.step()
    world.heal()
    world.check()
    return world
