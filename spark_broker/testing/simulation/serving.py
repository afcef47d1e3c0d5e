"""Streams on a broker: the production operations, with events where production has threads."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, cast

from spark_broker.broker.append_operation import AppendOperation, Question
from spark_broker.broker.confirmation import no_coordinator
from spark_broker.broker.fetch_operation import FetchOperation
from spark_broker.broker.replica_session import ReplicaSession
from spark_broker.errors import InvariantError, NetworkError, SparkBrokerError
from spark_broker.protocol.messages import AppendRequest, AppendResponse, FetchRequest, ReplicaFetchRequest
from spark_broker.protocol.wire import Buffer
from spark_broker.testing.simulation.long_polls import LongPolls, Waker
from spark_broker.testing.simulation.network import End

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess


M = TypeVar("M")


class _Appends:
    """A producer's stream. The first batch of a transaction holds it up until the coordinator has answered."""

    def __init__(self, process: BrokerProcess, end: End) -> None:
        self._process = process
        self._end = end
        self._inbox: deque[tuple[AppendRequest, Buffer]] = deque()
        self._sent: dict[int, tuple[AppendRequest, Buffer]] = {}  # what is not answered, by its number
        self._held = False

    def received(self, message: object) -> None:
        request, payload = cast("tuple[AppendRequest, Buffer]", message)
        self._sent[request.correlation_id] = (request, payload)
        self._inbox.append((request, payload))
        self._go_on()

    def _go_on(self) -> None:
        while self._inbox and not self._held:
            request, payload = self._inbox.popleft()
            now_ms = self._process.machine.clock.boottime_ms()
            self._try(AppendOperation(self._process.manager, request, payload, now_ms, self._answer))

    def _try(self, operation: AppendOperation) -> None:
        question = operation.try_answer()
        if question is not None:
            self._held = True
            self._ask(question, operation)

    def _ask(self, question: Question, operation: AppendOperation) -> None:
        def confirmed(refusal: SparkBrokerError | None) -> None:
            self._held = False
            if refusal is None:
                self._try(operation)
            else:
                operation.refuse(refusal)
            self._go_on()

        coordination = self._process.coordination
        if coordination is not None:
            coordination.confirm(*question, confirmed)
            return
        try:
            no_coordinator(*question)
        except SparkBrokerError as error:
            confirmed(error)

    def _answer(self, response: AppendResponse) -> None:
        sent = self._sent.pop(response.correlation_id, None)
        if sent is not None and response.error_code == 0:
            self._process.world.invariants.acknowledged(self._process, *sent, response.base_offset)
        with suppress(NetworkError):
            self._end.send((response, b""))


def serve_appends(process: BrokerProcess, end: End) -> None:
    """Serve a producer on its stream."""
    end.on_message = _Appends(process, end).received


def serve_fetches(process: BrokerProcess, end: End) -> None:
    """Serve a consumer on its stream."""
    waker = Waker()
    operation = FetchOperation(process.manager, waker, process.fs.boot_id())
    limit_bytes = process.world.settings.cluster.fetch_max_bytes
    asked_bytes = limit_bytes

    def received(message: object, now_ms: int) -> None:
        nonlocal asked_bytes
        request = _expect(FetchRequest, message)
        asked_bytes = min(request.max_bytes, limit_bytes)
        operation.received(request, now_ms)

    LongPolls(process, end, operation, waker, received, lambda now_ms: operation.try_answer(now_ms, asked_bytes))


def serve_follower(process: BrokerProcess, end: End) -> None:
    """Serve a follower on its stream."""
    cluster, waker = process.world.settings.cluster, Waker()
    session = ReplicaSession(
        process.manager,
        cluster.replica_fetch_max_bytes,
        waker,
        max_response_bytes=cluster.replica_fetch_response_max_bytes,
        lag_max_ms=cluster.replica_lag_time_max_ms,
    )

    def received(message: object, now_ms: int) -> None:
        session.received(_expect(ReplicaFetchRequest, message), now_ms)

    LongPolls(process, end, session, waker, received, session.try_answer)


def _expect(kind: type[M], message: object) -> M:
    if not isinstance(message, kind):
        raise InvariantError(f"a {type(message).__name__} on a stream of {kind.__name__}")
    return message
