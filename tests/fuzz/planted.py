"""Bugs on purpose, to prove that the fuzzer notices each kind: the seed says which one it is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from spark_broker.errors import CorruptMessageError, InvariantError
from tests.fuzz.targets import Target, judged

GREEDY_BYTES = 200 << 20
CLAIMED_BYTES = 8 << 30

_kept: list[bytes] = []


def _crash() -> None:
    os.abort()


def _hang() -> None:
    threading.Event().wait()


def _grow() -> None:
    _kept.append(b"x" * GREEDY_BYTES)
    _kept.clear()


def _claim() -> None:
    _kept.append(bytes(CLAIMED_BYTES))


def _untyped() -> None:
    raise KeyError("not one of ours")


def _invariant() -> None:
    raise InvariantError("our own bug")


def _typed() -> None:
    raise CorruptMessageError("as it should be")


BUGS: dict[int, Callable[[], None]] = {3: _untyped, 5: _crash, 7: _invariant, 11: _grow, 13: _claim}
"""Seed to what happens then."""

HANG_SEED = 2
REFUSED_SEED = 9


def _judge(data: bytes) -> None:
    seed = int.from_bytes(data, "little")
    if seed == REFUSED_SEED:
        _typed()
    if seed in BUGS:
        BUGS[seed]()


def _judge_hang(data: bytes) -> None:
    if int.from_bytes(data, "little") == HANG_SEED:
        _hang()


PLANTED = {
    "planted": Target(lambda rng: b"", judged(_judge)),
    "planted-hang": Target(lambda rng: b"", judged(_judge_hang)),
}
