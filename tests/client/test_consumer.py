"""The consumer hands out every committed record once, from where it stands, and commits no further than that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from spark_broker import ConsumedBatch, Consumer, OffsetAndMetadata, TopicPartition
from spark_broker.client import fetch_machine
from spark_broker.client.fetch_decoder import decode_fetched
from spark_broker.client.partition_position import Prefetched
from spark_broker.errors import (
    BootstrapUnreachableError,
    ClosedError,
    CoordinatorNotAvailableError,
    CorruptMessageError,
    InconsistentTopicIdError,
    InvalidConfigError,
    OffsetMetadataTooLargeError,
    OffsetOutOfRangeError,
    PolicyViolationError,
    SparkBrokerError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.frame import CONTROL, Frame
from spark_broker.protocol.messages import CallRequest, ErrorResponse, Message, OffsetCommitRequest
from spark_broker.protocol.murmur2 import partition_of
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.times import from_ms
from tests.client.fake_broker import APPEND_TIME_MS, FakeCluster
from tests.conftest import WaitUntil
from tests.support.committed import committed_offset

Values = Callable[..., pa.RecordBatch]
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
WAIT_S = 30.0


@pytest.fixture
def consumer(cluster: FakeCluster) -> Iterator[Consumer]:
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as client:
        yield client


def poll_rows(consumer: Consumer, rows: int) -> list[ConsumedBatch]:
    """Poll until this many rows have come."""
    batches: list[ConsumedBatch] = []
    deadline = time.monotonic() + WAIT_S
    while sum(batch.data.num_rows for batch in batches) < rows:
        assert time.monotonic() < deadline, f"{rows} rows were awaited; these came: {batches}"
        batches += consumer.poll(1.0)
    return batches


def values_of(batches: list[ConsumedBatch], partition: int = 0) -> list[str]:
    return [
        value.decode() for batch in batches if batch.partition == partition for value in batch.data["value"].to_pylist()
    ]


def poll_error(consumer: Consumer, kind: type[SparkBrokerError]) -> SparkBrokerError:
    """Poll until an error comes, which must be of this kind."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            consumer.poll(0.1)
        except kind as error:
            return error
    pytest.fail(f"no {kind.__name__} came")


def test_every_partition_of_a_topic_is_read_as_it_was_appended(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t", 3)
    for n in range(6):
        cluster.store("t", n % 3, values(f"{n}", f"{n}!"))
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer:
        batches = poll_rows(consumer, 12)
        assert [values_of(batches, p) for p in range(3)] == [
            [f"{p}", f"{p}!", f"{p + 3}", f"{p + 3}!"] for p in range(3)
        ]
        assert sorted((b.partition, b.base_offset, b.next_offset) for b in batches) == [
            (p, base, base + 2) for p in range(3) for base in (0, 2)
        ]
        assert consumer.poll(0.0) == []


def test_poll_waits_for_records_that_come_later(cluster: FakeCluster, consumer: Consumer, values: Values) -> None:
    cluster.create("t")
    consumer.assign([T0])
    assert consumer.poll(0.05) == []
    cluster.store("t", 0, values("a"))
    assert values_of(poll_rows(consumer, 1)) == ["a"]


def test_a_partition_that_is_added_is_read_from_its_start(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    with Consumer(cluster.bootstrap, topics=["t"], metadata_max_age_ms=100) as consumer:
        assert consumer.position(T0) == 0
        topic = cluster.topics["t"]
        topic.partitions.append(type(topic.partitions[0])(leader=1))
        cluster.store("t", 1, values("new"))
        assert values_of(poll_rows(consumer, 1), 1) == ["new"]


def test_nothing_at_or_past_the_high_watermark_is_handed_out(
    cluster: FakeCluster, consumer: Consumer, values: Values
) -> None:
    cluster.create("t").partitions[0].high_watermark = 1
    for name in "abc":
        cluster.store("t", 0, values(name))
    consumer.assign([T0])
    assert values_of(poll_rows(consumer, 1)) == ["a"]
    assert consumer.poll(0.2) == []
    assert consumer.end_offsets([T0]) == {T0: 1}


def test_records_of_kafkas_columns(cluster: FakeCluster, consumer: Consumer) -> None:
    cluster.create("t")
    rows = [
        {"key": b"k", "value": b"v", "headers": [{"key": "h", "value": b"1"}], "timestamp": from_ms(7)},
        {"timestamp": from_ms(8)},
    ]
    cluster.store("t", 0, pa.RecordBatch.from_pylist(rows, schema=DEFAULT_SCHEMA))
    consumer.assign([T0])
    (batch,) = poll_rows(consumer, 2)
    assert list(batch.records()) == [
        ("t", 0, 0, from_ms(7), b"k", b"v", (("h", b"1"),)),
        ("t", 0, 1, from_ms(8), None, None, ()),
    ]


def test_records_of_typed_columns_are_dicts(cluster: FakeCluster, consumer: Consumer) -> None:
    schema = pa.schema([("value", pa.binary()), ("n", pa.int64())])
    cluster.create("typed", schema=schema)
    cluster.store("typed", 0, pa.RecordBatch.from_pylist([{"value": b"a", "n": n} for n in range(2500)], schema=schema))
    consumer.assign([TopicPartition("typed", 0)])
    (batch,) = poll_rows(consumer, 2500)
    records = list(batch.records())
    assert [record.offset for record in records] == list(range(2500))
    assert records[2400].value == {"value": b"a", "n": 2400}
    assert (records[0].key, records[0].headers, records[0].timestamp) == (None, (), from_ms(APPEND_TIME_MS))


def test_a_consumer_hands_out_records_one_at_a_time(cluster: FakeCluster, values: Values) -> None:
    """Positions move record by record, between partitions and past markers; a poll takes the rest of a batch."""
    cluster.create("t", 2)
    cluster.store("t", 0, values("a", "b", "c"))
    cluster.store("t", 0, values("marker"))
    cluster.store("t", 0, values("d"))
    cluster.store("t", 1, values("x"))
    log = cluster.topics["t"].partitions[0].log
    log[1] = Frame(log[1].header._replace(attributes=CONTROL), log[1].message)
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer:
        seen = []
        for record in consumer:
            seen.append((record.partition, record.offset, record.value))
            assert consumer.position(TopicPartition("t", record.partition)) == record.offset + 1
            if len(seen) == 5:
                break
        assert sorted(seen) == [(0, 0, b"a"), (0, 1, b"b"), (0, 2, b"c"), (0, 4, b"d"), (1, 0, b"x")]
        assert [offset for partition, offset, _ in seen if partition == 0] == [0, 1, 2, 4]
        consumer.seek(T0, 0)
        consumer.pause(T1)
        assert next(iter(consumer)).value == b"a"
        assert values_of(poll_rows(consumer, 3)) == ["b", "c", "d"]
        consumer.seek(T0, 1)
        assert next(iter(consumer)).value == b"b"
        consumer.seek(T0, 0)
        assert next(iter(consumer)).value == b"a"


def test_a_commit_amid_a_batch_is_of_the_records_that_were_handed_out(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a", "b", "c"))
    settings: dict[str, Any] = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], **settings) as consumer:
        records = iter(consumer)
        assert [next(records).value, next(records).value] == [b"a", b"b"]
        consumer.commit()
        assert consumer.committed(T0) == OffsetAndMetadata(2, leader_epoch=0)


def test_records_are_committed_while_nobody_polls_and_end_with_the_consumer(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    settings: dict[str, Any] = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 50}
    consumer = Consumer(cluster.bootstrap, group_id="g", topics=["t"], **settings)
    seen: list[object] = []
    reader = threading.Thread(target=lambda: seen.extend(record.value for record in consumer))
    reader.start()
    wait_until(lambda: cluster.committed.get(("g", "t", 0)) and cluster.committed["g", "t", 0].offset == 1, "a commit")
    consumer.close()
    reader.join(WAIT_S)
    assert not reader.is_alive()
    assert seen == [b"a"]
    with pytest.raises(ClosedError):
        next(iter(consumer))


def test_timestamps_are_the_records_own_or_the_append_time(cluster: FakeCluster, consumer: Consumer) -> None:
    schema = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us"))])
    cluster.create("typed", schema=schema, config={"timestamp.column": "at"})
    cluster.store("typed", 0, pa.RecordBatch.from_pylist([{"n": 1, "at": 5}, {"n": 2}], schema=schema))
    consumer.assign([TopicPartition("typed", 0)])
    (batch,) = poll_rows(consumer, 2)
    assert batch.timestamps.cast("int64").to_pylist() == [5, APPEND_TIME_MS * 1000]
    assert batch.append_time == from_ms(APPEND_TIME_MS)


def test_older_batches_are_read_under_the_newer_schema(cluster: FakeCluster, consumer: Consumer) -> None:
    old, new = pa.schema([("n", pa.int32())]), pa.schema([("n", pa.int64()), ("s", pa.string())])
    topic = cluster.create("t", schema=old)
    cluster.store("t", 0, pa.RecordBatch.from_pylist([{"n": 1}], schema=old))
    topic.schemas.append(schema_to_bytes(new))
    cluster.store("t", 0, pa.RecordBatch.from_pylist([{"n": 2, "s": "x"}], schema=new), schema_id=1)
    consumer.assign([T0])
    batches = poll_rows(consumer, 2)
    assert [row for batch in batches for row in batch.data.to_pylist()] == [{"n": 1, "s": None}, {"n": 2, "s": "x"}]


def test_a_schema_that_appears_later_is_learned(cluster: FakeCluster, consumer: Consumer) -> None:
    old, new = pa.schema([("n", pa.int64())]), pa.schema([("n", pa.int64()), ("s", pa.string())])
    topic = cluster.create("t", schema=old)
    cluster.store("t", 0, pa.RecordBatch.from_pylist([{"n": 1}], schema=old))
    consumer.assign([T0])
    poll_rows(consumer, 1)
    topic.schemas.append(schema_to_bytes(new))
    cluster.store("t", 0, pa.RecordBatch.from_pylist([{"n": 2, "s": "x"}], schema=new), schema_id=1)
    assert poll_rows(consumer, 1)[0].data.to_pylist() == [{"n": 2, "s": "x"}]


def test_only_named_columns_are_asked_for(cluster: FakeCluster) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.int64())])
    cluster.create("t", schema=schema)
    cluster.store("t", 0, pa.RecordBatch.from_pylist([{"a": 1, "b": "x", "c": 2}], schema=schema))
    with Consumer(cluster.bootstrap, topics="t", columns=["c", "b"], auto_offset_reset="earliest") as consumer:
        assert poll_rows(consumer, 1)[0].data.to_pylist() == [{"b": "x", "c": 2}]
    assert {tuple(request.columns or ()) for request in cluster.fetches} == {("b", "c")}


def test_a_control_batch_takes_an_offset_and_is_not_handed_out(
    cluster: FakeCluster, consumer: Consumer, values: Values
) -> None:
    topic = cluster.create("t")
    for name in "abc":
        cluster.store("t", 0, values(name))
    log = topic.partitions[0].log
    log[1] = Frame(log[1].header._replace(attributes=CONTROL), log[1].message)
    consumer.assign([T0])
    assert values_of(poll_rows(consumer, 2)) == ["a", "c"]
    assert consumer.position(T0) == 3


def test_a_corrupt_batch_is_an_error_and_can_be_passed_over(
    cluster: FakeCluster, consumer: Consumer, values: Values
) -> None:
    topic = cluster.create("t")
    cluster.store("t", 0, values("a"))
    cluster.store("t", 0, values("b"))
    frame = topic.partitions[0].log[0]
    topic.partitions[0].log[0] = Frame(frame.header, bytes(len(frame.message)))
    consumer.assign([T0])
    poll_error(consumer, CorruptMessageError)
    consumer.seek(T0, 1)
    assert values_of(poll_rows(consumer, 1)) == ["b"]


def test_a_position_inside_a_batch_cuts_it(cluster: FakeCluster, consumer: Consumer, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a", "b", "c", "d"))
    consumer.assign([T0])
    consumer.seek(T0, 2)
    (batch,) = poll_rows(consumer, 2)
    assert (batch.base_offset, batch.next_offset, values_of([batch])) == (2, 4, ["c", "d"])
    assert batch.timestamps.cast("int64").to_pylist() == [APPEND_TIME_MS * 1000] * 2
    assert consumer.position(T0) == 4


def test_what_was_fetched_before_a_seek_is_never_handed_out(
    cluster: FakeCluster, consumer: Consumer, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    for n in range(10):
        cluster.store("t", 0, values(str(n)))
    consumer.assign([T0])
    wait_until(lambda: any(request.partitions[0].offset == 10 for request in cluster.fetches), "all is fetched ahead")
    for start in (7, 3, 9):
        consumer.seek(T0, start)
        assert values_of(poll_rows(consumer, 10 - start)) == [str(n) for n in range(start, 10)]


def test_an_answer_that_comes_after_a_seek_is_thrown_away(
    cluster: FakeCluster, consumer: Consumer, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create("t")
    for n in range(10):
        cluster.store("t", 0, values(str(n)))
    seeks = [2]

    def decode_and_seek(*args: Any) -> list[Prefetched]:
        prefetched = decode_fetched(*args)
        if seeks:
            consumer.seek(T0, seeks.pop())
        return prefetched

    monkeypatch.setattr(fetch_machine, "decode_fetched", decode_and_seek)
    consumer.assign([T0])
    assert values_of(poll_rows(consumer, 8)) == [str(n) for n in range(2, 10)]


def test_a_seek_does_not_wait_for_the_long_poll_before_it(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest", fetch_max_wait_ms=60_000) as consumer:
        poll_rows(consumer, 1)
        consumer.seek(T0, 0)
        assert values_of(poll_rows(consumer, 1)) == ["a"]


def test_a_consumer_to_which_nothing_comes_asks_ever_more_seldom(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest", fetch_max_wait_ms=40) as consumer:
        poll_rows(consumer, 1)
        wait_until(lambda: any(fetch.max_wait_ms >= 320 for fetch in cluster.fetches), "a long wait")
        assert [fetch.max_wait_ms for fetch in cluster.fetches][:6] == [40, 40, 80, 160, 320, 640][
            : len(cluster.fetches)
        ]
        asked = len(cluster.fetches)
        cluster.store("t", 0, values("b"))
        assert values_of(poll_rows(consumer, 1)) == ["b"]
        wait_until(lambda: len(cluster.fetches) > asked, "the next fetch")
        assert cluster.fetches[asked].max_wait_ms == 40


def test_a_consumer_that_waits_for_more_than_a_byte_asks_as_often_as_it_is_told(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    """With a longer wait, records that have come would wait for more."""
    cluster.create("t")
    settings: dict[str, Any] = {"fetch_max_wait_ms": 40, "fetch_min_bytes": 100_000}
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest", **settings):
        wait_until(lambda: len(cluster.fetches) > 5, "several fetches")
    assert {fetch.max_wait_ms for fetch in cluster.fetches} == {40}


def test_latest_is_the_default_and_is_fixed_once_it_is_known(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("old"))
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([T0])
        assert consumer.position(T0) == 1
        cluster.store("t", 0, values("new"))
        assert values_of(poll_rows(consumer, 1)) == ["new"]


def test_seeking_to_beginning_and_end(cluster: FakeCluster, consumer: Consumer, values: Values) -> None:
    cluster.create("t").partitions[0].log_start_offset = 5
    cluster.store("t", 0, values("a"))
    consumer.assign([T0])
    consumer.seek_to_end()
    assert consumer.position(T0) == 6
    consumer.seek_to_beginning(T0)
    assert consumer.position(T0) == 5
    assert consumer.beginning_offsets([T0]) == {T0: 5}
    assert consumer.offsets_for_times({T0: from_ms(APPEND_TIME_MS)}) == {T0: 5}
    assert consumer.offsets_for_times({T0: from_ms(APPEND_TIME_MS) + timedelta(microseconds=1)}) == {T0: None}


def test_an_offset_out_of_range_goes_where_auto_offset_reset_says(
    cluster: FakeCluster, consumer: Consumer, values: Values
) -> None:
    cluster.create("t").partitions[0].log_start_offset = 5
    cluster.store("t", 0, values("a"))
    consumer.assign([T0])
    consumer.seek(T0, 2)
    assert poll_rows(consumer, 1)[0].base_offset == 5


def test_an_offset_out_of_range_is_raised_where_there_is_no_reset(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with Consumer(cluster.bootstrap, auto_offset_reset="none") as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 99)
        assert "99" in str(poll_error(consumer, OffsetOutOfRangeError))
        consumer.seek(T0, 0)
        assert values_of(poll_rows(consumer, 1)) == ["a"]


def test_a_position_raises_the_error_of_its_own_partition_and_of_no_other(
    cluster: FakeCluster, consumer: Consumer, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a", "b"))
    gone = TopicPartition("gone", 0)
    consumer.assign([T0, gone])
    consumer.pause(gone)
    wait_until(lambda: gone in consumer.errors(), "the topic is not there")
    consumer.seek_to_end(T0)
    assert consumer.position(T0) == 2
    with pytest.raises(UnknownTopicOrPartitionError, match="gone"):
        consumer.position(gone)


def test_the_position_of_a_paused_partition_that_has_none_is_an_error_at_once(cluster: FakeCluster) -> None:
    cluster.create("t")
    config = {"default.api.timeout.ms": 3_600_000}
    with Consumer(cluster.bootstrap, group_id="g", auto_offset_reset="none", config=config) as consumer:
        consumer.assign([T0])
        consumer.pause(T0)
        with pytest.raises(SparkBrokerError, match=r"auto\.offset\.reset"):
            consumer.position(T0)


def test_a_note_that_is_too_long_is_refused_before_it_is_sent(cluster: FakeCluster) -> None:
    """The broker could only say that it did not understand the message."""
    cluster.create("t")
    with Consumer(cluster.bootstrap, group_id="g") as consumer:
        consumer.assign([T0])
        consumer.commit({T0: OffsetAndMetadata(0, None, "x" * 4096)})
        with pytest.raises(OffsetMetadataTooLargeError, match=r"t-0: metadata of 4,097 characters"):
            consumer.commit({T0: OffsetAndMetadata(0, None, "x" * 4097)})


def test_a_paused_partition_hands_out_nothing_until_it_is_resumed(
    cluster: FakeCluster, consumer: Consumer, values: Values
) -> None:
    cluster.create("t", 2)
    consumer.assign([T0, T1])
    consumer.pause(T0)
    cluster.store("t", 0, values("a"))
    cluster.store("t", 1, values("b"))
    assert [b.partition for b in poll_rows(consumer, 1)] == [1]
    consumer.resume(T0)
    assert [b.partition for b in poll_rows(consumer, 1)] == [0]


def test_a_partition_that_is_not_assigned_is_refused(cluster: FakeCluster, consumer: Consumer) -> None:
    cluster.create("t", 2)
    consumer.assign([T0])
    for act in (consumer.position, consumer.pause, lambda tp: consumer.seek(tp, 0)):
        with pytest.raises(PolicyViolationError, match="t-1"):
            act(T1)


def test_reading_ahead_is_bounded(cluster: FakeCluster, values: Values, wait_until: WaitUntil) -> None:
    cluster.create("t")
    for n in range(50):
        cluster.store("t", 0, values(f"{n:01000}"))
    limits: dict[str, Any] = {"max_partition_fetch_bytes": 3000, "fetch_max_bytes": 5000}
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest", **limits) as consumer:
        first = consumer.poll(WAIT_S)
        assert 0 < len(first) < 50
        rest = poll_rows(consumer, 50 - len(first))
        assert values_of(first + rest) == [f"{n:01000}" for n in range(50)]


def test_a_killed_leader_is_not_noticed_by_the_caller(cluster: FakeCluster, consumer: Consumer, values: Values) -> None:
    cluster.create("t", 3)
    consumer.assign([TopicPartition("t", p) for p in range(3)])
    got: list[ConsumedBatch] = []
    for n in range(30):
        if n == 10:
            cluster.kill(0)
        if n == 20:
            cluster.kill(1)
        cluster.store("t", n % 3, values(str(n)))
        got += poll_rows(consumer, 1)
    assert [values_of(got, p) for p in range(3)] == [[str(n) for n in range(p, 30, 3)] for p in range(3)]


def test_a_frozen_leader_is_left_as_soon_as_it_is_fenced(
    cluster: FakeCluster, consumer: Consumer, values: Values
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    consumer.assign([T0])
    poll_rows(consumer, 1)
    cluster.brokers[0].proxy.freeze()
    cluster.fence(0)
    cluster.store("t", 0, values("b"))
    assert values_of(poll_rows(consumer, 1)) == ["b"]
    cluster.brokers[0].proxy.thaw()


def test_a_leader_that_comes_back_at_another_address_is_found(
    cluster: FakeCluster, consumer: Consumer, values: Values
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    consumer.assign([T0])
    poll_rows(consumer, 1)
    cluster.move(0)
    cluster.store("t", 0, values("b"))
    assert values_of(poll_rows(consumer, 1)) == ["b"]


def test_a_partition_without_a_leader_is_read_once_it_has_one(
    cluster: FakeCluster, consumer: Consumer, values: Values
) -> None:
    cluster.create("t")
    cluster.elect("t", 0, -1)
    consumer.assign([T0])
    assert consumer.poll(0.1) == []
    cluster.elect("t", 0, 1)
    cluster.store("t", 0, values("a"))
    assert values_of(poll_rows(consumer, 1)) == ["a"]


def test_a_leader_that_another_call_of_the_consumer_learns_of_is_read_from(
    cluster: FakeCluster, consumer: Consumer, values: Values
) -> None:
    """The lookup of an end was refused, and learned of the new leader.

    No fetch was refused, so nothing was read from the new leader until the metadata was five minutes old.
    """
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    may_answer = threading.Event()

    def hook(broker: int, request: CallRequest) -> Message | None:
        may_answer.wait(WAIT_S)
        return None

    cluster.call_hook = hook
    consumer.assign([T0])
    consumer.pause(T0)  # before anything is known of it: nothing is fetched from the old leader
    may_answer.set()
    assert consumer.position(T0) == 0
    cluster.elect("t", 0, 1)
    assert consumer.end_offsets([T0]) == {T0: 1}
    consumer.resume(T0)
    assert values_of(poll_rows(consumer, 1)) == ["a"]


def test_a_fetch_names_the_leader_epoch(cluster: FakeCluster, consumer: Consumer, values: Values) -> None:
    cluster.create("t")
    consumer.assign([T0])
    consumer.position(T0)
    cluster.elect("t", 0, 0)
    cluster.elect("t", 0, 1)
    cluster.store("t", 0, values("a"))
    assert poll_rows(consumer, 1)[0].leader_epoch == 2
    assert {request.partitions[0].leader_epoch for request in cluster.fetches} <= {0, 2}
    assert cluster.fetches[-1].partitions[0].leader_epoch == 2


def test_a_topic_created_again_is_an_error_and_not_read_as_the_old_one(
    cluster: FakeCluster, consumer: Consumer, values: Values
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    consumer.assign([T0])
    poll_rows(consumer, 1)
    cluster.create("t")
    cluster.store("t", 0, values("b"))
    cluster.store("t", 0, values("c"))
    poll_error(consumer, InconsistentTopicIdError)
    consumer.seek_to_beginning(T0)  # as the error's hint says
    assert values_of(poll_rows(consumer, 2)) == ["b", "c"]


def test_an_unknown_topic_is_named(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, topics=["nope"]) as consumer:
        assert "'nope'" in str(poll_error(consumer, UnknownTopicOrPartitionError))


def test_an_unknown_partition_is_named(cluster: FakeCluster, consumer: Consumer) -> None:
    cluster.create("t")
    consumer.assign([T1])
    assert "has 1 partitions" in str(poll_error(consumer, UnknownTopicOrPartitionError))


def test_a_topic_that_is_created_after_its_consumer_is_read(cluster: FakeCluster, values: Values) -> None:
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer:
        consumer.poll(0.0)
        cluster.create("t")
        cluster.store("t", 0, values("a"))
        assert values_of(poll_rows(consumer, 1)) == ["a"]


def test_unreachable_addresses_are_all_named() -> None:
    with Consumer("127.0.0.1:1,127.0.0.1:2", topics=["t"]) as consumer:
        message = str(poll_error(consumer, BootstrapUnreachableError))
        assert "127.0.0.1:1" in message
        assert "127.0.0.1:2" in message
        assert consumer.poll(0.2) == [], "told once for each try: a loop that logs it does not spin"


def test_a_group_goes_on_where_it_committed(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a", "b"))
    settings: dict[str, Any] = {"enable_auto_commit": False, "auto_offset_reset": "earliest"}
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], **settings) as consumer:
        assert consumer.committed(T0) is None
        poll_rows(consumer, 2)
        consumer.commit()
        assert committed_offset(consumer, T0) == 2
    cluster.store("t", 0, values("c"))
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], **settings) as consumer:
        assert values_of(poll_rows(consumer, 1)) == ["c"]
    with Consumer(cluster.bootstrap, group_id="other", topics=["t"], **settings) as consumer:
        assert values_of(poll_rows(consumer, 3)) == ["a", "b", "c"]


def test_a_commit_carries_the_epoch_of_the_last_record(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.elect("t", 0, 1)
    cluster.store("t", 0, values("a"))
    cluster.elect("t", 0, 2)
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest") as consumer:
        poll_rows(consumer, 1)
        consumer.commit()
        assert consumer.committed(T0) == OffsetAndMetadata(1, leader_epoch=1)


def test_a_commit_does_not_pass_records_that_were_not_handed_out(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    for name in "abc":
        cluster.store("t", 0, values(name))
    with Consumer(cluster.bootstrap, group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        wait_until(lambda: any(r.partitions[0].offset == 3 for r in cluster.fetches), "all is fetched ahead")
        consumer.commit()
        assert consumer.committed(T0) is None, "nothing was handed out, and nobody chose the position"
        with pytest.raises(PolicyViolationError, match="not handed out"):
            consumer.commit({T0: 1})
        poll_rows(consumer, 3)
        consumer.commit({T0: OffsetAndMetadata(2, metadata="note")})
        assert consumer.committed(T0) == OffsetAndMetadata(2, metadata="note")


def test_an_automatic_commit_is_of_what_earlier_polls_handed_out(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    settings: dict[str, Any] = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 1}
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], **settings) as consumer:
        poll_rows(consumer, 1)
        assert ("g", "t", 0) not in cluster.committed or cluster.committed["g", "t", 0].offset == 0
        consumer.poll(0.0)
        wait_until(
            lambda: cluster.committed.get(("g", "t", 0)) and cluster.committed["g", "t", 0].offset == 1, "a commit"
        )


def test_close_commits_what_was_handed_out(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest") as consumer:
        poll_rows(consumer, 1)
    assert cluster.committed["g", "t", 0].offset == 1


def test_close_commits_nothing_when_that_is_off(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    with Consumer(
        cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        poll_rows(consumer, 1)
    assert cluster.commits == []


def test_a_coordinator_that_dies_is_found_again(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    offsets = cluster.create(CONSUMER_OFFSETS_TOPIC, 3)
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest") as consumer:
        poll_rows(consumer, 1)
        consumer.commit()
        cluster.kill(offsets.partitions[partition_of(b"g", 3)].leader)
        consumer.commit()
        assert committed_offset(consumer, T0) == 1


def test_a_commit_is_tried_again_while_the_coordinator_loads(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    left = [CoordinatorNotAvailableError("loading")] * 3

    def hook(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, OffsetCommitRequest) and left:
            error = left.pop()
            return ErrorResponse(error.code, error.message)
        return None

    cluster.call_hook = hook
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"]) as consumer:
        consumer.seek_to_beginning()
        consumer.position(T0)
        consumer.commit()
        assert committed_offset(consumer, T0) == 0
    assert left == []


def test_what_was_committed_is_not_known_any_more_after_a_commit_that_failed(
    cluster: FakeCluster, values: Values
) -> None:
    """Simulator, seed 403128: a commit was stored, its answer was lost. A consumer that seeks back commits again."""
    cluster.create("t")
    cluster.store("t", 0, values("a"))

    def hook(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, OffsetCommitRequest) and request.offsets[0].offset == 1:
            cluster.committed["g", "t", 0] = request.offsets[0]
            lost = CoordinatorNotAvailableError("the answer is lost")
            return ErrorResponse(lost.code, lost.message)
        return None

    settings: dict[str, Any] = {"auto_offset_reset": "earliest", "default_api_timeout_ms": 2000}
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], **settings) as consumer:
        consumer.position(T0)
        consumer.commit()
        poll_rows(consumer, 1)
        cluster.call_hook = hook
        with pytest.raises(SparkBrokerError):
            consumer.commit()
        assert cluster.committed["g", "t", 0].offset == 1
        consumer.seek(T0, 0)
    assert cluster.committed["g", "t", 0].offset == 0


def test_an_asynchronous_commit_waits_for_no_answer(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a", "b"))
    answer = threading.Event()

    def hook(broker: int, request: CallRequest) -> Message | None:
        assert not isinstance(request, OffsetCommitRequest) or answer.wait(WAIT_S)
        return None

    cluster.call_hook = hook
    settings: dict[str, Any] = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], **settings) as consumer:
        poll_rows(consumer, 2)
        consumer.commit_async()
        assert ("g", "t", 0) not in cluster.committed
        answer.set()
        wait_until(lambda: ("g", "t", 0) in cluster.committed, "a commit")
        assert committed_offset(consumer, T0) == 2


def test_after_an_asynchronous_commit_that_failed_the_next_one_stores_its_offsets(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    loading = CoordinatorNotAvailableError("loading")

    def hook(broker: int, request: CallRequest) -> Message | None:
        return ErrorResponse(loading.code, loading.message) if isinstance(request, OffsetCommitRequest) else None

    settings: dict[str, Any] = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
    with Consumer(cluster.bootstrap, group_id="g", topics=["t"], **settings) as consumer:
        poll_rows(consumer, 1)
        cluster.call_hook = hook
        consumer.commit_async()
        wait_until(lambda: "the next commit stores its offsets" in caplog.text, "a line of the log")
        assert consumer.poll(0.0) == []
        cluster.call_hook = lambda broker, request: None
        consumer.commit_async()
        wait_until(lambda: ("g", "t", 0) in cluster.committed, "a commit")
        assert committed_offset(consumer, T0) == 1


def test_commits_need_a_group(cluster: FakeCluster, consumer: Consumer) -> None:
    with pytest.raises(InvalidConfigError, match=r"group\.id"):
        consumer.commit()


def test_a_closed_consumer_says_so(cluster: FakeCluster) -> None:
    cluster.create("t")
    consumer = Consumer(cluster.bootstrap, topics=["t"])
    consumer.close()
    consumer.close()
    for act in (
        consumer.poll,
        consumer.commit,
        consumer.commit_async,
        lambda: consumer.seek(T0, 0),
        lambda: consumer.end_offsets([T0]),
    ):
        with pytest.raises(ClosedError):
            act()


def test_close_does_not_wait_for_a_cluster_that_is_gone(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    consumer = Consumer(cluster.bootstrap, group_id="g", topics=["t"], auto_offset_reset="earliest")
    poll_rows(consumer, 1)
    for broker in range(3):
        cluster.kill(broker)
    consumer.close(timeout=0.5)
    with pytest.raises(ClosedError):
        consumer.poll()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_new_subscription_replaces_what_was_read_before(cluster: FakeCluster, values: Values, by_hand: bool) -> None:
    """Without a group. Story: the old topic was read on, beside the new one."""
    for topic in ("t", "u"):
        cluster.create(topic)
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        if by_hand:
            consumer.assign([T0])
        else:
            consumer.subscribe(["t"])
        assert consumer.position(T0) == 0
        consumer.subscribe(["u"])
        new = TopicPartition("u", 0)
        assert consumer.position(new) == 0
        assert consumer.assignment() == [new]
        cluster.store("t", 0, values("old"))
        cluster.store("u", 0, values("new"))
        assert [batch.topic for batch in poll_rows(consumer, 1)] == ["u"]


def test_a_subscription_that_stays_keeps_its_positions(cluster: FakeCluster, values: Values) -> None:
    for topic in ("t", "u"):
        cluster.create(topic)
    cluster.store("t", 0, values("a", "b"))
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer:
        poll_rows(consumer, 2)
        consumer.subscribe(["t", "u"])
        assert consumer.position(T0) == 2
