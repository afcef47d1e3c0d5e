"""What all messages share: the base, bounded types, and the answer to a call that failed."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from spark_broker.model import NAME_MAX

PROTOCOL_VERSION = 4

ACKS_ALL = -1

Name = Annotated[str, Meta(max_length=NAME_MAX)]
Text = Annotated[str, Meta(max_length=65_536)]
LogPlace = Annotated[str, Meta(max_length=4096)]
"""Where a process logs, or where a broker keeps its log: a path on its machine. Empty: it is not known."""
TopicId = Annotated[str, Meta(min_length=32, max_length=32)]
TopicIdOrEmpty = Annotated[str, Meta(max_length=32)]
BrokerId = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
PartitionId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Epoch = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
Offset = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
Offsets = Annotated[list[Offset], Meta(max_length=100_000)]
"""An offset for each partition of a topic."""
LogStart = Annotated[int, Meta(ge=-1, le=2**62)]
"""Where a log begins, by the word of another process. As many offsets again are left for what is appended: at the last
offset of all, nothing could be, and no log's start falls."""
LogStarts = Annotated[list[LogStart], Meta(max_length=100_000)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer without a range of its own: what Arrow and numpy can hold."""
ErrorCode = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""A number of things, a port or a process id; -1: not said."""
Milliseconds = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Brokers = Annotated[list[BrokerId], Meta(max_length=1000)]


class Message(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages: sent as `[tag, field, field, ...]`."""


class ErrorResponse(Message, frozen=True):
    """The answer to any call that failed."""

    error_code: ErrorCode
    error_message: Text = ""


def known(value: int) -> int | None:
    """The value, or None for -1: on the wire it means "unknown" or "absent"."""
    return None if value < 0 else value
