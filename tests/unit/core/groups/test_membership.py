"""Members join, converge one by one, leave, are fenced and come back; told by the answers that they get."""

from __future__ import annotations

from random import Random

import pytest

from spark_broker.core.groups.requests import GroupSettings
from spark_broker.core.groups.state import GroupPhase, MemberKind
from spark_broker.errors import (
    FencedInstanceIdError,
    FencedMemberEpochError,
    GroupMaxSizeReachedError,
    InvalidRequestError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
)
from tests.unit.core.groups.shell import (
    CLICKS,
    GROUP,
    ORDERS,
    REBALANCE_MS,
    SESSION_MS,
    Shell,
    partitions,
    topic,
)


def test_a_first_member_gets_everything_with_the_answer_to_its_join() -> None:
    shell = Shell()
    answer = shell.beat(shell.member("m"))
    assert (answer.member_epoch, answer.assignment) == (1, partitions())
    assert shell.phase is GroupPhase.STABLE


def test_an_assignment_is_in_every_answer_until_the_member_names_it() -> None:
    shell = Shell()
    member = shell.member("m")
    assert shell.beat(member).assignment == partitions()
    lost = shell.send(member.heartbeat(0))
    assert lost.assignment is None, "it has taken it, and says so"
    member.pending = None
    again = [shell.send(member.heartbeat(0)) for _ in range(3)]
    assert [answer.assignment for answer in again] == [partitions()] * 3
    member.take(again[-1], 0)
    assert shell.step(member).assignment is None


def test_a_member_revokes_in_its_old_epoch_and_only_then_somebody_else_gets_the_partitions() -> None:
    shell = Shell()
    (first,) = shell.joined("m1")
    second = shell.member("m2")
    joined = shell.beat(second)
    assert (joined.member_epoch, joined.assignment) == (2, None), "it has the new epoch, and nothing is free"
    told = shell.beat(first)
    assert told.member_epoch == 1, "it stays in its epoch while it revokes"
    assert told.assignment is not None
    assert len(told.assignment) == 2
    assert shell.shard.describe(GROUP).members[0].kind is MemberKind.REVOKING
    assert shell.beat(second).assignment is None, "the first one may still read them"
    assert shell.step(first).member_epoch == 2
    got = shell.beat(second)
    assert got.assignment == partitions() - told.assignment
    assert shell.phase is GroupPhase.STABLE


def test_twenty_members_share_two_hundred_partitions_in_three_rounds() -> None:
    shell = Shell(topic(partitions=200))
    members = [shell.member(f"m{number:02}") for number in range(20)]
    for member in members:
        shell.beat(member)
    assert shell.settle(*members) <= 3
    assert [len(member.owned) for member in members] == [10] * 20
    assert {partition for member in members for partition in member.owned} == partitions(count=200)


def test_a_rolling_restart_of_twenty_static_members_moves_no_partition() -> None:
    shell = Shell(topic(partitions=200))
    members = [shell.member(f"m{number:02}", instance_id=f"i{number}") for number in range(20)]
    shell.settle(*members)
    epoch, before = shell.epoch, [set(member.owned) for member in members]
    for number, member in enumerate(members):
        assert shell.leave(member, for_now=True).member_epoch == -2
        members[number] = shell.member(f"n{number:02}", instance_id=f"i{number}")
        shell.step(members[number])
    shell.settle(*members)
    assert [set(member.owned) for member in members] == before
    assert shell.epoch == epoch


def test_a_member_hears_of_its_new_epoch_and_comes_back_soon_to_wait() -> None:
    """Its answer is not held back. If it came back as late as a member at rest, nobody could wake it meanwhile."""
    shell = Shell()
    (first,) = shell.joined("m1")
    shell.beat(shell.member("m2"))
    shell.beat(first)
    advanced = shell.step(first)
    assert (advanced.member_epoch, advanced.assignment, advanced.settled) == (2, None, False)
    assert advanced.heartbeat_interval_ms == shell.settings.converging_interval_ms
    assert shell.beat(first).settled


def test_a_member_that_leaves_frees_its_partitions_at_once_and_may_say_so_again() -> None:
    shell = Shell()
    first, second = shell.joined("m1", "m2")
    shell.woken.clear()
    assert shell.leave(first).member_epoch == -1
    assert shell.woken == ["m2"], "whoever gets them is woken"
    assert shell.beat(second).assignment == partitions()
    records = len(shell.log)
    assert shell.leave(first).member_epoch == -1
    assert len(shell.log) == records


def test_answers_that_are_lost_one_after_the_other_fence_nobody() -> None:
    """KAFKA-19222, 19235: the group moves on twice, and the member has heard of neither epoch."""
    shell = Shell()
    (member,) = shell.joined("m1")
    for epoch, other in ((2, "m2"), (3, "m3")):
        shell.beat(shell.member(other))
        shell.send(member.heartbeat(0))  # It is told to revoke.
        member.owned = {partition: 0 for partition in member.owned if partition not in _revoking(shell)}
        lost = shell.send(member.heartbeat(0))
        assert lost.member_epoch == epoch
    assert member.epoch == 1
    assert shell.beat(member).member_epoch == 3


def _revoking(shell: Shell) -> frozenset[tuple[str, int]]:
    return shell.shard.describe(GROUP).members[0].revoking


@pytest.mark.parametrize(("epoch", "why"), [(4, "has the epoch 3, and names 4"), (1, "has the epoch 3, and names 1")])
def test_epochs_of_the_future_and_of_long_ago_are_fenced(epoch: int, why: str) -> None:
    shell = Shell()
    first, second = shell.joined("m1", "m2")
    shell.leave(second)
    shell.step(first)
    shell.step(first)
    first.epoch = epoch
    with pytest.raises(FencedMemberEpochError, match=why):
        shell.send(first.heartbeat(0))


def test_a_member_that_owns_what_it_was_not_given_is_fenced() -> None:
    shell = Shell()
    first, _ = shell.joined("m1", "m2")
    first.owned = dict.fromkeys(partitions(), 0)
    first.says_all = True
    with pytest.raises(FencedMemberEpochError, match="owns what the group did not give it"):
        shell.send(first.heartbeat(0))


def test_a_member_may_join_again_at_any_time_while_it_revokes_too() -> None:
    """KAFKA-19233."""
    shell = Shell()
    (first,) = shell.joined("m1")
    second = shell.member("m2")
    shell.beat(second)
    shell.beat(first)
    first.lose()
    answer = shell.beat(first)
    assert answer.member_epoch == 2, "it owns nothing, so it has given up what it was told to"
    assert answer.assignment is not None
    shell.settle(first, second)
    assert len(first.owned) == len(second.owned) == 2


def test_a_heartbeat_that_is_repeated_or_overtaken_changes_nothing() -> None:
    """KAFKA-14422: it says what the member owned earlier."""
    shell = Shell()
    first = shell.member("m1")
    join = first.heartbeat(0)
    shell.send(join)
    shell.beat(first)
    shell.settle(first)
    shell.beat(shell.member("m2"))
    shell.beat(first)  # It is told to revoke two partitions, and owns them still.
    records = len(shell.log)
    answer = shell.send(join)
    assert len(shell.log) == records, "a heartbeat from before it owned them does not release them"
    assert (answer.sequence, answer.member_epoch) == (join.sequence, 1)
    assert not first.takes(answer.sequence, 0)


def test_a_heartbeat_from_before_a_load_releases_nothing() -> None:
    shell = Shell()
    first = shell.member("m1")
    join = first.heartbeat(0)
    shell.send(join)
    shell.beat(first)
    shell.settle(first)
    second = shell.member("m2")
    shell.beat(second)
    shell.beat(first)
    shell.load(Random(1))
    shell.send(join)
    assert len(_revoking(shell)) == 2
    assert shell.step(first).member_epoch == 1, "what it owned before the load proves nothing, either"
    assert shell.beat(first).member_epoch == 2
    shell.settle(first, second)


def test_members_go_on_after_any_load_and_nothing_moves() -> None:
    shell = Shell()
    members = shell.joined("m1", "m2", "m3")
    before = [set(member.owned) for member in members]
    for seed in range(5):
        shell.load(Random(seed))
        shell.settle(*members)
    assert [set(member.owned) for member in members] == before
    assert {member.epoch for member in members} == {shell.epoch}


def test_a_silent_member_is_removed_when_its_session_ends() -> None:
    shell = Shell()
    first, second = shell.joined("m1", "m2")
    shell.pass_time(SESSION_MS - 1)
    shell.beat(first)
    assert shell.shard.next_due_ms <= SESSION_MS
    shell.woken.clear()
    shell.pass_time(1)
    assert shell.woken == ["m1", "m2"], "the removed one gets its error, the other one the partitions"
    assert shell.beat(first).assignment == partitions()
    with pytest.raises(UnknownMemberIdError, match="no member m2 -> Join again"):
        shell.send(second.heartbeat(0))
    assert shell.shard.describe(GROUP).rebalances[-1].reason == "the session of m2 ended"


def test_neither_a_commit_nor_an_answer_that_is_held_back_is_a_sign_of_life() -> None:
    shell = Shell()
    (member,) = shell.joined("m")
    shell.pass_time(SESSION_MS - 1)
    assert shell.commit({(ORDERS, 0): 1}, member) == {}
    shell.shard.resume(GROUP, "m", member.sequence, shell.now)
    shell.pass_time(1)
    assert shell.phase is GroupPhase.EMPTY


def test_a_member_that_does_not_give_up_in_time_is_removed_though_it_is_alive() -> None:
    shell = Shell()
    (first,) = shell.joined("m1")
    second = shell.member("m2")
    shell.beat(second)
    shell.beat(first)
    for _ in range(REBALANCE_MS // 5000 - 1):
        shell.pass_time(5000)
        shell.beat(first)
        shell.beat(second)
    shell.pass_time(4999)
    assert shell.beat(second).assignment is None
    shell.pass_time(1)
    assert shell.beat(second).assignment == partitions()
    assert shell.shard.describe(GROUP).rebalances[-1].reason == "m1 did not give its partitions up in time"


def test_deadlines_begin_anew_when_the_shard_is_loaded() -> None:
    shell = Shell()
    (first,) = shell.joined("m1")
    shell.beat(shell.member("m2"))
    shell.beat(first)
    shell.pass_time(SESSION_MS - 1)
    shell.load()
    shell.pass_time(SESSION_MS - 1)
    assert {member.member_id for member in shell.shard.describe(GROUP).members} == {"m1", "m2"}
    shell.pass_time(1)
    assert shell.phase is GroupPhase.EMPTY


def test_a_static_member_in_use_keeps_its_instance_id() -> None:
    shell = Shell()
    first = shell.member("m1", instance_id="i")
    shell.settle(first)
    second = shell.member("m2", instance_id="i")
    with pytest.raises(UnreleasedInstanceIdError, match="'i' is of the member m1"):
        shell.beat(second)
    shell.leave(first, for_now=True)
    assert shell.beat(second).assignment == partitions()
    first.epoch = 1
    with pytest.raises(FencedInstanceIdError, match="'i' is of the member m2 now"):
        shell.send(first.heartbeat(0))


def test_the_part_of_a_static_member_that_is_away_waits_until_its_session_ends() -> None:
    shell = Shell()
    first, second = shell.member("m1", instance_id="i"), shell.member("m2")
    shell.settle(first, second)
    shell.leave(first, for_now=True)
    shell.pass_time(SESSION_MS - 1)
    assert shell.beat(second).assignment is None
    assert shell.phase is GroupPhase.STABLE
    shell.pass_time(1)
    assert shell.beat(second).assignment == partitions()


def test_a_member_id_that_has_left_does_not_come_back() -> None:
    """A heartbeat of the process that ended would bring it back, and keep the next process out."""
    shell = Shell()
    first = shell.member("m1", instance_id="i")
    join = first.heartbeat(0)
    shell.send(join)
    shell.settle(first)
    shell.leave(first, for_now=True)
    shell.load()
    for late in (join, first.heartbeat(0)):
        with pytest.raises(UnknownMemberIdError, match="the member m1 has left"):
            shell.send(late)
    second = shell.member("m2", instance_id="i")
    shell.settle(second)
    assert second.owned.keys() == partitions()


def test_an_answer_is_settled_when_there_is_nothing_to_do_and_the_member_is_woken_when_there_is() -> None:
    shell = Shell()
    (first,) = shell.joined("m1")
    held_back = shell.beat(first)
    assert held_back.settled
    assert held_back.heartbeat_interval_ms == min(shell.settings.heartbeat_interval_ms, SESSION_MS // 3)
    shell.woken.clear()
    second = shell.member("m2")
    waits = shell.beat(second)
    assert waits.heartbeat_interval_ms == shell.settings.converging_interval_ms
    assert shell.woken == ["m1"]
    decision = shell.shard.resume(GROUP, "m1", held_back.sequence, shell.now)
    shell.carry_out(decision)
    assert decision.answer.sequence == held_back.sequence
    assert decision.answer.assignment is not None
    assert not decision.answer.settled
    first.answered = False
    first.take(decision.answer, 0)
    shell.woken.clear()
    shell.step(first)
    assert shell.woken == ["m2"], "what was revoked is free for it"


def test_a_held_back_answer_of_a_removed_member_is_an_error() -> None:
    shell = Shell()
    _, second = shell.joined("m1", "m2")
    shell.leave(second)
    with pytest.raises(UnknownMemberIdError):
        shell.shard.resume(GROUP, "m2", 1, shell.now)


def test_a_large_target_is_computed_elsewhere_and_belongs_to_its_inputs() -> None:
    """KAFKA-20442: a target that is ready late is dropped when its inputs have changed."""
    shell = Shell(settings=GroupSettings(inline_size_max=0))
    first, second = shell.member("m1"), shell.member("m2")
    assert shell.beat(first).member_epoch == 0
    assert shell.phase is GroupPhase.ASSIGNING
    late = shell.computing.pop().compute()
    shell.beat(second)
    shell.carry_out(shell.shard.target_ready(late, shell.now))
    assert shell.phase is GroupPhase.ASSIGNING
    shell.compute()
    shell.settle(first, second)
    assert len(first.owned) == len(second.owned) == 2
    records = len(shell.log)
    shell.carry_out(shell.shard.target_ready(late, shell.now))
    assert len(shell.log) == records


def test_a_target_that_was_not_ready_when_the_shard_was_loaded_is_computed_again() -> None:
    shell = Shell(settings=GroupSettings(inline_size_max=0))
    member = shell.member("m")
    shell.beat(member)
    shell.load()
    shell.compute()
    shell.settle(member)
    assert member.owned.keys() == partitions()


def test_an_empty_group_has_no_older_target_and_its_id_may_be_used_again() -> None:
    """KAFKA-19720, 17306."""
    shell = Shell()
    first, second = shell.joined("m1", "m2")
    shell.leave(first)
    shell.leave(second)
    assert shell.phase is GroupPhase.EMPTY
    description = shell.shard.describe(GROUP)
    assert description.epoch == description.target_epoch
    shell.load(Random(3))
    (third,) = shell.joined("m3")
    assert third.owned.keys() == partitions()


def test_topics_that_grow_or_come_to_match_a_pattern_are_read_and_deleted_ones_given_up() -> None:
    shell = Shell(topic(partitions=1))
    first, second = shell.member("m1"), shell.member("m2", pattern="(orders|cl.*)")
    shell.settle(first, second)
    shell.change_topics(topic(partitions=5), topic(CLICKS, 2))
    shell.settle(first, second)
    assert first.owned.keys() | second.owned.keys() == partitions(count=5) | partitions(CLICKS, 2)
    assert partitions(CLICKS, 2) <= second.owned.keys()
    recreated = "c" * 32
    shell.change_topics(topic(recreated, 2), topic(CLICKS, 2), deleted=[ORDERS])
    shell.settle(first, second)
    assert first.owned.keys() | second.owned.keys() == partitions(recreated, 2) | partitions(CLICKS, 2)


def test_an_image_of_the_topics_that_comes_late_and_one_that_concerns_nobody_change_nothing() -> None:
    shell = Shell(topic())
    shell.joined("m")
    shell.change_topics(topic(partitions=5))
    epoch, shell.version = shell.epoch, -1
    shell.change_topics(topic(partitions=2))
    shell.version = 5
    shell.change_topics(topic(partitions=5), topic(CLICKS, 2))
    assert shell.epoch == epoch


def test_a_changed_subscription_moves_partitions() -> None:
    shell = Shell(topic(), topic(CLICKS))
    first, second = shell.joined("m1", "m2")
    first.subscribe(("clicks",), "")
    shell.settle(first, second)
    assert [frozenset(first.owned), frozenset(second.owned)] == [partitions(CLICKS), partitions()]


def test_the_assignor_is_the_one_that_most_members_want() -> None:
    shell = Shell(topic(), topic(CLICKS))
    members = [
        shell.member(f"m{n}", "orders", "clicks", assignor=wish) for n, wish in enumerate(("range", "range", ""))
    ]
    shell.settle(*members)
    assert shell.shard.describe(GROUP).assignor == "range"
    assert {number for _, number in members[0].owned} == {0, 1}
    shell.leave(members[1])
    shell.settle(members[0], members[2])
    assert shell.shard.describe(GROUP).assignor == "uniform"


def test_a_group_takes_no_more_members_than_it_may_have() -> None:
    shell = Shell(settings=GroupSettings(group_size_max=2))
    shell.joined("m1", "m2")
    with pytest.raises(GroupMaxSizeReachedError, match="has 2 members"):
        shell.beat(shell.member("m3"))


def test_the_reasons_of_the_last_few_rebalances_are_kept_over_loads() -> None:
    """KIP-800."""
    shell = Shell(settings=GroupSettings(rebalances_kept=3))
    members = shell.joined("m1", "m2")
    shell.load()
    shell.settle(*members)
    heartbeat = members[1].leave()
    shell.send(type(heartbeat)(GROUP, "m2", -1, heartbeat.sequence, reason="the consumer is closed" + "!" * 500))
    shell.change_topics(topic(partitions=6))
    rebalances = shell.shard.describe(GROUP).rebalances
    assert [(r.epoch, r.reason[:31]) for r in rebalances] == [
        (2, "m2 joined"),
        (3, "m2 left: the consumer is closed"),
        (4, "topics changed"),
    ]
    assert len(rebalances[1].reason) == 255


def test_every_change_of_a_groups_state_is_a_line_that_says_why() -> None:
    shell = Shell()
    first, second = shell.joined("m1", "m2")
    shell.leave(second)
    shell.settle(first)
    shell.pass_time(SESSION_MS)
    shell.pass_time(shell.settings.expiry_interval_ms)
    assert shell.moves == [
        "group g: Dead -> Stable, epoch 1: m1 joined",
        "group g: Stable -> Reconciling, epoch 2: m2 joined",
        "group g: Reconciling -> Stable, epoch 2",
        "group g: Stable -> Reconciling, epoch 3: m2 left",
        "group g: Reconciling -> Stable, epoch 3",
        "group g: Stable -> Empty, epoch 4: the session of m1 ended",
        "group g: Empty -> Dead, epoch 0",
    ]


def test_a_member_keeps_the_instance_id_that_it_joined_with() -> None:
    shell = Shell()
    member = shell.member("m", instance_id="i")
    shell.settle(member)
    member.about = shell.member("m", instance_id="j").about
    with pytest.raises(InvalidRequestError, match="another instance id"):
        shell.send(member.heartbeat(0))
