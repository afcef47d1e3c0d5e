"""Who makes the target: the server's assignors, uniform and range. Pure functions of their inputs.

A target belongs to its inputs. They are hashed, and unequal inputs make a new group epoch. The previous target is no
input: it only says where partitions stay when several targets are equally good (an assignor is sticky).

*uniform*: the numbers of partitions of members with equal subscriptions differ by one at most, and as few partitions
move as that allows. A partition goes to a member in a rack that has a replica, where the numbers allow it.

*range*: each topic is cut into consecutive ranges. Topics with the same subscribers and the same number of partitions
are cut alike, so partitions with one number go to one member. Racks do not count. Members keep their order.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from spark_broker.core.groups.records import MemberValue, Partition
from spark_broker.core.groups.topics import Topic, Topics

UNIFORM = "uniform"
RANGE = "range"

Target = Mapping[str, frozenset[Partition]]
"""What each member shall own, by the member's identity. A partition is in one of them at most."""

HASH_BYTES = 16


class MemberInput(msgspec.Struct, frozen=True, array_like=True):
    """A member. `topic_ids`: sorted. `identity`: see `Group.identity`."""

    identity: str
    topic_ids: tuple[str, ...]
    rack: str


class TopicInput(msgspec.Struct, frozen=True, array_like=True):
    """A topic that somebody subscribes to. `racks`: of the replicas of each partition; empty when no member has one."""

    topic_id: str
    partitions: int
    racks: tuple[tuple[str, ...], ...]

    def is_near(self, number: int, rack: str) -> bool:
        """Whether a replica of the partition is in the rack, or either has none."""
        racks = self.racks[number] if number < len(self.racks) else ()
        return not rack or not racks or rack in racks


class Inputs(msgspec.Struct, frozen=True, array_like=True):
    """All that a target depends on. Members are in order of their identities, topics of their ids."""

    assignor: str
    members: tuple[MemberInput, ...]
    topics: tuple[TopicInput, ...]

    @property
    def size(self) -> int:
        """Members times partitions: so many steps does a target take at most, but for a factor."""
        return len(self.members) * sum(topic.partitions for topic in self.topics)

    def hash(self) -> str:
        """Equal for equal inputs, in every process."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=HASH_BYTES).hexdigest()


def inputs_of(members: Mapping[str, MemberValue], topics: Topics, assignor: str) -> Inputs:
    """`members`: by identity. Topics that are not there count for nothing."""
    in_racks = any(member.rack for member in members.values())
    inputs: list[MemberInput] = []
    subscribed: dict[str, Topic] = {}
    ids: dict[tuple[tuple[str, ...], str], tuple[str, ...]] = {}
    for identity in sorted(members):
        member = members[identity]
        subscription = (member.topics, member.pattern)
        if subscription not in ids:
            found = topics.subscribed(member)
            subscribed |= {topic.topic_id: topic for topic in found}
            ids[subscription] = tuple(topic.topic_id for topic in found)
        inputs.append(MemberInput(identity, ids[subscription], member.rack))
    of_topics = tuple(
        TopicInput(topic_id, topic.partitions, topic.racks if in_racks else ())
        for topic_id, topic in sorted(subscribed.items())
    )
    return Inputs(assignor, tuple(inputs), of_topics)


def assign(inputs: Inputs, previous: Target) -> Target:
    """The target. `previous`: the one before, by identity; partitions and members that are gone are left out."""
    return ASSIGNORS[inputs.assignor](inputs, previous)


def uniform(inputs: Inputs, previous: Target) -> Target:
    subscriptions = {member.topic_ids for member in inputs.members}
    kept = _kept(inputs, previous)
    if len(subscriptions) > 1:
        return _Levelled(inputs, kept).target(previous)
    return _evenly(inputs, kept, previous)


def _kept(inputs: Inputs, previous: Target) -> dict[str, list[Partition]]:
    """What may stay where it was: subscribed, still there, and near."""
    topics = {topic.topic_id: topic for topic in inputs.topics}
    taken: set[Partition] = set()
    kept: dict[str, list[Partition]] = {}
    for member in inputs.members:
        subscribed = frozenset(member.topic_ids)
        stays = [
            (topic_id, number)
            for topic_id, number in sorted(previous.get(member.identity, ()))
            if topic_id in subscribed
            and number < topics[topic_id].partitions
            and topics[topic_id].is_near(number, member.rack)
            and (topic_id, number) not in taken
        ]
        taken.update(stays)
        kept[member.identity] = stays
    return kept


def _all_partitions(inputs: Inputs) -> Iterable[Partition]:
    return ((topic.topic_id, number) for topic in inputs.topics for number in range(topic.partitions))


def _evenly(inputs: Inputs, kept: Mapping[str, list[Partition]], previous: Target) -> Target:
    """All members subscribe to the same topics: each gets the same number of partitions, or one more.

    Those who keep the most get one more, so nothing moves only because of that.
    """
    partitions = list(_all_partitions(inputs))
    share, more = divmod(len(partitions), max(len(inputs.members), 1))
    by_kept = sorted(inputs.members, key=lambda member: (-len(kept[member.identity]), member.identity))
    room: dict[str, int] = {}
    target: dict[str, list[Partition]] = {}
    for place, member in enumerate(by_kept):
        limit = share + (place < more)
        target[member.identity] = kept[member.identity][:limit]
        room[member.identity] = limit - len(target[member.identity])
    taken = {partition for stays in target.values() for partition in stays}
    left = [partition for partition in partitions if partition not in taken]

    def give(identity: str, partition: Partition) -> None:
        target[identity].append(partition)
        room[identity] -= 1

    for accepts in (_near(inputs), _before(previous), None):
        left = _hand_out(inputs, left, room, give, accepts)
    return {identity: frozenset(partitions) for identity, partitions in target.items()}


Accepts = Callable[[Partition], Iterable[str] | None]
"""The members that may get a partition. None: all."""


def _near(inputs: Inputs) -> Accepts | None:
    """Members in the racks of a partition's replicas. Without racks everybody is near: None."""
    if not any(topic.racks for topic in inputs.topics):
        return None
    topics = {topic.topic_id: topic for topic in inputs.topics}
    return lambda partition: [
        member.identity for member in inputs.members if topics[partition[0]].is_near(partition[1], member.rack)
    ]


def _before(previous: Target) -> Accepts:
    """The member that had the partition. It is not near, but nobody is."""
    owners = {partition: identity for identity, partitions in previous.items() for partition in partitions}
    return lambda partition: [owners[partition]] if partition in owners else []


def _hand_out(
    inputs: Inputs,
    partitions: Sequence[Partition],
    room: Mapping[str, int],
    give: Callable[[str, Partition], None],
    accepts: Accepts | None,
) -> list[Partition]:
    """Give partitions to members with room, in turn. Returns those that nobody got."""
    turns = deque(member.identity for member in inputs.members)
    left: list[Partition] = []
    for partition in partitions:
        if accepts is None:
            while turns and not room[turns[0]]:
                turns.popleft()
            chosen = turns[0] if turns else None
            turns.rotate(-1)
        else:
            able = [identity for identity in accepts(partition) or () if room.get(identity)]
            chosen = max(able, key=lambda identity: room[identity], default=None)
        if chosen is None:
            left.append(partition)
        else:
            give(chosen, partition)
    return left


class _Levelled:
    """Members subscribe to different topics: partitions go to the subscriber with the fewest, and then from members
    with more to members with fewer, until no single move helps.
    """

    def __init__(self, inputs: Inputs, kept: Mapping[str, list[Partition]]) -> None:
        self.racks = {member.identity: member.rack for member in inputs.members}
        self.topics = {topic.topic_id: topic for topic in inputs.topics}
        self.subscribers: dict[str, list[str]] = {topic_id: [] for topic_id in self.topics}
        for member in inputs.members:
            for topic_id in member.topic_ids:
                self.subscribers[topic_id].append(member.identity)
        self.partitions = sorted(_all_partitions(inputs), key=lambda p: (len(self.subscribers[p[0]]), p))
        self.load = {identity: len(stays) for identity, stays in kept.items()}
        self.owners = {partition: identity for identity, stays in kept.items() for partition in stays}

    def target(self, previous: Target) -> Target:
        before = {partition: identity for identity, partitions in previous.items() for partition in partitions}
        for partition in self.partitions:
            if partition not in self.owners:
                self._move(partition, self._lightest(partition, before.get(partition)))
        # Each move makes the sum of the squares of the loads smaller, so the moves end.
        while self._level():
            pass
        owned: dict[str, set[Partition]] = {identity: set() for identity in self.racks}
        for partition, identity in self.owners.items():
            owned[identity].add(partition)
        return {identity: frozenset(partitions) for identity, partitions in owned.items()}

    def _lightest(self, partition: Partition, before: str | None) -> str:
        topic_id, number = partition
        near = self.topics[topic_id].is_near
        return min(
            self.subscribers[topic_id],
            key=lambda identity: (
                self.load[identity],
                not near(number, self.racks[identity]),
                identity != before,
                identity,
            ),
        )

    def _move(self, partition: Partition, identity: str) -> None:
        if (owner := self.owners.get(partition)) is not None:
            self.load[owner] -= 1
        self.owners[partition] = identity
        self.load[identity] += 1

    def _level(self) -> bool:
        """Whether a partition moved."""
        moved = False
        for partition in self.partitions:
            lightest = self._lightest(partition, None)
            if self.load[self.owners[partition]] > self.load[lightest] + 1:
                self._move(partition, lightest)
                moved = True
        return moved


def in_ranges(inputs: Inputs, previous: Target) -> Target:
    """Range. Members keep their order: those that had ranges come first, so ranges move no further than they must."""
    subscribers: dict[str, list[str]] = {topic.topic_id: [] for topic in inputs.topics}
    for member in inputs.members:
        for topic_id in member.topic_ids:
            subscribers[topic_id].append(member.identity)
    alike: dict[tuple[tuple[str, ...], int], list[str]] = {}
    for topic in inputs.topics:
        alike.setdefault((tuple(subscribers[topic.topic_id]), topic.partitions), []).append(topic.topic_id)
    target: dict[str, set[Partition]] = {member.identity: set() for member in inputs.members}
    for (identities, partitions), topic_ids in alike.items():
        share, more = divmod(partitions, len(identities))
        first = 0
        for rank, identity in enumerate(_in_order(identities, topic_ids, previous)):
            end = first + share + (rank < more)
            target[identity] |= {(topic_id, number) for topic_id in topic_ids for number in range(first, end)}
            first = end
    return {identity: frozenset(partitions) for identity, partitions in target.items()}


def _in_order(identities: Iterable[str], topic_ids: Sequence[str], previous: Target) -> list[str]:
    """By the lowest number that each had of these topics; those that had none come last."""

    def place(identity: str) -> tuple[bool, int, str]:
        lowest = min((number for topic_id, number in previous.get(identity, ()) if topic_id in topic_ids), default=None)
        return lowest is None, lowest or 0, identity

    return sorted(identities, key=place)


ASSIGNORS: Mapping[str, Callable[[Inputs, Target], Target]] = {UNIFORM: uniform, RANGE: in_ranges}
"""The assignors of the server, by name. The first one is the default."""
