"""Offsets by time: what is asked again costs no read, and is never answered with what is no longer there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from tests.broker.lone_partition import LonePartition
from tests.broker.rig import Outcome, batch


@pytest.fixture
def lone(tmp_path: Path) -> LonePartition:
    return LonePartition(tmp_path / "t-0")


def write(lone: LonePartition, *times_ms: int | None, compression: str | None = None) -> None:
    rows = batch(*[b"x"] * len(times_ms))
    times = pa.array([None if ms is None else ms * 1000 for ms in times_ms], pa.int64()).cast(DEFAULT_SCHEMA[3].type)
    rows = rows.set_column(3, DEFAULT_SCHEMA[3], times)
    outcome = Outcome()
    message = encode_batch(rows, compression=compression)
    append = Append(message, lone.leader_epoch, -1, 0, SYSTEM_CLOCK.boottime_ms() + 30_000)
    lone.partition.append(append, outcome)
    outcome.future.result(20)


def look_up(lone: LonePartition, timestamp_ms: int, *, read_committed: bool = True) -> tuple[int, int] | None:
    found = lone.partition.reader.offset_at(lone.leader_epoch, timestamp_ms * 1000, read_committed=read_committed)
    return None if found is None else (found[0], found[1] // 1000)


@pytest.fixture
def reads(lone: LonePartition, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets at which the log was read."""
    offsets = list[int]()
    read: Callable[[int, int, int], list[Frame]] = lone.partition.read_log

    def read_log(offset: int, max_bytes: int, end_offset: int) -> list[Frame]:
        offsets.append(offset)
        return read(offset, max_bytes, end_offset)

    monkeypatch.setattr(lone.partition, "read_log", read_log)
    return offsets


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_first_record_at_or_after_a_time(lone: LonePartition, compression: str | None) -> None:
    write(lone, 10, 30, 20, compression=compression)
    write(lone, 40, 35, compression=compression)
    found = [look_up(lone, ms) for ms in (0, 10, 11, 30, 31, 40, 41)]
    assert found == [(0, 10), (0, 10), (1, 30), (1, 30), (3, 40), (3, 40), None]


def test_a_record_without_a_time_has_its_append_time(lone: LonePartition) -> None:
    write(lone, None, 10)
    found = look_up(lone, 0)
    assert found is not None
    assert found[0] == 0
    assert found[1] > 10


def test_the_same_question_again_costs_no_read(lone: LonePartition, reads: list[int]) -> None:
    write(lone, 10, 30)
    assert [look_up(lone, 20), look_up(lone, 20), look_up(lone, 20, read_committed=False)] == [(1, 30)] * 3
    assert reads == [0]


def test_a_deleted_record_is_not_found_again(lone: LonePartition, reads: list[int]) -> None:
    write(lone, 10, 30)
    assert look_up(lone, 0) == (0, 10)
    lone.partition.records_deleted(1)
    assert look_up(lone, 0) == (1, 30)
    assert len(reads) == 2


def test_an_aborted_record_is_found_only_by_those_who_read_all(lone: LonePartition) -> None:
    lone.write(b"aborted")
    lone.end(1, committed=False)
    lone.write(b"committed", epoch=1)
    lone.end(2, committed=True)
    assert look_up(lone, 0, read_committed=False) == (0, 0)
    assert look_up(lone, 0) == (2, 0)
    assert look_up(lone, 0, read_committed=False) == (0, 0)
