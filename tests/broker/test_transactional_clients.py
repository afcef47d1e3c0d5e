"""Transactions of the real clients on a cluster of real processes, some of which are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, RecordMetadata, TopicPartition, TransactionGroup
from spark_broker.errors import (
    AlreadyCommittedError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    ProducerFencedError,
    RequestTimedOutError,
    SparkBrokerError,
    TransactionAbortableError,
)
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.murmur2 import group_partition
from spark_broker.testing.checker import check_history
from spark_broker.testing.history import Isolation
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.workload import record_outcome, snapshot_with_consumer
from tests.conftest import WaitUntil
from tests.support.committed import committed_offset
from tests.support.process_cluster import ProcessCluster

PARTITIONS = 3
WAIT_S = 60.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    config = {
        "broker.session.timeout.ms": 3000,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.num.partitions": 4,
    }
    with ProcessCluster(tmp_path_factory.mktemp("transactions"), 3, config) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(servers: ProcessCluster) -> Iterator[Admin]:
    with Admin(servers.bootstrap_servers) as admin:
        yield admin


@pytest.fixture(autouse=True)
def _whole(servers: ProcessCluster) -> None:
    """A test may end while a broker of the cluster is still restarting."""
    servers.await_live(3)


def create(admin: Admin, *names: str) -> list[TopicPartition]:
    for name in names:
        admin.create_topic(NewTopic(name, PARTITIONS, 3, config={"min.insync.replicas": 2}))
    return [TopicPartition(name, number) for name in names for number in range(PARTITIONS)]


def read(
    servers: ProcessCluster, topic: str, isolation: Isolation = Isolation.READ_COMMITTED, partitions: int = PARTITIONS
) -> list[list[str]]:
    """All values, by partition."""
    wanted = [TopicPartition(topic, number) for number in range(partitions)]
    consumed: list[list[str]] = [[] for _ in wanted]
    deadline = time.monotonic() + WAIT_S
    with Consumer(servers.bootstrap_servers, isolation_level=isolation.value, auto_offset_reset="earliest") as consumer:
        ends = consumer.end_offsets(wanted)
        consumer.assign(wanted)
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            assert time.monotonic() < deadline, f"positions never came to {ends}"
            for batch in consumer.poll(1.0):
                consumed[batch.partition] += [value.decode() for value in batch.data["value"].to_pylist()]
    return consumed


def append(producer: Producer, topic: str, partition: int, *values: str) -> Future[list[RecordMetadata]]:
    return producer.append(topic, [{"value": value.encode()} for value in values], partition=partition)


def test_a_transaction_shows_in_every_topic_and_partition_or_in_none(servers: ProcessCluster, admin: Admin) -> None:
    create(admin, "orders", "bills")
    with Producer(servers.bootstrap_servers, transactional_id="both") as producer:
        for name, commit in (("aborted", False), ("committed", True)):
            producer.begin_transaction()
            for topic in ("orders", "bills"):
                for partition in range(PARTITIONS):
                    append(producer, topic, partition, f"{name}-1", f"{name}-2")
            producer.flush()
            assert read(servers, "orders") == [[]] * PARTITIONS
            producer.commit_transaction() if commit else producer.abort_transaction()
        for topic in ("orders", "bills"):
            assert read(servers, topic) == [["committed-1", "committed-2"]] * PARTITIONS
            uncommitted = read(servers, topic, Isolation.READ_UNCOMMITTED)
            assert uncommitted == [["aborted-1", "aborted-2", "committed-1", "committed-2"]] * PARTITIONS


@pytest.mark.parametrize(("committed", "first"), [(True, 3), (False, 0)])
def test_the_next_member_of_a_group_begins_when_the_transaction_that_moves_it_is_decided(
    servers: ProcessCluster, admin: Admin, committed: bool, first: int
) -> None:
    name = f"handed-over-{committed}".lower()
    tp, *_ = create(admin, name)
    with (
        Producer(servers.bootstrap_servers, transactional_id=name) as producer,
        Consumer(servers.bootstrap_servers, group_id=name, auto_offset_reset="earliest") as next_member,
    ):
        with Producer(servers.bootstrap_servers) as filler:
            append(filler, name, 0, *map(str, range(5))).result(WAIT_S)
        producer.begin_transaction()
        producer.send_offsets_to_transaction({tp: 3}, name)
        next_member.assign([tp])
        assert next_member.poll(1.0) == [], "where it begins is not decided"
        assert committed_offset(next_member, tp) is None
        producer.commit_transaction() if committed else producer.abort_transaction()
        batches = next_member.poll(WAIT_S)
        assert [record.offset for batch in batches for record in batch.records()] == list(range(first, 5))


def test_a_newer_producer_fences_and_a_zombies_late_append_is_refused(servers: ProcessCluster, admin: Admin) -> None:
    create(admin, "fenced")
    with (
        Producer(servers.bootstrap_servers, transactional_id="one") as older,
        Producer(servers.bootstrap_servers, transactional_id="one") as newer,
    ):
        older.begin_transaction()
        append(older, "fenced", 0, "older").result(WAIT_S)
        newer.begin_transaction()
        # The older producer has used one partition; the other does not know it.
        with pytest.raises(InvalidProducerEpochError, match="If the abort raises PRODUCER_FENCED, a newer producer"):
            append(older, "fenced", 0, "zombie").result(WAIT_S)
        with pytest.raises(TransactionAbortableError):
            append(older, "fenced", 1, "zombie").result(WAIT_S)
        append(newer, "fenced", 0, "newer")
        with pytest.raises((ProducerFencedError, TransactionAbortableError)):
            older.commit_transaction()
        with pytest.raises(ProducerFencedError):
            older.abort_transaction()
        with pytest.raises(ProducerFencedError):
            older.begin_transaction()
        newer.commit_transaction()
    assert read(servers, "fenced") == [["newer"], [], []]
    assert read(servers, "fenced", Isolation.READ_UNCOMMITTED) == [["older", "newer"], [], []]


def test_a_silent_transaction_times_out_and_the_producer_goes_on(
    servers: ProcessCluster, admin: Admin, wait_until: WaitUntil
) -> None:
    create(admin, "silent")
    with Producer(servers.bootstrap_servers, transactional_id="slow", transaction_timeout_ms=1000) as producer:
        producer.begin_transaction()
        append(producer, "silent", 0, "late").result(WAIT_S)
        with Producer(servers.bootstrap_servers) as plain:
            append(plain, "silent", 0, "behind").result(WAIT_S)
        wait_until(lambda: read(servers, "silent")[0] == ["behind"], "the time-out lets readers go on")
        with pytest.raises(TransactionAbortableError):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            append(producer, "silent", 0, "next")
    assert read(servers, "silent")[0] == ["behind", "next"]


@pytest.mark.full
def test_a_killed_copier_is_taken_over_and_every_record_is_copied_once(servers: ProcessCluster, admin: Admin) -> None:
    create(admin, "source", "target")
    values = [[f"{partition}-{n}" for n in range(400)] for partition in range(PARTITIONS)]
    with Producer(servers.bootstrap_servers) as producer:
        for partition in range(PARTITIONS):
            append(producer, "source", partition, *values[partition]).result(WAIT_S)
    command = [
        sys.executable,
        "-m",
        "tests.broker.copy_worker",
        servers.bootstrap_servers,
        "source",
        "target",
        "copier",
    ]
    committed = 0
    for lines in (3, 7, 11):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            for _ in range(lines):
                assert worker.stdout.readline(), "the copier ended by itself"
            worker.kill()
            committed += lines + len(worker.stdout.readlines())
    assert committed < PARTITIONS * 400 // 25, "the kills came while there was something to copy"
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        deadline = time.monotonic() + WAIT_S
        while read(servers, "target") != values:
            assert time.monotonic() < deadline, "not everything is copied, or something twice"
        worker.kill()
    with Consumer(servers.bootstrap_servers, group_id="copier") as consumer:
        sources = [TopicPartition("source", number) for number in range(PARTITIONS)]
        assert [committed_offset(consumer, source) for source in sources] == [400] * 3


def test_many_writers_commit_as_one_and_losers_leave_nothing(servers: ProcessCluster, admin: Admin) -> None:
    create(admin, "loaded")

    def attempt(group: TransactionGroup, partition: int, value: str) -> int:
        with group.join() as writer:
            append(writer, "loaded", partition, value)
            writer.flush()
            return writer.producer_id

    for version in range(3):
        group = TransactionGroup(servers.bootstrap_servers, "load", version, f"run-{version}")
        with ThreadPoolExecutor(4) as pool:
            attempts = [pool.submit(attempt, group, n % PARTITIONS, f"{version}-{n}") for n in range(6)]
            losers = [pool.submit(attempt, group, n % PARTITIONS, f"loser-{version}-{n}") for n in range(3)]
            winners = [future.result(WAIT_S) for future in attempts]
            lost = [future.result(WAIT_S) for future in losers]
        assert not set(winners) & set(lost)
        assert group.commit(winners)
        assert group.last_committed() == version
        assert not group.commit(winners)
        with pytest.raises(AlreadyCommittedError):
            group.join()
    consumed = read(servers, "loaded")
    expected = [{f"{version}-{n}" for version in range(3) for n in (p, p + PARTITIONS)} for p in range(PARTITIONS)]
    assert [set(rows) for rows in consumed] == expected
    assert sum(len(rows) for rows in consumed) == 18


def test_a_newer_execution_takes_over_what_an_older_one_left(servers: ProcessCluster, admin: Admin) -> None:
    create(admin, "taken")
    older = TransactionGroup(servers.bootstrap_servers, "take", 0, "older")
    newer = TransactionGroup(servers.bootstrap_servers, "take", 0, "newer")
    writer = older.join()
    append(writer, "taken", 0, "older").result(WAIT_S)
    with newer.join() as second:
        append(second, "taken", 0, "newer").result(WAIT_S)
        with pytest.raises(SparkBrokerError):
            append(writer, "taken", 1, "zombie").result(WAIT_S)
        with pytest.raises(ProducerFencedError):
            older.join()
        with pytest.raises((ProducerFencedError, InvalidTxnStateError)):
            older.commit([writer.producer_id])
    writer.close(0)
    assert newer.commit([second.producer_id])
    assert read(servers, "taken") == [["newer"], [], []]


class RecordedTransactions:
    """Runs transactions in a thread and records what it knows of their outcomes."""

    def __init__(
        self,
        servers: str,
        recorder: HistoryRecorder,
        name: str,
        partitions: list[TopicPartition],
        stop: threading.Event,
    ) -> None:
        self._servers = servers
        self._recorder = recorder
        self._name = name
        self._partitions = partitions
        self._stop = stop
        self.committed = 0

    def run(self) -> None:
        with Producer(self._servers, transactional_id=self._name, transaction_timeout_ms=20_000) as producer:
            number = 0
            while not self._stop.is_set():
                self._one(producer, number)
                number += 1

    def _one(self, producer: Producer, number: int) -> None:
        recorder = self._recorder
        producer.begin_transaction()
        transaction = recorder.began(self._name, transactional_id=self._name)
        for tp in self._partitions:
            values = [f"{self._name} {number} {tp} {n}".encode() for n in range(3)]
            operation = recorder.invoked(self._name, tp, values, transaction)
            future = producer.append(tp.topic, [{"value": value} for value in values], partition=tp.partition)
            future.add_done_callback(partial(record_outcome, recorder, operation))
        if number % 4 == 3:
            producer.abort_transaction()
            recorder.aborted(transaction)
            return
        commit = recorder.committing([transaction])
        self._commit(producer, commit, transaction)

    def _commit(self, producer: Producer, commit: int, transaction: int) -> None:
        while True:
            try:
                producer.commit_transaction()
            except RequestTimedOutError:
                continue  # asks for the outcome until it is known
            except TransactionAbortableError as error:
                self._recorder.commit_refused(commit, error)
                producer.abort_transaction()
                self._recorder.aborted(transaction)
            else:
                self._recorder.committed(commit)
                self.committed += 1
            return


def leader_of(admin: Admin, topic: str, partition: int) -> int:
    leader = admin.describe_topic(topic).partitions[partition].leader
    assert leader is not None
    return leader


def each_commits(workers: list[RecordedTransactions], wanted: list[int]) -> bool:
    return all(worker.committed >= count for worker, count in zip(workers, wanted, strict=True))


def test_no_transaction_is_torn_when_coordinators_and_leaders_are_killed(
    servers: ProcessCluster, admin: Admin, wait_until: WaitUntil
) -> None:
    partitions = create(admin, "torn-a", "torn-b")
    recorder, stop = HistoryRecorder(), threading.Event()
    workers = [
        RecordedTransactions(servers.bootstrap_servers, recorder, name, partitions, stop) for name in ("w0", "w1", "w2")
    ]
    coordinators: list[Callable[[], int]] = [
        partial(leader_of, admin, TRANSACTION_STATE_TOPIC, group_partition(name, 4)) for name in ("w0", "w1")
    ]
    leaders: list[Callable[[], int]] = [partial(leader_of, admin, tp.topic, tp.partition) for tp in partitions[:2]]
    with ThreadPoolExecutor(len(workers)) as pool:
        running = [pool.submit(worker.run) for worker in workers]
        try:
            for victim in (coordinators[0], leaders[0], coordinators[1], leaders[1]):
                wait_until(
                    partial(each_commits, workers, [worker.committed + 3 for worker in workers]), "everybody commits"
                )
                pid = next(broker.pid for broker in admin.describe_cluster().brokers if broker.id == victim())
                slot = servers.slot_of(pid)
                assert slot is not None
                os.kill(pid, signal.SIGKILL)
                servers.launch(slot)
                servers.await_live(3)
        finally:
            stop.set()
        for future in running:
            future.result(2 * WAIT_S)
    snapshot_with_consumer(recorder, servers.bootstrap_servers, partitions, name="committed")
    snapshot_with_consumer(
        recorder, servers.bootstrap_servers, partitions, name="all", isolation=Isolation.READ_UNCOMMITTED
    )
    result = check_history(recorder.history())
    assert result.ok, result
    assert result.committed_transactions >= 12
    assert result.aborted_transactions > 0


@pytest.mark.full
def test_a_frozen_coordinator_is_left_for_the_next_one(servers: ProcessCluster, admin: Admin) -> None:
    create(admin, "cold")
    with Producer(servers.bootstrap_servers, transactional_id="cold", request_timeout_ms=600_000) as producer:
        with producer.transaction():
            append(producer, "cold", 0, "before")
        frozen = leader_of(admin, TRANSACTION_STATE_TOPIC, group_partition("cold", 4))
        pid = next(broker.pid for broker in admin.describe_cluster().brokers if broker.id == frozen)
        with pytest.raises(KeyError), producer.transaction():  # noqa: PT012 - the block is tested
            append(producer, "cold", 1, "aborted").result(WAIT_S)
            os.kill(pid, signal.SIGSTOP)
            raise KeyError
        try:
            with producer.transaction():
                append(producer, "cold", 2, "after")
        finally:
            os.kill(pid, signal.SIGCONT)
        servers.await_live(3)
        with producer.transaction():
            append(producer, "cold", 0, "thawed")
    assert read(servers, "cold") == [["before", "thawed"], [], ["after"]]
