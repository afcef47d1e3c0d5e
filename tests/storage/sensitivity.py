"""How soon the torture finds each known bug of storage.

`python -m tests.storage.sensitivity [--write FILE] [bug ...]`
"""

from __future__ import annotations

import sys
from itertools import islice

import pytest

from spark_broker.testing.silence import silent_brokers
from tests.storage.bugs import BUGS
from tests.storage.hunts import Hunt
from tests.support.sensitivity import TRIES_MAX, main


def hunt_for(hunt: Hunt, cases: int = TRIES_MAX) -> tuple[int, Exception | None]:
    """How many cases were tried, and what the last one found. A run that cannot be set up counts as a find."""
    after = 0
    try:
        for case in islice(hunt(), cases):
            after += 1
            case()
    except Exception as error:  # noqa: BLE001  whatever it is: without the bug nothing is raised
        return after + 1, error
    return after, None


def find(name: str, cases: int = TRIES_MAX) -> dict[str, object]:
    """Hunt for this bug. `after` is 0 when it was not found."""
    bug = BUGS[name]
    row: dict[str, object] = {"number": bug.number, "bug": name, "what": bug.what, "how": "storage torture"}
    with silent_brokers(), pytest.MonkeyPatch.context() as patch:
        bug.put_in(patch)
        after, error = hunt_for(bug.hunt, cases)
    if error is None:
        return {**row, "after": 0, "rule": "", "message": ""}
    return {**row, "after": after, "rule": bug.hunt.__name__.replace("_", " "), "message": _first_line(error)}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


if __name__ == "__main__":
    sys.exit(main(find, list(BUGS), __doc__ or ""))
