"""`spark-submit jobs/cluster.py`, from its start to a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jobs.cluster import arguments
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
SPARK_SUBMIT = Path(sys.executable).with_name("spark-submit")


def test_the_job_says_when_it_is_ready_and_ends_in_order_on_a_signal(tmp_path: Path) -> None:
    ready = run_job(tmp_path, signal.SIGTERM, "local[2]")

    assert len({broker["pid"] for broker in ready["brokers"]}) == 2


@pytest.mark.full
def test_ctrl_c_ends_brokers_on_executors_in_order(tmp_path: Path) -> None:
    ready = run_job(tmp_path, signal.SIGINT, "local-cluster[2,2,1024]")

    assert len({broker["executor_id"] for broker in ready["brokers"]}) == 2


def run_job(directory: Path, number: signal.Signals, master: str) -> dict[str, list[dict[str, str]]]:
    """Start the job with two brokers, wait until it is ready, and send it the signal. Returns its ready file."""
    ready_file = directory / "ready.json"
    arguments_ = ["--brokers", "2", "--master", master, "--ready-file", str(ready_file)]
    log = directory / "output"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [
                str(SPARK_SUBMIT),
                str(ROOT / "jobs" / "cluster.py"),
                *arguments_,
                "--set",
                f"log.dirs={directory / 'logs'}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
        ) as job,
    ):
        try:
            eventually(lambda: ready_file.exists() or job.poll() is not None, 150, "the ready file")
            assert ready_file.exists(), log.read_text()
            ready = json.loads(ready_file.read_text())
            os.kill(job.pid, number)
            status = job.wait(60)
        finally:
            job.kill()
    said = log.read_text()
    assert status == 0, said
    assert "stopped" in said.splitlines()
    assert f"bootstrap.servers = {ready['bootstrap_servers']}" in said
    assert not ready_file.exists()
    for broker in ready["brokers"]:
        assert not Path(f"/proc/{broker['pid']}").exists()
        assert (directory / "logs" / f"broker-{broker['id']}" / ".clean").exists()
    return ready  # type: ignore[no-any-return]


def starting(directory: Path, *arguments_: str, conf: str = "spark.ui.enabled=false") -> subprocess.Popen[str]:
    """The job without spark-submit, as `spark-broker cluster start` starts it."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "jobs" / "cluster.py"), "--set", f"log.dirs={directory}", *arguments_],
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": f"--conf {conf} pyspark-shell"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
    )


@pytest.mark.parametrize(
    ("given", "conf", "message"),
    [
        ([], "spark.driver.memory=abc", "before sending its port number. The reason is above."),
        pytest.param(["--master", "local[none]"], "a.b=c", "Could not parse Master URL", marks=pytest.mark.full),
    ],
)
def test_why_spark_does_not_start_is_told_in_a_line(tmp_path: Path, given: list[str], conf: str, message: str) -> None:
    """Story: it was a traceback of 60 lines. `cluster start --detach` shows the line that begins with `error: `."""
    with starting(tmp_path, *given, conf=conf) as job:
        said, _ = job.communicate(timeout=120)

    assert job.returncode == 1, said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in said


@pytest.mark.full
def test_ctrl_c_while_spark_starts_is_told_in_a_line(tmp_path: Path) -> None:
    with starting(tmp_path) as job:
        started = psutil.Process(job.pid)
        try:
            eventually(lambda: started.children() or job.poll() is not None, 60, "the start of Spark")
            children = started.children(recursive=True)
            job.send_signal(signal.SIGINT)
            said, _ = job.communicate(timeout=60)
        finally:
            job.kill()

    assert job.returncode == 130, said
    assert "interrupted" in said.splitlines()
    assert "Traceback" not in said
    assert psutil.wait_procs(children, 30)[1] == []


def test_a_setting_that_is_no_pair_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--set", "log.dirs"])

    assert "NAME=VALUE" in capsys.readouterr().err


def test_config_file_and_single_settings_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--config", "conf/cluster.toml", "--set", "num.partitions=3"])

    assert "not both" in capsys.readouterr().err
