"""What a consumer fetched ahead waits as it came, and is decoded when poll wants it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from spark_broker import Consumer, TopicPartition
from spark_broker.client import consumer_machine
from spark_broker.errors import CorruptMessageError
from tests.client.fake_broker import FakeCluster

Values = Callable[..., pa.RecordBatch]
WaitUntil = Callable[[Callable[[], bool], str], None]
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)

MEASURE = """
import gc
import pyarrow as pa
from pathlib import Path
from spark_broker.client.cluster_view import TopicView
from spark_broker.client.fetch_decoder import Projection, decode_fetched
from spark_broker.protocol.arrow_message import assign, encode_batch
from spark_broker.protocol.frame import Frame, decode_frames, encode_frames
from spark_broker.protocol.messages import FetchedPartition

BATCHES = 20_000

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

topic = TopicView("t", "id", (), (), {})
batch = pa.RecordBatch.from_pylist([{"value": bytes(100)}], schema=topic.schema)
message = encode_batch(batch)
frames = [
    Frame(*assign(message, base_offset=n, leader_epoch=0, append_time_ms=0, max_timestamp_us=0)) for n in range(BATCHES)
]
payload = memoryview(b"".join(encode_frames(frames)))
del frames
gc.collect()
before = resident()
waiting = decode_fetched(decode_frames(payload), Projection(topic, None), FetchedPartition("id", 0, 0), 0)
gc.collect()
print((resident() - before) / len(payload), [one.decode().base_offset for one in waiting] == list(range(BATCHES)))
"""


@pytest.mark.slow
def test_small_batches_that_wait_take_little_more_than_their_bytes() -> None:
    """A decoded batch takes five times as much: a few consumers of a topic of single records took a gigabyte."""
    run = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    beside_the_payload, complete = run.stdout.split()
    assert float(beside_the_payload) < 2
    assert complete == "True"


@pytest.fixture
def consumer(cluster: FakeCluster) -> Iterator[Consumer]:
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", fetch_max_wait_ms=50) as made:
        yield made


def offsets(consumer: Consumer, batches: int) -> list[tuple[int, int]]:
    """Partition and base offset of that many batches."""
    base_offsets: list[tuple[int, int]] = []
    end_s = time.monotonic() + 20
    while len(base_offsets) < batches and time.monotonic() < end_s:
        base_offsets += [(batch.partition, batch.base_offset) for batch in consumer.poll(1.0)]
    return base_offsets


def test_one_poll_hands_out_so_many_batches_and_of_every_partition(
    cluster: FakeCluster, consumer: Consumer, values: Values, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_machine, "POLL_BATCHES_MAX", 6)
    cluster.create("t", 2)
    for n in range(20):
        cluster.store("t", n % 2, values(str(n)))
    consumer.assign([T0, T1])

    def asked() -> set[tuple[int, int]]:
        return {(wanted.partition, wanted.offset) for request in cluster.fetches for wanted in request.partitions}

    wait_until(lambda: {(0, 10), (1, 10)} <= asked(), "all is fetched ahead")
    assert offsets(consumer, 1) == [(partition, offset) for partition in (0, 1) for offset in range(3)]
    assert (consumer.position(T0), consumer.position(T1)) == (3, 3)
    assert sorted(offsets(consumer, 14)) == [(partition, offset) for partition in (0, 1) for offset in range(3, 10)]


def test_a_batch_that_does_not_decode_is_an_error_after_those_before_it(
    cluster: FakeCluster, consumer: Consumer, values: Values, wait_until: WaitUntil
) -> None:
    cluster.create("t")
    cluster.store("t", 0, values("a"))
    cluster.store("t", 0, pa.record_batch({"other": [1]}))
    cluster.store("t", 0, values("c"))
    consumer.assign([T0])
    wait_until(lambda: any(request.partitions[0].offset == 3 for request in cluster.fetches), "all is fetched ahead")
    assert offsets(consumer, 1) == [(0, 0)]
    assert consumer.position(T0) == 1
    with pytest.raises(CorruptMessageError):
        consumer.poll(5.0)
    consumer.seek(T0, 2)
    assert offsets(consumer, 1) == [(0, 2)]
