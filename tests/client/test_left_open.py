"""A program that ends without `close`: what its producers have taken is sent, or a warning says that it is not."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from spark_broker import left_open
from tests.client.fake_broker import FakeCluster

TIMEOUT_S = 60.0


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


SENDS = """
import sys
from spark_broker import Producer

def send():  # Nothing of the program refers to the producer any more.
    producer = Producer(sys.argv[1], linger_ms=int(sys.argv[2]))
    for number in range(100):
        producer.send("t", value=str(number), partition=0)

send()
"""

ENDS = {
    "returns": ("", 0),
    "exits": ("sys.exit(3)", 3),
    "raises": ("raise ValueError('a bug of the program')", 1),
    "is interrupted": ("import signal; signal.raise_signal(signal.SIGINT)", -2),
}


@pytest.mark.parametrize("linger_ms", [60_000, 0])
@pytest.mark.parametrize("end", ENDS)
def test_records_of_a_producer_that_was_not_closed_are_stored(cluster: FakeCluster, end: str, linger_ms: int) -> None:
    """Story: a script that only sent stored nothing, with status 0 and without a word."""
    cluster.create("t")
    code, status = ENDS[end]
    ended = run(SENDS + code, cluster.bootstrap, str(linger_ms))
    assert ended.returncode == status, ended.stderr
    assert [row["value"] for row in cluster.rows("t", 0)] == [str(number).encode() for number in range(100)]
    assert "nobody looked" not in ended.stderr


SENDS_IN_VAIN = """
import sys
from spark_broker import Producer
producers = [Producer(sys.argv[1], linger_ms=60_000) for _ in range(3)]
for producer in producers:
    producer.send("t", value="a")
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_program_whose_cluster_has_gone_ends_soon_and_says_what_it_lost(cluster: FakeCluster) -> None:
    cluster.create("t")
    command = [sys.executable, "-c", SENDS_IN_VAIN, cluster.bootstrap]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        cluster.close()
        began_s = time.monotonic()
        _, said = program.communicate("end\n", TIMEOUT_S)
    assert program.returncode == 0
    assert said.count("1 sends and appends failed, and nobody looked at their Futures") == 3, said
    assert time.monotonic() - began_s < 4 * left_open.END_S, "all of them together have that time"


FORKS = """
import os, sys
from spark_broker import Producer
producer = Producer(sys.argv[1], linger_ms=60_000)
producer.send("t", value="a", partition=0)
if not (child := os.fork()):
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_child_sends_nothing_of_its_parents(cluster: FakeCluster) -> None:
    cluster.create("t")
    ended = run(FORKS, cluster.bootstrap)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [row["value"] for row in cluster.rows("t", 0)] == [b"a"]


FAILS_TO_CLOSE = """
import sys
from spark_broker.left_open import close_at_end

class Client:
    def __init__(self, name):
        self.name = name
        close_at_end(self)

    def close_left(self, timeout: float):
        print(self.name, 0.0 <= timeout <= 5.0)
        if self.name == "bad":
            raise ValueError("it cannot be closed")

kept = [Client("good"), Client("bad"), Client("good")]
Client("freed")
"""


def test_one_that_cannot_be_closed_keeps_no_other_from_it() -> None:
    ended = run(FAILS_TO_CLOSE)
    assert sorted(ended.stdout.splitlines()) == ["bad True", "good True", "good True"]
    assert "it cannot be closed" in ended.stderr
