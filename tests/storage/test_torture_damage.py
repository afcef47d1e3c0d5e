"""A file truncated at any byte, or a flipped bit in any byte, is reported or harmless, but never served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from spark_broker.errors import DamagedLogError
from spark_broker.protocol.frame import Frame
from spark_broker.storage.checkpoints import LEADER_EPOCHS_FILE, read_leader_epochs, write_leader_epochs
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.log_state import LOG_STATE_FILE
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import SimFileSystem
from tests.storage.logs import everything, open_log, same, sim_directory
from tests.storage.torture import frame_at, telling

DIRECTORY = Path("/p-0")
EPOCHS = [(0, 0), (3, 4)]
SEGMENTS = (0, 4, 7)
FILES = tuple(f"{base:020d}{suffix}" for base in SEGMENTS for suffix in (".arrow", ".index"))
CHECKPOINTS = (LOG_STATE_FILE, LEADER_EPOCHS_FILE)

Damage = Callable[[SimFileSystem, Path], None]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Image:
    """A disk with a log of two sealed segments and an active one, synced up to `synced`."""

    fs: SimFileSystem
    frames: tuple[Frame, ...]
    synced: int

    @property
    def end(self) -> int:
        return self.frames[-1].header.next_offset


@cache
def image_of(start: StartKind) -> Image:
    """The log as an end of this kind leaves it. The last batch is synced only after a clean end."""
    fs, directory = sim_directory()
    log = open_log(directory, fs=fs)
    rows = [(0, 2, True), (2, 2, False), (4, 3, True), (7, 1, True), (8, 2, False), (10, 1, False)]
    frames = [frame_at(base, count, 3 if base >= 4 else 0, first) for base, count, first in rows]
    for position, frame in enumerate(frames):
        if position == len(frames) - 1:
            log.flush()
            # Only this saves the flush's recovery point.
            log._save_state()
        log.append(frame.header, frame.message)
    write_leader_epochs(directory, EPOCHS, fs=fs)
    log.close(clean=start is StartKind.CLEAN)
    return Image(fs, tuple(frames), 11 if start is StartKind.CLEAN else 10)


def files_of(fs: SimFileSystem) -> dict[str, bytes]:
    return {name: fs.read_bytes(DIRECTORY / name) for name in fs.list_directory(DIRECTORY)}


def served(log: PartitionLog) -> list[Frame]:
    """All batches, after a check of everything else that the log serves of them. Raises DamagedLogError."""
    frames = everything(log)
    assert list(log.headers()) == [frame.header for frame in frames]
    for header in (frame.header for frame in frames):
        first = next(f.header for f in frames if f.header.max_timestamp_us >= header.max_timestamp_us)
        assert log.offset_for_timestamp(header.max_timestamp_us) == (first.base_offset, first)
        again = log.read(header.last_offset, max_bytes=1, end_offset=log.log_end_offset)
        assert again[0].header == header
    return frames


def opens_to(fs: FileSystem, directory: Path, start: StartKind, image: Image, *, least: int) -> bool:
    """Whether the log opens; if so, it serves a prefix of the image's batches, at least up to this offset."""
    try:
        log = open_log(directory, start, fs=fs)
        epochs = read_leader_epochs(directory, fs=fs)
        frames = served(log)
    except DamagedLogError:
        return False
    assert epochs == EPOCHS
    assert log.log_start_offset == 0
    assert log.log_end_offset >= least
    assert same(frames, [f for f in image.frames if f.header.next_offset <= log.log_end_offset])
    return True


def check_damage(start: StartKind, damage: Damage, name: str, *, least: int) -> bool:
    """Damage one file of the image, and open the log. True if it did no harm; reported damage is not repaired."""
    image = image_of(start)
    fs = image.fs.copy()
    damage(fs, DIRECTORY / name)
    before = files_of(fs)
    if opens_to(fs.crash_process(), DIRECTORY, start, image, least=least):
        return True
    if start is not StartKind.MACHINE_CRASH:
        assert files_of(fs.another_process()) == before
    return False


def flip(byte: int) -> Damage:
    return lambda fs, path: fs.flip_bit(path, byte, (3 * byte + byte // 8) % 8)


def cut(length: int) -> Damage:
    return lambda fs, path: fs.truncate(path, length)


def check_flips(start: StartKind, name: str, step: int) -> None:
    image = image_of(start)
    least = image.synced if start is StartKind.MACHINE_CRASH else image.end
    for byte in range(0, image.fs.size_of(DIRECTORY / name), step):
        with telling(f"{start}: flipped a bit in byte {byte} of {name}"):
            harmless = check_damage(start, flip(byte), name, least=least)
            assert not (harmless and name == LEADER_EPOCHS_FILE), "a checkpoint that says something else"
            assert harmless or name != LOG_STATE_FILE, "the other slot says the same"


def check_cuts(start: StartKind, name: str, step: int) -> None:
    image = image_of(start)
    least = image.end if start is StartKind.CLEAN else image.synced
    for length in range(0, image.fs.size_of(DIRECTORY / name), step):
        with telling(f"{start}: cut {name} to {length} bytes"):
            check_damage(start, cut(length), name, least=least)


@pytest.mark.quick
@pytest.mark.parametrize("start", list(StartKind))
@pytest.mark.parametrize("name", [*FILES, *CHECKPOINTS])
def test_a_flipped_bit_is_reported_or_does_no_harm(name: str, start: StartKind) -> None:
    check_flips(start, name, 1 if name == LEADER_EPOCHS_FILE else 19)


@pytest.mark.quick
@pytest.mark.parametrize("start", list(StartKind))
@pytest.mark.parametrize("name", [*FILES, *CHECKPOINTS])
def test_a_cut_file_is_reported_or_recovered(name: str, start: StartKind) -> None:
    check_cuts(start, name, 1 if name == LEADER_EPOCHS_FILE else 19)


@pytest.mark.full
@pytest.mark.parametrize("start", list(StartKind))
@pytest.mark.parametrize("name", [*FILES, *CHECKPOINTS])
def test_a_bit_flipped_in_every_byte_is_reported_or_does_no_harm(name: str, start: StartKind) -> None:
    check_flips(start, name, 1)


@pytest.mark.full
@pytest.mark.parametrize("start", list(StartKind))
@pytest.mark.parametrize("name", [*FILES, *CHECKPOINTS])
def test_a_file_cut_at_every_byte_is_reported_or_recovered(name: str, start: StartKind) -> None:
    check_cuts(start, name, 1)


@pytest.mark.parametrize("start", list(StartKind))
def test_damage_in_the_middle_of_what_is_synced_is_never_harmless(start: StartKind) -> None:
    """The test above would accept a log that takes all damage for harmless: this damage must be reported."""
    for name in FILES:
        size = image_of(start).fs.size_of(DIRECTORY / name)
        unsynced = 80 if name == FILES[5] else 400 if name == FILES[4] else 8
        first_message = 300 if name.endswith(".arrow") else 0
        for byte in range(first_message, size - unsynced, 23):
            with telling(f"{start}: byte {byte} of {name}"):
                rebuilt = start is StartKind.MACHINE_CRASH and name == FILES[5] and byte % 80 >= 68
                assert not check_damage(start, flip(byte), name, least=0) or rebuilt


def changed_after(step: int) -> Iterator[tuple[str, int]]:
    for name in FILES:
        for byte in range(0, image_of(StartKind.CLEAN).fs.size_of(DIRECTORY / name), step):
            yield name, byte


def check_flips_while_open(step: int) -> None:
    image = image_of(StartKind.CLEAN)
    for name, byte in changed_after(step):
        fs = image.fs.copy()
        log = open_log(DIRECTORY, StartKind.CLEAN, fs=fs)
        flip(byte)(fs, DIRECTORY / name)
        with telling(f"flipped a bit in byte {byte} of {name} while it was open"):
            try:
                assert same(served(log), list(image.frames))
            except DamagedLogError:
                continue


@pytest.mark.quick
def test_a_bit_that_flips_while_the_log_is_open_is_found_when_it_is_read() -> None:
    check_flips_while_open(17)


@pytest.mark.full
def test_a_bit_that_flips_anywhere_while_the_log_is_open_is_found_when_it_is_read() -> None:
    check_flips_while_open(1)


@pytest.mark.parametrize("start", list(StartKind))
def test_a_lost_file_is_reported_or_recovered(start: StartKind) -> None:
    for name in FILES:
        image = image_of(start)
        with telling(name):
            check_damage(start, lambda fs, path: fs.unlink(path), name, least=image.synced)


@pytest.mark.parametrize("start", list(StartKind))
def test_real_files_answer_alike(tmp_path: Path, start: StartKind) -> None:
    """A sample of the damage above, on the operating system's files."""
    image = image_of(start)
    for number, name in enumerate(FILES):
        for at in range(number, image.fs.size_of(DIRECTORY / name), 97):
            for kind in (flip, cut):
                fs = image.fs.copy()
                kind(at)(fs, DIRECTORY / name)
                directory = tmp_path / f"{name}-{at}-{kind.__name__}"
                directory.mkdir()
                for copied, data in files_of(fs).items():
                    (directory / copied).write_bytes(data)
                simulated = opens_to(fs.crash_process(), DIRECTORY, start, image, least=0)
                assert opens_to(LOCAL, directory, start, image, least=0) == simulated, (name, at, kind.__name__)
