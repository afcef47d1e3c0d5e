"""Clients that nobody has any more, and that were not closed: what they took is sent, and nothing of them stays."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spark_broker import Producer
from spark_broker.errors import SparkBrokerError
from tests.client.fake_broker import FakeCluster
from tests.support.waiting import eventually

TIMEOUT_S = 60.0


def threads(client: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(client)]


def files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def values(cluster: FakeCluster) -> list[object]:
    return [row["value"] for row in cluster.rows("t", 0)]


def test_a_producer_that_is_forgotten_sends_what_it_has_and_ends(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: each call of a function that opened a producer, and did not close it, left eleven threads for ever."""
    cluster.create("t")
    name = "forgotten-producer"

    def send(number: int) -> None:
        producer = Producer(cluster.bootstrap, client_id=name, linger_ms=600_000)
        producer.send("t", value=str(number), partition=0)

    send(0)
    gc.collect()
    eventually(lambda: not threads(name), TIMEOUT_S, "the end of the threads")
    before = files()
    for number in range(1, 10):
        send(number)
    gc.collect()
    eventually(lambda: not threads(name), TIMEOUT_S, "the end of all threads")
    eventually(lambda: files() <= before, TIMEOUT_S, "the end of the connections")
    assert {str(number).encode() for number in range(10)} == set(values(cluster))
    assert len(values(cluster)) == 10
    said = [record.message for record in caplog.records if "garbage collected" in record.message]
    assert len(said) == 10


def test_a_closed_producer_that_is_forgotten_says_nothing(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap, client_id="closed-producer") as producer:
        producer.send("t", value="a", partition=0)
    del producer
    gc.collect()
    eventually(lambda: not threads("closed-producer"), TIMEOUT_S, "the end of the threads")
    assert not [record for record in caplog.records if "garbage collected" in record.message]


def test_an_error_that_a_producer_remembers_does_not_keep_it(cluster: FakeCluster) -> None:
    """The frames of an error refer to the producer in which it was raised."""

    def fail(transactional_id: str | None) -> None:
        producer = Producer(
            cluster.bootstrap, client_id="failed-producer", max_block_ms=100, transactional_id=transactional_id
        )
        if transactional_id is not None:
            cluster.create("t")
            producer.begin_transaction()
        with pytest.raises(SparkBrokerError):
            producer.append("not-there", [{"value": b"a"}]).result(TIMEOUT_S)

    for transactional_id in (None, "failed"):
        fail(transactional_id)
        gc.collect()
        eventually(lambda: not threads("failed-producer"), TIMEOUT_S, f"the end of the threads of {transactional_id}")


def test_a_transaction_of_a_producer_that_is_forgotten_is_aborted(cluster: FakeCluster) -> None:
    cluster.create("t")

    def begin() -> None:
        producer = Producer(cluster.bootstrap, client_id="transactional-producer", transactional_id="forgotten")
        producer.begin_transaction()
        producer.append("t", [{"value": b"a"}], partition=0).result(TIMEOUT_S)

    begin()
    (writer,) = cluster.transactions.by_id["forgotten"].writers.values()
    assert writer.partitions
    gc.collect()
    eventually(lambda: not threads("transactional-producer"), TIMEOUT_S, "the end of the threads")
    assert (writer.partitions, writer.outcome) == ([], False)


def test_a_producer_whose_close_was_interrupted_ends_when_it_is_forgotten(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create("t")

    def interrupted() -> None:
        producer = Producer(cluster.bootstrap, client_id="interrupted-producer")
        producer.append("t", [{"value": b"a"}], partition=0).result(TIMEOUT_S)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(producer._sender, "drain", interrupt)
            with pytest.raises(KeyboardInterrupt):
                producer.close()

    interrupted()
    gc.collect()
    eventually(lambda: not threads("interrupted-producer"), TIMEOUT_S, "the end of the threads")


WITHIN_THREADING = """
import gc, sys, threading
from spark_broker import Consumer, Producer

clients = [Producer(sys.argv[1], client_id="gone"), Consumer(sys.argv[1], client_id="gone")]
clients[0].append("t", [{"value": b"a"}], partition=0).result(30)
with threading._active_limbo_lock:  # as in the midst of `Thread.start`, where memory is taken
    clients.clear()
    gc.collect()
while any(thread.name.startswith("gone") for thread in threading.enumerate()):
    pass
print("gone")
"""


def test_clients_may_be_collected_while_a_thread_is_being_started(cluster: FakeCluster) -> None:
    """Story: the callback of the garbage collector started a thread, and waited for a lock that its own thread held."""
    cluster.create("t")
    command = [sys.executable, "-c", WITHIN_THREADING, cluster.bootstrap]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.stdout == "gone\n", ended.stderr


FORKS = """
import gc, os, sys
from spark_broker import Producer

producers = [Producer(sys.argv[1])]
producers[0].append("t", [{"value": b"before"}], partition=0).result(30)
if not (child := os.fork()):
    producers.clear()  # the parent's
    gc.collect()
    own = Producer(sys.argv[1], client_id="own")
    own.send("t", value=b"of the child", partition=0)
    del own
    gc.collect()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
producers[0].append("t", [{"value": b"after"}], partition=0).result(30)
"""


def test_a_child_that_forgets_its_parents_producer_leaves_it_alone(cluster: FakeCluster) -> None:
    cluster.create("t")
    command = [sys.executable, "-c", FORKS, cluster.bootstrap]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert values(cluster) == [b"before", b"of the child", b"after"]
