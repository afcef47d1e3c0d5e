"""The bounded codec of messages. `transport/frames.py` says how they cross a connection, with their payload."""

from __future__ import annotations

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

_encoder = msgspec.msgpack.Encoder()
_stream_decoder = msgspec.msgpack.Decoder(StreamMessage)
_request_decoder = msgspec.msgpack.Decoder(CallRequest)
_response_decoder = msgspec.msgpack.Decoder(CallResponse)

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview


def encode(message: Message) -> bytes:
    """A message, without its payload."""
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
