"""Which of the offsets that a compacted batch spans still have a row.

A compacted batch keeps its offsets, but not all of its rows. Its message says which are left, in text after the
fixed-width value of its custom metadata: a bitmap with a bit for each offset, deflated, in base64.
"""

from __future__ import annotations

import binascii
import zlib

import numpy as np
import numpy.typing as npt

from spark_broker.errors import CorruptMessageError, invariant

Deltas = npt.NDArray[np.int64]
"""Offsets of rows, counted from the batch's base offset; they increase."""

_LEVEL = 1
"""A sparse bitmap becomes small at any level."""


def encode_row_offsets(deltas: Deltas, span: int) -> bytes:
    """The text for rows at these offsets of a batch that spans `span` offsets. Without rows it is empty."""
    if not len(deltas):
        return b""
    invariant(deltas[0] >= 0 and deltas[-1] < span, "rows from %d to %d of %d", deltas[0], deltas[-1], span)
    bits = np.zeros(span, np.bool_)
    bits[deltas] = True
    return binascii.b2a_base64(zlib.compress(np.packbits(bits).tobytes(), _LEVEL), newline=False)


def decode_row_offsets(text: bytes, *, span: int, rows: int) -> Deltas:
    """The offsets of `rows` rows. Raises CorruptMessageError for a text that does not say so."""
    if not text and not rows:
        return np.empty(0, np.int64)
    packed_bytes = (span + 7) // 8
    try:
        inflater = zlib.decompressobj()
        packed = inflater.decompress(binascii.a2b_base64(text, strict_mode=True), packed_bytes + 1)
    except (ValueError, zlib.error) as error:
        raise CorruptMessageError(f"the row offsets of a compacted batch do not decode: {error}") from None
    if len(packed) != packed_bytes or not inflater.eof:
        raise CorruptMessageError(f"the row offsets of a compacted batch are not {packed_bytes} bytes")
    deltas = np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8)))
    if len(deltas) != rows or deltas[-1] >= span:
        raise CorruptMessageError(f"a compacted batch of {rows} rows has offsets for {len(deltas)}")
    return deltas.astype(np.int64, copy=False)
