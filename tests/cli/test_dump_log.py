"""`spark-broker dump-log`: shows every batch of real segment files, and finds every kind of damage."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.frame import ENTRY_BYTES
from spark_broker.protocol.schema import schema_to_bytes
from spark_broker.storage.config import LogConfig
from spark_broker.storage.filesystem import LocalFileSystem
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.start_kind import StartKind
from tests.cli.conftest import Run
from tests.storage.keyed_logs import keyed_frame, keyed_log, only, stored
from tests.storage.logs import append_batch, open_log


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A partition of two segments, offsets 0 to 5 and 6 to 11, three rows in a batch; the second is not sealed."""
    path = tmp_path / "flights-0"
    path.mkdir()
    log = open_log(path)
    for number in range(4):
        append_batch(log, roll=number == 2, append_time_ms=1_700_000_000_000 + number, leader_epoch=number)
    return path


def segment(directory: Path, base_offset: int, suffix: str) -> Path:
    return directory / f"{base_offset:020d}{suffix}"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def test_every_batch_of_a_directory_is_shown_in_order(directory: Path, run: Run) -> None:
    ended = run("dump-log", directory, "-o", "json")
    assert ended.status == 0
    assert [(batch["base_offset"], batch["last_offset"], batch["leader_epoch"]) for batch in ended.json_lines] == [
        (0, 2, 0),
        (3, 5, 1),
        (6, 8, 2),
        (9, 11, 3),
    ]
    assert [batch["problem"] for batch in ended.json_lines] == [""] * 4
    assert [batch["attributes"] for batch in ended.json_lines][2] == ["FIRST_OF_SEGMENT"]
    assert [batch["segment"][-1] for batch in ended.json_lines] == ["0", "0", "6", "6"]


def test_a_directory_whose_name_is_not_utf_8_is_shown(directory: Path, run: Run) -> None:
    """Story: the table was printed, and JSON was a traceback."""
    odd = directory.rename(directory.with_name(os.fsdecode(b"t\xff-0")))
    (_, *_, last) = run("dump-log", odd, "-o", "json").json_lines
    assert os.fsencode(last["segment"]) == b"t\xff-0/00000000000000000006"
    assert (last["base_offset"], last["problem"]) == (9, "")
    assert run("dump-log", odd).status == 0


@pytest.mark.parametrize("suffix", [".arrow", ".index"])
def test_one_segment_is_named_by_either_of_its_files(directory: Path, run: Run, suffix: str) -> None:
    ended = run("dump-log", segment(directory, 6, suffix), "-o", "json")
    assert [batch["base_offset"] for batch in ended.json_lines] == [6, 9]


def test_the_table_says_that_checksums_hold(directory: Path, run: Run) -> None:
    ended = run("dump-log", segment(directory, 0, ".arrow"))
    assert ended.status == 0
    rows = [line.split() for line in ended.out.splitlines() if line.strip().startswith(("0..2", "3..5"))]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("0..2", "3", "ok"), ("3..5", "3", "ok")]
    assert "2023-11-14 22:13:20.001" in ended.out


def test_rows_are_printed_on_request(directory: Path, run: Run) -> None:
    ended = run("dump-log", segment(directory, 6, ".arrow"), "--print-data-log", "-o", "json")
    assert [row["n"] for batch in ended.json_lines for row in batch["data"]] == [6, 7, 8, 9, 10, 11]
    assert '11 {"n":11}' in run("dump-log", directory, "--print-data-log").out


def test_a_row_without_a_form_in_python_is_named_and_the_others_are_printed(tmp_path: Path, run: Run) -> None:
    """Story: a time after the year 9999 ended the command in a traceback. Then it was left out, with status 0."""
    path = tmp_path / "t-0"
    path.mkdir()
    schema = pa.schema([("at", pa.timestamp("us", "UTC"))])
    rows = pa.record_batch([pa.array([0, 1 << 61, 1_000_000], pa.int64()).cast(schema.field(0).type)], schema=schema)
    log = PartitionLog.open(path, LogConfig(), lambda schema_id: schema_to_bytes(schema), start=StartKind.CLEAN)
    frame = stored(encode_batch(rows), 0)
    log.append(frame.header, frame.message)
    ended = run("dump-log", path, "--print-data-log", "-o", "json")
    (batch,) = ended.json_lines
    assert batch["data"] == [{"at": "1970-01-01T00:00:00Z"}, None, {"at": "1970-01-01T00:00:01Z"}]
    assert "offset 1 cannot be shown" in ended.err
    assert (ended.status, ended.err.endswith("\n1 record could not be shown\n")) == (1, True)
    assert run("dump-log", path, "--print-data-log").status == 1
    assert run("dump-log", path).status == 0, "no row was to be printed"


def test_a_flipped_byte_of_a_body_is_found_and_the_other_batches_still_shown(directory: Path, run: Run) -> None:
    path = segment(directory, 0, ".arrow")
    position = run("dump-log", path, "-o", "json").json_lines[1]["position"]
    flip(path, position - 8)
    ended = run("dump-log", directory, "-o", "json")
    assert ended.status == 1
    assert [bool(batch["problem"]) for batch in ended.json_lines] == [True, False, False, False]
    assert "1 damaged" in ended.err


def test_a_flipped_byte_of_an_index_entry_is_found(directory: Path, run: Run) -> None:
    flip(segment(directory, 6, ".index"), ENTRY_BYTES + 9)
    ended = run("dump-log", directory, "-o", "json")
    assert ended.status == 1
    assert [bool(batch["problem"]) for batch in ended.json_lines] == [False, False, False, True]


def test_whatever_bit_of_an_entry_is_flipped_the_other_batches_are_shown(directory: Path, run: Run) -> None:
    """Story: a bit in the upper half of the position ended the command in a traceback, and nothing was shown."""
    index = segment(directory, 0, ".index")
    whole = index.read_bytes()
    first, second = whole[:ENTRY_BYTES], int.from_bytes(whole[ENTRY_BYTES:], "little")
    flipped = [(second ^ 1 << bit).to_bytes(ENTRY_BYTES, "little") for bit in range(8 * ENTRY_BYTES)]
    index.write_bytes(b"".join((first, *flipped, whole[ENTRY_BYTES:])))
    ended = run("dump-log", index, "-o", "json")
    problems = [batch["problem"] for batch in ended.json_lines]
    assert (ended.status, problems[0], problems[-1]) == (1, "", "")
    assert all(problems[1:-1])
    assert sum("the file does not have" in problem for problem in problems) > 19
    assert run("dump-log", index).status == 1


def test_entries_of_any_bytes_are_shown_with_what_is_wrong(directory: Path, run: Run) -> None:
    random, index = Random(7), segment(directory, 0, ".index")
    last = b"\0" * 7 + b"\x80" + b"\xff" * 72  # the least offset that there is, and a last one below it
    index.write_bytes(last + random.randbytes(300 * ENTRY_BYTES))
    ended = run("dump-log", index, "--print-data-log", "-o", "json")
    assert ended.status == 1
    assert all(batch["problem"] for batch in ended.json_lines)
    assert len(ended.json_lines) == 301
    assert run("dump-log", index).status == 1


def test_a_bad_sector_under_one_batch_hides_no_other(
    directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    position = run("dump-log", segment(directory, 0, ".arrow"), "-o", "json").json_lines[1]["position"]

    def pread(fd: int, length: int, at: int) -> bytes:
        if at == position:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pread(fd, length, at)

    monkeypatch.setattr(LocalFileSystem, "pread", staticmethod(pread))
    ended = run("dump-log", directory, "-o", "json", "--print-data-log")
    assert ended.status == 1
    assert [batch["problem"] for batch in ended.json_lines][:2] == ["", "it cannot be read: Input/output error"]
    assert [batch["base_offset"] for batch in ended.json_lines] == [0, 3, 6, 9]


@pytest.mark.parametrize("broken", ["a lost file", "an index of a bad disk", "an index that is a directory"])
def test_a_segment_that_cannot_be_read_hides_no_other(
    directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Story: the first segment had lost a file, and no later one was shown."""
    index, read_bytes = segment(directory, 0, ".index"), LocalFileSystem.read_bytes

    def fails(fs: LocalFileSystem, path: Path) -> bytes:
        if path == index:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_bytes(fs, path)

    if broken == "an index of a bad disk":
        monkeypatch.setattr(LocalFileSystem, "read_bytes", fails)
    else:
        index.unlink()
    if broken == "an index that is a directory":
        index.mkdir()
    ended = run("dump-log", directory, "-o", "json")
    assert ended.status == 1
    assert [batch["base_offset"] for batch in ended.json_lines] == [6, 9]
    assert ended.err.splitlines()[-1] == "1 damaged"
    assert "flights-0/00000000000000000000: " in ended.err


@pytest.mark.parametrize("position", [0, 5, 20])
def test_a_damaged_schema_hides_rows_and_no_batch(directory: Path, run: Run, position: int) -> None:
    """In the mark of a message, in its length, and within."""
    flip(segment(directory, 0, ".arrow"), position)
    ended = run("dump-log", directory, "--print-data-log", "-o", "json")
    assert ended.status == 1
    assert [batch["data"] and len(batch["data"]) for batch in ended.json_lines] == [None, None, 3, 3]
    assert "flights-0/00000000000000000000: its rows cannot be shown: " in ended.err


def test_a_path_that_is_none_is_told_before_anything_is_shown(directory: Path, run: Run) -> None:
    ended = run("dump-log", directory, directory / "nowhere.arrow")
    assert (ended.status, ended.out) == (1, "")


def test_a_message_cut_short_is_found(directory: Path, run: Run) -> None:
    path = segment(directory, 6, ".arrow")
    path.write_bytes(path.read_bytes()[:-10])
    ended = run("dump-log", path)
    assert ended.status == 1
    assert "the .arrow file ends after" in ended.out


def test_a_missing_entry_in_the_middle_is_found(directory: Path, run: Run) -> None:
    index = segment(directory, 0, ".index")
    other = segment(directory, 6, ".index")
    index.write_bytes(index.read_bytes()[:ENTRY_BYTES] + other.read_bytes()[ENTRY_BYTES:])
    ended = run("dump-log", index)
    assert ended.status == 1
    assert "not contiguous" in ended.err


def test_an_entry_that_is_being_written_is_no_damage(directory: Path, run: Run) -> None:
    index = segment(directory, 6, ".index")
    index.write_bytes(index.read_bytes() + b"\x01" * 30)
    ended = run("dump-log", index, "-o", "json")
    assert ended.status == 0
    assert len(ended.json_lines) == 2


def test_a_lost_file_is_named(directory: Path, run: Run) -> None:
    segment(directory, 0, ".arrow").unlink()
    ended = run("dump-log", directory)
    assert ended.status == 1
    assert "00000000000000000000.arrow" in ended.err


@pytest.mark.parametrize("name", ["", "partition.json", "nowhere.arrow", "00000000000000000099.arrow"])
def test_a_path_without_segments_is_one_line(tmp_path: Path, run: Run, name: str) -> None:
    (tmp_path / "partition.json").write_text("{}")
    ended = run("dump-log", tmp_path / name)
    assert ended.status == 1
    assert ended.err.startswith("error: [INVALID_DATA]")
    assert ended.err.count("\n") == 1


def test_a_compacted_segment_shows_the_offsets_that_are_left(tmp_path: Path, run: Run) -> None:
    first = keyed_frame(0, (b"a", b"1"), (b"b", b"2"), (b"c", b"3"), first=True)
    second = keyed_frame(3, (b"a", b"4"), (b"b", b"5"))
    path = tmp_path / "state-0"
    path.mkdir()
    keyed_log(path, [only(first, [2]), only(second, [])]).close(clean=True)
    ended = run("dump-log", path, "--print-data-log", "-o", "json")
    assert ended.status == 0
    assert [(b["base_offset"], b["last_offset"], b["row_count"], b["offsets"]) for b in ended.json_lines] == [
        (0, 2, 1, [2]),
        (3, 4, 0, []),
    ]
    assert ended.json_lines[0]["data"][0]["value"] == "3"
    assert "row_offsets" in run("dump-log", path).out
