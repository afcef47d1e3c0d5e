"""Processes that a test has started, by what they are and not by a pid alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to each that still runs. psutil compares start times: a pid that was used again gets no signal."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
