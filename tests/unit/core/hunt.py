"""How soon the random schedules of the core find a bug that was put in."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.unit.core.checker import ViolationError
from tests.unit.core.schedule import run

PutIn = Callable[[pytest.MonkeyPatch], None]


def hunt(
    bugs: Iterable[PutIn], name: str, schedules: int, first_seed: int = 0, *, transactional: bool | None = None
) -> dict[str, object]:
    """`after` is how many schedules it took to find the bug, or 0 if none of them found it; `seed`: the one that did.

    `transactional`: as for `run`.
    """
    put_in = next(bug for bug in bugs if bug.__name__ == name)
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch)
        for seed in range(first_seed, first_seed + schedules):
            try:
                run(seed, transactional=transactional)
            except ViolationError:
                return {"after": seed - first_seed + 1, "seed": seed}
    return {"after": 0}
