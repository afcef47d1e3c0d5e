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

EVERY_METHOD = """
import datetime, os, sys, threading
from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import ForkedProcessError

servers = sys.argv[1]
producer = Producer(servers, linger_ms=60_000)
transactional = Producer(servers, transactional_id="x")
consumer, admin = Consumer(servers, group_id="g", enable_auto_commit=False), Admin(servers)
producer.append("t", [{"value": b"first"}], partition=0).result(20)
tp = TopicPartition("t", 0)
consumer.assign([tp])
admin.list_topics()
waits = producer.send("t", b"a", partition=1)
GIVEN = {
    "append": ("t", [{"value": b"child"}]), "send": ("t", b"child"), "send_offsets_to_transaction": ({tp: 0}, "g"),
    "subscribe": (["t"],), "assign": ([tp],), "seek": (tp, 0), "position": (tp,), "committed": (tp,),
    "beginning_offsets": ([tp],), "end_offsets": ([tp],),
    "offsets_for_times": ({tp: datetime.datetime(2026, 1, 1)},),
    "create_topic": (NewTopic("u"),), "create_topics": ([NewTopic("u")],), "describe_topic": ("t",),
    "delete_topic": ("t",),
    "delete_topics": (["t"],), "create_partitions": ("t", 3), "alter_topic_config": ("t", {"retention.ms": 1}),
    "alter_topic_schema": ("t", "a INT"), "reassign_partition": (tp, [0]), "list_offsets": ({tp: "latest"},),
    "delete_records": ({tp: 0},), "describe_transaction": ("x",),
    "describe_group": ("g",), "group_offsets": ("g",), "alter_group_offsets": ("g", {tp: 0}), "delete_group": ("g",),
    "delete_groups": (["g"],), "delete_group_offsets": ("g", [tp]),
}
RETURNS = {"close", "metrics", "transaction", "pause", "resume"}  # `transaction`: a context manager

def refused(done):
    reasons = done.values() if isinstance(done, dict) else [done.exception()] if hasattr(done, "exception") else [done]
    return all(isinstance(reason, ForkedProcessError) for reason in reasons)

held, over = threading.Event(), threading.Event()

def hold_all():
    with producer._parts._lock, producer._sender.lock, producer._metadata._lock, consumer._lock, admin._metadata._lock:
        held.set()
        over.wait()

holder = threading.Thread(target=hold_all)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    for client in (producer, transactional, consumer, admin):
        for name in sorted(name for name in dir(client) if not name.startswith("_")):
            method = getattr(client, name)
            if not callable(method):
                continue
            try:
                of_admin = client is admin and name == "abort_transaction"
                done = method("x") if of_admin else method(*GIVEN.get(name, ()))
            except ForkedProcessError:
                continue
            if name not in RETURNS and not refused(done):
                print(type(client).__name__, name, done, flush=True)
    os._exit(0)
over.set()
holder.join()
ended, status = os.waitpid(child, 0)
print("the child has ended", status, flush=True)
second = producer.send("t", b"b", partition=1)
producer.flush()
print(waits.result().offset, second.result().offset)
producer.close()
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


def test_no_method_of_a_parents_client_does_anything_in_a_child(cluster: FakeCluster) -> None:
    """Story: `flush`, of a handler of logging for one, sent what the parent had not sent yet, under the parent's
    numbers. What the parent sent next was taken for the same again: it was acknowledged, and not stored.
    """
    cluster.create("t", 2)
    command = [sys.executable, "-c", EVERY_METHOD, cluster.bootstrap]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == ["the child has ended 0", "0 1"], ended.stderr
    assert [row["value"] for row in cluster.rows("t", 1)] == [b"a", b"b"]


def test_a_proxy_for_the_web_does_not_concern_clients(cluster: FakeCluster) -> None:
    """Story: "the broker is overloaded or frozen", and a cluster never got live."""
    cluster.create("t")
    proxy = "http://127.0.0.1:9"  # Nobody is there.
    environment = {**os.environ, "http_proxy": proxy, "https_proxy": proxy, "grpc_proxy": proxy, "no_proxy": ""}
    command = [sys.executable, "-c", LISTS, cluster.bootstrap]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert ended.stdout.strip() == "['t']"
