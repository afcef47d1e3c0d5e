"""Bugs that random schedules show too seldom to hunt for: a story finds each of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim import sensitivity
from tests.sim.bugs import BUGS, hunted

STORIES = {
    "keep_a_mark_of_a_log_that_was_made_shorter": (
        "tests/broker/test_high_watermarks.py::test_a_log_that_was_made_shorter_half_way_is_not_opened_with_its_old_mark"
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


@pytest.mark.parametrize("name", sorted(STORIES))
def test_its_story_fails_with_the_bug(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.sim.put_in", STORIES[name]]
    ended = subprocess.run(
        command, env={**os.environ, "PUT_IN": name}, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    assert "1 failed" in ended.stdout
