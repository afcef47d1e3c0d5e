"""A process that dies at any step of a log's change leaves a log that opens with the producers of its batches."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.core.batch import BatchInfo, batch_info
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.producers import ProducerStates
from spark_broker.protocol.messages import ProducerStateEntry
from spark_broker.storage.filesystem import LocalFileSystem
from spark_broker.storage.start_kind import StartKind
from tests.broker.lone_partition import LonePartition
from tests.broker.test_partition_transactions import big, small

STEPS_MAX = 200


class KilledError(BaseException):
    """Not an Exception, so that no handler catches it: a SIGKILL cannot be caught."""


class DyingFileSystem(LocalFileSystem):
    """The process dies before its change number `steps` (from 0) to the disk."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def _step(self) -> None:
        if self.left == 0:
            raise KilledError
        self.left -= 1

    def pwritev(self, fd: int, views: Sequence[memoryview], position: int, /) -> int:  # type: ignore[override]
        self._step()
        return LocalFileSystem.pwritev(fd, views, position)

    def ftruncate(self, fd: int, length: int, /) -> None:
        self._step()
        LocalFileSystem.ftruncate(fd, length)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)


def retain(log: ReplicaLog) -> None:
    log.advance_log_start(6)


def retain_within_a_segment(log: ReplicaLog) -> None:
    log.advance_log_start(5)


def cut(log: ReplicaLog) -> None:
    log.truncate_to(3)


def restart(log: ReplicaLog, at: int) -> None:
    log.restart_at(at, [(0, 0)], RESTARTED)


CHANGES: dict[str, Callable[[ReplicaLog], None]] = {
    "retention": retain,
    "retention within a segment": retain_within_a_segment,
    "cut": cut,
    "restart past the end": lambda log: restart(log, 50),
    "restart within": lambda log: restart(log, 5),
    "restart at the log start": lambda log: restart(log, 2),
    "restart below the log start": lambda log: restart(log, 1),
}


RESTARTED = [ProducerStateEntry(9, 0, 1, [(0, 0, 0, 0)], 0)]
"""The producers' state before the leader's log start, as the leader reports it."""


def prepared(tmp_path: Path) -> tuple[LonePartition, list[BatchInfo]]:
    """A log of offsets 2 to 9 in segments of two batches, and all batches since 0. Half are of an open transaction."""
    lone = small(tmp_path)
    for number in range(5):
        lone.write(big(number), sequence=number, transactional=False)
    batches = [batch_info(frame.header) for frame in lone.partition.log.read(0, 1 << 20, 5)]
    lone.partition.advance_log_start(2)
    for number in range(5):
        lone.write(big(number), pid=8, sequence=number)
    batches += [batch_info(frame.header) for frame in lone.partition.log.read(5, 1 << 20, 10)]
    lone.close(clean=True)
    return lone, batches


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_log_opens_after_a_crash_at_any_step(tmp_path: Path, change: Callable[[ReplicaLog], None]) -> None:
    lone, batches = prepared(tmp_path)
    for steps in range(STEPS_MAX):
        directory = tmp_path / f"copy-{steps}"
        shutil.copytree(lone.directory, directory)
        log = ReplicaLog(directory, lone.topic, StartKind.PROCESS_CRASH, fs=DyingFileSystem(steps))
        try:
            change(log)
        except KilledError:
            check_opens(directory, lone, batches)
            continue
        check_opens(directory, lone, batches)
        assert steps > 3, "there was nothing to interrupt"
        return
    pytest.fail(f"{STEPS_MAX} steps and no end")


def check_opens(directory: Path, lone: LonePartition, batches: list[BatchInfo]) -> None:
    """For every high watermark the state is that of the batches, or the one that the leader reported."""
    log = ReplicaLog(directory, lone.topic, StartKind.PROCESS_CRASH)
    opened = log.state(high_watermark=0)
    expected = ProducerStates()
    for batch in batches:
        if batch.base_offset < opened.log_end_offset:
            expected.replay(batch)
    for high_watermark in range(opened.log_start_offset, opened.log_end_offset + 1):
        states = log.rebuild_producers(high_watermark)
        empty = opened.log_start_offset == opened.log_end_offset
        restarted = empty and log.producers_for(log._log.log_start_offset) == RESTARTED
        assert restarted or states == expected
    log.close(clean=False)


def test_a_restart_gives_batches_no_epoch_of_a_leadership_that_wrote_nothing(tmp_path: Path) -> None:
    """The replica led in epoch 1 and wrote nothing, restarted, and copied the rest of epoch 0 from the next leader."""
    leader = small(tmp_path)
    for number in range(2):
        leader.write(big(number), sequence=number, transactional=False)
    copied = leader.partition.log.read(1, 1 << 20, 2)
    leader.partition.log.truncate_to(1)
    leader.partition.log.save_epochs(EpochHistory.from_pairs([(0, 0), (1, 1)]))
    leader.close(clean=True)

    follower = ReplicaLog(leader.directory, leader.topic, StartKind.CLEAN)
    opened = follower.state(high_watermark=1)
    assert opened.epochs.to_pairs() == [(0, 0)]
    follower.append(copied, opened.producers)
    follower.close(clean=False)

    again = ReplicaLog(leader.directory, leader.topic, StartKind.PROCESS_CRASH).state(high_watermark=1)
    assert (again.epochs.to_pairs(), again.log_end_offset) == ([(0, 0)], 2)
