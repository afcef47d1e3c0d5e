"""A follower's side of one fetch session, without its stream: what to ask next, and what an answer does.

It knows no thread and no socket, so a simulated broker runs it as well. Partitions are handled in the order in which
they are given, never in the order of a hash.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_state import AwaitedState
from spark_broker.core.replica import Diverging, Fetched, FetchPosition
from spark_broker.errors import (
    CorruptMessageError,
    NetworkError,
    SparkBrokerError,
    StorageRefusedError,
    again,
    error_from_code,
    invariant,
)
from spark_broker.protocol.frame import decode_frames
from spark_broker.protocol.messages import (
    ReplicaFetched,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
    ReplicaPartition,
    ReplicaStateRequest,
    ReplicaStateResponse,
)

logger = logging.getLogger(__name__)

RETRY_MS = 50
"""Wait before a partition that had an error is tried again."""

FAILED_RETRY_MS = 1000
"""Wait before a partition that could not be written, or rebuilt, is tried again."""


@dataclass(frozen=True, slots=True)
class FetcherSettings:
    """Who pulls, and how much at a time."""

    broker_id: int
    broker_epoch: int
    max_wait_ms: int
    max_bytes: int
    request_timeout_ms: int


@dataclass(frozen=True, slots=True)
class _Rebuild:
    """A replica that is rebuilt, with the state of the leader's replica."""

    partition: Partition
    leader_epoch: int
    awaited: AwaitedState


class FetchSession:
    """The follower's end of one stream. One request is out at a time: `next_request` makes it, then comes its answer.

    A `ReplicaFetchRequest` is sent on the stream, and its answer goes to `received`. A `ReplicaStateRequest` is a
    separate call, and its answer goes to `state_received`.
    """

    def __init__(
        self,
        settings: FetcherSettings,
        partitions: dict[PartitionKey, Partition],
        clock: Clock = SYSTEM_CLOCK,
        number: int = 0,
    ) -> None:
        """`number`: larger than that of every earlier session with this leader."""
        self.number = number
        self._settings = settings
        self._partitions = partitions
        self._clock = clock
        self._pending: dict[PartitionKey, None] = dict.fromkeys(partitions)  # to be named in the next request
        self._retry_at_ms: dict[PartitionKey, int] = {}
        self._asked: dict[PartitionKey, FetchPosition] = {}  # what the leader was last asked on this stream
        self._untaken: set[PartitionKey] = set()  # their last answer was not applied; the leader believes it was
        self._no_room: set[PartitionKey] = set()  # their last batches did not fit on the disk
        self._rebuilds: deque[_Rebuild] = deque()
        self._requests = 0

    def next_request(self) -> ReplicaFetchRequest | ReplicaStateRequest:
        """What the leader is asked next. Replicas that are rebuilt come first, one after the other."""
        if self._rebuilds:
            return self._rebuilds[0].awaited.request
        return self._fetch_request()

    def _fetch_request(self) -> ReplicaFetchRequest:
        """Names partitions that are new, that the last answer was about, or that are due for a retry."""
        settings = self._settings
        self._requests += 1
        named = self._named()
        forgotten = [key for asked in named if (key := (asked.topic_id, asked.partition)) in self._untaken]
        self._untaken.difference_update(forgotten)
        return ReplicaFetchRequest(
            correlation_id=self._requests,
            broker_id=settings.broker_id,
            broker_epoch=settings.broker_epoch,
            partitions=named,
            max_wait_ms=self._max_wait_ms(),
            max_bytes=settings.max_bytes,
            session=self.number,
            forgotten=forgotten,  # the leader forgets first, then adds: so it sends its high watermark again
        )

    def received(self, response: object, payload: memoryview) -> None:
        """Carry out the leader's response. Raises NetworkError when it is no answer to a fetch."""
        if not isinstance(response, ReplicaFetchResponse):
            raise NetworkError(f"a {type(response).__name__} where a fetch response was due")
        at = 0
        for answer in response.partitions:
            key = (answer.topic_id, answer.partition)
            if key in self._asked:
                frames = payload[at : at + answer.length]
                self._guarded(key, partial(self._apply, key, answer, frames))
            at += answer.length

    def state_received(self, answer: object) -> None:
        """A piece of the state of the leader's replica, or the error of the call. After an error the rebuild is retried
        later.
        """
        invariant(bool(self._rebuilds), "the state of a replica that is not rebuilt")
        rebuild = self._rebuilds.popleft()
        self._guarded(rebuild.partition.key, partial(self._rebuild, rebuild, answer))

    def _rebuild(self, rebuild: _Rebuild, answer: object) -> None:
        partition = rebuild.partition
        if isinstance(answer, SparkBrokerError):
            raise again(answer)
        if isinstance(answer, ReplicaStateResponse):
            state = rebuild.awaited.take(answer)
            if state is None:
                self._rebuilds.appendleft(rebuild)
                return
            leader_epoch = rebuild.leader_epoch
            fields = {"topic_partition": str(partition), "leader_epoch": leader_epoch, "why": partition.restart_reason}
            text = "%(topic_partition)s: rebuilt from its leader's log in leader epoch %(leader_epoch)d: %(why)s"
            logger.info(text, fields)
            partition.restart(leader_epoch, state)
        self._pending[partition.key] = None

    def _named(self) -> list[ReplicaPartition]:
        now_ms = self._clock.boottime_ms()
        due = [key for key, at_ms in self._retry_at_ms.items() if at_ms <= now_ms]
        for key in due:
            del self._retry_at_ms[key]
        named = []
        for key in {**self._pending, **dict.fromkeys(due)}:
            position = self._partitions[key].fetch_position()
            if position is not None:
                self._asked[key] = position
                named.append(
                    ReplicaPartition(
                        *key,
                        position.leader_epoch,
                        position.fetch_offset,
                        position.last_fetched_epoch,
                        no_room=key in self._no_room,
                    )
                )
        self._pending = {}
        return named

    def _max_wait_ms(self) -> int:
        if not self._retry_at_ms:
            return self._settings.max_wait_ms
        soonest_ms = min(self._retry_at_ms.values()) - self._clock.boottime_ms()
        return max(1, min(self._settings.max_wait_ms, soonest_ms))

    def _apply(self, key: PartitionKey, answer: ReplicaFetched, payload: memoryview) -> None:
        partition = self._partitions[key]
        if answer.error_code:
            error = error_from_code(answer.error_code, answer.error_message)
            self._failed(key, logging.INFO, f"{error.name}: {error.message}")
            self._retry_in(key, RETRY_MS)
            return
        frames = decode_frames(payload)
        schema_ids = {frame.header.schema_id for frame in frames}
        unknown = next((schema_id for schema_id in schema_ids if not partition.topic.knows_schema(schema_id)), None)
        if unknown is not None:
            # The leader has learned of the schema first. Segments begin with it, so the batches have to wait.
            self._failed(key, logging.INFO, f"this broker does not know schema {unknown} of the topic yet")
            self._retry_in(key, RETRY_MS)
            return
        if not partition.apply(_fetched(answer, self._asked[key]), frames):
            self._untaken.add(key)
        if payload:
            self._no_room.discard(key)
        if partition.restart_reason is not None:
            self._rebuilds.append(_Rebuild(partition, answer.leader_epoch, AwaitedState(*key, answer.leader_epoch)))
        else:
            self._pending[key] = None

    def _guarded(self, key: PartitionKey, action: Callable[[], None]) -> None:
        """A partition that fails is tried again later; the others go on. A bug of our own is not caught."""
        try:
            action()
        except CorruptMessageError as error:
            why = f"the leader sent a batch that fails its checksum: {error}"
            self._failed(key, logging.WARNING, why)
            self._retry_in(key, RETRY_MS)
        except StorageRefusedError as error:
            logger.debug("%s: %s", self._partitions[key], error)  # `Room` logs it once for all partitions.
            self._no_room.add(key)
            self._retry_in(key, FAILED_RETRY_MS)
        except SparkBrokerError as error:
            self._failed(key, logging.WARNING, f"{error.name}: {error.message}")
            self._retry_in(key, FAILED_RETRY_MS)

    def _failed(self, key: PartitionKey, level: int, why: object) -> None:
        """Log that the leader did not send what was asked for, or that it could not be stored."""
        self._partitions[key].lines.fetch_failed(level, self._clock.boottime_ms(), why)

    def _retry_in(self, key: PartitionKey, wait_ms: int) -> None:
        self._untaken.add(key)
        self._retry_at_ms[key] = self._clock.boottime_ms() + wait_ms


def _fetched(answer: ReplicaFetched, position: FetchPosition) -> Fetched:
    diverging = None
    if answer.diverging_end_offset >= 0:
        diverging = Diverging(answer.diverging_epoch, answer.diverging_end_offset)
    return Fetched(
        position=position,
        leader_epoch=answer.leader_epoch,
        high_watermark=answer.high_watermark,
        log_start_offset=answer.log_start_offset,
        diverging=diverging,
        purge_offset=answer.purge_offset,
    )
