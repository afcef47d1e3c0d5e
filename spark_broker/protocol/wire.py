"""The bounded codec: a message and its payload as one run of bytes, `u32 length | msgpack message | payload`."""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from spark_broker.errors import InvalidRequestError, SparkBrokerError, error_from_code
from spark_broker.protocol.messages import CallRequest, CallResponse, ErrorResponse, Message, StreamMessage

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message, payload not counted (metadata of very large clusters is the largest)."""

UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What msgspec and json raise for bytes that are not a message. Text that is not UTF-8, and a number of thousands of
digits, is a ValueError; 100,000 opening brackets are a RecursionError. Whoever decodes bytes from outside this process
catches these, and no shorter list (`tests/test_tidy.py`)."""

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_stream_decoder = msgspec.msgpack.Decoder(StreamMessage)
_request_decoder = msgspec.msgpack.Decoder(CallRequest)
_response_decoder = msgspec.msgpack.Decoder(CallResponse)

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview


def encode(message: Message, *payload: Buffer) -> bytes:
    """A stream message with its payload."""
    head = _encoder.encode(message)
    return b"".join((_LENGTH.pack(len(head)), head, *payload))


def decode(data: Buffer) -> tuple[StreamMessage, memoryview]:
    """The stream message and a view of its payload. Raises InvalidRequestError."""
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise InvalidRequestError(f"a message of {len(view)} bytes")
    (length,) = _LENGTH.unpack_from(view)
    end = _LENGTH.size + length
    if length > MAX_MESSAGE_BYTES or end > len(view):
        raise InvalidRequestError(f"a message that claims {length} bytes in {len(view)}")
    return _decode(_stream_decoder, view[_LENGTH.size : end]), view[end:]


def encode_call(message: Message) -> bytes:
    """A call's request or response."""
    return _encoder.encode(message)


def decode_request(data: Buffer) -> CallRequest:
    """The request of a call. Raises InvalidRequestError."""
    request: CallRequest = _decode(_request_decoder, data)
    return request


def decode_response(data: Buffer) -> CallResponse:
    """The response of a call; an ErrorResponse is raised as the error that it carries."""
    response: CallResponse = _decode(_response_decoder, data)
    if isinstance(response, ErrorResponse):
        raise error_from_code(response.error_code, response.error_message)
    return response


def encode_message(message: Message) -> bytes:
    """A stream message, without its payload."""
    return _encoder.encode(message)


def decode_message(data: Buffer) -> StreamMessage:
    """The stream message, without its payload. Raises InvalidRequestError."""
    message: StreamMessage = _decode(_stream_decoder, data)
    return message


def error_response(error: SparkBrokerError) -> ErrorResponse:
    """The error as it crosses the wire."""
    return ErrorResponse(error.code, error.message[:65_000])


def _decode(decoder: msgspec.msgpack.Decoder[T], data: Buffer) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(f"a message of {len(data)} bytes")
    try:
        return decoder.decode(data)
    except UNDECODABLE as error:
        raise InvalidRequestError(f"a message that does not decode: {error}") from None
