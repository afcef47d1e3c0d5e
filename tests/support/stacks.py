"""Where a worker was when it ended by itself: a crash of the interpreter, or a time-out, which ends its process.

A run with several workers says no more than "worker crashed": what faulthandler and pytest-timeout write is lost, or
stands far above the end of a long log.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

DUMP_BEFORE_S = 1.0
"""Stacks are written this long before a test's time-out ends its worker."""

HARNESS = ("/site-packages/_pytest/", "/site-packages/pluggy/", "/site-packages/xdist/", "/site-packages/execnet/")
"""Frames of these are in every stack, and tell nothing."""

SHOWN_LINES = 60
"""Of each worker, at the end of a run."""


class StacksOfWorkers:
    """A plugin of the process that starts workers: they get a directory, and what they leave in it is shown."""

    def __init__(self) -> None:
        self.directory: Path | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        """A worker is about to start."""
        if self.directory is None:
            self.directory = Path(tempfile.mkdtemp(prefix="stacks-"))
        node.workerinput["stacks"] = str(self.directory / f"{node.gateway.id}.txt")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The stacks of each worker that has written any."""
        for path in sorted(self.directory.iterdir()) if self.directory else ():
            if lines := told(path.read_text(encoding="utf-8", errors="replace")):
                terminalreporter.section(f"stacks of {path.stem}")
                for line in lines:
                    terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        """The run has ended."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def told(dump: str) -> list[str]:
    """The lines of faulthandler's dumps that tell something, the last ones: a hanging test's own stack ends a dump."""
    lines = [line for line in dump.splitlines() if line and not any(part in line for part in HARNESS)]
    return lines[-SHOWN_LINES:]


class StacksOfTests:
    """A plugin of the process that runs tests: before a time-out, and at a crash, it writes where all threads are."""

    def __init__(self, config: pytest.Config) -> None:
        path = getattr(config, "workerinput", {}).get("stacks")
        # Alone, they go to standard error as it is before pytest begins to capture it.
        self.file: IO[bytes] = os.fdopen(os.dup(2), "wb") if path is None else Path(path).open("wb")  # noqa: SIM115
        if path is not None:
            faulthandler.enable(self.file)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, settings: TimeoutSettings) -> None:
        """A test begins that has this long."""
        faulthandler.dump_traceback_later(max(0.1, settings.timeout - DUMP_BEFORE_S), file=self.file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_cancel_timer(self) -> None:
        """It has ended."""
        faulthandler.cancel_dump_traceback_later()


class TimeoutSettings(Protocol):
    """What pytest-timeout knows of a test."""

    timeout: float
    """Seconds."""
