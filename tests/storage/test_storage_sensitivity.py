"""The torture finds each known bug of storage that is put in on purpose: otherwise it would prove nothing."""

from __future__ import annotations

import pytest

from tests.storage.bugs import BUGS
from tests.storage.hunts import Hunt
from tests.storage.sensitivity import find, hunt_for
from tests.support.sensitivity import TRIES_MAX, Hunts

QUICK_TRIES_MAX = 600

FIND = find
HUNTS = list(dict.fromkeys(bug.hunt for bug in BUGS.values()))
QUICK = [(name, QUICK_TRIES_MAX) for name, bug in BUGS.items() if bug.quick]
SLOW = [pytest.param(name, TRIES_MAX, marks=pytest.mark.full) for name, bug in BUGS.items() if not bug.quick]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("name", "tries"), [*QUICK, *SLOW])
def test_the_torture_finds_the_bug(name: str, tries: int, hunts: Hunts) -> None:
    row = hunts[name].result()
    assert row["after"], f"{tries} cases did not find {name}"


@pytest.mark.parametrize("hunt", HUNTS)
def test_where_no_bug_is_none_is_found(hunt: Hunt) -> None:
    after, error = hunt_for(hunt, 60)
    assert error is None, f"case {after}"
