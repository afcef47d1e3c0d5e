"""Targets: everything is assigned once, evenly, to members that subscribe, and little of it moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.core.groups.assignors import (
    RANGE,
    UNIFORM,
    Inputs,
    MemberInput,
    Target,
    TopicInput,
    assign,
    inputs_of,
)
from spark_broker.core.groups.records import MemberValue
from spark_broker.core.groups.topics import Topic, Topics

TOPIC_IDS = ("t0", "t1", "t2")


@st.composite
def all_inputs(draw: st.DrawFn, *, alike: bool = False, racks: bool = False) -> Inputs:
    assignor = draw(st.sampled_from([UNIFORM, RANGE]))
    topics = [
        TopicInput(
            topic_id,
            count,
            tuple((draw(st.sampled_from("abc")),) for _ in range(count)) if racks else (),
        )
        for topic_id in TOPIC_IDS
        for count in (draw(st.integers(1, 7)),)
    ]
    names = draw(st.sets(st.sampled_from([f"m{number}" for number in range(9)]), min_size=1))
    subscriptions = (
        st.just(TOPIC_IDS) if alike else st.sets(st.sampled_from(TOPIC_IDS), min_size=1).map(sorted).map(tuple)
    )
    rack = st.sampled_from("abc") if racks else st.just("")
    members = tuple(MemberInput(name, draw(subscriptions), draw(rack)) for name in sorted(names))
    read = {topic_id for member in members for topic_id in member.topic_ids}
    return Inputs(assignor, members, tuple(topic for topic in topics if topic.topic_id in read))


def check_complete(inputs: Inputs, target: Target) -> None:
    everything = [(topic.topic_id, number) for topic in inputs.topics for number in range(topic.partitions)]
    assert sorted(partition for partitions in target.values() for partition in partitions) == everything
    subscribed = {member.identity: member.topic_ids for member in inputs.members}
    assert target.keys() == subscribed.keys()
    assert all(topic_id in subscribed[name] for name, partitions in target.items() for topic_id, _ in partitions)


@given(all_inputs(), all_inputs())
def test_every_partition_has_one_subscriber_whatever_was_before(inputs: Inputs, before: Inputs) -> None:
    check_complete(inputs, assign(inputs, {}))
    check_complete(inputs, assign(inputs, assign(before, {})))


@given(all_inputs(racks=True), all_inputs(racks=True))
def test_racks_leave_no_partition_out(inputs: Inputs, before: Inputs) -> None:
    check_complete(inputs, assign(inputs, assign(before, {})))


@given(all_inputs(alike=True), all_inputs())
def test_uniform_is_even_among_equal_subscriptions(inputs: Inputs, before: Inputs) -> None:
    inputs = Inputs(UNIFORM, inputs.members, inputs.topics)
    counts = [len(partitions) for partitions in assign(inputs, assign(before, {})).values()]
    assert max(counts) - min(counts) <= 1


@given(all_inputs())
def test_no_single_move_would_make_unequal_subscriptions_more_even(inputs: Inputs) -> None:
    target = assign(Inputs(UNIFORM, inputs.members, inputs.topics), {})
    for member in inputs.members:
        for name, partitions in target.items():
            movable = any(topic_id in member.topic_ids for topic_id, _ in partitions)
            assert not movable or len(partitions) <= len(target[member.identity]) + 1, (name, member)


@given(all_inputs())
def test_a_target_is_kept_while_its_inputs_are_the_same(inputs: Inputs) -> None:
    target = assign(inputs, {})
    assert assign(inputs, target) == target


@given(all_inputs(alike=True), st.data())
def test_uniform_moves_no_more_than_it_must(inputs: Inputs, data: st.DataObject) -> None:
    """When one leaves, the others keep what they have. When one joins, only its part moves."""
    inputs = Inputs(UNIFORM, inputs.members, inputs.topics)
    gone = data.draw(st.sampled_from(inputs.members)).identity
    fewer = Inputs(UNIFORM, tuple(m for m in inputs.members if m.identity != gone), inputs.topics)
    if not fewer.members:
        return
    before = assign(inputs, {})
    after = assign(fewer, before)
    assert all(before[name] <= after[name] for name in after)
    again = assign(inputs, after)
    assert all(again[name] <= after[name] for name in after)


def test_a_member_gets_partitions_in_its_rack_and_counts_come_first() -> None:
    racks = (("a",), ("a",), ("b",), ("b",), ("b",), ("b",))
    inputs = Inputs(
        UNIFORM,
        (MemberInput("x", ("t",), "a"), MemberInput("y", ("t",), "b")),
        (TopicInput("t", 6, racks),),
    )
    target = assign(inputs, {})
    assert {("t", 0), ("t", 1)} < target["x"]
    assert len(target["x"]) == len(target["y"]) == 3
    moved = Inputs(UNIFORM, inputs.members, (TopicInput("t", 6, racks[::-1]),))
    assert {("t", 4), ("t", 5)} < assign(moved, target)["x"]


def test_range_gives_one_number_of_alike_topics_to_one_member() -> None:
    members = tuple(MemberInput(name, ("t", "u"), "") for name in ("x", "y"))
    inputs = Inputs(RANGE, members, (TopicInput("t", 5, ()), TopicInput("u", 5, ())))
    target = assign(inputs, {})
    assert target["x"] == {(topic, number) for topic in "tu" for number in (0, 1, 2)}
    assert target["y"] == {(topic, number) for topic in "tu" for number in (3, 4)}
    third = Inputs(RANGE, (MemberInput("a", ("t", "u"), ""), *members), inputs.topics)
    assert min(assign(third, target)["x"]) == ("t", 0), "members keep their order when one joins before them"


def test_equal_inputs_have_one_hash_and_each_input_changes_it() -> None:
    topic = Topic("t" * 32, "orders", 4, (("a",),) * 4)
    members = {"m": MemberValue(("orders",)), "n": MemberValue(("orders",), rack="a")}

    def hash_of(topic: Topic = topic, members: dict[str, MemberValue] = members, assignor: str = UNIFORM) -> str:
        return inputs_of(members, Topics([topic]), assignor).hash()

    assert hash_of(members=dict(reversed(members.items()))) == hash_of()
    assert inputs_of(members, Topics([topic, Topic("u" * 32, "clicks", 9)]), UNIFORM).hash() == hash_of()
    assert hash_of(members={**members, "m": MemberValue((), "ord.*")}) == hash_of(), "resolved, it is the same"
    changed = [
        hash_of(Topic("v" * 32, "orders", 4, topic.racks)),
        hash_of(Topic(topic.topic_id, "orders", 5, topic.racks)),
        hash_of(Topic(topic.topic_id, "orders", 4, (("b",),) * 4)),
        hash_of(members={"m": members["m"]}),
        hash_of(members={"m": members["m"], "o": members["n"]}),
        hash_of(members={**members, "n": MemberValue(("clicks",), rack="a")}),
        hash_of(members={**members, "n": MemberValue(("orders",), rack="b")}),
        hash_of(assignor=RANGE),
    ]
    assert len({hash_of(), *changed}) == len(changed) + 1


def test_racks_of_replicas_are_no_input_when_no_member_has_one() -> None:
    members = {"m": MemberValue(("orders",))}
    images = [Topics([Topic("t", "orders", 1, racks)]) for racks in ((), (("a",),))]
    assert len({inputs_of(members, image, UNIFORM).hash() for image in images}) == 1


@pytest.mark.parametrize("assignor", [UNIFORM, RANGE])
def test_members_without_partitions_have_an_empty_target(assignor: str) -> None:
    members = tuple(MemberInput(name, ("t",), "") for name in "xyz")
    target = assign(Inputs(assignor, members, (TopicInput("t", 1, ()),)), {})
    assert sorted(map(len, target.values())) == [0, 0, 1]
