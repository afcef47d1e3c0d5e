"""The check of consume, transform, produce finds copies that are missing, stored twice, or without a source."""

from __future__ import annotations

import pytest

from spark_broker.testing.copy_workload import check_copies

ORIGINALS = [b"a", b"b-of-x", b"c"]


@pytest.mark.parametrize("reached", range(4))
def test_copies_may_end_anywhere(reached: int) -> None:
    copies = [b"copier-%d-of-%s" % (at, value) for at, value in enumerate(ORIGINALS[:reached])]

    assert list(check_copies(ORIGINALS, copies)) == []


@pytest.mark.parametrize(
    "copies",
    [
        [b"k-0-of-a", b"k-1-of-a"],
        [b"k-0-of-a", b"k-1-of-c"],
        [b"k-0-of-b-of-x"],
        [b"k-0-of-a", b"k-0-of-b-of-x", b"k-0-of-c", b"k-0-of-c"],
        [b"k-0-of-unknown"],
    ],
)
def test_a_copy_that_is_missing_or_twice_is_found(copies: list[bytes]) -> None:
    assert len(list(check_copies(ORIGINALS, copies))) == 1
