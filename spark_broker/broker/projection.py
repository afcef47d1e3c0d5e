"""Frames with only some columns, for a consumer that names them."""

from __future__ import annotations

from spark_broker.broker.topic import Topic
from spark_broker.errors import InvalidRequestError
from spark_broker.protocol.arrow_message import decode_batch, encode_batch
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.frame import Frame


def project_frames(frames: list[Frame], topic: Topic, columns: list[str]) -> list[Frame]:
    """The same batches at the same offsets, with these columns in this order. Raises InvalidRequestError."""
    known = topic.schemas[-1].names
    unknown = [name for name in columns if name not in known]
    if unknown or not columns:
        raise InvalidRequestError(f"the topic {topic.name} has columns {known}, not {unknown or columns}")
    return [_project(frame, topic, columns) for frame in frames]


def _project(frame: Frame, topic: Topic, columns: list[str]) -> Frame:
    if frame.header.row_count == 0:
        return frame
    batch = decode_batch(frame.message, topic.schemas[frame.header.schema_id], columns)
    message = encode_batch(batch)
    return Frame(frame.header._replace(length=len(message), message_crc=crc32c(message)), message)
