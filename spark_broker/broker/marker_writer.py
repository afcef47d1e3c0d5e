"""Writes the markers that a transaction coordinator asks for into the partitions that this broker leads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_broker.broker.append import Marker
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.errors import InvalidRequestError, InvalidTopicError, SparkBrokerError
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.messages import (
    MarkerResult,
    TransactionMarker,
    WriteTransactionMarkersRequest,
    WriteTransactionMarkersResponse,
)

MARKERS_MAX = 10_000
"""How many markers one request may have."""

OnWritten = Callable[[WriteTransactionMarkersResponse], None]


class MarkerWriter:
    """Never waits: the answer comes once every marker is committed or has failed."""

    def __init__(self, manager: ReplicaManager) -> None:
        self._manager = manager

    def write(self, request: WriteTransactionMarkersRequest, deadline_ms: int, written: OnWritten) -> None:
        """Write the markers. `written` may be called under a partition's lock, from any thread: it must not block.

        `deadline_ms` is on the boot-time clock. A marker that is not committed by then counts as failed, but may be
        committed later. Raises InvalidRequestError for more markers than a coordinator sends at once.
        """
        if sum(len(marker.partitions) for marker in request.markers) > MARKERS_MAX:
            raise InvalidRequestError(f"more than {MARKERS_MAX} markers in one request")
        wanted = [(marker, *partition) for marker in request.markers for partition in marker.partitions]
        gathered = _Gathered(len(wanted), written)
        for marker, topic_id, partition in wanted:
            self._write_one(marker, deadline_ms, _MarkerToken(gathered, marker.producer_id, topic_id, partition))

    def _write_one(self, marker: TransactionMarker, deadline_ms: int, token: _MarkerToken) -> None:
        try:
            partition = self._manager.partition(token.topic_id, token.partition)
            if partition.topic.name == TRANSACTION_STATE_TOPIC:
                # Only the coordinator may append to its log.
                raise InvalidTopicError(f"{partition} takes no markers")
            partition.append_marker(
                Marker(marker.producer_id, marker.producer_epoch, marker.committed, deadline_ms), token
            )
        except SparkBrokerError as error:
            token.refuse(error)


class _Gathered:
    """Collects the results, and hands them over when they are complete."""

    def __init__(self, count: int, written: OnWritten) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._written = written
        self._results: list[MarkerResult] = []
        if not count:
            written(WriteTransactionMarkersResponse([]))

    def add(self, result: MarkerResult) -> None:
        with self._lock:
            self._results.append(result)
            complete = len(self._results) == self._count
        if complete:
            self._written(WriteTransactionMarkersResponse(self._results))


class _MarkerToken:
    """One marker of one partition, on its way. It gets exactly one outcome."""

    def __init__(self, gathered: _Gathered, producer_id: int, topic_id: str, partition: int) -> None:
        self.topic_id = topic_id
        self.partition = partition
        self._gathered = gathered
        self._producer_id = producer_id

    def acknowledge(self, base_offset: int) -> None:
        del base_offset
        self._gathered.add(MarkerResult(self._producer_id, self.topic_id, self.partition, 0))

    def refuse(self, error: SparkBrokerError) -> None:
        message = error.message[:1000]
        self._gathered.add(MarkerResult(self._producer_id, self.topic_id, self.partition, error.code, message))
