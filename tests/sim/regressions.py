"""Seeds that found something, and where it was mended.

A change of the simulator may make a seed tell another story. The proof is then the scene in `test_findings.py` or the
unit test beside the mended code; these show that the whole holds together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Regression:
    """A seed and the number of its events; what it found, and where that was mended."""

    seed: int
    events: int
    found: str
    mended: str


REGRESSIONS = [
    Regression(
        seed=1,
        events=500,
        found="a full disk ended the broker at the next checkpoint of high watermarks",
        mended="broker/maintenance.py, storage/directory.py",
    ),
    Regression(
        seed=455,
        events=500,
        found="a broker whose replica could not be opened (EIO) went on, was elected, and served nothing",
        mended="broker/replica_manager.py",
    ),
    Regression(
        seed=82,
        events=500,
        found="what a failed fsync had dropped counted as synced after the next clean stop, and went with the machine; "
        "a recovery from a machine crash that failed was not made again",
        mended="storage/recovery.py, broker/replica_manager.py",
    ),
]
