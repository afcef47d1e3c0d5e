"""Which worker runs which tests, and how long each lane took: four workers keep two cores busy.

- `spark`: tests on the Spark session that they share. One worker runs them all, because a process has one session.
- `applications`: tests that start Spark applications of their own. Files that share one are run by one worker.
- `waiting`: tests that wait for clocks, threads and processes. They need little processor time, but at once. Two
  workers have this lane.
- `computing`: everything else. Its worker is nice: it gets the time that the others leave.

A worker whose lane is empty takes files of another lane. No second one runs what needs the shared session. Files that
took longest come first, as far as the recorded durations tell (tests/DURATIONS.md). So no worker is left alone with a
long one.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

SPARK, APPLICATIONS, WAITING, COMPUTING = "spark", "applications", "waiting", "computing"

LANES = (SPARK, APPLICATIONS, WAITING, COMPUTING)

HISTORY = "history"
"""The name of all files that share the brokers and tierers of `tests/spark/history.py`, and need no shared session."""

HISTORY_PATHS = ("tests/spark/tables/", "tests/spark/test_tiering", "tests/spark/test_unclean_history.py")

PATHS: Mapping[str, tuple[str, ...]] = {
    APPLICATIONS: (
        *HISTORY_PATHS,
        "tests/chaos/",
        "tests/spark/test_backup_page.py",
        "tests/spark/test_cluster_job.py",
        "tests/spark/test_connect.py",
        "tests/spark/test_local_session.py",
        "tests/spark/test_ordinary_ends.py",
        "tests/test_demo.py",
        "tests/test_notebook.py",
    ),
    SPARK: ("tests/spark/",),
    WAITING: ("tests/broker/", "tests/client/", "tests/driver/", "tests/transport/"),
}
"""Beginnings of the node ids of a lane's tests; the first that fits counts. Every other test computes."""

WORKERS = (SPARK, WAITING, COMPUTING, WAITING)
"""The lane of each worker, in the order in which they start."""

HELPS: Mapping[str, tuple[str, ...]] = {
    SPARK: (SPARK, APPLICATIONS, WAITING, COMPUTING),
    WAITING: (WAITING, APPLICATIONS, COMPUTING),
    COMPUTING: (COMPUTING, WAITING),
}
"""In which order a worker of a lane looks for work."""

NICENESS = 10
FEWEST_TESTS = 2
SHOWN_FILES = 8
"""How many of each lane's longest files the summary names."""

PAGE = Path(__file__).parents[1] / "DURATIONS.md"
ROW = re.compile(r"^\| (\w+) \| `([\w/.]+)` \| (\d+) \| ([\d.]+) \|(?: ([\d.]+) \|)?$", re.MULTILINE)


def lane_of(nodeid: str) -> str:
    """The lane of a test or of a file."""
    return next((lane for lane, beginnings in PATHS.items() if nodeid.startswith(beginnings)), COMPUTING)


def scope_of(nodeid: str) -> str:
    """What one worker runs: a file, for the sake of its clusters, or all files that share a session or a tierer."""
    if nodeid.startswith(HISTORY_PATHS):
        return HISTORY
    return SPARK if lane_of(nodeid) == SPARK else nodeid.split("::", 1)[0]


def choose(scopes: Iterable[str], lane: str, lanes: Collection[str], recorded: Mapping[str, float]) -> str | None:
    """What a worker of this lane runs next, or None. `lanes`: those of the workers that there are."""
    helped = {helped for other in lanes for helped in HELPS[other]}
    helps = (*HELPS[lane], *(other for other in LANES if other not in helped))
    by_lane = defaultdict(list)
    for scope in scopes:
        by_lane[{SPARK: SPARK, HISTORY: APPLICATIONS}.get(scope) or lane_of(scope)].append(scope)
    waiting = next((by_lane[lane] for lane in helps if by_lane[lane]), [])
    return max(waiting, key=lambda scope: recorded.get(scope, float("inf")), default=None)


def make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """A scheduler for xdist that keeps to the lanes."""
    from xdist.scheduler import LoadScopeScheduling

    recorded = {file: row.seconds for (_, file), row in read_page().items()}

    class ByLane(LoadScopeScheduling):  # type: ignore[misc]  # installed without types
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def remove_node(self, node: WorkerController) -> str | None:
            work = self.assigned_work[node]
            left = ((scope, test) for scope, tests in work.items() for test, done in tests.items() if not done)
            scope, crashed = next(left, (None, None))
            if crashed is not None:
                # xdist would run it again, and a test that always hangs would end every worker.
                work[scope][crashed] = True
            # The worker that replaces one that crashed would wait for ever in a file of which every test has run.
            self.assigned_work[node] = {scope: tests for scope, tests in work.items() if not all(tests.values())}
            super().remove_node(node)
            return crashed

        def _assign_work_unit(self, node: WorkerController) -> None:
            lanes = {other.workerinput["lane"] for other in self.nodes}
            scope = choose(self.workqueue, node.workerinput["lane"], lanes, recorded)
            if scope is None:
                node.shutdown()
            else:
                self.workqueue.move_to_end(scope, last=False)
                super()._assign_work_unit(node)
                # A worker begins its last test only when it has the next one, or is told that no more will come.
                if not self.workqueue:
                    node.shutdown()
                elif self._pending_of(self.assigned_work[node]) < FEWEST_TESTS:
                    self._reschedule(node)

    return ByLane(config, log)


class LaneOfEachWorker:
    """Gives every worker a lane, and the lane of a worker that has ended to the one that replaces it."""

    def __init__(self) -> None:
        self._taken: dict[str, str] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        """A worker is about to start."""
        free = list(WORKERS)
        for taken in self._taken.values():
            if taken in free:
                free.remove(taken)
        lane = free[0] if free else COMPUTING
        self._taken[node.gateway.id] = node.workerinput["lane"] = lane

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController) -> None:
        """A worker has ended."""
        self._taken.pop(node.gateway.id, None)


def begin_work(config: pytest.Config) -> None:
    """Called in each worker before its first test."""
    if getattr(config, "workerinput", {}).get("lane") == COMPUTING:
        os.nice(NICENESS)


class ProcessorTimes:
    """Notes at each report what its worker, and the processes that it has waited for, have used since the one before.

    A plugin of workers. A session's JVM and its executors count for the test after which they end.
    """

    def __init__(self) -> None:
        self._used_s = _used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A test's setup, call or teardown has ended."""
        report = yield
        before, self._used_s = self._used_s, _used_s()
        report.processor_s = self._used_s - before  # type: ignore[attr-defined]
        return report


def _used_s() -> float:
    """Processor time of this process, and of the children that it has waited for, in seconds."""
    of = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in of)


@dataclass(slots=True)
class Row:
    """Tests of a file, the seconds that they took together, and their processor time."""

    tests: int = 0
    seconds: float = 0.0
    processor_s: float = 0.0


@dataclass(eq=False)
class Durations:
    """What the lanes of a run took. A plugin: it hears of every report, and prints at the end."""

    alone: bool
    """Whether this is the run of the tests that nothing may run beside."""

    write: bool
    began: float = field(default_factory=time.time)
    rows: defaultdict[tuple[str, str], Row] = field(default_factory=lambda: defaultdict(Row))
    """By lane and file."""

    ended: dict[str, float] = field(default_factory=dict)
    """When the last test of a lane ended."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's setup, call or teardown has ended."""
        lane = "alone" if self.alone else lane_of(report.nodeid)
        row = self.rows[lane, report.nodeid.split("::", 1)[0]]
        row.tests += report.when == "call"
        row.seconds += report.duration
        row.processor_s += getattr(report, "processor_s", 0.0)
        self.ended[lane] = time.time()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Each lane in a line, and its longest files."""
        terminalreporter.section("lanes")
        for lane in (*LANES, "alone"):
            files = sorted(((row, file) for (of, file), row in self.rows.items() if of == lane), key=_longest_first)
            if files:
                tests, seconds = sum(row.tests for row, _ in files), sum(row.seconds for row, _ in files)
                processor_s, last = sum(row.processor_s for row, _ in files), self.ended[lane] - self.began
                terminalreporter.write_line(
                    f"{lane}: {tests} tests took {seconds:.0f} s, {processor_s:.0f} s of a core; the last ended at "
                    f"{last:.0f} s"
                )
                shown = (f"{file.removeprefix('tests/')} {row.seconds:.0f}" for row, file in files[:SHOWN_FILES])
                terminalreporter.write_line(f"  {', '.join(shown)}")
        terminalreporter.write_line(f"the whole run, with collection: {time.time() - self.began:.0f} s")
        if self.write:
            write_page(self.rows, self.alone)
            terminalreporter.write_line(f"written: {PAGE}")


def _longest_first(pair: tuple[Row, str]) -> float:
    return -pair[0].seconds


def read_page() -> dict[tuple[str, str], Row]:
    """What was recorded, by lane and file."""
    if not PAGE.exists():
        return {}
    matches = ROW.finditer(PAGE.read_text(encoding="utf-8"))
    return {(match[1], match[2]): Row(int(match[3]), float(match[4]), float(match[5] or 0)) for match in matches}


def write_page(rows: Mapping[tuple[str, str], Row], alone: bool) -> None:
    """Record a run. What the other step of `make test-all` has recorded stays, and `alone` runs last."""
    kept = {key: row for key, row in read_page().items() if alone and key[0] != "alone"}
    merged = {**kept, **rows}
    lines = [HEAD, *_table(merged.items())]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(rows: Iterable[tuple[tuple[str, str], Row]]) -> Iterable[str]:
    """In order of lanes, the longest files first."""
    order = (*LANES, "alone")
    for (lane, file), row in sorted(rows, key=lambda item: (order.index(item[0][0]), -item[1].seconds)):
        yield f"| {lane} | `{file}` | {row.tests} | {row.seconds:.1f} | {row.processor_s:.1f} |"


HEAD = """\
# What tests take

`make test-all TEST_ARGS=--write-durations` writes this page: seconds of each file, with its setup, beside the other
lanes on two cores, and how long it had a core (processes that the test does not wait for are not counted). Compare it
with the last one (`git diff`) to see what grew. Workers begin with the longest files.

| Lane | File | Tests | Seconds | Of a core |
|---|---|---:|---:|---:|"""
