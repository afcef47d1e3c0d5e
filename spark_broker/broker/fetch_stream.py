"""A consumer's stream of fetches: committed records, with long polls."""

from __future__ import annotations

import time
from dataclasses import replace

from spark_broker.broker.answer_budget import AnswerBudget
from spark_broker.broker.notifier import Notifier
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_reader import PartitionRead
from spark_broker.broker.projection import check_columns, project_frames
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.request_queue import RequestKind, RequestQueue
from spark_broker.broker.slow import SLOW, SLOW_S
from spark_broker.config import ClusterConfig
from spark_broker.errors import (
    InvalidRequestError,
    LogTruncationError,
    SparkBrokerError,
    ThrottlingQuotaExceededError,
)
from spark_broker.protocol.frame import encode_frames
from spark_broker.protocol.messages import FetchedPartition, FetchPartition, FetchRequest, FetchResponse
from spark_broker.protocol.wire import Buffer
from spark_broker.transport.server import ServerStream

TURN_WAIT_S = 10.0
"""A fetch waits so long for its turn: longer than overload should last, shorter than its client waits for an answer."""


class FetchStream:
    """Serves one stream, one request at a time."""

    def __init__(
        self,
        manager: ReplicaManager,
        stream: ServerStream,
        max_response_bytes: int = ClusterConfig().fetch_max_bytes,
        budget: AnswerBudget | None = None,
        queue: RequestQueue | None = None,
    ) -> None:
        self._manager = manager
        self._budget = budget if budget is not None else AnswerBudget(ClusterConfig().fetch_answers_max_bytes)
        self._queue = queue if queue is not None else RequestQueue()
        self._stream = stream
        self._max_response_bytes = max_response_bytes

    def run(self) -> None:
        """Until the client leaves."""
        while (received := self._stream.receive()) is not None:
            request, _ = received
            if not isinstance(request, FetchRequest):
                raise InvalidRequestError(f"a {type(request).__name__} on a stream of fetches")
            self._serve(request)

    def _serve(self, request: FetchRequest) -> None:
        began_s = time.monotonic()
        notifier = Notifier()
        self._stream.on_gone = notifier.interrupt
        listening = self._listen(request, notifier)
        try:
            deadline = time.monotonic() + request.max_wait_ms / 1000
            while (remaining := self._answer(request, deadline)) > 0:
                # Without news, reading again would find the same: a fetch that waits long costs no reads.
                notifier.wait(remaining)
                notifier.take()
        except ThrottlingQuotaExceededError as error:
            refusals = [refused(wanted, error) for wanted in request.partitions]
            self._stream.send(FetchResponse(request.correlation_id, refusals))
        finally:
            for partition in listening:
                partition.forget(notifier)
            self._took(request, time.monotonic() - began_s)

    def _took(self, request: FetchRequest, seconds: float) -> None:
        """What the client is ready to wait is not slow. The line names the first partition."""
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

    def _answer(self, request: FetchRequest, deadline: float) -> float:
        """Send an answer, or return for how many seconds more the client would rather wait for one."""
        turn = self._queue.turn(RequestKind.FETCH, TURN_WAIT_S)
        with turn, self._budget.share(min(request.max_bytes, self._max_response_bytes)) as share:
            limit = share.bytes
            answers, payload, size, done = self._read(request, limit)
            share.keep(size)
            enough = done or size >= min(request.min_bytes, limit)
            remaining = deadline - time.monotonic()
            if not enough and remaining > 0 and not self._stream.cancelled:
                return remaining
            turn.end()  # a client that takes nothing keeps nobody else waiting
            self._stream.send(FetchResponse(request.correlation_id, answers), *payload)
            return 0.0

    def _listen(self, request: FetchRequest, notifier: Notifier) -> list[Partition]:
        listening = []
        for wanted in request.partitions:
            partition = self._manager.find(wanted.topic_id, wanted.partition)
            if partition is not None:
                partition.listen(notifier, commits=True)
                listening.append(partition)
        return listening

    def _read(self, request: FetchRequest, limit: int) -> tuple[list[FetchedPartition], list[Buffer], int, bool]:
        answers: list[FetchedPartition] = []
        payload: list[Buffer] = []
        size, done = 0, False
        for wanted in request.partitions:
            budget = min(wanted.max_bytes, limit - size)
            if budget <= 0 and size > 0:
                break
            try:
                read, parts = self._read_partition(wanted, max(budget, 1), request.columns, request.read_committed)
            except SparkBrokerError as error:
                answers.append(refused(wanted, error))
                done = True
                continue
            length = sum(len(part) for part in parts)
            answers.append(
                FetchedPartition(
                    topic_id=wanted.topic_id,
                    partition=wanted.partition,
                    error_code=0,
                    leader_epoch=read.leader_epoch,
                    high_watermark=read.high_watermark,
                    log_start_offset=read.log_start_offset,
                    length=length,
                    next_offset=read.next_offset,
                    next_epoch=read.next_epoch,
                )
            )
            done |= not parts and read.next_offset > wanted.offset  # nothing but what is left out: the client goes on
            payload += parts
            size += length
        return answers, payload, size, done

    def _read_partition(
        self, wanted: FetchPartition, max_bytes: int, columns: list[str] | None, read_committed: bool
    ) -> tuple[PartitionRead, list[Buffer]]:
        partition = self._manager.partition(wanted.topic_id, wanted.partition)
        if columns is not None:
            check_columns(partition.topic, columns)
        if wanted.last_fetched_epoch >= 0:
            read_to = wanted.offset if wanted.read_to < 0 else wanted.read_to
            partition.reader.check_lineage(wanted.leader_epoch, read_to, wanted.last_fetched_epoch)
        read = partition.reader.read(wanted.leader_epoch, wanted.offset, max_bytes, read_committed=read_committed)
        if columns is None:
            return read, encode_frames(read.frames)
        frames = project_frames(read.frames, partition.topic, columns, max_bytes)
        if len(frames) < len(read.frames):
            last = frames[-1].header
            read = replace(read, next_offset=last.next_offset, next_epoch=last.leader_epoch)
        return read, encode_frames(frames)


def refused(wanted: FetchPartition, error: SparkBrokerError) -> FetchedPartition:
    """The answer about a partition that cannot be read."""
    key = (wanted.topic_id, wanted.partition)
    if not isinstance(error, LogTruncationError):
        return FetchedPartition(*key, error.code, error.message[:1000])
    return FetchedPartition(
        *key,
        error.code,
        error.message[:1000],
        diverging_epoch=error.diverging_epoch,
        diverging_end_offset=error.divergent_offset,
    )
