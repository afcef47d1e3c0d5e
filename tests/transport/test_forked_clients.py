"""A forked child has nothing of its parent's connections, and may open its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.waiting import eventually
from tests.transport.rig import WAIT_S, Rig, rig

BEGIN = """
import os, signal, sys, threading
from spark_broker.errors import ForkedProcessError, NetworkError
from spark_broker.transport.client import Connection
from tests.transport.rig import CALL, REQUEST

os.register_at_fork(after_in_child=lambda: signal.alarm(60))  # No child that hangs outlives the test by much.

def say(what):
    print(what, flush=True)

def refused(use):
    try:
        use()
    except ForkedProcessError:
        return True
    return False

port = int(sys.argv[1])
connection = Connection("127.0.0.1", port)
connection.call(CALL, timeout_ms=20_000)
stream = connection.open_stream("echo")

def all_refused():
    calls = (
        lambda: connection.call(CALL, timeout_ms=20_000),
        lambda: connection.open_stream("echo"),
        lambda: stream.send(REQUEST),
        lambda: stream.receive(timeout_ms=20_000),
    )
    return all(refused(call) for call in calls)

def own():
    mine = Connection("127.0.0.1", port)
    mine.call(CALL, timeout_ms=20_000)
    echo = mine.open_stream("echo")
    echo.send(REQUEST)
    echo.receive(timeout_ms=20_000)
    return mine
"""

OUTLIVED = """
if os.fork() == 0:
    mine = own()
    say(f"child {all_refused()}")
    sys.stdin.readline()
    mine.call(CALL, timeout_ms=20_000)
    say("the child goes on")
    os._exit(0)
signal.pause()
"""

ENDS = """
for _ in range(3):
    child = os.fork()
    if child == 0:
        mine = own()
        stream.close()
        connection.close()
        del stream, connection
        if os.fork() == 0:
            say(refused(lambda: mine.call(CALL, timeout_ms=20_000)))
            own()
            sys.exit(0)
        say(os.wait()[1])
        mine.call(CALL, timeout_ms=20_000)
        sys.exit(0)
    say(os.waitpid(child, 0)[1])
stream.send(REQUEST)
stream.receive(timeout_ms=20_000)
connection.call(CALL, timeout_ms=20_000)
say("the parent goes on")
"""

BUSY = """
stop = threading.Event()
failed = []

def use():
    try:
        echo = connection.open_stream("echo")
        while not stop.is_set():
            connection.call(CALL, timeout_ms=20_000)
            echo.send(REQUEST, bytes(100_000))
            echo.receive(timeout_ms=20_000)
            Connection("127.0.0.1", port).call(CALL, timeout_ms=20_000)
    except BaseException as error:
        failed.append(error)

threads = [threading.Thread(target=use) for _ in range(4)]
for thread in threads:
    thread.start()
ends = []
for _ in range(15):
    child = os.fork()
    if child == 0:
        own()
        os._exit(0 if all_refused() else 1)
    ends.append(os.waitpid(child, 0)[1])
stop.set()
for thread in threads:
    thread.join()
say(ends == [0] * 15)
say(failed)
"""


@contextmanager
def running(script: str, served: Rig) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BEGIN + script, str(served.server.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_end_of_a_parent_reaches_its_server_though_its_child_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served, running(OUTLIVED, served) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "child True\n"
        eventually(lambda: len(served.server._connections) == 3, WAIT_S, "two of the parent, and the child's")
        os.kill(parent.pid, signal.SIGKILL)
        eventually(lambda: len(served.server._connections) == 1, WAIT_S, "the end of the parent's connections")
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "the child goes on\n"


def test_children_that_end_in_order_leave_their_parents_connections_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served, running(ENDS, served) as parent:
        said, _ = parent.communicate(timeout=60)
        assert said.splitlines() == [*["True", "0", "0"] * 3, "the parent goes on"]


def test_a_process_may_fork_while_its_threads_use_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served, running(BUSY, served) as parent:
        said, _ = parent.communicate(timeout=90)
        assert said.splitlines() == ["True", "[]"]
