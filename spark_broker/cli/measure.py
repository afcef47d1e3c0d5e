"""Measuring a producer and a consumer: throughput, and how long each append took. Shared with benchmarks/."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_broker.client.consumer import Consumer
from spark_broker.client.producer import Producer
from spark_broker.config import INT32_MAX
from spark_broker.errors import InvalidDataError
from spark_broker.model import RecordMetadata, TopicPartition
from spark_broker.protocol.arrays import nulls
from spark_broker.protocol.schema import DEFAULT_SCHEMA

POLL_S = 1.0


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds from an append to its acknowledgement. `count`: appends measured."""

    count: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float


class ProduceFigures(msgspec.Struct, frozen=True):
    """What appending took. `mb_per_s`: values alone, in units of 1,000,000 bytes."""

    records: int
    batches: int
    seconds: float
    records_per_s: float
    mb_per_s: float
    retries: int
    latency: Latency


class ConsumeFigures(msgspec.Struct, frozen=True):
    """What reading took. `mb_per_s`: all columns as Arrow holds them, in units of 1,000,000 bytes."""

    records: int
    batches: int
    seconds: float
    records_per_s: float
    mb_per_s: float


def random_records(count: int, size_bytes: int, seed: int = 1) -> pa.RecordBatch:
    """Records without a key, whose values are `size_bytes` random bytes."""
    if count < 1 or size_bytes < 0:
        raise InvalidDataError(
            f"a batch of {count} records of {size_bytes} bytes",
            hint="Measure with fewer records in a batch, or smaller ones.",
        )
    if max(count, count * size_bytes) > INT32_MAX:
        raise InvalidDataError(
            f"a batch of {count:,} records of {size_bytes:,} bytes: their values may have {INT32_MAX:,} bytes together",
            hint="Measure with fewer records in a batch, or smaller ones.",
        )
    data = np.random.default_rng(seed).bytes(count * size_bytes)
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(size_bytes)
    value = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    columns = {"value": value}
    arrays = [columns.get(field.name, nulls(count, field.type)) for field in DEFAULT_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=DEFAULT_SCHEMA)


def latency_of(seconds: Sequence[float]) -> Latency:
    """Percentiles of these durations; zeros when there are none."""
    values_ms = np.asarray(seconds if seconds else [0.0]) * 1000
    p50, p95, p99, p999 = (round(float(value), 3) for value in np.percentile(values_ms, [50, 95, 99, 99.9]))
    return Latency(len(seconds), p50, p95, p99, p999, round(float(values_ms.max()), 3))


def measure_produce(
    producer: Producer, topic: str, records: int, batch: pa.RecordBatch, *, warmup: int = 0, in_flight: bool = True
) -> ProduceFigures:
    """Append `batch` until `records` are acknowledged, after `warmup` records that do not count.

    `in_flight=False` waits for each append before the next. Raises the error of an append that failed.
    """
    _append(producer, topic, warmup, batch, in_flight)
    retries = producer.metrics()["retries"]
    started = time.perf_counter()
    took = _append(producer, topic, records, batch, in_flight)
    seconds = time.perf_counter() - started
    sent = len(took) * batch.num_rows
    value_bytes = len(took) * int(pc.sum(pc.binary_length(batch.column("value"))).as_py())
    return ProduceFigures(
        records=sent,
        batches=len(took),
        seconds=round(seconds, 4),
        records_per_s=round(sent / seconds),
        mb_per_s=round(value_bytes / seconds / 1e6, 1),
        retries=producer.metrics()["retries"] - retries,
        latency=latency_of(took),
    )


def measure_consume(consumer: Consumer, partitions: Sequence[TopicPartition], records: int | None) -> ConsumeFigures:
    """Read from the log start to the end as it is now, or until `records` were read."""
    ends = consumer.end_offsets(partitions)
    starts = consumer.beginning_offsets(partitions)
    rows = batches = size_bytes = 0
    started = time.perf_counter()
    consumer.assign(partitions)
    for tp in partitions:
        consumer.seek(tp, starts[tp])
    # Not every offset holds a record: only the position tells that the end is reached.
    while (records is None or rows < records) and any(consumer.position(tp) < end for tp, end in ends.items()):
        for batch in consumer.poll(POLL_S):
            rows += batch.data.num_rows
            size_bytes += batch.data.nbytes
            batches += 1
    seconds = time.perf_counter() - started
    return ConsumeFigures(
        records=rows,
        batches=batches,
        seconds=round(seconds, 4),
        records_per_s=round(rows / seconds),
        mb_per_s=round(size_bytes / seconds / 1e6, 1),
    )


def _append(producer: Producer, topic: str, records: int, batch: pa.RecordBatch, in_flight: bool) -> list[float]:
    """Seconds that each append took."""
    took: list[float] = []
    futures: list[Future[list[RecordMetadata]]] = []
    for _ in range(-(-records // batch.num_rows)):
        began = time.perf_counter()
        future = producer.append(topic, batch)
        if in_flight:
            future.add_done_callback(lambda _, began=began: took.append(time.perf_counter() - began))  # type: ignore[misc]
            futures.append(future)
        else:
            future.result()
            took.append(time.perf_counter() - began)
    for future in futures:
        future.result()
    producer.flush()
    return took
