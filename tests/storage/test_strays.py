"""Replicas that are set aside: their names, how old they are, and what their files say."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from spark_broker.controller.lineage import NewestBatch
from spark_broker.errors import DamagedLogError, ProcessLimitError
from spark_broker.model import FILE_NAME_BYTES_MAX, NAME_MAX
from spark_broker.storage.checkpoints import write_leader_epochs
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.directory_names import PartitionDirectory, PartitionName, read_partition
from spark_broker.storage.filesystem import FileSystem
from spark_broker.storage.strays import newest_batch, set_aside_ms, stray_suffix, strays_in

NOW_MS = 1_795_693_500_123


def test_the_name_says_since_when() -> None:
    name = f"t-0{stray_suffix(NOW_MS, certain=True)}"
    assert name == "t-0.20261126T114500123000Z.stray"
    assert set_aside_ms(name) == NOW_MS
    for other in ("t-0", "t-0.stray", "t-0.20261399T114500123000Z.stray", "t-0.0.damaged"):
        assert set_aside_ms(other) is None


@pytest.mark.parametrize("topic", ["t", "t" * NAME_MAX])
def test_a_replica_that_is_set_aside_is_found_again_and_no_partition(tmp_path: Path, topic: str) -> None:
    directory = LogDirectory.claim(tmp_path, cluster_id="c", launch=1)
    directory.partition_directory(topic, "id", 0)
    directory.partition_directory(topic, "id", 1)
    names = [PartitionName(topic, number, "id") for number in (0, 2)]
    (path,), kept = directory.set_aside(names, NOW_MS, certain=True)
    assert not kept
    assert len(path.name) <= FILE_NAME_BYTES_MAX
    assert [found.partition for found in directory.list_partitions()] == [1]
    (stray,) = strays_in(directory.path)
    assert (stray.replica.topic, stray.replica.partition, stray.since_ms) == (topic, 0, NOW_MS)
    assert directory.strays() == [stray]
    assert not directory.unnamed()
    doomed = directory.unname_stray(stray)
    assert directory.unnamed() == [doomed]
    assert not directory.strays()
    directory.release()


def test_one_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = LogDirectory.claim(tmp_path, cluster_id="c", launch=1)
    for number in (0, 1):
        directory.partition_directory("t", "id", number)
    directory.set_aside([PartitionName("t", number, "id") for number in (0, 1)], NOW_MS, certain=True)
    error = errno.EIO

    def fails(path: Path, *, fs: FileSystem) -> PartitionDirectory | None:
        if path.name.startswith("t-0"):
            raise OSError(error, os.strerror(error), str(path))
        return read_partition(path, fs=fs)

    monkeypatch.setattr("spark_broker.storage.strays.read_partition", fails)
    assert [stray.replica.partition for stray in directory.strays()] == [1]
    error = errno.EMFILE
    with pytest.raises(ProcessLimitError):
        directory.strays()
    directory.release()


def test_a_replica_without_batches_is_empty(tmp_path: Path) -> None:
    assert newest_batch(tmp_path) == NewestBatch(-1, is_empty=True)
    write_leader_epochs(tmp_path, [(3, 0)])
    assert newest_batch(tmp_path) == NewestBatch(3, is_empty=True)
    (tmp_path / "00000000000000000000.arrow").write_bytes(b"a schema")
    assert newest_batch(tmp_path) == NewestBatch(3, is_empty=False)


def test_an_entry_that_cannot_be_read_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "00000000000000000000.index").write_bytes(bytes(80))
    with pytest.raises(DamagedLogError):
        newest_batch(tmp_path)
