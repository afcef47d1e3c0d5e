"""What the demo makes of the cluster's state, and how it treats the processes that it starts."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from jobs import demo_processes
from jobs.demo_processes import DemoError, SparkProcess
from jobs.demo_snapshot import Snapshot, table
from spark_broker.model import BrokerInfo, PartitionInfo, TopicDescription
from tests.support.waiting import eventually


def snapshot(title: str, leaders: list[int], *, live: tuple[int, ...], isr: tuple[int, ...]) -> Snapshot:
    partitions = tuple(
        PartitionInfo("flights", number, leader, 0, replicas=(0, 1, 2), isr=isr)
        for number, leader in enumerate(leaders)
    )
    brokers = tuple(
        BrokerInfo(broker, "h", 1, rack=None, epoch=1, pid=1, executor_id=f"e{broker}", executor_pid=1)
        for broker in live
    )
    return Snapshot(title, brokers, TopicDescription("flights", "id", partitions, pa.schema([]), 0, {}))


def test_the_victim_is_the_broker_that_leads_the_most() -> None:
    before = snapshot("before", [2, 2, 1, 0, 2], live=(0, 1, 2), isr=(0, 1, 2))
    assert before.busiest().id == 2
    assert snapshot("before", [1, 0], live=(0, 1, 2), isr=(0, 1, 2)).busiest().id == 0


def test_an_isr_is_whole_when_every_replica_is_in_it() -> None:
    assert snapshot("after", [0], live=(0, 1, 2), isr=(2, 1, 0)).isr_is_whole()
    assert not snapshot("during", [0], live=(0, 1, 2), isr=(0, 1)).isr_is_whole()


def test_the_table_shows_each_moment_side_by_side() -> None:
    before = snapshot("before", [0, 1], live=(0, 1, 2), isr=(0, 1, 2))
    during = snapshot("during", [2, 1], live=(1, 2), isr=(1, 2))
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        console.print(table([before, during], victim=0))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert "broker 0 executor e0, leads 1 gone" in lines
    assert "partition 0 leader 0 ISR 0,1,2 leader 2 ISR 1,2" in lines


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for spark-submit that runs the job with Python; `jobs/` is a directory of the test."""
    script = tmp_path / "spark-submit"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(demo_processes, "spark_submit", lambda: str(script))
    monkeypatch.setattr(demo_processes, "JOBS", tmp_path)
    return tmp_path


def test_a_job_that_ends_too_early_is_reported_with_its_log(submit: Path) -> None:
    (submit / "job.py").write_text("print('why'); raise SystemExit(3)")
    with SparkProcess("job.py", [], submit / "log") as process:
        with pytest.raises(DemoError, match=rf"job\.py ended with status 3 before it was ready; its log: {submit}"):
            process.wait_until(lambda: False, "it was ready", 30)
        assert process.last_line() == "why"


def runs(stat: Path) -> bool:
    """Whether the process of this file in /proc exists and is no zombie."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_job_that_goes_on_is_ended_with_its_children(submit: Path) -> None:
    (submit / "job.py").write_text(
        "import os, pathlib, signal, sys\n"
        "child = os.fork()\n"
        "if child: pathlib.Path(sys.argv[1]).write_text(str(child))\n"
        "signal.pause()\n"
    )
    with SparkProcess("job.py", [str(submit / "pid")], submit / "log") as process:
        process.wait_until(lambda: (submit / "pid").exists() and bool((submit / "pid").read_text()), "it ran", 30)
    assert process.status() == -signal.SIGTERM
    child = Path("/proc", (submit / "pid").read_text(), "stat")
    eventually(lambda: not runs(child), 30, "the end of the job's child")


def test_a_job_that_takes_too_long_is_an_error(submit: Path) -> None:
    (submit / "job.py").write_text("import signal; signal.pause()")
    with SparkProcess("job.py", [], submit / "log") as process:
        with pytest.raises(DemoError, match="within 0 s"):
            process.wait_until(lambda: False, "it was ready", 0.0)
        with pytest.raises(DemoError, match="still runs"):
            process.wait(0.0)


def test_only_the_process_that_was_meant_is_killed(submit: Path) -> None:
    (submit / "job.py").write_text("import os, signal; print(os.getpid(), flush=True); signal.pause()")
    with SparkProcess("job.py", [], submit / "log") as victim, SparkProcess("job.py", [], submit / "other") as other:
        victim.wait_until(lambda: bool(victim.last_line()), "it ran", 30)
        demo_processes.kill(int(victim.last_line()))
        assert victim.wait(30) == -signal.SIGKILL
        assert other.status() is None
    with pytest.raises(ProcessLookupError):
        demo_processes.kill(int(victim.last_line()))
