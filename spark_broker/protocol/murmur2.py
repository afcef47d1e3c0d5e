"""Kafka's murmur2, for one key and for a whole column of keys at once."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF

_UNPACK_WORDS = [struct.Struct(f"<{words}I").unpack_from for words in range(33)]
"""Functions that read the whole words of a key, by the number of words; for keys of up to 131 bytes."""

LONG_KEY_BYTES = 1024
"""Keys longer than this are hashed one by one: a step over the whole column for each of their words costs more."""

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint32]


def murmur2(data: bytes) -> int:
    """The hash of one key, as Java's signed 32-bit int."""
    length = len(data)
    h = SEED ^ length
    words = length >> 2
    unpack = _UNPACK_WORDS[words] if words < len(_UNPACK_WORDS) else struct.Struct(f"<{words}I").unpack_from
    for k in unpack(data):
        k = k * _M & _MASK
        h = (h * _M ^ (k ^ k >> 24) * _M) & _MASK
    if length % 4:
        h ^= int.from_bytes(data[words << 2 :], "little")
        h = h * _M & _MASK
    h ^= h >> 13
    h = h * _M & _MASK
    h ^= h >> 15
    return h - 2**32 if h >= 2**31 else h


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key, as Kafka's default partitioner computes it."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2_rows(data: Bytes, starts: Positions, lengths: Positions) -> Hashes:
    """The hashes (uint32) of the rows `data[starts[i] : starts[i] + lengths[i]]`."""
    hashes = np.empty(len(starts), dtype=np.uint32)
    longest = int(lengths.max(initial=0))
    if longest > LONG_KEY_BYTES:
        for row in np.flatnonzero(lengths > LONG_KEY_BYTES).tolist():
            start = int(starts[row])
            hashes[row] = murmur2(data[start : start + int(lengths[row])].tobytes()) & _MASK
        short = np.flatnonzero(lengths <= LONG_KEY_BYTES)
        hashes[short] = _short_rows(data, starts[short], lengths[short])
        return hashes
    return _short_rows(data, starts, lengths)


def _short_rows(data: Bytes, starts: Positions, lengths: Positions) -> Hashes:
    if not len(starts):
        return np.empty(0, dtype=np.uint32)
    # A word may begin at any byte, and the last one may reach past the data.
    padded = np.zeros(len(data) + 4, dtype=np.uint8)
    padded[: len(data)] = data
    words: Any = np.ndarray((len(data) + 1,), dtype="<u4", buffer=padded, strides=(1,))
    m = np.uint32(_M)
    h = (np.uint32(SEED) ^ lengths.astype(np.uint32)).astype(np.uint32)
    full_words = lengths >> 2
    longest = int(full_words.max())
    same = bool((full_words == longest).all())
    for index in range(longest):
        rows = slice(None) if same else np.flatnonzero(full_words > index)
        k = words[starts[rows] + 4 * index] * m
        k ^= k >> np.uint32(24)
        h[rows] = h[rows] * m ^ k * m
    rest = lengths & 3
    rows = np.flatnonzero(rest)
    if len(rows):
        keep = (np.uint32(1) << (rest[rows] * 8).astype(np.uint32)) - np.uint32(1)
        h[rows] = (h[rows] ^ (words[starts[rows] + 4 * full_words[rows]] & keep)) * m
    h ^= h >> np.uint32(13)
    h *= m
    h ^= h >> np.uint32(15)
    return h


def group_partition(group_id: str, partitions: int) -> int:
    """The partition of `__consumer_offsets` that keeps a group's offsets; its leader is the group's coordinator."""
    return partition_of(group_id.encode(), partitions)
