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
        found="a replica that could not be opened (EIO) stayed offline, and its broker was elected for it",
        mended="broker/replica_manager.py",
    ),
    Regression(
        seed=562,
        events=500,
        found="as 455",
        mended="broker/replica_manager.py",
    ),
    Regression(
        seed=584,
        events=500,
        found="as 455",
        mended="broker/replica_manager.py",
    ),
    Regression(
        seed=82,
        events=500,
        found="a recovery that failed was marked as done; pages of a failed fsync counted as written",
        mended="broker/replica_manager.py, storage/recovery.py",
    ),
    Regression(
        seed=623,
        events=500,
        found="a replica begun anew forgot the running maximum timestamp (found with a bug put in)",
        mended="storage/log.py",
    ),
    Regression(
        seed=100251,
        events=500,
        found="as 104293",
        mended="driver/metadata_log.py, driver/controller_loop.py",
    ),
    Regression(
        seed=288,
        events=500,
        found="a leader whose log could not be read (EIO) went on leading, and nobody could follow it",
        mended="broker/partition.py",
    ),
    Regression(
        seed=105662,
        events=500,
        found="a batch was acknowledged before four earlier ones; a sixth pushed the first out of memory",
        mended="client/partition_queue.py",
    ),
    Regression(
        seed=103088,
        events=500,
        found="a producer that gave up batches under two ids in turn forgot that numbers of the first were missing",
        mended="client/partition_queue.py",
    ),
    Regression(
        seed=104293,
        events=500,
        found="a deposed controller with nothing to write kept a broker's session from the one that took over",
        mended="driver/metadata_log.py, driver/controller_loop.py",
    ),
    Regression(
        seed=5117,
        events=500,
        found="a follower ignored an answer, and was not told that high watermark again until it moved",
        mended="broker/fetch_session.py",
    ),
]
