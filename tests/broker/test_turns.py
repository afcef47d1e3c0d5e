"""A turn is bounded: work that grows with what a client sends gives way between its pieces."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

import pytest

from spark_broker.broker import request_queue
from spark_broker.broker.group_coordinator import GroupCoordinator
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Answer
from spark_broker.broker.request_queue import RequestKind, RequestQueue
from spark_broker.broker.requests import BrokerRequests
from spark_broker.broker.service import BrokerService
from spark_broker.broker.transaction_service import TransactionService
from spark_broker.config import ClusterConfig
from spark_broker.controller.describe import describe
from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage, PartitionRegistration, TopicState
from spark_broker.errors import CoordinatorNotAvailableError, NotControllerError
from spark_broker.protocol.messages import (
    CallRequest,
    CommittedOffset,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteTopicRequest,
    EmptyResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetCommitRequest,
)
from spark_broker.transport.answer_room import MAKING_BYTES, ConnectionAnswers, handling
from spark_broker.transport.byte_budget import ByteBudget
from spark_broker.transport.client import Connection
from tests.broker.lone_partition import LonePartition
from tests.broker.rig import KEY, Rig
from tests.support.waiting import eventually

PIECES = 20
LOOK_UPS = ListOffsetsRequest([ListOffsetsPartition(*KEY, -1, "latest")] * PIECES)


class LoneManager:
    """A broker's replicas: one partition, for every key. `at_each` is called at each look-up."""

    def __init__(self, partition: Partition, at_each: Callable[[], object] = lambda: None) -> None:
        self._partition = partition
        self._at_each = at_each
        self.image: MetadataImage = replace(EMPTY_IMAGE, cluster_id="c")

    def partition(self, topic_id: str, number: int) -> Partition:
        del topic_id, number
        self._at_each()
        return self._partition


@pytest.fixture
def lone(tmp_path: Path) -> LonePartition:
    return LonePartition(tmp_path / "t-0")


def requests_of(lone: LonePartition, at_each: Callable[[], object] = lambda: None) -> BrokerRequests:
    return requests_over(LoneManager(lone.partition, at_each))


def requests_over(lone: LoneManager) -> BrokerRequests:
    manager = cast("ReplicaManager", lone)
    return BrokerRequests(
        manager, GroupCoordinator(manager, ClusterConfig()), lambda *_: False, lambda _, reply: reply(EmptyResponse())
    )


@pytest.mark.parametrize(
    "request_",
    [
        LOOK_UPS,
        DeleteRecordsRequest([DeleteRecordsPartition(*KEY, -1, 0)] * PIECES),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_call_about_many_partitions_may_give_way_at_each(lone: LonePartition, request_: CallRequest) -> None:
    ways, answers = list[None](), list[Answer]()
    requests_of(lone).answer(request_, answers.append, lambda: ways.append(None))
    assert len(answers) == 1
    assert len(ways) >= PIECES


def test_a_commit_of_many_offsets_may_give_way_at_each(lone: LonePartition) -> None:
    ways = list[None]()
    commit = OffsetCommitRequest("g", [CommittedOffset("t", number, 0) for number in range(PIECES)])
    state = PartitionRegistration((0,), (0,), leader=0, leader_epoch=0, partition_epoch=0)
    topic = TopicState("t", KEY[0], MappingProxyType({}), partitions=(state,) * PIECES)
    manager = LoneManager(lone.partition)
    manager.image = replace(
        EMPTY_IMAGE, topics=MappingProxyType({KEY[0]: topic}), topic_ids=MappingProxyType({"t": KEY[0]})
    )
    requests = requests_over(manager)
    # Here the coordinator has no topic: it looks for it after the work, because it may lose it meanwhile.
    with pytest.raises(CoordinatorNotAvailableError):
        requests.answer(commit, lambda _: None, lambda: ways.append(None))
    assert len(ways) >= PIECES


def test_a_description_of_many_topics_may_give_way_at_each_and_has_no_topic_twice(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1)
    ways = list[None]()
    response = describe(rig.image(rig.state), ["t"] * 10_000 + ["absent"], lambda: ways.append(None))
    assert [topic.name for topic in response.topics] == ["t"]
    assert len(ways) == 1
    rig.stop()


def test_an_append_has_its_turn_while_a_call_about_many_partitions_goes_on(
    lone: LonePartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "TURN_MAX_S", 0.0)
    queue, order = RequestQueue(1, 10), list[str]()
    append = _Waiting(queue, order)

    def at_each() -> None:
        order.append("looked up")
        append.begin_once()

    manager = cast("ReplicaManager", LoneManager(lone.partition, at_each))
    transactions = cast("TransactionService", _NoTransactions())
    service = BrokerService(
        manager,
        GroupCoordinator(manager, ClusterConfig()),
        transactions,
        Connection("127.0.0.1", 1),
        1000,
        queue,
        queue,
    )
    answer = service.answer(LOOK_UPS)
    append.join()
    assert isinstance(answer, ListOffsetsResponse)
    assert len(answer.partitions) == PIECES
    assert order.index("appended") == 1, "it had to wait for the end of the call"
    assert (queue.working, queue.waiting) == (0, 0)


@pytest.mark.parametrize(("request_", "counts"), [(LOOK_UPS, MAKING_BYTES), (DeleteTopicRequest("t"), 0)])
def test_a_call_that_may_wait_for_the_controller_keeps_no_room_for_its_answer(
    lone: LonePartition, request_: CallRequest, counts: int
) -> None:
    """Story: administrative calls, each at most for as long as the controller thinks, would keep all others waiting."""
    manager = cast("ReplicaManager", LoneManager(lone.partition))
    queue = RequestQueue(1, 10)
    service = BrokerService(
        manager,
        GroupCoordinator(manager, ClusterConfig()),
        cast("TransactionService", _NoTransactions()),
        Connection("127.0.0.1", 1),
        1000,
        queue,
        queue,
    )
    room = ConnectionAnswers(ByteBudget(MAKING_BYTES), lambda: None).begin("me")
    assert room is not None
    handling(room)
    try:
        with contextlib.suppress(NotControllerError):
            service.answer(request_)
    finally:
        handling(None)
    assert room.bytes == counts


def test_a_fetch_of_many_partitions_gives_way_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "TURN_MAX_S", 0.0)
    rig = Rig(tmp_path, 1)
    rig.publish(isr=(0,), replicas=(0,))
    leader = rig.brokers[0]
    order = list[str]()
    append = _Waiting(leader.queue, order)
    look_up = leader.manager.partition

    def partition(topic_id: str, number: int) -> Partition:
        order.append("read")
        append.begin_once()
        return look_up(topic_id, number)

    monkeypatch.setattr(leader.manager, "partition", partition)
    stream = Connection("127.0.0.1", leader.server.port).open_stream("fetch")
    stream.send(FetchRequest(8, 0, 1, 1 << 20, [FetchPartition(*KEY, 0, 0, 1 << 20)] * PIECES))
    response, _ = stream.receive(timeout_ms=20_000)
    append.join()
    assert isinstance(response, FetchResponse)
    assert len(response.partitions) == PIECES
    assert order.index("appended") == 1
    monkeypatch.undo()
    rig.stop()


class _NoTransactions:
    @property
    def requests(self) -> _NoTransactions:
        return self

    def answer(self, *_: object) -> bool:
        return False


class _Waiting:
    """An append that waits for its turn from `begin_once` on, and then has it for a moment."""

    def __init__(self, queue: RequestQueue, order: list[str]) -> None:
        self._queue = queue
        self._order = order
        self._thread: threading.Thread | None = None

    def begin_once(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._append, daemon=True)
            self._thread.start()
            eventually(lambda: self._queue.waiting == 1)

    def _append(self) -> None:
        with self._queue.turn(RequestKind.APPEND, 30.0):
            self._order.append("appended")

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(30.0)
