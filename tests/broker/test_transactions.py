"""Transactions on a cluster of real processes, over the wire and without the client library."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spark_broker import Admin, TopicPartition
from spark_broker.cli.main import main
from spark_broker.errors import (
    AlreadyCommittedError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidTopicError,
    InvalidTxnStateError,
    NotLeaderOrFollowerError,
    ProducerFencedError,
    SparkBrokerError,
    TransactionAbortableError,
    UnstableOffsetCommitError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    AddPartitionToTransactionRequest,
    CommittedOffset,
    CommitTransactionRequest,
    DeleteTopicRequest,
    EmptyResponse,
    InitProducerIdResponse,
    InitTransactionsRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    TransactionalOffsetCommitRequest,
)
from tests.broker.raw_client import RawClient
from tests.conftest import WaitUntil
from tests.support.process_cluster import ProcessCluster

PARTITIONS = 4


@pytest.fixture(scope="module")
def transactions_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    config = {
        "broker.session.timeout.ms": 3000,
        # A test asks which broker leads, and stops it. Until then, nothing may make another one the leader.
        "auto.leader.rebalance.enable": False,
        "offsets.topic.num.partitions": PARTITIONS,
        "transaction.state.log.num.partitions": PARTITIONS,
    }
    with ProcessCluster(tmp_path_factory.mktemp("transactions"), 3, config) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(transactions_cluster: ProcessCluster) -> RawClient:
    client = RawClient(transactions_cluster.bootstrap_servers)
    client.ensure_internal()
    client.create("t")  # whose offsets are committed
    return client


def test_a_committed_transaction_shows_in_every_partition_and_an_aborted_one_in_none(client: RawClient) -> None:
    for name in ("paid", "billed"):
        client.create(name, partitions=2)
    who = client.init("both")
    places = [(name, partition) for name in ("paid", "billed") for partition in (0, 1)]
    for outcome in (b"aborted", b"committed"):
        for name, partition in places:
            client.append(name, partition, [outcome, outcome], who, 0, "both")
            assert client.read(name, partition) == []
            assert client.read(name, partition, read_committed=False)[-1] == outcome
        before, who = who, client.end("both", who, committed=outcome == b"committed")
        assert who == InitProducerIdResponse(before.producer_id, before.producer_epoch + 1)
    for name, partition in places:
        assert client.read(name, partition) == [b"committed"] * 2
        assert client.read(name, partition, read_committed=False) == [b"aborted"] * 2 + [b"committed"] * 2


def test_several_batches_of_a_partition_belong_to_one_transaction(client: RawClient) -> None:
    client.create("many")
    who = client.init("several")
    for sequence in range(5):
        client.append("many", 0, [b"%d" % sequence], who, sequence, "several")
    assert client.append("many", 0, [b"4"], who, 4, "several") == 4, "a retry"
    client.end("several", who, committed=True)
    assert client.read("many") == [b"0", b"1", b"2", b"3", b"4"]


def test_a_zombie_is_fenced_and_its_transaction_aborted(client: RawClient) -> None:
    client.create("fenced")
    old = client.init("taken-over")
    client.append("fenced", 0, [b"zombie"], old, 0, "taken-over")
    new = client.init("taken-over")
    with pytest.raises(InvalidProducerEpochError):
        client.append("fenced", 0, [b"late"], old, 1, "taken-over")
    with pytest.raises(ProducerFencedError):
        client.end("taken-over", old, committed=True)
    client.append("fenced", 0, [b"new"], new, 0, "taken-over")
    client.end("taken-over", new, committed=True)
    assert client.read("fenced") == [b"new"]


def test_a_transaction_whose_producer_is_gone_is_aborted_in_time(client: RawClient, wait_until: WaitUntil) -> None:
    client.create("left")
    who = client.init("gone", timeout_ms=500)
    client.append("left", 0, [b"lost"], who, 0, "gone")
    other = client.init("other")
    client.append("left", 0, [b"kept"], other, 0, "other")
    client.end("other", other, committed=True)
    assert client.read("left") in ([], [b"kept"])
    wait_until(lambda: client.read("left") == [b"kept"], "the last stable offset to move on")
    with pytest.raises(TransactionAbortableError):
        client.end("gone", who, committed=True)
    again = client.end("gone", who, committed=False)
    client.append("left", 0, [b"again"], again, 0, "gone")
    client.end("gone", again, committed=True)
    assert client.read("left") == [b"kept", b"again"]


@pytest.mark.full
def test_a_transaction_that_goes_on_does_not_time_out(client: RawClient, wait_until: WaitUntil) -> None:
    """The leader renews even a short time-out while batches come."""
    client.create("steady")
    timeout_ms = 3000
    who = client.init("busy", timeout_ms=timeout_ms)
    began_s = time.monotonic()
    sequence = 0

    def longer_than_its_time_out() -> bool:
        nonlocal sequence
        client.append("steady", 0, [b"%d" % sequence], who, sequence, "busy")
        sequence += 1
        return time.monotonic() - began_s > 2 * timeout_ms / 1000

    wait_until(longer_than_its_time_out, "time to pass")
    client.end("busy", who, committed=True)
    assert len(client.read("steady")) == sequence


def test_clients_may_not_append_to_the_coordinators_log(client: RawClient) -> None:
    who = client.init("intruder")
    with pytest.raises(InvalidTopicError):
        client.append(TRANSACTION_STATE_TOPIC, 0, [b"x"], who, 0, "intruder")


def test_a_broker_that_does_not_coordinate_the_id_says_so(client: RawClient) -> None:
    coordinator = client.coordinator("elsewhere")
    others = [broker.id for broker in client.metadata().brokers if broker.id != coordinator]
    for broker in others:
        with pytest.raises(NotLeaderOrFollowerError):
            client.connection(broker).call(InitTransactionsRequest("elsewhere", 1000), timeout_ms=5000)


def test_winners_of_a_version_are_committed_together_and_losers_never(client: RawClient) -> None:
    client.create("sink", partitions=3)
    with ThreadPoolExecutor(8) as pool:
        writers = list(pool.map(lambda _: client.join("app", 1, "run-1"), range(8)))
        values = {who.producer_id: b"%d" % who.producer_id for who in writers}

        def write(who: InitProducerIdResponse) -> None:
            for partition in range(3):
                client.append("sink", partition, [values[who.producer_id]], who, 0, "app")

        list(pool.map(write, writers))
    winners = [who.producer_id for who in writers[::2]]
    with pytest.raises(InvalidTxnStateError):
        client.ask("app", CommitTransactionRequest("app", 1, "run-1", [*winners, 10**9]))
    assert client.ask("app", CommitTransactionRequest("app", 1, "run-1", winners)) == EmptyResponse()
    for partition in range(3):
        assert sorted(client.read("sink", partition)) == sorted(values[winner] for winner in winners)
    with pytest.raises(AlreadyCommittedError):
        client.ask("app", CommitTransactionRequest("app", 1, "run-1", winners))
    with pytest.raises(AlreadyCommittedError):
        client.join("app", 1, "run-2")
    with pytest.raises(SparkBrokerError):
        client.append("sink", 0, [b"late"], writers[1], 1, "app")
    newer = client.join("app", 2, "run-2")
    with pytest.raises(ProducerFencedError):
        client.join("app", 2, "run-1")
    client.append("sink", 0, [b"dropped"], newer, 0, "app")
    assert client.ask("app", AbortTransactionRequest("app", 2, "run-2")) == EmptyResponse()
    assert b"dropped" not in client.read("sink")
    assert client.describe("app").last_committed == 1


def offsets_of(client: RawClient, group: str) -> dict[str, int]:
    answer = client.ask(group, OffsetFetchRequest(group), CONSUMER_OFFSETS_TOPIC)
    assert isinstance(answer, OffsetFetchResponse)
    return {offset.topic: offset.offset for offset in answer.offsets}


def commit_offsets(client: RawClient, who: InitProducerIdResponse, group: str, offset: int, sequence: int = 0) -> None:
    request = TransactionalOffsetCommitRequest(
        group, [CommittedOffset("t", 0, offset)], "mover", who.producer_id, who.producer_epoch, sequence
    )
    assert client.ask(group, request, CONSUMER_OFFSETS_TOPIC) == EmptyResponse()


def test_offsets_of_a_transaction_count_once_it_is_committed(client: RawClient) -> None:
    who = client.init("mover")
    commit_offsets(client, who, "readers", 10)
    assert offsets_of(client, "readers") == {}
    who = client.end("mover", who, committed=False)
    assert offsets_of(client, "readers") == {}
    commit_offsets(client, who, "readers", 20)
    # Plain commits to the same partition of the log go on.
    client.create("plain")
    for offset in range(12):
        request = OffsetCommitRequest("readers", [CommittedOffset("plain", 0, offset)])
        client.ask("readers", request, CONSUMER_OFFSETS_TOPIC)
    assert offsets_of(client, "readers") == {"plain": 11}
    commit_offsets(client, who, "readers", 21, sequence=1)
    client.end("mover", who, committed=True)
    assert offsets_of(client, "readers") == {"plain": 11, "t": 21}


def test_a_group_is_unstable_while_a_transaction_may_move_its_offsets(client: RawClient) -> None:
    """KIP-447: the next owner of a partition would begin at the old offset, and the transaction then commit."""
    who = client.init("mover")
    commit_offsets(client, who, "stable", 5)
    coordinator = client.connection(client.coordinator("stable", CONSUMER_OFFSETS_TOPIC))
    with pytest.raises(UnstableOffsetCommitError, match=r"group 'stable' .* moves t-0"):
        coordinator.call(OffsetFetchRequest("stable", [("t", 0)], require_stable=True), timeout_ms=5000)
    others = OffsetFetchRequest("stable", [("t", 1)], require_stable=True)
    assert client.ask("stable", others, CONSUMER_OFFSETS_TOPIC) == OffsetFetchResponse([])
    assert offsets_of(client, "stable") == {}, "who only looks does not wait"
    # A later commit of the same partition stands, although the transaction is decided after it.
    later = OffsetCommitRequest("stable", [CommittedOffset("t", 0, 9)])
    assert client.ask("stable", later, CONSUMER_OFFSETS_TOPIC) == EmptyResponse()
    client.end("mover", who, committed=True)
    stable = client.ask("stable", OffsetFetchRequest("stable", require_stable=True), CONSUMER_OFFSETS_TOPIC)
    assert isinstance(stable, OffsetFetchResponse)
    assert [offset.offset for offset in stable.offsets] == [9]


def test_the_next_coordinator_of_a_group_knows_what_is_undecided(
    transactions_cluster: ProcessCluster, client: RawClient, wait_until: WaitUntil
) -> None:
    who = client.init("mover")
    commit_offsets(client, who, "followers", 7)
    coordinator = client.coordinator("followers", CONSUMER_OFFSETS_TOPIC)
    slot = kill(transactions_cluster, client, coordinator, wait_until)
    assert offsets_of(client, "followers") == {}
    client.end("mover", who, committed=True)
    assert offsets_of(client, "followers") == {"t": 7}
    transactions_cluster.launch(slot)
    transactions_cluster.await_live(3)


def slot_of(cluster: ProcessCluster, client: RawClient, broker_id: int) -> int:
    pid = client.pid(broker_id)
    return next(slot for slot in range(3) if cluster.pid(slot) == pid)


def kill(cluster: ProcessCluster, client: RawClient, broker_id: int, wait_until: WaitUntil) -> int:
    """kill -9, and wait until the controller knows; returns the slot."""
    slot = slot_of(cluster, client, broker_id)
    os.kill(cluster.pid(slot), signal.SIGKILL)

    def fenced() -> bool:
        return any(broker.id == broker_id and broker.fenced for broker in client.metadata().brokers)

    wait_until(fenced, "the broker to be fenced")
    return slot


def test_the_next_coordinator_finishes_what_was_decided(
    transactions_cluster: ProcessCluster, client: RawClient, wait_until: WaitUntil
) -> None:
    """The decision is in the log, but its markers cannot be written, because their leader is stopped. Then the
    coordinator is killed."""
    cluster = transactions_cluster
    topic = client.create("decided", partitions=3, replicas=1)
    transactional_id, partition = next(
        (name, number)
        for name in (f"decided-{n}" for n in range(100))
        for number in range(3)
        if client.coordinator(name) != topic.partitions[number].leader
    )
    leader, coordinator = topic.partitions[partition].leader, client.coordinator(transactional_id)
    who = client.init(transactional_id)
    client.append("decided", partition, [b"kept"], who, 0, transactional_id)
    stopped = cluster.pid(slot_of(cluster, client, leader))
    with ThreadPoolExecutor(1) as pool:
        os.kill(stopped, signal.SIGSTOP)
        try:
            ending = pool.submit(client.end, transactional_id, who, committed=True)
            wait_until(lambda: client.describe(transactional_id).state == "PrepareCommit", "the decision")
            slot = slot_of(cluster, client, coordinator)
            os.kill(cluster.pid(slot), signal.SIGKILL)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert ending.result(60) == InitProducerIdResponse(who.producer_id, who.producer_epoch + 1)
    assert client.coordinator(transactional_id) != coordinator
    assert client.read("decided", partition) == [b"kept"]
    cluster.launch(slot)
    cluster.await_live(3)


def test_transactions_survive_the_death_of_a_data_leader(
    transactions_cluster: ProcessCluster, client: RawClient, wait_until: WaitUntil
) -> None:
    client.create("moved", partitions=3, min_insync_replicas=2)
    who = client.init("over-there")
    for partition in range(3):
        client.append("moved", partition, [b"before"], who, 0, "over-there")
    slot = kill(transactions_cluster, client, client.leader("moved", 1), wait_until)
    for partition in range(3):
        client.append("moved", partition, [b"after"], who, 1, "over-there")
        assert client.read("moved", partition) == []
    client.end("over-there", who, committed=True)
    for partition in range(3):
        assert client.read("moved", partition) == [b"before", b"after"]
    transactions_cluster.launch(slot)
    transactions_cluster.await_live(3)


def test_a_deleted_topic_does_not_hold_up_the_transaction(client: RawClient) -> None:
    for name in ("doomed", "spared"):
        client.create(name)
    who = client.init("half")
    for name in ("doomed", "spared"):
        client.append(name, 0, [b"x"], who, 0, "half")
    client.call_any(DeleteTopicRequest("doomed"))
    client.end("half", who, committed=True)
    assert client.read("spared") == [b"x"]


def test_adding_a_partition_that_nobody_knows_is_refused_for_now(client: RawClient) -> None:
    who = client.init("guessing")
    connection = client.connection(client.coordinator("guessing"))
    for topic_id, partition in (("00" * 16, 0), (client.create("known").topic_id, 7)):
        with pytest.raises(SparkBrokerError) as refused:
            connection.call(
                AddPartitionToTransactionRequest("guessing", who.producer_id, who.producer_epoch, topic_id, partition),
                timeout_ms=5000,
            )
        assert refused.value.retriable
    assert client.describe("guessing").state == "Empty"


def test_an_administrator_lists_describes_and_aborts(transactions_cluster: ProcessCluster, client: RawClient) -> None:
    client.create("hanging")
    who = client.init("hangs")
    client.append("hanging", 0, [b"x"], who, 0, "hangs")
    joined = client.join("hanging-app", 3, "run")
    client.append("hanging", 0, [b"y"], joined, 0, "hanging-app")
    with Admin(transactions_cluster.bootstrap_servers) as admin:
        transactions = {transaction.transactional_id: transaction for transaction in admin.list_transactions()}
        assert {transactions["hangs"].state, transactions["hanging-app"].state} == {"Ongoing"}
        assert (transactions["hanging-app"].version, transactions["hanging-app"].execution) == (3, "run")
        described = admin.describe_transaction("hangs")
        assert described.partitions == (TopicPartition("hanging", 0),)
        assert described.writers == ((who.producer_id, who.producer_epoch),)
        assert described.coordinator == client.coordinator("hangs")
        for transactional_id in ("hangs", "hanging-app"):
            admin.abort_transaction(transactional_id)
            assert admin.describe_transaction(transactional_id).state == "Empty"
            with pytest.raises(InvalidTxnStateError):
                admin.abort_transaction(transactional_id)
        with pytest.raises(InvalidProducerIdMappingError):
            admin.describe_transaction("nobody's")
    assert client.read("hanging") == []
    with pytest.raises(TransactionAbortableError):
        client.end("hangs", who, committed=True)
    client.end("hangs", who, committed=False)


def test_the_command_line_shows_transactions_and_aborts_them(
    transactions_cluster: ProcessCluster, client: RawClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.create("listed")
    client.append("listed", 0, [b"x"], client.init("cli-id"), 0, "cli-id")

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["transactions", *arguments, "-b", transactions_cluster.bootstrap_servers])
        return int(ended.value.code or 0), capsys.readouterr().out

    status, out = run("list", "--state", "ongoing", "--output", "json")
    assert status == 0
    assert [transaction["transactional_id"] for transaction in json.loads(out)] == ["cli-id"]
    assert "cli-id" in run("list")[1]
    status, out = run("describe", "--transactional-id", "cli-id")
    assert status == 0
    assert "listed-0" in out
    assert run("abort", "--transactional-id", "cli-id", "--yes")[0] == 0
    status, out = run("describe", "--transactional-id", "cli-id", "--output", "json")
    assert json.loads(out)["state"] == "Empty"
    assert run("abort", "--transactional-id", "cli-id", "--yes")[0] == 1


@pytest.mark.full
def test_everything_is_known_after_the_end_of_all_processes(tmp_path: Path) -> None:
    config = {"transaction.state.log.num.partitions": 2}
    with ProcessCluster(tmp_path, 3, config) as cluster:
        client = RawClient(cluster.bootstrap_servers)
        client.ensure_internal()
        client.create("lasting", min_insync_replicas=2)
        for version in range(5):
            writer = client.join("app", version, "run")
            client.append("lasting", 0, [b"%d" % version], writer, 0, "app")
            client.ask("app", CommitTransactionRequest("app", version, "run", [writer.producer_id]))
        open_ = client.init("open")
        client.append("lasting", 0, [b"undecided"], open_, 0, "open")
    with ProcessCluster(tmp_path, 3, config) as cluster:
        client = RawClient(cluster.bootstrap_servers)
        assert client.describe("app").last_committed == 4
        with pytest.raises(AlreadyCommittedError):
            client.join("app", 4, "another run")
        assert client.describe("open").state == "Ongoing"
        client.end("open", open_, committed=True)
        assert client.read("lasting") == [b"0", b"1", b"2", b"3", b"4", b"undecided"]
