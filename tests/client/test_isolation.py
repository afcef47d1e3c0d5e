"""What a consumer reads where there are transactions: by default, records that are committed, and all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, Producer, TopicPartition
from spark_broker.errors import InvalidConfigError
from spark_broker.times import from_ms
from tests.client.fake_broker import APPEND_TIME_MS, FakeCluster
from tests.client.test_consumer import poll_rows, values_of

Values = Callable[..., pa.RecordBatch]
WAIT_S = 30.0
T0 = TopicPartition("t", 0)


@pytest.fixture
def mixed(cluster: FakeCluster, values: Values) -> FakeCluster:
    """t-0: 0 plain, 1 aborted (marker 2), 3 and 4 committed (marker 5), 6 plain, 7 and 8 aborted (marker 9)."""
    cluster.create("t")
    cluster.store("t", 0, values("plain"))
    with Producer(cluster.bootstrap, transactional_id="x") as producer:
        for names, commit in ((["no"], False), (["yes", "yes too"], True)):
            producer.begin_transaction()
            producer.append("t", values(*names)).result(WAIT_S)
            producer.commit_transaction() if commit else producer.abort_transaction()
        cluster.store("t", 0, values("plain too"))
        producer.begin_transaction()
        producer.append("t", values("no", "no")).result(WAIT_S)
        producer.abort_transaction()
    return cluster


@pytest.fixture
def undecided(mixed: FakeCluster, values: Values) -> Iterator[FakeCluster]:
    """As `mixed`, then 10 of an open transaction, and 11 plain."""
    with Producer(mixed.bootstrap, transactional_id="y") as producer:
        producer.begin_transaction()
        producer.append("t", values("open")).result(WAIT_S)
        mixed.store("t", 0, values("behind"))
        yield mixed


def test_aborted_records_and_markers_are_left_out_and_offsets_stay(mixed: FakeCluster) -> None:
    with Consumer(mixed.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer:
        batches = poll_rows(consumer, 4)
        assert [(batch.base_offset, values_of([batch])) for batch in batches] == [
            (0, ["plain"]),
            (3, ["yes", "yes too"]),
            (6, ["plain too"]),
        ]
        deadline = time.monotonic() + WAIT_S
        while consumer.position(T0) < 10:
            assert time.monotonic() < deadline
            assert consumer.poll(1.0) == []


def test_read_uncommitted_leaves_out_markers_alone(undecided: FakeCluster) -> None:
    with Consumer(
        undecided.bootstrap, topics=["t"], auto_offset_reset="earliest", isolation_level="read_uncommitted"
    ) as consumer:
        batches = poll_rows(consumer, 9)
        expected = ["plain", "no", "yes", "yes too", "plain too", "no", "no", "open", "behind"]
        assert values_of(batches) == expected
        assert consumer.end_offsets([T0]) == {T0: 12}


def test_a_poll_that_only_passes_what_is_left_out_comes_back_at_once(mixed: FakeCluster) -> None:
    with Consumer(mixed.bootstrap) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 7)
        began_s = time.monotonic()
        assert consumer.poll(WAIT_S) == []
        assert time.monotonic() - began_s < WAIT_S / 2
        assert consumer.position(T0) == 10


def test_the_end_is_the_last_stable_offset(undecided: FakeCluster, values: Values) -> None:
    with Consumer(undecided.bootstrap, auto_offset_reset="latest") as consumer:
        assert consumer.end_offsets([T0]) == {T0: 10}
        consumer.assign([T0])
        assert consumer.position(T0) == 10
        consumer.seek_to_beginning()
        consumer.seek_to_end()
        assert consumer.position(T0) == 10
        assert consumer.poll(0.2) == [], "the transaction is open, and what is behind it waits"
        undecided.transactions.time_out("y")
        assert values_of(poll_rows(consumer, 1)) == ["behind"]
    with Admin(undecided.bootstrap) as admin:
        assert admin.list_offsets({T0: "latest"}) == {T0: 13}


def test_offsets_by_time_are_looked_up_under_the_same_isolation(undecided: FakeCluster) -> None:
    for isolation, read_committed in (("read_committed", True), ("read_uncommitted", False)):
        undecided.calls.clear()
        with Consumer(undecided.bootstrap, isolation_level=isolation) as consumer:
            assert consumer.offsets_for_times({T0: from_ms(APPEND_TIME_MS)}) == {T0: 0}
        specs = [spec for _, call in undecided.calls for spec in getattr(call, "partitions", [])]
        assert {spec.read_committed for spec in specs} == {read_committed}


def test_a_position_past_what_is_left_out_is_committed_with_the_epoch_of_its_last_batch(mixed: FakeCluster) -> None:
    mixed.elect("t", 0, 1)
    with Consumer(mixed.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest") as consumer:
        deadline = time.monotonic() + WAIT_S
        while consumer.position(T0) < 10:
            assert time.monotonic() < deadline
            consumer.poll(1.0)
        consumer.commit()
        committed = consumer.committed(T0)
        assert committed is not None
        assert (committed.offset, committed.leader_epoch) == (10, 0), "the marker at 9 was written in epoch 0, not in 1"


def test_an_unknown_isolation_level_is_named(cluster: FakeCluster) -> None:
    with pytest.raises(InvalidConfigError, match=r"isolation\.level"):
        Consumer(cluster.bootstrap, isolation_level="serializable")
