"""The pure rules of compaction: what is known of passes, when one is due, what becomes of a batch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_broker.core.batch import BatchInfo
from spark_broker.core.compaction import (
    NEVER_CLEANED,
    PASSES_MAX,
    Cleaned,
    CleanPass,
    CompactionPolicy,
    CompactionRules,
    Dirt,
    Fate,
    PlacesKept,
    is_due,
)
from spark_broker.core.transaction_index import TransactionIndex

MINUTE_MS = 60_000
DAY_MS = 86_400_000


def test_deletions_may_go_once_what_they_delete_has_been_gone_for_long_enough() -> None:
    cleaned = NEVER_CLEANED.after(100, 0, 1000).after(200, 0, 5000)
    assert cleaned.clean_to == 200
    assert [cleaned.purgeable_to(now_ms, 1000) for now_ms in (1999, 2000, 5999, 6000)] == [0, 100, 100, 200]


def test_what_was_swept_may_be_swept_whatever_the_clock_says() -> None:
    cleaned = NEVER_CLEANED.after(100, 0, 1000).after(200, 100, 5000)
    assert cleaned.purgeable_to(0, DAY_MS) == 100
    assert cleaned.passes == (CleanPass(200, 5000),)


def test_a_pass_that_got_no_further_keeps_the_time_of_the_first_that_got_there() -> None:
    """Else a log in which nothing happens would never be rid of its tombstones."""
    cleaned = NEVER_CLEANED.after(100, 0, 1000).after(100, 0, 9000)
    assert cleaned.passes == (CleanPass(100, 1000),)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 2000)), min_size=1, max_size=120))
def test_many_passes_are_told_apart_only_as_far_as_there_is_room_and_never_too_early(
    steps: list[tuple[int, int]],
) -> None:
    cleaned, offset, now_ms, reached = NEVER_CLEANED, 0, 0, {0: 0}
    for grown, waited_ms in steps:
        offset, now_ms = offset + grown, now_ms + waited_ms
        cleaned = cleaned.after(offset, 0, now_ms)
        reached.setdefault(offset, now_ms)
        assert len(cleaned.passes) <= PASSES_MAX
        assert cleaned.clean_to == offset
        offsets = [one.offset for one in cleaned.passes]
        assert offsets == sorted(set(offsets))
        # Whatever the passes that count as one, no deletion may go before its time.
        for retention_ms in (0, 500, 5000):
            purgeable = cleaned.purgeable_to(now_ms, retention_ms)
            assert now_ms - reached[purgeable] >= retention_ms or purgeable == 0


@pytest.mark.parametrize("jitter_ms", [0, 500])
def test_deletions_go_not_much_later_than_their_time(jitter_ms: int) -> None:
    """Story: of a log that is compacted each minute, the newest or the oldest pass went with each further one. None
    grew old: tombstones stayed for twice as long, and with equal intervals for good.
    """
    rng, cleaned, now_ms, reached = random.Random(1), NEVER_CLEANED, 0, [0]
    for offset in range(1, 3 * 1440):
        now_ms += MINUTE_MS + rng.randint(0, jitter_ms)
        reached.append(now_ms)
        purgeable = cleaned.purgeable_to(now_ms, DAY_MS)
        assert now_ms - reached[min(purgeable + 1, offset)] <= 1.2 * DAY_MS
        cleaned = cleaned.after(offset, purgeable, now_ms)


def test_what_purging_and_relying_say_only_grows() -> None:
    cleaned = NEVER_CLEANED.purging(50).purging(20).relying_on(90).relying_on(70)
    assert (cleaned.purge_offset, cleaned.committed_to) == (50, 90)


@pytest.mark.parametrize(
    ("dirt", "due"),
    [
        (Dirt(100, 0), False),
        (Dirt(0, 1, 900), True),
        (Dirt(100, 99, 900), False),
        (Dirt(100, 100, 900), True),
        (Dirt(10_000, 1, 500), True),
        (Dirt(10_000, 1, 501), False),
    ],
)
def test_a_pass_is_due_when_enough_is_new_or_it_is_old(dirt: Dirt, due: bool) -> None:
    policy = CompactionPolicy(dirty_ratio_min=0.5, lag_max_ms=500)
    assert is_due(dirt, Cleaned(passes=(CleanPass(10, 0),)), policy, 0, 1000) is due


def test_a_log_in_which_nothing_new_is_gets_one_more_pass_for_its_deletions() -> None:
    clean = Cleaned(passes=(CleanPass(50, 0), CleanPass(100, 10)))
    policy, nothing = CompactionPolicy(), Dirt(1000, 0)
    assert not is_due(nothing, clean, policy, 50, 1000), "the rest may go soon, too"
    assert is_due(nothing, clean, policy, 100, 1000)
    assert not is_due(nothing, replace(clean, swept_to=100), policy, 100, 1000), "they are gone"


RULES = CompactionRules(
    purge_to=50,
    transactions=TransactionIndex(),
    kept=PlacesKept(batches=frozenset({(7, 20)}), epochs=frozenset({(8, 3)}), unended=frozenset({9})),
)


def batch(at: int, producer: int, **fields: bool | int) -> BatchInfo:
    return BatchInfo(at, at + 5, 0, 0, producer_id=producer, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("info", "left", "fate"),
    [
        (batch(20, 7), 2, Fate.RECORDS),
        (batch(20, 7), 0, Fate.PLACE),
        (batch(25, 7), 0, Fate.GAP),
        (batch(20, -1), 0, Fate.GAP),
        (batch(10, 7, control=True, producer_epoch=1), 0, Fate.GAP),
        (batch(50, 7, control=True, producer_epoch=1), 0, Fate.PLACE),
        (batch(10, 8, control=True, producer_epoch=3), 0, Fate.PLACE),
        (batch(10, 8, control=True, producer_epoch=2), 0, Fate.GAP),
        (batch(10, 9, control=True, producer_epoch=1), 0, Fate.PLACE),
    ],
)
def test_a_batch_without_records_stays_while_its_producer_or_a_reader_needs_it(
    info: BatchInfo, left: int, fate: Fate
) -> None:
    assert RULES.fate(info, left) is fate
