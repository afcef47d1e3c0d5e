"""The comparison of compacted replicas accepts what compaction may do, and finds what it may not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spark_broker.core.compaction import Cleaned
from spark_broker.errors import DamagedLogError
from spark_broker.model import TopicPartition
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.filesystem import LocalFileSystem
from spark_broker.storage.segment import segment_paths
from spark_broker.storage.segment_swap import CLEANED_SUFFIX, swap_segments, write_cleaned, write_compacted
from spark_broker.testing import compacted_replicas
from spark_broker.testing.compacted_replicas import compacted_batches, compare_compacted_replicas
from spark_broker.testing.replicas import ReplicaDirectory, find_replicas
from tests.storage.keyed_logs import keyed_frame, keyed_log, marker_frame, only

T0 = TopicPartition("t", 0)
FIRST = keyed_frame(0, (b"a", b"1"), (b"b", b"2"), first=True)
SECOND = keyed_frame(2, (b"a", b"3"), (b"c", b"4"))
THIRD = keyed_frame(4, (b"c", None), (b"d", b"5"))
END = 6


def details(tmp_path: Path, *replicas: Sequence[Frame], up_to_offset: int = END) -> list[str]:
    """What is found about replicas with these batches, on brokers 0, 1, ..."""
    for broker, frames in enumerate(replicas):
        directory = LogDirectory.claim(tmp_path, cluster_id="c", launch=broker)
        directory.update(broker_id=broker)
        keyed_log(directory.partition_directory("t", "id", 0), frames).close(clean=True)
    found = compare_compacted_replicas(tmp_path, T0, list(range(len(replicas))), up_to_offset=up_to_offset)
    return [difference.detail for difference in found]


def test_a_replica_that_was_compacted_does_not_differ_from_one_that_was_not(tmp_path: Path) -> None:
    whole = [FIRST, SECOND, THIRD]
    compacted = [only(FIRST, [1]), only(SECOND, [0]), THIRD]
    purged = [only(FIRST, [1]), only(SECOND, [0]), only(THIRD, [1])]
    assert details(tmp_path, whole, compacted, purged) == []


def test_a_lost_last_record_of_a_key_is_found(tmp_path: Path) -> None:
    (detail,) = details(tmp_path, [FIRST, SECOND, THIRD], [only(FIRST, [0]), SECOND, THIRD])
    assert detail.startswith("brokers 0 and 1 differ in the last record of key b'b'")


def test_a_deleted_key_that_came_back_is_found(tmp_path: Path) -> None:
    (detail,) = details(tmp_path, [FIRST, SECOND, THIRD], [FIRST, SECOND, only(THIRD, [1])])
    assert "the last record of key b'c': None and (3, b'4')" in detail


def test_another_record_at_the_same_offset_is_found(tmp_path: Path) -> None:
    other = keyed_frame(2, (b"a", b"x"), (b"c", b"4"))
    found = details(tmp_path, [FIRST, SECOND, THIRD], [FIRST, other, THIRD])
    assert "the record: " in found[0]
    assert "last record of key b'a'" in found[1]


def test_a_missing_segment_is_found(tmp_path: Path) -> None:
    segments = [keyed_frame(at, (b"k%d" % at, b"v"), first=True) for at in range(3)]
    assert details(tmp_path, segments, segments, up_to_offset=3) == []
    replica = find_replicas(tmp_path, T0)[1]
    for path in segment_paths(replica.path, 1):
        path.unlink()
    found = compare_compacted_replicas(tmp_path, T0, [0, 1], up_to_offset=3)
    assert (found[0].offset, found[0].detail) == (1, "broker 1 has a hole")


def test_a_replica_that_ends_before_the_high_watermark_is_found(tmp_path: Path) -> None:
    assert "broker 1's replica ends there" in details(tmp_path, [FIRST, SECOND, THIRD], [FIRST, SECOND])


@pytest.mark.parametrize("committed", [True, False])
def test_records_of_an_aborted_transaction_do_not_count(tmp_path: Path, committed: bool) -> None:
    """One replica has the records and the marker, the other one lacks the records."""
    begun = keyed_frame(2, (b"b", b"open"), pid=7, sequence=0, txn=True)
    ended = marker_frame(3, 7, committed=committed)
    found = details(tmp_path, [FIRST, begun, ended], [FIRST, only(begun, []), ended], up_to_offset=4)
    assert bool(found) is committed


def test_what_lies_above_the_high_watermark_does_not_count(tmp_path: Path) -> None:
    other = keyed_frame(4, (b"a", b"uncommitted"), (b"d", b"6"))
    assert details(tmp_path, [FIRST, SECOND, THIRD], [FIRST, SECOND, other], up_to_offset=4) == []


def test_a_broker_without_the_replica_is_found(tmp_path: Path) -> None:
    details(tmp_path, [FIRST, SECOND, THIRD])
    found = compare_compacted_replicas(tmp_path, T0, [0, 5], up_to_offset=END)
    assert [difference.detail for difference in found] == ["broker 5 has no replica"]


class SlowInASwap(LocalFileSystem):
    """The sync between the two names that a swap gives waits for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.held_up = threading.Event()

    def sync_directory(self, path: Path) -> None:
        if any(path.glob("*.arrow" + CLEANED_SUFFIX)) and not any(path.glob("*.index" + CLEANED_SUFFIX)):
            self.held_up.set()
            assert self.gate.wait(20)
        super().sync_directory(path)


def test_a_read_that_meets_a_slow_swap_waits_for_its_end(tmp_path: Path) -> None:
    """Story: on a busy disk the sync took so long that ten reads found the new index beside the old batches."""
    log = keyed_log(tmp_path, [FIRST, keyed_frame(2, (b"b", b"v"), first=True)])
    left, fs = [only(FIRST, [0])], SlowInASwap()
    compacted = write_compacted(fs, tmp_path, 0, schema_to_bytes(DEFAULT_SCHEMA), [left])
    replica = ReplicaDirectory(0, T0, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        write_cleaned(fs, tmp_path, Cleaned(), [segment.base_offset for segment in log.sealed_below(2)])
        swapped = pool.submit(swap_segments, fs, tmp_path, compacted)
        assert fs.held_up.wait(20)
        read = pool.submit(compacted_batches, replica, END)
        with pytest.raises(TimeoutError):
            read.result(0.3)
        fs.gate.set()
        assert [frame.header.row_count for frame in read.result(20)] == [1, 1]
        swapped.result(20)
    log.close(clean=False)


def test_a_swap_that_ends_while_a_failed_read_looks_for_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the files were compared before the swap's end, and the swap was looked for after it."""
    log = keyed_log(tmp_path, [FIRST, keyed_frame(2, (b"b", b"v"), first=True)])
    left, fs = [only(FIRST, [0])], SlowInASwap()
    compacted = write_compacted(fs, tmp_path, 0, schema_to_bytes(DEFAULT_SCHEMA), [left])
    looks = itertools.count()

    def finish_the_swap_after_the_first(look: Callable[..., object]) -> Callable[..., object]:
        def looked(*arguments: object) -> object:
            seen = look(*arguments)
            if next(looks) == 1:  # before the read: 0
                fs.gate.set()
                swapped.result(20)
            return seen

        return looked

    with ThreadPoolExecutor(1) as pool:
        write_cleaned(fs, tmp_path, Cleaned(), [segment.base_offset for segment in log.sealed_below(2)])
        swapped = pool.submit(swap_segments, fs, tmp_path, compacted)
        assert fs.held_up.wait(20)
        for name in ("_files", "unfinished_swap"):
            monkeypatch.setattr(
                compacted_replicas, name, finish_the_swap_after_the_first(getattr(compacted_replicas, name))
            )
        frames = compacted_batches(ReplicaDirectory(0, T0, tmp_path), END)
    assert [frame.header.row_count for frame in frames] == [1, 1]
    log.close(clean=False)


def test_a_damaged_batch_is_found_at_once(tmp_path: Path) -> None:
    keyed_log(tmp_path, [FIRST]).close(clean=True)
    arrow_path, _ = segment_paths(tmp_path, 0)
    data = bytearray(arrow_path.read_bytes())
    data[-40] ^= 1
    arrow_path.write_bytes(data)
    with pytest.raises(DamagedLogError, match="the batch at offset 0 fails its CRC"):
        compacted_batches(ReplicaDirectory(0, T0, tmp_path), END)
