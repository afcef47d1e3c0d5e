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
        seed=288,
        events=500,
        found="a leader whose log could not be read (EIO) went on leading, and nobody could follow it",
        mended="broker/partition.py",
    ),
]
