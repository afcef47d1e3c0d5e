"""The consumer groups of a schedule: their topic, and their members, one after the other."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import EnsureOffsetsTopicRequest
from spark_broker.protocol.murmur2 import group_partition
from spark_broker.testing.simulation.group_draw import GroupDraw
from spark_broker.testing.simulation.group_member import SimGroupMember

if TYPE_CHECKING:
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.world import World


ELECTED_AFTER_MS = 40
"""By then, a stranded coordinator has a successor."""

STRANDED_MS = 1500
"""By then, no stranded coordinator has a lease."""


@dataclass(frozen=True, slots=True)
class Stranded:
    """A coordinator that does not learn that a later leader epoch has begun, with another coordinator."""

    machine: SimulatedMachine
    successor: SimulatedMachine
    partition: int  # of `__consumer_offsets`
    leader_epoch: int


class Groups:
    """Members are consumers of the world. `stopped`: no member leaves any more."""

    def __init__(self, world: World, draw: GroupDraw) -> None:
        self._world = world
        self.draw = draw
        self.rng = random.Random(f"{world.seed}/groups")
        self.stopped = False
        self.ended_unnotified: set[str] = set()  # groups for which `_ends_unnotified` was drawn
        self._stranded: Stranded | None = None
        self._lives: dict[str, int] = {}
        self._members: dict[str, SimGroupMember] = {}
        for number in range(draw.groups):
            world.consumers.append(self._new_member(f"g{number}"))

    def _new_member(self, group: str) -> SimGroupMember:
        self._lives[group] = self._lives.get(group, 0) + 1
        member = self._members[group] = SimGroupMember(self._world, self, group, self._lives[group])
        return member

    def create_topic(self) -> None:
        """Create the internal topic, as the first client that needs it does."""
        self._world.call_controller(EnsureOffsetsTopicRequest(), "create __consumer_offsets", again=self.create_topic)

    @property
    def is_up(self) -> bool:
        """Whether the internal topic is there."""
        return self._world.invariants.image.topic(CONSUMER_OFFSETS_TOPIC) is not None

    @property
    def is_stranding(self) -> bool:
        """Whether a coordinator was stranded, and no member has gone back to it yet."""
        return self._stranded is not None

    def strand(self, stranded: Stranded) -> None:
        """Groups go on with its successor, and come back to the stranded coordinator.

        Each member is replaced by one that finds the successor. The first of these that commits is replaced again, by
        one that finds the stranded coordinator. All this is soon: the coordinator has a lease that ends.
        """
        self._stranded = stranded
        after_ms = ELECTED_AFTER_MS * (1 + self.rng.random())
        self._world.scheduler.after(after_ms, self._world.operator, "find the successor", self._find_successor)
        self._world.scheduler.after(STRANDED_MS, self._world.operator, "end the stranding", self._end_stranding)

    def _end_stranding(self) -> None:
        self._stranded = None

    def _find_successor(self) -> None:
        if self._stranded is None or self.stopped:
            return
        for member in list(self._members.values()):
            if member.alive:
                member.quit("is killed, and its successor finds the new coordinator", self._stranded.successor)

    def committed_past_the_stranded(self, group: str, leader_epoch: int) -> bool:
        """Whether a group has committed in a leader epoch that its stranded coordinator does not know."""
        stranded, topic = self._stranded, self._world.invariants.image.topic(CONSUMER_OFFSETS_TOPIC)
        if stranded is None or topic is None or self.stopped or leader_epoch <= stranded.leader_epoch:
            return False
        return group_partition(group, len(topic.partitions)) == stranded.partition

    def take_stranded(self) -> SimulatedMachine | None:
        """The machine that the next member asks for metadata first."""
        stranded, self._stranded = self._stranded, None
        return None if stranded is None else stranded.machine

    def replace(self, member: SimGroupMember, bootstrap: SimulatedMachine | None = None) -> None:
        """The member is gone: another one comes soon, and asks `bootstrap` first."""
        delay_ms = self.draw.rest_ms * (0.5 + self.rng.random())
        self._world.scheduler.after(
            delay_ms, self._world.operator, "start member", partial(self._succeed, member, bootstrap)
        )

    def _succeed(self, member: SimGroupMember, bootstrap: SimulatedMachine | None) -> None:
        successor = self._new_member(member.group)
        successor.bootstrap = bootstrap
        self._world.consumers[self._world.consumers.index(member)] = successor
        self._world.trace.count("members replaced")
        successor.start()

    def stop(self) -> None:
        """From now on no member leaves."""
        self.stopped = True

    def missing(self) -> str:
        """What is not at rest yet; empty when everything is."""
        return next((text for member in self._members.values() if (text := member.missing())), "")
