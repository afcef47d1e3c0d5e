"""Each known bug, put in on purpose, is found by the random schedules: otherwise they would prove nothing."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS, hunted
from tests.sim.sensitivity import find_near
from tests.support.sensitivity import TRIES_MAX, Hunts

QUICK_TRIES_MAX = 500
"""More than any quick bug takes (docs/reliability.md says how many): seeds change their stories when the code does."""

FIND = find_near

SOON = [name for name in hunted() if BUGS[name].quick]
QUICK = [
    *((name, QUICK_TRIES_MAX) for name in SOON[::3]),
    *(pytest.param(name, QUICK_TRIES_MAX, marks=pytest.mark.full) for name in SOON if name not in SOON[::3]),
]
SLOW = [
    pytest.param(name, TRIES_MAX, marks=[pytest.mark.full, pytest.mark.timeout(3600)])
    for name in hunted()
    if not BUGS[name].quick
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "tries"), [*QUICK, *SLOW])
def test_schedules_find_the_bug(name: str, tries: int, hunts: Hunts) -> None:
    row = hunts[name].result()
    assert row["after"], f"{tries} schedules did not find {name}"
