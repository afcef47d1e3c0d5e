"""A consumer passes no record that its caller did not get: seeks, commits, errors and interrupts at odd moments."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from spark_broker import Consumer, TopicPartition
from spark_broker.client.partition_position import PartitionPosition
from spark_broker.errors import (
    OffsetOutOfRangeError,
    PolicyViolationError,
    RecordNotShowableError,
    SchemaMismatchError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import ConsumedBatch, ConsumedRecord
from spark_broker.protocol.schema import DEFAULT_SCHEMA, conform
from tests.client.fake_broker import FakeCluster
from tests.client.test_consumer import T0, T1, Values, poll_rows, values_of
from tests.conftest import WaitUntil
from tests.support.committed import committed_offset

YEAR_50_000_US = 1_515_695_000_000_000_000


def group(cluster: FakeCluster, **settings: object) -> Consumer:
    return Consumer(
        cluster.bootstrap,
        group_id="g",
        topics=["t"],
        enable_auto_commit=False,
        config=settings,
    )


@pytest.mark.parametrize(
    ("seek", "begins"), [(Consumer.seek_to_beginning, 0), (Consumer.seek_to_end, 3)], ids=["beginning", "end"]
)
def test_a_seek_before_the_partitions_are_known_counts_for_each_that_comes(
    cluster: FakeCluster, values: Values, seek: Callable[[Consumer], None], begins: int
) -> None:
    """Story: nothing was read, and a commit stored the ends: the group passed everything for good."""
    cluster.create("t", 2)
    for partition in range(2):
        cluster.store("t", partition, values("a", "b", "c"))
    with group(cluster) as consumer:
        seek(consumer)
        assert [consumer.position(tp) for tp in (T0, T1)] == [begins, begins]
        consumer.commit()
        assert [committed_offset(consumer, tp) for tp in (T0, T1)] == [begins, begins]


def test_a_position_that_nobody_chose_and_nothing_was_read_from_is_not_committed(
    cluster: FakeCluster, values: Values
) -> None:
    cluster.create("t", 2)
    cluster.store("t", 0, values("a", "b"))
    with group(cluster) as consumer:  # It begins at the end.
        assert consumer.position(T0) == 2
        consumer.commit()
        assert consumer.committed(T0) is None
        cluster.store("t", 0, values("c"))
        assert values_of(poll_rows(consumer, 1)) == ["c"]
        consumer.commit()
        assert committed_offset(consumer, T0) == 3
        assert consumer.committed(T1) is None


def unshowable(count: int, at: int) -> pa.RecordBatch:
    times = [YEAR_50_000_US if number == at else number for number in range(count)]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([b"%d" % n for n in range(count)], pa.binary()), pa.array(times, pa.timestamp("us", "UTC"))],
        names=["value", "timestamp"],
    )
    return conform(batch, DEFAULT_SCHEMA)


def iterated(consumer: Consumer, count: int) -> list[ConsumedRecord]:
    records: Iterator[ConsumedRecord] = iter(consumer)
    return [next(records) for _ in range(count)]


def test_a_record_that_python_cannot_show_is_not_passed(cluster: FakeCluster, values: Values) -> None:
    """Story: one OverflowError, and then all 100 rows were passed, and 101 committed."""
    cluster.create("t")
    cluster.store("t", 0, unshowable(100, at=40))
    cluster.store("t", 0, values("after"))
    with group(cluster, **{"auto.offset.reset": "earliest"}) as consumer:
        assert [record.offset for record in iterated(consumer, 40)] == list(range(40))
        for _ in range(2):
            with pytest.raises(RecordNotShowableError, match="t-0 offset 40, column timestamp: OverflowError"):
                iterated(consumer, 1)
        consumer.commit()
        assert committed_offset(consumer, T0) == 40
        assert consumer.errors().keys() == {T0}
        consumer.seek(T0, 41)
        assert [record.offset for record in iterated(consumer, 60)] == list(range(41, 101))
        assert not consumer.errors()
        consumer.seek(T0, 40)
        (batch, *_) = poll_rows(consumer, 61)
        assert batch.base_offset == 40, "Arrow shows it"
        with pytest.raises(RecordNotShowableError, match="offset 40"):
            next(batch.records())


def interrupt_in(monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    """As Ctrl-C in this method of a position would, at its n-th call."""
    method = getattr(PartitionPosition, name)
    left = [calls]

    def interrupted(self: PartitionPosition, *arguments: object) -> object:
        result = method(self, *arguments)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(PartitionPosition, name, interrupted)


@pytest.mark.parametrize("calls", range(1, 7))
def test_what_an_interrupted_poll_did_not_return_is_not_passed(
    cluster: FakeCluster, values: Values, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil, calls: int
) -> None:
    """Story: Ctrl-C in a poll, and the end of the `with` committed 59 of 60 records that the poll never returned."""
    cluster.create("t", 2)
    for number in range(6):
        cluster.store("t", number % 2, values(f"{number}"))
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest") as consumer:
        machine = consumer._machine
        wait_until(lambda: sum(len(p.buffer) for p in machine.partitions.values()) == 6, "all is fetched ahead")
        with monkeypatch.context() as patched:
            interrupt_in(patched, "_pass", calls)
            with pytest.raises(KeyboardInterrupt):
                consumer.poll(1.0)
        consumer.commit()
        assert consumer.committed(T0) is None
        assert sorted(values_of(poll_rows(consumer, 6), 0)) == ["0", "2", "4"]
    assert {key[1:]: offset.offset for key, offset in cluster.committed.items()} == {("t", 0): 3, ("t", 1): 3}


@pytest.mark.parametrize("calls", range(1, 5))
def test_a_record_that_an_interrupted_iteration_did_not_yield_is_not_passed(
    cluster: FakeCluster, values: Values, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a", "b"))
    cluster.store("t", 0, values("c", "d"))
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest") as consumer:
        seen: list[int] = []
        with monkeypatch.context() as patched:
            interrupt_in(patched, "take_record", calls)
            with pytest.raises(KeyboardInterrupt):
                seen.extend(record.offset for record in consumer)
        assert seen == list(range(calls - 1))
        seen += [record.offset for record in iterated(consumer, 4 - len(seen))]
        assert seen == [0, 1, 2, 3]


def interrupt_decoding(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Raise KeyboardInterrupt instead of the records of this batch, counted from 1."""
    records_of, left = PartitionPosition._records_of, [calls]

    def interrupted(position: PartitionPosition, batch: ConsumedBatch) -> Iterator[ConsumedRecord]:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return records_of(position, batch)

    monkeypatch.setattr(PartitionPosition, "_records_of", interrupted)


def fetched_ahead(consumer: Consumer) -> int:
    return sum(len(position.buffer) for position in consumer._machine.partitions.values())


@pytest.mark.parametrize("calls", [3, 4])
def test_an_iteration_that_is_interrupted_before_the_next_batch_repeats_nothing(
    cluster: FakeCluster, values: Values, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil, calls: int
) -> None:
    """Story: a record of the other partition, delivered and perhaps committed, came again."""
    cluster.create("t", 2)
    for partition, names in ((0, "ab"), (1, "xy"), (0, "cd"), (1, "zw")):
        cluster.store("t", partition, values(*names))
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest") as consumer:
        wait_until(lambda: fetched_ahead(consumer) == 4, "all is fetched ahead")
        seen: list[object] = []
        with monkeypatch.context() as patched:
            interrupt_decoding(patched, calls)
            with pytest.raises(KeyboardInterrupt):
                seen.extend(record.value for record in consumer)
        assert consumer.position(T0) + consumer.position(T1) == len(seen)
        seen += [record.value for record in iterated(consumer, 8 - len(seen))]
        assert sorted(map(str, seen)) == sorted(str(name.encode()) for name in "abcdwxyz")


def test_a_second_loop_that_is_interrupted_repeats_nothing(
    cluster: FakeCluster, values: Values, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a", "b"))
    cluster.store("t", 0, values("c"))
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer:
        wait_until(lambda: fetched_ahead(consumer) == 2, "all is fetched ahead")
        assert [record.value for record in iterated(consumer, 2)] == [b"a", b"b"]
        with monkeypatch.context() as patched:
            interrupt_decoding(patched, 1)
            with pytest.raises(KeyboardInterrupt):
                iterated(consumer, 1)
        assert [record.value for record in iterated(consumer, 1)] == [b"c"]


@pytest.mark.parametrize("subscribe", [True, False], ids=["member", "by hand"])
def test_who_follows_a_consumer_that_has_read_nothing_begins_where_that_one_did(
    cluster: FakeCluster, values: Values, subscribe: bool
) -> None:
    """Story: with auto.offset.reset=latest, a group passed what came between two runs of a program."""

    def opened() -> Consumer:
        consumer = Consumer(cluster.bootstrap, group_id="g", topics=["t"] if subscribe else None)
        if not subscribe:
            consumer.assign([T0])
        return consumer

    cluster.create("t")
    with opened() as first:
        assert first.position(T0) == 0
        assert first.poll(0.2) == []
    cluster.store("t", 0, values("a"))
    with opened() as second:
        assert values_of(poll_rows(second, 1)) == ["a"]


def test_one_topic_of_two_is_deleted_and_the_other_is_read_on(
    cluster: FakeCluster, values: Values, caplog: pytest.LogCaptureFixture, wait_until: WaitUntil
) -> None:
    for topic in ("gone", "stays"):
        cluster.create(topic)
    with Consumer(
        cluster.bootstrap, topics=["gone", "stays"], auto_offset_reset="earliest", metadata_max_age_ms=100
    ) as consumer:
        assert consumer.position(TopicPartition("gone", 0)) == 0
        with cluster.changed:
            del cluster.topics["gone"]
        wait_until(lambda: bool(consumer.errors()), "the deletion is noticed")
        cluster.store("stays", 0, values("a"))
        with caplog.at_level(logging.WARNING):
            assert values_of(poll_rows(consumer, 1)) == ["a"]
        assert "gone-0 stands still" in caplog.text
        errors = []
        for _ in range(3):
            with pytest.raises(UnknownTopicOrPartitionError, match="gone") as raised:
                consumer.poll(0.05)
            errors.append(raised.value)
        assert len({id(error) for error in errors}) == 3, "an exception that is raised again grows"
        cluster.store("stays", 0, values("b"))
        assert values_of(poll_rows(consumer, 1)) == ["b"]


def test_an_error_is_raised_at_once_where_nothing_else_can_come(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, unshowable(2, at=0))
    with group(cluster, **{"auto.offset.reset": "earliest"}) as consumer:
        with pytest.raises(RecordNotShowableError):
            iterated(consumer, 1)
        began = time.monotonic()
        with pytest.raises(RecordNotShowableError):
            consumer.poll(20.0)
        assert time.monotonic() - began < 10


def test_a_batch_names_the_column_that_cannot_be_shown() -> None:
    schema = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us"))])
    rows = pa.RecordBatch.from_arrays(
        [pa.array([1, 2]), pa.array([0, YEAR_50_000_US], pa.timestamp("us"))], schema=schema
    )
    now = datetime.now(UTC) - timedelta(seconds=1)
    times = pa.array([0, 0], pa.timestamp("us", "UTC"))
    records = ConsumedBatch("t", 3, 7, rows, 0, now, times, typed=True).records()
    assert next(records).offset == 7
    with pytest.raises(RecordNotShowableError, match="t-3 offset 8, column at"):
        next(records)


@pytest.mark.parametrize("columns", [["valu"], ["value", "valu"]])
def test_a_column_that_the_topic_does_not_have_is_named_with_the_nearest(
    cluster: FakeCluster, values: Values, columns: list[str]
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with Consumer(cluster.bootstrap, topics=["t"], columns=columns, auto_offset_reset="earliest") as consumer:
        for _ in range(2):
            with pytest.raises(SchemaMismatchError, match=r"topic 't' has no column 'valu'.*value"):
                consumer.poll(10.0)


def test_a_commit_past_what_was_handed_out_is_refused_however_early_it_comes(
    cluster: FakeCluster, values: Values
) -> None:
    """Story: it was accepted or refused by timing: the position was not known yet."""
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with Consumer(cluster.bootstrap, group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        with pytest.raises(PolicyViolationError, match="not handed out"):
            consumer.commit({T0: 10**9})
        assert consumer.committed(T0) is None


def test_without_a_group_and_a_reset_policy_a_caller_has_to_seek(cluster: FakeCluster, values: Values) -> None:
    """Story: `poll` was empty for ever."""
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="none") as consumer:
        with pytest.raises(OffsetOutOfRangeError, match=r"auto.offset.reset is none"):
            consumer.poll(20.0)
        consumer.seek(T0, 0)
        assert values_of(poll_rows(consumer, 1)) == ["a"]
