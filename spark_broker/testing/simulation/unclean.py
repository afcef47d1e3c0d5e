"""Unclean elections: a replica that may lack committed records is elected on purpose (known bugs 16, 17).

Such a partition may lose what was committed, so the rules that forbid it no longer apply to it (`released`). Two rules
stay. Its replicas agree in the end. No reader reads on past lost records without being notified (KIP-320), which the
checker judges. In a schedule without such elections every rule holds for every election.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.controller.delta import MetadataDelta
from spark_broker.controller.image import MetadataImage, PartitionRegistration
from spark_broker.controller.records import MetadataRecord
from spark_broker.errors import LogTruncationError
from spark_broker.model import NO_LEADER, TopicPartition
from spark_broker.protocol.messages import ElectLeadersRequest
from spark_broker.testing.history import UncleanElection
from spark_broker.testing.simulation.aside import is_aside
from spark_broker.testing.simulation.shadow import Key
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.trace import TraceKind
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.world import World

SHARE = 0.1
"""Share of the schedules without transactions and bit flips that have unclean elections."""

FAULT = "elect uncleanly"

BEHIND_MS = 5_000.0
"""How long the followers that are to fall behind do not fetch: longer than any `replica.lag.time.max.ms` drawn."""

LOOK_MS = 100
LOOKS_MAX = 60

UNREAD_LOOKS = 20
"""With fewer looks left, the leader is killed even if no client has read what it alone has."""


def with_unclean_elections(seed: int, swarm: Swarm) -> Swarm:
    """The draw of a seed, with unclean elections if any. A generator of its own leaves the other seeds as they are."""
    rng = random.Random(f"{seed}/unclean draw")
    if rng.random() >= SHARE or "bit flip" in swarm.faults:
        return swarm
    usual = sum(swarm.faults.values()) or 1.0
    return replace(
        swarm,
        min_insync_replicas=1,
        replication_factor=max(swarm.replication_factor, 2),
        consumers=max(swarm.consumers, 1),
        faults={**swarm.faults, FAULT: usual * rng.choice([0.3, 1.0, 3.0])},
        topic_allows_unclean_election=rng.random() < 0.4,
    )


class UncleanElections:
    """`released`: partitions that were led uncleanly at least once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.released: set[Key] = set()

    @property
    def allowed(self) -> bool:
        """Whether this schedule has any."""
        return FAULT in self._world.swarm.faults

    @property
    def topic_config(self) -> Mapping[str, str]:
        """The setting of unclean elections with which a topic is created."""
        allowed = self._world.swarm.topic_allows_unclean_election
        return {"unclean.leader.election.enable": "true"} if allowed else {}

    def written(self, before: MetadataImage, read: MetadataImage, records: Sequence[MetadataRecord]) -> Iterator[Key]:
        """The partitions that the metadata log lets lead uncleanly. It had come to `before`, its controller to `read`.

        Known bug 16: only an unclean election may lose records; in any other the winner has all of them. One file may
        take a broker into the ISR and elect it, so this looks at one record after the other.
        """
        if not self.allowed:
            return
        for image in (read, *(read := read.apply([record]) for record in records)):
            for key in MetadataDelta(before, image).partitions_changed:
                was, state = before.partition(*key), image.partition(*key)
                if was is not None and state is not None and _is_unclean(was, state):
                    self._elected(key, TopicPartition(image.topics[key[0]].name, key[1]))
                    yield key
            before = image

    def _elected(self, key: Key, tp: TopicPartition) -> None:
        """The rules about committed records no longer apply to this partition."""
        self._world.trace.count("unclean elections")
        self._world.history.add(UncleanElection(tp, has_table=self._world.tiering is not None))
        self.released.add(key)

    def told_of_a_cut(self, key: Key, reader: str, error: LogTruncationError) -> None:
        """A reader is notified that records it has read are gone: the partition must have had an unclean election."""
        self._world.trace.count("readers told of a cut")
        self._world.note(reader, TraceKind.CLIENT, f"is told: {error.message}")
        if key not in self.released:
            raise ViolationError("what was read stays", f"{reader}: {error.message}")

    def log_start(self, key: Key) -> int:
        """Where the leader's log begins: the answer to a reader that asks for the earliest offset."""
        invariants = self._world.invariants
        state = invariants.image.partition(*key)
        leader = self._world.machine_of(state.leader) if state is not None else None
        shadow = invariants.shadows.get((leader.number, key)) if leader is not None else None
        return shadow.start_offset if shadow is not None else 0

    def strike(self, rng: random.Random) -> str:
        """Followers fall behind until the leader is alone in the ISR. Then it is killed, and a follower has to lead."""
        image = self._world.invariants.image
        candidates = [
            ((topic.topic_id, number), leader, TopicPartition(topic.name, number))
            for topic, number, state in image.partitions()
            if not topic.internal and not is_aside(topic.name) and len(state.replicas) > 1
            if (leader := self._world.machine_of(state.leader)) is not None and leader.running
        ]
        if not candidates:
            return ""
        key, leader, tp = rng.choice(candidates)
        for machine in self._world.machines:
            if machine is not leader:
                self._world.faults.pause_fetches(machine, BEHIND_MS)
        self._look(rng, key, tp, leader, LOOKS_MAX)
        return f"the followers of {tp} fall behind, then {leader} is to go"

    def _look(self, rng: random.Random, key: Key, tp: TopicPartition, leader: SimulatedMachine, looks: int) -> None:
        state = self._world.invariants.image.partition(*key)
        alone = state is not None and state.isr == (leader.broker_id,) and leader.running
        if self._world.faults.over:
            return
        if looks and not (alone and (looks < UNREAD_LOOKS or self._is_read_ahead(key, leader))):
            again = partial(self._look, rng, key, tp, leader, looks - 1)
            self._world.scheduler.after(LOOK_MS, self._world.operator, "look at the ISR", again)
            return
        for machine in self._world.machines:
            self._world.faults.pause_fetches(machine, 0.0)
        if alone:
            delay_ms = rng.choice([0, 100, 400]) * rng.random()
            lose = partial(self._lose, rng, key, tp, leader)
            self._world.scheduler.after(delay_ms, self._world.operator, "lose the leader", lose)

    def _is_read_ahead(self, key: Key, leader: SimulatedMachine) -> bool:
        """Whether a consumer has read (and where there are groups, committed) records that only the leader has."""
        partitions = (m.process.manager.find(*key) for m in self._world.machines if m is not leader and m.process)
        ends = [partition.replica.log_end_offset for partition in partitions if partition is not None]
        places = [consumer.kept_position(key) for consumer in self._world.consumers]
        return bool(ends) and max(places, default=-1) > max(ends)

    def _lose(self, rng: random.Random, key: Key, tp: TopicPartition, leader: SimulatedMachine) -> None:
        if self._world.faults.over or not leader.running:
            return
        restart_ms = rng.choice([600, 2500, 6000]) * (0.5 + rng.random())
        self._world.note("fault", TraceKind.FAULT, f"kill -9 of {leader.process}, the only replica of {tp} in sync")
        self._world.kill(leader, restart_ms=restart_ms)
        self._elect(key, tp, LOOKS_MAX)

    def _elect(self, key: Key, tp: TopicPartition, looks: int) -> None:
        """An operator's election, as soon as the partition has no leader."""
        state = self._world.invariants.image.partition(*key)
        if state is None or not looks or self._world.faults.over:
            return
        if state.leader == NO_LEADER:
            request = ElectLeadersRequest([(tp.topic, tp.partition)], unclean=True)
            self._world.call_controller(request, f"elect uncleanly for {tp}")
        else:
            again = partial(self._elect, key, tp, looks - 1)
            self._world.scheduler.after(LOOK_MS, self._world.operator, "look for a leader", again)


def _is_unclean(before: PartitionRegistration, state: PartitionRegistration) -> bool:
    """Whether a broker was elected that was not known to have everything. It may be fenced again by now."""
    elected = state.isr if state.leader == NO_LEADER else (state.leader,)
    return state.leader_epoch > before.leader_epoch and not {*elected} <= {*before.isr, *before.elr}
