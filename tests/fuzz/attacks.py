"""Attacks on a live broker over Flight: each is a function of a seeded generator, and tells what answers came back.

An answer is the name of a typed error or of a response. `UnknownServerError` and `InvariantError` are bugs of ours.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from spark_broker.errors import SparkBrokerError
from spark_broker.protocol import wire
from spark_broker.protocol.messages import (
    CALL_ACTION,
    PROTOCOL_VERSION,
    CallRequest,
    ErrorResponse,
    FetchPartition,
    FetchRequest,
    ListOffsetsPartition,
    ListOffsetsRequest,
    Message,
    OffsetCommitRequest,
    ReplicaFetchRequest,
    ReplicaPartition,
    StreamMessage,
)
from spark_broker.protocol.messages.calls import CommittedOffset
from tests.fuzz.batches import damaged_message, sample_messages
from tests.fuzz.mutate import mutate
from tests.fuzz.samples import hostile, message_types, sample

CALL_TIMEOUT_S = 20.0
STREAM_TIMEOUT_S = 4.0
"""A damaged fetch may ask to wait for days: its stream is given up."""
STREAMS = ("append", "fetch", "replica", "session", "nonsense")
ADMINISTRATION = (
    "AlterPartitionRequest",
    "AlterTopicConfigRequest",
    "DeleteTopicRequest",
    "ReassignPartitionRequest",
    "WriteTransactionMarkersRequest",
)
"""With names and epochs that are right, these do what they say: that is no attack but administration."""

_CLOSED = (flight.FlightError, pa.ArrowException, OSError, StopIteration)


@dataclass(frozen=True)
class Known:
    """What an attacker knows of the cluster: with it, requests get past the first checks."""

    topic: str
    topic_id: str
    partitions: int
    leader_epoch: int
    brokers: dict[int, int]  # id to epoch


class Attacker:
    """One hostile client of one server."""

    def __init__(self, host: str, port: int, known: Known, seed: str) -> None:
        self.rng = random.Random(seed)
        self.known = known
        self.answers: Counter[str] = Counter()
        self._client = flight.FlightClient(f"grpc://{host}:{port}")

    def close(self) -> None:
        self._client.close()

    def call(self, body: bytes, action: str = CALL_ACTION) -> None:
        """One call with this body. Raises FlightTimedOutError when nothing comes back."""
        options = flight.FlightCallOptions(timeout=CALL_TIMEOUT_S)
        try:
            answer = next(iter(self._client.do_action(flight.Action(action, body), options))).body
        except flight.FlightTimedOutError:
            raise
        except _CLOSED as error:
            self.answers[f"closed: {type(error).__name__}"] += 1
            return
        self._note(lambda: wire.decode_response(memoryview(answer)))

    def damaged_call(self) -> None:
        """A request whose bytes or structure are damaged, or one that says what no client says."""
        message = self.plausible(CallRequest)
        kind = self.rng.random()
        encoded = msgspec.msgpack.encode(message)
        if kind < 0.4:
            self.call(mutate(self.rng, encoded, encoded))
        elif kind < 0.7:
            self.call(hostile(self.rng, message))
        elif kind < 0.75:
            self.call(encoded, self.rng.choice(("", "other", "c\0ll", "x" * 10_000)))
        elif kind < 0.8:
            self.call(msgspec.msgpack.encode(sample(self.rng, self.rng.choice(message_types()))))
        else:
            self.call(encoded)

    def plausible(self, kind: Any) -> Message:
        """A valid message that names what exists, as far as that is no administration."""
        message = sample(self.rng, kind)
        if type(message).__name__ in ADMINISTRATION:
            return message  # type: ignore[no-any-return]
        return self._informed(message)  # type: ignore[no-any-return]

    def _informed(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._informed(item) for item in value]
        if not isinstance(value, msgspec.Struct):
            return value
        broker = self.rng.choice(sorted(self.known.brokers))
        right = {
            "topic": self.known.topic,
            "topic_id": self.known.topic_id,
            "partition": self.rng.randrange(self.known.partitions),
            "leader_epoch": self.rng.choice((self.known.leader_epoch, -1)),
            "broker_id": broker,
            "broker_epoch": self.known.brokers[broker],
            "acks": self.rng.choice((-1, 0, 1)),
            "schema_id": 0,
            "max_wait_ms": self.rng.choice((0, 10)),
            "timeout_ms": 100,
        }
        changes = {name: self._informed(getattr(value, name)) for name in value.__struct_fields__}
        changes |= {name: v for name, v in right.items() if name in changes and self.rng.random() < 0.9}
        return msgspec.structs.replace(value, **changes)

    def damaged_stream(self) -> None:
        """A stream of a few messages, good and bad; read for the answer, left half open, or broken off."""
        kind = self.rng.choice(STREAMS)
        with self._stream(
            self.rng.choice((f"{kind}/{PROTOCOL_VERSION}",) * 9 + (f"{kind}/99", kind, "\xff/1", ""))
        ) as (
            writer,
            reader,
        ):
            for _ in range(self.rng.randint(1, 4)):
                self._write(writer, self._stream_bytes(kind))
            if self.rng.random() < 0.5:
                writer.done_writing()
            if self.rng.random() < 0.8:
                self._read(reader)

    def _stream_bytes(self, kind: str) -> bytes:
        wanted = [t for t in message_types() if t.__name__ in _BELONGS.get(kind, ())]
        message = self.plausible(self.rng.choice(wanted) if wanted and self.rng.random() < 0.8 else StreamMessage)
        payload = damaged_message(self.rng)[1] if self.rng.random() < 0.5 else self.rng.choice(sample_messages())[1]
        data = wire.encode(message, payload if kind == "append" else b"")
        damage = self.rng.random()
        if damage < 0.3:
            return mutate(self.rng, data, data)
        if damage < 0.5:
            head = hostile(self.rng, message)
            return len(head).to_bytes(4, "little") + head + payload
        return data

    def foreign_stream(self) -> None:
        """Arrow data where opaque messages belong: schemas, batches, batches without a schema, other descriptors."""
        batch = pa.record_batch({"n": list(range(1000))})
        descriptors = (flight.FlightDescriptor.for_path("append/1"), flight.FlightDescriptor.for_command(b"append/1"))
        with contextlib.suppress(*_CLOSED):
            writer, reader = self._client.do_exchange(
                self.rng.choice(descriptors), flight.FlightCallOptions(timeout=CALL_TIMEOUT_S)
            )
            writer.begin(batch.schema)
            writer.write_batch(batch)
            writer.write_with_metadata(batch, self.rng.randbytes(10))
            writer.done_writing()
            self._read(reader)
            reader.cancel()
        for attempt in (self._client.list_flights, self._client.list_actions):
            with contextlib.suppress(*_CLOSED):
                list(attempt())
        with contextlib.suppress(*_CLOSED):
            self._client.do_get(flight.Ticket(self.rng.randbytes(100))).read_all()
        self.answers["foreign"] += 1

    def half_open_stream(self, kind: str) -> tuple[Any, Any]:
        """A stream that says one thing and then nothing; the caller keeps it."""
        command = flight.FlightDescriptor.for_command(f"{kind}/{PROTOCOL_VERSION}".encode())
        writer, reader = self._client.do_exchange(command)
        self._write(writer, self._stream_bytes(kind))
        return writer, reader

    @contextlib.contextmanager
    def _stream(self, command: str, timeout_s: float = STREAM_TIMEOUT_S) -> Any:
        descriptor = flight.FlightDescriptor.for_command(command.encode())
        writer, reader = self._client.do_exchange(descriptor, flight.FlightCallOptions(timeout=timeout_s))
        try:
            yield writer, reader
        finally:
            reader.cancel()
            with contextlib.suppress(*_CLOSED):
                writer.close()

    def _write(self, writer: Any, data: bytes) -> None:
        with contextlib.suppress(*_CLOSED):
            writer.write_metadata(pa.py_buffer(data))

    def _read(self, reader: Any) -> None:
        """The first answer; a stream that ends or gives nothing within the time-out counts as closed."""
        try:
            answer = reader.read_chunk().app_metadata
        except _CLOSED as error:
            self.answers[f"closed: {type(error).__name__}"] += 1
            return
        self._note(lambda: _raised(wire.decode(memoryview(answer))[0]))

    def _note(self, answer: Any) -> None:
        try:
            self.answers[type(answer()).__name__] += 1
        except SparkBrokerError as error:
            self.answers[type(error).__name__] += 1

    def absurd_requests(self) -> None:
        """Requests that are valid and ask for more than any client needs."""
        cluster = self.known
        for time_us in (2**63 - 1, -(2**63), -3, 0, 2**64 - 1):
            specs = [ListOffsetsPartition(cluster.topic_id, p % cluster.partitions, -1, time_us) for p in range(20)]
            self.call(wire.encode_call(ListOffsetsRequest(specs)))
        offsets = [CommittedOffset(f"topic-{i}", 2**31 - 1, 2**63 - 1, 2**63 - 1, "x" * 4096) for i in range(10_000)]
        self.call(wire.encode_call(OffsetCommitRequest("absurd", offsets)))
        self.call(wire.encode_call(OffsetCommitRequest("absurd", offsets[:10])))
        for offset in (0, 2**63 - 1):
            self._fetch(offset, columns=None)
            self._fetch(offset, columns=["n"] * 10_000)
            self._fetch(offset, columns=["x" * 60_000] * 100)
            self._pull(offset)

    def _fetch(self, offset: int, columns: list[str] | None) -> None:
        wanted = [
            FetchPartition(self.known.topic_id, p % self.known.partitions, -1, offset, 2**31 - 1) for p in range(10_000)
        ]
        request = FetchRequest(1, 200, 2**31 - 1, 2**31 - 1, wanted, columns)
        with self._stream(f"fetch/{PROTOCOL_VERSION}", CALL_TIMEOUT_S) as (writer, reader):
            self._write(writer, wire.encode(request))
            self._read(reader)

    def _pull(self, offset: int) -> None:
        broker, epoch = next(iter(self.known.brokers.items()))
        wanted = [ReplicaPartition(self.known.topic_id, p, -1, offset, -1) for p in range(100_000)]
        request = ReplicaFetchRequest(1, broker, epoch, 200, 2**31 - 1, wanted)
        with self._stream(f"replica/{PROTOCOL_VERSION}", CALL_TIMEOUT_S) as (writer, reader):
            self._write(writer, wire.encode(request))
            self._read(reader)

    def endless_wait(self) -> tuple[Any, Any]:
        """A long poll of 24 days; the caller keeps the stream, or drops it."""
        command = flight.FlightDescriptor.for_command(f"fetch/{PROTOCOL_VERSION}".encode())
        writer, reader = self._client.do_exchange(command)
        wanted = [FetchPartition(self.known.topic_id, 0, -1, 0, 1)]
        self._write(writer, wire.encode(FetchRequest(1, 2**31 - 1, 2**31 - 1, 2**31 - 1, wanted)))
        return writer, reader


_BELONGS = {
    "append": ("AppendRequest",),
    "fetch": ("FetchRequest",),
    "replica": ("ReplicaFetchRequest",),
    "session": ("RegisterBrokerRequest", "HeartbeatRequest"),
}


def _raised(message: object) -> object:
    if isinstance(message, ErrorResponse):
        wire.decode_response(wire.encode_call(message))
    return message
