"""Starting the cluster application as a process of its own, in the foreground or detached."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from spark_broker.cli.cluster_state import ClusterState, end_process, lock, locked_by, open_lock, running_cluster
from spark_broker.cli.installed import job_file
from spark_broker.cli.output import fail, note
from spark_broker.errors import ClusterStartError, MissingDependencyError
from spark_broker.interrupts import uninterrupted

if TYPE_CHECKING:
    from rich.status import Status

POLL_S = 0.1
LOG_LINES_SHOWN = 15
ERROR = "error: "
"""How the application's log begins the line that says why it ended."""

STOP_TIMEOUT_S = 30.0

STOP_FIRST = "Stop it first (`spark-broker cluster stop`), or give this one a --state-file of its own."
WAIT_FOR_IT = "Wait until it is up or has failed, or end that process, or give this one a --state-file of its own."

_PROGRESS = re.compile(r"^(executors|brokers registering): \d+ of \d+$", re.MULTILINE)


@dataclass(frozen=True)
class Application:
    """What to start. Empty values leave the choice to the application. `ready_file` appears once brokers are live.

    `data_dir`: where the data is kept if the settings have no `log.dirs`; None: it is temporary then.
    """

    brokers: int
    ready_file: Path
    master: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    spark_settings: Mapping[str, str] = field(default_factory=dict)
    log_level: str = ""
    data_dir: Path | None = None
    take_over: bool = False
    accept_older_metadata: bool = False

    def command(self) -> list[str]:
        """The command line. Python and not spark-submit: signals then reach the driver and not the JVM around it."""
        command = [sys.executable, str(job_file("cluster")), "--brokers", str(self.brokers)]
        command += ["--ready-file", str(self.ready_file)]
        if self.master:
            command += ["--master", self.master]
        for name, value in self.settings.items():
            command += ["--set", f"{name}={value}"]
        if self.data_dir:
            command += ["--data-dir", str(self.data_dir)]
        if self.log_level:
            command += ["--log-level", self.log_level]
        if self.take_over:
            command += ["--take-over"]
        if self.accept_older_metadata:
            command += ["--accept-older-metadata"]
        return command

    def environment(self) -> dict[str, str]:
        """The environment. Spark's own settings are in PYSPARK_SUBMIT_ARGS, where PySpark reads them."""
        environment = dict(os.environ)
        if self.spark_settings:
            given = " ".join(f"--conf {shlex.quote(f'{name}={value}')}" for name, value in self.spark_settings.items())
            others = environment.get("PYSPARK_SUBMIT_ARGS", "").strip().removesuffix("pyspark-shell")
            environment["PYSPARK_SUBMIT_ARGS"] = f"{others} {given} pyspark-shell".strip()
        return environment


def log_file(ready_file: Path) -> Path:
    """The log of a detached application."""
    return ready_file.with_suffix(".log")


def check_spark() -> None:
    """Raise MissingDependencyError unless PySpark and Java are here."""
    if importlib.util.find_spec("pyspark") is None:
        raise MissingDependencyError("a cluster needs PySpark: pip install 'spark-broker[spark]'")
    from spark_broker.driver.session import check_java

    check_java()


def _claim_start(ready_file: Path) -> int:
    """Take the lock beside the note: one application at a time may write the note and its log, and remove them.

    Returns its descriptor. The application inherits it, and so has the lock as long as it lives, whatever becomes of
    the command that has started it. Raises ClusterStartError while another one has the lock, or a cluster runs.
    """
    ready_file.parent.mkdir(parents=True, exist_ok=True)
    claim = open_lock(ready_file)
    try:
        locked = lock(claim)
        existing = running_cluster(ready_file)
        if existing is not None:
            raise ClusterStartError(f"a cluster runs already (pid {existing.driver_pid})", hint=STOP_FIRST)
        if not locked:
            underway = f"another start of a cluster is under way (pid {locked_by(claim)})"
            raise ClusterStartError(underway, hint=WAIT_FOR_IT)
        _name_driver(claim, os.getpid())
    except BaseException:
        os.close(claim)
        raise
    return claim


def _name_driver(claim: int, pid: int) -> None:
    os.ftruncate(claim, 0)
    os.pwrite(claim, str(pid).encode(), 0)


def run_in_foreground(application: Application) -> NoReturn:
    """Become the application: the terminal's signals and the exit status are its own."""
    check_spark()
    os.set_inheritable(_claim_start(application.ready_file), True)
    command = application.command()
    sys.stdout.flush()
    os.execve(command[0], command, application.environment())


def start_detached(application: Application, timeout_s: float) -> ClusterState:
    """Start the application in a session of its own and wait until its brokers are live. Raises ClusterStartError."""
    from rich.console import Console

    check_spark()
    claim = _claim_start(application.ready_file)
    try:
        # The spinner comes first: nothing is between the start of the process and whoever ends it.
        with Console(stderr=True).status("starting Spark ...") as spinner:
            return _started(application, claim, timeout_s, spinner)
    finally:
        os.close(claim)


def _started(application: Application, claim: int, timeout_s: float, spinner: Status) -> ClusterState:
    """Start the process, and wait until it is ready. If it does not come so far, it is ended."""
    process: subprocess.Popen[bytes] | None = None
    try:
        application.ready_file.unlink(missing_ok=True)
        with log_file(application.ready_file).open("wb") as log, uninterrupted():
            process = subprocess.Popen(
                application.command(),
                env=application.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(claim,),
            )
        _name_driver(claim, process.pid)
        return _wait_until_ready(application, process, timeout_s, spinner)
    except BaseException:
        if process is not None and not end_process(process.pid, STOP_TIMEOUT_S):
            note(f"the application (pid {process.pid}) still ends; its log is {log_file(application.ready_file)}")
        raise


def _wait_until_ready(
    application: Application, process: subprocess.Popen[bytes], timeout_s: float, spinner: Status
) -> ClusterState:
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    log_path = log_file(application.ready_file)
    while (state := running_cluster(application.ready_file)) is None:
        log = log_path.read_text(encoding="utf-8", errors="replace")
        if process.poll() is not None:
            lines = log.splitlines()
            said = next((line.removeprefix(ERROR) for line in reversed(lines) if line.startswith(ERROR)), None)
            if said is not None:
                fail(f"{said} (log: {log_path})")
            for line in lines[-LOG_LINES_SHOWN:]:
                note(line)
            raise ClusterStartError(
                f"the cluster application ended with status {process.returncode}; its log is {log_path}"
            )
        if time.monotonic() > deadline:
            raise ClusterStartError(f"no brokers are live after {timeout_s:g} s; the log is {log_path}")
        reached = _PROGRESS.findall(log) and [*_PROGRESS.finditer(log)][-1].group(0)
        spinner.update(f"starting: {reached}" if reached else "starting Spark ...")
        pause.wait(POLL_S)
    return state
