"""Schedules whose topics have tables: they tier, drop what is tiered, read tables and break no rule."""

from __future__ import annotations

import itertools

import pytest

from tests.sim.counting import counts_of
from tests.sim.kinds import has_compaction_and_tiering, has_tiering


def seeds(count: int, *, compacted: bool = False) -> list[int]:
    wanted = has_compaction_and_tiering if compacted else has_tiering
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


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_schedules_with_tables_break_no_rule() -> None:
    counts = counts_of(seeds(200))
    assert counts["commits of tierers recorded"] > 600
    assert counts["parts of tables read"] > 200


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_schedules_with_tables_of_compacted_topics_break_no_rule() -> None:
    counts = counts_of(seeds(80, compacted=True))
    assert counts["passes of compaction"] > 480
    assert counts["commits of tierers recorded"] > 280
