"""What ends one session of a broker with its controller, and what ends the broker."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from spark_broker.broker.lease import Lease
from spark_broker.broker.membership import Membership, SessionEvents
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.session import ControllerSession, _Heartbeats
from spark_broker.errors import InvalidRequestError, NoMemoryError, NoThreadError, ProcessLimitError, SparkBrokerError
from spark_broker.protocol.messages import (
    PROTOCOL_VERSION,
    HeartbeatRequest,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    StreamMessage,
)
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream

WAIT_S = 30.0
REGISTERED = RegisterBrokerResponse("c", 1, 0, 1, 60_000, 10)
LIMITS = [ProcessLimitError("ulimit -n"), NoThreadError("pids.max"), NoMemoryError("memory.max")]


class Ended:
    """Why a broker was to end."""

    def __init__(self) -> None:
        self.reasons: list[object] = []
        self.events = SessionEvents(self._registered, self.reasons.append, self.reasons.append, self.reasons.append)
        self.refused: SparkBrokerError | None = None

    def _registered(self, _: object) -> None:
        if self.refused is not None:
            raise self.refused


@pytest.fixture
def ended() -> Ended:
    return Ended()


def membership(ended: Ended) -> Membership:
    return Membership(cast(ReplicaManager, None), Lease(), ended.events)


@pytest.mark.parametrize("error", LIMITS, ids=lambda error: type(error).__name__)
def test_a_limit_of_the_controllers_process_ends_one_session(ended: Ended, error: SparkBrokerError) -> None:
    """Story: the controller had no thread for a session, and each broker that asked for one ended."""
    member = membership(ended)
    for _ in range(2):
        member.connects()
        member.session_ended(error)
    assert (member.over, ended.reasons) == (False, [])


def test_a_limit_that_strikes_while_a_message_is_handled_ends_the_broker(ended: Ended) -> None:
    """What the message was to change may be half done, and no other session would do the rest."""
    member = membership(ended)
    member.connects()
    ended.refused = NoMemoryError("memory.max")
    with pytest.raises(NoMemoryError) as raised:
        member.received(REGISTERED)
    member.session_ended(raised.value)
    assert (member.over, ended.reasons) == (True, [ended.refused])


class Stream:
    """The controller's answers to one session: a registration, then nothing."""

    def __init__(self, send_fails: SparkBrokerError | None = None) -> None:
        self.closed = threading.Event()
        self.beats: list[HeartbeatRequest] = []
        self._answers = [REGISTERED]
        self._send_fails = send_fails

    def send(self, message: StreamMessage) -> None:
        if isinstance(message, HeartbeatRequest):
            self.beats.append(message)
        if self._send_fails is not None:
            raise self._send_fails

    def receive(self, *, timeout_ms: int) -> tuple[StreamMessage, memoryview]:
        if self._answers:
            return self._answers.pop(), memoryview(b"")
        self.closed.wait(timeout_ms / 1000)
        raise InvalidRequestError("the test is over")

    def close(self) -> None:
        self.closed.set()


class Controller:
    """Opens streams, and counts them."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def open_stream(self, kind: str) -> Stream:
        assert kind == "session"
        self.streams.append(Stream())
        return self.streams[-1]


def registration() -> RegisterBrokerRequest:
    return RegisterBrokerRequest(PROTOCOL_VERSION, "c", 1, -1, "d", "i", "clean", "h", 1, None, "m", "e", 0, 0, 0)


class Idle:
    """A manager of no replicas."""

    applied_offset = 0
    damage_reports: tuple[()] = ()
    offline: tuple[()] = ()
    room = SimpleNamespace(full=False)

    def log_ends(self) -> list[object]:
        return []

    def lost_schemas(self) -> list[object]:
        return []


def test_a_session_without_a_thread_for_its_heartbeats_is_followed_by_another(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, starts = Controller(), [False, True]
    begun = threading.Event()
    real = _Heartbeats.start

    def start(worker: _Heartbeats) -> None:
        if not starts.pop(0):
            raise RuntimeError("can't start new thread")
        real(worker)
        begun.set()

    monkeypatch.setattr(_Heartbeats, "start", start)
    session = ControllerSession(
        cast(Connection, controller), registration, cast(ReplicaManager, Idle()), Lease(), ended.events
    )
    session.start()
    try:
        assert begun.wait(WAIT_S)
        assert (len(controller.streams), controller.streams[0].closed.is_set(), ended.reasons) == (2, True, [])
    finally:
        session.stop()
        controller.streams[-1].close()
        session.join(WAIT_S)


@pytest.mark.parametrize("error", [NoMemoryError("memory.max"), InvalidRequestError("of whatever kind")])
def test_heartbeats_end_in_silence_with_whatever_has_ended_their_stream(error: SparkBrokerError, ended: Ended) -> None:
    """The session's thread gets the same error, and knows what it means. A broker ended if heartbeats got it first."""
    member = Membership(cast(ReplicaManager, Idle()), Lease(), ended.events)
    member.connects()
    member.received(REGISTERED)
    stream = Stream(send_fails=error)
    worker = _Heartbeats(cast(ClientStream, stream), member, ended.reasons.append)
    worker.start()
    worker.join(WAIT_S)
    assert not worker.is_alive()
    assert (len(stream.beats), ended.reasons) == (1, [])
