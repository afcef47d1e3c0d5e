"""A consumer's stream of fetches: committed records, with long polls."""

from __future__ import annotations

from spark_broker.broker.answer_budget import AnswerBudget
from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.fetch_operation import FetchOperation
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.request_queue import RequestKind, RequestQueue
from spark_broker.broker.slow import SLOW, SLOW_S
from spark_broker.config import ClusterConfig
from spark_broker.errors import InvalidRequestError, ThrottlingQuotaExceededError
from spark_broker.protocol.messages import FetchRequest
from spark_broker.transport.server_stream import ServerStream

TURN_WAIT_S = 10.0
"""How long a fetch waits for its turn: longer than overload should last, less than its client waits for an answer."""


class FetchStream:
    """Serves one stream, in a thread, one request at a time."""

    def __init__(
        self,
        manager: ReplicaManager,
        stream: ServerStream,
        max_response_bytes: int = ClusterConfig().fetch_max_bytes,
        budget: AnswerBudget | None = None,
        queue: RequestQueue | None = None,
        boot_id: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`boot_id` is this machine's. If it is empty, no client is referred to the files."""
        self._manager = manager
        self._budget = budget if budget is not None else AnswerBudget(ClusterConfig().fetch_answers_max_bytes)
        self._queue = queue if queue is not None else RequestQueue()
        self._stream = stream
        self._max_response_bytes = max_response_bytes
        self._clock = clock
        self._operation = FetchOperation(manager, boot_id=boot_id)
        stream.on_gone = self._operation.notifier.interrupt

    def run(self) -> None:
        """Serve fetches until the client leaves."""
        while (received := self._stream.receive()) is not None:
            if self._stream.cancelled:
                return
            request, _ = received
            if not isinstance(request, FetchRequest):
                raise InvalidRequestError(f"a {type(request).__name__} on a stream of fetches")
            self._serve(request)

    def _serve(self, request: FetchRequest) -> None:
        operation, began_ms = self._operation, self._clock.boottime_ms()
        operation.received(request, began_ms)
        try:
            while not self._answered(request) and not self._stream.cancelled:
                with self._stream.waiting_for_client():
                    operation.notifier.wait((operation.deadline_ms - self._clock.boottime_ms()) / 1000)
        except ThrottlingQuotaExceededError as error:
            refusal = operation.refuse(error)
            if refusal is not None:
                self._stream.send(refusal)
        finally:
            operation.cancelled()
            self._took(request, (self._clock.boottime_ms() - began_ms) / 1000)

    def _answered(self, request: FetchRequest) -> bool:
        """Send the answer, if there is one."""
        with (
            self._queue.turn(RequestKind.FETCH, TURN_WAIT_S) as turn,
            self._budget.share(min(request.max_bytes, self._max_response_bytes)) as share,
        ):
            answer = self._operation.try_answer(self._clock.boottime_ms(), share.bytes, turn.give_way)
            if answer is None:
                return False
            share.keep(sum(map(len, answer.payload)))
            turn.end()  # a client that reads nothing must not keep others waiting
            self._stream.send(answer.response, *answer.payload)
            return True

    def _took(self, request: FetchRequest, seconds: float) -> None:
        """Log a slow fetch. What the client is ready to wait does not count. The line names the first partition."""
        if seconds - request.max_wait_ms / 1000 < SLOW_S or not request.partitions:
            return
        first = request.partitions[0]
        partition = self._manager.find(first.topic_id, first.partition)
        SLOW.took(
            "fetch",
            seconds,
            topic_partition=partition or f"{first.topic_id}-{first.partition}",
            leader_epoch=first.leader_epoch,
            offset=first.offset,
            partitions=len(request.partitions),
        )
