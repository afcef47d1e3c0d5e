"""What one micro-batch costs in processor time: the client, the leader and a follower, each alone and in one thread.

No network, no other process: the same batch goes through the code that encodes, stores and copies it. Files are real.
The time is that of the process, system calls included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import msgspec
import pyarrow as pa

from benchmarks.figures import Figure
from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.lease import Lease
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionEvents
from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.topic import Topic
from spark_broker.cli.measure import random_records
from spark_broker.client.outgoing import OutgoingBatch
from spark_broker.controller.image import TopicState
from spark_broker.core.replica import ACKS_ALL, Fetched, LeaderAndIsr, Replica
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import SparkBrokerError
from spark_broker.model import TopicPartition
from spark_broker.protocol import wire
from spark_broker.protocol.arrow_message import encoded_batch
from spark_broker.protocol.frame import decode_frames, encode_frames
from spark_broker.protocol.messages import AppendRequest
from spark_broker.protocol.schema import DEFAULT_SCHEMA, TIMESTAMP_TYPE, schema_to_bytes
from spark_broker.protocol.wire import Buffer
from spark_broker.storage.start_kind import StartKind
from spark_broker.transport.frames import Operation
from spark_broker.transport.frames import encode as encode_frame

TOPIC_ID = "0" * 32
IDENTITY = ProducerIdentity(7, 0)
EPOCH = 1
RECORD_BYTES = 100
RUNS = 5
FOREVER_MS = 10**9


class BatchFigures(msgspec.Struct, frozen=True):
    """Microseconds of processor time of one batch, in each run.

    `encode`: rows become a numbered message. `request`: the message becomes the bytes that are sent. `append`: the
    leader of a partition with one replica validates and stores it, and answers. `apply`: a follower checks and stores
    what its leader has sent.
    """

    rows: int
    batches: int
    encode_us: list[float]
    request_us: list[float]
    append_us: list[float]
    apply_us: list[float]


class _Answer:
    """Takes the outcome of an append. A batch that is refused ends the measurement."""

    def acknowledge(self, base_offset: int) -> None:
        """It is stored."""

    def refuse(self, error: SparkBrokerError) -> None:
        raise error


def measure_batches(rows: int, batches: int) -> BatchFigures:
    """Measure batches of this many rows, as `append` sends them. A tenth as many warm up."""
    figures = BatchFigures(rows, batches, [], [], [], [])
    record = _records(rows)
    for _ in range(RUNS):
        with TemporaryDirectory() as base:
            _run(record, batches, Path(base), figures)
    return figures


def _records(rows: int) -> pa.RecordBatch:
    """Kafka's records with timestamps, as producers make them."""
    records = random_records(rows, RECORD_BYTES)
    times = pa.array([1_700_000_000_000_000 + row for row in range(rows)], pa.int64()).cast(TIMESTAMP_TYPE)
    return records.set_column(records.schema.names.index("timestamp"), records.schema.field("timestamp"), times)


def _run(record: pa.RecordBatch, batches: int, base: Path, figures: BatchFigures) -> None:
    first, rows = batches // 10, record.num_rows
    outgoing: list[OutgoingBatch] = []
    sent: list[list[Buffer]] = []
    leader = _partition(base / "leader", 0)
    follower = _partition(base / "follower", 1)
    answer = _Answer()
    payloads: list[memoryview] = []

    def complete(_: object) -> None:
        pass

    def encode(number: int) -> None:
        message = encoded_batch(record)
        batch = OutgoingBatch(TopicPartition("t", 0), TOPIC_ID, 0, rows, message, complete)
        batch.number(IDENTITY, number)
        outgoing.append(batch)

    def request(number: int) -> None:
        batch = outgoing[number]
        message = AppendRequest(number, TOPIC_ID, 0, EPOCH, ACKS_ALL, 30_000)
        sent.append(encode_frame(Operation.MESSAGE, wire.encode(message), batch.message.head, batch.message.body))

    def append(number: int) -> None:
        leader.append(Append(payloads[number], EPOCH, ACKS_ALL, 0, deadline_ms), answer)

    def apply(number: int) -> None:
        position = follower.fetch_position()
        assert position is not None
        answered = Fetched(position, EPOCH, high_watermark=number * rows, log_start_offset=0)
        if not follower.apply(answered, decode_frames(frames[number])):
            raise RuntimeError("a leader's answer that the follower did not await")

    figures.encode_us.append(_timed(encode, batches, first))
    figures.request_us.append(_timed(request, batches, first))
    deadline_ms = SYSTEM_CLOCK.boottime_ms() + FOREVER_MS
    payloads += [memoryview(bytearray(b"".join(parts[1:]))) for parts in sent]  # as a server receives them
    figures.append_us.append(_timed(append, batches, first))
    stored = leader.log.read(0, 1 << 40, leader.log_end().log_end_offset)
    frames = [b"".join(encode_frames([frame])) for frame in stored]
    figures.apply_us.append(_timed(apply, batches, first))
    for partition in (leader, follower):
        partition.close(clean=False)


def _timed(step: Callable[[int], None], batches: int, first: int) -> float:
    """Microseconds of processor time of each step after the first ones."""
    for number in range(first):
        step(number)
    began_ns = time.process_time_ns()
    for number in range(first, batches):
        step(number)
    return (time.process_time_ns() - began_ns) / 1000 / (batches - first)


def _partition(directory: Path, me: int) -> Partition:
    """A replica of a topic of Kafka's record. Broker 0 leads, and its ISR has no other member."""
    directory.mkdir()
    schemas = (schema_to_bytes(DEFAULT_SCHEMA),)
    topic = Topic.of(TopicState("t", TOPIC_ID, MappingProxyType({}), schemas=schemas, partitions=()))
    lease = Lease()
    lease.extend(SYSTEM_CLOCK.boottime_ms(), FOREVER_MS)
    log = ReplicaLog(directory, topic, StartKind.CLEAN)
    replica = Replica(me, log.state(high_watermark=0), min_insync_replicas=1, lag_max_ms=30_000)

    def failed(_: object, error: SparkBrokerError) -> None:
        raise error

    events = PartitionEvents(lambda *_: None, failed)
    partition = Partition((TOPIC_ID, 0), topic, log, replica, lease, events)
    partition.assign(LeaderAndIsr(0, EPOCH, EPOCH, (0,) if me == 0 else (0, me), (0,)), topic, {0: 1, me: 1})
    return partition


def figures(found: BatchFigures) -> list[Figure]:
    """The lines of the table."""
    steps = (
        ("a client encodes and numbers it", found.encode_us, "under 40 µs" if found.rows == 1 else ""),
        ("a client makes its request", found.request_us, ""),
        ("its leader appends it, RF 1", found.append_us, "under 90 µs" if found.rows == 1 else ""),
        ("a follower checks and appends it", found.apply_us, ""),
    )
    size = f"a micro-batch of {found.rows:,} record{'s' if found.rows > 1 else ''} of {RECORD_BYTES} bytes"
    return [
        Figure(f"processor time, {size}: {what}", f"median {statistics.median(us):,.1f} µs over {len(us)}", goal)
        for what, us, goal in steps
    ]
