"""Bugs that random schedules show too seldom to hunt for: a story finds each of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim import sensitivity
from tests.sim.bugs import BUGS, hunted

STORIES = {
    "give_ids_twice_that_no_broker_has_saved": (
        "tests/unit/controller/test_lineage.py::test_accepted_metadata_spares_ids_though_no_broker_has_saved_any"
    ),
    "go_beyond_one_acceptance_only": (
        "tests/unit/controller/test_lineage.py::test_a_copy_that_is_accepted_often_gives_no_leader_epoch_twice"
    ),
    "keep_a_mark_of_a_log_that_was_made_shorter": (
        "tests/broker/test_high_watermarks.py::test_a_log_that_was_made_shorter_half_way_is_not_opened_with_its_old_mark"
    ),
    "pass_on_what_is_asked_of_a_controller_that_lets_nobody_in": (
        "tests/broker/test_passed_on.py::test_a_broker_that_was_not_let_in_passes_nothing_on[DeleteTopicRequest]"
    ),
    "remember_acceptance_at_the_next_checkpoint": (
        "tests/broker/test_seen_metadata.py::test_nothing_is_told_before_an_acceptance_is_remembered"
    ),
    "stop_at_a_partition_that_the_metadata_lacks": (
        "tests/client/test_joining.py::test_a_new_partition_that_the_metadata_lacks_is_read_once_the_metadata_has_it"
    ),
    "take_commits_for_an_earlier_leadership": (
        "tests/broker/test_group_coordinator.py::test_a_commit_for_another_leadership_is_sent_again"
    ),
    "take_compacted_records_for_cut": (
        "tests/unit/test_tiering_attempt.py::test_the_table_is_cut_only_once_the_controller_has_decided_it"
    ),
}
"""They run, and pass, in the suite."""


def test_each_rare_bug_has_a_story() -> None:
    assert sensitivity.FILES, "importing it registers the bugs"
    assert sorted(STORIES) == sorted(set(BUGS) - set(hunted()))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(STORIES))
def test_its_story_fails_with_the_bug(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.sim.put_in", STORIES[name]]
    ended = subprocess.run(
        command, env={**os.environ, "PUT_IN": name}, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    assert "1 failed" in ended.stdout
