"""A batch from which compaction has removed rows: its message, its offsets, and what readers make of it."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.fetch_decoder import Projection, decode_fetched
from spark_broker.client.partition_position import PartitionPosition, Start
from spark_broker.errors import CorruptMessageError, SchemaMismatchError
from spark_broker.model import ConsumedBatch, TopicPartition
from spark_broker.protocol.arrow_message import (
    assign,
    compression_of,
    decode_batch,
    encode_batch,
    encode_compacted,
    encode_gap,
    layout_of,
    restamp,
    row_deltas,
    validate,
    verify_stored,
)
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.frame import COMPRESSED, FIRST_OF_SEGMENT, TRANSACTIONAL, Frame
from spark_broker.protocol.messages import FetchedPartition
from spark_broker.protocol.row_offsets import decode_row_offsets, encode_row_offsets
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes

ROWS = 10
KEPT = [0, 1, 4, 9]


def rows(count: int = ROWS) -> pa.RecordBatch:
    records = [
        {"key": b"k%d" % i, "value": b"v%d" % i, "timestamp": datetime(2026, 1, 1, tzinfo=UTC)} for i in range(count)
    ]
    return pa.RecordBatch.from_pylist(records, schema=DEFAULT_SCHEMA)


def stored(base_offset: int = 100, *, compression: str | None = None, attributes: int = 0) -> Frame:
    message = encode_batch(
        rows(), producer_id=7, producer_epoch=1, base_sequence=3, compression=compression, attributes=attributes
    )
    return Frame(
        *assign(
            message,
            base_offset=base_offset,
            leader_epoch=2,
            append_time_ms=5,
            max_timestamp_us=6,
            first_of_segment=True,
        )
    )


def compacted(kept: list[int] = KEPT, *, base_offset: int = 100, compression: str | None = None) -> Frame:
    header, message = stored(base_offset, compression=compression)
    left = decode_batch(message, DEFAULT_SCHEMA).take(pa.array(kept, pa.int64()))
    return encode_compacted(left, header, np.array(kept, np.int64), compression_of(message))


@given(st.data())
def test_row_offsets_come_back_equal(data: st.DataObject) -> None:
    span = data.draw(st.integers(1, 3000))
    kept = sorted(data.draw(st.sets(st.integers(0, span - 1), max_size=200)))
    text = encode_row_offsets(np.array(kept, np.int64), span)
    assert decode_row_offsets(text, span=span, rows=len(kept)).tolist() == kept


def test_a_row_left_of_a_million_takes_little_room() -> None:
    assert len(encode_row_offsets(np.array([777_777]), 1_000_000)) < 1000


@pytest.mark.parametrize(
    ("text", "span", "rows"),
    [
        (encode_row_offsets(np.array([1, 5]), 8), 8, 3),  # fewer offsets than rows
        (encode_row_offsets(np.array([1, 5]), 8), 16, 2),  # another span
        (encode_row_offsets(np.array([7]), 8), 5, 1),  # an offset past the end
        (b64encode(zlib.compress(bytes(10_000_000))), 8, 1),  # inflates to more than the span allows
        (encode_row_offsets(np.array([1]), 8)[:-4], 8, 1),  # cut short
        (b"not base64!", 8, 1),
        (b64encode(b"not deflated"), 8, 1),
        (b"", 8, 1),
        (b64encode(b64decode(encode_row_offsets(np.array([1]), 8)) + b"more")[:-3], 8, 1),
    ],
)
def test_a_text_that_says_something_else_is_refused(text: bytes, span: int, rows: int) -> None:
    with pytest.raises(CorruptMessageError):
        decode_row_offsets(text, span=span, rows=rows)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_rows_that_stay_keep_their_offsets_values_and_compression(compression: str | None) -> None:
    header, message = compacted(compression=compression)
    assert verify_stored(message) == header
    assert (header.base_offset, header.last_offset_delta, header.row_count) == (100, 9, 4)
    assert (header.producer_id, header.producer_epoch, header.base_sequence, header.leader_epoch) == (7, 1, 3, 2)
    assert bool(header.attributes & COMPRESSED) is (compression is not None)
    assert compression_of(message) == compression
    assert row_deltas(header, message).tolist() == KEPT
    assert decode_batch(message, DEFAULT_SCHEMA).column("value").to_pylist() == [b"v0", b"v1", b"v4", b"v9"]
    assert decode_batch(message, DEFAULT_SCHEMA, ["key"]).column("key").to_pylist() == [b"k0", b"k1", b"k4", b"k9"]


def test_a_batch_without_rows_keeps_its_offsets_and_its_place_in_the_sequence() -> None:
    header, message = encode_gap(DEFAULT_SCHEMA, stored().header)
    assert verify_stored(message) == header
    assert (header.base_offset, header.next_offset, header.row_count, header.base_sequence) == (100, 110, 0, 3)
    assert row_deltas(header, message).tolist() == []
    assert len(message) < 1000


def test_any_arrow_tool_reads_compacted_batches() -> None:
    stream = b"".join(
        map(
            bytes,
            (schema_to_bytes(DEFAULT_SCHEMA), compacted().message, encode_gap(DEFAULT_SCHEMA, stored().header).message),
        )
    )
    assert pa.ipc.open_stream(stream).read_all().column("value").to_pylist() == [b"v0", b"v1", b"v4", b"v9"]


def test_restamped_attributes_leave_the_rows_as_they_were() -> None:
    header, message = stored(attributes=TRANSACTIONAL)
    again, changed = restamp(message, header._replace(attributes=0))
    assert header.attributes == TRANSACTIONAL | FIRST_OF_SEGMENT
    assert again.attributes == 0
    assert again.message_crc == crc32c(changed)
    assert verify_stored(changed) == again
    assert decode_batch(changed, DEFAULT_SCHEMA).equals(rows())


def test_a_gap_can_be_cut_to_begin_later() -> None:
    gap = encode_gap(DEFAULT_SCHEMA, stored().header)
    header, message = restamp(gap.message, gap.header._replace(base_offset=104, last_offset_delta=5))
    assert verify_stored(message) == header
    assert (header.base_offset, header.next_offset) == (104, 110)


def test_a_client_may_not_send_one() -> None:
    frames = compacted(), encode_gap(DEFAULT_SCHEMA, stored().header)
    for frame in frames:
        with pytest.raises((CorruptMessageError, SchemaMismatchError)):
            validate(frame.message, layout_of(schema_to_bytes(DEFAULT_SCHEMA)), max_uncompressed_bytes=1 << 20)


@pytest.mark.parametrize("at", range(0, 400, 7))
def test_a_flipped_bit_is_noticed(at: int) -> None:
    message = bytearray(compacted().message)
    at = at * len(message) // 400
    message[at] ^= 4
    with pytest.raises(CorruptMessageError):
        verify_stored(message)


def topic() -> TopicView:
    return TopicView("t", "id", (), (), {})


def fetched(*frames: Frame, offset: int = 100, next_offset: int = 110) -> PartitionPosition:
    answer = FetchedPartition("id", 0, 0, leader_epoch=2, next_offset=next_offset, next_epoch=2)
    position = PartitionPosition(TopicPartition("t", 0), None, Start.EARLIEST)
    position.move_to(offset)
    position.add(decode_fetched(list(frames), Projection(topic(), None), answer, offset))
    return position


def offsets(batches: list[ConsumedBatch]) -> list[tuple[int, bytes]]:
    return [
        (batch.base_offset + at, value) for batch in batches for at, value in enumerate(batch.data["value"].to_pylist())
    ]


def test_a_consumer_is_handed_runs_of_consecutive_offsets() -> None:
    position = fetched(compacted())
    batches = position.take()
    assert offsets(batches) == [(100, b"v0"), (101, b"v1"), (104, b"v4"), (109, b"v9")]
    assert [batch.base_offset for batch in batches] == [100, 104, 109]
    assert [batch.next_offset for batch in batches] == [102, 105, 110]
    assert all(batch.sparse is None and len(batch.timestamps) == batch.data.num_rows for batch in batches)
    assert position.position == 110


@pytest.mark.parametrize(("offset", "expected"), [(101, [101, 104]), (102, [104]), (105, []), (109, [])])
def test_a_read_may_begin_at_any_offset_of_a_compacted_batch(offset: int, expected: list[int]) -> None:
    position = fetched(compacted([0, 1, 4]), offset=offset)
    assert [offset for offset, _ in offsets(position.take())] == expected
    assert position.position == 110


def test_records_one_at_a_time_pass_the_gaps_and_the_end_of_the_batch() -> None:
    position = fetched(compacted([0, 4]), stored(110), next_offset=120)
    taken = [record.offset for _ in range(4) if (record := position.take_record()) is not None]
    assert taken == [100, 104, 110, 111]
    assert position.position == 112
    assert offsets(position.take())[0] == (112, b"v2")


def test_a_poll_goes_on_after_records_of_a_compacted_batch() -> None:
    position = fetched(compacted())
    assert [position.take_record().offset for _ in range(2)] == [100, 101]  # type: ignore[union-attr]
    assert position.position == 102
    assert offsets(position.take()) == [(104, b"v4"), (109, b"v9")]


def test_emptied_batches_move_the_position_alone() -> None:
    position = fetched(encode_gap(DEFAULT_SCHEMA, stored().header))
    assert position.take() == []
    assert position.position == 110


def test_slices_of_a_sparse_batch_keep_offsets() -> None:
    (prefetched,) = decode_fetched(
        [compacted()], Projection(topic(), None), FetchedPartition("id", 0, 0, next_offset=110), 100
    )
    assert prefetched.decode is not None
    batch = prefetched.decode()
    assert batch.offsets.tolist() == [100, 101, 104, 109]
    assert [batch.rows_below(offset) for offset in (99, 101, 102, 105, 200)] == [0, 1, 2, 3, 4]
    part = batch.slice(1, 2)
    assert (part.base_offset, part.offsets.tolist(), part.next_offset) == (101, [101, 104], 105)
    assert [record.offset for record in part.records()] == [101, 104]
    empty = batch.slice(4)
    assert (empty.data.num_rows, list(empty.runs()), list(empty.records())) == (0, [], [])
