"""Frames with only some columns, for a consumer that names them."""

from __future__ import annotations

from spark_broker.broker.topic import Topic
from spark_broker.errors import InvalidRequestError
from spark_broker.protocol.arrow_message import decode_batch, encode_batch, encode_compacted, row_deltas
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.frame import HEADER_BYTES, ROW_OFFSETS, Frame
from spark_broker.protocol.schema import columns_stored


def project_frames(frames: list[Frame], topic: Topic, columns: list[str], max_bytes: int) -> list[Frame]:
    """The first of these batches, at the same offsets, with only these columns (already checked) in this order.

    Returns at least one batch, however large, and otherwise at most `max_bytes`. Batches may grow here: those that are
    compressed in the log are not compressed in the answer.
    """
    projected: list[Frame] = []
    for frame in frames:
        small = _project(frame, topic, columns)
        max_bytes -= HEADER_BYTES + small.header.length
        if projected and max_bytes < 0:
            break
        projected.append(small)
    return projected


def check_columns(topic: Topic, columns: list[str]) -> None:
    """Check that the topic has these columns, before anything is read. Raises InvalidRequestError."""
    names = topic.schemas[-1].names
    if not 0 < len(columns) <= len(names) or len(set(columns)) < len(columns):
        raise InvalidRequestError(f"the topic {topic.name} has columns {names}, not {len(columns)} different ones")
    unknown = next((name for name in columns if name not in names), None)
    if unknown is not None:
        raise InvalidRequestError(f"the topic {topic.name} has columns {names}, not {unknown[:249]!r}")


def _project(frame: Frame, topic: Topic, columns: list[str]) -> Frame:
    if frame.header.row_count == 0:
        return frame
    stored = topic.schema_of(frame.header.schema_id)
    batch = decode_batch(frame.message, stored, columns_stored(stored, columns))
    if frame.header.attributes & ROW_OFFSETS:
        return encode_compacted(batch, frame.header, row_deltas(*frame))
    message = encode_batch(batch)
    return Frame(frame.header._replace(length=len(message), message_crc=crc32c(message)), message)
