"""The comparison of replicas on disk accepts equal ones and finds every way in which two can differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_broker.errors import DamagedLogError, InvalidDataError
from spark_broker.model import TopicPartition
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.segment import segment_paths
from spark_broker.testing.replicas import compare_replicas, find_replicas, stored_values
from tests.storage.logs import append_batch, open_log

T0 = TopicPartition("t", 0)


def make_replica(log_dirs: Path, broker: int, write: Callable[[PartitionLog], object]) -> Path:
    """A replica of `t-0` in a log directory of its own; returns the partition's directory."""
    directory = LogDirectory.claim(log_dirs, cluster_id="c", launch=broker)
    directory.update(broker_id=broker)
    path = directory.partition_directory("t", "id", 0)
    log = open_log(path)
    write(log)
    log.close(clean=True)
    return path


def three_batches(log: PartitionLog) -> None:
    """Append offsets 0 to 8; a segment begins at 6."""
    for roll in (False, False, True):
        append_batch(log, roll=roll)


def test_replicas_with_the_same_batches_do_not_differ(tmp_path: Path) -> None:
    for broker in (4, 7):
        make_replica(tmp_path, broker, three_batches)

    assert [replica.broker_id for replica in find_replicas(tmp_path, T0)] == [4, 7]
    assert compare_replicas(tmp_path, T0, [4, 7], up_to_offset=9) == ()


def test_what_lies_above_the_high_watermark_may_differ(tmp_path: Path) -> None:
    make_replica(tmp_path, 0, three_batches)
    make_replica(tmp_path, 1, lambda log: [append_batch(log, roll=at == 2) for at in range(4)])

    assert compare_replicas(tmp_path, T0, [0, 1], up_to_offset=9) == ()


def test_a_missing_batch_is_found(tmp_path: Path) -> None:
    make_replica(tmp_path, 0, three_batches)
    make_replica(tmp_path, 1, lambda log: (append_batch(log), append_batch(log)))

    (difference,) = compare_replicas(tmp_path, T0, [0, 1], up_to_offset=9)
    assert (difference.offset, difference.detail) == (6, "broker 1 lacks the batch")


def test_a_batch_that_both_replicas_lack_is_found(tmp_path: Path) -> None:
    for broker in (0, 1):
        make_replica(tmp_path, broker, three_batches)

    assert [d.offset for d in compare_replicas(tmp_path, T0, [0, 1], up_to_offset=12)] == [12]


def test_other_rows_at_the_same_offsets_are_found(tmp_path: Path) -> None:
    make_replica(tmp_path, 0, append_batch)
    make_replica(tmp_path, 1, lambda log: append_batch(log, value=5))

    (difference,) = compare_replicas(tmp_path, T0, [0, 1], up_to_offset=3)
    assert str(difference) == "t-0, offset 0: brokers 0 and 1 differ in the entry's message_crc"


def test_another_leader_epoch_of_the_same_rows_is_found(tmp_path: Path) -> None:
    make_replica(tmp_path, 0, append_batch)
    make_replica(tmp_path, 1, lambda log: append_batch(log, leader_epoch=3))

    (difference,) = compare_replicas(tmp_path, T0, [0, 1], up_to_offset=3)
    assert "leader_epoch" in difference.detail


def test_another_place_of_the_roll_is_found(tmp_path: Path) -> None:
    make_replica(tmp_path, 0, three_batches)
    make_replica(tmp_path, 1, lambda log: [append_batch(log, roll=roll) for roll in (False, True, False)])

    details = [difference.detail for difference in compare_replicas(tmp_path, T0, [0, 1], up_to_offset=9)]
    assert "brokers 0 and 1 have rolled at different offsets" in details


def test_a_broker_without_the_replica_is_found(tmp_path: Path) -> None:
    make_replica(tmp_path, 0, three_batches)

    (difference,) = compare_replicas(tmp_path, T0, [0, 1], up_to_offset=9)
    assert difference.detail == "broker 1 has no replica"


def test_a_changed_byte_is_damage(tmp_path: Path) -> None:
    path = make_replica(tmp_path, 0, three_batches)
    arrow, _ = segment_paths(path, 6)
    data = bytearray(arrow.read_bytes())
    data[-20] ^= 1
    arrow.write_bytes(data)

    with pytest.raises(DamagedLogError, match="offset 6 fails its CRC"):
        compare_replicas(tmp_path, T0, [0], up_to_offset=9)


def test_stored_values_are_of_the_named_column_and_binary(tmp_path: Path) -> None:
    make_replica(tmp_path, 0, three_batches)
    (replica,) = find_replicas(tmp_path, T0)

    with pytest.raises(InvalidDataError, match="not binary"):
        list(stored_values(replica, "n", 9))
