"""A follower's fetch session on the leader, without a transport: the follower's position in every shared partition.

It knows no thread and no clock, so a simulated broker runs it as well. Partitions are handled in the order of the
requests, never in the order of a hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spark_broker.broker.notifier import WAIT_MAX_MS, Notifier
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.config import ClusterConfig
from spark_broker.core.replica import Diverging, FetchPosition
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.frame import encode_frames
from spark_broker.protocol.messages import (
    ReplicaFetched,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
    ReplicaPartition,
)
from spark_broker.protocol.wire import Buffer

IDLE_REPORT_MAX_MS = 1000


def idle_report_ms(lag_max_ms: int) -> int:
    """The interval (ms) at which partitions that requests do not name count as fetched, from their last position.

    The cost grows with the number of partitions. The interval is short enough that no follower counts as lagging.
    """
    return max(1, min(lag_max_ms // 10, IDLE_REPORT_MAX_MS))


@dataclass(slots=True)
class _Followed:
    """A partition of the session. `told`: the high watermark and log start that the follower was sent last."""

    partition: Partition
    position: FetchPosition
    told: tuple[int, int] = (-1, -1)


class ReplicaAnswer(NamedTuple):
    """What the follower gets. `complete`: it is what the follower waited for, and not merely the end of its wait."""

    response: ReplicaFetchResponse
    payload: list[Buffer]
    complete: bool


class ReplicaSession:
    """One request at a time: `received`, then `try_answer` until there is an answer.

    Between two tries it waits for `deadline_ms`, or for news of its partitions, which wake `notifier`. Only partitions
    with news are read and answered.
    """

    def __init__(
        self,
        manager: ReplicaManager,
        max_partition_bytes: int,
        notifier: Notifier | None = None,
        *,
        max_response_bytes: int = ClusterConfig().replica_fetch_response_max_bytes,
        lag_max_ms: int = ClusterConfig().replica_lag_time_max_ms,
    ) -> None:
        self.notifier = notifier if notifier is not None else Notifier()
        self.deadline_ms = 0  # until when the follower waits, on the clock of `received`
        self._manager = manager
        self._max_partition_bytes = max_partition_bytes
        self._max_response_bytes = max_response_bytes
        self._followed: dict[PartitionKey, _Followed] = {}
        self._ready: dict[PartitionKey, None] = {}  # may have data for the follower
        self._idle_report_ms = idle_report_ms(lag_max_ms)
        self._idle_reported_ms = 0
        self._max_bytes = 0
        self._correlation_id = -1
        self._answers: list[ReplicaFetched] = []
        self._payload: list[Buffer] = []

    def received(self, request: ReplicaFetchRequest, now_ms: int) -> None:
        """Take note of the positions that the follower reports; it waits for an answer from now on. Raises
        InvalidFetchSessionEpochError in a session that is over, because the follower has begun a later one."""
        with self._manager.follower_sessions.turn(request, self._manager.broker_epochs()):
            self._begin(request, now_ms)

    def _begin(self, request: ReplicaFetchRequest, now_ms: int) -> None:
        self.deadline_ms = now_ms + min(request.max_wait_ms, WAIT_MAX_MS)
        self._correlation_id = request.correlation_id
        # Bounded by our own setting as well: a request must not make the broker use more memory.
        self._max_bytes = min(request.max_bytes, self._max_response_bytes)
        for key in request.forgotten:
            self._forget(key)
        named = [self._accept(request, wanted) for wanted in request.partitions]
        self._answers = [answer for answer in (*named, *self._report_idle(request, now_ms)) if answer is not None]
        self._payload = []

    def try_answer(self, now_ms: int) -> ReplicaAnswer | None:
        """What partitions with news have, within the request's budget; None: the follower waits. At the end of its wait
        it is told what has been committed since.
        """
        self._ready.update((key, None) for key in self.notifier.take() if key in self._followed)
        self._read()
        complete = bool(self._answers)
        if not complete and now_ms < self.deadline_ms:
            return None
        answers = self._answers or self._high_watermarks()
        return ReplicaAnswer(ReplicaFetchResponse(self._correlation_id, answers), self._payload, complete)

    def cancelled(self) -> None:
        """The follower has left."""
        for followed in self._followed.values():
            followed.partition.forget(self.notifier)
        self._followed.clear()

    def _forget(self, key: PartitionKey) -> None:
        followed = self._followed.pop(key, None)
        self._ready.pop(key, None)
        if followed is not None:
            followed.partition.forget(self.notifier)

    def _accept(self, request: ReplicaFetchRequest, wanted: ReplicaPartition) -> ReplicaFetched | None:
        """Have the partition read that the follower names. Returns an answer only for an error or a divergence."""
        key = _key(wanted)
        position = FetchPosition(wanted.leader_epoch, wanted.fetch_offset, wanted.last_fetched_epoch, wanted.no_room)
        refused = self._report(request, key, position)
        if refused is None:
            self._ready[key] = None
        return refused

    def _report(
        self, request: ReplicaFetchRequest, key: PartitionKey, position: FetchPosition
    ) -> ReplicaFetched | None:
        """Tell the partition how far the follower is."""
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
            partition.listen(self.notifier, commits=False)
        followed.position = position
        if diverging is not None:
            return self._diverged(followed, diverging)
        return None

    def _diverged(self, followed: _Followed, diverging: Diverging) -> ReplicaFetched:
        self._forget(followed.partition.key)  # nothing is read for the follower before it has truncated its log
        return ReplicaFetched(
            *followed.partition.key,
            0,
            leader_epoch=followed.position.leader_epoch,
            diverging_epoch=diverging.epoch,
            diverging_end_offset=diverging.end_offset,
        )

    def _report_idle(self, request: ReplicaFetchRequest, now_ms: int) -> list[ReplicaFetched | None]:
        """The follower's last positions still hold in partitions that it does not name."""
        if now_ms - self._idle_reported_ms < self._idle_report_ms:
            return []
        self._idle_reported_ms = now_ms
        named = {_key(wanted) for wanted in request.partitions}
        idle = [(key, followed.position) for key, followed in self._followed.items() if key not in named]
        return [self._report(request, key, position) for key, position in idle]

    def _read(self) -> None:
        """Read partitions that are ready, within the budget; those that are left stay ready."""
        budget = self._max_bytes
        for key in list(self._ready):
            if budget <= 0:
                return
            self._ready.pop(key, None)
            answer, parts = self._read_partition(self._followed[key], min(budget, self._max_partition_bytes))
            if answer is not None:
                self._answers.append(answer)
                self._payload += parts
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
            purge_offset=read.purge_offset,
        )
        return answer, parts

    def _high_watermarks(self) -> list[ReplicaFetched]:
        """Nothing new came in time: answer with high watermarks and log starts that have changed."""
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


def _key(wanted: ReplicaPartition) -> PartitionKey:
    return wanted.topic_id, wanted.partition
