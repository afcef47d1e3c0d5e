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
from spark_broker.broker.request_queue import GiveWay, RequestKind, RequestQueue, pieces
from spark_broker.broker.slow import SLOW, SLOW_S
from spark_broker.config import ClusterConfig
from spark_broker.errors import (
    InvalidRequestError,
    LogTruncationError,
    SparkBrokerError,
    ThrottlingQuotaExceededError,
)
from spark_broker.protocol.frame import encode_frames, pack_header
from spark_broker.protocol.messages import FetchedPartition, FetchPartition, FetchRequest, FetchResponse, FileExtent
from spark_broker.protocol.wire import Buffer
from spark_broker.storage.stored_run import StoredRun
from spark_broker.transport.server_stream import ServerStream

EXTENTS_MAX = 10_000
"""An answer with more pieces of files than this sends the batches instead."""

TURN_WAIT_S = 10.0
"""How long a fetch waits for its turn: longer than overload should last, less than its client waits for an answer."""


class FetchStream:
    """Serves one stream, one request at a time."""

    def __init__(
        self,
        manager: ReplicaManager,
        stream: ServerStream,
        max_response_bytes: int = ClusterConfig().fetch_max_bytes,
        budget: AnswerBudget | None = None,
        queue: RequestQueue | None = None,
        boot_id: str = "",
    ) -> None:
        """`boot_id` is this machine's. If it is empty, no client is referred to the files."""
        self._manager = manager
        self._budget = budget if budget is not None else AnswerBudget(ClusterConfig().fetch_answers_max_bytes)
        self._queue = queue if queue is not None else RequestQueue()
        self._stream = stream
        self._max_response_bytes = max_response_bytes
        self._boot_id = boot_id

    def run(self) -> None:
        """Serve fetches until the client leaves."""
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

    def _answer(self, request: FetchRequest, deadline: float) -> float:
        """Send an answer and return 0, or return how many seconds more the client is ready to wait for one."""
        with (
            self._queue.turn(RequestKind.FETCH, TURN_WAIT_S) as turn,
            self._budget.share(min(request.max_bytes, self._max_response_bytes)) as share,
        ):
            limit = share.bytes
            answers, payload, size, done = self._read(request, limit, turn.give_way)
            share.keep(sum(map(len, payload)))
            enough = done or size >= min(request.min_bytes, limit)
            remaining = deadline - time.monotonic()
            if not enough and remaining > 0 and not self._stream.cancelled:
                return remaining
            turn.end()  # a client that reads nothing must not keep others waiting
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

    def _read(
        self, request: FetchRequest, limit: int, give_way: GiveWay
    ) -> tuple[list[FetchedPartition], list[Buffer], int, bool]:
        """Answers and their payload; the bytes of all batches; whether the client has something to act on."""
        answers: list[FetchedPartition] = []
        payload: list[Buffer] = []
        size, done = 0, False
        for wanted in pieces(request.partitions, give_way):
            budget = min(wanted.max_bytes, limit - size)
            if budget <= 0 and size > 0:
                break
            try:
                answer, parts = self._read_partition(request, wanted, max(budget, 1))
            except SparkBrokerError as error:
                answers.append(refused(wanted, error))
                done = True
                continue
            answers.append(answer)
            # All batches that were read are left out: the client goes on behind them.
            done |= not parts and answer.next_offset > wanted.offset
            payload += parts
            size += answer.length + sum(extent.length for extent in answer.extents)
        return answers, payload, size, done

    def _read_partition(
        self, request: FetchRequest, wanted: FetchPartition, max_bytes: int
    ) -> tuple[FetchedPartition, list[Buffer]]:
        partition = self._manager.partition(wanted.topic_id, wanted.partition)
        columns, read_committed = request.columns, request.read_committed
        if columns is not None:
            check_columns(partition.topic, columns)
        if wanted.last_fetched_epoch >= 0:
            read_to = wanted.offset if wanted.read_to < 0 else wanted.read_to
            partition.reader.check_lineage(wanted.leader_epoch, read_to, wanted.last_fetched_epoch)
        position = (wanted.leader_epoch, wanted.offset, max_bytes)
        if self._boot_id and request.boot_id == self._boot_id:
            grant = partition.reader.grant(*position, read_committed=read_committed)
            if len(grant.runs) <= EXTENTS_MAX:
                headers: list[Buffer] = [pack_header(header) for run in grant.runs for header in run.headers]
                return _answer(wanted, grant.read, headers, [_extent(run) for run in grant.runs]), headers
        read = partition.reader.read(*position, read_committed=read_committed)
        if columns is not None:
            frames = project_frames(read.frames, partition.topic, columns, max_bytes)
            if len(frames) < len(read.frames):
                last = frames[-1].header
                read = replace(read, next_offset=last.next_offset, next_epoch=last.leader_epoch)
            read = replace(read, frames=frames)
        payload = encode_frames(read.frames)
        return _answer(wanted, read, payload, []), payload


def _answer(
    wanted: FetchPartition, read: PartitionRead, payload: list[Buffer], extents: list[FileExtent]
) -> FetchedPartition:
    return FetchedPartition(
        topic_id=wanted.topic_id,
        partition=wanted.partition,
        error_code=0,
        leader_epoch=read.leader_epoch,
        high_watermark=read.high_watermark,
        log_start_offset=read.log_start_offset,
        length=sum(len(part) for part in payload),
        next_offset=read.next_offset,
        next_epoch=read.next_epoch,
        extents=extents,
    )


def _extent(run: StoredRun) -> FileExtent:
    return FileExtent(str(run.path), *run.file_id, run.position, run.length)


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
