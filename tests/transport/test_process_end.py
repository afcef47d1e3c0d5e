"""A process whose threads are inside Flight ends normally and silently."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter

import pytest

from spark_broker.native_calls import NativeCalls
from spark_broker.protocol.messages import EmptyResponse, FetchResponse
from spark_broker.transport.server import Server
from spark_broker.transport.server_stream import ServerStream

HOST = "127.0.0.1"
AT_ONCE = 4


def echo(stream: ServerStream) -> None:
    while stream.receive() is not None:
        stream.send(FetchResponse(1, []))


def silence(stream: ServerStream) -> None:
    while stream.receive() is not None:
        pass


@pytest.mark.parametrize("times", [pytest.param(8, marks=pytest.mark.quick), pytest.param(24, marks=pytest.mark.full)])
def test_a_process_may_end_while_its_threads_are_inside_streams(times: int) -> None:
    """Python ends a daemon thread where it stands; inside Arrow's C++ that aborted one process in six (SIGABRT)."""
    bugs: list[BaseException] = []
    server = Server(HOST, 0, lambda request: EmptyResponse(), {"echo": echo, "silent": silence}, bugs.append)
    command = [sys.executable, "-m", "tests.support.ends_while_it_talks", str(server.port)]
    ends: Counter[tuple[int, str]] = Counter()
    for _ in range(times // AT_ONCE):
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(AT_ONCE)]
        for process in processes:
            _, errors = process.communicate(timeout=60)
            ends[process.returncode, errors] += 1
    assert not bugs
    assert ends == {(0, ""): times}


def test_the_end_of_the_process_waits_for_calls_and_lets_no_more_in() -> None:
    calls = NativeCalls()
    inside, leave, refused = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        with calls:
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(30)
    calls.refuse()
    with calls:
        pass  # the thread that ends the process

    def late() -> None:
        with pytest.raises(SystemExit), calls:
            pass
        refused.set()

    threading.Thread(target=late).start()
    assert refused.wait(30)
    assert not calls.wait_until_nobody_is_inside(0.01)
    leave.set()
    assert calls.wait_until_nobody_is_inside(30)
    thread.join()
