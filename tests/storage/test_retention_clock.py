"""Retention goes by the leader's own clock; what another leader appended is kept longer by the possible skew."""

from __future__ import annotations

from pathlib import Path

from spark_broker.storage.config import LogConfig
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.retention import RetentionClock
from tests.storage.logs import make_frame, open_log


def log_of_epochs(directory: Path, *epochs: int) -> PartitionLog:
    """One segment of three offsets for each leader epoch, and a last one, appended at seconds 1, 2, 3 and so on."""
    log = open_log(directory, config=LogConfig(retention_ms=1000))
    for number, epoch in enumerate((*epochs, epochs[-1])):
        append_time_ms = 1000 * (number + 1)
        frame = make_frame(3 * number, append_time_ms=append_time_ms, leader_epoch=epoch, first=number > 0)
        log.append_many([frame])
    return log


def test_what_another_leader_appended_is_kept_for_the_skew_of_its_clock(tmp_path: Path) -> None:
    log = log_of_epochs(tmp_path, 4, 4)

    def start(now_ms: int) -> int:
        return log.retention_start(high_watermark=9, clock=RetentionClock(now_ms, leader_epoch=5, skew_max_ms=500))

    assert [start(2001), start(2500), start(2501), start(3500), start(3501)] == [0, 0, 3, 3, 6]


def test_what_this_leader_appended_goes_by_its_own_clock(tmp_path: Path) -> None:
    log = log_of_epochs(tmp_path, 5, 5)
    clock = RetentionClock(2001, leader_epoch=5, skew_max_ms=500)
    assert log.retention_start(high_watermark=9, clock=clock) == 3


def test_a_retention_that_is_shorter_than_the_skew_deletes_later(tmp_path: Path) -> None:
    log = log_of_epochs(tmp_path, 4, 4)
    late = RetentionClock(61_000, leader_epoch=5, skew_max_ms=60_000)
    assert log.retention_start(high_watermark=9, clock=late) == 0
    later = RetentionClock(62_001, leader_epoch=5, skew_max_ms=60_000)
    assert log.retention_start(high_watermark=9, clock=later) == 3


def test_the_size_of_a_partition_needs_no_clock(tmp_path: Path) -> None:
    log = log_of_epochs(tmp_path, 4, 4)
    log.config = LogConfig(retention_ms=-1, retention_bytes=0)
    clock = RetentionClock(0, leader_epoch=5, skew_max_ms=60_000)
    assert log.retention_start(high_watermark=9, clock=clock) == 6
