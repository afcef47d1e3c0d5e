"""The head that one writer gives to all batches of one schema, known in advance.

Only a few numbers in it differ from batch to batch, and our value. The bounded reader finds its way by the other bytes
alone. In a head that has the same other bytes it would come to the same places, so only these are read. A template is
made of a message of our own, never of a client's. What has no template is left to the bounded reader.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from operator import itemgetter

from spark_broker.protocol.crc32c import Buffer
from spark_broker.protocol.ipc_message import MessageMetadata, Place, Places, read_places

HEAD_BYTES_MAX = 64 * 1024
"""Longer heads belong to batches of more than a thousand columns. They get no template, so that templates are small."""


class HeadTemplate:
    """A head is unpacked in one call. Its fields are runs of bytes that are the same in every such head, and what lies
    between them: numbers and our value.
    """

    def __init__(self, head: bytes, metadata: MessageMetadata, places: Places) -> None:
        """See `template_of`."""
        self.head_bytes, self.compression = metadata.head_bytes, metadata.compression
        self.value_at, self.value_bytes = metadata.value_at, metadata.value_bytes
        formats: list[str] = []
        fields: dict[Place, slice] = {}
        same: list[int] = []
        at = count = 0  # bytes and fields before the place
        for place in (*sorted(places), Place(len(head), len(head))):
            same.append(count)
            numbers = 1 if place == places.value else (place.end - place.start) // 8
            format_of = f"{place.end - place.start}s" if place == places.value else f"{numbers}q"
            formats.append(f"{place.start - at}s{format_of if numbers else ''}")
            fields[place] = slice(count + 1, count + 1 + numbers)
            at, count = place.end, count + 1 + numbers
        self._fields = struct.Struct("<" + "".join(formats))
        self._same_of = itemgetter(*same)
        self._same = self._same_of(self._fields.unpack(head))
        self._body_bytes, self._row_count = fields[places.body_bytes].start, fields[places.row_count].start
        self._nodes, self._buffers = fields[places.nodes], fields[places.buffers]

    def read(self, message: Buffer) -> MessageMetadata | None:
        """What the bounded reader would find in the message; None: the head is another."""
        if len(message) < self.head_bytes:
            return None
        fields = self._fields.unpack_from(message)
        if self._same_of(fields) != self._same:
            return None
        nodes, buffers = fields[self._nodes], fields[self._buffers]
        return MessageMetadata(
            self.head_bytes,
            fields[self._body_bytes],
            fields[self._row_count],
            tuple(zip(nodes[::2], nodes[1::2], strict=True)),
            tuple(zip(buffers[::2], buffers[1::2], strict=True)),
            self.compression,
            self.value_at,
            self.value_bytes,
        )


def template_of(message: Buffer) -> HeadTemplate | None:
    """The template of heads like that of `message`, which has rows and a body: a head leaves out numbers that are 0.

    None: the head is very long, or it is not only numbers and our value in which others differ from it.
    """
    metadata, places = read_places(message)
    head = bytes(memoryview(message)[: metadata.head_bytes])
    usable = len(head) <= HEAD_BYTES_MAX and _lie_apart(places) and _lead_nowhere(head, places)
    return HeadTemplate(head, metadata, places) if usable else None


def _lie_apart(places: Places) -> bool:
    ordered = sorted(places)
    return all(start < end for start, end in ordered) and all(a.end <= b.start for a, b in pairwise(ordered))


def _lead_nowhere(head: bytes, places: Places) -> bool:
    """Whether the bounded reader comes to these places whatever they hold."""
    changed = bytearray(head)
    for start, end in places:
        changed[start:end] = b"\xff" * (end - start)
    return read_places(changed)[1] == places
