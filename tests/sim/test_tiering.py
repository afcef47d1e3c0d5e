"""Schedules whose topics have tables: they tier, drop what is tiered, read tables and break no rule."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.sim.counting import counts_of
from tests.sim.kinds import has_compaction_and_tiering, has_tiering, has_tiering_and_unclean_elections


def seeds(count: int, wanted: Callable[[int], bool] = has_tiering) -> list[int]:
    return list(itertools.islice((seed for seed in itertools.count(91_000_000) if wanted(seed)), count))


@pytest.mark.timeout(300)
def test_schedules_with_tables_tier_and_read_them_and_break_no_rule() -> None:
    counts = counts_of(seeds(60))
    assert counts["tries of tiering"] > 1000
    assert counts["tries of tiering that failed"] > 50
    assert counts["commits of tierers recorded"] > 150
    assert counts["parts of tables read"] > 50
    assert counts["fault: kill tierer"] > 50
    assert counts["fault: late reader"] > 10


@pytest.mark.timeout(300)
def test_schedules_with_tables_and_unclean_elections_cut_tables_back_and_break_no_rule() -> None:
    counts = counts_of(seeds(25, has_tiering_and_unclean_elections))
    assert counts["unclean elections"] > 20
    assert counts["tables cut back"] > 2
    assert counts["commits of tierers recorded"] > 50


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_schedules_with_tables_and_unclean_elections_break_no_rule() -> None:
    counts = counts_of(seeds(60, has_tiering_and_unclean_elections))
    assert counts["tables cut back"] > 6


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_schedules_with_tables_break_no_rule() -> None:
    counts = counts_of(seeds(100))
    assert counts["commits of tierers recorded"] > 300
    assert counts["parts of tables read"] > 100


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_schedules_with_tables_of_compacted_topics_break_no_rule() -> None:
    counts = counts_of(seeds(50, has_compaction_and_tiering))
    assert counts["passes of compaction"] > 300
    assert counts["commits of tierers recorded"] > 175
