"""What is fuzzed below the network: for each target, an input made from a seed, and a judgement of what became of it.

A judge returns whether the input was accepted. A typed error means "refused"; any other exception is a finding, and so
is what an accepted input does not keep.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import pyarrow as pa

from spark_broker.broker.topic import Topic
from spark_broker.config import TopicConfig
from spark_broker.controller.records import MetadataRecord, decode_records, encode_records
from spark_broker.core.groups.records import VALUE_TYPES, OldOffsetKey, OldOffsetValue, decode_record, encode_record
from spark_broker.driver.topic_schema import stored_schema
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol import wire
from spark_broker.protocol.arrow_message import (
    ParsedBatch,
    assign,
    decode_batch,
    encode_batch,
    layout_of,
    validate,
    verify_stored,
)
from spark_broker.protocol.frame import Frame, decode_frames, encode_frames
from spark_broker.protocol.messages import CallRequest, CallResponse, ErrorResponse, StreamMessage
from spark_broker.protocol.schema import schema_from_bytes, schema_to_bytes
from tests.fuzz import carrier
from tests.fuzz.batches import SCHEMAS, damaged_message, sample_messages
from tests.fuzz.mutate import mutate
from tests.fuzz.samples import hostile, message_types, sample
from tests.fuzz.violation import ViolationError

MAX_UNCOMPRESSED_BYTES = 4 << 20
"""The bound that batches are validated with: far above the samples, far below what a liar claims."""


MAX_INPUT_BYTES = 2 << 20


@dataclass(frozen=True)
class Target:
    """`make` builds an input from a seeded generator; `judge` raises on a finding, else tells whether it accepts."""

    make: Callable[[random.Random], bytes]
    judge: Callable[[bytes], bool]


def input_of(target: str, seed: int) -> bytes:
    """The input of a case: the same in every process, for a text seeds by its bytes and not by `hash`."""
    return TARGETS[target].make(random.Random(f"{target}/{seed}"))[:MAX_INPUT_BYTES]


def judged(judge: Callable[[bytes], None]) -> Callable[[bytes], bool]:
    """Typed errors are refusals; everything else that is raised is a finding."""

    def accepts(data: bytes) -> bool:
        try:
            judge(data)
        except SparkBrokerError as refusal:
            wire.encode(wire.error_response(refusal))  # the refusal itself must cross the wire
            return False
        return True

    return accepts


def _promise(kept: bool, what: str) -> None:
    if not kept:
        raise ViolationError(what)


def _message_bytes(rng: random.Random, kinds: object) -> bytes:
    """A valid message, one of changed structure, or damaged bytes; now and then of a type that does not belong here."""
    kind: object = rng.choice(message_types()) if rng.random() < 0.1 else kinds
    message = sample(rng, kind)
    kind_of_damage = rng.random()
    if kind_of_damage < 0.05:
        return msgspec.msgpack.encode(message)
    if kind_of_damage < 0.5:
        return hostile(rng, message)
    if kind_of_damage < 0.97:
        return mutate(rng, msgspec.msgpack.encode(message), msgspec.msgpack.encode(sample(rng, kinds)))
    return rng.randbytes(rng.randrange(200))


def _judge_stream(data: bytes) -> None:
    message = wire.decode_message(memoryview(data))
    _promise(wire.decode_message(wire.encode(message)) == message, "a message comes back another")


def _judge_request(data: bytes) -> None:
    request = wire.decode_request(data)
    _promise(wire.decode_request(wire.encode(request)) == request, "a request comes back another")


def _judge_response(data: bytes) -> None:
    response = wire.decode_response(data)
    _promise(not isinstance(response, ErrorResponse), "an error is not raised")
    _promise(wire.decode_response(wire.encode(response)) == response, "a response comes back another")


def _records_bytes(rng: random.Random) -> bytes:
    records = [sample(rng, MetadataRecord) for _ in range(rng.randint(0, 4))]
    encoded = encode_records(records)
    if rng.random() < 0.5:
        return hostile(rng, records)
    return mutate(rng, encoded, encode_records([sample(rng, MetadataRecord)]))


def _judge_records(data: bytes) -> None:
    records = decode_records(data)
    _promise(decode_records(encode_records(records)) == records, "records come back others")


def _offsets_bytes(rng: random.Random) -> bytes:
    """Key and value of any record of `__consumer_offsets`, the key's length in front."""
    kinds: list[tuple[type, type]] = [*VALUE_TYPES.items(), (OldOffsetKey, OldOffsetValue)]
    key, value = (sample(rng, kind) for kind in rng.choice(kinds))
    parts = [hostile(rng, part) if rng.random() < 0.4 else msgspec.msgpack.encode(part) for part in (key, value)]
    if rng.random() < 0.5:
        parts = [mutate(rng, part, b"") for part in parts]
    return len(parts[0]).to_bytes(4, "little") + parts[0] + parts[1]


def _judge_offsets(data: bytes) -> None:
    end = 4 + int.from_bytes(data[:4], "little")
    record = decode_record(data[4:end], data[end:])
    _promise(decode_record(*encode_record(record)) == record, "a record of a group that was taken is stored the same")


def _schema_bytes(rng: random.Random) -> bytes:
    schemas = [schema_to_bytes(schema) for schema in SCHEMAS]
    odd = (pa.string_view(), pa.large_list(pa.null()), pa.dictionary(pa.int8(), pa.string()), pa.float16())
    schemas += [schema_to_bytes(pa.schema([("a", kind), ("b", pa.timestamp("ns", "Europe/Zurich"))])) for kind in odd]
    data = mutate(rng, rng.choice(schemas), rng.choice(schemas))
    if rng.random() < 0.5 and len(data) >= 8:
        data = data[:4] + (len(data) - 8).to_bytes(4, "little") + data[8:]
    return data


def _judge_schema(data: bytes) -> None:
    if not data:
        return
    stored = stored_schema(data, {})
    schema = schema_from_bytes(stored)
    _promise(schema_to_bytes(schema) == stored, "a stored schema is stored the same again")
    batch = pa.RecordBatch.from_arrays([pa.nulls(2, field.type) for field in schema], schema=schema)
    if all(field.nullable for field in schema):
        parsed = validate(encode_batch(batch), layout_of(stored), max_uncompressed_bytes=MAX_UNCOMPRESSED_BYTES)
        _promise(parsed.batch.equals(batch), "a topic of an accepted schema takes batches")


def _frames_bytes(rng: random.Random) -> bytes:
    frames = []
    for offset in range(rng.randint(1, 3)):
        header, stored = assign(
            rng.choice(sample_messages())[1],
            base_offset=offset * 100,
            leader_epoch=1,
            append_time_ms=1,
            max_timestamp_us=1,
        )
        frames.append(Frame(header, stored))
    data = b"".join(encode_frames(frames))
    return mutate(rng, data, data) if rng.random() < 0.9 else data


def _judge_frames(data: bytes) -> None:
    with contextlib.suppress(SparkBrokerError):  # What fails unverified must also fail verified, below.
        decode_frames(data, verify=False)
    frames = decode_frames(memoryview(data))
    _promise(b"".join(encode_frames(frames)) == data, "frames come back others")


_FLAG_UNALIGNED = 0x80


def _batch_bytes(rng: random.Random) -> bytes:
    """The number of the schema (with a flag for an odd address) in one byte, then the message."""
    number, message = damaged_message(rng)
    return bytes([number | rng.choice((0, _FLAG_UNALIGNED))]) + message


def _judge_batch(data: bytes) -> None:
    schema = SCHEMAS[(data[0] & ~_FLAG_UNALIGNED) % len(SCHEMAS)]
    message = memoryview(data)[1:] if data[0] & _FLAG_UNALIGNED else data[1:]
    with contextlib.suppress(SparkBrokerError):
        verify_stored(message)
    parsed = validate(message, layout_of(schema_to_bytes(schema)), max_uncompressed_bytes=MAX_UNCOMPRESSED_BYTES)
    try:
        _judge_accepted(message, schema, parsed)
    except SparkBrokerError as error:
        raise ViolationError(f"an accepted batch is refused later: {error}") from error


def _judge_accepted(message: bytes | memoryview, schema: pa.Schema, parsed: ParsedBatch) -> None:
    """Everything that a leader, a follower, recovery and a consumer do with a batch once it was accepted."""
    batch = parsed.batch
    batch.validate(full=True)
    size = batch.get_total_buffer_size()
    _promise(size <= MAX_UNCOMPRESSED_BYTES, f"an accepted batch has {size} bytes")
    column = "timestamp" if "timestamp" in schema.names else "at" if "at" in schema.names else ""
    topic = Topic("t", "0" * 32, (schema,), (schema_to_bytes(schema),), TopicConfig(), column)
    newest = topic.newest_timestamp(parsed).with_append_time(1)
    _promise(newest == topic.timestamps_us(batch, 1).max(), "no record has a newer timestamp")
    assigned = partial(assign, message, base_offset=7, leader_epoch=3, append_time_ms=1, max_timestamp_us=newest)
    header, stored = assigned(head=parsed.head)
    _promise((header, stored) == assigned(), "the leader writes where a full parse would")
    _promise(verify_stored(stored) == header, "recovery finds the header that the leader wrote")
    (frame,) = decode_frames(b"".join(encode_frames([Frame(header, stored)])))
    _promise(frame.header == header and bytes(frame.message) == bytes(stored), "a follower gets the leader's bytes")
    again = decode_batch(frame.message, schema)
    again.validate(full=True)
    _promise(again.num_rows == batch.num_rows == header.row_count, "the rows are those that the header names")
    _promise(len(topic.timestamps_us(again, 1)) == batch.num_rows, "every row has a timestamp")
    name = schema.names[batch.num_rows % len(schema)]
    some = decode_batch(frame.message, schema, [name])
    some.validate(full=True)
    encode_batch(some)


TARGETS: dict[str, Target] = {
    "stream": Target(lambda rng: _message_bytes(rng, StreamMessage), judged(_judge_stream)),
    "request": Target(lambda rng: _message_bytes(rng, CallRequest), judged(_judge_request)),
    "response": Target(lambda rng: _message_bytes(rng, CallResponse), judged(_judge_response)),
    "records": Target(_records_bytes, judged(_judge_records)),
    "offsets": Target(_offsets_bytes, judged(_judge_offsets)),
    "schema": Target(_schema_bytes, judged(_judge_schema)),
    "frames": Target(_frames_bytes, judged(_judge_frames)),
    "batch": Target(_batch_bytes, judged(_judge_batch)),
    "carrier": Target(carrier.make, judged(carrier.judge)),
}


def _mixed_bytes(rng: random.Random) -> bytes:
    """The number of a target, and an input of it."""
    number = rng.randrange(len(_MIXED))
    return bytes([number]) + TARGETS[_MIXED[number]].make(rng)


_MIXED = sorted(TARGETS)
ALL = "all"
"""Every target in one process: what `make test` can afford."""

TARGETS[ALL] = Target(_mixed_bytes, lambda data: TARGETS[_MIXED[data[0]]].judge(data[1:]))
