"""Reads ahead from one leader: a thread with a stream of long polls, bounded by what waits to be handed out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from spark_broker.client.assignment import Assignment, PartitionState, Prefetched, Start
from spark_broker.client.cluster_view import TopicView
from spark_broker.client.fetch_decoder import Projection, decode_fetched
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.settings import Address
from spark_broker.config import ConsumerConfig
from spark_broker.core.divergence import Diverging
from spark_broker.errors import (
    CorruptMessageError,
    InvalidRequestError,
    InvariantError,
    LogTruncationError,
    NetworkError,
    OffsetOutOfRangeError,
    SchemaMismatchError,
    SparkBrokerError,
    error_from_code,
)
from spark_broker.protocol.messages import FetchedPartition, FetchPartition, FetchRequest, FetchResponse
from spark_broker.transport.client import ClientStream, Connection

FULL_WAIT_MS = 20
"""Longest wait of a fetch that leaves out a partition whose buffer is full: it must not starve once it is emptied."""

IDLE_WAIT_MAX_MS = 5000
"""Longest wait of a fetch where nothing has come for long. Asking costs everybody; news end a wait at once."""

RETRY_TICK_S = 0.05


class _Asked:
    """A partition as a request has it: an answer is taken only for the same generation and offset."""

    __slots__ = ("generation", "offset", "state", "topic")

    def __init__(self, state: PartitionState, topic: TopicView) -> None:
        self.state = state
        self.topic = topic
        self.generation = state.generation
        self.offset = state.fetch_offset


_Key = tuple[str, int]


class LeaderFetcher:
    """Fetches from one broker whatever it leads of the assignment."""

    def __init__(
        self,
        broker_id: int,
        address: Address,
        assignment: Assignment,
        metadata: ClusterMetadata,
        config: ConsumerConfig,
        columns: Sequence[str] | None,
    ) -> None:
        self.broker_id = broker_id
        self.address = address
        self.due_s = 0.0  # when the request that is under way is answered at the latest (monotonic); 0: none is
        self._wait_ms = config.fetch_max_wait_ms
        self._assignment = assignment
        self._metadata = metadata
        self._config = config
        self._columns = columns
        self._connection: Connection | None = None
        self._stream: ClientStream | None = None
        self._correlation_id = 0
        self._interrupted = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"fetch-{broker_id}", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """Break a long poll: what to fetch has changed. The caller holds the assignment's lock."""
        if self.due_s:
            self._interrupted = True
            if self._stream is not None:
                self._stream.close()

    def close(self) -> None:
        """End the thread. The caller holds the assignment's lock."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()
        self._assignment.changed.notify_all()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._fetch_once():
                pass
        except Exception as error:
            with self._assignment.changed:
                self._assignment.failure = InvariantError(f"a fetch thread ended: {type(error).__name__}: {error}")
                self._assignment.changed.notify_all()
            raise
        finally:
            self._drop_stream()

    def _fetch_once(self) -> bool:
        """One request and its answer; False: closed."""
        request, asked = self._next_request()
        if request is None:
            return False
        try:
            response, payload = self._exchange(request)
        except SparkBrokerError as error:
            self._drop_stream()
            self._exchange_failed(asked, error)
            return True
        self._pace(found=bool(payload))
        offset = 0
        for answer in response.partitions:
            part = asked.get((answer.topic_id, answer.partition))
            if part is not None and not self._closed:
                self._take(part, answer, payload[offset : offset + answer.length])
            offset += answer.length
        return True

    def _next_request(self) -> tuple[FetchRequest | None, dict[_Key, _Asked]]:
        """Wait until there is something to fetch, and room for it."""
        with self._assignment.changed:
            while not self._closed:
                asked, left_out = self._fetchable()
                if asked:
                    self._correlation_id += 1
                    self._interrupted = False
                    request = self._request(
                        asked, max_wait_ms=min(FULL_WAIT_MS, self._wait_ms) if left_out else self._wait_ms
                    )
                    self.due_s = time.monotonic() + request.max_wait_ms / 1000
                    return request, asked
                self._assignment.changed.wait(RETRY_TICK_S if self._backing_off() else None)
            return None, {}

    def _fetchable(self) -> tuple[dict[_Key, _Asked], bool]:
        """What to ask of this broker, least recently served first; whether full buffers leave out what has more."""
        view, now_s = self._metadata.view, time.monotonic()
        room = self._config.fetch_max_bytes - sum(s.buffered_bytes for s in self._assignment.partitions.values())
        asked: dict[_Key, _Asked] = {}
        left_out = False
        columns: list[str] | None = None
        for state in sorted(self._assignment.partitions.values(), key=lambda one: one.served):
            leader, topic = view.leader(state.tp.topic, state.tp.partition), view.topic(state.tp.topic)
            if leader is None or topic is None or leader[0].id != self.broker_id:
                continue
            if not state.may_fetch(leader[1].leader_epoch, now_s):
                continue
            if state.buffered_bytes and (room <= 0 or state.buffered_bytes >= self._config.max_partition_fetch_bytes):
                left_out = left_out or state.fetch_offset < state.high_watermark
                continue
            wanted = Projection(topic, self._columns).asked
            if asked and wanted != columns:
                left_out = True  # one request has one projection; the other topic has its turn next
                continue
            columns = wanted
            asked[topic.topic_id, state.tp.partition] = _Asked(state, topic)
        return asked, left_out

    def _backing_off(self) -> bool:
        now_s = time.monotonic()
        return any(state.retry_at_s > now_s for state in self._assignment.partitions.values())

    def _pace(self, *, found: bool) -> None:
        """Wait longer while nothing comes. Not where a fetch waits for more than a byte: records would wait with it."""
        longest_ms = self._config.fetch_max_wait_ms
        if found or self._config.fetch_min_bytes > 1:
            self._wait_ms = longest_ms
        else:
            self._wait_ms = max(longest_ms, min(2 * self._wait_ms, IDLE_WAIT_MAX_MS))

    def _request(self, asked: dict[_Key, _Asked], *, max_wait_ms: int) -> FetchRequest:
        partitions = []
        view = self._metadata.view
        for (topic_id, number), part in asked.items():
            self._assignment.serve(part.state)
            known = view.partition(part.topic.name, number)
            epoch = -1 if known is None else known.leader_epoch
            limit = self._config.max_partition_fetch_bytes
            read_epoch = part.state.fetched_epoch
            partitions.append(FetchPartition(topic_id, number, epoch, part.offset, limit, read_epoch))
        return FetchRequest(
            correlation_id=self._correlation_id,
            max_wait_ms=max_wait_ms,
            min_bytes=self._config.fetch_min_bytes,
            max_bytes=self._config.fetch_max_bytes,
            partitions=partitions,
            columns=Projection(next(iter(asked.values())).topic, self._columns).asked,
            read_committed=self._config.read_committed,
        )

    def _exchange(self, request: FetchRequest) -> tuple[FetchResponse, memoryview]:
        stream = self._open_stream()
        try:
            stream.send(request, timeout_ms=self._config.request_timeout_ms)
            response, payload = stream.receive(timeout_ms=request.max_wait_ms + self._config.request_timeout_ms)
        finally:
            self.due_s = 0.0
        if not isinstance(response, FetchResponse) or response.correlation_id != request.correlation_id:
            raise InvalidRequestError(f"{self.address} did not answer the fetch that was sent")
        if response.error_code:
            raise error_from_code(response.error_code, response.error_message)
        return response, payload

    def _open_stream(self) -> ClientStream:
        stream = self._stream
        if stream is None:
            if self._connection is None:
                self._connection = Connection(self.address.host, self.address.port)
            stream = self._connection.open_stream("fetch")
            with self._assignment.lock:
                self._stream = stream
                if self._closed or self._interrupted:
                    raise NetworkError("interrupted")
        return stream

    def _drop_stream(self) -> None:
        with self._assignment.lock:
            stream, self._stream = self._stream, None
            self.due_s = 0.0
        if stream is not None:
            stream.close()

    def _exchange_failed(self, asked: dict[_Key, _Asked], error: SparkBrokerError) -> None:
        """An interrupted poll is asked again at once; a broken stream after a backoff and a look for the leader."""
        with self._assignment.changed:
            if self._interrupted or self._closed:
                return
            self._metadata.suspect(self.address)
            for part in asked.values():
                self._failed(part, error if error.retriable else NetworkError(f"{self.address}: {error}"))
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _take(self, part: _Asked, answer: FetchedPartition, payload: memoryview) -> None:
        """One partition's answer."""
        error: SparkBrokerError | None = None
        fetched: list[Prefetched] = []
        if answer.error_code:
            error = error_from_code(answer.error_code, answer.error_message)
        else:
            try:
                fetched = decode_fetched(payload, part.topic, answer, part.offset, self._columns)
            except SparkBrokerError as failure:
                error = failure
        with self._assignment.changed:
            state = part.state
            if state.generation != part.generation or state.fetch_offset != part.offset:
                return  # the caller has gone elsewhere meanwhile
            if isinstance(error, LogTruncationError):
                self._truncated(state, Diverging(answer.diverging_epoch, answer.diverging_end_offset))
                return
            if error is not None:
                self._failed(part, error)
                return
            state.failures = 0
            state.high_watermark = answer.high_watermark
            state.add(fetched)
            if fetched:
                self._assignment.changed.notify_all()

    def _failed(self, part: _Asked, error: SparkBrokerError) -> None:
        """Under the lock: what a partition's error means."""
        state = part.state
        if state.generation != part.generation:
            return
        if isinstance(error, OffsetOutOfRangeError):
            self._out_of_range(state, error)
        elif isinstance(error, CorruptMessageError | SchemaMismatchError) or not error.retriable:
            state.error = error
        else:
            self._back_off(state)
            self._assignment.refresh_wanted = self._assignment.refresh_wanted or error.refresh_metadata
        self._assignment.changed.notify_all()

    def _truncated(self, state: PartitionState, diverging: Diverging) -> None:
        """Under the lock. What was fetched before is handed out first: it was committed when it was read."""
        if state.buffer:
            self._back_off(state)
        else:
            state.truncated(diverging)
        self._assignment.changed.notify_all()

    def _back_off(self, state: PartitionState) -> None:
        known = self._metadata.view.partition(state.tp.topic, state.tp.partition)
        state.failed_epoch = -1 if known is None else known.leader_epoch
        state.retry_at_s = time.monotonic() + self._metadata.backoff.wait_s(state.failures)
        state.failures += 1

    def _out_of_range(self, state: PartitionState, error: OffsetOutOfRangeError) -> None:
        if state.buffer:
            # What was fetched before is in range; the position is judged when it is used up.
            self._back_off(state)
            return
        reset = Start(self._config.auto_offset_reset)
        if reset is Start.NONE:
            state.error = OffsetOutOfRangeError(f"{state.tp}: offset {state.fetch_offset}: {error.message}")
        else:
            state.find_start(reset)
