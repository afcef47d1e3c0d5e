"""A consumer's stream of fetches: committed records, with long polls."""

from __future__ import annotations

import time

from spark_broker.broker.notifier import Notifier
from spark_broker.broker.partition import Partition, PartitionRead
from spark_broker.broker.projection import project_frames
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.errors import InvalidRequestError, SparkBrokerError
from spark_broker.protocol.frame import encode_frames
from spark_broker.protocol.messages import FetchedPartition, FetchPartition, FetchRequest, FetchResponse
from spark_broker.protocol.wire import Buffer
from spark_broker.transport.server import ServerStream

POLL_CANCELLED_S = 0.25


class FetchStream:
    """Serves one stream, one request at a time."""

    def __init__(self, manager: ReplicaManager, stream: ServerStream) -> None:
        self._manager = manager
        self._stream = stream

    def run(self) -> None:
        """Until the client leaves."""
        while (received := self._stream.receive()) is not None:
            request, _ = received
            if not isinstance(request, FetchRequest):
                raise InvalidRequestError(f"a {type(request).__name__} on a stream of fetches")
            self._serve(request)

    def _serve(self, request: FetchRequest) -> None:
        notifier = Notifier()
        listening = self._listen(request, notifier)
        try:
            deadline = time.monotonic() + request.max_wait_ms / 1000
            while True:
                answers, payload, size, failed = self._read(request)
                remaining = deadline - time.monotonic()
                if failed or size >= request.min_bytes or remaining <= 0 or self._stream.cancelled:
                    break
                notifier.wait(min(remaining, POLL_CANCELLED_S))
                notifier.take()
        finally:
            for partition in listening:
                partition.forget(notifier)
        self._stream.send(FetchResponse(request.correlation_id, answers), *payload)

    def _listen(self, request: FetchRequest, notifier: Notifier) -> list[Partition]:
        listening = []
        for wanted in request.partitions:
            partition = self._manager.find(wanted.topic_id, wanted.partition)
            if partition is not None:
                partition.listen(notifier, commits=True)
                listening.append(partition)
        return listening

    def _read(self, request: FetchRequest) -> tuple[list[FetchedPartition], list[Buffer], int, bool]:
        answers: list[FetchedPartition] = []
        payload: list[Buffer] = []
        size, failed = 0, False
        for wanted in request.partitions:
            budget = min(wanted.max_bytes, request.max_bytes - size)
            if budget <= 0 and size > 0:
                break
            try:
                read, parts = self._read_partition(wanted, max(budget, 1), request.columns)
            except SparkBrokerError as error:
                answers.append(FetchedPartition(wanted.topic_id, wanted.partition, error.code, error.message[:1000]))
                failed = True
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
                )
            )
            payload += parts
            size += length
        return answers, payload, size, failed

    def _read_partition(
        self, wanted: FetchPartition, max_bytes: int, columns: list[str] | None
    ) -> tuple[PartitionRead, list[Buffer]]:
        partition = self._manager.partition(wanted.topic_id, wanted.partition)
        read = partition.read_committed(wanted.leader_epoch, wanted.offset, max_bytes)
        frames = read.frames if columns is None else project_frames(read.frames, partition.topic, columns)
        return read, encode_frames(frames)
