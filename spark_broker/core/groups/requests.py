"""What a shell tells the groups of a shard, and what they answer: requests, answers, effects, settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import msgspec

from spark_broker.core.groups.assignors import ASSIGNORS, UNIFORM, Inputs, Target, assign
from spark_broker.core.groups.patterns import compile_pattern
from spark_broker.core.groups.records import GroupRecord, MemberValue, OldCommit, Partition, Rebalance
from spark_broker.core.groups.state import AWAY_EPOCH, JOIN_EPOCH, LEAVE_EPOCH, GroupPhase, MemberKind
from spark_broker.errors import (
    InvalidGroupIdError,
    InvalidRequestError,
    InvalidSessionTimeoutError,
    InvalidSubscriptionError,
    SparkBrokerError,
    UnsupportedAssignorError,
)
from spark_broker.model import NAME_MAX

A_co = TypeVar("A_co", covariant=True)

TOPICS_MAX = 10_000
REASON_MAX = 255
METADATA_MAX = 4096
HELD_MAX_MS = 60_000
"""No answer to a heartbeat is held back for longer."""

NO_MEMBER = ""
NO_GENERATION = -1


class Now(NamedTuple):
    """The time of an event. `clock_ms` never goes back; deadlines are of it. `wall_ms` is what records have."""

    clock_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """`inline_size_max`: a larger target (members times partitions) is computed off the path."""

    group_size_max: int = 1000
    session_timeout_min_ms: int = 1000
    session_timeout_max_ms: int = 1_800_000
    rebalance_timeout_max_ms: int = 86_400_000
    heartbeat_interval_ms: int = 5000
    converging_interval_ms: int = 100
    default_assignor: str = UNIFORM
    inline_size_max: int = 20_000
    rebalances_kept: int = 5
    offsets_retention_ms: int = 7 * 86_400_000
    expiry_interval_ms: int = 600_000


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member's sign of life: it joins (epoch 0), goes on, leaves (-1), or leaves and will come back (-2).

    A member takes another id when it joins after it left, after UNKNOWN_MEMBER_ID and after its session ended: with the
    old id and the epochs of a group that was deleted meanwhile, a late commit would be good again. Its session ended
    when no heartbeat that it sent within its session time-out was answered; then it has lost what it owned. It has also
    lost that when no answer has confirmed in time (`MemberValue.revocation_ms`) that it gave up what it was told to.
    The time counts from the last heartbeat that was answered before: the coordinator may have decided right after it.

    `sequence` rises with each heartbeat of a member id, repeated ones too, and the member takes only the answer to the
    heartbeat that it sent last. `generation`: of the last answer that it took. After an answer that did not come, or
    that has another generation than the one before, the next heartbeat says everything.

    `owned`: every partition that it owns, or may begin to own without another answer. None: as it said last. It says so
    when it has given up what it was told to. `about`: what it says about itself. None: as it said last. A join says
    what it is about, and owns nothing.
    """

    group_id: str
    member_id: str
    member_epoch: int
    sequence: int
    generation: int = NO_GENERATION
    owned: frozenset[Partition] | None = None
    about: MemberValue | None = None
    instance_id: str = ""
    reason: str = ""

    @property
    def joins(self) -> bool:
        return self.member_epoch == JOIN_EPOCH

    @property
    def described(self) -> MemberValue | None:
        """`about`, with the names of topics in order: equal subscriptions are equal."""
        if self.about is None:
            return None
        return msgspec.structs.replace(self.about, topics=tuple(sorted(set(self.about.topics))))

    def __str__(self) -> str:
        owned = "?" if self.owned is None else len(self.owned)
        return f"{self.group_id}/{self.member_id} #{self.sequence} epoch {self.member_epoch} owns {owned}"

    def check(self, settings: GroupSettings) -> None:
        """Raises the typed error of what may not be."""
        check_names(self.group_id, self.member_id)
        if len(self.instance_id) > NAME_MAX:
            raise InvalidGroupIdError(f"an instance id of {len(self.instance_id):,} characters")
        if self.member_epoch < AWAY_EPOCH or self.sequence < 0:
            raise InvalidRequestError(f"the epoch {self.member_epoch} with the sequence {self.sequence}")
        if self.member_epoch == AWAY_EPOCH and not self.instance_id:
            raise InvalidRequestError("only a member with group.instance.id leaves to come back")
        if self.joins and self.about is None:
            raise InvalidRequestError("a member joins without saying what it reads")
        if self.about is not None and self.member_epoch not in (LEAVE_EPOCH, AWAY_EPOCH):
            _check_about(self.about, settings)
            if self.about.instance_id != self.instance_id:
                raise InvalidRequestError("a heartbeat with two instance ids")


def held_at_most_ms(session_timeout_ms: int) -> int:
    """How long the answer to a heartbeat may be held back."""
    return min(session_timeout_ms // 3, HELD_MAX_MS)


def check_names(group_id: str, member_id: str | None = None) -> None:
    """Raises InvalidGroupIdError."""
    for what, name in (("group id", group_id), ("member id", member_id)):
        if name is not None and not 0 < len(name) <= NAME_MAX:
            raise InvalidGroupIdError(f"a {what} has from 1 to {NAME_MAX} characters, and this one {len(name):,}")


def _check_about(about: MemberValue, settings: GroupSettings) -> None:
    if not about.topics and not about.pattern:
        raise InvalidSubscriptionError("the subscription is empty")
    if len(about.topics) > TOPICS_MAX:
        raise InvalidSubscriptionError(f"the subscription names {len(about.topics):,} topics; {TOPICS_MAX:,} may be")
    if any(not 0 < len(name) <= NAME_MAX for name in about.topics):
        raise InvalidSubscriptionError(f"the subscription has a name that has not 1 to {NAME_MAX} characters")
    if about.pattern:
        compile_pattern(about.pattern)
    if any(len(text) > NAME_MAX for text in (about.rack, about.client_id, about.host)):
        raise InvalidRequestError(f"a rack, client id or host of more than {NAME_MAX} characters")
    if about.assignor and about.assignor not in ASSIGNORS:
        raise UnsupportedAssignorError(f"{about.assignor!r} is no assignor; there are {', '.join(ASSIGNORS)}")
    low, high = settings.session_timeout_min_ms, settings.session_timeout_max_ms
    if not low <= about.session_timeout_ms <= high:
        raise InvalidSessionTimeoutError(
            f"a session time-out of {about.session_timeout_ms} ms; from {low} to {high} is allowed"
        )
    high = settings.rebalance_timeout_max_ms
    if not 0 < about.rebalance_timeout_ms <= high:
        raise InvalidSessionTimeoutError(
            f"max.poll.interval.ms is {about.rebalance_timeout_ms}; from 1 to {high} is allowed"
        )


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """`sequence`: of the heartbeat; the member drops the answer unless it is of its latest one.

    `assignment`: all that the member shall own; None: what it named. `settled`: the member has nothing to do, so the
    answer may be held back (see `GroupShard.resume`), for at most a third of the session time-out.
    """

    sequence: int
    generation: int
    member_epoch: int
    assignment: frozenset[Partition] | None = None
    heartbeat_interval_ms: int = 0
    settled: bool = False


@dataclass(frozen=True, slots=True)
class CommitOffset:
    """The next offset to read. `leader_epoch`: of the last record read; -1: not known."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """Offsets of a member, or (without a member) of a group that has none."""

    group_id: str
    offsets: Mapping[Partition, CommitOffset]
    member_id: str = NO_MEMBER
    member_epoch: int = -1
    instance_id: str = ""

    def __str__(self) -> str:
        return f"{self.group_id}/{self.member_id} epoch {self.member_epoch} commits {len(self.offsets)}"


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """Why offsets of some partitions were not taken. The others were."""

    refused: Mapping[Partition, SparkBrokerError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ComputeTarget:
    """Compute a large group's target, anywhere, and hand it to `target_ready`. A later one of the group replaces it."""

    group_id: str
    epoch: int
    inputs: Inputs
    previous: Target

    def compute(self) -> TargetReady:
        return TargetReady(self.group_id, self.epoch, self.inputs.hash(), assign(self.inputs, self.previous))


@dataclass(frozen=True, slots=True)
class TargetReady:
    """The target of the inputs with this hash, by identity."""

    group_id: str
    epoch: int
    inputs_hash: str
    target: Target


@dataclass(frozen=True, slots=True)
class Wake:
    """Something changed for these members: call `resume` for those whose answers are held back."""

    group_id: str
    member_ids: tuple[str, ...]


Effect = ComputeTarget | Wake


@dataclass(frozen=True, slots=True)
class Move:
    """A group is in another state or epoch than before. The shell writes it as a line of its log."""

    group_id: str
    before: GroupPhase
    after: GroupPhase
    epoch: int
    reason: str

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"group {self.group_id}: {self.before.value} -> {self.after.value}, epoch {self.epoch}{why}"


@dataclass(frozen=True, slots=True)
class Decision(Generic[A_co]):
    """Append `records` as one batch (`encode_record`), and carry the effects out at once.

    The answer is given when the log is committed up to where it then ends, earlier decisions' records included, because
    the answer shows them, too. It is also given so when there is no record.
    """

    answer: A_co
    records: tuple[GroupRecord | OldCommit, ...] = ()
    effects: tuple[Effect, ...] = ()
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member, for people. `since`: the epoch in which it got each partition."""

    member_id: str
    kind: MemberKind
    epoch: int
    about: MemberValue
    since: Mapping[Partition, int]
    revoking: frozenset[Partition]
    target: frozenset[Partition]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group, for people. `rebalances`: the last few, the newest last."""

    group_id: str
    phase: GroupPhase
    epoch: int
    target_epoch: int
    assignor: str
    members: tuple[MemberDescription, ...]
    rebalances: tuple[Rebalance, ...]
    offsets: int
