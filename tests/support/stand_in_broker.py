"""A broker's stand-in for tests of the launcher: it says who it is in a file and ends when it is asked to."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from spark_broker.broker.custody import LeaveRequest
from spark_broker.broker.spec import BrokerSpec
from spark_broker.errors import InconsistentClusterIdError

LIFETIME_S = 120
"""Longer than any test; shorter than a forgotten process should live."""


def run(spec: BrokerSpec, leave: LeaveRequest) -> str:
    """Announce the launch in `log_dirs`; return once a file `stop` or `stop-<launch>` appears there, or when asked to.

    With a file `stubborn` there, it does not return when it is asked to.
    """
    directory = Path(spec.log_dirs)
    said = {
        "launch": spec.launch,
        "pid": os.getpid(),
        "executor_id": spec.executor_id,
        "executor_pid": spec.executor_pid,
        "replaces": spec.replaces,
    }
    partial = directory / f".{spec.launch}"
    partial.write_text(json.dumps(said), encoding="utf-8")
    partial.rename(directory / f"launch-{spec.launch}")
    pause = threading.Event()
    asked = directory / f"asked-{spec.launch}"

    def note(why: str) -> None:
        asked.write_text(why)

    leave.subscribe(note)
    for _ in range(LIFETIME_S * 20):
        if asked.exists() and not (directory / "stubborn").exists():
            return "stopped"
        if (directory / "stop").exists() or (directory / f"stop-{spec.launch}").exists():
            return "stopped"
        pause.wait(0.05)
    return "forgotten"


def fail_typed(spec: BrokerSpec, leave: LeaveRequest) -> str:
    """A broker that was pointed at another cluster's directory."""
    del leave
    raise InconsistentClusterIdError(f"{spec.log_dirs} is another cluster's")


def fail_on_disk(spec: BrokerSpec, leave: LeaveRequest) -> str:
    """A broker whose disk fails."""
    del leave
    raise OSError(28, "No space left on device", spec.log_dirs)


def fail_by_a_bug(spec: BrokerSpec, leave: LeaveRequest) -> str:
    """A broker with a bug."""
    del leave
    raise KeyError(spec.launch)
