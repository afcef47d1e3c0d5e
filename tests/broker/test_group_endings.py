"""How members end: closed by another thread while their listener is being called, or forgotten without a close."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from contextlib import suppress

from spark_broker import Admin, Consumer, NewTopic, RebalanceListener, TopicPartition
from spark_broker.errors import ClosedError
from tests.broker.test_groups import Member
from tests.conftest import WaitUntil
from tests.support.process_cluster import ProcessCluster

TOPIC = GROUP = "closed-in-a-rebalance"


class Slow(RebalanceListener):
    """Gives partitions up only when the test lets it. `overlapped`: it was called while it was being called."""

    def __init__(self) -> None:
        self.revoked: list[int] = []
        self.assigned, self.gives_up, self.may, self.overlapped = (threading.Event() for _ in range(4))

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.assigned.set()

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        if self.gives_up.is_set() and not self.may.is_set():
            self.overlapped.set()
        self.gives_up.set()
        assert self.may.wait(30)
        self.revoked += [tp.partition for tp in partitions]


def test_a_close_by_another_thread_waits_for_the_listener_and_tells_it_only_the_rest(
    process_cluster: ProcessCluster, wait_until: WaitUntil
) -> None:
    servers, listener = process_cluster.bootstrap_servers, Slow()
    with Admin(servers) as admin:
        admin.create_topic(NewTopic(TOPIC, partitions=4, replication_factor=3))
    consumer = Consumer(servers, group_id=GROUP, topics=[TOPIC], listener=listener)

    def poll() -> None:
        with suppress(ClosedError):
            while True:
                consumer.poll(0.2)

    polling, closing = threading.Thread(target=poll), threading.Thread(target=consumer.close)
    polling.start()
    wait_until(listener.assigned.is_set, "everything")
    with Member(servers, TOPIC) as other:
        wait_until(listener.gives_up.is_set, "the listener to be called")
        closing.start()
        overlapped = listener.overlapped.wait(1.0)
        listener.may.set()
        wait_until(lambda: not closing.is_alive() and not polling.is_alive(), "the end of both threads")
        wait_until(lambda: len(other.owned) == 4, "the other member to get everything")
    assert not overlapped
    assert sorted(listener.revoked) == [0, 1, 2, 3]


def test_a_consumer_that_is_forgotten_ends_its_threads_and_leaves_its_group(
    process_cluster: ProcessCluster, wait_until: WaitUntil
) -> None:
    servers, topic, name = process_cluster.bootstrap_servers, "forgotten", "forgotten-consumer"

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith(name)]

    def poll_and_forget() -> None:
        consumer = Consumer(servers, group_id=topic, topics=[topic], client_id=name, session_timeout_ms=600_000)
        wait_until(lambda: not consumer.poll(0.1) and len(consumer.assignment()) == 4, "everything")

    with Admin(servers) as admin:
        admin.create_topic(NewTopic(topic, partitions=4, replication_factor=3))
    poll_and_forget()
    gc.collect()
    with Member(servers, topic) as other:
        wait_until(lambda: len(other.owned) == 4, "the next member to get everything")
        wait_until(lambda: not threads(), "the end of the threads")
    assert other.error is None
