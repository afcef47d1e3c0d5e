"""Each known bug, put in on purpose, is found by the random schedules: otherwise they would prove nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim.bugs import BUGS
from tests.sim.sensitivity import find
from tests.support.sensitivity import TRIES_MAX, Hunts, hunting_for_selected

QUICK_TRIES_MAX = 400


@pytest.fixture(scope="module")
def hunts(request: pytest.FixtureRequest) -> Iterator[Hunts]:
    """The long hunts, on all cores."""
    yield from hunting_for_selected(request, find)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(name for name, bug in BUGS.items() if bug.quick))
def test_schedules_find_the_bug_quickly(name: str) -> None:
    found = find(name, QUICK_TRIES_MAX)
    assert found["after"], f"{QUICK_TRIES_MAX} schedules did not find {name}"


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(name for name, bug in BUGS.items() if not bug.quick))
def test_schedules_find_the_bug(name: str, hunts: Hunts) -> None:
    found = hunts[name].result()
    assert found["after"], f"{TRIES_MAX} schedules did not find {name}"
