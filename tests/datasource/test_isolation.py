"""A DataFrame has the records of committed transactions, all of those and no others, whatever lies between."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_broker import Producer
from spark_broker.errors import InvalidConfigError, OffsetOutOfRangeError
from tests.client.fake_broker import APPEND_TIME_MS, FakeCluster
from tests.conftest import WaitUntil
from tests.datasource.conftest import MakeRead, MakeStream
from tests.datasource.test_planning import SCHEMA, numbers

WAIT_S = 30.0


@pytest.fixture
def undecided(cluster: FakeCluster) -> Iterator[FakeCluster]:
    """t-0: 0 to 9 committed (marker 10), 11 to 20 aborted (marker 21), 22 to 31 open, 32 plain."""
    cluster.create("t", 1, schema=SCHEMA)
    with Producer(cluster.bootstrap, transactional_id="x") as producer:
        with producer.transaction():
            producer.append("t", numbers(*range(10)))
        producer.begin_transaction()
        producer.append("t", numbers(*range(100, 110))).result(WAIT_S)
        producer.abort_transaction()
        producer.begin_transaction()
        producer.append("t", numbers(*range(200, 210))).result(WAIT_S)
        cluster.store("t", 0, numbers(300))
        yield cluster


def test_committed_records_come_by_default_and_the_range_ends_past_the_last_marker(
    undecided: FakeCluster, read: MakeRead
) -> None:
    query = read(subscribe="t")
    ((part, _),) = (part for partition in query.partitions for part in partition.value.parts)
    assert (part.start, part.end) == (0, 22)
    began_s = time.monotonic()
    rows = query.table()
    assert time.monotonic() - began_s < 10
    assert rows["n"].to_pylist() == list(range(10))
    assert rows["_offset"].to_pylist() == list(range(10))


@pytest.mark.parametrize("option", ["isolation.level", "kafka.isolation.level"])
def test_read_uncommitted_has_everything_up_to_the_high_watermark(
    undecided: FakeCluster, read: MakeRead, option: str
) -> None:
    rows = read(subscribe="t", **{option: "read_uncommitted"}).table()
    assert rows["n"].to_pylist() == [*range(10), *range(100, 110), *range(200, 210), 300]
    assert rows["_offset"].to_pylist() == [*range(10), *range(11, 21), *range(22, 32), 32]


def test_an_unknown_isolation_level_is_named(undecided: FakeCluster, read: MakeRead) -> None:
    with pytest.raises(InvalidConfigError, match=r"isolation\.level"):
        read(subscribe="t", **{"isolation.level": "serializable"})


@pytest.mark.parametrize("start", [10, 11, 15, 21])
def test_a_range_of_nothing_but_what_is_left_out_ends(undecided: FakeCluster, read: MakeRead, start: int) -> None:
    query = read(subscribe="t", startingOffsets=json.dumps({"t": {"0": start}}))
    assert len(query.partitions) == 1
    assert query.table().num_rows == 0


def test_ranges_that_are_cut_inside_of_a_gap_lose_nothing_and_read_nothing_twice(
    undecided: FakeCluster, read: MakeRead
) -> None:
    query = read(subscribe="t", minPartitions="22")
    assert len(query.partitions) == 22
    assert query.table()["n"].to_pylist() == list(range(10))


def test_an_end_behind_the_last_stable_offset_is_an_error_unless_loss_is_accepted(
    undecided: FakeCluster, read: MakeRead
) -> None:
    options = {"subscribe": "t", "endingOffsets": '{"t":{"0":33}}'}
    with pytest.raises(OffsetOutOfRangeError, match="a transaction from 22 on is not decided yet"):
        read(**options)
    assert read(**options, failOnDataLoss="false").table()["n"].to_pylist() == list(range(10))
    assert read(**options, **{"isolation.level": "read_uncommitted"}).table().num_rows == 31


def test_times_end_at_the_last_stable_offset_too(undecided: FakeCluster, read: MakeRead) -> None:
    rows = read(subscribe="t", endingTimestamp=str(APPEND_TIME_MS + 1)).table()
    assert rows["n"].to_pylist() == list(range(10))


def test_what_is_decided_after_the_plan_belongs_to_the_next_read(undecided: FakeCluster, read: MakeRead) -> None:
    planned = read(subscribe="t")
    undecided.transactions.time_out("x")
    assert planned.table()["n"].to_pylist() == list(range(10))
    assert read(subscribe="t").table()["n"].to_pylist() == [*range(10), 300]


def test_a_last_stable_offset_that_a_new_leader_has_yet_to_reach_is_waited_for(
    undecided: FakeCluster, read: MakeRead, wait_until: WaitUntil
) -> None:
    query = read(subscribe="t", **{"fetch.max.wait.ms": "50"})
    part = undecided.topics["t"].partitions[0]
    part.high_watermark = 15  # the marker at 21 is not committed here, so 11 and later are undecided
    with ThreadPoolExecutor(1) as pool:
        table = pool.submit(query.table)
        wait_until(
            lambda: len([request for request in undecided.fetches if request.partitions[0].offset == 11]) >= 3,
            "asked again",
        )
        assert not table.done()
        part.high_watermark = None
        assert table.result(WAIT_S)["n"].to_pylist() == list(range(10))


def test_a_stream_reads_a_transaction_when_it_is_decided(undecided: FakeCluster, stream: MakeStream) -> None:
    query = stream(subscribe="t", startingOffsets="earliest")
    assert query.numbers() == list(range(10))
    assert query.trigger() is None
    undecided.transactions.time_out("x")
    assert query.numbers() == [300]


def test_a_stream_that_read_uncommitted_records_does_not_go_back_when_it_reads_committed_ones(
    undecided: FakeCluster, stream: MakeStream
) -> None:
    options = {"subscribe": "t", "startingOffsets": "earliest"}
    before = stream(**options, **{"isolation.level": "read_uncommitted"})
    assert before.numbers() == [*range(10), *range(100, 110), *range(200, 210), 300]
    after = stream(**options)
    after.offset_log, after.committed = before.offset_log, before.committed
    assert after.trigger() is None
    undecided.transactions.time_out("x")
    undecided.store("t", 0, numbers(301))
    assert after.numbers() == [301]
