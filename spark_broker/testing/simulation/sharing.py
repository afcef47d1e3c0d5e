"""Groups of a schedule whose members share partitions: their members come, leave, die, stand still, and come back."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.client.membership import Key
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import EnsureOffsetsTopicRequest
from spark_broker.testing.simulation.aside import is_aside
from spark_broker.testing.simulation.sharing_draw import SharingDraw
from spark_broker.testing.simulation.sharing_member import SimSharingMember
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.world import World


class Sharing:
    """All such groups of a world. `stopped`: no member goes any more."""

    def __init__(self, world: World, draw: SharingDraw) -> None:
        self.world = world
        self.draw = draw
        self.rng = random.Random(f"{world.seed}/sharing")
        self.stopped = False
        self._lives = 0
        self._members: dict[tuple[str, int], SimSharingMember] = {}
        for group in range(draw.groups):
            for number in range(draw.members):
                self._new_member(f"s{group}", number)

    def _new_member(self, group: str, number: int) -> SimSharingMember:
        self._lives += 1
        member = self._members[group, number] = SimSharingMember(self, group, number, self._lives)
        return member

    @property
    def hosts(self) -> list[str]:
        """Of the members that are there."""
        return [member.host for member in self._members.values()]

    def create_topic(self) -> None:
        """Create the internal topic, as the first client that needs it does."""
        self.world.call_controller(EnsureOffsetsTopicRequest(), "create __consumer_offsets", again=self.create_topic)

    @property
    def is_up(self) -> bool:
        """Whether the internal topic is there."""
        return self.world.invariants.image.topic(CONSUMER_OFFSETS_TOPIC) is not None

    def start(self) -> None:
        """Members begin one after the other, some of them at once."""
        for member in self._members.values():
            self.world.scheduler.after(self.rng.choice([0, 1, 300]) * self.rng.random(), member, "begin", member.start)

    def stop(self) -> None:
        """From now on no member goes. Those that stand still go on."""
        self.stopped = True
        for member in self._members.values():
            if member.alive and member.paused:
                self.world.scheduler.resume(member)

    def replace(self, member: SimSharingMember) -> None:
        """A member is gone: another life of it begins soon."""
        delay_ms = self.draw.rest_ms * (0.5 + self.rng.random())
        begin = partial(self._begin_again, member.group, member.number)
        self.world.scheduler.after(delay_ms, self.world.operator, "start member", begin)

    def _begin_again(self, group: str, number: int) -> None:
        self.world.trace.count("members replaced")
        self._new_member(group, number).start()

    def others(self, member: SimSharingMember) -> list[SimSharingMember]:
        """The other members of the group that are there."""
        return [m for m in self._members.values() if m.group == member.group and m is not member and m.alive]

    def check_took(self, member: SimSharingMember, key: Key) -> None:
        """No partition is read by two members: the one before has given it up, or knows that it is over."""
        for other in self.others(member):
            if key in other.membership.owned and not other.paused and not other.membership.is_over(other.now_ms):
                raise ViolationError("a partition has one reader", f"{member} takes {key}, which {other} reads")

    def missing(self) -> str:
        """What is not at rest yet; empty when everything is."""
        for number in range(self.draw.groups):
            group = f"s{number}"
            members = [member for (name, _), member in self._members.items() if name == group]
            text = next((text for member in members if (text := member.missing())), "")
            if text:
                return text
            wanted = self._wanted(members)
            owned = [key for member in members for key in member.membership.owned]
            if sorted(owned) != sorted(wanted):
                return f"group {group} reads {sorted(owned)} of {sorted(wanted)}"
        return ""

    def _wanted(self, members: list[SimSharingMember]) -> set[Key]:
        return {
            (topic.topic_id, number)
            for topic in self.world.invariants.image.topics.values()
            for number in range(len(topic.partitions))
            if not topic.internal and any(member.subscribes_to(topic.name) for member in members)
        }

    def names(self) -> list[str]:
        """The topics that a member may name."""
        topics = self.world.invariants.image.topics.values()
        return sorted(topic.name for topic in topics if not topic.internal and not is_aside(topic.name))
