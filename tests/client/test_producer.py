"""The producer stores what it acknowledged once and in order, whatever happens to leaders and connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import UTC, datetime

import pandas as pd
import pyarrow as pa
import pytest

from spark_broker import Producer
from spark_broker.client.retry import Deadline
from spark_broker.errors import (
    BootstrapUnreachableError,
    BufferExhaustedError,
    ClosedError,
    InvalidConfigError,
    InvalidDataError,
    InvalidTimestampError,
    MessageTooLargeError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    RequestTimedOutError,
    SchemaMismatchError,
    SparkBrokerError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import RecordMetadata
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.messages import AppendRequest, InitProducerIdRequest, Message, MetadataRequest
from spark_broker.protocol.murmur2 import partition_of
from tests.client.fake_broker import BreakAfterStoring, FakeCluster, Reaction, StoreSilently
from tests.conftest import WaitUntil

Values = Callable[..., pa.RecordBatch]
WAIT_S = 30.0


@pytest.fixture
def producer(cluster: FakeCluster) -> Iterator[Producer]:
    with Producer(cluster.bootstrap) as client:
        yield client


def stored_values(cluster: FakeCluster, topic: str = "t") -> list[list[str]]:
    partitions = range(len(cluster.topics[topic].partitions))
    return [[bytes(row["value"]).decode() for row in cluster.rows(topic, p)] for p in partitions]  # type: ignore[call-overload]


class Script:
    """An append hook that plays its reactions once each, then none. With a gate, the broker waits for it first."""

    def __init__(self, *reactions: Reaction | SparkBrokerError | None, gate: threading.Event | None = None) -> None:
        self._reactions = list(reactions)
        self._gate = gate

    def __call__(self, broker: int, request: AppendRequest, header: BatchHeader) -> Reaction | SparkBrokerError | None:
        if self._gate is not None:
            self._gate.wait(WAIT_S)
        return self._reactions.pop(0) if self._reactions else None


def test_an_append_says_where_its_rows_are(cluster: FakeCluster, producer: Producer, values: Values) -> None:
    cluster.create("t")
    first = producer.append("t", values("a", "b")).result(WAIT_S)
    second = producer.append("t", values("c")).result(WAIT_S)
    assert [(m.topic, m.partition, m.base_offset, m.count) for m in first + second] == [("t", 0, 0, 2), ("t", 0, 2, 1)]
    assert stored_values(cluster) == [["a", "b", "c"]]


def test_rows_go_to_the_partitions_of_their_keys(cluster: FakeCluster, producer: Producer) -> None:
    cluster.create("t", 4)
    keys = [f"key-{n}" for n in range(20)]
    metadata = producer.append("t", [{"key": key, "value": key} for key in keys]).result(WAIT_S)
    expected = [[key for key in keys if partition_of(key.encode(), 4) == p] for p in range(4)]
    assert stored_values(cluster) == expected
    assert [m.partition for m in metadata] == [p for p in range(4) if expected[p]]


def test_unkeyed_batches_take_turns_and_pass_over_partitions_without_a_leader(
    cluster: FakeCluster, producer: Producer, values: Values
) -> None:
    cluster.create("t", 3)
    cluster.elect("t", 1, -1)
    for name in "abcd":
        producer.append("t", values(name)).result(WAIT_S)
    assert stored_values(cluster) == [["a", "c"], [], ["b", "d"]]


def test_a_typed_topic_takes_tables_frames_and_dicts(cluster: FakeCluster, producer: Producer) -> None:
    schema = pa.schema([("city", pa.string()), ("n", pa.int64())])
    cluster.create("t", 1, schema=schema, config={"key.columns": "city"})
    producer.append("t", pa.table({"n": pa.array([1], pa.int32()), "city": ["A"]})).result(WAIT_S)
    producer.append("t", pd.DataFrame({"city": ["B"], "n": [2]})).result(WAIT_S)
    producer.append("t", [{"city": "C"}]).result(WAIT_S)
    assert cluster.rows("t", 0) == [{"city": "A", "n": 1}, {"city": "B", "n": 2}, {"city": "C", "n": None}]


def test_an_empty_append_is_done_at_once(cluster: FakeCluster, producer: Producer, values: Values) -> None:
    cluster.create("t")
    assert producer.append("t", values("a").slice(0, 0)).result(WAIT_S) == []
    assert producer.append("t", []).result(WAIT_S) == []


def test_a_record_without_a_timestamp_gets_the_time_of_its_append(
    cluster: FakeCluster, producer: Producer, values: Values
) -> None:
    cluster.create("t")
    before = datetime.now(UTC)
    producer.append("t", values("a")).result(WAIT_S)
    (row,) = cluster.rows("t", 0)
    assert before <= row["timestamp"] <= datetime.now(UTC)  # type: ignore[operator]


def test_records_gather_in_one_batch_and_each_gets_its_offset(cluster: FakeCluster) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=60_000, batch_size=1_000_000) as producer:
        moment = datetime(2020, 1, 2, tzinfo=UTC)
        sent = [
            producer.send("t", value=b"v1", key=b"k", headers={"h": b"x"}, timestamp=moment),
            producer.send("t", value="v2", timestamp=datetime(2017, 7, 14, 2, 40)),  # noqa: DTZ001
            producer.send("t"),
        ]
        assert cluster.arrivals == []
        producer.flush()
        assert [future.result(0).offset for future in sent] == [0, 1, 2]
    assert len(cluster.arrivals) == 1
    first, second, third = cluster.rows("t", 0)
    assert first == {"key": b"k", "value": b"v1", "headers": [{"key": "h", "value": b"x"}], "timestamp": moment}
    assert second["timestamp"] == datetime(2017, 7, 14, 2, 40, tzinfo=UTC)
    assert (third["key"], third["value"], third["headers"]) == (None, None, None)


def test_a_record_is_sent_after_linger_ms_without_a_flush(cluster: FakeCluster) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=1) as producer:
        assert producer.send("t", b"v").result(WAIT_S).offset == 0


def test_a_full_batch_is_sent_before_linger_ms(cluster: FakeCluster) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=3_600_000, batch_size=1000) as producer:
        first = [producer.send("t", b"x" * 100) for _ in range(8)]
        assert first[0].result(WAIT_S).offset == 0


def test_small_records_are_never_too_large_together(cluster: FakeCluster) -> None:
    """batch.size is larger than what the topic takes."""
    cluster.create("t", config={"max.message.bytes": "4000"})
    with Producer(cluster.bootstrap, linger_ms=3_600_000, batch_size=1_000_000) as producer:
        sent = [producer.send("t", b"x" * 100, headers={"h": b"", "i": None}) for _ in range(100)]
        producer.flush()
        assert [future.result(WAIT_S).offset for future in sent] == list(range(100))
    assert 4 <= len(cluster.arrivals) <= 8


def test_batches_of_records_without_keys_take_turns(cluster: FakeCluster) -> None:
    cluster.create("t", 3)
    cluster.elect("t", 1, -1)
    with Producer(cluster.bootstrap, linger_ms=3_600_000) as producer:
        for name in "abcd":
            first, second = producer.send("t", name), producer.send("t", name.upper())
            producer.flush()
            assert first.result(0).partition == second.result(0).partition
    assert stored_values(cluster) == [["a", "A", "c", "C"], [], ["b", "B", "d", "D"]]


def test_records_with_keys_keep_their_order_and_go_where_kafka_sends_them(cluster: FakeCluster) -> None:
    cluster.create("t", 4)
    rows = [(f"key-{n % 7}", f"{n}") for n in range(60)]
    with Producer(cluster.bootstrap) as producer:
        for key, value in rows:
            producer.send("t", value, key=key)
    assert stored_values(cluster) == [[v for k, v in rows if partition_of(k.encode(), 4) == p] for p in range(4)]


def test_keys_go_to_partitions_that_were_added(cluster: FakeCluster, wait_until: WaitUntil) -> None:
    cluster.create("t", 1)
    cluster.create("grown", 5)
    key = b"key"
    assert partition_of(key, 5) != 0
    with Producer(cluster.bootstrap, metadata_max_age_ms=50) as producer:
        assert producer.send("t", b"v", key=key).result(WAIT_S).partition == 0
        cluster.topics["t"].partitions += cluster.topics["grown"].partitions[1:]
        wait_until(
            lambda: producer.send("t", b"v", key=key).result(WAIT_S).partition == partition_of(key, 5), "new metadata"
        )


def test_a_typed_topic_takes_no_single_records(cluster: FakeCluster, producer: Producer) -> None:
    cluster.create("t", 1, schema=pa.schema([("city", pa.string())]))
    for _ in range(2):
        with pytest.raises(SchemaMismatchError, match=r"city: use append\(\)"):
            producer.send("t", b"v").result(WAIT_S)


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_records_that_many_threads_send_are_where_their_futures_say(cluster: FakeCluster, linger_ms: int) -> None:
    cluster.create("t", 2)
    sent: list[list[tuple[str, Future[RecordMetadata]]]] = [[] for _ in range(4)]
    with Producer(cluster.bootstrap, linger_ms=linger_ms, batch_size=1000) as producer:

        def run(thread: int) -> None:
            for n in range(200):
                sent[thread].append((f"{thread}-{n}", producer.send("t", f"{thread}-{n}", key=f"{thread}")))

        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    stored = stored_values(cluster)
    assert sum(map(len, stored)) == 800
    for records in sent:
        places = [future.result(0) for _, future in records]
        offsets = [place.offset for place in places if place.offset is not None]
        rows = [stored[place.partition][offset] for place, offset in zip(places, offsets, strict=True)]
        assert rows == [value for value, _ in records]
        assert offsets == sorted(offsets), "order is kept"


def test_what_send_returns_is_a_future(cluster: FakeCluster, producer: Producer) -> None:
    cluster.create("t")
    called: list[Future[RecordMetadata]] = []
    sent = [producer.send("t", f"{n}") for n in range(10)]
    for future in sent:
        assert isinstance(future, Future)
        future.add_done_callback(called.append)
    assert wait(sent, WAIT_S).not_done == set()
    producer.flush()
    assert called == sent, "flush returns after the callbacks"
    assert [future.result(0).offset for future in sent] == list(range(10))


def test_an_append_does_not_overtake_records_sent_before_it(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=3_600_000) as producer:
        producer.send("t", b"a")
        producer.append("t", values("b")).result(WAIT_S)
    assert stored_values(cluster) == [["a", "b"]]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"value": 3}, InvalidDataError),
        ({"value": b"v", "headers": [("h",)]}, InvalidDataError),
        ({"value": b"v", "timestamp": datetime(1969, 12, 31, tzinfo=UTC)}, InvalidTimestampError),
        ({"value": b"v", "timestamp": 1_500_000_000_000}, InvalidDataError),
        ({"value": b"v", "partition": 9}, UnknownTopicOrPartitionError),
        ({"value": b"x" * 5000}, MessageTooLargeError),
    ],
)
def test_a_record_that_cannot_be_stored_fails_alone(
    cluster: FakeCluster, producer: Producer, arguments: dict[str, object], kind: type[SparkBrokerError]
) -> None:
    cluster.create("t", config={"max.message.bytes": "4000"})
    good = producer.send("t", b"before")
    bad = producer.send("t", **arguments)  # type: ignore[arg-type]
    after = producer.send("t", b"after")
    assert isinstance(bad.exception(WAIT_S), kind)
    assert good.exception(WAIT_S) is after.exception(WAIT_S) is None
    assert stored_values(cluster) == [["before", "after"]]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_batch_that_is_too_large_is_refused_and_nothing_is_sent(cluster: FakeCluster, compression: str) -> None:
    cluster.create("t", 2, config={"max.message.bytes": "5000"})
    rows = [{"key": key, "value": value} for key, value in (("a", "small"), ("b", "x" * 6000))]
    batch = pa.RecordBatch.from_pylist(rows)
    with Producer(cluster.bootstrap, compression_type=compression) as producer:
        assert isinstance(producer.append("t", batch).exception(WAIT_S), MessageTooLargeError)
        assert isinstance(producer.append("t", rows).exception(WAIT_S), MessageTooLargeError), (
            "no slice is small enough"
        )
    assert cluster.arrivals == []


def test_a_large_table_is_sliced_in_order_before_it_is_numbered(cluster: FakeCluster, producer: Producer) -> None:
    cluster.create("t", config={"max.message.bytes": "5000"})
    names = [f"{n:0100}" for n in range(300)]
    metadata = producer.append("t", pa.table({"value": names})).result(WAIT_S)
    assert len(metadata) > 5
    assert [m.base_offset for m in metadata] == [sum(m.count for m in metadata[:i]) for i in range(len(metadata))]
    assert stored_values(cluster) == [names]
    assert [arrival.sequence for arrival in cluster.arrivals] == list(range(len(metadata)))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (pa.table({"nope": [1]}), SchemaMismatchError),
        (pa.table({"value": [1]}), SchemaMismatchError),
        ([{"value": b"x", "nope": 1}], SchemaMismatchError),
        ([{"value": 1.5}], SchemaMismatchError),
        ([1], InvalidDataError),
        ("text", InvalidDataError),
        (17, InvalidDataError),
    ],
)
def test_data_that_does_not_fit_fails_the_future_and_nothing_is_sent(
    cluster: FakeCluster, producer: Producer, data: object, kind: type[SparkBrokerError]
) -> None:
    cluster.create("t")
    assert isinstance(producer.append("t", data).exception(WAIT_S), kind)
    assert cluster.arrivals == []


def test_an_unknown_topic_or_partition_is_named(cluster: FakeCluster, producer: Producer, values: Values) -> None:
    cluster.create("t")
    with pytest.raises(UnknownTopicOrPartitionError, match="'nope'"):
        producer.append("nope", values("a")).result(WAIT_S)
    with pytest.raises(UnknownTopicOrPartitionError, match="partitions 0 to 0"):
        producer.append("t", values("a"), partition=1).result(WAIT_S)


def test_an_unknown_setting_names_the_nearest(cluster: FakeCluster) -> None:
    with pytest.raises(InvalidConfigError, match=r"linger\.ms"):
        Producer(cluster.bootstrap, lingerms=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidConfigError, match="acks"):
        Producer(cluster.bootstrap, acks=2)
    with pytest.raises(InvalidConfigError, match=r"linger\.ms"):
        Producer(cluster.bootstrap, config={"linger.ms": "soon"})


def test_a_closed_producer_says_so(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    producer = Producer(cluster.bootstrap)
    producer.close()
    producer.close()
    with pytest.raises(ClosedError):
        producer.append("t", values("a"))
    with pytest.raises(ClosedError):
        producer.send("t", b"a")


@pytest.mark.slow
def test_unreachable_addresses_are_all_named(values: Values) -> None:
    with (
        Producer(["127.0.0.1:1", "127.0.0.1:2"]) as producer,
        pytest.raises(BootstrapUnreachableError, match=r"(?s)127\.0\.0\.1:(1.*:2|2.*:1)"),
    ):
        producer.append("t", values("a")).result(WAIT_S)


def test_a_killed_leader_loses_nothing_and_stores_nothing_twice(
    cluster: FakeCluster, producer: Producer, values: Values
) -> None:
    cluster.create("t", 3)
    names = [f"{n}" for n in range(120)]
    futures = []
    for n, name in enumerate(names):
        if n == 40:
            cluster.kill(0)
        if n == 80:
            cluster.kill(1)
        futures.append(producer.append("t", values(name), partition=n % 3))
    placed = {future.result(WAIT_S)[0]: name for future, name in zip(futures, names, strict=True)}
    assert stored_values(cluster) == [names[p::3] for p in range(3)]
    assert {(m.partition, m.base_offset): name for m, name in placed.items()} == {
        (p, offset): name for p in range(3) for offset, name in enumerate(names[p::3])
    }


def test_a_batch_whose_answer_was_lost_is_recognised_by_its_number(
    cluster: FakeCluster, producer: Producer, values: Values
) -> None:
    cluster.create("t")
    cluster.append_hook = Script(None, BreakAfterStoring())
    results = [producer.append("t", values(name)).result(WAIT_S)[0] for name in "abc"]
    assert [m.base_offset for m in results] == [0, 1, 2]
    assert stored_values(cluster) == [["a", "b", "c"]]
    retried = [arrival for arrival in cluster.arrivals if arrival.sequence == 1]
    assert len(retried) == 2
    assert retried[0].body == retried[1].body, "a retry sends the same bytes"


def test_a_retry_after_an_election_names_the_new_epoch(
    cluster: FakeCluster, producer: Producer, values: Values
) -> None:
    cluster.create("t")
    producer.append("t", values("a")).result(WAIT_S)
    cluster.elect("t", 0, 1)
    producer.append("t", values("b")).result(WAIT_S)
    assert [(a.broker, a.leader_epoch) for a in cluster.arrivals] == [(0, 0), (0, 0), (1, 1)]
    assert stored_values(cluster) == [["a", "b"]]


def test_a_window_that_fails_in_the_middle_is_sent_again_in_order(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap) as producer:
        producer.append("t", values("0")).result(WAIT_S)
        gate = threading.Event()
        cluster.append_hook = Script(None, NotEnoughReplicasError("the ISR is too small"), gate=gate)
        futures = [producer.append("t", values(str(n))) for n in range(1, 30)]
        gate.set()
        assert [future.result(WAIT_S)[0].base_offset for future in futures] == list(range(1, 30))
    assert stored_values(cluster) == [[str(n) for n in range(30)]]


def test_at_most_five_batches_of_a_partition_are_unacknowledged(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap) as producer:
        cluster.append_hook = lambda broker, request, header: StoreSilently()
        futures = [producer.append("t", values(str(n))) for n in range(12)]
        wait_until(lambda: len(cluster.arrivals) == 5, "five arrivals")
        assert not any(future.done() for future in futures)
        cluster.append_hook = Script()
        cluster.kill(0)
        assert [future.result(WAIT_S)[0].base_offset for future in futures] == list(range(12))
    assert stored_values(cluster) == [[str(n) for n in range(12)]]
    sequences = [arrival.sequence for arrival in cluster.arrivals]
    assert sequences == [0, 1, 2, 3, 4, *range(12)]


def test_a_frozen_leader_is_left_as_soon_as_it_is_fenced(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap) as producer:
        producer.append("t", values("a")).result(WAIT_S)
        cluster.brokers[0].proxy.freeze()
        future = producer.append("t", values("b"))
        cluster.fence(0)
        assert future.result(WAIT_S)[0].base_offset == 1
        cluster.brokers[0].proxy.thaw()
    assert stored_values(cluster) == [["a", "b"]]


def test_batches_that_wait_behind_a_stalled_leader_go_to_the_new_one(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil
) -> None:
    """They wait in the old leader's line, from which nothing is written: another thread's write is stuck there."""
    cluster.create("big", 24)
    cluster.create("t")
    bulk = values("x" * 900_000)
    with Producer(cluster.bootstrap, buffer_memory=1 << 30) as producer:
        producer.append("big", values("a"), partition=0).result(WAIT_S)
        producer.append("t", values("a")).result(WAIT_S)
        cluster.brokers[0].proxy.freeze()
        flood = Flood(producer, bulk, partitions=range(0, 24, 3))
        wait_until(flood.is_stuck, "a write that does not return")
        first = producer.append("t", values("b"))
        cluster.elect("t", 0, 1)
        seen = len(cluster.calls)
        wait_until(lambda: metadata_calls(cluster, seen) >= 2, "new metadata")
        second = producer.append("t", values("c"))
        assert [future.result(WAIT_S / 3)[0].base_offset for future in (first, second)] == [1, 2]
        cluster.brokers[0].proxy.thaw()
        flood.join()
    assert stored_values(cluster) == [["a", "b", "c"]]


class Flood:
    """Appends to partitions of one leader, in a thread of its own."""

    def __init__(self, producer: Producer, batch: pa.RecordBatch, partitions: range) -> None:
        self._appended = 0
        self._looked = (-1, 0.0)
        self._thread = threading.Thread(target=self._run, args=(producer, batch, partitions), daemon=True)
        self._thread.start()

    def is_stuck(self) -> bool:
        """Whether it has not appended anything for a second, though it is not done."""
        count, since_s = self._looked
        if count != self._appended:
            self._looked = (self._appended, time.monotonic())
            return False
        return self._thread.is_alive() and time.monotonic() - since_s > 1.0

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self, producer: Producer, batch: pa.RecordBatch, partitions: range) -> None:
        for _ in range(4):
            for partition in partitions:
                producer.append("big", batch, partition=partition)
                self._appended += 1


def metadata_calls(cluster: FakeCluster, since: int) -> int:
    return sum(isinstance(request, MetadataRequest) for _, request in cluster.calls[since:])


def test_a_leader_that_comes_back_at_another_address_is_found(
    cluster: FakeCluster, producer: Producer, values: Values
) -> None:
    cluster.create("t")
    producer.append("t", values("a")).result(WAIT_S)
    cluster.move(0)
    assert producer.append("t", values("b")).result(WAIT_S)[0].base_offset == 1


def test_a_silent_leader_is_asked_again_after_request_timeout_ms(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.append_hook = Script(StoreSilently())
    with Producer(cluster.bootstrap, request_timeout_ms=2000) as producer:
        assert producer.append("t", values("a")).result(WAIT_S)[0].base_offset == 0
    assert stored_values(cluster) == [["a"]]
    assert len(cluster.arrivals) == 2


def test_a_batch_refused_for_good_fails_alone_and_later_ones_get_new_numbers(
    cluster: FakeCluster, producer: Producer, values: Values
) -> None:
    cluster.create("t")
    producer.append("t", values("0")).result(WAIT_S)
    gate = threading.Event()
    cluster.append_hook = Script(None, MessageTooLargeError("too large for the broker"), gate=gate)
    futures = [producer.append("t", values(str(n))) for n in range(1, 12)]
    gate.set()
    outcomes = [future.exception(WAIT_S) for future in futures]
    assert [type(outcome) for outcome in outcomes] == [type(None), MessageTooLargeError, *[type(None)] * 9]
    assert stored_values(cluster) == [["0", "1", *[str(n) for n in range(3, 12)]]]
    assert len({arrival.producer_id for arrival in cluster.arrivals}) == 2


def test_a_producer_that_the_broker_has_forgotten_goes_on_under_a_new_id(
    cluster: FakeCluster, producer: Producer, values: Values
) -> None:
    cluster.create("t")
    producer.append("t", values("a")).result(WAIT_S)
    cluster.topics["t"].partitions[0].producers = type(cluster.topics["t"].partitions[0].producers)()
    assert producer.append("t", values("b")).result(WAIT_S)[0].base_offset == 1
    assert stored_values(cluster) == [["a", "b"]]


@pytest.mark.slow
def test_an_append_that_nobody_acknowledges_fails_at_delivery_timeout_ms(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.append_hook = lambda broker, request, header: NotEnoughReplicasError("one of two")
    with Producer(cluster.bootstrap, delivery_timeout_ms=4000) as producer:
        error = producer.append("t", values("a")).exception(WAIT_S)
        assert isinstance(error, RequestTimedOutError)
        assert "NOT_ENOUGH_REPLICAS" in str(error), "it says why"
        cluster.append_hook = Script()
        assert producer.append("t", values("b")).result(WAIT_S)[0].base_offset == 0
    assert stored_values(cluster) == [["b"]]


def test_a_full_buffer_blocks_and_then_refuses(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.append_hook = lambda broker, request, header: StoreSilently()
    big = values("x" * 3000)
    with Producer(cluster.bootstrap, buffer_memory=6000, max_block_ms=2000) as producer:
        waiting = producer.append("t", big)
        assert isinstance(producer.append("t", big).exception(WAIT_S), BufferExhaustedError)
        assert not waiting.done()
        cluster.append_hook = Script()
        cluster.kill(0)
        waiting.result(WAIT_S)
        assert producer.append("t", big).result(WAIT_S)[0].base_offset == 1, "room is given back"


def test_acks_0_does_not_wait_and_has_no_offset(cluster: FakeCluster, values: Values, wait_until: WaitUntil) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, acks=0) as producer:
        for name in "abc":
            assert producer.append("t", values(name)).result(WAIT_S)[0].base_offset is None
        wait_until(lambda: stored_values(cluster) == [["a", "b", "c"]], "the appends are stored")
    assert {arrival.producer_id for arrival in cluster.arrivals} == {-1}


def test_acks_1_retries_without_numbers(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.append_hook = Script(NotLeaderOrFollowerError("not yet"))
    with Producer(cluster.bootstrap, acks="1") as producer:
        assert producer.append("t", values("a")).result(WAIT_S)[0].base_offset == 0
    assert {arrival.sequence for arrival in cluster.arrivals} == {-1}


def test_a_partition_without_a_leader_waits_for_one(cluster: FakeCluster, producer: Producer, values: Values) -> None:
    cluster.create("t")
    cluster.elect("t", 0, -1)
    future = producer.append("t", values("a"))
    assert not future.done()
    cluster.elect("t", 0, 2)
    assert future.result(WAIT_S)[0].base_offset == 0


def test_a_deleted_topic_fails_what_waits_for_it(cluster: FakeCluster, producer: Producer, values: Values) -> None:
    cluster.create("t")
    producer.append("t", values("a")).result(WAIT_S)
    del cluster.topics["t"]
    assert isinstance(producer.append("t", values("b")).exception(WAIT_S), UnknownTopicOrPartitionError)


def test_appends_of_many_threads_are_all_stored_once(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t", 2)
    with Producer(cluster.bootstrap) as producer:

        def run(thread: int) -> None:
            for n in range(40):
                producer.append("t", values(f"{thread}-{n}"), partition=thread % 2)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        producer.flush()
        assert producer.metrics()["acknowledged_rows"] == 160
    for partition, stored in enumerate(stored_values(cluster)):
        for number in (partition, partition + 2):
            own = [value for value in stored if value.startswith(f"{number}-")]
            assert own == [f"{number}-{n}" for n in range(40)], "order of one thread is kept"


def test_close_waits_for_what_is_under_way(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    producer = Producer(cluster.bootstrap, linger_ms=3_600_000)
    sent, appended = producer.send("t", b"a"), producer.append("t", values("b"))
    late = producer.send("t", b"c")
    producer.close()
    assert sent.done()
    assert appended.done()
    assert late.result(0).offset == 2


def test_close_with_a_timeout_fails_what_is_left(cluster: FakeCluster, values: Values) -> None:
    cluster.create("t")
    cluster.append_hook = lambda broker, request, header: StoreSilently()
    producer = Producer(cluster.bootstrap)
    future = producer.append("t", values("a"))
    producer.close(timeout=0.1)
    assert isinstance(future.exception(WAIT_S), ClosedError)


@pytest.mark.parametrize("linger_ms", [20, 3_600_000], ids=["another thread waits", "nobody waits yet"])
@pytest.mark.parametrize("end", [Producer.close, Producer.flush])
def test_an_end_keeps_its_time_while_records_of_send_wait_for_room(
    cluster: FakeCluster, values: Values, end: Callable[[Producer, float], None], linger_ms: int
) -> None:
    """Story: it took max.block.ms for each partition. What a flush has no time for is sent later."""
    cluster.create("t")
    full = threading.Event()
    full.set()
    cluster.append_hook = lambda broker, request, header: StoreSilently() if full.is_set() else None
    settings = {"buffer_memory": 6000, "max_block_ms": 60_000, "request_timeout_ms": 1000, "linger_ms": linger_ms}
    producer = Producer(cluster.bootstrap, config={name.replace("_", "."): value for name, value in settings.items()})
    producer.append("t", values("x" * 3000))
    future = producer.send("t", b"y" * 3000)
    began_s = time.monotonic()
    with suppress(RequestTimedOutError):
        end(producer, 0.5)
    assert time.monotonic() - began_s < WAIT_S / 2
    if end is Producer.flush:
        assert not future.done()
        full.clear()
        producer.flush()
        assert future.result(WAIT_S).offset == 1
        producer.close()
    assert future.done()


def test_an_append_waits_for_earlier_sends_no_longer_than_for_its_own_room(
    cluster: FakeCluster, values: Values
) -> None:
    cluster.create("t", 4)
    cluster.append_hook = lambda broker, request, header: StoreSilently()
    producer = Producer(cluster.bootstrap, buffer_memory=6000, max_block_ms=1000, linger_ms=3_600_000)
    producer.append("t", values("x" * 3000))
    for partition in range(4):
        producer.send("t", b"y" * 3000, partition=partition)
    began_s = time.monotonic()
    assert isinstance(producer.append("t", values("z")).exception(WAIT_S), BufferExhaustedError)
    assert time.monotonic() - began_s < 3
    producer.close(0)


@pytest.mark.parametrize("error", [BootstrapUnreachableError("nobody answers"), RequestTimedOutError("too late")])
def test_a_flush_that_finds_no_broker_leaves_the_records_to_a_later_try(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, error: SparkBrokerError
) -> None:
    """Story: brokers came back after the flush, within max.block.ms, and the records had failed."""
    cluster.create("t")

    back = threading.Event()

    with Producer(cluster.bootstrap, linger_ms=3_600_000) as producer:
        prepare = producer._sender.prepare

        def nobody_yet(deadline: Deadline) -> None:
            if not back.wait(deadline.remaining_s / 2):  # The back-off is longer than what is left.
                raise error
            prepare(deadline)

        monkeypatch.setattr(producer._sender, "prepare", nobody_yet)
        future = producer.send("t", b"a")
        with pytest.raises(RequestTimedOutError):
            producer.flush(1)
        assert not future.done()
        back.set()
        producer.flush()
        assert future.result(WAIT_S).offset == 0


def test_a_close_keeps_its_time_while_another_thread_waits_for_a_broker(cluster: FakeCluster) -> None:
    cluster.create("t")
    asked, answered = threading.Event(), threading.Event()

    def silent(broker: int, request: Message) -> Message | None:
        if isinstance(request, InitProducerIdRequest):
            asked.set()
            answered.wait(WAIT_S * 2)
        return None

    cluster.call_hook = silent
    producer = Producer(cluster.bootstrap, linger_ms=5, max_block_ms=60_000)
    future = producer.send("t", b"a")
    assert asked.wait(WAIT_S)
    began_s = time.monotonic()
    producer.close(0.5)
    assert time.monotonic() - began_s < WAIT_S / 2
    assert isinstance(future.exception(WAIT_S), SparkBrokerError)
    answered.set()


def test_a_callback_may_append(cluster: FakeCluster, producer: Producer, values: Values) -> None:
    cluster.create("t")
    done = threading.Event()

    def append_again(_: object) -> None:
        producer.append("t", values("b")).add_done_callback(lambda future: done.set())

    producer.append("t", values("a")).add_done_callback(append_again)
    assert done.wait(WAIT_S)
    assert stored_values(cluster) == [["a", "b"]]


def test_a_batch_of_no_rows_is_nothing_to_append(cluster: FakeCluster, producer: Producer, values: Values) -> None:
    """Story: with `partition` it raised, where a filter had left nothing."""
    cluster.create("t", 2)
    for partition in (None, 1):
        assert producer.append("t", values("a").slice(0, 0), partition=partition).result(WAIT_S) == []
    with pytest.raises(UnknownTopicOrPartitionError):
        producer.append("t", values("a").slice(0, 0), partition=2).result(WAIT_S)


@pytest.mark.parametrize("linger_ms", [0, 5])
@pytest.mark.parametrize("sends", [False, True])
def test_callbacks_may_append_while_the_buffer_is_full(
    cluster: FakeCluster, values: Values, wait_until: WaitUntil, linger_ms: int, sends: bool
) -> None:
    """Story: the thread that makes room ran the callback, which waited for room. Batches stood still for 30 s, until
    their connection timed out.
    """
    cluster.create("t")
    gate = threading.Event()
    cluster.append_hook = Script(gate=gate)
    with Producer(cluster.bootstrap, buffer_memory=6000, linger_ms=linger_ms, batch_size=1000) as producer:
        again: list[Future[object]] = []

        def append(text: str) -> Future[object]:
            if sends:
                return producer.send("t", text, partition=0)  # type: ignore[return-value]
            return producer.append("t", values(text), partition=0)  # type: ignore[return-value]

        def append_all() -> None:
            for number in range(40):
                append(f"{number:03}" + "x" * 900).add_done_callback(
                    lambda _: again.append(append("again" + "x" * 900))
                )

        thread = threading.Thread(target=append_all)
        thread.start()
        wait_until(lambda: producer._sender._buffered_bytes > 4000, "the buffer is full")
        began_s = time.monotonic()
        gate.set()
        thread.join(WAIT_S)
        wait_until(lambda: len(again) == 40, "every callback has appended")
        wait(again, WAIT_S)
        assert time.monotonic() - began_s < WAIT_S / 2
        assert not [future for future in again if future.exception(0)]
    first = [value[:3] for value in stored_values(cluster)[0] if not value.startswith("again")]
    assert first == [f"{number:03}" for number in range(40)], "callbacks keep the order of others"
    assert len(stored_values(cluster)[0]) == 80
