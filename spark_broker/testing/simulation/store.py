"""The metadata log's store: survives every crash, creates exclusively, and sometimes does not say what it did."""

from __future__ import annotations

import random


class SimStore:
    """`fault_rate`: how often an operation raises, before or after it was done."""

    def __init__(self, rng: random.Random, fault_rate: float) -> None:
        self.fault_rate = fault_rate
        self._rng = rng
        self._files: dict[str, bytes] = {}

    def __str__(self) -> str:
        return "the simulated metadata store"

    def create(self, name: str, data: bytes) -> bool:
        self._perhaps_fail()
        if name in self._files:
            return False
        self._files[name] = data
        self._perhaps_fail()
        return True

    def read(self, name: str) -> bytes | None:
        self._perhaps_fail()
        return self._files.get(name)

    def names(self) -> list[str]:
        return sorted(self._files)

    def delete(self, name: str) -> None:
        self._files.pop(name, None)

    def _perhaps_fail(self) -> None:
        if self.fault_rate and self._rng.random() < self.fault_rate:
            raise OSError("the store's answer was lost")
