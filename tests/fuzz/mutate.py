"""Damage to bytes: what a broken network card, a wrong client or a hostile one may send instead of a message."""

from __future__ import annotations

import random
from collections.abc import Callable

INTERESTING = (0, 1, 2, 3, 7, 8, 16, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63)
"""Numbers at which sizes, counts and signs go wrong; each is written in 1, 2, 4 or 8 bytes of either order."""

MAX_BYTES = 1 << 20
"""No damaged input is longer: duplication must not grow it without end."""


def mutate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """`data` with one to four damages; `other` is a second valid input, for splices."""
    target = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        rng.choice(_DAMAGES)(rng, target, other)
    return bytes(target[:MAX_BYTES])


def overwrite_number(rng: random.Random, target: bytearray, start: int, end: int) -> None:
    """Overwrite an aligned number in `target[start:end]` by an interesting or nearby one."""
    width = rng.choice((1, 2, 4, 8))
    at = start + rng.randrange(max((end - start) // width, 1)) * width
    old = int.from_bytes(target[at : at + width], "little")
    new = rng.choice((rng.choice(INTERESTING), -rng.choice(INTERESTING), old + rng.choice((-8, -4, -1, 1, 4, 8)), ~old))
    target[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")[: max(len(target) - at, 0)]


def _flip(rng: random.Random, target: bytearray, other: bytes) -> None:
    del other
    if target:
        target[rng.randrange(len(target))] ^= 1 << rng.randrange(8)


def _set_byte(rng: random.Random, target: bytearray, other: bytes) -> None:
    del other
    if target:
        target[rng.randrange(len(target))] = rng.randrange(256)


def _number(rng: random.Random, target: bytearray, other: bytes) -> None:
    del other
    width = rng.choice((1, 2, 4, 8))
    if len(target) >= width:
        at = rng.randrange(len(target) - width + 1)
        value = rng.choice(INTERESTING) % (1 << 8 * width)
        target[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))


def _cut(rng: random.Random, target: bytearray, other: bytes) -> None:
    del other
    del target[rng.randrange(len(target) + 1) :]


def _remove(rng: random.Random, target: bytearray, other: bytes) -> None:
    del other
    start, end = _span(rng, target)
    del target[start:end]


def _repeat(rng: random.Random, target: bytearray, other: bytes) -> None:
    del other
    start, end = _span(rng, target)
    times = rng.choice((1, 2, 100))
    target[end:end] = (bytes(target[start:end]) * times)[:MAX_BYTES]


def _insert(rng: random.Random, target: bytearray, other: bytes) -> None:
    del other
    at = rng.randrange(len(target) + 1)
    target[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 64)))


def _splice(rng: random.Random, target: bytearray, other: bytes) -> None:
    start, end = _span(rng, target)
    first, last = _span(rng, other)
    target[start:end] = other[first:last]


def _join(rng: random.Random, target: bytearray, other: bytes) -> None:
    target[rng.randrange(len(target) + 1) :] = other[rng.randrange(len(other) + 1) :]


def _span(rng: random.Random, data: bytes | bytearray) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, rng.randint(start, min(len(data), start + 64))


_DAMAGES: tuple[Callable[[random.Random, bytearray, bytes], None], ...] = (
    _flip,
    _flip,
    _set_byte,
    _number,
    _number,
    _cut,
    _remove,
    _repeat,
    _insert,
    _splice,
    _join,
)
