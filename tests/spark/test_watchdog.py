"""A broker's process must not outlive its executor, whoever of its ancestors goes first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from spark_broker.broker.watchdog import Watchdog
from tests.support.waiting import eventually

GRANDCHILD = textwrap.dedent(
    """
    import threading
    from spark_broker.broker.watchdog import Watchdog, die_with_parent
    {prepare}
    print("ready", flush=True)
    threading.Event().wait(60)
    """
)
CHILD = textwrap.dedent(
    """
    import subprocess, sys
    grandchild = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
    grandchild.stdout.readline()
    print(grandchild.pid, flush=True)
    grandchild.wait()
    """
)
PARENT = textwrap.dedent(
    """
    import os, subprocess, sys
    print(os.getpid(), flush=True)
    child = "from spark_broker.broker.watchdog import lineage; print(*lineage(2))"
    subprocess.run([sys.executable, "-c", child], check=True)
    """
)


def _orphan(prepare: str) -> int:
    """Pid of a grandchild whose parent is killed once it is ready."""
    source = GRANDCHILD.format(prepare=prepare)
    with subprocess.Popen([sys.executable, "-c", CHILD, source], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
    return pid


def _is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    # Without an init that reaps, the orphan stays a zombie entry: it runs no more.
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_lineage_is_parent_then_grandparent() -> None:
    shown = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True, timeout=60)
    parent, *chain = map(int, shown.stdout.split())
    assert chain == [parent, os.getpid()]


def test_the_watchdog_ends_a_process_whose_parent_was_killed() -> None:
    pid = _orphan("Watchdog(1, interval_s=0.02).start()")

    eventually(lambda: _is_gone(pid), 20, "the orphan's end")


def test_the_watchdog_notices_when_only_the_grandparent_is_gone() -> None:
    orphaned: list[bool] = []
    # As if another process had been the grandparent when the broker started.
    Watchdog(2, lambda: orphaned.append(True), interval_s=0.01, expected=(os.getppid(), -1)).start()

    eventually(lambda: orphaned == [True], 20, "the watchdog's call")


def test_the_kernel_ends_a_process_whose_parent_was_killed() -> None:
    pid = _orphan("die_with_parent()")

    eventually(lambda: _is_gone(pid), 20, "the orphan's end")


def test_a_stopped_watchdog_ends_nothing() -> None:
    orphaned: list[bool] = []
    dog = Watchdog(1, lambda: orphaned.append(True), interval_s=0.01, expected=(-1,))
    dog.stop()

    dog.start()

    assert dog.join(20)
    assert orphaned == []
