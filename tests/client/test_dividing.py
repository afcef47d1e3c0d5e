"""`max.message.bytes` is lowered under an open producer: what `send` gathered is divided, and stored once, in order."""

from __future__ import annotations

import random
import threading

import pyarrow as pa
import pytest

from spark_broker import Producer
from spark_broker.client.dividing import PieceResults, divided
from spark_broker.errors import (
    MessageTooLargeError,
    RecordListTooLargeError,
    SparkBrokerError,
)
from spark_broker.model import RecordMetadata
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.messages import AppendRequest
from tests.client.fake_broker import BreakAfterStoring, FakeCluster, Reaction
from tests.client.test_fail_over import RandomFaults
from tests.client.test_producer import Script
from tests.client.test_transactions import committed
from tests.support.waiting import eventually

WAIT_S = 60.0
LOWER = 4000
NAMES = [f"record {n:03}" + "." * 90 for n in range(400)]


def lower(cluster: FakeCluster, limit: int = LOWER) -> None:
    """Behind the producer's back: it has the metadata of before."""
    cluster.topics["t"].config["max.message.bytes"] = str(limit)


def stored(cluster: FakeCluster, partition: int = 0) -> list[str]:
    return [row["value"].decode() for row in cluster.rows("t", partition)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compression_type": "zstd"},
        {"enable_idempotence": False},
        {"acks": 1},
        {"max_in_flight_requests_per_connection": 1},
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_small_records_are_stored_though_their_batch_became_too_large(
    cluster: FakeCluster, settings: dict[str, object], known: bool
) -> None:
    """Story: 400 of 400 small records failed with MESSAGE_TOO_LARGE, once."""
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=60_000, **settings) as producer:  # type: ignore[arg-type]
        producer.append("t", [{"value": b"first"}]).result(WAIT_S)
        futures = [producer.send("t", name, partition=0) for name in NAMES]
        lower(cluster)
        if known:
            cluster.create("u")
            producer.append("u", [{"value": b"brings new metadata"}]).result(WAIT_S)
        producer.flush(WAIT_S)
        assert [future.result(0) for future in futures] == [RecordMetadata("t", 0, n + 1, 1) for n in range(len(NAMES))]
    assert stored(cluster) == ["first", *NAMES]
    assert [arrival.rows for arrival in cluster.arrivals].count(len(NAMES)) == (not known)


def test_what_is_in_flight_behind_follows_in_order(cluster: FakeCluster) -> None:
    cluster.create("t")
    gate = threading.Event()
    with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        producer.append("t", [{"value": b"first"}]).result(WAIT_S)
        cluster.append_hook = Script(gate=gate)
        expected, futures = ["first"], []
        for begin in range(0, len(NAMES), 80):
            names = NAMES[begin : begin + 80]
            futures += [producer.send("t", name, partition=0) for name in names]
            futures.append(producer.append("t", [{"value": f"append {begin}".encode()}], partition=0))  # type: ignore[arg-type]
            expected += [*names, f"append {begin}"]
        lower(cluster)
        gate.set()
        producer.flush(WAIT_S)
        assert [future.exception(0) for future in futures] == [None] * len(futures)
    assert stored(cluster) == expected


def test_a_record_that_is_too_large_fails_alone(cluster: FakeCluster) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        producer.append("t", [{"value": b"first"}]).result(WAIT_S)
        values = [*NAMES[:50], "x" * 9000, *NAMES[50:100]]
        futures = [producer.send("t", value, partition=0) for value in values]
        lower(cluster)
        producer.flush(WAIT_S)
        errors = [future.exception(0) for future in futures]
    assert [n for n, error in enumerate(errors) if error is not None] == [50]
    assert isinstance(errors[50], MessageTooLargeError)
    assert stored(cluster) == ["first", *NAMES[:100]]
    assert [future.result(0).offset for n, future in enumerate(futures) if n != 50] == list(range(1, 101))


def test_a_batch_that_is_larger_than_a_segment_is_divided_too(cluster: FakeCluster) -> None:
    cluster.create("t")
    cluster.append_hook = Script(RecordListTooLargeError("a segment holds less"), RecordListTooLargeError("less"))
    with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        futures = [producer.send("t", name, partition=0) for name in NAMES]
        producer.flush(WAIT_S)
        assert [future.result(0).offset for future in futures] == list(range(len(NAMES)))
    assert stored(cluster) == NAMES


def test_an_append_is_never_divided_and_says_so(cluster: FakeCluster) -> None:
    cluster.create("t")
    rows = [{"value": name.encode()} for name in NAMES]
    with Producer(cluster.bootstrap) as producer:
        producer.append("t", rows[:1]).result(WAIT_S)
        lower(cluster)
        with pytest.raises(
            MessageTooLargeError, match="`append` has handed on is never divided -> Append the rows again"
        ):
            producer.append("t", rows).result(WAIT_S)
        eventually(lambda: producer.append("t", rows).exception(WAIT_S) is None)
    assert stored(cluster) == [NAMES[0], *NAMES]


def test_what_may_have_been_stored_is_not_sent_again_in_pieces(cluster: FakeCluster) -> None:
    """It was stored under the higher limit, and the answer was lost: pieces of it would be stored a second time."""
    cluster.create("t")

    class LowerAfterStoring:
        attempts = 0

        def __call__(
            self, broker: int, request: AppendRequest, header: BatchHeader
        ) -> Reaction | SparkBrokerError | None:
            self.attempts += 1
            if self.attempts > 1:
                return MessageTooLargeError("a batch of so many bytes")
            return BreakAfterStoring()

    cluster.append_hook = LowerAfterStoring()
    with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        futures = [producer.send("t", name, partition=0) for name in NAMES]
        producer.flush(WAIT_S)
        errors = {str(future.exception(0)) for future in futures}
    assert len(errors) == 1
    assert "an earlier attempt may have stored it" in errors.pop()
    assert stored(cluster) == NAMES


def test_a_transaction_has_all_of_it(cluster: FakeCluster) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, transactional_id="x", linger_ms=60_000) as producer:
        with producer.transaction():
            producer.append("t", [{"value": b"first"}])
        with producer.transaction():
            futures = [producer.send("t", name, partition=0) for name in NAMES[:200]]
            gate = threading.Event()
            cluster.append_hook = Script(gate=gate)
            producer.append("t", [{"value": b"between"}], partition=0)
            futures += [producer.send("t", name, partition=0) for name in NAMES[200:]]
            lower(cluster)
            gate.set()
        assert [future.exception(0) for future in futures] == [None] * len(futures)
        assert producer.metrics()["transactions_committed"] == 2
    assert [name for batch in committed(cluster, "t") for name in batch] == [
        *("first", *NAMES[:200], "between", *NAMES[200:])
    ]


class RandomLimits(RandomFaults):
    """Beside faults, the limit changes: what is stored by an attempt may be refused when it is sent again."""

    def __call__(self, broker: int, request: AppendRequest, header: BatchHeader) -> Reaction | SparkBrokerError | None:
        if self._rng.randrange(4) == 0:
            lower(self._cluster, self._rng.choice((2500, LOWER, 50_000)))
        return super().__call__(broker, request, header)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_changing_limits_and_random_faults_store_nothing_twice_and_lose_nothing_that_was_acknowledged(
    cluster: FakeCluster, seed: int
) -> None:
    cluster.create("t", 2)
    cluster.append_hook = RandomLimits(cluster, seed, every=8)
    rng = random.Random(seed)
    names = [f"record {n:04}" + "." * 60 for n in range(600)]
    with Producer(cluster.bootstrap, request_timeout_ms=400, linger_ms=1, batch_size=3000) as producer:
        futures = []
        for n, name in enumerate(names):
            futures.append(producer.send("t", name, partition=n % 2))
            if rng.randrange(60) == 0:
                producer.flush(WAIT_S)
        producer.flush(WAIT_S)
        failed = {name for name, future in zip(names, futures, strict=True) if future.exception(0) is not None}
    for partition in range(2):
        there = stored(cluster, partition)
        wanted = names[partition::2]
        assert len(set(there)) == len(there), "nothing twice"
        assert [name for name in there if name not in failed] == [name for name in wanted if name not in failed]
    for name, future in zip(names, futures, strict=True):
        if name not in failed:
            metadata = future.result(0)
            assert metadata.offset is None or stored(cluster, metadata.partition)[metadata.offset] == name


def test_pieces_of_pieces_have_their_offsets() -> None:
    rows = pa.record_batch({"value": [b"%d" % n for n in range(8)]})
    outer: list[object] = []
    results = PieceResults([rows.slice(0, 3), rows.slice(3)], outer.append)
    inner = PieceResults([rows.slice(3, 2), rows.slice(5)], results.part(1))
    inner.part(1)(MessageTooLargeError("refused"))
    results.part(0)(RecordMetadata("t", 0, 10, 3))
    assert not outer
    inner.part(0)(RecordMetadata("t", 0, 20, 2))
    (result,) = outer
    outcomes = [result.of(index) for index in range(8)]  # type: ignore[attr-defined]
    offsets = [o.base_offset + n for n, o in enumerate(outcomes) if isinstance(o, RecordMetadata) and o.base_offset]
    assert offsets == [10, 11, 12, 20, 21]
    assert [type(outcome) for outcome in outcomes[5:]] == [MessageTooLargeError] * 3


def test_each_piece_is_within_the_limit_or_has_one_row() -> None:
    rows = pa.record_batch({"value": [b"x" * (900 if n == 5 else 10) for n in range(64)]})
    pieces = divided(rows, 1500)
    assert pa.Table.from_batches(pieces).combine_chunks().to_batches() == [rows]
    assert max(len(encode_batch(piece)) for piece in pieces if piece.num_rows > 1) <= 1500
    assert 2 < len(pieces) < 20
