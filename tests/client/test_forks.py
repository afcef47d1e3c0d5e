"""Clients after a fork, and beside a proxy for the web."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.client.fake_broker import FakeCluster

FORKS = """
import os, sys
from spark_broker import Admin, Consumer, Producer
from spark_broker.errors import ForkedProcessError

servers, first = sys.argv[1:]
producer = Producer(servers) if first == "used" else None
consumer = Consumer(servers, topics=["t"]) if first == "used" else None
if producer is not None:
    producer.append("t", [{"value": b"parent"}]).result(20)
child = os.fork()
if child == 0:
    seen = []
    for use in (
        lambda: producer and producer.append("t", [{"value": b"child"}]).result(20),
        lambda: consumer and consumer.poll(20),
        lambda: Admin(servers).list_topics(),
    ):
        try:
            seen.append(use() or "nothing")
        except ForkedProcessError as error:
            seen.append(error.name)
    print(seen, flush=True)
    os._exit(0)
os.waitpid(child, 0)
if producer is not None:
    producer.append("t", [{"value": b"parent"}]).result(20)
    producer.close()
print("the parent goes on")
"""

ITERATES = """
import os, sys
from spark_broker import Consumer, Producer
from spark_broker.errors import ForkedProcessError

with Producer(sys.argv[1]) as producer:
    producer.append("t", [{"value": b"0"}, {"value": b"1"}]).result(20)
consumer = Consumer(sys.argv[1], topics=["t"], auto_offset_reset="earliest")
child = -1
try:
    for record in consumer:
        if child == -1:
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                break
        else:
            print("the child has", record.value, flush=True)
except ForkedProcessError as error:
    print(error.name, flush=True)
    os._exit(0)
print("the parent goes on")
"""

LISTS = (
    "import sys; from spark_broker import Admin; print(Admin(sys.argv[1], default_api_timeout_ms=9000).list_topics())"
)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("used", [str(["FORKED_PROCESS", "FORKED_PROCESS", ["t"]]), "the parent goes on"]),
        ("unused", ["['nothing', 'nothing', ['t']]", "the parent goes on"]),
    ],
)
def test_a_child_may_use_clients_of_its_own_and_is_told_at_once_that_it_has_not_its_parents(
    cluster: FakeCluster, first: str, said: list[str]
) -> None:
    """Story: the child hung, beyond every time-out."""
    cluster.create("t")
    command = [sys.executable, "-c", FORKS, cluster.bootstrap, first]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == said


def test_an_iteration_ends_in_a_child(cluster: FakeCluster) -> None:
    """Story: it handed out what the parent had fetched, and then waited for threads that the child has not."""
    cluster.create("t")
    command = [sys.executable, "-c", ITERATES, cluster.bootstrap]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == ["FORKED_PROCESS", "the parent goes on"]


def test_a_proxy_for_the_web_does_not_concern_clients(cluster: FakeCluster) -> None:
    """Story: "the broker is overloaded or frozen", and a cluster never got live."""
    cluster.create("t")
    proxy = "http://127.0.0.1:9"  # Nobody is there.
    environment = {**os.environ, "http_proxy": proxy, "https_proxy": proxy, "grpc_proxy": proxy, "no_proxy": ""}
    command = [sys.executable, "-c", LISTS, cluster.bootstrap]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert ended.stdout.strip() == "['t']"
