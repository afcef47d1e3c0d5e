"""Which records a streaming query has lost, by what its checkpoint says and what the logs hold."""

from __future__ import annotations

import pytest

from spark_broker.model import TopicPartition
from spark_broker.spark.limits import Limits
from spark_broker.spark.stream_offset import PartitionEnd, StreamOffset
from spark_broker.spark.stream_planner import (
    LogRange,
    LossKind,
    StreamPlanner,
    end_of_batch,
    find_losses,
    limited_ends,
)

TP = TopicPartition("t", 0)


def log(end: int, last_epoch: int, position_epoch: int = -1) -> LogRange:
    return LogRange("id", 0, end, end, last_epoch, position_epoch)


def read_up_to(offset: int, end: PartitionEnd) -> StreamOffset:
    return StreamOffset({TP: offset}, {"t": "id"}, {TP: end})


@pytest.mark.parametrize(
    ("end", "position_epoch", "is_cut"),
    [
        (PartitionEnd(40, 2), 2, False),
        (PartitionEnd(40, 2), 3, True),
        (PartitionEnd(40, 2), 1, True),  # Two unclean elections: a leader from before the other one is back.
        (PartitionEnd(40, 2), -1, False),
        (PartitionEnd(50, 2), 1, False),  # The record at 39 may have had an earlier epoch than that at 49.
        (PartitionEnd(50, 2), 2, False),
        (PartitionEnd(50, 2), 3, True),
        (PartitionEnd(50, -1), 3, False),
        (PartitionEnd(30, 2), 3, False),  # With another isolation.level, the query was further than the log's end.
    ],
)
def test_a_log_was_cut_if_another_record_precedes_the_position(
    end: PartitionEnd, position_epoch: int, is_cut: bool
) -> None:
    losses = find_losses(read_up_to(40, end), {TP: log(60, 5, position_epoch)})
    assert [loss.kind for loss in losses] == ([LossKind.CUT] if is_cut else [])


@pytest.mark.parametrize(
    ("epoch", "known"),
    [
        (1, PartitionEnd(40, 1)),
        (2, PartitionEnd(40, 2)),
        (-1, PartitionEnd(50, 2)),
        (3, PartitionEnd(50, 2)),  # The log was cut between the two lookups: 40 with epoch 3 would agree with it.
    ],
)
def test_the_end_of_a_limited_batch_is_known_by_its_own_epoch(epoch: int, known: PartitionEnd) -> None:
    logs = {TP: log(50, 2)}
    assert limited_ends(logs, {TP: 40}) == {TP: 40}
    assert limited_ends(logs, {TP: 50}) == {}
    end = end_of_batch(read_up_to(0, PartitionEnd(0, -1)), logs, {TP: 40}, {TP: epoch})
    assert end.ends == {TP: known}


def test_what_was_read_stays_in_the_position_though_the_target_of_available_now_lacks_it() -> None:
    """Story: the broker that gave the target lagged behind. The checkpoint lost a topic, which was then read twice."""
    other, new = TopicPartition("u", 0), TopicPartition("v", 0)
    position = StreamOffset({TP: 40, other: 30}, {"t": "id", "u": "id"}, {})
    planner = StreamPlanner(Limits())
    planner.stop_at({TP: log(50, 2)})
    logs = planner.within_target(position, {TP: log(60, 3), other: log(70, 5, position_epoch=4), new: log(10, 0)})
    assert logs == {TP: LogRange("id", 0, 50, 60, 2), other: LogRange("id", 0, 30, 70, 4, 4)}
    end = end_of_batch(position, logs, {TP: 50, other: 30}, {})
    assert end.offsets == {TP: 50, other: 30}
    assert end.ends[other] == PartitionEnd(30, 4)
