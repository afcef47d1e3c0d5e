"""Ends a broker's process when its executor is gone.

Spark starts a replacement elsewhere, and nobody is left to end the old process: without this, killing the JVM and
`pyspark.daemon` together leaves a broker that serves for ever beside its replacement (a zombie). Epochs keep that safe;
the watchdog keeps it short.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 0.25
ORPHANED_EXIT_STATUS = 3

_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")


def parent_of(pid: int) -> int | None:
    """The parent's pid; None when the process is gone or /proc cannot be read."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, and may itself hold spaces and parentheses.
    return int(stat.rpartition(")")[2].split()[1])


def lineage(generations: int) -> tuple[int, ...]:
    """Pids of this process's parent, its parent, and so on; shorter where /proc does not show them."""
    chain = [os.getppid()]
    while len(chain) < generations:
        above = parent_of(chain[-1])
        if above is None or above <= 1:
            break
        chain.append(above)
    return tuple(chain)


def die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent ends. Elsewhere the watchdog alone does it, a moment later."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Watchdog:
    """A thread that calls `on_orphaned` once when one of the process's ancestors is no longer what it was.

    `generations`: how many ancestors matter. A broker in a Spark task watches `pyspark.daemon` and the executor's JVM.
    `expected`: who they are, nearest first; None: those that are there now.
    """

    def __init__(
        self,
        generations: int,
        on_orphaned: Callable[[], None] | None = None,
        *,
        interval_s: float = INTERVAL_S,
        expected: tuple[int, ...] | None = None,
    ) -> None:
        self._generations = generations
        self._on_orphaned = on_orphaned or _exit
        self._interval_s = interval_s
        self._expected = lineage(generations) if expected is None else expected
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def watched(self) -> tuple[int, ...]:
        """The ancestors' pids, nearest first."""
        return self._expected

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer: the worker goes back to Spark."""
        self._stopped.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            if lineage(self._generations) != self._expected:
                self._on_orphaned()
                return


def _exit() -> None:
    # Not sys.exit, which ends this thread only; and no clean-up, which hangs in a gRPC server that is never joined.
    os._exit(ORPHANED_EXIT_STATUS)
