"""Whatever is refused is a typed error that says what to do, and has changed nothing."""

from __future__ import annotations

import copy
from dataclasses import replace

import msgspec
import pytest

from spark_broker.core.groups.machine import TRANSITIONS, GroupShard
from spark_broker.core.groups.records import MemberValue
from spark_broker.core.groups.requests import Heartbeat
from spark_broker.errors import (
    InvalidGroupIdError,
    InvalidRegularExpressionError,
    InvalidRequestError,
    InvalidSessionTimeoutError,
    InvalidSubscriptionError,
    InvariantError,
    SparkBrokerError,
    UnknownMemberIdError,
    UnsupportedAssignorError,
)
from tests.unit.core.groups.shell import GROUP, Shell

GOOD = MemberValue(("orders",))
JOIN = Heartbeat(GROUP, "m", 0, 1, about=GOOD)


def about(**fields: object) -> Heartbeat:
    return replace(JOIN, about=msgspec.structs.replace(GOOD, **fields))


REFUSED: list[tuple[Heartbeat, type[SparkBrokerError], str]] = [
    (replace(JOIN, group_id=""), InvalidGroupIdError, "a group id has from 1 to 249"),
    (replace(JOIN, group_id="g" * 250), InvalidGroupIdError, "and this one 250"),
    (replace(JOIN, member_id=""), InvalidGroupIdError, "a member id has"),
    (replace(JOIN, member_id="m" * 250), InvalidGroupIdError, "a member id has"),
    (replace(JOIN, instance_id="i" * 250), InvalidGroupIdError, "an instance id of 250"),
    (replace(JOIN, member_epoch=-3), InvalidRequestError, "the epoch -3"),
    (replace(JOIN, sequence=-1), InvalidRequestError, "the sequence -1"),
    (replace(JOIN, member_epoch=-2), InvalidRequestError, "leaves to come back"),
    (replace(JOIN, about=None), InvalidRequestError, "without saying what it reads"),
    (replace(JOIN, instance_id="i"), InvalidRequestError, "two instance ids"),
    (replace(JOIN, member_epoch=5), UnknownMemberIdError, "has no member m"),
    (about(topics=()), InvalidSubscriptionError, "the subscription is empty"),
    (about(topics=("t" * 250,)), InvalidSubscriptionError, "1 to 249 characters"),
    (about(topics=("",)), InvalidSubscriptionError, "1 to 249 characters"),
    (about(topics=tuple(map(str, range(10_001)))), InvalidSubscriptionError, "10,001 topics"),
    (about(pattern="(a"), InvalidRegularExpressionError, "does not end"),
    (about(pattern="(a)\\1"), InvalidRegularExpressionError, "back-references"),
    (about(rack="r" * 250), InvalidRequestError, "more than 249 characters"),
    (about(assignor="sticky"), UnsupportedAssignorError, "there are uniform, range"),
    (about(session_timeout_ms=1), InvalidSessionTimeoutError, "from 1000 to 1800000 is allowed"),
    (about(session_timeout_ms=2_000_000), InvalidSessionTimeoutError, "from 1000 to 1800000 is allowed"),
    (about(rebalance_timeout_ms=0), InvalidSessionTimeoutError, "max.poll.interval.ms is 0"),
]


@pytest.mark.parametrize(("heartbeat", "error", "why"), REFUSED)
def test_a_heartbeat_that_may_not_be_is_refused_and_changes_nothing(
    heartbeat: Heartbeat, error: type[SparkBrokerError], why: str
) -> None:
    shell = Shell()
    with pytest.raises(error, match=why):
        shell.send(heartbeat)
    assert shell.shard.phases() == {}


@pytest.mark.parametrize(("heartbeat", "error", "why"), [row for row in REFUSED if row[0].about is not None])
def test_a_member_that_is_there_is_refused_the_same(
    heartbeat: Heartbeat, error: type[SparkBrokerError], why: str
) -> None:
    del error, why
    shell = Shell()
    (member,) = shell.joined("m")
    before = copy.deepcopy(shell.shard.state.groups)
    sequence = member.sequence + 1 if heartbeat.sequence > 0 else heartbeat.sequence
    later = replace(heartbeat, sequence=sequence, generation=1)
    if later.about == GOOD and later.member_epoch == 5:
        later = replace(later, member_epoch=9)
    with pytest.raises(SparkBrokerError):
        shell.send(later)
    assert shell.shard.state.groups == before


def test_every_event_has_its_row_in_the_table_of_transitions() -> None:
    checks = {name for name in vars(GroupShard) if hasattr(vars(GroupShard)[name], "__wrapped__")}
    assert checks == TRANSITIONS.keys()


def test_a_transition_that_is_not_in_the_table_stops_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell()
    (member,) = shell.joined("m")
    monkeypatch.setattr("spark_broker.core.groups.machine.TRANSITIONS", {**TRANSITIONS, "commit": {}})
    with pytest.raises(InvariantError, match="commit leads the group g from Stable to Stable") as broken:
        shell.commit({("a" * 32, 0): 1}, member)
    assert "heartbeat(g/m #1 epoch 0 owns 0" in str(broken.value), "the last events come with it"
