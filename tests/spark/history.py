"""What all tests of Delta history share in a run: brokers, and tierers that each have a Spark of their own."""

from __future__ import annotations

import functools
import itertools
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.process_cluster import ProcessCluster
from tests.support.tierer_process import TiererProcess

BROKERS = 2

SOON: dict[str, object] = {"log.cleaner.backoff.ms": 100, "log.retention.check.interval.ms": 100}
"""Brokers soon compact and drop what is in a table."""


class History:
    """A context manager. Each part starts when a test first asks for it, and ends with the block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ends = ExitStack()
        self._others = map("other-{}".format, itertools.count())
        self._other: TiererProcess | None = None

    @functools.cached_property
    def tierer(self) -> TiererProcess:
        """One that outlives all others: it recovers what they leave. Its Spark starts in the background."""
        return self._start("survivor")

    @functools.cached_property
    def brokers(self) -> ProcessCluster:
        """For tests that end none of them, and that need no settings of their own."""
        return self._ends.enter_context(ProcessCluster(self._directory / "brokers", BROKERS, SOON))

    @property
    def other(self) -> TiererProcess:
        """Another one, which a test may kill. The next test that asks gets a new one then."""
        if self._other is None or not self._other.is_alive:
            self._other = self._start(next(self._others))
        return self._other

    def _start(self, name: str) -> TiererProcess:
        return self._ends.enter_context(TiererProcess(self._directory, name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()
