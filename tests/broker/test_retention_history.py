"""Of a topic with a Delta table, retention deletes only what is in the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spark_broker.config import TopicConfig
from spark_broker.controller.topic_history import TopicHistory
from spark_broker.core.replica import LeaderAndIsr
from spark_broker.storage.config import LogConfig
from tests.broker.lone_partition import BIG, LonePartition

DAY_MS = 86_400_000
VALUES = 6
PER_SEGMENT = 2


def filled(directory: Path, **config: str) -> LonePartition:
    """A partition in which two values fill a segment. All of them are a day old."""
    lone = LonePartition(directory, {"segment.bytes": "4096", "retention.ms": "1000", "delta.path": "/lake", **config})
    for number in range(VALUES):
        lone.write(b"x" * BIG, sequence=number, transactional=False)
    lone.clock.ahead_ms = DAY_MS
    return lone


def tiered(lone: LonePartition, ends: tuple[int, ...], *, missing: bool = False) -> bool:
    """The controller says how far the history reaches. `missing`: a tierer did not find it in the table. Returns
    whether the broker applies retention now, without waiting for a run of it.
    """
    assignment = LeaderAndIsr(0, lone.leader_epoch, lone.leader_epoch, (0,), (0,))
    history = TopicHistory(starts=(0,) * len(ends), ends=ends, missing=missing)
    return lone.partition.assign(assignment, replace(lone.topic, history=history), {0: 1})


def log_start(lone: LonePartition) -> int:
    lone.partition.apply_retention()
    return lone.partition.replica.log_start_offset


def test_nothing_is_deleted_that_is_not_in_the_table(tmp_path: Path) -> None:
    lone = filled(tmp_path / "t-0")
    starts = [log_start(lone)]
    for end in range(1, VALUES + 1):
        tiered(lone, (end,))
        starts.append(log_start(lone))
    last_segment = VALUES - PER_SEGMENT
    assert starts == [min(end // PER_SEGMENT * PER_SEGMENT, last_segment) for end in range(VALUES + 1)]


def test_a_partition_that_the_history_does_not_know_keeps_everything(tmp_path: Path) -> None:
    lone = filled(tmp_path / "t-0")
    tiered(lone, ())
    assert log_start(lone) == 0


@pytest.mark.parametrize("settings", [{}, {"storage.format": "delta"}])
def test_nothing_is_deleted_while_the_table_lacks_what_was_tiered(tmp_path: Path, settings: dict[str, str]) -> None:
    """Somebody has deleted the table, or taken it back: the brokers have the last copy."""
    lone = filled(tmp_path / "t-0", **settings)
    tiered(lone, (VALUES,), missing=True)
    assert log_start(lone) == 0
    tiered(lone, (VALUES,))
    assert log_start(lone) == VALUES - PER_SEGMENT, "a run has found the history again"


def test_segments_go_as_soon_as_the_history_is_found_again(tmp_path: Path) -> None:
    lone = filled(tmp_path / "t-0", **{"storage.format": "delta"})
    tiered(lone, (VALUES,), missing=True)
    assert tiered(lone, (VALUES,)), "without a run of retention"
    assert log_start(lone) == VALUES - PER_SEGMENT
    assert not tiered(lone, (VALUES,)), "nothing new may go"


def test_what_is_in_the_table_stays_as_long_as_local_retention_says(tmp_path: Path) -> None:
    lone = filled(tmp_path / "t-0", **{"local.retention.ms": str(2 * DAY_MS)})
    tiered(lone, (VALUES,))
    assert log_start(lone) == 0
    lone.clock.ahead_ms = 3 * DAY_MS
    assert log_start(lone) > 0


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, (5, 7)),
        ({"local.retention.ms": "1", "local.retention.bytes": "2"}, (5, 7)),
        ({"delta.path": "/lake"}, (5, 7)),
        ({"delta.path": "/lake", "local.retention.ms": "1"}, (1, 7)),
        ({"delta.path": "/lake", "local.retention.ms": "-1", "local.retention.bytes": "2"}, (-1, 2)),
    ],
)
def test_local_retention_counts_where_there_is_a_table(settings: dict[str, str], limits: tuple[int, int]) -> None:
    config = LogConfig.of_topic(TopicConfig.parse({"retention.ms": "5", "retention.bytes": "7", **settings}))
    assert (config.retention_ms, config.retention_bytes) == limits
