"""Brokers whose clock is wrong are fenced while a majority of clocks agrees, but never more than a minority."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.controller.clocks import ClockBounds, Verdict, agreed_ms, judge, measured_skew_ms
from tests.unit.controller.cluster import Cluster

HOUR_MS = 3_600_000
BOUNDS = ClockBounds(warn_ms=5_000, fence_ms=60_000)


@pytest.mark.parametrize(
    ("skews", "agreed"),
    [
        ([0], 0),
        ([0, HOUR_MS], None),
        ([0, -30_000], 0),
        ([0, HOUR_MS, 1], 1),
        ([0, -HOUR_MS, -HOUR_MS], -HOUR_MS),
        ([0, HOUR_MS, -HOUR_MS], None),
        ([0, 0, HOUR_MS, HOUR_MS], None),
        ([0, 1, 2, HOUR_MS], 1),
        ([0, HOUR_MS, HOUR_MS, HOUR_MS + 10], HOUR_MS),
    ],
)
def test_what_most_clocks_agree_on(skews: list[int], agreed: int | None) -> None:
    assert agreed_ms(skews, BOUNDS.fence_ms) == agreed


@given(st.lists(st.integers(-HOUR_MS, HOUR_MS), min_size=1, max_size=7))
def test_a_majority_of_clocks_is_never_wrong(skews: list[int]) -> None:
    clocks = [0, *skews]
    agreed = agreed_ms(clocks, BOUNDS.fence_ms)
    verdicts = [judge(Verdict.RIGHT, abs(c - (agreed or 0)), BOUNDS, agreed=agreed is not None) for c in clocks]
    assert 2 * verdicts.count(Verdict.WRONG) < len(clocks)
    ahead = [c for c, verdict in zip(clocks, verdicts, strict=True) if verdict is not Verdict.WRONG]
    assert agreed is None or max(ahead) - min(ahead) <= 2 * BOUNDS.fence_ms, "retention's margin"


@given(st.integers(-HOUR_MS, HOUR_MS), st.integers(0, HOUR_MS), st.integers(0, HOUR_MS))
def test_delays_do_not_make_a_skew(skew: int, up_ms: int, down_ms: int) -> None:
    """The heartbeat took `up_ms`, and the answer before it took `down_ms`."""
    measured = measured_skew_ms(skew - up_ms, skew + down_ms, 2_500)
    assert (measured is None) == (up_ms + down_ms > 5_000)
    assert measured is None or abs(measured - skew) <= 2_500


def test_a_clock_near_a_bound_does_not_flap() -> None:
    verdict, story = Verdict.RIGHT, []
    for distance in (5_000, 5_001, 4_999, 60_000, 60_001, 60_000, 5_001, 5_000, 5_001, 2_501, 2_500):
        verdict = judge(verdict, distance, BOUNDS, agreed=True)
        story.append(verdict.name)
    assert story == ["RIGHT", "OFF", "OFF", "OFF", "WRONG", "WRONG", "WRONG", "RIGHT", "OFF", "OFF", "RIGHT"]


def brokers(cluster: Cluster, *skews_ms: int) -> Cluster:
    """Start one broker for each skew."""
    cluster.skews_ms = dict(enumerate(skews_ms))
    cluster.start_brokers(len(skews_ms))
    return cluster


def live(cluster: Cluster) -> list[int]:
    return [broker for broker in cluster.image.brokers if cluster.image.is_live(broker)]


def beats(cluster: Cluster) -> None:
    for broker in cluster.session_of:
        cluster.beat(broker)


def test_a_leader_whose_clock_turns_wrong_is_fenced_and_another_leads() -> None:
    cluster = brokers(Cluster(), 0, 0, 0)
    cluster.create_topic()
    assert cluster.partition().leader == 0
    cluster.skews_ms[0] = -HOUR_MS
    answer = cluster.beat(0)
    assert answer is not None
    assert answer.fenced
    assert "3600.0 s behind most clocks" in answer.reason
    assert cluster.partition().leader == 1
    assert live(cluster) == [1, 2]
    assert [note for note in cluster.notes if "fenced broker 0" in note and "NTP" in note]


def test_a_broker_whose_clock_is_wrong_is_not_unfenced_before_it_is_right() -> None:
    cluster = brokers(Cluster(), 0, 0, HOUR_MS)
    assert live(cluster) == [0, 1]
    noted = len(cluster.notes)
    cluster.pass_time(5_000, alive=[0, 1, 2])
    assert live(cluster) == [0, 1]
    assert cluster.notes[noted:] == [], "it is said once"
    cluster.skews_ms[2] = 50_000
    beats(cluster)
    assert live(cluster) == [0, 1], "no flapping at the bound"
    cluster.skews_ms[2] = 100
    answer = cluster.beat(2)
    assert answer is not None
    assert (answer.fenced, answer.reason) == (False, "")
    assert live(cluster) == [0, 1, 2]


def test_a_wrong_clock_that_came_first_is_found_when_others_come() -> None:
    cluster = brokers(Cluster(), HOUR_MS)
    assert live(cluster) == [0], "the controller and one broker: nobody can say"
    assert any("no majority" in note for note in cluster.notes)
    cluster.start_broker("directory-1")
    assert live(cluster) == [1]


def test_a_controller_whose_own_clock_is_wrong_fences_nobody() -> None:
    cluster = Cluster()
    cluster.own_skew_ms = -HOUR_MS
    brokers(cluster, 0, 0, 0)
    beats(cluster)
    assert live(cluster) == [0, 1, 2]
    assert [note for note in cluster.notes if "driver's clock is 3600.0 s behind" in note]
    cluster.own_skew_ms = 0
    beats(cluster)
    beats(cluster)
    assert live(cluster) == [0, 1, 2]
    assert "the driver's clock is right again" in cluster.notes


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_a_step_of_the_controllers_clock_fences_nobody_meanwhile(step_ms: int) -> None:
    """Measurements from before and after the step must not be compared."""
    cluster = brokers(Cluster(), 0, 0, 0, 0)
    beats(cluster)
    cluster.own_skew_ms = step_ms
    for _ in range(2):
        for broker in range(4):
            cluster.beat(broker)
            assert live(cluster) == [0, 1, 2, 3]


def test_the_verdict_outlives_the_majority_that_saw_it() -> None:
    cluster = brokers(Cluster(), 0, HOUR_MS)
    assert live(cluster) == [0]
    cluster.pass_time(20_000, alive=[1])
    assert live(cluster) == [], "broker 0 is gone; broker 1 is still known to be wrong"
    cluster.skews_ms[1] = 0
    cluster.beat(1)
    assert live(cluster) == [1]


def test_a_clock_that_is_a_little_off_is_noted_once_and_not_fenced() -> None:
    cluster = brokers(Cluster(), 0, 0, 20_000)
    cluster.pass_time(5_000, alive=[0, 1, 2])
    assert live(cluster) == [0, 1, 2]
    assert len([note for note in cluster.notes if "20.0 s ahead of most clocks" in note]) == 1


@pytest.mark.parametrize(("wrong_ms", "moved"), [(10_000, False), (40_000, True)])
def test_a_broker_with_a_wrong_clock_is_away_like_one_that_is_gone(wrong_ms: int, moved: bool) -> None:
    cluster = brokers(Cluster(replica_reassignment_delay_ms=30_000), 0, 0, 0, 0)
    cluster.create_topic(partitions=4, factor=3)
    cluster.skews_ms[3] = HOUR_MS
    cluster.pass_time(wrong_ms, alive=[0, 1, 2, 3])
    cluster.skews_ms[3] = 0
    cluster.pass_time(40_000, alive=[0, 1, 2, 3])
    assert live(cluster) == [0, 1, 2, 3]
    assert any(partition.reassigning for partition in cluster.topic().partitions) == moved
