"""The consumer groups of a schedule: their topic, and their members, one after the other."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import EnsureOffsetsTopicRequest
from spark_broker.testing.simulation.group_draw import GroupDraw
from spark_broker.testing.simulation.group_member import SimGroupMember

if TYPE_CHECKING:
    from spark_broker.testing.simulation.world import World


class Groups:
    """Members are consumers of the world. `stopped`: no member leaves any more."""

    def __init__(self, world: World, draw: GroupDraw) -> None:
        self._world = world
        self.draw = draw
        self.rng = random.Random(f"{world.seed}/groups")
        self.stopped = False
        self.ended_unnotified: set[str] = set()  # groups for which `_ends_unnotified` was drawn
        self._lives: dict[str, int] = {}
        self._members: dict[str, SimGroupMember] = {}
        self._counted = False
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

    def replace(self, member: SimGroupMember) -> None:
        """The member is gone: another one comes soon."""
        delay_ms = self.draw.rest_ms * (0.5 + self.rng.random())
        self._world.scheduler.after(delay_ms, self._world.operator, "start member", partial(self._succeed, member))

    def _succeed(self, member: SimGroupMember) -> None:
        successor = self._new_member(member.group)
        self._world.consumers[self._world.consumers.index(member)] = successor
        self._world.trace.count("members replaced")
        successor.start()

    def stop(self) -> None:
        """From now on no member leaves."""
        self.stopped = True

    def missing(self) -> str:
        """What is not at rest yet; empty when everything is."""
        missing = next((text for member in self._members.values() if (text := member.missing())), "")
        if not missing and not self._counted:
            self._counted = True
            self._count_snapshots()
        return missing

    def _count_snapshots(self) -> None:
        """Count the logs of committed offsets that were shortened."""
        topic = self._world.invariants.image.topic(CONSUMER_OFFSETS_TOPIC)
        for number in range(len(topic.partitions) if topic is not None else 0):
            if topic is not None and self._world.unclean.log_start((topic.topic_id, number)):
                self._world.trace.count("offsets logs shortened")
