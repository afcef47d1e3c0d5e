"""A leader whose clock is behind gives records old times; when leadership moves, no fresh record is deleted.

Nor does a broker forget a producer by a clock that is ahead.
"""

from __future__ import annotations

from pathlib import Path

from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.lease import SETTLED_MS, Lease
from spark_broker.storage.start_kind import StartKind
from tests.broker.lone_partition import BIG, HeldClock, LonePartition
from tests.broker.rig import FAR_FUTURE_MS

SKEW_MAX_MS = 120_000
RETENTION_MS = 60_000
DAY_MS = 86_400_000


def lone_partition(tmp_path: Path, **config: str) -> LonePartition:
    """A partition in which two values fill a segment."""
    given = {name.replace("_", "."): value for name, value in config.items()}
    return LonePartition(tmp_path / "t-0", {"segment.bytes": "4096", "retention.ms": str(RETENTION_MS)} | given)


def fill(lone: LonePartition) -> None:
    for number in range(6):
        lone.write(b"x" * BIG, sequence=number, transactional=False)


def test_nothing_fresh_is_deleted_when_leadership_moves_from_a_slow_clock_to_a_right_one(tmp_path: Path) -> None:
    lone = lone_partition(tmp_path)
    lone.clock.ahead_ms = -(SKEW_MAX_MS - 1000)
    fill(lone)
    lone.reopen(StartKind.CLEAN)
    lone.clock.ahead_ms = 0
    lone.partition.apply_retention(SKEW_MAX_MS)
    assert len(lone.read(read_committed=False)) == 6
    lone.clock.ahead_ms = RETENTION_MS + SKEW_MAX_MS
    lone.partition.apply_retention(SKEW_MAX_MS)
    assert len(lone.read(read_committed=False)) < 6, "what is old is deleted for all that"


def test_a_leader_deletes_what_it_has_appended_itself_on_time(tmp_path: Path) -> None:
    lone = lone_partition(tmp_path)
    fill(lone)
    lone.clock.ahead_ms = RETENTION_MS + 1000
    lone.partition.apply_retention(SKEW_MAX_MS)
    assert len(lone.read(read_committed=False)) < 6


def test_a_leader_without_a_lease_deletes_nothing(tmp_path: Path) -> None:
    """A broker whose clock turned wrong is fenced. Its lease is dropped before it knows that others lead."""
    lone = lone_partition(tmp_path)
    fill(lone)
    lone.clock.ahead_ms = 100 * RETENTION_MS
    lone.lease.drop()
    lone.partition.apply_retention(SKEW_MAX_MS)
    assert lone.partition.replica.log_start_offset == 0


def test_a_broker_without_a_lease_forgets_no_producer(tmp_path: Path) -> None:
    """Else the retry of a batch that is stored was stored once more, when this broker led again."""
    lone = LonePartition(tmp_path / "t-0")
    offsets = [lone.write(b"x", sequence=number, transactional=False) for number in range(3)]
    lone.clock.ahead_ms = 2 * DAY_MS
    lone.lease.drop()
    lone.partition.expire_producers(DAY_MS, DAY_MS)
    lone.clock.ahead_ms = 0
    lone.lease.extend(SYSTEM_CLOCK.boottime_ms(), FAR_FUTURE_MS)
    assert lone.write(b"x", sequence=2, transactional=False) == offsets[2]
    lone.clock.ahead_ms = 2 * DAY_MS
    lone.partition.expire_producers(DAY_MS, DAY_MS)
    assert lone.partition.replica.producers.entries() == [], "with a lease, idle ones are forgotten"


class Heartbeats:
    """A partition whose broker has a lease and clocks of its own."""

    def __init__(self, lone: LonePartition) -> None:
        self.clock = lone.partition._clock = HeldClock()
        self._lease = lone.partition.lease = Lease(self.clock)
        self._partition = lone.partition
        self.beat()

    def beat(self) -> None:
        self._lease.extend(self.clock.boottime_ms(), 10 * SETTLED_MS)

    def keeps_everything(self) -> bool:
        self._partition.apply_retention(SKEW_MAX_MS)
        return self._partition.replica.log_start_offset == 0


def test_a_clock_that_was_set_a_moment_ago_deletes_nothing(tmp_path: Path) -> None:
    """All clocks of a cluster on one machine jump together: no majority shows that they are wrong."""
    lone = lone_partition(tmp_path)
    fill(lone)
    broker = Heartbeats(lone)
    broker.clock.ahead_ms = 100 * DAY_MS
    assert broker.keeps_everything(), "before the next heartbeat"
    broker.beat()
    assert broker.keeps_everything()
    lone.partition.expire_producers(DAY_MS, DAY_MS)
    assert lone.partition.replica.producers.entries()
    broker.clock.passed_ms += SETTLED_MS - 1
    assert broker.keeps_everything()
    broker.clock.passed_ms += 1
    assert not broker.keeps_everything(), "it is right, and the records are old"


def test_what_is_beyond_the_limit_of_bytes_goes_whatever_the_clock_says(tmp_path: Path) -> None:
    lone = lone_partition(tmp_path, retention_bytes="1")
    fill(lone)
    broker = Heartbeats(lone)
    broker.clock.ahead_ms = 100 * DAY_MS
    broker.beat()
    assert not broker.keeps_everything()
    assert lone.partition.replica.producers.entries()


def test_a_machine_that_slept_deletes_what_is_old_by_now(tmp_path: Path) -> None:
    lone = lone_partition(tmp_path)
    fill(lone)
    broker = Heartbeats(lone)
    broker.clock.passed_ms += RETENTION_MS + 1000
    broker.beat()
    assert not broker.keeps_everything()
