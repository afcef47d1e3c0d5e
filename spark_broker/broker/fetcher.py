"""A follower's side of replication: one thread for each leader broker, pulling every partition they share."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from spark_broker.broker.partition import Partition, PartitionKey
from spark_broker.core.replica import Diverging, Fetched, FetchPosition
from spark_broker.errors import CorruptMessageError, NetworkError, SparkBrokerError
from spark_broker.protocol.frame import decode_frames
from spark_broker.protocol.messages import (
    ReplicaFetched,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
    ReplicaPartition,
    ReplicaState,
    ReplicaStateAnswer,
)
from spark_broker.transport.client import ClientStream, Connection

logger = logging.getLogger(__name__)

RETRY_S = 0.05
"""Wait before a partition that had an error, or a broken connection, is tried again."""


@dataclass(frozen=True, slots=True)
class FetcherSettings:
    """Who pulls, and how much at a time."""

    broker_id: int
    broker_epoch: int
    max_wait_ms: int
    max_bytes: int
    request_timeout_ms: int


class Fetcher(Protocol):
    """Pulls from one leader broker what this broker follows there."""

    @property
    def address(self) -> tuple[str, int]: ...

    @property
    def settings(self) -> FetcherSettings: ...

    def start(self) -> None: ...

    def follow(self, partitions: dict[PartitionKey, Partition], leader_epochs: dict[PartitionKey, int]) -> None: ...

    def stop(self) -> None: ...


class ReplicaFetcher(threading.Thread):
    """Pulls from one leader. The set of partitions may change at any time; a change interrupts a long poll."""

    def __init__(
        self, host: str, port: int, settings: FetcherSettings, on_bug: Callable[[BaseException], None]
    ) -> None:
        super().__init__(name=f"fetcher-{host}:{port}", daemon=True)
        self._host, self._port = host, port
        self._settings = settings
        self._on_bug = on_bug
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._partitions: dict[PartitionKey, Partition] = {}
        self._leader_epochs: dict[PartitionKey, int] = {}
        self._stopped = False
        self._generation = 0  # rises with every change of what is to be pulled
        self._stream: ClientStream | None = None
        # The thread's own.
        self._pending: set[PartitionKey] = set()  # to be named in the next request
        self._retry_at: dict[PartitionKey, float] = {}
        self._asked: dict[PartitionKey, FetchPosition] = {}  # what the leader last heard on this stream
        self._correlation_ids = itertools.count()

    @property
    def address(self) -> tuple[str, int]:
        return self._host, self._port

    @property
    def settings(self) -> FetcherSettings:
        return self._settings

    def follow(self, partitions: dict[PartitionKey, Partition], leader_epochs: dict[PartitionKey, int]) -> None:
        """Pull exactly these from now on, at these leader epochs; a change interrupts a long poll that is under way."""
        with self._changed:
            if partitions == self._partitions and leader_epochs == self._leader_epochs:
                return
            self._partitions = dict(partitions)
            self._leader_epochs = dict(leader_epochs)
            self._interrupt()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._partitions = {}
            self._interrupt()

    def _interrupt(self) -> None:
        self._generation += 1
        self._changed.notify_all()
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def run(self) -> None:
        connection = Connection(self._host, self._port)
        try:
            while (generation := self._wait_for_work()) is not None:
                try:
                    self._session_on(connection, generation)
                except NetworkError as error:
                    logger.debug("replication from %s: %s", connection.address, error)
                    self._pause(generation)
                except SparkBrokerError as error:
                    logger.warning("replication from %s: %s", connection.address, error)
                    self._pause(generation)
        except BaseException as error:
            self._on_bug(error)
            raise
        finally:
            connection.close()

    def _wait_for_work(self) -> int | None:
        """The generation of the work at hand; None: stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or bool(self._partitions))
            return None if self._stopped else self._generation

    def _pause(self, generation: int) -> None:
        """Wait before the next try; not at all when there is other work by now."""
        with self._changed:
            self._changed.wait_for(lambda: self._generation != generation, RETRY_S)

    def _session_on(self, connection: Connection, generation: int) -> None:
        stream = connection.open_stream("replica")
        try:
            with self._changed:
                if self._generation != generation:
                    return
                self._stream = stream
                partitions = self._partitions
            self._session_of(connection, stream, partitions, generation)
        finally:
            stream.close()

    def _session_of(
        self,
        connection: Connection,
        stream: ClientStream,
        partitions: dict[PartitionKey, Partition],
        generation: int,
    ) -> None:
        self._retry_at.clear()
        self._asked.clear()
        self._pending = set(partitions)
        while self._generation == generation:
            self._pull(connection, stream, partitions)

    def _pull(self, connection: Connection, stream: ClientStream, partitions: dict[PartitionKey, Partition]) -> None:
        """One request, one response, and what it says carried out."""
        named = self._named(partitions)
        settings = self._settings
        request = ReplicaFetchRequest(
            correlation_id=next(self._correlation_ids),
            broker_id=settings.broker_id,
            broker_epoch=settings.broker_epoch,
            max_wait_ms=self._max_wait_ms(),
            max_bytes=settings.max_bytes,
            partitions=named,
        )
        stream.send(request, timeout_ms=settings.request_timeout_ms)
        response, payload = stream.receive(timeout_ms=settings.request_timeout_ms)
        if not isinstance(response, ReplicaFetchResponse):
            raise NetworkError(f"a {type(response).__name__} where a fetch response was due")
        at = 0
        for answer in response.partitions:
            key = (answer.topic_id, answer.partition)
            if key in self._asked:
                self._apply(connection, partitions[key], answer, payload[at : at + answer.length])
            at += answer.length

    def _named(self, partitions: dict[PartitionKey, Partition]) -> list[ReplicaPartition]:
        now = time.monotonic()
        due = {key for key, at in self._retry_at.items() if at <= now}
        for key in due:
            del self._retry_at[key]
        named = []
        for key in self._pending | due:
            position = partitions[key].fetch_position()
            if position is not None:
                self._asked[key] = position
                named.append(
                    ReplicaPartition(*key, position.leader_epoch, position.fetch_offset, position.last_fetched_epoch)
                )
        self._pending = set()
        return named

    def _max_wait_ms(self) -> int:
        if not self._retry_at:
            return self._settings.max_wait_ms
        soonest = min(self._retry_at.values()) - time.monotonic()
        return max(1, min(self._settings.max_wait_ms, int(soonest * 1000)))

    def _apply(self, connection: Connection, partition: Partition, answer: ReplicaFetched, payload: memoryview) -> None:
        if answer.error_code:
            logger.debug("%s is not pulled: error %s %s", partition, answer.error_code, answer.error_message)
            self._retry_at[partition.key] = time.monotonic() + RETRY_S
            return
        try:
            frames = decode_frames(payload)
            partition.apply(_fetched(answer, self._asked[partition.key]), frames)
            if partition.restart_reason is not None:
                self._restart(connection, partition, answer.leader_epoch)
        except CorruptMessageError as error:
            logger.warning("%s: the leader sent a batch that fails its checksum: %s", partition, error)
            self._retry_at[partition.key] = time.monotonic() + RETRY_S
            return
        except SparkBrokerError as error:
            logger.warning("%s: %s", partition, error)
            self._retry_at[partition.key] = time.monotonic() + 1.0
            return
        self._pending.add(partition.key)

    def _restart(self, connection: Connection, partition: Partition, leader_epoch: int) -> None:
        logger.info("%s is made anew: %s", partition, partition.restart_reason)
        topic_id, number = partition.key
        request = ReplicaState(topic_id, number, leader_epoch)
        state = connection.call(request, timeout_ms=self._settings.request_timeout_ms)
        if isinstance(state, ReplicaStateAnswer):
            partition.restart(leader_epoch, state)


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
    )
