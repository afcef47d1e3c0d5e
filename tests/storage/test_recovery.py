"""What a start makes of the files that a crash left, byte by byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from spark_broker.errors import DamagedLogError
from spark_broker.protocol.frame import ENTRY_BYTES, Frame
from spark_broker.protocol.ipc_message import END_OF_STREAM
from spark_broker.protocol.schema_ids import schema_at
from spark_broker.storage.config import LogConfig
from spark_broker.storage.files import write_atomically
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.log_state import LOG_STATE_FILE
from spark_broker.storage.start_kind import StartKind
from tests.storage.logs import (
    append_batch,
    everything,
    filled,
    make_frame,
    open_log,
    same,
    schema_message,
    sim_directory,
)

ARROW = "00000000000000000000.arrow"
INDEX = "00000000000000000000.index"


@pytest.fixture
def crashed(tmp_path: Path) -> tuple[Path, list[Frame]]:
    """A log of three batches in one segment whose process died."""
    log, frames = filled(tmp_path, [False, False, False])
    log.close(clean=False)
    return tmp_path, frames


def _truncated(path: Path, missing: int) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size - missing])


def _usable(directory: Path, frames: list[Frame], start: StartKind) -> None:
    """The log recovers to exactly these batches, takes appends, and a second recovery finds nothing to do."""
    log = open_log(directory, start)
    assert same(everything(log), frames)
    added = append_batch(log, leader_epoch=9)
    log.close(clean=True)
    again = open_log(directory, StartKind.CLEAN)
    assert same(everything(again), [*frames, added])
    again.close(clean=False)


def test_a_process_crash_cuts_a_message_without_an_entry_at_every_byte(crashed: tuple[Path, list[Frame]]) -> None:
    directory, frames = crashed
    arrow, index = (directory / ARROW).read_bytes(), (directory / INDEX).read_bytes()
    for written in range(len(frames[2].message) + 1):
        (directory / ARROW).write_bytes(arrow[: len(arrow) - len(frames[2].message) + written])
        (directory / INDEX).write_bytes(index[: 2 * ENTRY_BYTES])
        log = open_log(directory, StartKind.PROCESS_CRASH)
        assert same(everything(log), frames[:2])
        log.close(clean=False)
        assert (directory / ARROW).stat().st_size == len(arrow) - len(frames[2].message)


def test_a_process_crash_cuts_an_entry_at_every_byte(crashed: tuple[Path, list[Frame]]) -> None:
    directory, frames = crashed
    arrow, index = (directory / ARROW).read_bytes(), (directory / INDEX).read_bytes()
    for missing in range(1, ENTRY_BYTES + 1):
        (directory / ARROW).write_bytes(arrow)
        (directory / INDEX).write_bytes(index[: len(index) - missing])
        log = open_log(directory, StartKind.PROCESS_CRASH)
        assert same(everything(log), frames[:2])
        log.close(clean=False)
    _usable(directory, frames[:2], StartKind.PROCESS_CRASH)


def test_a_message_that_an_entry_promises_and_that_is_missing_is_damage_after_a_process_crash(
    crashed: tuple[Path, list[Frame]],
) -> None:
    directory, frames = crashed
    arrow = (directory / ARROW).read_bytes()
    for missing in range(1, len(frames[2].message) + 1, 7):
        (directory / ARROW).write_bytes(arrow[: len(arrow) - missing])
        with pytest.raises(DamagedLogError):
            open_log(directory, StartKind.PROCESS_CRASH)


def test_a_machine_crash_cuts_the_first_torn_batch_at_every_byte(crashed: tuple[Path, list[Frame]]) -> None:
    directory, frames = crashed
    arrow, index = (directory / ARROW).read_bytes(), (directory / INDEX).read_bytes()
    for missing in range(1, len(frames[2].message) + 1):
        (directory / ARROW).write_bytes(arrow[: len(arrow) - missing])
        (directory / INDEX).write_bytes(index)
        (directory / "log-state.json").unlink(missing_ok=True)
        log = open_log(directory, StartKind.MACHINE_CRASH)
        assert same(everything(log), frames[:2])
        log.close(clean=False)


@pytest.mark.parametrize("lost", [1, 79, 80, 81, 160, 240])
def test_a_machine_crash_rebuilds_the_index_from_the_batches(crashed: tuple[Path, list[Frame]], lost: int) -> None:
    directory, frames = crashed
    _truncated(directory / INDEX, lost)
    _usable(directory, frames, StartKind.MACHINE_CRASH)


def test_a_machine_crash_rebuilds_an_index_of_garbage_and_one_that_is_missing(
    crashed: tuple[Path, list[Frame]],
) -> None:
    directory, frames = crashed
    index = (directory / INDEX).read_bytes()
    (directory / INDEX).write_bytes(random.Random(1).randbytes(1000))
    log = open_log(directory, StartKind.MACHINE_CRASH)
    assert same(everything(log), frames)
    log.close(clean=False)
    assert (directory / INDEX).read_bytes() == index
    (directory / INDEX).unlink()
    (directory / "log-state.json").unlink()
    _usable(directory, frames, StartKind.MACHINE_CRASH)


def test_a_machine_crash_cuts_at_a_page_of_zeros_anywhere_past_the_recovery_point(
    crashed: tuple[Path, list[Frame]],
) -> None:
    directory, frames = crashed
    arrow = (directory / ARROW).read_bytes()
    size = len(frames[0].message)
    start = len(arrow) - 3 * size
    for at in range(start, len(arrow), 61):
        torn = arrow[:at] + bytes(min(64, len(arrow) - at)) + arrow[at + 64 :]
        if torn == arrow:
            continue
        (directory / ARROW).write_bytes(torn)
        (directory / INDEX).write_bytes(b"")
        (directory / "log-state.json").unlink(missing_ok=True)
        log = open_log(directory, StartKind.MACHINE_CRASH)
        whole = next(i for i in range(3) if torn[start + i * size : start + (i + 1) * size] != frames[i].message)
        assert same(everything(log), frames[:whole])
        log.close(clean=False)


def test_offsets_that_do_not_follow_one_another_are_cut_after_a_machine_crash(tmp_path: Path) -> None:
    """KAFKA-3919: the log does not refuse to open."""
    log, frames = filled(tmp_path, [False, False])
    log.close(clean=False)
    stray = make_frame(3, leader_epoch=1)
    with (tmp_path / ARROW).open("ab") as file:
        file.write(stray.message)
    _usable(tmp_path, frames, StartKind.MACHINE_CRASH)


def test_what_was_synced_is_never_cut(tmp_path: Path) -> None:
    log, frames = filled(tmp_path, [False, False, False])
    log.flush()
    append_batch(log)
    log.close(clean=True)  # Saves the log end as the recovery point.
    _truncated(tmp_path / ARROW, 1)
    for start in StartKind:
        with pytest.raises(DamagedLogError):
            open_log(tmp_path, start)
    assert (tmp_path / INDEX).stat().st_size == 4 * ENTRY_BYTES, "damage is not cleaned"
    assert len(frames) == 3


def test_an_index_that_lost_synced_entries_is_damage(tmp_path: Path) -> None:
    log, _ = filled(tmp_path, [False, False, False])
    log.close(clean=True)
    _truncated(tmp_path / INDEX, ENTRY_BYTES)
    for start in StartKind:
        with pytest.raises(DamagedLogError):
            open_log(tmp_path, start)


@pytest.mark.parametrize("start", list(StartKind))
@pytest.mark.parametrize("suffix", [".arrow", ".index"])
def test_a_lost_file_of_a_sealed_segment_is_damage(tmp_path: Path, start: StartKind, suffix: str) -> None:
    log, _ = filled(tmp_path, [False, True, True])
    log.close(clean=False)
    (tmp_path / f"{3:020d}{suffix}").unlink()
    with pytest.raises(DamagedLogError):
        open_log(tmp_path, start)


@pytest.mark.parametrize("start", list(StartKind))
def test_a_gap_between_segments_is_damage(tmp_path: Path, start: StartKind) -> None:
    log, _ = filled(tmp_path, [False, True, True])
    log.close(clean=True)
    for suffix in (".arrow", ".index"):
        (tmp_path / f"{3:020d}{suffix}").unlink()
    with pytest.raises(DamagedLogError):
        open_log(tmp_path, start)


@pytest.mark.parametrize("start", list(StartKind))
def test_an_intact_log_opens_after_any_stop(tmp_path: Path, start: StartKind) -> None:
    log, frames = filled(tmp_path, [False, False, True, False])
    log.close(clean=start is StartKind.CLEAN)
    _usable(tmp_path, frames, start)


@pytest.mark.parametrize("start", list(StartKind))
def test_a_log_opens_though_the_schema_of_a_segment_is_not_known(tmp_path: Path, start: StartKind) -> None:
    """Story: the metadata was older than the log. A start after a crash of the machine failed."""
    log = open_log(tmp_path)
    frames = [append_batch(log), append_batch(log, schema_id=1), append_batch(log, schema_id=1)]
    log.close(clean=start is StartKind.CLEAN)
    again = PartitionLog.open(tmp_path, LogConfig(), _first_only, start=start)
    assert same(everything(again), frames)
    by_schema = again.view().by_schema()
    assert by_schema.keys() == {0, 1}
    assert by_schema[1].schema_message() == schema_message(1)
    again.close(clean=False)


def test_a_segment_that_begins_with_no_schema_is_cut_though_its_schema_is_not_known(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    frame = append_batch(log)
    append_batch(log, schema_id=1)
    log.close(clean=False)
    with (tmp_path / f"{frame.header.next_offset:020d}.arrow").open("r+b") as file:
        file.seek(8)
        file.write(bytes(16))
    again = PartitionLog.open(tmp_path, LogConfig(), _first_only, start=StartKind.MACHINE_CRASH)
    assert same(everything(again), [frame])
    again.close(clean=False)


def _first_only(schema_id: int) -> bytes:
    return schema_at([schema_message(0)], schema_id)


@pytest.mark.parametrize("start", [StartKind.PROCESS_CRASH, StartKind.MACHINE_CRASH])
@pytest.mark.parametrize("mark_bytes", range(9))
def test_a_crash_while_a_segment_is_sealed_at_every_byte(tmp_path: Path, start: StartKind, mark_bytes: int) -> None:
    log, frames = filled(tmp_path, [False, False])
    log.close(clean=False)
    with (tmp_path / ARROW).open("ab") as file:
        file.write(END_OF_STREAM[:mark_bytes])
    _usable(tmp_path, frames, start)


@pytest.mark.parametrize("start", [StartKind.PROCESS_CRASH, StartKind.MACHINE_CRASH])
@pytest.mark.parametrize(("arrow_bytes", "index_bytes"), [(0, None), (0, 0), (50, 0), (10_000, 0), (10_000, 79)])
def test_a_crash_while_a_segment_begins_leaves_the_one_before(
    tmp_path: Path, start: StartKind, arrow_bytes: int, index_bytes: int | None
) -> None:
    log, frames = filled(tmp_path, [False, True])
    log.close(clean=False)
    for suffix, length in ((".arrow", arrow_bytes), (".index", index_bytes)):
        path = tmp_path / f"{3:020d}{suffix}"
        data = path.read_bytes()
        path.unlink()
        if length is not None:
            path.write_bytes(data[:length])
    whole = start is StartKind.MACHINE_CRASH and arrow_bytes == 10_000  # Its only batch is in the `.arrow` file.
    _usable(tmp_path, frames if whole else frames[:1], start)


@pytest.mark.parametrize("start", StartKind)
@pytest.mark.parametrize("log_start", [3, 9])
@pytest.mark.parametrize("begins_at", [0, 3])
@pytest.mark.parametrize("lost", ["the file", "an older one"])
def test_without_its_state_no_log_loses_a_segment(lost: str, begins_at: int, log_start: int, start: StartKind) -> None:
    """Story: `log-state.json` was gone after a crash of the machine, and all segments were deleted as not synced."""
    fs, directory = sim_directory()
    log, frames = filled(directory, [True, True], fs=fs)
    if begins_at:
        log.truncate_fully_and_start_at(begins_at)
        frames.clear()
    older = fs.read_bytes(directory / LOG_STATE_FILE)
    frames += [append_batch(log, roll=True) for _ in range(4)]
    log.advance_log_start(log_start)
    log.close(clean=True)
    fs = fs.crash_process()
    names = set(fs.list_directory(directory))
    if lost == "the file":
        fs.unlink(directory / LOG_STATE_FILE)
        names.remove(LOG_STATE_FILE)
    else:
        write_atomically(fs, directory / LOG_STATE_FILE, older)
    try:
        log = open_log(directory, start, fs=fs)
    except DamagedLogError:
        assert set(fs.list_directory(directory)) == names
    else:
        assert same(everything(log), [frame for frame in frames if frame.header.base_offset >= log.log_start_offset])
        assert fs.exists(directory / f"{log_start:020d}.arrow")
        assert log.log_end_offset == frames[-1].header.next_offset


def test_what_is_left_of_a_deletion_takes_no_file_of_a_newer_segment(tmp_path: Path) -> None:
    log, frames = filled(tmp_path, [False, True])
    log.close(clean=False)
    (tmp_path / f"{3:020d}.arrow.deleted").write_bytes(b"an earlier segment of this offset")
    log = open_log(tmp_path, StartKind.PROCESS_CRASH)
    assert same(everything(log), frames)
    log.close(clean=False)
    assert not list(tmp_path.glob("*.deleted"))


def test_half_a_deletion_is_finished(tmp_path: Path) -> None:
    log, frames = filled(tmp_path, [False, True, True])
    log.close(clean=False)
    (tmp_path / f"{6:020d}.arrow").rename(tmp_path / f"{6:020d}.arrow.deleted")
    log = open_log(tmp_path, StartKind.PROCESS_CRASH)
    assert same(everything(log), frames[:2])
    log.close(clean=False)
    assert not list(tmp_path.glob(f"{6:020d}*"))


def test_retention_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    log, frames = filled(tmp_path, [False, True, True])
    saved = {path.name: path.read_bytes() for path in tmp_path.glob(f"{0:020d}.*")}
    log.advance_log_start(3)
    log.close(clean=False)
    for name, data in saved.items():
        (tmp_path / name).write_bytes(data)
    log = open_log(tmp_path, StartKind.PROCESS_CRASH)
    assert same(everything(log), frames[1:])
    assert log.segment_base_offsets == (3, 6)
    log.close(clean=False)


def test_a_flipped_bit_in_an_entry_is_damage_after_a_process_crash(crashed: tuple[Path, list[Frame]]) -> None:
    directory, _ = crashed
    index = (directory / INDEX).read_bytes()
    for at in range(2 * ENTRY_BYTES, 3 * ENTRY_BYTES):
        (directory / INDEX).write_bytes(index[:at] + bytes([index[at] ^ 4]) + index[at + 1 :])
        with pytest.raises(DamagedLogError):
            open_log(directory, StartKind.PROCESS_CRASH)


def test_a_flipped_bit_in_the_last_batch_is_damage_after_a_process_crash(crashed: tuple[Path, list[Frame]]) -> None:
    directory, frames = crashed
    arrow = bytearray((directory / ARROW).read_bytes())
    arrow[-len(frames[2].message) // 2] ^= 1
    (directory / ARROW).write_bytes(arrow)
    with pytest.raises(DamagedLogError):
        open_log(directory, StartKind.PROCESS_CRASH)
