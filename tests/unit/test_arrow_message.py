"""The message of a batch: encoding, the leader's overwrite, and validation of bytes that cannot be trusted."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from spark_broker.errors import (
    CorruptMessageError,
    InvalidDataError,
    InvalidRequestError,
    MessageTooLargeError,
    SchemaMismatchError,
    SparkBrokerError,
)
from spark_broker.protocol import arrow_message
from spark_broker.protocol.arrow_message import (
    FEW_ROWS,
    MAX_ROWS,
    ParsedBatch,
    assign,
    decode_batch,
    encode_batch,
    encoded_batch,
    layout_of,
    validate,
    verify_stored,
)
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.frame import COMPRESSED, CONTROL, FIRST_OF_SEGMENT, ROW_OFFSETS
from spark_broker.protocol.ipc_message import END_OF_STREAM, METADATA_KEY, read_metadata
from spark_broker.protocol.message_head import VALUE_BYTES, read_head, write_value
from spark_broker.protocol.schema import DEFAULT_SCHEMA, TIMESTAMP_TYPE, schema_to_bytes

LIMIT = 1 << 24

MANY_TYPES = pa.schema(
    [
        pa.field("flag", pa.bool_()),
        pa.field("small", pa.int8(), nullable=False),
        pa.field("real", pa.float64()),
        pa.field("text", pa.string()),
        pa.field("bytes", pa.binary()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("at", TIMESTAMP_TYPE),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("point", pa.struct([pa.field("x", pa.int32()), pa.field("y", pa.list_(pa.int64()))])),
        pa.field("counts", pa.map_(pa.string(), pa.int32())),
    ]
)


def many_types(rows: int = 20) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {
                "flag": None if i % 3 else bool(i % 2),
                "small": i % 100,
                "real": i / 3,
                "text": f"zürich {i}",
                "bytes": bytes([i % 256]) * (i % 7),
                "price": None,
                "at": 1000 * i,
                "tags": [str(i)] * (i % 4),
                "point": {"x": i, "y": [i, None]} if i % 5 else None,
                "counts": [("a", i)] if i % 2 else [],
            }
            for i in range(rows)
        ],
        schema=MANY_TYPES,
    )


def kafka_records(values: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"value": value} for value in values], schema=DEFAULT_SCHEMA)


def check(message: Any, schema: pa.Schema = MANY_TYPES, limit: int = LIMIT) -> pa.RecordBatch:
    return parsed(message, schema, limit).batch


def parsed(message: Any, schema: pa.Schema = MANY_TYPES, limit: int = LIMIT) -> ParsedBatch:
    return validate(message, layout_of(schema_to_bytes(schema)), max_uncompressed_bytes=limit)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_batch_of_every_kind_of_column_comes_back_equal(compression: str | None) -> None:
    batch = many_types()
    message = encode_batch(
        batch,
        producer_id=5,
        producer_epoch=1,
        base_sequence=9,
        schema_id=2,
        compression=compression,
        max_timestamp_us=77,
    )
    came = parsed(message)
    assert came.batch.equals(batch)
    assert came.header._replace(length=0) == came.header._replace(length=0, base_offset=-1, leader_epoch=-1)
    assert (came.header.producer_id, came.header.producer_epoch, came.header.base_sequence) == (5, 1, 9)
    assert (came.header.schema_id, came.header.max_timestamp_us, came.header.row_count) == (2, 77, 20)
    assert came.header.length == len(message)
    assert came.header.attributes == (COMPRESSED if compression else 0)
    assert decode_batch(message, MANY_TYPES).equals(batch)
    assert decode_batch(message, MANY_TYPES, ["text", "flag"]).equals(batch.select(["text", "flag"]))


def test_only_the_rows_of_a_slice_are_encoded() -> None:
    batch = kafka_records([bytes(1000)] * 1000)
    part = batch.slice(500, 2)
    message = encode_batch(part)
    assert len(message) < 4000
    assert check(message, DEFAULT_SCHEMA).equals(part)


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 2000])
def test_however_large_it_is_a_batch_is_encoded_as_arrow_encodes_it(rows: int, compression: str | None) -> None:
    batch = kafka_records([bytes([row % 256]) * 100 for row in range(rows)])
    head = read_head(message := encode_batch(batch, compression=compression))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5, compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        at = head.metadata.value_at
        writer.write_batch(batch, custom_metadata={METADATA_KEY: message[at : at + VALUE_BYTES]})
    end = len(END_OF_STREAM)
    assert message == sink.getvalue().to_pybytes()[len(schema_to_bytes(DEFAULT_SCHEMA)) : -end]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InvalidDataError):
        encode_batch(kafka_records([]))


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("schema", [MANY_TYPES, DEFAULT_SCHEMA])
def test_the_head_of_every_batch_of_ours_is_known_before_it_comes(schema: pa.Schema, compression: str | None) -> None:
    batches = [many_types(rows) for rows in (1, 2, 20, 300)] if schema is MANY_TYPES else [kafka_records([b"", b"x"])]
    for batch in batches:
        message = encode_batch(batch, producer_id=9, compression=compression)
        found = [template.read(message) for template in layout_of(schema_to_bytes(schema)).templates]
        assert sorted(map(bool, found)) == [False, False, True]
        assert read_metadata(message) in found


def test_the_message_is_plain_arrow_after_the_schema() -> None:
    stream = schema_to_bytes(MANY_TYPES) + encode_batch(many_types(3)) + encode_batch(many_types(4))
    assert pa.ipc.open_stream(stream).read_all().num_rows == 7


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("given", [bytes, bytearray, memoryview, lambda message: memoryview(bytearray(message))])
def test_the_leader_overwrites_its_fields_in_place_and_nothing_else(
    given: Callable[[bytes], bytes | bytearray | memoryview], parse: bool
) -> None:
    message = encode_batch(many_types(), producer_id=5)
    came = given(message)
    header, target = assign(
        came,
        base_offset=100,
        leader_epoch=4,
        append_time_ms=9,
        max_timestamp_us=8,
        first_of_segment=True,
        head=None if parse else parsed(came).head,
    )
    stored = bytes(target)
    assert (target is came) != memoryview(came).readonly
    assert bytes(came) == (message if memoryview(came).readonly else stored)
    assert (header.base_offset, header.leader_epoch, header.append_time_ms, header.max_timestamp_us) == (100, 4, 9, 8)
    assert header.attributes == FIRST_OF_SEGMENT
    assert header.message_crc == crc32c(stored)
    at = read_metadata(message).value_at
    assert stored[:at] == message[:at]
    assert stored[at + VALUE_BYTES :] == message[at + VALUE_BYTES :]
    assert verify_stored(stored) == header
    assert decode_batch(stored, MANY_TYPES).equals(many_types())


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_batch_is_numbered_again_as_if_it_were_encoded_so(compression: str | None) -> None:
    batch = encoded_batch(many_types(), compression=compression, schema_id=1)
    assert len(batch) == len(bytes(batch)) == batch.header.length
    for numbers in ({"producer_id": 1, "producer_epoch": 2, "base_sequence": 3}, {"producer_id": 2**62}):
        again = {"producer_id": -1, "producer_epoch": -1, "base_sequence": -1} | numbers
        numbered = batch.numbered(**again)
        assert numbered.body is batch.body
        assert bytes(numbered) == encode_batch(many_types(), compression=compression, schema_id=1, **again)


def test_a_message_at_an_odd_address_decodes() -> None:
    message = encode_batch(many_types())
    for shift in range(1, 8):
        shifted = memoryview(bytes(shift) + message)[shift:]
        assert decode_batch(shifted, MANY_TYPES).equals(many_types())
        assert check(shifted).equals(many_types())


def forged(message: bytes, **fields: int) -> bytes:
    """The message with other fields and CRCs to match, as from a malicious client that computes checksums."""
    target = bytearray(message)
    head = read_head(target)
    write_value(target, head, parsed(message).header._replace(**fields), crc32c(bytes(target[len(head.data) :])))
    return bytes(target)


def resealed(message: bytearray) -> bytes:
    """The message with CRCs that match its changed bytes."""
    head = read_head(message)
    body_crc = crc32c(bytes(message[head.metadata.head_bytes :]))
    write_value(message, head, head.header._replace(length=len(message)), body_crc)
    return bytes(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"row_count": 21, "last_offset_delta": 20},
        {"last_offset_delta": 18},
        {"length": 8},
        {"attributes": CONTROL},
        {"attributes": ROW_OFFSETS},
        {"attributes": FIRST_OF_SEGMENT},
        {"attributes": COMPRESSED},
        {"row_count": -1},
    ],
)
def test_fields_that_do_not_fit_the_batch_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(CorruptMessageError):
        check(forged(encode_batch(many_types()), **fields))


def test_a_cut_at_every_byte_and_bytes_too_many_are_refused() -> None:
    message = encode_batch(many_types())
    for length in range(0, len(message), 3):
        with pytest.raises(CorruptMessageError):
            check(message[:length])
    with pytest.raises(CorruptMessageError):
        check(message + bytes(8))


def test_a_flip_of_every_bit_is_refused() -> None:
    message = encode_batch(many_types(5))
    for at in range(len(message)):
        for bit in (1, 0x20):
            with pytest.raises(SparkBrokerError):
                check(message[:at] + bytes([message[at] ^ bit]) + message[at + 1 :])


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_small_message_that_claims_to_be_huge_is_refused_before_it_is_inflated(compression: str) -> None:
    bomb = encode_batch(kafka_records([bytes(30_000_000)]), compression=compression)
    assert len(bomb) < 200_000
    with pytest.raises(MessageTooLargeError):
        check(bomb, DEFAULT_SCHEMA, limit=1 << 20)
    message = bytearray(encode_batch(many_types(), compression=compression))
    metadata = read_metadata(message)
    offset = next(offset for offset, length in metadata.buffers if length)
    for claimed in (2**62, -2, 2**24):
        struct.pack_into("<q", message, metadata.head_bytes + offset, claimed)
        with pytest.raises((CorruptMessageError, MessageTooLargeError)):
            check(resealed(message))


def test_a_batch_of_very_many_rows_is_refused() -> None:
    """Story: 134 million booleans are 16 MiB, and a few hundred bytes on the wire. A look-up by time took 2 GiB."""
    schema = pa.schema([("c", pa.bool_())])
    most = pa.record_batch([pa.nulls(MAX_ROWS, pa.bool_())], schema=schema)
    message = encode_batch(most, compression="zstd")
    assert check(message, schema, limit=1 << 24).num_rows == MAX_ROWS
    with pytest.raises(InvalidDataError, match=f"{MAX_ROWS + 1} rows"):
        encode_batch(pa.record_batch([pa.nulls(MAX_ROWS + 1, pa.bool_())], schema=schema))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_message, "MAX_ROWS", MAX_ROWS - 1)
        with pytest.raises(MessageTooLargeError, match="rows; the limit is"):
            check(message, schema, limit=1 << 24)


def test_string_offsets_that_point_outside_are_refused() -> None:
    batch = pa.record_batch({"text": ["a", "bc", "def"]})
    message = bytearray(encode_batch(batch))
    metadata = read_metadata(message)
    struct.pack_into("<i", message, metadata.head_bytes + metadata.buffers[1][0] + 4, 1 << 30)
    with pytest.raises(CorruptMessageError, match="not a valid Arrow batch"):
        check(resealed(message), batch.schema)


def test_a_batch_of_another_schema_is_refused() -> None:
    message = encode_batch(many_types())
    with pytest.raises(SchemaMismatchError):
        check(message, DEFAULT_SCHEMA)
    with pytest.raises(SparkBrokerError):
        check(encode_batch(pa.record_batch({"a": pa.array([1], pa.int32())})), pa.schema([pa.field("a", pa.int64())]))


def test_nulls_in_a_column_that_takes_none_are_refused() -> None:
    message = encode_batch(pa.record_batch({"a": pa.array([1, None])}))
    with pytest.raises(SchemaMismatchError):
        check(message, pa.schema([pa.field("a", pa.int64(), nullable=False)]))


def test_other_custom_metadata_and_other_messages_are_refused() -> None:
    batch = many_types()
    with pytest.raises(CorruptMessageError):
        check(bytes(batch.serialize()))
    with pytest.raises(CorruptMessageError):
        check(schema_to_bytes(MANY_TYPES))
    for custom in (
        {"spark_broker": "0" * VALUE_BYTES, "more": "x"},
        {"other": "0" * VALUE_BYTES},
        {"spark_broker": "0"},
    ):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch, custom_metadata=custom)
        stream = sink.getvalue().to_pybytes()
        with pytest.raises(CorruptMessageError):
            check(stream[8 + int.from_bytes(stream[4:8], "little") : -8])


def _mutated(message: bytes, rng: random.Random) -> bytearray:
    target = bytearray(message)
    metadata = read_metadata(message)
    for _ in range(rng.randint(1, 4)):
        # Mostly in the head, which holds the structure; never in the value, so that resealing keeps its meaning.
        at = rng.randrange(4, metadata.head_bytes if rng.random() < 0.7 else len(target))
        if metadata.value_at - 8 <= at < metadata.value_at + VALUE_BYTES:
            continue
        kind = rng.random()
        if kind < 0.4:
            target[at] = rng.randrange(256)
        elif kind < 0.7:
            target[at] ^= 1 << rng.randrange(8)
        else:
            width = min(rng.choice((2, 4, 8)), len(target) - at)
            target[at : at + width] = rng.choice((0, 1, 2**31 - 1, 2**63, 2**64 - 1, len(target))).to_bytes(
                8, "little"
            )[:width]
    return target


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_thousands_of_mutations_with_right_checksums_do_no_harm(compression: str | None) -> None:
    """The hardest case: random bytes change and every CRC matches. What is accepted is safe to read and store."""
    rng = random.Random(7)
    message = encode_batch(many_types(), compression=compression)
    templates = layout_of(schema_to_bytes(MANY_TYPES)).templates
    accepted = known = 0
    for _ in range(1500):
        target = _mutated(message, rng)
        for metadata in filter(None, (template.read(target) for template in templates)):
            known += 1
            assert metadata == read_metadata(target), "a template reads what the bounded reader reads"
        try:
            sealed = resealed(target)
            batch = check(sealed)
            accepted += 1
            _, stored = assign(sealed, base_offset=0, leader_epoch=0, append_time_ms=0, max_timestamp_us=0)
            assert verify_stored(stored).row_count == batch.num_rows
            again = decode_batch(stored, MANY_TYPES)
            again.validate(full=True)
            assert again.num_rows == batch.num_rows
            again.drop_columns("at").to_pylist()  # Any int64 is a timestamp to Arrow, but not to Python.
        except SparkBrokerError:
            continue
    assert known > 100
    assert accepted > 10, "the test proves nothing when no mutation gets past the checksums"


def test_random_bytes_are_refused() -> None:
    rng = random.Random(3)
    for _ in range(500):
        data = (
            b"\xff\xff\xff\xff" + (8 * rng.randrange(1, 30)).to_bytes(4, "little") + rng.randbytes(rng.randrange(400))
        )
        with pytest.raises(CorruptMessageError):
            check(data)


@pytest.mark.parametrize(("last", "fits"), [(2**63 - 2, True), (2**63 - 1, False), (2**63, False)])
def test_no_batch_goes_beyond_the_last_offset_that_there_is(last: int, fits: bool) -> None:
    """Story: records were deleted up to 2**63 - 1. The second append after that ended the leader."""
    message = encode_batch(pa.record_batch({"n": [1, 2]}))
    append = partial(assign, message, base_offset=last - 1, leader_epoch=0, append_time_ms=0, max_timestamp_us=0)
    if fits:
        assert append()[0].last_offset == last
    else:
        with pytest.raises(InvalidRequestError, match="no offsets left for 2 records"):
            append()
