"""Each known bug, put in on purpose, is found by the random schedules: otherwise they would prove nothing."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS
from tests.sim.sensitivity import find
from tests.support.sensitivity import TRIES_MAX, Hunts

QUICK_TRIES_MAX = 500
"""More than any quick bug takes (docs/reliability.md says how many): seeds change their stories when the code does."""

NEAR = {
    "abort_what_was_decided_at_a_fail_over": 250,
    "answer_without_knowing_who_leads": 2070,
    "append_before_the_table_is_cut": 2000,
    "begin_anew_before_the_controller_has_heard": 350,
    "claim_the_epoch_of_the_last_row": 780,
    "commit_past_a_truncation_before_its_notification": 400,
    "cut_before_it_is_decided": 5740,
    "follow_from_below_what_was_purged": 230,
    "forget_what_a_pass_took_for_committed": 11330,
    "keep_batches_in_their_transactions": 1470,
    "keep_no_places_of_producers": 1180,
    "keep_places_of_uncommitted_batches": 90_000_640,
    "lead_with_other_records_than_the_table": 900,
    "let_older_incarnations_join": 930,
    "send_markers_before_the_decision_is_committed": 620,
    "swap_winners_and_losers_at_a_fail_over": 260,
    "take_a_leaders_file_as_it_is": 900,
    "take_a_stale_answer_for_a_refusal": 370,
    "take_back_what_was_committed_during_a_snapshot": 1140,
    "take_compacted_records_for_cut": 32020,
}
"""Where the hunt begins for a bug that few schedules meet. The table of docs/reliability.md counts from seed 0."""


def find_near(name: str, tries: int) -> dict[str, object]:
    """`find`, from the seed of `NEAR`."""
    return find(name, tries, NEAR.get(name, 0))


FIND = find_near

QUICK = [(name, QUICK_TRIES_MAX) for name, bug in sorted(BUGS.items()) if bug.quick]
SLOW = [
    pytest.param(name, TRIES_MAX, marks=[pytest.mark.full, pytest.mark.timeout(3600)])
    for name, bug in sorted(BUGS.items())
    if not bug.quick
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "tries"), [*QUICK, *SLOW])
def test_schedules_find_the_bug(name: str, tries: int, hunts: Hunts) -> None:
    row = hunts[name].result()
    assert row["after"], f"{tries} schedules did not find {name}"
