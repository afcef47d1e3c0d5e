"""The metadata log's store: survives every crash, creates exclusively, and sometimes loses the answer to a call."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from spark_broker.testing.simulation.swarm import Swarm

SHARE = 0.1
"""Share of the schedules that have outages of the store."""


def with_store_outages(seed: int, swarm: Swarm) -> Swarm:
    """The draw of a seed, with outages if it has them. A generator of its own leaves the other seeds as they are."""
    rng = random.Random(f"{seed}/store outages draw")
    if rng.random() >= SHARE:
        return swarm
    usual = sum(swarm.faults.values()) or 1.0
    return replace(swarm, faults={**swarm.faults, "store fails": usual * rng.choice([0.1, 0.3])})


class SimStore:
    """`fault_rate`: how often an operation raises, before or after it was done.

    `waited_ms`: how long its present user has waited for it, within one step of the simulation.
    """

    def __init__(self, rng: random.Random, fault_rate: float, now_ms: Callable[[], float]) -> None:
        self.fault_rate = fault_rate
        self.fails_until_ms = 0.0
        self.waited_ms = 0.0
        self._now_ms = now_ms
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
        self._check_outage()
        return sorted(self._files)

    def delete(self, name: str) -> None:
        self._files.pop(name, None)

    def _perhaps_fail(self) -> None:
        self._check_outage()
        if self.fault_rate and self._rng.random() < self.fault_rate:
            raise OSError("the store's answer was lost")

    def copy(self) -> dict[str, bytes]:
        """The files as they are."""
        return dict(self._files)

    def replace(self, files: Mapping[str, bytes]) -> None:
        """Somebody puts these files in the place of all others."""
        self._files = dict(files)

    def fail_for(self, ms: float) -> str:
        """Begin an outage, perhaps longer than brokers' leases last: live brokers must go on."""
        self.fails_until_ms = max(self.fails_until_ms, self._now_ms() + ms)
        return f"the metadata store fails for {ms:.0f} ms"

    def heal(self) -> None:
        """No operation fails from now on."""
        self.fault_rate = self.fails_until_ms = 0.0

    def wait(self, seconds: float) -> None:
        """Wait before another try."""
        self.waited_ms += seconds * 1000

    def _check_outage(self) -> None:
        if self._now_ms() + self.waited_ms < self.fails_until_ms:
            raise OSError("the store fails")
