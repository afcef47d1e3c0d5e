"""A broker with more clients than it can serve: followers go on; clients wait, and then get an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_broker.broker.request_queue import RequestKind
from spark_broker.config import TopicConfig
from spark_broker.errors import ThrottlingQuotaExceededError
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.messages import (
    AppendRequest,
    AppendResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
)
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream
from tests.broker.rig import KEY, Rig, RigBroker, batch
from tests.support.waiting import eventually

WAIT_MS = 20_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, topic=TopicConfig(min_insync_replicas=2))
    rig.publish()
    yield rig
    rig.stop()


def open_stream(broker: RigBroker, kind: str) -> tuple[Connection, ClientStream]:
    connection = Connection("127.0.0.1", broker.server.port)
    return connection, connection.open_stream(kind)


def append(stream: ClientStream, value: bytes, *, timeout_ms: int, acks: int = -1) -> None:
    stream.send(AppendRequest(7, *KEY, 0, acks, timeout_ms), encode_batch(batch(value)))


def answer(stream: ClientStream) -> AppendResponse:
    response, _ = stream.receive(timeout_ms=WAIT_MS)
    assert isinstance(response, AppendResponse)
    return response


def fetch(stream: ClientStream) -> None:
    stream.send(FetchRequest(8, 0, 1, 1 << 20, [FetchPartition(*KEY, 0, 0, 1 << 20)]))


def fetched(stream: ClientStream) -> int:
    """The error code of the fetch's answer."""
    response, _ = stream.receive(timeout_ms=WAIT_MS)
    assert isinstance(response, FetchResponse)
    return response.partitions[0].error_code


def test_followers_copy_what_is_appended_while_clients_have_every_turn(rig: Rig) -> None:
    with rig.brokers[0].queue.turn(RequestKind.FETCH, 0.0):
        assert [rig.brokers[0].append(b"x", epoch=0).result(20) for _ in range(5)] == [0, 1, 2, 3, 4]


def test_an_append_whose_turn_does_not_come_is_refused_before_its_client_gives_up_and_nothing_is_stored(
    rig: Rig,
) -> None:
    leader = rig.brokers[0]
    _connection, stream = open_stream(leader, "append")
    with leader.queue.turn(RequestKind.FETCH, 0.0):
        append(stream, b"refused", timeout_ms=200)
        assert answer(stream).error_code == ThrottlingQuotaExceededError.code
    append(stream, b"stored", timeout_ms=WAIT_MS)
    assert answer(stream).error_code == 0
    assert leader.values() == [b"stored"]


def test_an_append_waits_for_its_turn(rig: Rig) -> None:
    leader = rig.brokers[0]
    _connection, stream = open_stream(leader, "append")
    with leader.queue.turn(RequestKind.FETCH, 0.0):
        append(stream, b"x", timeout_ms=WAIT_MS)
        eventually(lambda: leader.queue.waiting == 1)
        assert leader.partition.log.log_end_offset == 0
    assert answer(stream).error_code == 0


def test_of_fetches_too_one_more_than_may_wait_is_throttled_and_its_stream_goes_on(rig: Rig) -> None:
    leader = rig.brokers[0]
    (_one, first), (_other, second) = open_stream(leader, "fetch"), open_stream(leader, "fetch")
    with leader.queue.turn(RequestKind.APPEND, 0.0):
        fetch(first)
        eventually(lambda: leader.queue.waiting == 1)
        fetch(second)
        assert fetched(second) == ThrottlingQuotaExceededError.code
    assert fetched(first) == 0
    fetch(second)
    assert fetched(second) == 0


def test_a_client_that_takes_nothing_of_its_answer_has_no_turn_meanwhile(rig: Rig) -> None:
    leader = rig.brokers[0]
    for _ in range(30):
        leader.append(bytes(1_000_000), epoch=0).result(20)
    _stalled, stream = open_stream(leader, "fetch")
    for _ in range(4):
        stream.send(FetchRequest(8, 0, 1, 50 << 20, [FetchPartition(*KEY, 0, 0, 50 << 20)]))
    _connection, other = open_stream(leader, "append")
    append(other, b"x", timeout_ms=WAIT_MS)
    assert answer(other).error_code == 0
    stream.close()
