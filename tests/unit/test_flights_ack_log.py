"""The producer job's log of acknowledgements, its pace, and what the demo reads from it."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.ack_log import Ack, AckLog, AckTail, longest_gap_s
from jobs.produce_flights import paced
from spark_broker.model import RecordMetadata


def test_what_one_process_logs_another_follows_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "acks"
    tail = AckTail(path)
    assert tail.read() == 0
    with AckLog(path) as log:
        log.add([RecordMetadata("t", 0, 0, 10), RecordMetadata("t", 1, 5, 20)])
        assert tail.read() == 30
        log.add([RecordMetadata("t", 0, 10, 1)])
        assert tail.read() == log.rows == 31
    assert [(ack.partition, ack.base_offset, ack.count) for ack in tail.acks] == [(0, 0, 10), (1, 5, 20), (0, 10, 1)]


def test_half_a_line_is_left_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "acks"
    line = b'{"time_s":1.0,"partition":0,"base_offset":0,"count":7}\n'
    path.write_bytes(line + line[:20])
    tail = AckTail(path)
    assert tail.read() == 7
    path.write_bytes(line + line)
    assert tail.read() == 14


def test_the_longest_gap_is_between_acknowledgements_that_follow_each_other() -> None:
    acks = [Ack(time_s, 0, 0, 1) for time_s in (5.0, 1.0, 2.0, 5.5)]
    assert longest_gap_s(acks) == 3.0
    assert longest_gap_s(acks[:1]) == longest_gap_s([]) == 0.0


def test_a_log_without_a_file_still_counts() -> None:
    log = AckLog()
    log.add([RecordMetadata("t", 0, 0, 3)])
    assert (log.rows, log.longest_gap_s()) == (3, 0.0)


@pytest.mark.parametrize("rate", [0.0, 1e9])
def test_batches_keep_the_order_of_the_rows(rate: float) -> None:
    table = pa.table({"n": range(25)})
    batches = list(paced(table, 10, rate, threading.Event()))
    assert [batch.num_rows for batch in batches] == [10, 10, 5]
    assert pa.Table.from_batches(batches).equals(table)


def test_a_stop_ends_the_wait_for_the_next_batch() -> None:
    stop = threading.Event()
    batches = paced(pa.table({"n": range(25)}), 10, 1e-6, stop)
    next(batches)
    stop.set()
    assert list(batches) == []
