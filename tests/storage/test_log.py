"""Appending, reading, rolling, truncating and retention of one log."""

from __future__ import annotations

import errno
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.errors import (
    DamagedLogError,
    InvariantError,
    KafkaStorageError,
    OffsetOutOfRangeError,
    StorageFullError,
)
from spark_broker.protocol.frame import ENTRY_BYTES
from spark_broker.storage.config import LogConfig
from spark_broker.storage.loaded_indexes import LoadedIndexes
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.retention import RetentionClock
from spark_broker.storage.segment import Segment
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import Fault, Operation, SimFileSystem
from tests.storage.logs import (
    SCHEMAS,
    append_batch,
    apply_retention,
    everything,
    filled,
    make_frame,
    open_log,
    same,
    schema_message,
    sim_directory,
)


def test_an_empty_log_makes_no_files(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert (log.log_start_offset, log.log_end_offset, log.max_timestamp_us, log.size_bytes) == (0, 0, -1, 0)
    assert log.read(0, max_bytes=10, end_offset=0) == []
    log.close(clean=True)
    assert list(tmp_path.iterdir()) == []


def test_what_was_appended_is_read_back_byte_for_byte_across_segments(tmp_path: Path) -> None:
    log, frames = filled(tmp_path, [False, False, True, False, True])
    assert log.segment_base_offsets == (0, 6, 12)
    assert same(everything(log), frames)
    assert [h.base_offset for h in log.headers()] == [0, 3, 6, 9, 12]
    assert [h.base_offset for h in log.headers(7)] == [6, 9, 12]
    assert list(log.headers(15)) == []


def test_append_many_rolls_inside_where_the_leader_rolled(tmp_path: Path) -> None:
    (tmp_path / "leader").mkdir()
    (tmp_path / "follower").mkdir()
    leader, frames = filled(tmp_path / "leader", [False, True, False])
    follower = open_log(tmp_path / "follower")
    follower.append_many(frames)
    assert follower.segment_base_offsets == leader.segment_base_offsets == (0, 3)
    for name in ("00000000000000000000.arrow", "00000000000000000003.arrow", "00000000000000000003.index"):
        assert (tmp_path / "follower" / name).read_bytes() == (tmp_path / "leader" / name).read_bytes()


def test_a_read_begins_with_the_batch_that_contains_the_offset_and_keeps_to_its_bounds(tmp_path: Path) -> None:
    log, frames = filled(tmp_path, [False] * 4)
    size = len(frames[0].message)

    def bases(offset: int, max_bytes: int, end_offset: int) -> list[int]:
        return [f.header.base_offset for f in log.read(offset, max_bytes=max_bytes, end_offset=end_offset)]

    assert bases(4, 10 * size, 12) == [3, 6, 9]
    assert bases(4, 1, 12) == [3]
    assert bases(0, 2 * size, 12) == [0, 3]
    assert bases(0, 2 * size - 1, 12) == [0]
    assert bases(0, 10 * size, 8) == [0, 3]
    assert bases(3, 10 * size, 5) == []
    assert bases(12, 10 * size, 12) == []
    with pytest.raises(OffsetOutOfRangeError):
        log.read(13, max_bytes=1, end_offset=13)


@given(rolls=st.lists(st.booleans(), min_size=1, max_size=12), data=st.data())
def test_every_read_equals_a_scan(
    rolls: list[bool], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log, frames = filled(tmp_path_factory.mktemp("log"), rolls)
    size = len(frames[0].message)
    offset = data.draw(st.integers(0, log.log_end_offset))
    end = data.draw(st.integers(0, log.log_end_offset))
    budget = data.draw(st.integers(0, 5)) * size
    expected = [f for f in frames if f.header.last_offset >= offset and f.header.next_offset <= end]
    if offset >= end:
        expected = []
    assert same(log.read(offset, max_bytes=budget, end_offset=end), expected[: max(1, budget // size)])
    log.close(clean=False)


@given(
    steps=st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=12),
    start=st.integers(0, 40),
    end=st.integers(0, 40),
    max_bytes=st.integers(0, 20_000),
)
def test_the_extent_of_a_range_equals_a_scan(
    steps: list[tuple[int, bool]], start: int, end: int, max_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Only the schema at a segment's beginning may differ: it is counted if the whole segment is."""
    log = open_log(tmp_path_factory.mktemp("log"))
    for _, roll in steps:
        append_batch(log, roll=roll)
    inside = [h for h in log.headers() if h.next_offset > start and h.next_offset <= end]
    size, fitting = log.extent(start, end, max_bytes)
    schemas = len(log.segment_base_offsets) * 1000
    assert sum(h.length for h in inside) <= size <= sum(h.length for h in inside) + (schemas if inside else 0)
    taken = [h for h in inside if h.next_offset <= fitting]
    assert bool(taken) == bool(inside)
    assert len(taken) <= 1 or sum(h.length for h in taken) <= max_bytes
    missed = inside[len(taken) : len(taken) + 1]
    assert not missed or sum(h.length for h in [*taken, *missed]) + schemas > max_bytes
    log.close(clean=False)


@given(
    steps=st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=15),
    cut=st.integers(0, 45),
    start=st.integers(0, 45),
)
def test_a_lookup_by_time_equals_a_scan_after_truncation_and_out_of_order(
    steps: list[tuple[int, bool]], cut: int, start: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """KAFKA-3163."""
    log = open_log(tmp_path_factory.mktemp("log"))
    for timestamp_us, roll in steps:
        append_batch(log, timestamp_us=timestamp_us, roll=roll)
    log.truncate_to(cut)
    for timestamp_us, _ in steps[:3]:
        append_batch(log, timestamp_us=timestamp_us)
    log.advance_log_start(min(start, log.log_end_offset))
    remaining = [h for h in log.headers() if h.next_offset > log.log_start_offset]
    for wanted in range(22):
        scanned = next(((h.base_offset, h) for h in remaining if h.max_timestamp_us >= wanted), None)
        assert log.offset_for_timestamp(wanted) == scanned
    log.close(clean=False)


def test_a_segment_rolls_by_size_time_and_schema_and_otherwise_not(tmp_path: Path) -> None:
    log = open_log(tmp_path, config=LogConfig(segment_bytes=5000, segment_ms=1000))
    assert log.should_roll(100, 0, 50)
    append_batch(log, append_time_ms=50)
    room = 5000 - log.size_bytes
    assert not log.should_roll(room, 0, 1049)
    assert log.should_roll(room + 1, 0, 1049)
    assert log.should_roll(room, 0, 1050)
    assert log.should_roll(room, 1, 50)


def test_a_segment_rolls_before_its_index_outgrows_its_share_of_memory(tmp_path: Path) -> None:
    """The newest segment's index is in memory: an hour of small transactions grew each broker by 3 MB."""
    config = LogConfig(segment_index_bytes=10 * ENTRY_BYTES)
    log = open_log(tmp_path, config=config)
    for _ in range(35):
        append_batch(log, rows=1)
    assert log.segment_base_offsets == (0, 10, 20, 30)
    log.close(clean=True)
    again = open_log(tmp_path, config=config)
    for _ in range(6):
        append_batch(again, rows=1)
    assert again.segment_base_offsets == (0, 10, 20, 30, 40), "a log that is opened again knows how long its index is"
    assert len(everything(again)) == 41
    again.close(clean=False)


def test_a_sealed_segment_opens_with_plain_pyarrow_and_a_schema_rise_has_its_own(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    append_batch(log)
    append_batch(log, schema_id=1)
    assert log.segment_base_offsets == (0, 6)
    with pa.ipc.open_stream(pa.OSFile(str(tmp_path / "00000000000000000000.arrow"))) as reader:
        assert reader.schema == SCHEMAS[0]
        assert reader.read_all()["n"].to_pylist() == list(range(6))
    assert log.recovery_point == 6


def test_offsets_must_be_contiguous(tmp_path: Path) -> None:
    log, _ = filled(tmp_path, [False])
    frame = make_frame(4)
    with pytest.raises(InvariantError):
        log.append(frame.header, frame.message)


def test_a_replica_may_begin_inside_a_batch(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.truncate_fully_and_start_at(5)
    frame = make_frame(3)
    log.append(frame.header, frame.message)
    assert (log.log_start_offset, log.log_end_offset) == (5, 6)
    log.close(clean=True)
    again = open_log(tmp_path)
    assert (again.log_start_offset, again.log_end_offset) == (5, 6)
    assert same(again.read(5, max_bytes=1, end_offset=6), [frame])


@pytest.mark.parametrize("offset", range(16))
def test_truncation_drops_the_batch_that_contains_the_offset_and_appends_go_on(tmp_path: Path, offset: int) -> None:
    log, frames = filled(tmp_path, [False, False, True, False, True])
    log.truncate_to(offset)
    kept = [f for f in frames if f.header.next_offset <= offset]
    assert log.log_end_offset == 3 * len(kept)
    assert same(everything(log), kept)
    added = make_frame(log.log_end_offset, leader_epoch=1)  # The new leader did not roll here.
    log.append(added.header, added.message)
    assert same(everything(log), [*kept, added])
    log.close(clean=False)
    for start in (StartKind.PROCESS_CRASH, StartKind.MACHINE_CRASH):
        again = open_log(tmp_path, start)
        assert same(everything(again), [*kept, added])
        again.close(clean=False)


def test_truncation_takes_the_recovery_point_back_on_disk(tmp_path: Path) -> None:
    log, frames = filled(tmp_path, [False, False, False])
    log.close(clean=True)
    log = open_log(tmp_path)
    assert log.recovery_point == 9
    log.truncate_to(3)
    append_batch(log, leader_epoch=1)
    log.close(clean=False)
    index = tmp_path / "00000000000000000000.index"
    index.write_bytes(index.read_bytes()[:80])  # What was not synced is lost in a machine crash.
    again = open_log(tmp_path, StartKind.MACHINE_CRASH)
    assert [h.leader_epoch for h in again.headers()] == [0, 1]
    assert again.recovery_point == 6
    assert same(again.read(0, max_bytes=1, end_offset=6), frames[:1])


def test_truncating_below_the_log_start_lowers_it(tmp_path: Path) -> None:
    log, _ = filled(tmp_path, [False, True, True])
    log.advance_log_start(6)
    log.truncate_to(2)
    assert (log.log_start_offset, log.log_end_offset, log.segment_base_offsets) == (2, 2, ())


def test_starting_over_leaves_an_empty_log_at_the_offset_also_after_a_restart(tmp_path: Path) -> None:
    log, _ = filled(tmp_path, [False, True])
    log.truncate_fully_and_start_at(100)
    assert not list(tmp_path.glob("*.arrow"))
    log.close(clean=False)
    again = open_log(tmp_path, StartKind.PROCESS_CRASH)
    assert (again.log_start_offset, again.log_end_offset) == (100, 100)


def test_the_log_start_moves_inside_a_batch_and_survives_a_restart(tmp_path: Path) -> None:
    log, _ = filled(tmp_path, [False, True, True])
    assert log.advance_log_start(4) == [0]
    assert log.advance_log_start(2) == []
    with pytest.raises(OffsetOutOfRangeError):
        log.advance_log_start(10)
    with pytest.raises(OffsetOutOfRangeError):
        log.read(3, max_bytes=1, end_offset=9)
    assert log.read(4, max_bytes=1, end_offset=9)[0].header.base_offset == 3
    log.close(clean=False)
    assert open_log(tmp_path, StartKind.PROCESS_CRASH).log_start_offset == 4


def test_retention_goes_by_append_time_and_spares_what_is_not_committed(tmp_path: Path) -> None:
    log = open_log(tmp_path, config=LogConfig(retention_ms=1000))
    for time_ms in (0, 100, 5000, 5100):
        append_batch(log, append_time_ms=time_ms, roll=True, timestamp_us=0)
    assert apply_retention(log, high_watermark=12, clock=RetentionClock(1000)) == 0
    assert apply_retention(log, high_watermark=2, clock=RetentionClock(6000)) == 0
    assert log.retention_start(high_watermark=12, clock=RetentionClock(6000)) == 6
    assert apply_retention(log, high_watermark=12, clock=RetentionClock(6000)) == 6
    assert log.segment_base_offsets == (6, 9)
    log.config = LogConfig(retention_ms=1000, deletes_last_segment=False)
    assert apply_retention(log, high_watermark=12, clock=RetentionClock(10**9)) == 9, "that of a topic with a table"


@pytest.mark.parametrize("start", StartKind)
@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "killed before it is deleted"])
def test_retention_deletes_the_last_segment_when_it_is_old(start: StartKind, deleted: bool) -> None:
    """Story: the newest gigabyte of a topic whose producer had stopped was never deleted."""
    fs, directory = sim_directory()
    log = open_log(directory, config=LogConfig(retention_ms=1000), fs=fs)
    for time_ms in (0, 100):
        append_batch(log, append_time_ms=time_ms, roll=True, timestamp_us=9)
    log.flush()
    fs.on_operation = lambda operation: Fault(errno.EDQUOT) if operation.kind == "unlink" and not deleted else None
    with nullcontext() if deleted else pytest.raises(StorageFullError):
        apply_retention(log, high_watermark=6, clock=RetentionClock(2000))
    fs.on_operation = None
    assert (log.log_start_offset, log.log_end_offset, everything(log)) == (6, 6, [])
    if start is StartKind.CLEAN:
        log.close(clean=True)
    fs = fs.crash_machine_keeping(0) if start is StartKind.MACHINE_CRASH else fs.crash_process()
    log = open_log(directory, start, fs=fs)
    assert (log.log_start_offset, log.log_end_offset, everything(log)) == (6, 6, [])
    log.advance_log_start(6)
    assert not [name for name in fs.list_directory(directory) if name.endswith((".arrow", ".index"))]
    added = append_batch(log, roll=True, timestamp_us=1)
    assert same(everything(log), [added])
    log.close(clean=False)
    assert same(everything(open_log(directory, StartKind.PROCESS_CRASH, fs=fs.crash_process())), [added])


@pytest.mark.parametrize("kind", ["rename", "unlink"])
def test_what_retention_could_not_delete_is_deleted_by_the_next_run(kind: str) -> None:
    """Story: a quota refused it once, and the room was not free before the next start of the broker."""
    fs, directory = sim_directory()
    log, frames = filled(directory, [True] * 4, fs=fs)
    fs.on_operation = lambda operation: Fault(errno.EDQUOT) if operation.kind == kind else None
    with pytest.raises(StorageFullError) if kind == "unlink" else nullcontext():  # It needs no name of its own.
        log.advance_log_start(6)
    fs.on_operation = None
    assert same(everything(log), frames[2:])
    log.advance_log_start(6)
    assert {name.split(".")[0] for name in fs.list_directory(directory) if name.endswith((".arrow", ".index"))} == {
        f"{base:020d}" for base in (6, 9)
    }
    append_batch(log, roll=True)
    log.truncate_fully_and_start_at(0)
    added = append_batch(log)
    assert same(everything(open_log(directory, StartKind.PROCESS_CRASH, fs=fs.crash_process())), [added])


def test_retention_by_size_keeps_at_least_that_many_bytes(tmp_path: Path) -> None:
    log, _ = filled(tmp_path, [True] * 5)
    segment_bytes = log.size_bytes // 5
    log.config = LogConfig(retention_bytes=2 * segment_bytes, retention_ms=-1)
    assert apply_retention(log, high_watermark=15, clock=RetentionClock(0)) == 9
    log.config = LogConfig(retention_bytes=0, retention_ms=-1)
    assert apply_retention(log, high_watermark=15, clock=RetentionClock(0)) == 12


def test_flush_messages_syncs_before_append_returns(tmp_path: Path) -> None:
    log = open_log(tmp_path, config=LogConfig(flush_messages=6))
    append_batch(log)
    assert log.recovery_point == 0
    append_batch(log)
    assert log.recovery_point == 6


def test_the_indexes_of_all_logs_share_one_bound_of_memory(tmp_path: Path) -> None:
    """Story: each log kept four. A job that read 2,000 partitions once left a broker with gigabytes of them."""
    indexes = LoadedIndexes(bytes_max=5 * ENTRY_BYTES)
    logs: list[PartitionLog] = []
    loaded: list[Segment] = []
    for number in range(10):
        directory = tmp_path / str(number)
        directory.mkdir()
        log, frames = filled(directory, [True] * 4)
        log.close(clean=True)
        logs.append(PartitionLog.open(directory, LogConfig(), schema_message, start=StartKind.CLEAN, indexes=indexes))
        assert same(everything(logs[-1]), frames)
        loaded = [segment for log in logs for segment in log._segments if segment.sealed and segment.loaded]
        assert len(loaded) == min(5, 3 * len(logs)) == indexes.bytes // ENTRY_BYTES
    assert set(logs[-1]._segments[:-1]) < set(loaded), "those that were read last"


def test_the_index_of_a_segment_that_is_gone_is_gone(tmp_path: Path) -> None:
    """Story: what compaction had replaced, and the segments of deleted topics, stayed until the bound was reached."""
    indexes = LoadedIndexes()
    log, _ = filled(tmp_path, [True] * 4)
    log.close(clean=True)
    log = PartitionLog.open(tmp_path, LogConfig(), schema_message, start=StartKind.CLEAN, indexes=indexes)
    everything(log)
    assert indexes.bytes == 3 * ENTRY_BYTES
    log.advance_log_start(log.log_end_offset)
    gc.collect()
    assert indexes.bytes == 0


@pytest.mark.parametrize(
    ("roll", "failing_write"),
    [(False, 1), (False, 2), (True, 1), (True, 2), (True, 3), (True, 4)],
    ids=["message", "entry", "end of stream", "log state", "new segment", "new index"],
)
@pytest.mark.parametrize("kept_bytes", [0, 1, 7, 79])
def test_a_full_disk_refuses_the_append_and_the_log_goes_on(roll: bool, failing_write: int, kept_bytes: int) -> None:
    fs, directory = sim_directory()
    log, frames = filled(directory, [False, False], fs=fs)
    before = _sizes(fs, directory)
    doomed = make_frame(6, first=roll)
    writes = 0

    def fill_up(operation: Operation) -> Fault | None:
        nonlocal writes
        writes += operation.kind == "pwritev"
        if operation.kind != "pwritev" or writes < failing_write:
            return None
        return Fault(kept_bytes=kept_bytes) if writes == failing_write and kept_bytes else Fault(errno.ENOSPC)

    fs.on_operation = fill_up
    with pytest.raises(StorageFullError):
        log.append(doomed.header, doomed.message)
    fs.on_operation = None
    assert same(everything(log), frames)
    ends_with_mark = 8 if roll and (failing_write > 1 or kept_bytes >= 8) else 0
    first = "00000000000000000000.arrow"
    assert _sizes(fs, directory) == {**before, first: before[first] + ends_with_mark}
    frames.append(append_batch(log))
    assert same(everything(log), frames)
    again = open_log(directory, StartKind.PROCESS_CRASH, fs=fs.crash_process())
    assert same(everything(again), frames)


@pytest.mark.parametrize("roll", [False, True])
@pytest.mark.parametrize("free_bytes", [300, 500, 900])
def test_a_refused_batch_never_comes_back(roll: bool, free_bytes: int) -> None:
    """The machine crashes later and may lose the truncation: the batch must not replace a later one."""
    fs, directory = sim_directory()
    log, _ = filled(directory, [False], fs=fs)
    refused = make_frame(3, 12, first=roll, value=0)
    fs.capacity_bytes = fs.used_bytes + free_bytes
    with pytest.raises(StorageFullError):
        log.append_many([refused, make_frame(15, 12, value=0)])
    fs.capacity_bytes = None
    append_batch(log, value=1)
    for kept in range(1 << fs.unsynced_changes):
        again = open_log(directory, StartKind.MACHINE_CRASH, fs=fs.copy().crash_machine_keeping(kept))
        assert all(bytes(frame.message) != refused.message for frame in everything(again))


def _sizes(fs: SimFileSystem, directory: Path) -> dict[str, int]:
    return {name: fs.size_of(directory / name) for name in fs.list_directory(directory) if name.startswith("0")}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])  # Also a full disk is fatal here.
def test_a_failed_fsync_is_never_tried_again(error: int) -> None:
    fs, directory = sim_directory()
    log, _ = filled(directory, [False], fs=fs)
    fs.fail_next("fsync", error)
    with pytest.raises(KafkaStorageError):
        log.flush()
    for action in (
        log.flush,
        lambda: append_batch(log),
        lambda: log.read(0, max_bytes=1, end_offset=3),
        lambda: log.truncate_to(0),
    ):
        with pytest.raises(KafkaStorageError):
            action()
    assert log.recovery_point == 0


def test_a_broken_disk_takes_the_log_out_of_use() -> None:
    fs, directory = sim_directory()
    log, _ = filled(directory, [False], fs=fs)
    fs.fail_next("pwritev", errno.EIO)
    with pytest.raises(KafkaStorageError):
        append_batch(log)
    with pytest.raises(KafkaStorageError):
        append_batch(log)


def test_a_flipped_bit_is_found_when_the_batch_is_read(tmp_path: Path) -> None:
    log, frames = filled(tmp_path, [False, False, False])
    path = tmp_path / "00000000000000000000.arrow"
    data = bytearray(path.read_bytes())
    data[-len(frames[0].message) - 4] ^= 1  # In the batch before the last.
    path.write_bytes(data)
    assert same(log.read(0, max_bytes=1, end_offset=9), frames[:1])
    with pytest.raises(DamagedLogError):
        log.read(3, max_bytes=1, end_offset=9)


@pytest.fixture
def _quick_switches() -> Iterator[None]:
    """Threads take turns every 0.1 ms: more interleavings in less time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_quick_switches")
def test_readers_beside_appends_rolls_and_retention_see_only_whole_right_batches(tmp_path: Path) -> None:
    log = open_log(tmp_path, config=LogConfig(retention_bytes=20_000, retention_ms=-1))
    append_batch(log)
    stop = threading.Event()
    errors: list[BaseException] = []
    reads = [0, 0]

    def reader(number: int) -> None:
        try:
            while not stop.is_set():
                end = log.log_end_offset
                try:
                    frames = log.read(log.log_start_offset, max_bytes=5000, end_offset=end)
                except OffsetOutOfRangeError:
                    continue  # Retention was quicker.
                assert frames
                assert [f.header for f in frames] == [
                    f.header for f in sorted(frames, key=lambda f: f.header.base_offset)
                ]
                log.offset_for_timestamp(0)
                reads[number] += 1
        except BaseException as error:  # noqa: BLE001  a thread's error is the test's
            errors.append(error)

    threads = [threading.Thread(target=reader, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for number in range(150):
        append_batch(log, roll=number % 7 == 0)
        if number % 10 == 0:
            apply_retention(log, high_watermark=log.log_end_offset, clock=RetentionClock(0))
    stop.set()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert all(reads)
    assert log.log_start_offset > 0


@pytest.mark.usefixtures("_quick_switches")
def test_a_reader_beside_truncations_never_gets_bytes_that_are_not_the_batch(tmp_path: Path) -> None:
    """Other bytes replace a truncated tail again and again, but every frame that is read passes its CRC."""
    log = open_log(tmp_path)
    for _ in range(10):
        append_batch(log, leader_epoch=0, value=0)
    stop = threading.Event()
    errors: list[BaseException] = []
    seen: set[int] = set()

    def reader() -> None:
        try:
            while not stop.is_set():
                for frame in log.read(0, max_bytes=1 << 20, end_offset=log.log_end_offset):
                    seen.add(frame.header.leader_epoch)
        except BaseException as error:  # noqa: BLE001  a thread's error is the test's
            errors.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    for epoch in range(1, 15):
        log.truncate_to(3 * (epoch % 7))
        for number in range(6):
            append_batch(log, leader_epoch=epoch, value=epoch, roll=number % 3 == 2)
    stop.set()
    thread.join(30)
    assert errors == []
    assert len(seen) > 1
