"""A broker's directory after a crash at every operation, and with a bit flipped in every byte of its own files."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spark_broker.errors import DamagedLogError
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.directory_names import PartitionName
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import CHANGING, Operation, SimFileSystem
from tests.storage.torture import telling

pytestmark = pytest.mark.slow

BASE = Path("/var/log.dirs")
SLOT = BASE / "broker-0"
MARKS = [{("id", 0): 5}, {("id", 0): 7, ("id", 1): 1}]


def claim(fs: SimFileSystem) -> LogDirectory:
    return LogDirectory.claim(BASE, cluster_id="c", launch=1, fs=fs)


@dataclass(slots=True)
class Life:
    """A broker's life, and the disk before each change with the number of the current step."""

    fs: SimFileSystem = field(default_factory=SimFileSystem)
    disks: list[tuple[SimFileSystem, int]] = field(default_factory=list)
    step: int = 0

    def live(self) -> None:
        self.fs.on_operation = self._record
        directory = claim(self.fs)
        steps: list[Callable[[], object]] = [
            lambda: directory.update(broker_id=4),
            directory.mark_recovered,
            lambda: directory.partition_directory("t", "id", 0),
            lambda: directory.partition_directory("t", "id", 1),
            lambda: directory.write_high_watermarks(MARKS[0]),
            lambda: directory.write_high_watermarks(MARKS[1]),
            lambda: directory.quarantine("t", 1),
            lambda: directory.partition_directory("t", "id", 1),
            lambda: directory.remove(directory.unname_partitions([PartitionName("t", 0, "id")])[0][0]),
            directory.mark_clean,
        ]
        for number, step in enumerate(steps, start=1):
            self.step = number
            step()
        self.disks.append((self.fs.copy(), len(steps) + 1))

    def _record(self, operation: Operation) -> None:
        if operation.kind in CHANGING:
            self.disks.append((self.fs.copy(), self.step))


def check_after(fs: SimFileSystem, step: int, start: StartKind) -> None:
    """Finished steps have written everything; what the current step writes is complete or absent."""
    directory = claim(fs)
    assert (directory.slot, directory.meta.cluster_id) == (0, "c"), "the slot is found again"
    if step > 1:
        assert directory.meta.broker_id == 4
    if step > 10:
        assert directory.start_kind is StartKind.CLEAN
    elif step > 2:
        assert directory.start_kind in (start, *([StartKind.CLEAN] if step == 10 else []))
    if step > 0:
        assert not directory.is_new
    partitions = {(p.topic, p.topic_id, p.partition) for p in directory.list_partitions()}
    wanted = {3: [set(), {0}], 4: [{0}, {0, 1}], 7: [{0, 1}, {0}], 8: [{0}, {0, 1}], 9: [{0, 1}, {1}]}
    always = {5: [{0, 1}], 6: [{0, 1}], 10: [{1}], 11: [{1}]}
    assert partitions in [{("t", "id", n) for n in some} for some in {**wanted, **always}.get(step, [set()])]
    marks = directory.read_high_watermarks()
    assert marks in ([{}], [{}, MARKS[0]], [MARKS[0], MARKS[1]], [MARKS[1]])[0 if step < 5 else min(step - 4, 3)]
    again = claim(fs.crash_process())
    assert again.meta.directory_id == directory.meta.directory_id
    assert again.start_kind is not StartKind.CLEAN or not again.is_new


def test_a_crash_at_any_operation_leaves_a_directory_that_is_claimed_again() -> None:
    life = Life()
    life.live()
    rng = random.Random(1)
    for fs, step in life.disks:
        with telling(f"step {step}"):
            check_after(fs.copy().crash_process(), step, StartKind.PROCESS_CRASH)
            count = 1 << fs.unsynced_changes
            for kept in range(count) if count <= 64 else rng.sample(range(count), 64):
                with telling(f"kept {kept:b}"):
                    check_after(fs.copy().crash_machine_keeping(kept), step, StartKind.MACHINE_CRASH)
            for seed in range(5):
                check_after(fs.copy().crash_machine(random.Random(seed)), step, StartKind.MACHINE_CRASH)


def settled() -> SimFileSystem:
    """A directory with a partition and high watermarks, whose process has ended."""
    fs = SimFileSystem()
    directory = claim(fs)
    directory.update(broker_id=4, port=1234)
    directory.mark_recovered()
    directory.partition_directory("t", "id", 1)
    directory.write_high_watermarks(MARKS[0])
    return fs.crash_process()


def read_all(fs: SimFileSystem) -> object:
    """Everything that the directory holds. Raises DamagedLogError, also where it is passed over."""
    directory = claim(fs)
    if directory.path != SLOT:
        raise DamagedLogError(f"{SLOT} is passed over for {directory.path}")
    partition = directory.partition_directory("t", "id", 1)
    return directory.meta, directory.start_kind, partition, directory.read_high_watermarks()


FILES = ["meta.json", "high-watermarks.json", "t-1/partition.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_bit_flipped_in_any_byte_is_reported(name: str) -> None:
    fs = settled()
    for byte in range(fs.size_of(SLOT / name)):
        for bit in range(8):
            damaged = fs.copy()
            damaged.flip_bit(SLOT / name, byte, bit)
            with telling((name, byte, bit)), pytest.raises(DamagedLogError):
                read_all(damaged)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_byte_is_reported_or_says_the_same(name: str) -> None:
    fs = settled()
    before = read_all(fs.copy())
    size = fs.size_of(SLOT / name)
    for length in range(size):
        damaged = fs.copy()
        damaged.truncate(SLOT / name, length)
        with telling((name, length)):
            try:
                assert read_all(damaged) == before
                assert length == size - 1, "only the last line's end may be missing"
            except DamagedLogError:
                continue


def test_a_damaged_marker_does_not_make_an_end_clean() -> None:
    fs = SimFileSystem()
    directory = claim(fs)
    directory.mark_recovered()
    directory.mark_clean()
    fs = fs.crash_process()
    marker = SLOT / ".clean"
    for byte in range(fs.size_of(marker)):
        damaged = fs.copy()
        damaged.flip_bit(marker, byte, byte % 8)
        assert claim(damaged).start_kind is StartKind.PROCESS_CRASH
        assert not damaged.exists(marker), "it is not believed later either"
    foreign = fs.copy()
    other = SimFileSystem("other")
    claim(other).mark_clean()
    fd = foreign.open(marker, 2)
    foreign.ftruncate(fd, 0)
    foreign.pwritev(fd, [memoryview(other.read_bytes(marker))], 0)
    foreign.close(fd)
    assert claim(foreign).start_kind is StartKind.PROCESS_CRASH, "it marks another directory"


def test_a_damaged_replica_does_not_hide_the_others() -> None:
    fs = settled()
    directory = claim(fs)
    directory.partition_directory("t", "id", 2)
    fs.flip_bit(SLOT / "t-1" / "partition.json", 12, 1)
    assert [(p.topic, p.partition) for p in directory.list_partitions()] == [("t", 2)]


def test_a_replica_that_lost_its_description_is_not_taken_for_a_new_topic() -> None:
    fs = settled()
    directory = claim(fs)
    fs.unlink(SLOT / "t-1" / "partition.json")
    directory.partition_directory("t", "id of a topic", 1)  # The directory was empty.
    fs.unlink(SLOT / "t-1" / "partition.json")
    fs.open(SLOT / "t-1" / "00000000000000000000.arrow", 66)
    with pytest.raises(DamagedLogError):
        directory.partition_directory("t", "id of a later topic", 1)
