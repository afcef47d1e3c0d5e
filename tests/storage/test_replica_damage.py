"""Damage in the small files of a replica and of a broker is reported or harmless, but never believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_broker.broker.damaged import DamagedReplicas
from spark_broker.errors import DamagedLogError
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.quarantine import QUARANTINE_FILE, read_quarantine
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import SimFileSystem
from tests.storage.replica_damage import damages, image_of, opens_as
from tests.storage.torture import telling

every_start = pytest.mark.parametrize("start", list(StartKind))


def check_damages(start: StartKind, every: int) -> None:
    image, legal = image_of(start)
    assert opens_as(image.copy(), start, legal)
    reported = 0
    for what, damage in damages(image, every):
        fs = image.copy()
        damage(fs)
        with telling(what):
            reported += not opens_as(fs, start, legal)
    assert reported, "the log start's snapshot, at the least, cannot be done without"


@pytest.mark.quick
@every_start
def test_damage_in_a_replicas_small_files_is_reported_or_of_no_consequence(start: StartKind) -> None:
    check_damages(start, 5)


@pytest.mark.full
@every_start
def test_damage_in_every_byte_of_a_replicas_small_files(start: StartKind) -> None:
    check_damages(start, 1)


def test_the_list_of_replicas_set_aside_is_never_read_wrong() -> None:
    """A shorter list would let a replica lead that lacks records."""
    fs = SimFileSystem()
    directory = LogDirectory.claim(Path("/logs"), cluster_id="c", launch=1, fs=fs)
    directory.partition_directory("t", "id", 3)
    DamagedReplicas(directory).quarantine(("id", 3), "t")
    path = directory.path / QUARANTINE_FILE
    size = fs.size_of(path)
    for byte in range(size):
        for bit in range(8):
            damaged = fs.copy()
            damaged.flip_bit(path, byte, bit)
            with telling((byte, bit)), pytest.raises(DamagedLogError):
                read_quarantine(directory.path, fs=damaged)
        cut = fs.copy()
        cut.truncate(path, byte)
        try:
            assert read_quarantine(directory.path, fs=cut).replicas == {("id", 3)}
            assert byte == size - 1, "only the last line's end may be missing"
        except DamagedLogError:
            continue


@pytest.mark.parametrize("kept", [0, -1], ids=["all unsynced changes lost", "none lost"])
def test_a_damaged_replica_is_on_the_list_before_its_directory_is_moved(kept: int) -> None:
    """Wherever the machine crashes, the next process leaves either all as it is, or no log under that name."""
    disks: list[SimFileSystem] = []
    fs = SimFileSystem()
    directory = LogDirectory.claim(Path("/logs"), cluster_id="c", launch=1, fs=fs)
    path = directory.partition_directory("t", "id", 3)
    fs.on_operation = lambda _: disks.append(fs.copy())
    DamagedReplicas(directory).quarantine(("id", 3), "t")
    assert len(disks) > 5
    for disk in [*disks, fs]:
        after = disk.copy().crash_machine_keeping(kept)
        listed = read_quarantine(directory.path, fs=after).replicas == {("id", 3)}
        assert after.exists(path) or listed
        taken = LogDirectory.claim(Path("/logs"), cluster_id="c", launch=2, fs=after)
        assert DamagedReplicas(taken).keys == ([("id", 3)] if listed else [])
        assert after.exists(path) is not listed, "a damaged log would be taken for a rebuilt one"
        assert read_quarantine(directory.path, fs=after).unmoved == {}
