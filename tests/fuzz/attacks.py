"""Attacks on a live broker, message by message: each is drawn from a seeded generator, and notes what came back.

An answer is the name of a typed error or of a response. `UnknownServerError` and `InvariantError` are bugs of ours.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from spark_broker.errors import SparkBrokerError
from spark_broker.protocol import wire
from spark_broker.protocol.messages import (
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
from spark_broker.transport.frames import Frame, Operation
from tests.fuzz.batches import damaged_message, sample_messages
from tests.fuzz.mutate import mutate
from tests.fuzz.samples import hostile, message_types, sample
from tests.support.raw_peer import RawPeer, refusal

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

CLOSED = "closed"


@dataclass(frozen=True)
class Known:
    """What an attacker knows of the cluster: with it, requests get past the first checks."""

    topic: str
    topic_id: str
    partitions: int
    leader_epoch: int
    brokers: dict[int, int]  # id to epoch


class Attacker:
    """One hostile client of one server. Its calls share a connection; each of its streams has one of its own."""

    def __init__(self, host: str, port: int, known: Known, seed: str) -> None:
        self.rng = random.Random(seed)
        self.known = known
        self.answers: Counter[str] = Counter()
        self._at = host, port
        self._peer: RawPeer | None = None

    def close(self) -> None:
        """Leave."""
        if self._peer is not None:
            self._peer.sock.close()
            self._peer = None

    def connect(self, timeout_s: float = CALL_TIMEOUT_S) -> RawPeer:
        """A connection; the caller closes it."""
        host, port = self._at
        return RawPeer(port, host, timeout_s=timeout_s)

    def call(self, body: bytes, operation: int = Operation.CALL) -> None:
        """One call with this body. Raises TimeoutError when nothing comes back."""
        self._peer = self._peer or self.connect()
        correlation = self.rng.randrange(1, 2**32)
        try:
            self._peer.frame(Operation(operation), body, correlation=correlation)
            answer = self._peer.receive()
        except ConnectionError:
            answer = None
        if answer is None or answer.header.operation is not Operation.ANSWER:
            self.close()
        elif answer.header.correlation != correlation:
            raise ValueError(f"an answer to call {answer.header.correlation}, not {correlation}")
        self._note(answer)

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
            self.call(encoded, self.rng.choice((Operation.HELLO, Operation.ANSWER, Operation.END)))
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
        with self.connect(STREAM_TIMEOUT_S) as peer:
            peer.open(self.rng.choice((kind,) * 9 + (f"{kind}/3", kind.upper(), "\xff", "")))
            for _ in range(self.rng.randint(1, 4)):
                self._write(peer, kind)
            if self.rng.random() < 0.2:
                peer.frame(Operation.CANCEL, stream=1)
            elif self.rng.random() < 0.8:
                self._read(peer)

    def _write(self, peer: RawPeer, kind: str) -> None:
        """A message of the stream. Message and payload may be damaged, and where one ends and the other begins."""
        wanted = [t for t in message_types() if t.__name__ in _BELONGS.get(kind, ())]
        message = self.plausible(self.rng.choice(wanted) if wanted and self.rng.random() < 0.8 else StreamMessage)
        payload = damaged_message(self.rng)[1] if self.rng.random() < 0.5 else self.rng.choice(sample_messages())[1]
        payload = payload if kind == "append" else b""
        head = wire.encode(message)
        damage = self.rng.random()
        if damage < 0.2:
            head = mutate(self.rng, head, head)
        elif damage < 0.4:
            head = hostile(self.rng, message)
        elif damage < 0.5:
            body = head + payload
            at = self.rng.randrange(len(body) + 1)
            head, payload = body[:at], body[at:]
        with contextlib.suppress(ConnectionError):
            peer.frame(Operation.MESSAGE, head, payload, stream=1)

    def half_open_stream(self, kind: str) -> RawPeer:
        """A stream that says one thing and then nothing; the caller keeps it."""
        peer = self.connect()
        peer.open(kind)
        self._write(peer, kind)
        return peer

    def _read(self, peer: RawPeer) -> None:
        """The first answer; a stream that gives nothing within the time-out counts as closed."""
        try:
            answer = peer.receive()
        except (TimeoutError, ConnectionError):
            answer = None
        self._note(answer)

    def _note(self, answer: Frame | None) -> None:
        self.answers[CLOSED if answer is None else _name_of(answer)] += 1

    def absurd_requests(self) -> None:
        """Requests that are valid and ask for more than any client needs."""
        cluster = self.known
        for time_us in (2**63 - 1, -(2**63), -3, 0, 2**64 - 1):
            specs = [ListOffsetsPartition(cluster.topic_id, p % cluster.partitions, -1, time_us) for p in range(20)]
            self.call(wire.encode(ListOffsetsRequest(specs)))
        offsets = [CommittedOffset(f"topic-{i}", 2**31 - 1, 2**63 - 1, 2**63 - 1, "x" * 4096) for i in range(10_000)]
        self.call(wire.encode(OffsetCommitRequest("absurd", offsets)))
        self.call(wire.encode(OffsetCommitRequest("absurd", offsets[:10])))
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
        self._ask("fetch", request)

    def _pull(self, offset: int) -> None:
        broker, epoch = next(iter(self.known.brokers.items()))
        wanted = [ReplicaPartition(self.known.topic_id, p, -1, offset, -1) for p in range(100_000)]
        request = ReplicaFetchRequest(1, broker, epoch, 200, 2**31 - 1, wanted)
        self._ask("replica", request)

    def _ask(self, kind: str, request: Message) -> None:
        with self.connect() as peer:
            peer.open(kind)
            peer.message(request)
            self._read(peer)

    def endless_wait(self) -> RawPeer:
        """A long poll of 24 days; the caller keeps the stream, or drops it."""
        peer = self.connect()
        peer.open("fetch")
        wanted = [FetchPartition(self.known.topic_id, 0, -1, 0, 1)]
        peer.message(FetchRequest(1, 2**31 - 1, 2**31 - 1, 2**31 - 1, wanted))
        return peer


_BELONGS = {
    "append": ("AppendRequest",),
    "fetch": ("FetchRequest",),
    "replica": ("ReplicaFetchRequest",),
    "session": ("RegisterBrokerRequest", "HeartbeatRequest"),
}


def _name_of(answer: Frame) -> str:
    """The type of what came back, or of the error in it."""
    try:
        if answer.header.operation is Operation.ANSWER:
            return type(wire.decode_response(answer.message)).__name__
        message = wire.decode_message(answer.message)
        return type(refusal(answer) if isinstance(message, ErrorResponse) else message).__name__
    except SparkBrokerError as error:
        return type(error).__name__
