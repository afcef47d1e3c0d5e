"""Full collections that look only at what is new, and one of everything after hours."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from spark_broker.short_pauses import WHOLE_INTERVAL_S, ShortPauses


class Node:
    """An object in a cycle: only a collection frees it."""

    freed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Node.freed += 1


@pytest.fixture
def clock_s() -> Iterator[list[float]]:
    """The collector's time, in one place. Afterwards the collector is as it was."""
    now, callbacks = [0.0], list(gc.callbacks)
    Node.freed = 0
    yield now
    gc.callbacks[:] = callbacks
    gc.unfreeze()


def test_a_full_collection_leaves_out_what_has_survived_one(clock_s: list[float]) -> None:
    ShortPauses(lambda: clock_s[0]).install()
    kept = [[number] for number in range(50_000)]
    gc.collect()
    assert gc.get_freeze_count() > len(kept)
    gc.collect()
    assert len(gc.get_objects(generation=2)) == 0


def test_what_is_new_and_garbage_is_freed(clock_s: list[float]) -> None:
    ShortPauses(lambda: clock_s[0]).install()
    Node()
    gc.collect()
    assert Node.freed == 1


@pytest.mark.slow
def test_what_became_garbage_later_is_freed_after_hours_where_much_is_kept(clock_s: list[float]) -> None:
    ShortPauses(lambda: clock_s[0]).install()
    node: Node | None = Node()
    gc.collect()
    node = None
    kept = [[number] for number in range(2 * gc.get_freeze_count())]
    gc.collect()
    assert node is None
    assert Node.freed == 0
    clock_s[0] += WHOLE_INTERVAL_S
    for _ in range(2):  # The first one decides that the next looks at everything.
        gc.collect()
    assert Node.freed == 1
    assert kept
    assert gc.get_freeze_count() > len(kept)


def test_where_no_more_is_kept_nothing_is_looked_at_again(clock_s: list[float]) -> None:
    ShortPauses(lambda: clock_s[0]).install()
    clock_s[0] += 10 * WHOLE_INTERVAL_S
    gc.collect()
    assert gc.get_freeze_count()
    assert len(gc.get_objects(generation=2)) == 0
