"""Crashes leave equal disks again and again: each is checked once for the same expectation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.disk import fingerprint
from spark_broker.testing.simulation.filesystem import SimFileSystem

Allowed = TypeVar("Allowed")


class Once(Generic[Allowed]):
    """A check that remembers what has passed it.

    Made anew for each test. Hunts for planted bugs do not use it: what passed without a bug says nothing of it.
    """

    def __init__(self, check: Callable[[SimFileSystem, StartKind, Sequence[Allowed]], None]) -> None:
        self._check = check
        self._passed: defaultdict[tuple[StartKind, bytes], list[tuple[Allowed, ...]]] = defaultdict(list)

    def __call__(self, fs: SimFileSystem, start: StartKind, allowed: Sequence[Allowed]) -> None:
        """Check the disk that a crash left."""
        passed = self._passed[start, fingerprint(fs._machine.root)]
        expected = tuple(allowed)
        if expected not in passed:
            self._check(fs, start, expected)
            passed.append(expected)
