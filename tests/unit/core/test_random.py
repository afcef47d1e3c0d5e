"""Random runs of appends, fetches, crashes, elections and lost messages; every step is followed by all checks.

`schedule` draws whole runs from a seed (fast); the state machine draws step by step, so that hypothesis can shrink.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spark_broker.core.replica import ACKS_ALL
from spark_broker.errors import NotEnoughReplicasError
from tests.support.machines import machine_settings
from tests.unit.core.checker import Checker, check_healed
from tests.unit.core.harness import LAG_MAX_MS, Answer, Cluster
from tests.unit.core.schedule import run

SEEDS_A_TEST = 50
SEEDS = list(range(0, 200, SEEDS_A_TEST))
if os.environ.get("HYPOTHESIS_PROFILE") == "full":
    DAY = 1000 * int(os.environ.get("SEED", "1"))  # as the Makefile gives it: other seeds every day
    SEEDS += range(DAY, DAY + 800, SEEDS_A_TEST)

brokers = st.integers(1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("first", SEEDS)
def test_random_schedules_break_no_rule(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        run(seed)


class PartitionMachine(RuleBasedStateMachine):
    """Three brokers and one partition. Each rule is a step of the harness, which is skipped where it does not apply."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.checker = Checker()
        self.value = 0
        self.answers: list[Answer] = []

    @initialize(minimum=st.integers(1, 2))
    def begin(self, minimum: int) -> None:
        self.cluster = Cluster(min_insync_replicas=minimum)

    @rule(broker=brokers, acks=st.sampled_from([0, 1, ACKS_ALL, ACKS_ALL]), rows=st.integers(1, 3))
    def append(self, broker: int, acks: int, rows: int) -> None:
        if broker in self.cluster.leaders():
            self.value += 1
            try:
                self.cluster.append(broker, self.value, acks=acks, rows=rows)
            except NotEnoughReplicasError:
                return

    @rule(follower=brokers, max_batches=st.integers(1, 3))
    def fetch(self, follower: int, max_batches: int) -> None:
        self.cluster.fetch(follower, max_batches)

    @rule(follower=brokers)
    def fetch_and_keep_the_answer(self, follower: int) -> None:
        request = self.cluster.ask(follower)
        answer = self.cluster.serve(request) if request else None
        if answer is not None:
            self.answers.append(answer)

    @rule(data=st.data())
    def apply_a_late_answer(self, data: st.DataObject) -> None:
        if self.answers:
            self.cluster.apply(self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1))))

    @rule(broker=brokers)
    def deliver(self, broker: int) -> None:
        self.cluster.deliver(broker)

    @rule()
    def publish(self) -> None:
        self.cluster.deliver_all()

    @rule(broker=brokers, answer_lost=st.booleans())
    def decide(self, broker: int, answer_lost: bool) -> None:
        self.cluster.decide(broker, answer_lost=answer_lost)

    @rule(broker=brokers)
    def fence(self, broker: int) -> None:
        self.cluster.controller.fence(broker)

    @rule(broker=brokers)
    def unfence(self, broker: int) -> None:
        if broker in self.cluster.running():
            self.cluster.controller.unfence(broker)

    @rule(broker=brokers)
    def elect(self, broker: int) -> None:
        self.cluster.controller.move_leader(broker)

    @rule(broker=brokers)
    def crash_or_start(self, broker: int) -> None:
        if broker in self.cluster.running():
            self.cluster.crash(broker)
        else:
            self.cluster.start(broker)

    @rule(broker=brokers)
    def checkpoint(self, broker: int) -> None:
        if broker in self.cluster.running():
            self.cluster.checkpoint(broker)

    @rule(passed_ms=st.sampled_from([1, LAG_MAX_MS + 1]))
    def tick(self, passed_ms: int) -> None:
        self.cluster.tick(passed_ms)

    @invariant()
    def no_rule_is_broken(self) -> None:
        self.checker.check(self.cluster)

    def teardown(self) -> None:
        for broker in self.cluster.nodes:
            if broker not in self.cluster.running():
                self.cluster.start(broker)
            self.cluster.controller.unfence(broker)
        for _ in range(4):
            self.cluster.settle()
        check_healed(self.cluster)


TestPartitionMachine = PartitionMachine.TestCase
TestPartitionMachine.settings = machine_settings(40)
