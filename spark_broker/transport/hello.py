"""The first frame of either side: who it is, and which version of the protocol it speaks."""

from __future__ import annotations

from typing import Annotated

import msgspec

from spark_broker.errors import InvalidRequestError, UnsupportedVersionError
from spark_broker.protocol.messages import PROTOCOL_VERSION
from spark_broker.protocol.wire import UNDECODABLE, Buffer
from spark_broker.transport.frames import Operation, encode

MAGIC = "spark-broker"

Short = Annotated[str, msgspec.Meta(max_length=250)]


class Hello(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`software`: name and version of the program. A later version may add fields: they are ignored."""

    magic: Short
    version: int
    client_id: Short = ""
    software: Short = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Hello)


def hello(client_id: str = "") -> list[Buffer]:
    """The frame of this process."""
    return encode(Operation.HELLO, _encoder.encode(Hello(MAGIC, PROTOCOL_VERSION, client_id[:250], "spark-broker")))


def check_hello(message: Buffer) -> Hello:
    """The peer's hello. Raises InvalidRequestError, and UnsupportedVersionError for another version."""
    try:
        said = _decoder.decode(message)
    except UNDECODABLE as error:
        raise InvalidRequestError(f"a hello that does not decode: {error}") from None
    if said.magic != MAGIC:
        raise InvalidRequestError(f"a hello of {said.magic!r}")
    if said.version != PROTOCOL_VERSION:
        raise UnsupportedVersionError(f"the peer speaks version {said.version}, this process {PROTOCOL_VERSION}")
    return said
