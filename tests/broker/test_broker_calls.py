"""Calls between brokers: a destination that does not answer delays only its own calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from spark_broker.broker import broker_calls
from spark_broker.broker.awaited_answer import AwaitedAnswer
from spark_broker.broker.broker_calls import BrokerCalls
from spark_broker.controller.image import BrokerState
from spark_broker.errors import NetworkError, NotControllerError, NoThreadError, RequestTimedOutError
from spark_broker.protocol.messages import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    EmptyResponse,
    Message,
    MetadataRequest,
)
from tests.conftest import WaitUntil

WAIT_MS = 20_000


def broker(number: int, port: int = 9000) -> BrokerState:
    return BrokerState(number, 1, "d", "i", 1, f"host-{number}", port, None, "m", "e", 0, 0, 0, "clean", fenced=False)


class FakeConnection:
    """Answers with Empty; the frozen host answers once the test sets `thaw`."""

    made: list[FakeConnection]
    thaw: threading.Event

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.address = f"{host}:{port}"
        self.requests: list[Message] = []
        self.made.append(self)

    def call(self, request: Message, *, timeout_ms: int) -> Message:
        self.requests.append(request)
        if self.host == "host-0" and not self.thaw.wait(timeout_ms / 1000):
            raise RequestTimedOutError(self.address)
        if isinstance(request, AllocateProducerIdsRequest):
            if request.broker_epoch < 0:
                raise NotControllerError("no")
            return AllocateProducerIdsResponse(5, 10)
        return EmptyResponse()


@pytest.fixture
def calls() -> Iterator[BrokerCalls]:
    FakeConnection.made, FakeConnection.thaw = [], threading.Event()
    bugs: list[BaseException] = []
    sender = BrokerCalls(
        SimpleNamespace(broker_id=7, broker_epoch=3),  # type: ignore[arg-type]
        FakeConnection("controller", 1),  # type: ignore[arg-type]
        1000,
        bugs.append,
        FakeConnection,  # type: ignore[arg-type]
    )
    sender.start()
    yield sender
    FakeConnection.thaw.set()
    sender.stop()
    assert bugs == []


def test_a_frozen_broker_does_not_hold_up_calls_to_another(calls: BrokerCalls) -> None:
    frozen, other = AwaitedAnswer(), AwaitedAnswer()
    calls.send(broker(0), MetadataRequest(), WAIT_MS, frozen)
    calls.send(broker(1), MetadataRequest(), WAIT_MS, other)
    assert other.wait(WAIT_MS) == EmptyResponse()
    assert calls.call(broker(2), MetadataRequest(), WAIT_MS) == EmptyResponse()
    with pytest.raises(RequestTimedOutError):
        frozen.wait(0)
    FakeConnection.thaw.set()
    assert frozen.wait(WAIT_MS) == EmptyResponse()


def test_an_error_is_the_answer(calls: BrokerCalls) -> None:
    answer = AwaitedAnswer()
    calls.send(broker(0), MetadataRequest(), 1, answer)
    with pytest.raises(RequestTimedOutError):
        answer.wait(WAIT_MS)


def test_calls_that_wait_are_bounded(calls: BrokerCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_calls, "QUEUED_CALLS_MAX", 3)
    answers = [AwaitedAnswer() for _ in range(10)]
    for answer in answers:
        calls.send(broker(0), MetadataRequest(), WAIT_MS, answer)
    refused = 0
    for answer in answers[-5:]:
        with pytest.raises(NetworkError):
            answer.wait(WAIT_MS)
        refused += 1
    assert refused == 5
    FakeConnection.thaw.set()
    assert answers[0].wait(WAIT_MS) == EmptyResponse()


def test_a_broker_that_comes_back_elsewhere_is_called_there(calls: BrokerCalls) -> None:
    for port in (9000, 9000, 9001):
        answer = AwaitedAnswer()
        calls.send(broker(1, port), MetadataRequest(), WAIT_MS, answer)
        assert answer.wait(WAIT_MS) == EmptyResponse()
    ports = [
        (connection.port, len(connection.requests)) for connection in FakeConnection.made if connection.host == "host-1"
    ]
    assert ports == [(9000, 2), (9001, 1)]


def test_a_call_whose_thread_has_just_ended_is_answered(calls: BrokerCalls, wait_until: WaitUntil) -> None:
    """Story: a marker was handed to a thread that had been replaced. Nobody answered, and no more markers were sent to
    that broker.
    """

    def call(port: int) -> AwaitedAnswer:
        answer = AwaitedAnswer()
        calls.send(broker(1, port), MetadataRequest(), WAIT_MS, answer)
        answer.wait(WAIT_MS)
        return answer

    call(9000)
    replaced = calls._callers[1]
    call(9001)
    wait_until(lambda: not replaced.is_alive(), "the thread of the former address has ended")
    late = AwaitedAnswer()
    replaced.put(MetadataRequest(), WAIT_MS, late)
    with pytest.raises(NetworkError, match="given up"):
        late.wait(WAIT_MS)


def test_producer_ids_come_from_the_controller_in_this_brokers_name(calls: BrokerCalls) -> None:
    answer = AwaitedAnswer()
    calls.allocate_producer_ids(answer)
    assert answer.wait(WAIT_MS) == AllocateProducerIdsResponse(5, 10)
    controller = next(connection for connection in FakeConnection.made if connection.host == "controller")
    assert controller.requests == [AllocateProducerIdsRequest(7, 3)]


@pytest.mark.parametrize("earlier", [False, True], ids=["the first call", "after a move"])
def test_a_call_that_gets_no_thread_is_answered_and_the_next_one_is_made(
    calls: BrokerCalls, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """Story: one moment at the limit of threads, and no transaction's markers were sent to that broker any more."""
    if earlier:
        before = AwaitedAnswer()
        calls.send(broker(1, port=8000), MetadataRequest(), WAIT_MS, before)
        assert before.wait(WAIT_MS) == EmptyResponse()

    def no_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    first, second = AwaitedAnswer(), AwaitedAnswer()
    with monkeypatch.context() as patch:
        patch.setattr(broker_calls._Caller, "start", no_thread)
        calls.send(broker(1), MetadataRequest(), WAIT_MS, first)
    assert isinstance(first.outcome(0), NoThreadError)
    calls.send(broker(1), MetadataRequest(), WAIT_MS, second)
    assert second.wait(WAIT_MS) == EmptyResponse()
