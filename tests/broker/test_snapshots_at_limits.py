"""A producer snapshot whose last step is refused is there all the same, and goes with what it is about."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from spark_broker.errors import ProcessLimitError
from spark_broker.storage.filesystem import LocalFileSystem
from tests.broker.lone_partition import BIG, LonePartition


class WithoutDescriptors(LocalFileSystem):
    """Once a snapshot has its name, no directory can be opened to sync that, for a while."""

    def __init__(self) -> None:
        self.refusing = self.refused = False

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.refusing = self.refusing or (target.suffix == ".snapshot" and not self.refused)

    def sync_directory(self, path: Path) -> None:
        if self.refusing:
            self.refusing, self.refused = False, True
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        super().sync_directory(path)


def test_a_snapshot_that_was_refused_in_its_last_step_goes_when_the_log_is_cut(tmp_path: Path) -> None:
    """Story: a broker without descriptors did not know of a snapshot that was there. The log was cut below it, other
    batches followed, and after the next start their producers were those of the snapshot.
    """
    fs = WithoutDescriptors()
    lone = LonePartition(tmp_path / "p-0", {"segment.bytes": "4096"}, fs=fs)
    for sequence in range(2):
        lone.write(bytes(BIG), sequence=sequence, transactional=False)
    with pytest.raises(ProcessLimitError):
        lone.write(bytes(BIG), sequence=2, transactional=False)
    assert lone.snapshots() == [2]
    lone.partition.log.truncate_to(1)
    assert lone.snapshots() == []


def test_a_snapshot_that_was_refused_in_its_last_step_is_written_again(tmp_path: Path) -> None:
    lone = LonePartition(tmp_path / "p-0", {"segment.bytes": "4096"}, fs=WithoutDescriptors())
    refused = 0
    for sequence in range(6):
        try:
            lone.write(bytes(BIG), sequence=sequence, transactional=False)
        except ProcessLimitError:
            refused += 1
            lone.write(bytes(BIG), sequence=sequence, transactional=False)
    assert refused == 1
    assert lone.snapshots() == lone.segments()[1:]
