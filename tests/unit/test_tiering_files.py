"""How many files a run makes of what it tiers."""

from __future__ import annotations

import pytest

from spark_broker.history.spark_steps import FILE_BYTES, PARALLEL_FILE_BYTES, file_count

MB = 1024 * 1024


@pytest.mark.parametrize(
    ("megabytes", "cores", "files"),
    [
        (0, 2, 1),
        (95, 2, 1),
        (150, 8, 1),
        (200, 2, 2),
        (500, 2, 2),
        (520, 2, 4),
        (800, 16, 8),
        (10_000, 4, 40),
        (10_000, 100, 100),
        (10_000, 3, 42),
    ],
)
def test_every_core_writes_as_many_files_unless_they_would_be_small(megabytes: int, cores: int, files: int) -> None:
    assert file_count(megabytes * MB, cores) == files


def test_no_file_is_larger_than_it_may_be() -> None:
    for megabytes in range(1, 5000, 37):
        for cores in (1, 2, 7, 64):
            each = megabytes * MB / file_count(megabytes * MB, cores)
            assert each <= FILE_BYTES
            assert each >= PARALLEL_FILE_BYTES or file_count(megabytes * MB, cores) == -(-megabytes * MB // FILE_BYTES)
