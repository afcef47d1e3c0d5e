"""A broker's transaction coordinator on a real log, without a thread: the test drives every step."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import msgspec
import pytest

from spark_broker.broker import transaction_coordinator
from spark_broker.broker.append import Append
from spark_broker.broker.append_operation import AppendOperation
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.compaction import PartitionCompaction, PassLimits
from spark_broker.broker.internal_records import encode_rows
from spark_broker.broker.log_cleaner import LogCleaner
from spark_broker.broker.marker_writer import MarkerWriter
from spark_broker.broker.partition import Partition
from spark_broker.broker.reply import Answer, Reply
from spark_broker.broker.transaction_coordinator import TransactionCoordinator
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import BrokerState, MetadataImage, PartitionRegistration
from spark_broker.core.transaction_changes import (
    Ended,
    Ending,
    ExecutionStarted,
    Forgotten,
    Initialized,
    OldChange,
    Opened,
    PartitionAdded,
    WriterJoined,
)
from spark_broker.core.transaction_coordinator import CoordinatorRequest
from spark_broker.core.transaction_records import StoredRecord
from spark_broker.errors import (
    AlreadyCommittedError,
    CoordinatorNotAvailableError,
    InconsistentTopicIdError,
    InvalidRequestError,
    InvalidTopicError,
    NetworkError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    ProducerFencedError,
)
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.frame import TRANSACTIONAL
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    AddPartitionToTransactionRequest,
    AddPartitionToTransactionResponse,
    AllocateProducerIdsResponse,
    AppendRequest,
    AppendResponse,
    CommitTransactionRequest,
    DescribeTransactionsRequest,
    EmptyResponse,
    EndTransactionRequest,
    InitProducerIdResponse,
    InitTransactionsRequest,
    JoinTransactionRequest,
    Message,
    TransactionDescription,
    TransactionMarker,
    WriteTransactionMarkersRequest,
    WriteTransactionMarkersResponse,
)
from tests.broker.rig import INTERNAL_TOPIC_ID, KEY, InternalTopicRig, Outcome, batch
from tests.conftest import WaitUntil
from tests.unit.core.old_transaction_records import stored_change

TIMEOUT_MS = 60_000


class CoordinatorRig(InternalTopicRig):
    """It has the topic `t` and one partition of `__transaction_state`."""

    internal_topic = TRANSACTION_STATE_TOPIC
    internal_config: ClassVar = {"cleanup.policy": "compact", "segment.bytes": "4096", "min.cleanable.dirty.ratio": "0"}
    deleted = False
    """The topic `t`."""

    def image(self, state: PartitionRegistration) -> MetadataImage:
        image = super().image(state)
        if not self.deleted:
            return image
        return dataclasses.replace(
            image,
            tombstones=image.tombstones.with_one(KEY[0]),
            topics=MappingProxyType({INTERNAL_TOPIC_ID: image.topics[INTERNAL_TOPIC_ID]}),
            topic_ids=MappingProxyType({self.internal_topic: INTERNAL_TOPIC_ID}),
        )

    def log(self, broker: int = 0) -> Partition:
        return self.brokers[broker].manager.partition(INTERNAL_TOPIC_ID, 0)

    def append(self, rows: list[StoredRecord]) -> None:
        """As the earlier version did."""
        topic, outcome = self.log().topic, Outcome()
        message = encode_rows(rows, topic.schemas[-1], topic.schema_id, 0)
        self.log().append(Append(message, 0, -1, 0, SYSTEM_CLOCK.boottime_ms() + 30_000), outcome)
        assert outcome.future.result(5) >= 0

    def compact(self) -> bool:
        """Whether there was something to compact."""
        cleaner = LogCleaner(self.brokers[0].manager, ClusterConfig())
        partition = cleaner.next_pass()
        if partition is None:
            return False
        assert partition is self.log()
        for _ in cleaner.steps(partition):
            pass
        return True

    def rows(self) -> int:
        return sum(header.row_count for header in self.log().log.headers(0))


class FakePeers:
    """Takes requests to other brokers and never answers by itself."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message, Reply]] = []
        self.ids = 0

    def send(self, broker: BrokerState, request: Message, timeout_ms: int, answered: Reply) -> None:
        del timeout_ms
        self.sent.append((broker.id, request, answered))

    def allocate_producer_ids(self, answered: Reply) -> None:
        answered(AllocateProducerIdsResponse(self.ids, 1000))
        self.ids += 1000


class Coordinator:
    """A broker's coordinator, and the answers that it has given."""

    def __init__(self, rig: CoordinatorRig, broker_id: int) -> None:
        self.rig = rig
        self.broker = rig.brokers[broker_id]
        self.peers = FakePeers()
        self.woken = 0
        self.shell = TransactionCoordinator(
            self.broker.manager,
            rig.settings.cluster,
            self.peers,
            MarkerWriter(self.broker.manager),
            wake=self._wake,
        )
        self.shell.tick()

    def _wake(self) -> None:
        self.woken += 1

    def send(self, request: CoordinatorRequest) -> list[Answer]:
        """Send a request; the answer appears in the list."""
        answers: list[Answer] = []
        self.shell.handle(request, SYSTEM_CLOCK.boottime_ms() + 60_000, answers.append)
        return answers

    def ask(self, request: CoordinatorRequest) -> Answer:
        (answer,) = self.send(request)
        return answer

    def init(self, transactional_id: str = "id") -> InitProducerIdResponse:
        answer = self.ask(InitTransactionsRequest(transactional_id, TIMEOUT_MS))
        assert isinstance(answer, InitProducerIdResponse), answer
        return answer

    def join(self, application: str, version: int) -> InitProducerIdResponse:
        answer = self.ask(JoinTransactionRequest(application, version, "run", TIMEOUT_MS))
        assert isinstance(answer, InitProducerIdResponse), answer
        return answer

    def add(self, transactional_id: str, who: InitProducerIdResponse) -> None:
        request = AddPartitionToTransactionRequest(transactional_id, who.producer_id, who.producer_epoch, *KEY)
        assert isinstance(self.ask(request), AddPartitionToTransactionResponse)

    def described(self) -> list[TransactionDescription]:
        """By id, without the time since each was last used."""
        self.shell.tick()
        answer = self.shell.describe(DescribeTransactionsRequest(None))
        transactions = sorted(answer.transactions, key=lambda one: one.transactional_id)
        return [msgspec.structs.replace(transaction, idle_ms=0) for transaction in transactions]

    def pump_until(self, condition: list[Answer], wait_until: WaitUntil) -> Answer:
        def answered() -> bool:
            self.shell.tick()
            return bool(condition)

        wait_until(answered, "an answer")
        return condition[0]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[CoordinatorRig]:
    rig = CoordinatorRig(tmp_path, 2)
    yield rig
    rig.stop()


def alone(rig: CoordinatorRig) -> Coordinator:
    """Broker 0 has the only replica of everything, so commits happen at once."""
    rig.state = dataclasses.replace(rig.state, replicas=(0,), isr=(0,))
    rig.move_log(0, replicas=(0,), isr=(0,))
    return Coordinator(rig, 0)


def test_with_one_replica_everything_happens_in_the_callers_thread(rig: CoordinatorRig) -> None:
    coordinator = alone(rig)
    who = coordinator.init()
    adding = AddPartitionToTransactionRequest("id", who.producer_id, who.producer_epoch, *KEY)
    assert isinstance(coordinator.ask(adding), AddPartitionToTransactionResponse)
    ended = coordinator.ask(EndTransactionRequest("id", who.producer_id, who.producer_epoch, True))
    assert ended == InitProducerIdResponse(who.producer_id, who.producer_epoch + 1)
    assert rig.brokers[0].partition.log.log_end_offset == 1, "the marker is written"


def test_an_append_waits_for_its_partition_to_be_added(rig: CoordinatorRig) -> None:
    coordinator = alone(rig)
    who = coordinator.init()
    partition = rig.brokers[0].partition
    answers: queue.SimpleQueue[AppendResponse] = queue.SimpleQueue()

    def append(sequence: int, *, acks: int = -1, transactional_id: str = "id") -> AppendOperation:
        request = AppendRequest(sequence, partition.topic.topic_id, 0, 0, acks, 10_000, 0, transactional_id)
        message = encode_batch(
            batch(b"x"),
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            base_sequence=sequence,
            attributes=TRANSACTIONAL,
        )
        manager = rig.brokers[0].manager
        return AppendOperation(manager, request, message, SYSTEM_CLOCK.boottime_ms(), answers.put)

    first = append(0)
    question = first.try_answer()
    assert question is not None
    assert (question.partition, question.transactional_id) == (partition, "id")
    adding = AddPartitionToTransactionRequest("id", who.producer_id, who.producer_epoch, *KEY)
    assert isinstance(coordinator.ask(adding), AddPartitionToTransactionResponse)
    assert first.try_answer() is not None, "the partition has not heard of it"
    partition.confirm(question.awaited)
    assert first.try_answer() is None
    assert append(1, acks=0).try_answer() is None, "one question for each transaction"
    assert answers.get(timeout=5) == AppendResponse(0, 0, "", 0)
    coordinator.ask(EndTransactionRequest("id", who.producer_id, who.producer_epoch, True))
    who = InitProducerIdResponse(who.producer_id, who.producer_epoch + 1)
    assert append(0, transactional_id="").try_answer() is None
    assert answers.get(timeout=5).error_code == InvalidRequestError.code


def test_nothing_is_answered_before_the_replicas_have_it(rig: CoordinatorRig, wait_until: WaitUntil) -> None:
    rig.publish(0)  # broker 1 does not follow yet
    coordinator = Coordinator(rig, 0)
    answers = coordinator.send(InitTransactionsRequest("id", TIMEOUT_MS))
    coordinator.shell.tick()
    assert answers == []
    rig.publish(1)
    assert isinstance(coordinator.pump_until(answers, wait_until), InitProducerIdResponse)
    assert coordinator.woken > 0


def test_a_shard_whose_append_is_in_doubt_is_loaded_anew_once_the_log_is_certain(
    rig: CoordinatorRig, wait_until: WaitUntil
) -> None:
    """The lease ends before the replicas have the record, and comes back. The record counts; its answer was lost."""
    rig.publish(0)
    coordinator = Coordinator(rig, 0)
    broker = rig.brokers[0]
    answers = coordinator.send(InitTransactionsRequest("id", TIMEOUT_MS))
    later = coordinator.send(InitTransactionsRequest("other", TIMEOUT_MS))
    broker.lease.session_lost()
    rig.publish(1)
    assert isinstance(coordinator.pump_until(answers, wait_until), NotLeaderOrFollowerError)
    assert isinstance(coordinator.pump_until(later, wait_until), NotLeaderOrFollowerError)
    broker.lease.extend(SYSTEM_CLOCK.boottime_ms(), 3_600_000)
    again: list[Answer] = []

    def recovered() -> bool:
        answer = coordinator.pump_until(coordinator.send(InitTransactionsRequest("id", TIMEOUT_MS)), wait_until)
        again.append(answer)
        return isinstance(answer, InitProducerIdResponse)

    wait_until(recovered, "the shard to be loaded again")
    assert again[-1] == InitProducerIdResponse(0, 1), "the record in doubt gave epoch 0 to somebody"


def test_the_next_leader_has_what_was_committed_and_the_old_one_refuses(
    rig: CoordinatorRig, wait_until: WaitUntil
) -> None:
    rig.publish()
    first, second = Coordinator(rig, 0), Coordinator(rig, 1)
    assert isinstance(second.ask(InitTransactionsRequest("id", TIMEOUT_MS)), NotLeaderOrFollowerError)
    who = first.pump_until(first.send(InitTransactionsRequest("id", TIMEOUT_MS)), wait_until)
    assert isinstance(who, InitProducerIdResponse)
    adding = AddPartitionToTransactionRequest("id", who.producer_id, who.producer_epoch, *KEY)
    assert isinstance(first.pump_until(first.send(adding), wait_until), AddPartitionToTransactionResponse)
    rig.move_log(leader=1, leader_epoch=1, partition_epoch=1)
    assert isinstance(first.ask(adding), NotLeaderOrFollowerError)
    with pytest.raises(NotLeaderOrFollowerError):
        first.shell.describe(DescribeTransactionsRequest(["id"]))

    def loaded() -> bool:
        second.shell.tick()
        transactions = second.shell.describe(DescribeTransactionsRequest(None)).transactions
        return [(transaction.transactional_id, transaction.state) for transaction in transactions] == [
            ("id", "Ongoing")
        ]

    wait_until(loaded, "the next leader to load the shard")
    first.shell.tick()
    assert first.shell.describe(DescribeTransactionsRequest(None)).transactions == []


def test_markers_go_to_other_leaders_in_one_request_each_until_they_are_written(
    rig: CoordinatorRig, wait_until: WaitUntil
) -> None:
    rig.state = dataclasses.replace(rig.state, leader=1)
    rig.move_log(replicas=(0,), isr=(0,))
    coordinator = Coordinator(rig, 0)
    who = coordinator.init()
    adding = AddPartitionToTransactionRequest("id", who.producer_id, who.producer_epoch, *KEY)
    assert isinstance(coordinator.ask(adding), AddPartitionToTransactionResponse)
    ended = coordinator.send(EndTransactionRequest("id", who.producer_id, who.producer_epoch, False))
    coordinator.shell.tick()
    (broker_id, request, answered), *others = coordinator.peers.sent
    assert (broker_id, others, ended) == (1, [], [])
    marker = TransactionMarker(who.producer_id, who.producer_epoch + 1, False, [KEY])
    assert request == WriteTransactionMarkersRequest([marker])
    answered(NetworkError("lost"))

    def sent_again() -> bool:
        coordinator.shell.tick()
        return len(coordinator.peers.sent) == 2

    wait_until(sent_again, "another attempt")
    written: list[WriteTransactionMarkersResponse] = []
    MarkerWriter(rig.brokers[1].manager).write(
        WriteTransactionMarkersRequest([marker]), SYSTEM_CLOCK.boottime_ms() + 30_000, written.append
    )
    wait_until(lambda: written, "the marker to be committed")
    coordinator.peers.sent[1][2](written[0])
    answer = coordinator.pump_until(ended, wait_until)
    assert answer == InitProducerIdResponse(who.producer_id, who.producer_epoch + 1)


def test_a_deleted_topic_ends_a_version_with_many_writers_and_not_a_producers_transaction(rig: CoordinatorRig) -> None:
    """As in Kafka, a producer's transaction commits what is left. A version is committed as a whole."""
    coordinator = alone(rig)
    who, joined = coordinator.init(), coordinator.join("app", 1)
    coordinator.add("id", who)
    coordinator.add("app", joined)
    rig.deleted = True
    rig.publish(0)
    coordinator.shell.tick()
    version = ("app", 1, "run")
    refused = coordinator.ask(CommitTransactionRequest(*version, [joined.producer_id]))
    assert isinstance(refused, InconsistentTopicIdError)
    aborted = coordinator.send(AbortTransactionRequest(*version))
    committed = coordinator.send(EndTransactionRequest("id", who.producer_id, who.producer_epoch, True))
    coordinator.shell.tick()
    following = InitProducerIdResponse(who.producer_id, who.producer_epoch + 1)
    assert (aborted, committed) == ([EmptyResponse()], [following])


def test_a_compacted_log_says_the_same_while_transactions_are_open(rig: CoordinatorRig) -> None:
    coordinator = alone(rig)
    who = coordinator.init("open")
    coordinator.add("open", who)
    joined = [coordinator.join("app", 1) for _ in range(3)]
    coordinator.add("app", joined[0])
    for number in range(30):
        identity = coordinator.init(f"id-{number % 3}")
        coordinator.add(f"id-{number % 3}", identity)
        coordinator.ask(EndTransactionRequest(f"id-{number % 3}", identity.producer_id, identity.producer_epoch, True))
    before, described = rig.rows(), coordinator.described()
    assert rig.compact()
    assert rig.rows() < before // 3
    successor = Coordinator(rig, 0)
    assert coordinator.described() == successor.described() == described
    assert [one.state for one in described] == ["Ongoing", "Empty", "Empty", "Empty", "Ongoing"]
    winners = [joined[0].producer_id, joined[1].producer_id]
    assert successor.ask(CommitTransactionRequest("app", 1, "run", winners)) == EmptyResponse()
    ended = successor.ask(EndTransactionRequest("open", who.producer_id, who.producer_epoch, True))
    assert ended == InitProducerIdResponse(who.producer_id, who.producer_epoch + 1)


def old_log() -> list[StoredRecord]:
    """Of an earlier version: an open transaction, fenced epochs, a committed version, known executions, and more."""
    topic, number = KEY
    changes: list[tuple[str, OldChange]] = [
        ("open", Initialized(5, 3, TIMEOUT_MS)),
        ("open", PartitionAdded(5, topic, number)),
        ("app", ExecutionStarted("first")),
        ("app", Opened(7, "first", TIMEOUT_MS)),
        ("app", WriterJoined(6)),
        ("app", PartitionAdded(6, topic, number)),
        ("app", Ending(True, (6,))),
        ("app", Ended()),
        ("app", ExecutionStarted("second")),
        ("app", Opened(8, "second", TIMEOUT_MS)),
        ("app", WriterJoined(8)),
        ("gone", Initialized(9, 0, TIMEOUT_MS)),
        ("gone", Forgotten()),
    ]
    return [stored_change(transactional_id, change) for transactional_id, change in changes]


def check_described(coordinator: Coordinator) -> None:
    described = {one.transactional_id: one for one in coordinator.described()}
    assert {name: one.state for name, one in described.items()} == {"open": "Ongoing", "app": "Ongoing"}
    assert (described["open"].writers, described["open"].partitions) == ([(5, 3)], [KEY])
    assert (described["app"].version, described["app"].last_committed, described["app"].writers) == (8, 7, [(8, 0)])


def check_taken_over(coordinator: Coordinator) -> None:
    check_described(coordinator)
    refused = coordinator.ask(JoinTransactionRequest("app", 8, "first", TIMEOUT_MS))
    assert isinstance(refused, ProducerFencedError)
    assert isinstance(coordinator.ask(JoinTransactionRequest("app", 7, "third", TIMEOUT_MS)), AlreadyCommittedError)
    zombie = AddPartitionToTransactionRequest("open", 5, 2, *KEY)
    assert isinstance(coordinator.ask(zombie), ProducerFencedError)


def test_a_log_of_an_earlier_version_is_taken_over_once(rig: CoordinatorRig) -> None:
    rig.state = dataclasses.replace(rig.state, replicas=(0,), isr=(0,))
    rig.move_log(0, replicas=(0,), isr=(0,))
    for record in old_log():
        rig.append([record])
    old_end = rig.log().log.log_end_offset
    coordinator = Coordinator(rig, 0)
    check_taken_over(coordinator)
    start, end = rig.log().reader.offsets(0)
    assert old_end == start < end, "what is older is removed"
    check_taken_over(Coordinator(rig, 0))
    assert rig.log().reader.offsets(0) == (start, end), "it is taken over once"
    assert coordinator.ask(EndTransactionRequest("open", 5, 3, True)) == InitProducerIdResponse(5, 4)
    assert coordinator.ask(CommitTransactionRequest("app", 8, "second", [8])) == EmptyResponse()
    described = {one.transactional_id: one for one in Coordinator(rig, 0).described()}
    assert {name: one.state for name, one in described.items()} == {"open": "Empty", "app": "Empty"}
    assert described["app"].last_committed == 8


def test_a_log_of_an_earlier_version_is_not_compacted_before_it_is_taken_over(rig: CoordinatorRig) -> None:
    """Its records say only what has changed: compaction would leave the last change of each id."""
    rig.state = dataclasses.replace(rig.state, replicas=(0,), isr=(0,))
    rig.move_log(0, replicas=(0,), isr=(0,))
    for record in old_log():
        rig.append([record])
    assert PartitionCompaction(rig.log(), PassLimits(1 << 20, 0), SYSTEM_CLOCK).due(), "but for its records"
    assert not rig.compact()
    coordinator = Coordinator(rig, 0)
    for _ in range(30):
        coordinator.init("more")
    assert rig.compact()
    described = coordinator.described()
    assert [one.transactional_id for one in described] == ["app", "more", "open"]
    assert Coordinator(rig, 0).described() == described


def test_followers_of_a_log_that_was_taken_over_lose_its_old_part_and_may_lead(
    rig: CoordinatorRig, wait_until: WaitUntil
) -> None:
    rig.publish()
    for record in old_log():
        rig.append([record])
    first, second = Coordinator(rig, 0), Coordinator(rig, 1)

    def removed() -> bool:
        first.shell.tick()
        return rig.log(0).replica.log_start_offset == rig.log(1).replica.log_start_offset == len(old_log())

    wait_until(removed, "both replicas to begin with what was stored anew")
    rig.move_log(leader=1, leader_epoch=1, partition_epoch=1)
    wait_until(lambda: len(second.described()) == 2, "the next leader to load the shard")
    assert rig.log(1).replica.log_start_offset == len(old_log())
    check_described(second)


def test_a_log_of_an_earlier_version_is_not_used_while_it_cannot_be_taken_over(
    rig: CoordinatorRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was appended to it meanwhile would be undone by its own old records."""
    rig.state = dataclasses.replace(rig.state, replicas=(0,), isr=(0,))
    rig.move_log(0, replicas=(0,), isr=(0,))
    for record in old_log():
        rig.append([record])

    def refuse(*_: object) -> None:
        raise NotEnoughReplicasError("the ISR is too small")

    with monkeypatch.context() as patch:
        patch.setattr(Partition, "append", refuse)
        coordinator = Coordinator(rig, 0)
        answer = coordinator.ask(InitTransactionsRequest("id", TIMEOUT_MS))
        assert isinstance(answer, CoordinatorNotAvailableError)
        assert coordinator.described() == []
    check_taken_over(coordinator)


def test_the_coordinators_own_log_takes_no_part_in_transactions(rig: CoordinatorRig) -> None:
    coordinator = alone(rig)
    who = coordinator.init()
    adding = AddPartitionToTransactionRequest("id", who.producer_id, who.producer_epoch, INTERNAL_TOPIC_ID, 0)
    assert isinstance(coordinator.ask(adding), InvalidTopicError)
    written: list[WriteTransactionMarkersResponse] = []
    marker = TransactionMarker(who.producer_id, who.producer_epoch + 1, True, [(INTERNAL_TOPIC_ID, 0)])
    MarkerWriter(rig.brokers[0].manager).write(WriteTransactionMarkersRequest([marker]), 0, written.append)
    assert [result.error_code for result in written[0].results] == [InvalidTopicError.code]


def test_an_append_that_the_log_refuses_changes_nothing(rig: CoordinatorRig) -> None:
    coordinator = alone(rig)
    who = coordinator.init()
    rig.brokers[0].lease.session_lost()
    adding = AddPartitionToTransactionRequest("id", who.producer_id, who.producer_epoch, *KEY)
    assert isinstance(coordinator.ask(adding), CoordinatorNotAvailableError)
    rig.brokers[0].lease.extend(SYSTEM_CLOCK.boottime_ms(), 3_600_000)
    (transaction,) = coordinator.shell.describe(DescribeTransactionsRequest(["id"])).transactions
    assert (transaction.state, transaction.partitions) == ("Empty", [])


def test_producer_ids_do_not_run_out_between_two_ticks(rig: CoordinatorRig) -> None:
    """All tasks of a job join at once, and a block has fewer ids."""
    coordinator = alone(rig)
    answers = [coordinator.ask(JoinTransactionRequest("app", 1, "run", TIMEOUT_MS)) for _ in range(1500)]
    assert {type(answer) for answer in answers} == {InitProducerIdResponse}
    assert len(set(answers)) == 1500


def test_requests_that_wait_are_bounded(rig: CoordinatorRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_coordinator, "REQUESTS_MAX", 3)
    rig.publish(0)  # nothing is committed, because broker 1 does not follow
    coordinator = Coordinator(rig, 0)
    waiting = [coordinator.send(InitTransactionsRequest(f"id-{n}", TIMEOUT_MS)) for n in range(3)]
    assert waiting == [[], [], []]
    assert isinstance(coordinator.ask(InitTransactionsRequest("id-4", TIMEOUT_MS)), CoordinatorNotAvailableError)
    rig.move_log(0, leader=1, leader_epoch=1, partition_epoch=1)
    coordinator.shell.tick()
    assert all(isinstance(answer, NotLeaderOrFollowerError) for (answer,) in waiting)
