"""A follower's fetch session on the leader: the stream remembers where it is in every partition they share."""

from __future__ import annotations

import time
from dataclasses import dataclass

from spark_broker.broker.fetch_stream import POLL_CANCELLED_S
from spark_broker.broker.notifier import Notifier
from spark_broker.broker.partition import Partition, PartitionKey
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.core.replica import Diverging, FetchPosition
from spark_broker.errors import InvalidRequestError, SparkBrokerError
from spark_broker.protocol.frame import encode_frames
from spark_broker.protocol.messages import (
    ReplicaFetched,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
    ReplicaPartition,
)
from spark_broker.protocol.wire import Buffer
from spark_broker.transport.server import ServerStream

IDLE_REPORT_S = 0.2
"""How often partitions that a request does not name are counted as still being pulled."""


@dataclass(slots=True)
class _Followed:
    """A partition of the session. `told`: the high watermark and log start that the follower has heard of."""

    partition: Partition
    position: FetchPosition
    told: tuple[int, int] = (-1, -1)


class ReplicaStream:
    """Serves one follower. Only partitions with news are read and answered."""

    def __init__(self, manager: ReplicaManager, stream: ServerStream, max_partition_bytes: int) -> None:
        self._manager = manager
        self._stream = stream
        self._max_partition_bytes = max_partition_bytes
        self._followed: dict[PartitionKey, _Followed] = {}
        self._notifier = Notifier()
        self._ready: set[PartitionKey] = set()  # may have data for the follower
        self._idle_reported = 0.0

    def run(self) -> None:
        """Until the follower leaves."""
        try:
            while (received := self._stream.receive()) is not None:
                request, _ = received
                if not isinstance(request, ReplicaFetchRequest):
                    raise InvalidRequestError(f"a {type(request).__name__} on a follower's stream")
                self._serve(request)
        finally:
            for followed in self._followed.values():
                followed.partition.forget(self._notifier)

    def _serve(self, request: ReplicaFetchRequest) -> None:
        for key in request.forgotten:
            self._forget(key)
        answers = [a for wanted in request.partitions if (a := self._accept(request, wanted)) is not None]
        self._report_idle(request)
        deadline = time.monotonic() + request.max_wait_ms / 1000
        payload: list[Buffer] = []
        while True:
            self._take_news()
            self._read(request.max_bytes, answers, payload)
            remaining = deadline - time.monotonic()
            if answers or remaining <= 0 or self._stream.cancelled:
                break
            self._notifier.wait(min(remaining, POLL_CANCELLED_S))
        if not answers:
            answers = self._high_watermarks()
        self._stream.send(ReplicaFetchResponse(request.correlation_id, answers), *payload)

    def _forget(self, key: PartitionKey) -> None:
        followed = self._followed.pop(key, None)
        self._ready.discard(key)
        if followed is not None:
            followed.partition.forget(self._notifier)

    def _accept(self, request: ReplicaFetchRequest, wanted: ReplicaPartition) -> ReplicaFetched | None:
        """Take note of the follower's position; an answer only when there is an error or a divergence to tell."""
        key = (wanted.topic_id, wanted.partition)
        position = FetchPosition(wanted.leader_epoch, wanted.fetch_offset, wanted.last_fetched_epoch)
        try:
            partition = self._manager.partition(*key)
            live = self._manager.live_broker_epochs()
            diverging = partition.follower_fetch(request.broker_id, request.broker_epoch, position, live)
        except SparkBrokerError as error:
            self._forget(key)
            return ReplicaFetched(*key, error.code, error.message[:1000])
        followed = self._followed.get(key)
        if followed is None or followed.partition is not partition:
            self._forget(key)
            followed = self._followed[key] = _Followed(partition, position)
            partition.listen(self._notifier, commits=False)
        followed.position = position
        if diverging is not None:
            return self._diverged(followed, diverging)
        self._ready.add(key)
        return None

    def _diverged(self, followed: _Followed, diverging: Diverging) -> ReplicaFetched:
        self._forget(followed.partition.key)  # nothing is read from here on before the follower has cut its log
        return ReplicaFetched(
            *followed.partition.key,
            0,
            leader_epoch=followed.position.leader_epoch,
            diverging_epoch=diverging.epoch,
            diverging_end_offset=diverging.end_offset,
        )

    def _report_idle(self, request: ReplicaFetchRequest) -> None:
        now = time.monotonic()
        if now - self._idle_reported < IDLE_REPORT_S:
            return
        self._idle_reported = now
        live = self._manager.live_broker_epochs()
        named = {(wanted.topic_id, wanted.partition) for wanted in request.partitions}
        for key, followed in self._followed.items():
            if key not in named:
                followed.partition.follower_idle(request.broker_id, request.broker_epoch, live)

    def _take_news(self) -> None:
        self._ready.update(key for key in self._notifier.take() if key in self._followed)

    def _read(self, max_bytes: int, answers: list[ReplicaFetched], payload: list[Buffer]) -> None:
        """Read partitions that are ready, within the budget; those that are left stay ready."""
        budget = max_bytes
        for key in list(self._ready):
            if budget <= 0:
                return
            self._ready.discard(key)
            answer, parts = self._read_partition(self._followed[key], min(budget, self._max_partition_bytes))
            if answer is not None:
                answers.append(answer)
                payload += parts
                budget -= answer.length

    def _read_partition(self, followed: _Followed, max_bytes: int) -> tuple[ReplicaFetched | None, list[Buffer]]:
        key, position = followed.partition.key, followed.position
        try:
            read = followed.partition.read_for_follower(position.leader_epoch, position.fetch_offset, max_bytes)
        except SparkBrokerError as error:
            self._forget(key)
            return ReplicaFetched(*key, error.code, error.message[:1000]), []
        moved_start = read.log_start_offset > position.fetch_offset
        if not read.frames and not moved_start:
            return None, []
        followed.told = (read.high_watermark, read.log_start_offset)
        parts = encode_frames(read.frames)
        answer = ReplicaFetched(
            *key,
            0,
            leader_epoch=read.leader_epoch,
            high_watermark=read.high_watermark,
            log_start_offset=read.log_start_offset,
            length=sum(len(part) for part in parts),
        )
        return answer, parts

    def _high_watermarks(self) -> list[ReplicaFetched]:
        """Nothing new to copy in time: tell what has been committed since."""
        answers = []
        for key, followed in self._followed.items():
            try:
                read = followed.partition.leader_position(followed.position.leader_epoch)
            except SparkBrokerError as error:
                answers.append(ReplicaFetched(*key, error.code, error.message[:1000]))
                continue
            if followed.told != (read.high_watermark, read.log_start_offset):
                followed.told = (read.high_watermark, read.log_start_offset)
                answers.append(
                    ReplicaFetched(
                        *key,
                        0,
                        leader_epoch=read.leader_epoch,
                        high_watermark=read.high_watermark,
                        log_start_offset=read.log_start_offset,
                    )
                )
        return answers
