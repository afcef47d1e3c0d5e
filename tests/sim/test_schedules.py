"""Random schedules of whole clusters break no rule, and the same seed is the same story."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pytest

from spark_broker.testing.simulation.schedule import run_schedule
from tests.sim.counting import ACKNOWLEDGED, counts_of
from tests.sim.kinds import (
    has_bit_flips,
    has_clock_jumps,
    has_compaction,
    has_compaction_and_tiering,
    has_disk_faults,
    has_groups,
    has_older_metadata,
    has_store_outages,
    has_tiering,
    has_tiering_and_unclean_elections,
    has_transactions,
    may_have_unclean_elections,
)
from tests.sim.regressions import REGRESSIONS, Regression

SCHEDULES, QUICK_SCHEDULES = 150, 40
OTHERS, SCHEDULES_OF_OTHERS = 1_000 * int(os.environ.get("SEED", "1_000")), 250
"""Other seeds every day, as the Makefile gives it."""
STORIES = 6
LATEST = 10
"""Each regression has a small test of its own, too. The stories of earlier seeds have changed with the code since."""

PRINT_DIGESTS = f"""
from spark_broker.testing.simulation.schedule import run_schedule
for seed in range({STORIES}):
    print(run_schedule(seed, 200, story=True)[0].digest)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("first_seed", "schedules"),
    [
        pytest.param(0, QUICK_SCHEDULES, marks=pytest.mark.quick),
        pytest.param(0, SCHEDULES, marks=pytest.mark.full),
        pytest.param(OTHERS, SCHEDULES_OF_OTHERS, marks=pytest.mark.full),
    ],
)
def test_schedules_break_no_rule(first_seed: int, schedules: int) -> None:
    counts = counts_of(range(first_seed, first_seed + schedules))
    # A cluster in which nothing happens proves nothing.
    for what in ("elections", "truncations", "ISR shrinks", "ISR grows", "controller restarts", "process_crash starts"):
        assert counts[what] > schedules / 20, what
    assert counts["replicas quarantined"] > schedules / 100
    assert counts[ACKNOWLEDGED] > schedules


@dataclass(frozen=True)
class Feature:
    """What schedules of a kind do, or the test proves nothing: each thing happens more often than `least` says."""

    shows: Callable[[int], bool]
    least: Mapping[str, int]

    def check(self, seeds: Iterable[int]) -> None:
        """These schedules break no rule, and do what they are about."""
        counts = counts_of(seeds)
        for what, least in self.least.items():
            assert counts[what] > least, what


FEATURES = {
    "disks lose, and refuse": Feature(
        has_disk_faults,
        {
            "fault: aside topic": 20,
            "fault: out of descriptors": 12,
            "fault: full disks, new topic": 20,
            "fault: older copy": 0,
            "fault: lost segments": 1,
        },
    ),
    "bit flips are set aside": Feature(has_bit_flips, {"fault: bit flip": 5, "replicas quarantined": 5}),
    "clocks jump": Feature(has_clock_jumps, {"fault: clock jumps": 12}),
    "compaction": Feature(
        has_compaction,
        {"passes of compaction": 130, "replicas rebuilt": 0, "fault: leave a follower behind": 30},
    ),
    "groups commit, resume and change coordinators": Feature(
        has_groups,
        {
            "offsets committed": 40,
            "positions resumed": 20,
            "members replaced": 20,
            "coordinators changed": 11,
            "passes of compaction": 20,
        },
    ),
    "the metadata store fails": Feature(
        has_store_outages, {"fault: store fails": 15, "heartbeats answered while the store failed": 12}
    ),
    "the metadata is an older copy": Feature(
        has_older_metadata, {"older metadata accepted": 0, "newest metadata put back": 0}
    ),
    "tables": Feature(
        has_tiering,
        {
            "tries of tiering": 500,
            "tries of tiering that failed": 50,
            "commits of tierers recorded": 70,
            "parts of tables read": 50,
            "fault: kill tierer": 50,
            "fault: late reader": 10,
        },
    ),
    "transactions in both forms": Feature(
        has_transactions,
        {
            "transactions": 20,
            "transactions committed": 10,
            "transactions aborted": 10,
            "versions committed": 10,
            "passes over logs of transactions": 100,
        },
    ),
    "unclean elections lose records, and readers are told": Feature(
        may_have_unclean_elections, {"unclean elections": 5, "readers told of a cut": 1}
    ),
}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FEATURES)
def test_schedules_do_what_they_are_about(name: str) -> None:
    """The end of each schedule checks that replicas agree, groups have committed, and no broker lists a damaged one."""
    feature = FEATURES[name]
    feature.check(filter(feature.shows, range(SCHEDULES)))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_where_no_election_may_be_unclean_nobody_is_elected_who_may_lack_records() -> None:
    counts = counts_of(seed for seed in range(SCHEDULES) if not may_have_unclean_elections(seed))
    assert counts["elections"] > SCHEDULES
    assert counts["unclean elections"] == counts["readers told of a cut"] == 0


def first_seeds(kind: Callable[[int], bool], first: int, count: int) -> Iterator[int]:
    """The first seeds of a kind that few schedules are of."""
    return itertools.islice(filter(kind, itertools.count(first)), count)


TABLES_CUT_BACK = Feature(
    has_tiering_and_unclean_elections,
    {"unclean elections": 20, "tables cut back": 1, "commits of tierers recorded": 50},
)


MANY = {
    "compaction": (100, 90_000_000, Feature(has_compaction, {"passes of compaction": 330, "replicas rebuilt": 5})),
    "tables": (
        100,
        91_000_000,
        Feature(has_tiering, {"commits of tierers recorded": 300, "parts of tables read": 100}),
    ),
    "tables of compacted topics": (
        50,
        91_000_000,
        Feature(has_compaction_and_tiering, {"passes of compaction": 300, "commits of tierers recorded": 175}),
    ),
    "older metadata": (
        150,
        92_000_000,
        Feature(
            has_older_metadata,
            {
                "older metadata accepted": 12,
                "newest metadata put back": 30,
                "replicas that older metadata does not know": 5,
            },
        ),
    ),
    "tables and unclean elections": (60, 91_000_000, Feature(TABLES_CUT_BACK.shows, {"tables cut back": 2})),
}
"""How many schedules, from which seed on."""


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MANY)
def test_many_schedules_of_a_kind_break_no_rule(name: str) -> None:
    count, first, feature = MANY[name]
    feature.check(first_seeds(feature.shows, first, count))


def test_a_seed_is_one_story_under_any_hash_seed() -> None:
    digests = [_digests(hash_seed) for hash_seed in ("0", "4711")]
    assert len(digests[0]) == STORIES
    assert len(set(digests[0])) == STORIES
    assert digests[0] == digests[1]


def _digests(hash_seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", PRINT_DIGESTS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    return ended.stdout.split()


def test_a_story_does_not_depend_on_whether_it_is_told() -> None:
    told, silent = run_schedule(1, 200, story=True)[0], run_schedule(1, 200)[0]
    assert (told.events, told.virtual_ms, told.acknowledged) == (silent.events, silent.virtual_ms, silent.acknowledged)


@pytest.mark.parametrize(
    "regression",
    [
        *(pytest.param(regression, marks=pytest.mark.full) for regression in REGRESSIONS[:-LATEST]),
        *REGRESSIONS[-LATEST:],
    ],
    ids=lambda regression: f"{regression.seed}-{regression.events}",
)
def test_what_was_found_once_is_mended(regression: Regression) -> None:
    violation = run_schedule(regression.seed, regression.events)[0].violation
    assert violation is None, f"{regression.found}: {violation}"
