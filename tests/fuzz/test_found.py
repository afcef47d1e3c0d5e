"""What the fuzzer found and was mended, each with its input."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest

from spark_broker.broker.projection import check_columns, project_frames
from spark_broker.broker.topic import Topic
from spark_broker.config import TopicConfig
from spark_broker.controller.records import LaunchRecord, decode_records, encode_records
from spark_broker.core.groups.records import decode_record
from spark_broker.driver.port_probe import port_refuses
from spark_broker.errors import CorruptMessageError, InvalidRequestError
from spark_broker.protocol import wire
from spark_broker.protocol.arrow_message import assign, encode_batch
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    ConfirmHistoryRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    ListOffsetsPartition,
    ListOffsetsRequest,
    RaiseLogStartsRequest,
    ReplicaFetched,
    ReplicaStateResponse,
)
from spark_broker.protocol.schema import schema_to_bytes
from tests.fuzz.targets import TARGETS, input_of

NOT_UTF8 = b"\xa2\xed\xa0"
"""A text of two bytes that are no UTF-8."""


@pytest.mark.parametrize(("target", "seed"), [("stream", 3), ("request", 79), ("response", 21), ("records", 2)])
def test_the_first_finding_of_each_codec_is_refused(target: str, seed: int) -> None:
    """UnicodeDecodeError came out of the decoder: not a typed error, so one wrong byte ended a broker."""
    TARGETS[target].judge(input_of(target, seed))


def test_a_text_that_is_not_utf8_is_a_typed_error() -> None:
    request = wire.encode(DeleteTopicRequest("xy")).replace(b"\xa2xy", NOT_UTF8)
    with pytest.raises(InvalidRequestError):
        wire.decode_request(request)
    with pytest.raises(InvalidRequestError):
        wire.decode_message(request)
    with pytest.raises(InvalidRequestError):
        decode_records(encode_records([LaunchRecord(1)]).replace(b"\x02\x01", b"\x02" + NOT_UTF8))


@pytest.mark.parametrize("key", [b"\x93" + NOT_UTF8 + b"\xa0\x00", b"\x91" * 5000])
def test_a_key_of_committed_offsets_that_does_not_decode_is_a_typed_error(key: bytes) -> None:
    with pytest.raises(CorruptMessageError):
        decode_record(key, msgspec.msgpack.encode([0, 0, ""]))


@pytest.mark.parametrize("moment", [2**63, 2**64 - 1, "newest", "", None, 1.5])
def test_a_time_that_is_no_int64_is_refused_in_the_decoder(moment: Any) -> None:
    """`absurd_requests`: Arrow's TypeError about the comparison with such a number ended the broker."""
    request = wire.encode(ListOffsetsRequest([ListOffsetsPartition("0" * 32, 0, -1, moment)]))
    with pytest.raises(InvalidRequestError):
        wire.decode_request(request)


def test_settings_of_topics_without_bound_are_refused_in_the_decoder() -> None:
    many = {str(number): "" for number in range(1001)}
    for request in (AlterTopicConfigRequest("t", dict(many)), CreateTopicRequest("t", 1, 1, b"", many)):
        with pytest.raises(InvalidRequestError):
            wire.decode_request(wire.encode(request))


@pytest.mark.parametrize(("host", "port"), [("a" * 64 + ".b", 1), ("\0", 1), ("..", 1)])
def test_a_host_that_is_no_name_is_not_taken_for_a_dead_broker(host: str, port: int) -> None:
    """UnicodeError and ValueError were lost in the thread that probes: the probe was never answered."""
    assert not port_refuses(host, port)


def _topic_and_frames(rows: int) -> tuple[Topic, list[Frame]]:
    schema = pa.schema([("n", pa.int64()), ("s", pa.string())])
    batch = pa.RecordBatch.from_pylist([{"n": 1, "s": "x" * 1000}] * rows, schema=schema)
    frames = []
    for number in range(10):
        header, stored = assign(
            encode_batch(batch, compression="zstd"),
            base_offset=number * rows,
            leader_epoch=0,
            append_time_ms=0,
            max_timestamp_us=0,
        )
        frames.append(Frame(header, stored))
    return Topic("t", "0" * 32, (schema,), (schema_to_bytes(schema),), TopicConfig(), ""), frames


@pytest.mark.parametrize("columns", [[], ["n"] * 10_000, ["n", "n"], ["x" * 60_000], ["n", "x"]])
def test_columns_are_refused_before_anything_is_read(columns: list[str]) -> None:
    """`absurd_requests`: one request made ten thousand columns of each batch, 4 GiB in the broker."""
    topic, _ = _topic_and_frames(1)
    with pytest.raises(InvalidRequestError) as refusal:
        check_columns(topic, columns)
    assert len(refusal.value.message) < 1000


def test_a_projection_is_bounded_by_what_it_sends_and_not_by_what_is_stored() -> None:
    topic, frames = _topic_and_frames(100)
    assert sum(frame.header.length for frame in frames) < 10_000
    some = project_frames(frames, topic, ["s"], 350_000)
    assert [frame.header.base_offset for frame in some] == [0, 100, 200]
    assert len(project_frames(frames, topic, ["s"], 1)) == 1
    assert len(project_frames(frames, topic, ["s"], 10_000_000)) == 10


@pytest.mark.parametrize("start", [2**62 + 1, 2**63 - 1])
def test_no_log_begins_where_nothing_can_be_appended_any_more(start: int) -> None:
    """`extreme_attacks`: a partition whose start was raised to the last offset of all took no record, and no marker of
    a transaction, for good: a log's start never falls.
    """
    topic_id = "0" * 32
    beyond = (
        RaiseLogStartsRequest(topic_id, [(0, start)]),
        ConfirmHistoryRequest(topic_id, 0, "t", 0, 0, [0], [start]),
        ReplicaFetched(topic_id, 0, 0, log_start_offset=start),
        ReplicaFetched(topic_id, 0, 0, purge_offset=start),
        ReplicaStateResponse(start, [], []),
    )
    for message in beyond:
        with pytest.raises(InvalidRequestError):
            wire.decode_message(wire.encode(message))
    last = RaiseLogStartsRequest(topic_id, [(0, 2**62)])
    assert wire.decode_request(wire.encode(last)) == last
