"""What processes hold over time, and whether it grows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import psutil

WARM_UP = 1 / 6
"""Of the time, how much does not count: caches fill, and allocators find their size."""


class Sample(msgspec.Struct, frozen=True):
    """Of one process. `at_s`: since the beginning. `memory_mb`: its own, without the files that it has mapped."""

    at_s: float
    memory_mb: float
    threads: int
    files: int

    @staticmethod
    def of(process: psutil.Process, at_s: float) -> Sample:
        """Now. Raises psutil.Error when it is gone."""
        with process.oneshot():
            memory = process.memory_info()
            memory_mb = (memory.rss - memory.shared) / 1e6
            return Sample(at_s, round(memory_mb, 2), process.num_threads(), process.num_fds())


class Growth(msgspec.Struct, frozen=True):
    """Of one process, after the warm-up. `memory_percent_h`: the slope of a line through it, in percent of its mean.

    `threads`, `files`: by how much the highest of the last third is above the highest of the third before it.
    """

    name: str
    memory_mb: float
    memory_percent_h: float
    threads: int
    files: int


def growth(name: str, samples: Sequence[Sample]) -> Growth:
    """Of these, in the order of time."""
    counted = samples[int(len(samples) * WARM_UP) :]
    mean = sum(one.memory_mb for one in counted) / len(counted)
    third = max(len(counted) // 3, 1)
    before, last = counted[-2 * third : -third] or counted, counted[-third:]
    return Growth(
        name=name,
        memory_mb=round(mean, 1),
        memory_percent_h=round(_slope_per_s(counted) * 3600 / mean * 100, 2),
        threads=max(one.threads for one in last) - max(one.threads for one in before),
        files=max(one.files for one in last) - max(one.files for one in before),
    )


def _slope_per_s(samples: Sequence[Sample]) -> float:
    """Of the least-squares line through the memory, in MB a second; 0 for a single sample."""
    mean_s = sum(one.at_s for one in samples) / len(samples)
    mean_mb = sum(one.memory_mb for one in samples) / len(samples)
    spread = sum((one.at_s - mean_s) ** 2 for one in samples)
    return sum((one.at_s - mean_s) * (one.memory_mb - mean_mb) for one in samples) / spread if spread else 0.0
