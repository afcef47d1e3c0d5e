"""Random schedules of a shard of groups: members that join, leave, die, freeze, lose and repeat messages, topics that
grow, are deleted and created again, shards that are loaded again from whatever compaction left. One seed draws all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from spark_broker.core.groups.machine import GroupShard
from spark_broker.core.groups.reconcile import next_assignment
from spark_broker.core.groups.records import MemberValue, Partition
from spark_broker.core.groups.requests import (
    Commit,
    CommitAnswer,
    CommitOffset,
    ComputeTarget,
    Decision,
    GroupSettings,
    Heartbeat,
    HeartbeatAnswer,
    Now,
    Wake,
)
from spark_broker.core.groups.state import AWAY_EPOCH, Group, GroupPhase, MemberKind
from spark_broker.core.groups.topics import Topic, Topics
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    FencedInstanceIdError,
    FencedMemberEpochError,
    GroupIdNotFoundError,
    GroupMaxSizeReachedError,
    GroupSubscribedToTopicError,
    NonEmptyGroupError,
    SparkBrokerError,
    StaleMemberEpochError,
    UnknownMemberIdError,
    UnknownTopicIdError,
    UnreleasedInstanceIdError,
    UnstableOffsetCommitError,
)
from tests.unit.core.compacted_logs import compacted, in_any_order
from tests.unit.core.groups.member import Member
from tests.unit.core.groups.shard_log import Record, loaded, stored

GROUPS = ("g0", "g1")
NAMES = ("orders", "orders-eu", "clicks")
SUBSCRIPTIONS = ((("orders",), ""), (("clicks", "orders"), ""), ((), "orders.*"), (NAMES, ""))
TOGGLES = ((("orders",), ""), (("clicks",), ""), (("clicks", "orders"), ""))
INSTANCES = ("i0", "i1")
SESSION_MS = 3000
REBALANCE_MS = 6000
RETENTION_MS = 50_000
STEPS = 220
ROUNDS_MAX = 7
"""In so many rounds of heartbeats without a loss, a group gets to its target: one until members learn who is gone, one
in which they name what they own, one in which they are told to revoke, one in which they say so, one in which others
get the partitions and one to name them; and one for members that find out that they were fenced.
"""


class ViolationError(AssertionError):
    """A promise is broken."""


def expect(condition: bool, what: str, *values: object) -> None:
    if not condition:
        raise ViolationError(what % values if values else what)


@dataclass(frozen=True)
class Held:
    """Answers are given when the log is committed up to where it ended."""

    position: int
    deliver: Callable[[], None]


class World:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        calm = self.random.random() < 0.3  # rebalances come to their ends, so partitions travel far
        self.loss = 0.0 if calm else self.random.choice([0.0, 0.1, 0.3])
        self.reloads = 0.0 if calm else self.random.choice([0.0, 0.02, 0.08])
        swarm: dict[Callable[[World], None], float] = {kind: self.random.choice((0, 0.5, 1, 2)) for kind in SWARM}
        if calm:
            swarm = {**dict.fromkeys(SWARM, 0), World.subscribe: 3, World.round: 20}
        self.groups = GROUPS[:1] if calm else GROUPS
        self.subscriptions = TOGGLES if calm else SUBSCRIPTIONS
        self.weights = {kind: weight * swarm.get(kind, 1) for kind, weight in STEP_WEIGHTS.items()}
        self.settings = GroupSettings(
            group_size_max=6,
            heartbeat_interval_ms=500,
            inline_size_max=self.random.choice([0, 1000, 1000]),
            offsets_retention_ms=RETENTION_MS,
            expiry_interval_ms=1000,
        )
        self.clock_ms = 0
        self.log: list[Record] = []
        self.committed = 0
        self.held: list[Held] = []
        self.network: list[Callable[[], None]] = []
        self.copies: list[Callable[[], None]] = []  # of messages that were sent twice
        self.parked: dict[tuple[str, str], int] = {}
        self.computing: list[ComputeTarget] = []
        self.late_commits: list[tuple[Member, Commit, int]] = []
        self.members: list[Member] = []
        self.leases: dict[tuple[str, Partition], list[tuple[int, Member]]] = {}
        self.heard: dict[tuple[str, str], int] = {}  # the latest heartbeat of each member that this shard has received
        self.heard_ms: dict[tuple[str, str], int] = {}
        self.revoking_ms: dict[tuple[str, str], int] = {}
        self.acked: dict[tuple[str, Partition], int] = {}
        self.taken: dict[tuple[str, Partition], list[int]] = {}  # offsets that a shard took, in order
        self.open_transactions: set[str] = set()
        self.counter = 0
        self.generation = 0
        self.version = 0
        self.refuses = False  # the log takes no appends
        self.standstill = False  # it has refused one, and the shard has not gone on since
        self.deleted: set[str] = set()  # ids of topics
        self.healing = False
        self.topics: dict[str, Topic] = {}
        for name in NAMES:
            self.create_topic(name)
        self.shard = self.load()

    # What the shell does.

    @property
    def now(self) -> Now:
        return Now(self.clock_ms, 1_000_000 + self.clock_ms)

    def image(self) -> Topics:
        return Topics(self.topics.values(), self.version)

    def load(self) -> GroupShard:
        self.generation += 1
        self.committed = len(self.log)
        self.parked.clear()
        self.computing.clear()
        self.held.clear()
        self.heard.clear()
        self.refuses = False
        shard = GroupShard(self.settings, self.generation, check_takes=self.check_takes)
        for record in self.log:
            shard.replay(record)
        self.shard = shard
        self.carry_out(shard.loaded(self.image(), self.now))
        self.carry_out(shard.writes_begin(self.now))
        self.begin_deadlines()
        return shard

    def check_takes(self) -> None:
        if self.refuses:
            self.standstill = True
            raise CoordinatorNotAvailableError("the ISR is too small")

    def refuse(self) -> None:
        """The log takes no appends for some events."""
        self.refuses = True

    def catch_up(self) -> None:
        """What every event of the shell begins with."""
        if self.refuses or not self.standstill:
            return
        self.standstill = False
        self.carry_out(self.shard.writes_begin(self.now))
        self.carry_out(self.shard.topics_changed(self.image(), self.deleted, self.now))
        self.begin_deadlines()

    def begin_deadlines(self) -> None:
        for group_id, group in self.shard.state.groups.items():
            for member_id in group.members:
                self.heard_ms[group_id, member_id] = self.clock_ms
                self.revoking_ms.pop((group_id, member_id), None)

    @contextmanager
    def perhaps_refused(self) -> Iterator[None]:
        """An event of the shard, which may be refused while the log takes no appends. It counts as a message lost."""
        try:
            yield
        except CoordinatorNotAvailableError:
            expect(self.refuses, "a log that takes appends has refused one")

    def carry_out(self, decision: Decision[object], deliver: Callable[[], None] | None = None) -> None:
        self.log += [stored(record) for record in decision.records]
        if deliver is not None:
            self.held.append(Held(len(self.log), deliver))
        for effect in decision.effects:
            if isinstance(effect, ComputeTarget):
                self.computing.append(effect)
            else:
                self.wake(effect)
        if self.healing:
            self.commit_log()

    def wake(self, wake: Wake) -> None:
        for member_id in wake.member_ids:
            sequence = self.parked.pop((wake.group_id, member_id), None)
            if sequence is not None:
                self.resume(wake.group_id, member_id, sequence)

    def resume(self, group_id: str, member_id: str, sequence: int) -> None:
        try:
            decision = self.shard.resume(group_id, member_id, sequence, self.now)
        except SparkBrokerError as error:
            self.answer_error(group_id, member_id, sequence, error)
            return
        self.answer(group_id, member_id, decision)

    def commit_log(self) -> None:
        self.committed = len(self.log)
        held, self.held = self.held, []
        for answer in held:
            answer.deliver()

    def send(self, deliver: Callable[[], None]) -> None:
        """A message: lost, late, or delivered twice."""
        if self.random.random() < self.loss:
            return
        self.network.append(deliver)
        if self.random.random() < self.loss / 2:
            self.copies.append(deliver)

    def deliver(self) -> None:
        """Mostly the oldest message. At times another one overtakes it, or a copy of an older one comes."""
        if self.copies and not self.healing and self.random.random() < 0.1:
            self.copies.pop(self.random.randrange(len(self.copies)))()
        if self.network:
            at = 0 if self.healing or self.random.random() < 0.8 else self.random.randrange(len(self.network))
            self.network.pop(at)()

    def receive(self, heartbeat: Heartbeat) -> None:
        group_id, member_id = heartbeat.group_id, heartbeat.member_id
        if heartbeat.sequence >= self.parked.get((group_id, member_id), 2**63):
            del self.parked[group_id, member_id]  # Nobody waits for the answer to an older one.
        try:
            decision = self.shard.heartbeat(heartbeat, self.now)
        except CoordinatorNotAvailableError:
            expect(self.refuses, "a log that takes appends has refused one")
            return
        except SparkBrokerError as error:
            self.answer_error(group_id, member_id, heartbeat.sequence, error)
            return
        if heartbeat.sequence > self.heard.get((group_id, member_id), -1):
            self.heard[group_id, member_id] = heartbeat.sequence
            self.heard_ms[group_id, member_id] = self.clock_ms
        self.answer(group_id, member_id, decision)

    def answer(self, group_id: str, member_id: str, decision: Decision[HeartbeatAnswer]) -> None:
        answer = decision.answer
        if answer.settled and not self.healing and self.random.random() < 0.5:
            self.parked[group_id, member_id] = answer.sequence
            self.carry_out(decision)
            return
        member = self.member(group_id, member_id)
        self.carry_out(decision, lambda: self.send(lambda: self.take(member, answer)))

    def answer_error(self, group_id: str, member_id: str, sequence: int, error: SparkBrokerError) -> None:
        """What an error says rests on the log, too."""
        member = self.member(group_id, member_id)
        in_group = member_id in self.shard.state.group(group_id).members
        latest = sequence == member.sequence and not member.left
        if isinstance(error, FencedMemberEpochError):
            expect(not latest or not in_group, "%s is fenced by a lost answer: %s", member_id, error)
        else:
            allowed = (UnknownMemberIdError, UnreleasedInstanceIdError, FencedInstanceIdError, GroupMaxSizeReachedError)
            expect(isinstance(error, allowed), "%s: %s", member_id, error)
        self.held.append(Held(len(self.log), lambda: self.send(lambda: self.take_error(member, sequence, error))))

    def member(self, group_id: str, member_id: str) -> Member:
        return next(m for m in self.members if (m.group_id, m.member_id) == (group_id, member_id))

    # What members do.

    def take(self, member: Member, answer: HeartbeatAnswer) -> None:
        if member.takes(answer.sequence, self.clock_ms):
            member.take(answer, self.clock_ms)

    def take_error(self, member: Member, sequence: int, error: SparkBrokerError) -> None:
        if member.takes(sequence, self.clock_ms):
            if isinstance(error, UnknownMemberIdError):
                self.begin_anew(member)
            else:
                member.lose()
                member.left = isinstance(error, FencedInstanceIdError)

    def alive(self) -> list[Member]:
        return [member for member in self.members if not member.left and not member.frozen]

    def pick(self) -> Member | None:
        alive = self.alive()
        return self.random.choice(alive) if alive else None

    def beat(self) -> None:
        if (member := self.pick()) is not None:
            heartbeat = member.heartbeat(self.clock_ms)
            self.send(lambda: self.receive(heartbeat))

    def join(self) -> None:
        if len(self.alive()) < 2 * len(self.groups) + 1:
            topics, pattern = self.random.choice(self.subscriptions)
            instance = self.random.choice(INSTANCES) if self.random.random() < 0.3 else ""
            self.start(self.random.choice(self.groups), instance, topics, pattern)

    def start(self, group_id: str, instance_id: str, topics: tuple[str, ...], pattern: str) -> None:
        self.counter += 1
        about = MemberValue(
            topics,
            pattern,
            instance_id,
            rack=self.random.choice(("", "a", "b")),
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            assignor=self.random.choice(("", "", "uniform", "range")),
        )
        self.members.append(Member(group_id, f"m{self.counter:03}", about))

    def leave(self) -> None:
        if (member := self.pick()) is not None:
            heartbeat = member.leave(for_now=bool(member.about.instance_id) and self.random.random() < 0.7)
            self.send(lambda: self.receive(heartbeat))
            if heartbeat.member_epoch == AWAY_EPOCH and self.random.random() < 0.8:
                about = member.about
                self.start(member.group_id, about.instance_id, about.topics, about.pattern)
                self.members[-1].about = about

    def die(self) -> None:
        if (member := self.pick()) is not None:
            member.left = True
            member.lose()

    def freeze(self) -> None:
        if (member := self.pick()) is not None:
            member.frozen = True

    def thaw(self) -> None:
        """Whoever was away for longer than its session has nothing any more, and knows. Its commit is on its way."""
        for member in self.members:
            if member.frozen:
                for partition in member.owned:
                    self.write_late(member, partition)
                member.frozen = False
        self.end_sessions()

    def end_sessions(self) -> None:
        """Members notice by themselves that their sessions may be over."""
        for member in self.alive():
            if member.may_own and member.is_over(self.clock_ms):
                self.begin_anew(member)

    def begin_anew(self, member: Member) -> None:
        """Under another id. The group may have been deleted meanwhile, and its epochs then begin anew, too: a commit
        that was long on its way would be good again.
        """
        member.lose()
        member.left = True
        self.counter += 1
        self.members.append(Member(member.group_id, f"m{self.counter:03}", member.about))

    def subscribe(self) -> None:
        if (member := self.pick()) is not None:
            member.subscribe(*self.random.choice(self.subscriptions))

    def work(self) -> None:
        """Carry an assignment out; a clean hand-over commits first."""
        if (member := self.pick()) is not None:
            self.carry_out_assignment(member)

    def carry_out_assignment(self, member: Member) -> None:
        if member.pending is None:
            return
        given_up = [partition for partition in member.owned if partition not in member.pending]
        for partition in given_up:
            self.write(member, partition)
            if self.random.random() < 0.5:
                self.write_late(member, partition)
        self.counter += 1
        member.carry_out(self.counter)
        for partition, lease in member.owned.items():
            if lease == self.counter:
                self.leases.setdefault((member.group_id, partition), []).append((lease, member))

    def commit(self) -> None:
        member = self.pick()
        if member is not None and member.owned:
            partition = self.random.choice(sorted(member.owned))
            self.random.choice((self.write, self.write, self.write_late))(member, partition)
        elif self.random.random() < 0.3:
            self.commit_alone()

    def commit_of(self, member: Member, partition: Partition) -> Commit:
        self.counter += 1
        offsets = {partition: CommitOffset(self.counter)}
        return Commit(member.group_id, offsets, member.member_id, member.epoch, member.about.instance_id)

    def write(self, member: Member, partition: Partition) -> None:
        commit = self.commit_of(member, partition)
        self.receive_commit(member, commit, member.owned[partition])

    def write_late(self, member: Member, partition: Partition) -> None:
        """A commit that is long on its way: its member may have lost the partition meanwhile, or got it again."""
        self.late_commits.append((member, self.commit_of(member, partition), member.owned[partition]))

    def commit_late(self) -> None:
        """It comes when it does the most harm: others have had the partition since, and perhaps it came back."""
        if not self.late_commits:
            return

        def harm(late: tuple[Member, Commit, int]) -> int:
            member, commit, lease = late
            place = (member.group_id, next(iter(commit.offsets)))
            lost = self.has_lost(member, place, lease)
            return lost + (lost and place[1] in member.owned)

        latest = max(self.late_commits, key=harm)
        if harm(latest) == 2 or self.random.random() < 0.2:
            self.late_commits.remove(latest)
            self.receive_commit(*latest)

    def has_lost(self, member: Member, place: tuple[str, Partition], lease: int) -> bool:
        """Whether somebody else has had the partition since."""
        return any(later > lease and owner is not member for later, owner in self.leases[place])

    def receive_commit(self, member: Member, commit: Commit, lease: int) -> None:
        (partition, value), *_ = commit.offsets.items()
        place = (member.group_id, partition)
        owns = member.owned.get(partition) == lease
        in_group = member.member_id in self.shard.state.group(member.group_id).members
        there = partition[0] in self.shard.topics.by_id
        try:
            decision = self.shard.commit(commit, self.now)
        except CoordinatorNotAvailableError:
            return
        except (UnknownMemberIdError, FencedInstanceIdError):
            away = in_group and self.shard.state.group(member.group_id).kind(member.member_id) is MemberKind.AWAY
            expect(not in_group or away, "%s is of the group, and unknown", member.member_id)
            return
        refusal = decision.answer.refused.get(partition)
        if refusal is not None:
            known = isinstance(refusal, StaleMemberEpochError | UnknownTopicIdError)
            expect(known, "refused: %s", refusal)
            expect(there or isinstance(refusal, UnknownTopicIdError), "a topic that is gone: %s", refusal)
            expect(not (owns and there), "a good commit of %s is refused: %s", member.member_id, refusal)
        else:
            lost = self.has_lost(member, place, lease)
            expect(not lost, "a commit of %s, which has lost %s", member.member_id, partition)
            self.taken.setdefault(place, []).append(value.offset)
        self.carry_out(decision, lambda: self.ack(place, value.offset, decision.answer))

    def commit_alone(self) -> None:
        """Without a member: only while the group has none."""
        group_id, topic = self.random.choice(GROUPS), self.random.choice(list(self.topics.values()) or [None])
        if topic is None:
            return
        self.counter += 1
        place, offset = (group_id, (topic.topic_id, 0)), self.counter
        empty = not self.shard.state.group(group_id).members
        try:
            decision = self.shard.commit(Commit(group_id, {place[1]: CommitOffset(offset)}), self.now)
        except CoordinatorNotAvailableError:
            return
        except UnknownMemberIdError:
            expect(not empty, "the group %s has no member", group_id)
            return
        expect(empty, "a commit of nobody beside members of %s", group_id)
        refused = decision.answer.refused
        expect(not refused or topic.topic_id not in self.shard.topics.by_id, "refused: %s", refused)
        if not refused:
            self.taken.setdefault(place, []).append(offset)
        self.carry_out(decision, lambda: self.ack(place, offset, decision.answer))

    def ack(self, place: tuple[str, Partition], offset: int, answer: CommitAnswer) -> None:
        if not answer.refused and place[1][0] in {topic.topic_id for topic in self.topics.values()}:
            self.acked[place] = offset

    def forget(self, places: set[tuple[str, Partition]]) -> None:
        """These offsets are deleted. Acknowledgements that are held come before that, in the order of the log."""

        def pop() -> None:
            for place in places:
                self.acked.pop(place, None)

        pop()
        self.held.append(Held(len(self.log), pop))

    # What else happens.

    def create_topic(self, name: str) -> None:
        self.counter += 1
        partitions = self.random.randint(1, 4)
        racks = tuple((self.random.choice("ab"),) for _ in range(partitions))
        self.topics[name] = Topic(f"{self.counter:032x}", name, partitions, racks)
        self.version += 1

    def change_topics(self) -> None:
        name = self.random.choice(NAMES)
        topic = self.topics.get(name)
        deleted: set[str] = set()
        if topic is None or self.random.random() < 0.4:
            if topic is not None:
                deleted.add(topic.topic_id)
            self.create_topic(name)
        elif self.random.random() < 0.5:
            self.topics[name] = Topic(topic.topic_id, name, topic.partitions + 1, (*topic.racks, ("a",)))
            self.version += 1
        else:
            del self.topics[name]
            deleted.add(topic.topic_id)
            self.version += 1
        self.acked = {place: offset for place, offset in self.acked.items() if place[1][0] not in deleted}
        self.deleted |= deleted
        with self.perhaps_refused():
            self.carry_out(self.shard.topics_changed(self.image(), deleted, self.now))

    def pass_time(self) -> None:
        self.clock_ms += self.random.choice(
            [10, 100, 100, 300, 300, RETENTION_MS if self.random.random() < 0.1 else 10]
        )
        self.look_at_the_clock()

    def look_at_the_clock(self) -> None:
        self.end_sessions()
        groups = self.shard.state.groups
        before = {(g, m) for g, group in groups.items() for m in group.members}
        unused = {g for g, group in groups.items() if not group.members} - self.open_transactions
        offsets = {(g, p) for g, group in groups.items() for p in group.offsets}
        with self.perhaps_refused():
            self.carry_out(self.shard.clock(self.now, self.open_transactions.__contains__))
        groups = self.shard.state.groups
        for member in before - {(g, m) for g, group in groups.items() for m in group.members}:
            silent_ms = self.clock_ms - self.heard_ms[member]
            revoking_ms = self.clock_ms - self.revoking_ms.get(member, self.clock_ms)
            expect(silent_ms >= SESSION_MS or revoking_ms >= REBALANCE_MS, "%s was removed too soon", member)
        for place in offsets - {(g, p) for g, group in groups.items() for p in group.offsets}:
            expect(place[0] in unused, "an offset of %s expired", place)
            self.forget({place})

    def open_or_end_transactions(self) -> None:
        self.open_transactions = {group_id for group_id in GROUPS if self.random.random() < 0.3}

    def delete(self) -> None:
        group_id = self.random.choice(GROUPS)
        group = self.shard.state.group(group_id)
        has_members, is_nothing, partitions = bool(group.members), group.is_nothing, sorted(group.offsets)
        one_only = bool(partitions) and self.random.random() < 0.5
        try:
            if one_only:
                partitions = partitions[:1]
                decision = self.shard.delete_offsets(
                    group_id, partitions, self.now, self.open_transactions.__contains__
                )
            else:
                decision = self.shard.delete_group(group_id, self.now, self.open_transactions.__contains__)
        except CoordinatorNotAvailableError:
            return
        except (NonEmptyGroupError, GroupSubscribedToTopicError):
            expect(has_members, "the group %s has no members", group_id)
        except GroupIdNotFoundError:
            expect(is_nothing, "the group %s is there", group_id)
        except UnstableOffsetCommitError:
            expect(group_id in self.open_transactions, "no transaction is open")
        else:
            self.forget({(group_id, partition) for partition in partitions})
            self.carry_out(decision)

    def compute(self) -> None:
        """Targets come in any order, late ones too. A shard that was loaded meanwhile may get them as well."""
        if self.computing:
            effect = self.random.choice(self.computing)
            if self.random.random() < 0.7:
                self.computing.remove(effect)
            with self.perhaps_refused():
                self.carry_out(self.shard.target_ready(effect.compute(), self.now))

    def reload(self) -> None:
        """Another leader: it has what is committed, and perhaps more, and whatever compaction left."""
        keep = self.random.randint(self.committed, len(self.log)) if self.random.random() < 0.5 else len(self.log)
        keep = self.batch_end(keep)
        del self.log[keep:]
        if self.random.random() < 0.7:
            self.log = compacted(self.log, self.random)
        self.load()
        while self.copies and self.random.random() < 0.4:  # They waited before a broker that led once more.
            self.copies.pop(self.random.randrange(len(self.copies)))()

    def batch_end(self, at: int) -> int:
        """Batches are whole: the log ends where an answer waits, or where it is committed."""
        ends = [held.position for held in self.held if held.position <= at]
        return max([*ends, self.committed]) if at < len(self.log) else at

    # What is checked.

    def check(self) -> None:
        groups = self.shard.state.groups
        replayed = loaded(self.log)
        expect(replayed == groups, "replay gives\n%s\nand the state is\n%s", replayed, groups)
        if self.random.random() < 0.3:
            log = compacted(self.log, self.random)
            if self.random.random() < 0.3:
                log = in_any_order(log, self.random)
            replayed = loaded(log)
            expect(replayed == groups, "replay of a compacted log gives\n%s\nand the state is\n%s", replayed, groups)
        for group_id, group in groups.items():
            group.check()
            for member_id in group.members:
                if group.kind(member_id) is MemberKind.REVOKING:
                    self.revoking_ms.setdefault((group_id, member_id), self.clock_ms)
                else:
                    self.revoking_ms.pop((group_id, member_id), None)
            for partition, value in group.offsets.items():
                taken = self.taken.get((group_id, partition), [])
                expect(value.offset in taken, "%s: nobody committed %s", partition, value)
                acked = self.acked.get((group_id, partition), taken[0])
                newer = taken.index(value.offset) >= taken.index(acked)
                expect(newer, "%s: %s is committed, %d was", partition, value, acked)
        for group_id, partition in self.acked:
            there = group_id in groups and partition in groups[group_id].offsets
            expect(there, "the offset of %s of %s is gone", partition, group_id)
        for (group_id, member_id), sequence in self.parked.items():
            self.check_held_back(self.shard.state.group(group_id), member_id, sequence)
        self.check_owners()

    def check_held_back(self, group: Group, member_id: str, sequence: int) -> None:
        """Whose answer is held back has nothing to do, or it would have been woken."""
        expect(member_id in group.members, "%s waits, and was removed", member_id)
        assignment = group.assignment(member_id)
        waits_well = next_assignment(group, member_id, None, 0) is assignment
        expect(waits_well, "%s was not woken (#%d): %s, %s", member_id, sequence, assignment, group.target(member_id))

    def check_owners(self) -> None:
        owners: dict[tuple[str, Partition], str] = {}
        for member in self.members:
            group = self.shard.state.group(member.group_id)
            if member.left or member.member_id not in group.members or member.is_over(self.clock_ms):
                continue
            assignment = group.assignment(member.member_id)
            expect(assignment.holds(member.may_own), "%s owns more than %s", member.member_id, assignment)
            for partition in member.may_own:
                other = owners.setdefault((member.group_id, partition), member.member_id)
                expect(other == member.member_id, "%s is owned by %s and %s", partition, other, member.member_id)

    # The end.

    def heal(self) -> None:
        """Without losses a group with members gets to its target in a bounded number of rounds."""
        self.healing, self.loss, self.refuses = True, 0.0, False
        self.catch_up()
        self.thaw()
        self.commit_log()
        while self.network:
            self.deliver()
        self.parked.clear()
        self.clock_ms += SESSION_MS - 1  # Whoever is not alive is gone soon, and the others have just been heard.
        self.end_sessions()
        for _ in range(ROUNDS_MAX):
            self.round()
        for group_id in GROUPS:
            self.check_converged(group_id)

    def round(self) -> None:
        for member in self.alive():
            if member.left:
                continue  # It has learnt in this round that it was removed.
            self.carry_out_assignment(member)
            heartbeat = member.heartbeat(self.clock_ms)
            self.send(lambda heartbeat=heartbeat: self.receive(heartbeat))  # type: ignore[misc]
            while self.network:
                self.deliver()
            self.commit_log()
            while self.network:
                self.deliver()
        while self.computing:
            with self.perhaps_refused():
                self.carry_out(self.shard.target_ready(self.computing.pop(0).compute(), self.now))
        self.clock_ms += 400
        self.look_at_the_clock()
        self.check()

    def check_converged(self, group_id: str) -> None:
        group = self.shard.state.group(group_id)
        alive = [m for m in self.alive() if m.group_id == group_id and m.member_id in group.members]
        expect(len(alive) == len(group.members), "members of %s that are not alive: %s", group_id, group.members)
        if not group.members:
            expect(group.phase in (GroupPhase.DEAD, GroupPhase.EMPTY), "%s is %s", group_id, group.phase)
            expect(not group.targets and not group.owners, "an empty group has a target")
            return
        expect(group.phase is GroupPhase.STABLE, "%s is %s: %s", group_id, group.phase, group)
        wanted = {
            (topic.topic_id, number)
            for member in group.members.values()
            for topic in self.image().subscribed(member)
            for number in range(topic.partitions)
        }
        expect(group.owners.keys() == wanted, "%s owns %s of %s", group_id, sorted(group.owners), sorted(wanted))
        for member in alive:
            self.carry_out_assignment(member)
            subscribed = {topic.topic_id for topic in self.image().subscribed(member.about)}
            expect({p[0] for p in group.target(member.member_id)} <= subscribed, "%s reads too much", member.member_id)
            target = group.target(member.member_id)
            expect(member.owned.keys() == target, "%s owns %s, not %s", member.member_id, member.owned, target)

    def step(self, event: Callable[[World], None] | None = None) -> None:
        """One event, drawn unless it is given."""
        (event or self.random.choices(list(self.weights), list(self.weights.values()))[0])(self)
        if self.refuses and self.random.random() < 0.15:
            self.refuses = False
            self.catch_up()
        if self.random.random() < self.reloads:
            self.reload()
        if self.random.random() < 0.5:
            self.commit_log()
        self.check()


STEP_WEIGHTS: dict[Callable[[World], None], float] = {
    World.beat: 12,
    World.deliver: 26,
    World.work: 12,
    World.commit: 6,
    World.commit_late: 2,
    World.pass_time: 4,
    World.join: 2,
    World.leave: 0.7,
    World.die: 0.3,
    World.freeze: 0.4,
    World.thaw: 0.6,
    World.subscribe: 1.5,
    World.change_topics: 0.8,
    World.compute: 3,
    World.delete: 0.7,
    World.open_or_end_transactions: 0.3,
    World.round: 0.5,
    World.refuse: 0.5,
}

SWARM = (
    World.leave,
    World.die,
    World.freeze,
    World.subscribe,
    World.change_topics,
    World.delete,
    World.open_or_end_transactions,
    World.round,
    World.refuse,
)


def run_schedule(seed: int, steps: int = STEPS) -> World:
    """Raises ViolationError or InvariantError where a promise is broken."""
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.heal()
    return world
