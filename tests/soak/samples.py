"""What processes hold over time, and whether it grows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import psutil

from tests.soak.census import Census

WARM_UP = 1 / 6
"""Share of the time that does not count: caches fill, and allocators find their size."""


class Sample(msgspec.Struct, frozen=True):
    """A sample of one process. `at_s`: since the beginning. `memory_mb`: its own, without the files it has mapped.

    `census`: how much of that it says that it uses.
    """

    at_s: float
    memory_mb: float
    threads: int
    files: int
    census: Census | None = None

    @staticmethod
    def of(process: psutil.Process, at_s: float) -> Sample:
        """A sample taken now. Raises psutil.Error when the process is gone."""
        with process.oneshot():
            memory = process.memory_info()
            memory_mb = round((memory.rss - memory.shared) / 1e6, 2)
            return Sample(at_s, memory_mb, process.num_threads(), process.num_fds(), Census.of(process.pid))


class Line(msgspec.Struct, frozen=True):
    """A line through figures over time. `percent_h`: its slope, in percent of the mean."""

    mean: float
    percent_h: float


class Growth(msgspec.Struct, frozen=True):
    """How one process grew after the warm-up. `memory`: MB; `used`, `objects`: what the census says, if there is one.

    `threads`, `files`: by how much the highest of the last third is above the highest of the third before it.
    """

    name: str
    memory: Line
    used: Line | None
    objects: Line | None
    threads: int
    files: int


def growth(name: str, samples: Sequence[Sample]) -> Growth:
    """The growth that these samples show; they are in the order of time."""
    counted = samples[int(len(samples) * WARM_UP) :]
    third = max(len(counted) // 3, 1)
    before, last = counted[-2 * third : -third] or counted, counted[-third:]
    censuses = [(sample.at_s, sample.census) for sample in counted if sample.census is not None]
    return Growth(
        name=name,
        memory=_line([(sample.at_s, sample.memory_mb) for sample in counted]),
        used=_line([(at_s, census.used_mb) for at_s, census in censuses]) if censuses else None,
        objects=_line([(at_s, census.objects) for at_s, census in censuses]) if censuses else None,
        threads=max(sample.threads for sample in last) - max(sample.threads for sample in before),
        files=max(sample.files for sample in last) - max(sample.files for sample in before),
    )


def _line(figures: Sequence[tuple[float, float]]) -> Line:
    """The least-squares line through figures at these seconds; flat for a single one."""
    mean_s = sum(at_s for at_s, _ in figures) / len(figures)
    mean = sum(figure for _, figure in figures) / len(figures)
    spread = sum((at_s - mean_s) ** 2 for at_s, _ in figures)
    slope = sum((at_s - mean_s) * (figure - mean) for at_s, figure in figures) / spread if spread else 0.0
    return Line(round(mean, 1), round(slope * 3600 / mean * 100, 2))
