"""Which worker runs which tests, and the page that says what they took."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import lanes
from tests.support.lanes import (
    APPLICATIONS,
    COMPUTING,
    HISTORY,
    SPARK,
    WAITING,
    Row,
    choose,
    lane_of,
    read_page,
    scope_of,
    write_page,
)

ALL = (SPARK, WAITING, COMPUTING)
SCOPES = (SPARK, "tests/broker/test_a.py", "tests/sim/test_b.py", "tests/sim/test_c.py")


def test_a_test_is_in_the_lane_of_its_folder() -> None:
    assert lane_of("tests/spark/test_streams.py::test_x") == SPARK
    assert lane_of("tests/spark/test_connect.py::test_x") == lane_of("tests/test_demo.py::test_x") == APPLICATIONS
    assert lane_of("tests/broker/test_cluster.py::test_x[a]") == WAITING
    assert lane_of("tests/sim/test_schedules.py") == lane_of("tests/test_tidy.py") == COMPUTING


def test_tests_that_share_a_session_or_a_tierer_are_one_scope_and_others_one_for_each_file() -> None:
    assert scope_of("tests/spark/test_a.py::test_x") == scope_of("tests/spark/test_b.py::test_y") == SPARK
    assert (
        scope_of("tests/spark/tables/test_table.py::test_x")
        == scope_of("tests/spark/test_tiering.py::test_y")
        == HISTORY
    )
    assert scope_of("tests/test_demo.py::test_y") == "tests/test_demo.py"
    assert scope_of("tests/sim/test_b.py::test_x[p::q]") == "tests/sim/test_b.py"


def test_each_worker_takes_the_longest_file_of_its_lane_first() -> None:
    recorded = {"tests/sim/test_b.py": 5.0, "tests/sim/test_c.py": 9.0}
    assert choose(SCOPES, SPARK, ALL, recorded) == SPARK
    assert choose(SCOPES, WAITING, ALL, recorded) == "tests/broker/test_a.py"
    assert choose(SCOPES, COMPUTING, ALL, recorded) == "tests/sim/test_c.py"


def test_a_file_of_which_nothing_is_recorded_may_be_long_and_comes_first() -> None:
    assert choose(SCOPES, COMPUTING, ALL, {"tests/sim/test_b.py": 5.0}) == "tests/sim/test_c.py"


def test_a_worker_without_work_helps_but_starts_no_second_session_of_spark() -> None:
    assert choose(SCOPES[2:], WAITING, ALL, {}) in SCOPES[2:]
    assert choose(SCOPES[:1], WAITING, ALL, {}) is None
    assert choose((), COMPUTING, ALL, {}) is None


def test_applications_of_their_own_are_started_by_either_of_two_workers() -> None:
    scopes = (HISTORY, "tests/test_demo.py")
    assert choose(scopes, SPARK, ALL, {"tests/test_demo.py": 1.0}) == HISTORY
    assert choose(scopes[1:], WAITING, ALL, {}) == "tests/test_demo.py"
    assert choose(scopes, COMPUTING, ALL, {}) is None


def test_where_no_worker_has_a_lane_another_one_takes_it() -> None:
    assert choose(SCOPES[:1], WAITING, (WAITING,), {}) == SPARK
    assert choose((HISTORY,), COMPUTING, (COMPUTING,), {}) == HISTORY


CONFTEST = """
from tests.support.lanes import LaneOfEachWorker, make_scheduler

def pytest_configure(config):
    config.pluginmanager.register(LaneOfEachWorker())

def pytest_xdist_make_scheduler(config, log):
    return make_scheduler(config, log)
"""

CRASHES = """
import os

def test_before():
    pass

def test_last():
    os._exit(1)
"""


@pytest.mark.slow
def test_the_worker_that_replaces_one_that_crashed_does_what_is_left_of_its_work(tmp_path: Path) -> None:
    """xdist gives it files of which every test has run, the test that crashed, and one last test that it does not
    begin."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_long.py").write_text("def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n")
    (tmp_path / "test_short.py").write_text(CRASHES)
    (tmp_path / "test_zero.py").write_text("def test_d(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", "--no-loadscope-reorder"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "1 failed, 5 passed" in ended.stdout, ended.stdout


def test_the_page_keeps_what_it_was_told_and_its_second_step_adds_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "PAGE", tmp_path / "page")
    assert read_page() == {}
    first = {(SPARK, "tests/spark/test_a.py"): Row(2, 30.5), (COMPUTING, "tests/sim/test_b.py"): Row(7, 4.0)}
    write_page({**first, (SPARK, "tests/spark/test_gone.py"): Row(1, 1.0)}, alone=False)
    write_page(first, alone=False)
    assert read_page() == first, "a file that is gone is not kept"
    alone = {("alone", "tests/broker/test_c.py"): Row(1, 60.0)}
    write_page(alone, alone=True)
    assert read_page() == {**first, **alone}


def test_each_worker_has_its_lane_and_the_one_that_replaces_another_has_the_lane_of_that() -> None:
    class Node:
        def __init__(self, name: str) -> None:
            self.gateway = type("Gateway", (), {"id": name})()
            self.workerinput: dict[str, str] = {}

    given = lanes.LaneOfEachWorker()
    nodes = [Node(f"gw{number}") for number in range(len(lanes.WORKERS) + 1)]
    for node in nodes:
        given.pytest_configure_node(node)
    assert [node.workerinput["lane"] for node in nodes] == [*lanes.WORKERS, COMPUTING]
    given.pytest_testnodedown(nodes[1])
    replacement = Node("gw9")
    given.pytest_configure_node(replacement)
    assert replacement.workerinput["lane"] == lanes.WORKERS[1]
