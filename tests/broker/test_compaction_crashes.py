"""A crash at any change of the disk that a pass of compaction makes leaves the old segments or the new one, whole."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from spark_broker.errors import InvariantError, SparkBrokerError
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import CHANGING, Fault, Operation, SimFileSystem
from tests.broker.compacted_partition import DAY_MS, CompactedPartition
from tests.storage.logs import sim_directory
from tests.storage.once import Once

SUBSETS_MAX = 16
"""Of more subsets of unsynced changes, so many are drawn."""

SECOND_CRASHES_MAX = 2
"""So many points of a recovery are drawn at which the next process dies."""


def written() -> CompactedPartition:
    """Ten segments: two keys with many values, a deleted one, an idempotent producer, aborted and committed batches."""
    fs, directory = sim_directory()
    lone = CompactedPartition(directory, {"segment.bytes": "3500"}, fs=fs)
    for n in range(16):
        lone.put((b"a", b"%d" % n), (b"b", b"%d" % n), pid=9, sequence=n)
        if n % 5 == 1:
            offset = lone.put((b"a", b"transactional %d" % n), pid=7, epoch=n, txn=True)
            lone.finish(7, n + 1, committed=n % 2 == 0, offsets=[offset])
    lone.put((b"deleted", b"v"))
    lone.put((b"deleted", None))
    lone.roll()
    lone.partition.flush()
    return lone


def points_of(lone: CompactedPartition) -> list[SimFileSystem]:
    """Compact; the disk before each change of it."""
    fs = lone.fs
    assert isinstance(fs, SimFileSystem)
    disks: list[SimFileSystem] = []

    def record(operation: Operation) -> Fault | None:
        if operation.kind in CHANGING:
            disks.append(fs.copy())
        return None

    fs.on_operation = record
    lone.compact()
    fs.on_operation = None
    return [*disks, fs.copy()]


def crashes(disk: SimFileSystem, rng: random.Random) -> Iterator[tuple[SimFileSystem, StartKind]]:
    yield disk.copy().crash_process(), StartKind.PROCESS_CRASH
    yield disk.copy().crash_process(), StartKind.MACHINE_CRASH
    every = range(1 << disk.unsynced_changes)
    for kept in every if len(every) <= SUBSETS_MAX else rng.sample(every, SUBSETS_MAX):
        yield disk.copy().crash_machine_keeping(kept), StartKind.MACHINE_CRASH


def crashes_once_of_each_kind(disk: SimFileSystem, rng: random.Random) -> Iterator[tuple[SimFileSystem, StartKind]]:
    yield disk.copy().crash_process(), StartKind.PROCESS_CRASH
    kept = rng.randrange(1 << disk.unsynced_changes)
    yield disk.copy().crash_machine_keeping(kept), StartKind.MACHINE_CRASH


def check(before: CompactedPartition, fs: SimFileSystem, start: StartKind, ahead_ms: int) -> None:
    """What was there is there, the leader goes on, and another pass ends as the first one would have."""
    again = CompactedPartition(before.directory, {"segment.bytes": "3500"}, fs=fs, start=start, model=before.model)
    again.clock.ahead_ms = ahead_ms
    assert again.partition.replica.log_end_offset == before.partition.replica.log_end_offset
    assert again.last_stable_offset() == again.partition.replica.log_end_offset
    names = fs.list_directory(before.directory)
    assert not [name for name in names if name.endswith((".cleaned", ".deleted", ".tmp"))]
    again.check(deletions_may_be_gone=ahead_ms > 0)
    for sequence in range(11, 16):
        offset = again.put((b"a", b"%d" % sequence), (b"b", b"%d" % sequence), pid=9, sequence=sequence)
        assert again.model.records[offset].value == b"%d" % sequence
    assert again.partition.replica.log_end_offset == before.partition.replica.log_end_offset
    again.compact()
    again.check(deletions_may_be_gone=ahead_ms > 0)
    assert again.rows() == before.rows()


@pytest.mark.parametrize(
    "every", [pytest.param(4, marks=pytest.mark.quick), pytest.param(1, marks=pytest.mark.full)], ids=["some", "all"]
)
@pytest.mark.parametrize("ahead_ms", [0, 3 * DAY_MS], ids=["first", "purging"])
def test_a_crash_anywhere_in_a_pass_loses_nothing(ahead_ms: int, every: int) -> None:
    """`every`: at each change of the disk, or at every fourth."""
    lone, rng = written(), random.Random(1)
    if ahead_ms:  # the pass that removes tombstones and markers
        lone.compact()
        lone.clock.ahead_ms = ahead_ms
    points = points_of(lone)
    assert len(points) > 10
    lone.check(deletions_may_be_gone=ahead_ms > 0)
    once = Once[None](lambda fs, start, _: check(lone, fs, start, ahead_ms))
    for disk in points[::every]:
        for fs, start in crashes(disk, rng):
            once(fs, start, ())


@pytest.mark.full
def test_a_crash_while_a_swap_is_repeated_loses_nothing() -> None:
    """The next process dies at any change that its recovery makes, too."""
    lone, rng = written(), random.Random(2)
    once = Once[None](lambda fs, start, _: check(lone, fs, start, 0))
    for disk in points_of(lone):
        for crashed, start in crashes_once_of_each_kind(disk, rng):
            disks: list[SimFileSystem] = []

            def record(
                operation: Operation, crashed: SimFileSystem = crashed, disks: list[SimFileSystem] = disks
            ) -> Fault | None:
                if operation.kind in CHANGING:
                    disks.append(crashed.copy())
                return None

            crashed.on_operation = record
            CompactedPartition(lone.directory, {"segment.bytes": "3500"}, fs=crashed, start=start)
            for second in rng.sample(disks, min(len(disks), SECOND_CRASHES_MAX)):
                once(second.copy().crash_process(), start, ())
                kept = rng.randrange(1 << second.unsynced_changes)
                once(second.copy().crash_machine_keeping(kept), StartKind.MACHINE_CRASH, ())


def test_a_full_disk_stops_a_pass_and_changes_nothing() -> None:
    lone = written()
    assert isinstance(lone.fs, SimFileSystem)
    before = lone.rows()
    used = lone.fs.used_bytes
    refused = 0
    for room in (0, 100, 700, 1500):
        lone.fs.capacity_bytes = used + room
        refused += lone.try_to_compact()
        lone.fs.capacity_bytes = None
        assert lone.rows() == before
        assert lone.fs.used_bytes == used
        lone.check()
    assert refused == 4
    lone.compact()
    lone.check()
    assert lone.rows() != before


OTHER_ERRORS = {"EIO": errno.EIO, "EMFILE": errno.EMFILE, "EDQUOT": errno.EDQUOT, "MemoryError": None}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(errno.ENOSPC, id="ENOSPC"),
        *(pytest.param(number, marks=pytest.mark.full, id=name) for name, number in OTHER_ERRORS.items()),
    ],
)
def test_an_error_anywhere_in_a_pass_leaves_a_log_that_can_be_opened(number: int | None) -> None:
    """Simulator, seed 561194: what a swap needed that had failed half-way was thrown away, and the log was damaged.

    Story: so it was where the process had no memory in the midst of a swap. It ends then, and the next one swaps.
    Story: so it was, too, where a disk without room refused a name in the midst of a swap.
    """
    lone = written()
    assert isinstance(lone.fs, SimFileSystem)
    lone.partition.close(clean=True)
    disk, settings = lone.fs.crash_process(), {"segment.bytes": "3500"}

    def opened(fs: SimFileSystem) -> CompactedPartition:
        return CompactedPartition(lone.directory, settings, fs=fs, start=StartKind.PROCESS_CRASH, model=lone.model)

    failed, at = 1, 0
    while failed:
        fs = disk.copy()
        trial, failed = opened(fs), 0
        countdown = at

        def fail(operation: Operation) -> Fault | None:
            nonlocal countdown, failed
            if operation.kind in ("free_bytes", "close"):
                return None
            countdown -= 1
            if countdown >= 0 or failed:
                return None
            failed += 1
            if number is None:
                raise MemoryError
            return Fault(number)

        fs.on_operation = fail
        with suppress(SparkBrokerError, InvariantError, MemoryError):
            trial.compact()
        fs.on_operation = None
        opened(fs.crash_process()).check()
        at += 1
    assert at > 50
