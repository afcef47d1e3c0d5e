"""Whether what a process holds grows: a line through its memory, the highest counts of threads and files."""

from __future__ import annotations

import pytest

from tests.soak.samples import Sample, growth

MINUTE_S = 60.0


def taken(count: int, *, leak_mb: float = 0.0, warm_up_mb: float = 0.0, files: int = 10) -> list[Sample]:
    """One a minute. `warm_up_mb`: what the first sixth lacks; `files`: of the last third."""
    return [
        Sample(
            at_s=n * MINUTE_S,
            memory_mb=100.0 + leak_mb * n - (warm_up_mb if n < count // 6 else 0.0),
            threads=20 + n % 2,
            files=files if n >= count - count // 4 else 10,
        )
        for n in range(count)
    ]


def test_what_stays_has_no_slope_whatever_it_was_at_first() -> None:
    found = growth("broker 0", taken(60, warm_up_mb=50.0))
    assert (found.memory_mb, found.memory_percent_h, found.threads, found.files) == (100.0, 0.0, 0, 0)


def test_a_leak_is_told_in_percent_of_the_mean_an_hour() -> None:
    found = growth("broker 0", taken(60, leak_mb=0.5))
    assert found.memory_percent_h == pytest.approx(30 / found.memory_mb * 100, rel=0.01)


def test_files_that_are_open_at_the_end_only_are_told() -> None:
    assert growth("broker 0", taken(60, files=17)).files == 7
