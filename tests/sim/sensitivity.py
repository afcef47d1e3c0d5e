"""How soon the simulator finds each known bug: `python -m tests.sim.sensitivity [--write FILE] [bug ...]`."""

from __future__ import annotations

import gc
import sys

import pytest

from spark_broker.testing.simulation.schedule import run_schedule
from tests.sim import (
    compaction_bugs,
    damage_bugs,
    group_bugs,
    producer_bugs,
    tiering_bugs,
    transaction_bugs,
    unclean_bugs,
)
from tests.sim.bugs import BUGS
from tests.support.sensitivity import TRIES_MAX, main

FILES = (
    compaction_bugs,
    damage_bugs,
    group_bugs,
    producer_bugs,
    tiering_bugs,
    transaction_bugs,
    unclean_bugs,
)
"""Importing these modules registers their bugs."""

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
"""A seed shortly before one that finds the bug, for bugs that few schedules meet."""


def find(name: str, schedules: int = TRIES_MAX, first_seed: int = 0) -> dict[str, object]:
    """Run seeds with this bug until one breaks a rule. `after` is 0 when none did."""
    bug = BUGS[name]
    row: dict[str, object] = {"number": bug.number, "bug": name, "what": bug.what, "after": 0}
    with pytest.MonkeyPatch.context() as patch:
        bug.put_in(patch)
        for seed in range(first_seed, first_seed + schedules):
            if not bug.shows(seed):
                continue
            violation = run_schedule(seed)[0].violation
            if violation is not None:
                after = seed - first_seed + 1
                return {
                    **row,
                    "after": after,
                    "seed": seed,
                    "rule": violation.rule,
                    "message": violation.message[:300],
                }
            if seed % 50 == 0:
                gc.collect()
    return row


def find_near(name: str, tries: int) -> dict[str, object]:
    """`find`, from the seed of `NEAR`, or from 0. The row's `first_seed` says which."""
    first_seed = NEAR.get(name, 0)
    return {**find(name, tries, first_seed), "first_seed": first_seed}


def measure(name: str, tries: int) -> dict[str, object]:
    """`find` from seed 0; for a bug that is not found so, `find_near`."""
    row = find(name, tries)
    return row if row["after"] or name not in NEAR else find_near(name, tries)


if __name__ == "__main__":
    sys.exit(main(measure, sorted(BUGS), __doc__ or ""))
