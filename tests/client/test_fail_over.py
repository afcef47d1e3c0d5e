"""Random faults of leaders and connections: what was acknowledged is there, once and in order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa
import pytest

from spark_broker import Consumer, Producer
from spark_broker.errors import (
    KafkaStorageError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.messages import AppendRequest
from tests.client.fake_broker import BreakAfterStoring, FakeCluster, Reaction, StoreSilently

WAIT_S = 60.0
FAULTS: list[Callable[[], Reaction | SparkBrokerError]] = [
    lambda: BreakAfterStoring(),
    lambda: StoreSilently(),
    lambda: NotEnoughReplicasError("too few"),
    lambda: NotLeaderOrFollowerError("moved"),
    lambda: RequestTimedOutError("late"),
    lambda: KafkaStorageError("disk"),
]


class RandomFaults:
    """One append in `every` meets a fault; now and then another broker is elected."""

    def __init__(self, cluster: FakeCluster, seed: int, every: int) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._every = every

    def __call__(self, broker: int, request: AppendRequest, header: BatchHeader) -> Reaction | SparkBrokerError | None:
        if self._rng.randrange(self._every):
            return None
        if self._rng.randrange(3) == 0:
            self._cluster.elect("t", request.partition, self._rng.randrange(3))
        return self._rng.choice(FAULTS)()


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_lose_nothing_and_store_nothing_twice(
    cluster: FakeCluster, values: Callable[..., pa.RecordBatch], seed: int
) -> None:
    cluster.create("t", 3)
    names = [f"{n}" for n in range(150)]
    cluster.append_hook = RandomFaults(cluster, seed, every=7)
    with Producer(cluster.bootstrap, request_timeout_ms=400, linger_ms=1) as producer:
        futures = [
            producer.append("t", values(name), partition=n % 3) if n % 2 else producer.send("t", name, partition=n % 3)
            for n, name in enumerate(names)
        ]
        producer.flush(WAIT_S)
        assert [future.exception(0) for future in futures] == [None] * len(names)
    stored = [[row["value"] for row in cluster.rows("t", p)] for p in range(3)]
    assert stored == [[name.encode() for name in names[p::3]] for p in range(3)]
    with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="earliest") as consumer:
        read: list[list[bytes]] = [[], [], []]
        while sum(map(len, read)) < len(names):
            if random.Random(seed + len(read[0])).randrange(4) == 0:
                cluster.elect("t", seed % 3, (seed + len(read[1])) % 3)
            for batch in consumer.poll(1.0):
                read[batch.partition] += batch.data["value"].to_pylist()
    assert read == stored
