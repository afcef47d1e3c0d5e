"""A random run of a cluster: a seed decides how often each step happens, and then the steps."""

from __future__ import annotations

import random

from spark_broker.core.replica import ACKS_ALL
from spark_broker.errors import InvariantError, NotEnoughReplicasError, SparkBrokerError
from tests.unit.core.checker import Checker, ViolationError, check_healed
from tests.unit.core.clients import Client, rows_of
from tests.unit.core.harness import LAG_MAX_MS, Answer, Cluster, Producer, Request
from tests.unit.core.transaction_steps import TransactionSteps

MESSAGES_MAX = 6
EXPIRATION_MS = 4 * LAG_MAX_MS
"""Longer than a coordinator's answer is valid."""
FOREIGN_ID = 99


WEIGHTS = {
    "send": 20, "send_plainly": 4, "send_unjudged": 1, "fetch": 40, "ask": 8, "serve": 8, "apply": 8, "drop": 1,
    "deliver": 10, "publish": 5, "decide": 8, "fence": 1.5, "unfence": 8, "crash": 1, "start": 8, "bounce": 2,
    "lose_machine": 0.3, "idle": 4, "checkpoint": 2, "tick": 2, "move_leader": 2, "restart_controller": 0.3,
    "advance_log_start": 0.5, "expire_producers": 1,
}  # fmt: skip
TRANSACTION_WEIGHTS = {
    "write": 8, "confirm": 2, "finish": 2, "time_out": 0.5, "write_late": 2, "mark": 5, "mark_late": 1,
}  # fmt: skip
"""How often each step is tried. Every seed makes some of them rare and some frequent: runs differ in kind."""


class Schedule:
    """One run. The same seed gives the same run."""

    def __init__(self, seed: int, *, transactional: bool | None = None) -> None:
        """`transactional`: with transactions and little else, or without any (None: the seed decides)."""
        self.rng = random.Random(seed)
        self.cluster = Cluster(min_insync_replicas=self.rng.choice([1, 2, 2]))
        self.checker = Checker()
        self.next_value = 0
        self.client = Client(self._new_value)
        self.transactions = TransactionSteps(self.rng, self.cluster, self._new_value)
        self.checker.decided = self.transactions.coordinator.decided
        self.foreign_sequence = 0
        self.requests: list[Request] = []
        self.answers: list[Answer] = []
        self.pace = {broker: self.rng.choice([1.0, 1.0, 0.1]) for broker in self.cluster.nodes}
        if self.rng.random() < 0.4:
            self._begin_with_a_straggler()
        share = self.rng.choice([0, 0.5, 1, 2]) if transactional is None else 3 * transactional
        steps = {getattr(self, name): weight for name, weight in WEIGHTS.items()}
        if share:
            steps |= {getattr(self.transactions, name): share * weight for name, weight in TRANSACTION_WEIGHTS.items()}
        if transactional:
            steps |= {self.send: 4, self.tick: 6, self.expire_producers: 4}
        self.steps = list(steps)
        self.weights = [weight * self.rng.choice([0.2, 1, 1, 1, 3]) for weight in steps.values()]

    def run(self, steps: int) -> None:
        """Raises ViolationError; any other error is a broken invariant of the replicas."""
        for _ in range(steps):
            self.rng.choices(self.steps, self.weights)[0]()
            self.checker.check(self.cluster)
        self.heal()

    def heal(self) -> None:
        """All brokers come back; then all replicas agree."""
        for broker, node in self.cluster.nodes.items():
            if node.replica is None:
                self.cluster.start(broker)
            self.cluster.controller.unfence(broker)
        for _ in range(4):
            self.cluster.settle()
            self.checker.check(self.cluster)
        self.transactions.heal(self.checker)
        check_healed(self.cluster)

    def _begin_with_a_straggler(self) -> None:
        """One replica is live but outside the ISR, and catches up slowly."""
        self.pace = {1: 1.0, 2: 1.0, 3: 0.1}
        self.cluster.controller.fence(3)
        self.cluster.controller.unfence(3)
        self.cluster.deliver_all()

    def _new_value(self) -> int:
        self.next_value += 1
        return self.next_value

    def _any_running(self) -> int | None:
        running = self.cluster.running()
        return self.rng.choice(running) if running else None

    def _any_leader(self) -> int | None:
        leaders = self.cluster.leaders()
        return self.rng.choice(leaders) if leaders else None

    def send(self) -> None:
        if (leader := self._any_leader()) is not None:
            self.client.send(self.cluster, leader)

    def send_plainly(self) -> None:
        """Send a batch that is neither idempotent nor repeated."""
        if (leader := self._any_leader()) is None:
            return
        value = self._new_value()
        try:
            self.cluster.append(leader, value, acks=self.rng.choice([0, 1, ACKS_ALL]), rows=rows_of(value))
        except NotEnoughReplicasError:
            return

    def send_unjudged(self) -> None:
        if (leader := self._any_leader()) is not None:
            self.foreign_sequence += self.rng.choice([1, 2, 7])
            producer = Producer(FOREIGN_ID, 0, self.foreign_sequence)
            self.cluster.append_unjudged(leader, self._new_value(), producer)

    def _follower(self) -> int:
        """Some followers are slower than others, and so leave the ISR or catch up half-way."""
        return self.rng.choices(list(self.pace), list(self.pace.values()))[0]

    def fetch(self) -> None:
        """A whole fetch. Sometimes the answer is lost after the leader has counted the fetch."""
        follower = self._follower()
        max_batches = 1 if self.pace[follower] < 1 else self.rng.choice([1, 2, 100])
        request = self.cluster.ask(follower)
        answer = self.cluster.serve(request, max_batches) if request else None
        if answer is not None and self.rng.random() > 0.2:
            self.cluster.apply(answer)

    def ask(self) -> None:
        request = self.cluster.ask(self._follower())
        if request is not None and len(self.requests) < MESSAGES_MAX:
            self.requests.append(request)

    def serve(self) -> None:
        if self.requests and len(self.answers) < MESSAGES_MAX:
            request = self.requests.pop(self.rng.randrange(len(self.requests)))
            answer = self.cluster.serve(request, max_batches=self.rng.choice([1, 100]))
            self.answers += [answer] if answer else []

    def apply(self) -> None:
        if self.answers:
            self.cluster.apply(self.answers.pop(self.rng.randrange(len(self.answers))))

    def idle(self) -> None:
        if (leader := self._any_leader()) is not None:
            followers = [broker for broker in self.cluster.running() if self._follows(broker, leader)]
            if followers:
                self.cluster.idle(self.rng.choice(followers))

    def _follows(self, broker: int, leader: int) -> bool:
        return broker != leader and self.cluster.replica(broker).assignment.leader == leader

    def drop(self) -> None:
        """A connection breaks."""
        if self.rng.random() < 0.5:
            self.requests.clear()
        else:
            self.answers.clear()

    def deliver(self) -> None:
        """A broker applies more of the metadata log, often all of it."""
        if (broker := self._any_running()) is not None:
            newest = len(self.cluster.controller.history) - 1
            heard = self.cluster.nodes[broker].heard
            self.cluster.deliver(broker, self.rng.choice([newest, self.rng.randint(heard, newest)]))

    def publish(self) -> None:
        """All brokers apply the whole metadata log."""
        self.cluster.deliver_all()

    def decide(self) -> None:
        """Decide on a proposal. The broker may be fenced next, because that is when a wrong member can be elected."""
        proposing = [broker for broker in self.cluster.running() if self.cluster.nodes[broker].proposal]
        if not proposing:
            return
        broker = self.rng.choice(proposing)
        self.cluster.decide(broker, answer_lost=self.rng.random() < 0.3)
        if self.rng.random() < 0.2:
            self.cluster.controller.fence(broker)

    def fence(self) -> None:
        """A broker, often the leader, loses its session, perhaps for a moment; it may go on as a zombie."""
        leader = self.cluster.controller.assignment.leader
        brokers = list(self.cluster.nodes)
        broker = self.rng.choice([leader, *brokers] if leader in brokers else brokers)
        self.cluster.controller.fence(broker)
        if broker in self.cluster.running() and self.rng.random() < 0.4:
            self.cluster.controller.unfence(broker)

    def unfence(self) -> None:
        """A running broker's session comes back with the same process."""
        if (broker := self._any_running()) is not None:
            self.cluster.controller.unfence(broker)

    def move_leader(self) -> None:
        self.cluster.controller.move_leader(self.rng.choice(list(self.cluster.nodes)))

    def restart_controller(self) -> None:
        self.cluster.controller.fence(*self.cluster.nodes, shrink=False)

    def crash(self) -> None:
        if (broker := self._any_running()) is not None:
            self.cluster.crash(broker)
            if self.rng.random() < 0.7:
                self.cluster.controller.fence(broker)

    def lose_machine(self) -> None:
        """A machine crashes, but only while another eligible broker has kept its data."""
        others = [b for b in self.cluster.controller.eligible if not self.cluster.nodes[b].data_lost]
        members = [b for b in self.cluster.controller.assignment.isr if b in self.cluster.running()]
        broker = self.rng.choice(members) if members and self.rng.random() < 0.7 else self._any_running()
        if broker is not None and len([b for b in others if b != broker]) >= 1:
            self.cluster.crash(broker, lost_batches=self.rng.randint(1, 4))
            self.cluster.controller.fence(broker)

    def start(self) -> None:
        stopped = [broker for broker in self.cluster.nodes if broker not in self.cluster.running()]
        if stopped:
            self.cluster.start(self.rng.choice(stopped))

    def bounce(self) -> None:
        """A broker is killed and restarts at once: it stays in the ISR, with the high watermark of its last checkpoint.

        KIP-101: the worst moment for the leader to fail is before the broker has fetched again.
        """
        current = self.cluster.controller.assignment
        members = [broker for broker in self.cluster.running() if broker in current.isr and broker != current.leader]
        broker = self.rng.choice(members) if members and self.rng.random() < 0.7 else self._any_running()
        if broker is None:
            return
        self.cluster.crash(broker)
        self.cluster.start(broker)
        if self.rng.random() < 0.4:
            self.cluster.controller.fence(self.cluster.controller.assignment.leader)
            self.publish()

    def checkpoint(self) -> None:
        if (broker := self._any_running()) is not None:
            self.cluster.checkpoint(broker)

    def tick(self) -> None:
        self.cluster.tick(self.rng.choice([10, 1000, LAG_MAX_MS // 2, LAG_MAX_MS + 1]))

    def expire_producers(self) -> None:
        """One broker forgets the idle producer, which has no open batch and goes on in a new epoch, as clients do."""
        self.client.collect()
        if self.client.open or (broker := self._any_running()) is None:
            return
        self.cluster.expire_producers(broker, self.cluster.now_ms - EXPIRATION_MS)
        self.client = Client(self._new_value, epoch=self.client.epoch + 1)

    def advance_log_start(self) -> None:
        if (leader := self._any_leader()) is not None:
            entries = self.cluster.nodes[leader].log.entries[:4]
            if entries:
                self.cluster.advance_log_start(leader, self.rng.choice(entries).info.next_offset)


def run(seed: int, steps: int = 200, *, transactional: bool | None = None) -> None:
    """Raises ViolationError, which names the seed, when a rule is broken."""
    try:
        Schedule(seed, transactional=transactional).run(steps)
    except (ViolationError, SparkBrokerError, InvariantError, AssertionError) as error:
        raise ViolationError(f"seed {seed}, {steps} steps: {error}") from error
