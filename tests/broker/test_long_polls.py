"""How long a client or a follower may have a broker wait for news, and what it keeps meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from spark_broker.broker.fetch_operation import FetchOperation
from spark_broker.broker.fetch_stream import FetchStream
from spark_broker.broker.follower_sessions import FollowerSessions
from spark_broker.broker.notifier import WAIT_MAX_MS
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.replica_session import ReplicaSession
from spark_broker.broker.replica_stream import ReplicaStream
from spark_broker.config import ConsumerConfig
from spark_broker.protocol.messages import FetchRequest, Message, ReplicaFetchRequest
from spark_broker.transport.server_stream import ServerStream
from tests.support.waiting import eventually
from tests.transport.rig import WAIT_S, Settings, look_often, rig

FOR_EVER_MS = 2**31 - 1
FETCH = FetchRequest(1, max_wait_ms=FOR_EVER_MS, min_bytes=1, max_bytes=1, partitions=[])
REPLICA_FETCH = ReplicaFetchRequest(1, 7, 1, max_wait_ms=FOR_EVER_MS, max_bytes=1, partitions=[])
NO_REPLICAS = cast(
    ReplicaManager, SimpleNamespace(follower_sessions=FollowerSessions(), broker_epochs=lambda: {7: 1}, broker_id=0)
)


def fetch(stream: ServerStream) -> None:
    FetchStream(NO_REPLICAS, stream).run()


def replicate(stream: ServerStream) -> None:
    ReplicaStream(NO_REPLICAS, stream, 1 << 20).run()


def test_no_request_waits_longer_than_a_client_may_want_to() -> None:
    operation, session = FetchOperation(NO_REPLICAS), ReplicaSession(NO_REPLICAS, 1 << 20)
    operation.received(FETCH, 1000)
    session.received(REPLICA_FETCH, 1000)
    assert operation.deadline_ms == session.deadline_ms == 1000 + WAIT_MAX_MS
    ConsumerConfig(fetch_max_wait_ms=WAIT_MAX_MS)


@pytest.mark.parametrize(("kind", "request_"), [("fetch", FETCH), ("replica", REPLICA_FETCH)])
def test_what_waits_behind_long_polls_keeps_no_other_client_out(
    monkeypatch: pytest.MonkeyPatch, kind: str, request_: Message
) -> None:
    """One connection could keep all of queued.max.request.bytes for 24 days. Nothing was wrong with it."""
    look_often(monkeypatch, PATIENCE_S=0.3)
    settings = Settings(queued_bytes=300_000, streams={"fetch": fetch, "replica": replicate})
    with rig(monkeypatch, settings) as served, served.peer() as greedy, served.peer(timeout_s=10.0) as other:
        for stream in (1, 2, 3):
            greedy.open(kind, stream)
            greedy.message(request_, stream=stream)
            greedy.message(request_, bytes(80_000), stream=stream)
        eventually(lambda: served.used_bytes > 240_000, WAIT_S, "its bytes are held")
        others = "echo" if kind == "fetch" else "replica"
        other.open(others)
        # A request that is answered at once, with a payload that nobody looks at.
        at_once = FetchRequest(1, 0, 0, 1, []) if kind == "fetch" else ReplicaFetchRequest(1, 7, 1, 0, 1, [], session=9)
        other.message(at_once, bytes(200_000))
        assert other.receive() is not None
