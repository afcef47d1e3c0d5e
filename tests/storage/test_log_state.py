"""A log's state is changed in place: a crash leaves the old one or the new, and a full disk is no obstacle."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_broker.errors import DamagedLogError, StorageFullError
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.log_state import LOG_STATE_FILE, SLOT_BYTES, LogState, read_log_state, write_log_state
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import CHANGING, Operation, SimFileSystem
from tests.storage.logs import append_batch, everything, filled, make_frame, open_log, same, sim_directory
from tests.storage.torture import telling
from tests.support.small_disk import fill_disk, small_disk

PATH = Path("/p-0") / LOG_STATE_FILE
STATES = [LogState(1, 2), LogState(3, 4), LogState(5, 60), LogState(7, 7)]


def test_it_is_all_zero_before_it_is_written(tmp_path: Path) -> None:
    assert read_log_state(tmp_path) == LogState()
    for state in STATES:
        write_log_state(tmp_path, state)
        assert read_log_state(tmp_path) == state


def test_a_flipped_bit_is_of_no_consequence_and_is_mended() -> None:
    fs, directory = sim_directory()
    for state in STATES[:2]:
        write_log_state(directory, state, fs=fs)
    good = fs.read_bytes(PATH)
    for byte in range(0, 2 * SLOT_BYTES, 3):
        damaged = fs.copy()
        damaged.flip_bit(PATH, byte, byte % 8)
        with telling(byte):
            assert read_log_state(directory, fs=damaged) == STATES[1]
            write_log_state(directory, STATES[2], fs=damaged)
            assert read_log_state(directory, fs=damaged) == STATES[2]
            data = damaged.read_bytes(PATH)
            assert data[:SLOT_BYTES] == data[SLOT_BYTES:] != good[:SLOT_BYTES]


def test_damage_of_both_slots_is_reported() -> None:
    fs, directory = sim_directory()
    write_log_state(directory, STATES[0], fs=fs)
    fs.flip_bit(PATH, 20, 1)
    fs.flip_bit(PATH, SLOT_BYTES + 20, 1)
    with pytest.raises(DamagedLogError):
        read_log_state(directory, fs=fs)
    for length in (0, 1, SLOT_BYTES, 2 * SLOT_BYTES - 1):
        fs.truncate(PATH, length)
        with pytest.raises(DamagedLogError):
            read_log_state(directory, fs=fs)


def test_a_crash_leaves_the_old_state_or_the_new_and_what_was_read_stays() -> None:
    """The process or the machine crashes at every operation, and then the machine crashes again."""
    fs, directory = sim_directory()
    disks: list[tuple[SimFileSystem, int]] = []
    for number, state in enumerate(STATES):

        def remember(operation: Operation, number: int = number) -> None:
            if operation.kind in CHANGING:
                disks.append((fs.copy(), number))

        fs.on_operation = remember
        write_log_state(directory, state, fs=fs)
    for disk, number in disks:
        legal = [LogState(), *STATES][number : number + 2]
        kept = range(1 << disk.unsynced_changes)
        after = [(disk.copy().crash_machine_keeping(subset), StartKind.MACHINE_CRASH) for subset in kept]
        after += [(disk.copy().crash_machine(random.Random(n)), StartKind.MACHINE_CRASH) for n in range(8)]
        after += [(torn, StartKind.PROCESS_CRASH) for torn in _torn(disk)]
        for crashed, start in after:
            read_state = read_log_state(directory, start, fs=crashed)
            assert read_state in legal
            again = crashed.crash_machine_keeping(0)
            if start is StartKind.MACHINE_CRASH or again.exists(PATH):
                assert read_log_state(directory, StartKind.MACHINE_CRASH, fs=again) == read_state


def _torn(disk: SimFileSystem) -> Iterator[SimFileSystem]:
    """The process dies here, or within the write of either slot."""
    yield disk.copy().crash_process()
    for position in (0, SLOT_BYTES) if disk.size_of(PATH) > 0 else ():
        data = disk.read_bytes(PATH)
        if data[:SLOT_BYTES] == data[SLOT_BYTES:] or position == SLOT_BYTES:
            torn = disk.copy()
            fd = torn.open(PATH, os.O_WRONLY)
            torn.pwritev(fd, [memoryview(b'x"half a slot')], position)
            yield torn.crash_process()


def fill(log: PartitionLog) -> None:
    """Append until nothing fits, which fills at least two segments."""
    rows = 64
    while rows:
        try:
            log.append_many([make_frame(log.log_end_offset, rows, first=log.should_roll(rows * 8, 0, 0))])
        except StorageFullError:
            rows //= 2


def check_retention_on_a_full_disk(fs: FileSystem, log: PartitionLog, directory: Path) -> None:
    before = everything(log)
    log.truncate_to(before[-1].header.base_offset)
    fill(log)
    start = log.segment_base_offsets[1]
    log.advance_log_start(start)
    kept = everything(log)
    assert kept[0].header.base_offset == start
    append_batch(log)
    log.close(clean=False)
    again = open_log(directory, StartKind.PROCESS_CRASH, fs=fs)
    assert again.log_start_offset == start
    assert same(everything(again)[: len(kept)], kept), "there is room again"
    again.close(clean=False)


def test_retention_makes_room_on_a_disk_that_is_full_to_the_last_byte() -> None:
    fs, directory = sim_directory()
    log, _ = filled(directory, [False, True, True], fs=fs)
    fs.capacity_bytes = fs.used_bytes + 3001
    fill(log)
    assert fs.capacity_bytes - fs.used_bytes < 300
    filler = fs.open(Path("/filler"), os.O_RDWR | os.O_CREAT)
    fs.pwritev(filler, [memoryview(bytes(300))], 0)
    assert fs.used_bytes == fs.capacity_bytes
    log.advance_log_start(log.segment_base_offsets[1])
    assert fs.used_bytes < fs.capacity_bytes
    fill(log)
    check_retention_on_a_full_disk(fs, log, directory)


def test_retention_makes_room_on_a_real_disk_that_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 1) as disk:
        directory = disk / "t-0"
        directory.mkdir()
        log, _ = filled(directory, [False])
        while True:
            try:
                append_batch(log, rows=2000, roll=True)
            except StorageFullError:
                break
        fill_disk(disk)
        check_retention_on_a_full_disk(LOCAL, log, directory)
