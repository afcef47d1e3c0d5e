"""Placement: even, on different failure domains, and never on fewer brokers than asked."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.controller.image import BrokerState
from spark_broker.controller.placement import Loads, place
from spark_broker.errors import InvalidReplicationFactorError


def broker(id_: int, rack: str | None = None, machine: str = "m", executor: str = "") -> BrokerState:
    return BrokerState(
        id_, id_, f"d{id_}", f"i{id_}", 1, "h", 1, rack, machine, executor or f"e{id_}", 1, 1, 1, "clean", fenced=False
    )


def test_leaders_replicas_and_the_failover_are_spread() -> None:
    placed = place([broker(0), broker(1), broker(2)], Loads(), 6, 3)
    assert placed == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1], [1, 0, 2], [2, 1, 0]]
    takes_over_from_0 = Counter(replicas[1] for replicas in placed if replicas[0] == 0)
    assert takes_over_from_0 == {1: 1, 2: 1}


def test_replicas_are_on_different_racks_first() -> None:
    brokers = [broker(0, "a", "m1"), broker(1, "a", "m2"), broker(2, "b", "m3"), broker(3, "b", "m4")]
    racks = {b.id: b.rack for b in brokers}
    for replicas in place(brokers, Loads(), 12, 2):
        assert len({racks[b] for b in replicas}) == 2


def test_replicas_are_on_different_machines_next() -> None:
    brokers = [broker(0, None, "m1"), broker(1, None, "m1"), broker(2, None, "m2"), broker(3, None, "m2")]
    machines = {b.id: b.machine for b in brokers}
    for replicas in place(brokers, Loads(), 12, 2):
        assert len({machines[b] for b in replicas}) == 2


def test_replicas_are_on_different_executors_last() -> None:
    brokers = [broker(0, executor="x"), broker(1, executor="x"), broker(2, executor="y")]
    for replicas in place(brokers, Loads(), 6, 2):
        assert 2 in replicas


def test_new_partitions_go_where_the_load_is_smallest() -> None:
    loads = Loads()
    loads.add([0, 1])
    loads.add([0, 1])
    assert place([broker(0), broker(1), broker(2)], loads, 2, 1) == [[2], [1]]


@pytest.mark.parametrize("factor", [0, -1, 4])
def test_a_replication_factor_that_cannot_be_held_is_refused(factor: int) -> None:
    with pytest.raises(InvalidReplicationFactorError):
        place([broker(0), broker(1), broker(2)], Loads(), 1, factor)


@given(brokers=st.integers(1, 7), partitions=st.integers(1, 40), factor=st.integers(1, 7))
def test_equal_brokers_differ_by_at_most_one_leader_and_one_replica(brokers: int, partitions: int, factor: int) -> None:
    factor = min(factor, brokers)
    placed = place([broker(b) for b in range(brokers)], Loads(), partitions, factor)
    assert all(len(set(replicas)) == factor for replicas in placed)
    leaders = [sum(replicas[0] == b for replicas in placed) for b in range(brokers)]
    replicas = [sum(b in replicas for replicas in placed) for b in range(brokers)]
    assert max(leaders) - min(leaders) <= 1
    assert max(replicas) - min(replicas) <= 2
