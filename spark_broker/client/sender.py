"""Gets batches to their leaders: in order, at most five unacknowledged for each partition, again after a failure.

State is under one lock; nothing under it waits, does I/O or runs a user's callback. Threads: one sends and one receives
for each leader (`append_channel`), one keeps the deadlines, one recovers: it is the only one that waits for metadata.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

from spark_broker.client.append_channel import AppendChannel, InFlight
from spark_broker.client.append_deadlines import STALLED_S, AppendDeadlines
from spark_broker.client.cluster_view import ClusterView, address_of
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.outgoing import Identity, OutgoingBatch
from spark_broker.client.partition_queue import Completion, PartitionQueue
from spark_broker.client.retry import Deadline, RecoveryPace
from spark_broker.config import ProducerConfig
from spark_broker.errors import (
    BufferExhaustedError,
    ClosedError,
    DuplicateSequenceNumberError,
    NetworkError,
    RequestTimedOutError,
    SparkBrokerError,
    UnknownServerError,
    error_from_code,
    invariant,
)
from spark_broker.protocol.messages import ACKS_ALL, AppendRequest, AppendResponse, InitProducerId, ProducerIdentity

UNANSWERED_AGE_MAX_S = 1.0


class Sender:
    """Owns the queues of a producer and the channels to leaders.

    With a transactional id, identities come from `take_identity`, and `on_failure` hears of each batch that failed for
    good, before the batch counts as done.
    """

    def __init__(
        self,
        metadata: ClusterMetadata,
        config: ProducerConfig,
        on_failure: Callable[[SparkBrokerError], None] = lambda error: None,
    ) -> None:
        self.lock = threading.Lock()
        self._on_failure = on_failure
        self._refusal: SparkBrokerError | None = None
        self._metadata = metadata
        self._config = config
        self._acks = ACKS_ALL if config.acks in ("all", "-1") else int(config.acks)
        self._numbered = config.enable_idempotence and self._acks == ACKS_ALL
        self._changed = threading.Condition(self.lock)  # buffer freed, or a batch completed
        self._recovery = threading.Condition(self.lock)
        self._deadlines = AppendDeadlines(config.request_timeout_ms / 1000)
        self._sooner = threading.Condition(self.lock)
        self._next_look_s = math.inf  # when deadlines are looked at; whoever sets an earlier one says so
        self._queues: dict[tuple[str, int], PartitionQueue] = {}
        self._channels: dict[int, AppendChannel] = {}
        self._recovering: set[PartitionQueue] = set()
        self._refresh_wanted = False
        self._incomplete: set[OutgoingBatch] = set()
        self._buffered_bytes = 0
        self._correlation_id = 0
        self._identity: Identity | None = None
        self._identity_lock = threading.Lock()
        self._closed = False
        self.acknowledged_rows = 0
        self.acknowledged_batches = 0
        self.retries = 0
        self._threads = [
            threading.Thread(target=target, name=f"{config.client_id or 'producer'}-{what}", daemon=True)
            for target, what in ((self._keep_deadlines, "deadlines"), (self._recover, "recovery"))
        ]
        for thread in self._threads:
            thread.start()

    # ---- the producer's side ----------------------------------------------------------------------------------------

    def prepare(self, deadline: Deadline) -> None:
        """Get a producer id, once. Raises typed errors when no broker gives one in time."""
        if not self._numbered or self._identity is not None:
            return
        with self._identity_lock:
            if self._identity is None:
                self._identity = self._new_identity(deadline)

    def reserve(self, size_bytes: int, deadline: Deadline) -> None:
        """Wait for room in the buffer. Raises BufferExhaustedError at the deadline, ClosedError after close."""
        limit = self._config.buffer_memory
        with self._changed:
            room = self._changed.wait_for(
                # A batch larger than the whole buffer goes alone.
                lambda: self._closed or not self._buffered_bytes or self._buffered_bytes + size_bytes <= limit,
                deadline.remaining_s,
            )
            if self._closed:
                raise ClosedError("the producer is closed")
            if not room:
                raise BufferExhaustedError(
                    f"{self._buffered_bytes} of {limit} bytes wait to be acknowledged; "
                    f"{size_bytes} more did not fit in time"
                )
            self._buffered_bytes += size_bytes

    def enqueue(self, batch: OutgoingBatch) -> None:
        """Take a batch for which room is reserved, and write it in this thread when nothing is before it.

        Raises ClosedError after close, and what `refuse` was given.
        """
        with self._changed:
            refusal = _closed_error() if self._closed else self._refusal
            if refusal is not None:
                self._buffered_bytes -= batch.size_bytes
                self._changed.notify_all()
                raise refusal
            batch.deadline_s = time.monotonic() + self._config.delivery_timeout_ms / 1000
            self._look_by(batch.deadline_s)
            self._incomplete.add(batch)
            queue = self._queue_of(batch)
            queue.unacked.append(batch)
            channel = self._route(queue) if not queue.recovering else None
        if channel is not None:
            channel.write_now()

    def drain(self, deadline: Deadline) -> bool:
        """Wait until every batch that is enqueued now has its outcome; returns whether all have."""
        with self._changed:
            awaited = set(self._incomplete)
            return self._changed.wait_for(lambda: awaited.isdisjoint(self._incomplete), deadline.remaining_s)

    def take_identity(self, identity: Identity) -> None:
        """Number from 0 on, in every partition, under this identity. Every batch has its outcome."""
        with self.lock:
            invariant(not self._drop_queues(_closed_error()), "no batch is left when a transaction ends")
            self._identity, self._refusal = identity, None

    def refuse(self, error: SparkBrokerError) -> None:
        """Fail what is not acknowledged, and what is enqueued from now on, until there is another identity.

        What is in flight may still be stored.
        """
        with self.lock:
            self._refusal = error
            completions = self._drop_queues(error)
        self._complete(completions)

    def close(self) -> None:
        """Fail what is left and end the threads."""
        with self.lock:
            self._closed = True
            completions = self._drop_queues(_closed_error())
            channels = list(self._channels.values())
            self._channels.clear()
            for channel in channels:
                channel.broken = True
            self._recovery.notify_all()
            self._changed.notify_all()
            self._sooner.notify_all()
        for channel in channels:
            channel.close()
        self._complete(completions)

    # ---- the channels' side -----------------------------------------------------------------------------------------

    def next_append(self, channel: AppendChannel) -> tuple[AppendRequest, OutgoingBatch] | None:
        """The next batch of the channel's line, numbered and taken; partitions take turns."""
        with self.lock:
            while channel.line and not channel.broken:
                queue = channel.line.popleft()
                queue.ready = False
                batch = queue.sendable(self._config.max_in_flight_requests_per_connection)
                if batch is None:
                    continue
                queue.sent(batch)
                self._correlation_id += 1
                batch.correlation_id = self._correlation_id
                now_s = time.monotonic()
                channel.in_flight[batch.correlation_id] = InFlight(queue, batch, now_s)
                self._look_by(self._deadlines.first_s(now_s))
                self._line_up(queue)
                return self._request(channel, queue, batch), batch
            return None

    def written(self, channel: AppendChannel, request: AppendRequest, batch: OutgoingBatch) -> None:
        """With acks=0 nobody answers: written is all there is to know."""
        with self.lock:
            entry = channel.in_flight.pop(request.correlation_id, None) if self._acks == 0 else None
            completions = [] if entry is None else self._acknowledge(entry.queue, batch, -1)
        self._complete(completions)

    def answered(self, channel: AppendChannel, response: AppendResponse) -> None:
        """The leader stored the batch, or says why not."""
        with self.lock:
            entry = channel.in_flight.pop(response.correlation_id, None)
            if entry is None:  # expired meanwhile
                return
            queue, batch, _ = entry
            batch.correlation_id = -1
            if response.error_code in (0, DuplicateSequenceNumberError.code):
                # A duplicate that the broker no longer knows the offset of is in the log all the same.
                completions = self._acknowledge(queue, batch, response.base_offset if not response.error_code else -1)
            else:
                queue.failed(batch, error_from_code(response.error_code, response.error_message))
                completions = self._settle(queue)
        self._complete(completions)

    def broke(self, channel: AppendChannel, error: SparkBrokerError) -> None:
        """Whether what is in flight was stored is not known: it is sent again, to whoever leads then."""
        with self.lock:
            if channel.broken:
                return
            completions = self._break(channel, error)
        self._metadata.suspect(channel.address)
        channel.close()
        self._complete(completions)

    # ---- under the lock ---------------------------------------------------------------------------------------------

    def _drop_queues(self, error: SparkBrokerError) -> list[Completion]:
        """Forget every batch and what was known of its partition; answers that come later belong to nothing."""
        completions = [c for queue in self._queues.values() for c in queue.fail_all(error)]
        self._queues.clear()
        self._recovering.clear()
        for channel in self._channels.values():
            channel.line.clear()
            channel.in_flight.clear()
        return completions

    def _queue_of(self, batch: OutgoingBatch) -> PartitionQueue:
        key = (batch.topic_id, batch.topic_partition.partition)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = PartitionQueue(
                batch.topic_partition,
                batch.topic_id,
                self._identity,
                numbered=self._numbered,
                renumbers=not self._config.transactional_id,
            )
        return queue

    def _route(self, queue: PartitionQueue) -> AppendChannel | None:
        """The channel to the partition's leader, with the queue in its line; None: recovery looks for the leader."""
        routed = queue.channel is not None and not queue.channel.broken and queue.in_flight > 0
        if not routed and not self._find_leader(queue, self._metadata.view):
            queue.stop()
            self._settle(queue)
            return None
        self._line_up(queue)
        return queue.channel

    def _find_leader(self, queue: PartitionQueue, view: ClusterView) -> bool:
        tp = queue.topic_partition
        topic, leader = view.topic(tp.topic), view.leader(tp.topic, tp.partition)
        if topic is None or topic.topic_id != queue.topic_id or leader is None:
            return False
        broker, state = leader
        channel = self._channels.get(broker.id)
        if channel is not None and channel.address != address_of(broker):
            return False  # `_apply` breaks the old one
        if channel is None:
            name = self._config.client_id or "producer"
            channel = AppendChannel(self, broker.id, address_of(broker), self._config.request_timeout_ms, name)
            self._channels[broker.id] = channel
        if queue.ready and queue.channel is not None and queue.channel is not channel:
            # Nobody may write to the old leader any more, and there the batches would only be passed over.
            queue.channel.line.remove(queue)
            queue.ready = False
        queue.channel, queue.leader_epoch = channel, state.leader_epoch
        return True

    def _line_up(self, queue: PartitionQueue) -> None:
        channel = queue.channel
        if channel is None or queue.ready or queue.sendable(self._config.max_in_flight_requests_per_connection) is None:
            return
        queue.ready = True
        channel.line.append(queue)

    def _request(self, channel: AppendChannel, queue: PartitionQueue, batch: OutgoingBatch) -> AppendRequest:
        return AppendRequest(
            correlation_id=batch.correlation_id,
            topic_id=batch.topic_id,
            partition=batch.topic_partition.partition,
            leader_epoch=queue.leader_epoch,
            acks=self._acks,
            timeout_ms=self._config.request_timeout_ms,
            schema_id=batch.schema_id,
            transactional_id=self._config.transactional_id,
            answers_read=channel.answers_read,
        )

    def _acknowledge(self, queue: PartitionQueue, batch: OutgoingBatch, base_offset: int) -> list[Completion]:
        queue.acknowledged(batch)
        self.acknowledged_rows += batch.rows
        self.acknowledged_batches += 1
        if queue.recovering:
            return [(batch, batch.metadata(base_offset)), *self._settle(queue)]
        self._line_up(queue)
        if queue.ready and queue.channel is not None:
            queue.channel.wake()
        return [(batch, batch.metadata(base_offset))]

    def _settle(self, queue: PartitionQueue) -> list[Completion]:
        """Once every answer of a failed round is in: hand the partition to recovery."""
        if not queue.recovering or queue.in_flight or queue.settled:
            return []
        completions = queue.settle()
        wait_s = self._metadata.backoff.wait_s(queue.failures)
        queue.retry_at_s = time.monotonic() + wait_s
        queue.failures += 1
        self.retries += len(queue.unacked)
        self._recovering.add(queue)
        self._recovery.notify_all()
        return completions

    def _break(self, channel: AppendChannel, error: SparkBrokerError) -> list[Completion]:
        channel.broken = True
        if self._channels.get(channel.broker_id) is channel:
            del self._channels[channel.broker_id]
        touched = {entry.queue for entry in channel.in_flight.values()} | set(channel.line)
        for entry in channel.in_flight.values():
            entry.batch.correlation_id = -1
            # A typed error of the stream as a whole says nothing certain about one append.
            lost = error if error.retriable else NetworkError(f"{channel.address}: {error}")
            entry.queue.failed(entry.batch, lost)
        channel.in_flight.clear()
        channel.line.clear()
        completions: list[Completion] = []
        for queue in touched:
            queue.ready = False
            queue.stop()
            completions += self._settle(queue)
        return completions

    # ---- outcomes ---------------------------------------------------------------------------------------------------

    def _complete(self, completions: Iterable[Completion]) -> None:
        """Tell the futures, outside the lock (their callbacks may append), and only then count the batches as done."""
        done = list(completions)
        if not done:
            return
        for batch, outcome in done:
            if isinstance(outcome, SparkBrokerError):
                self._on_failure(outcome)
            batch.complete(outcome)
        with self._changed:
            for batch, _ in done:
                self._incomplete.discard(batch)
                self._buffered_bytes -= batch.size_bytes
            self._changed.notify_all()

    # ---- deadlines --------------------------------------------------------------------------------------------------

    def _keep_deadlines(self) -> None:
        """Sleeps until the earliest deadline: a producer that does nothing costs nothing."""
        while True:
            with self._sooner:
                while not self._closed and (left_s := self._next_look_s - time.monotonic()) > 0:
                    self._sooner.wait(None if left_s == math.inf else left_s)
                if self._closed:
                    return
                now_s = time.monotonic()
                completions = [c for queue in list(self._queues.values()) for c in self._expire(queue, now_s)]
                channels = self._channels.values()
                overdue = self._deadlines.overdue(channels, now_s)
                age_max_s = self._metadata_age_max_s(stalled=self._deadlines.stalled(channels, now_s))
                age_s = self._metadata.age_s
                if age_s > age_max_s:
                    self._refresh_wanted = True
                    self._recovery.notify_all()
                refresh_s = now_s + age_max_s - age_s
                self._next_look_s = self._deadlines.next_s(self._queues.values(), channels, refresh_s, now_s)
            self._complete(completions)
            for channel in overdue:
                self.broke(channel, RequestTimedOutError(f"{channel.address} did not answer an append in time"))

    def _look_by(self, at_s: float) -> None:
        """Under the lock: something has this deadline now."""
        if at_s < self._next_look_s:
            self._next_look_s = at_s
            self._sooner.notify()

    def _metadata_age_max_s(self, *, stalled: bool) -> float:
        if stalled:
            return STALLED_S / 2
        if self._acks == 0 and self._channels:
            return UNANSWERED_AGE_MAX_S  # nobody says that the leader has moved
        return self._config.metadata_max_age_ms / 1000 if self._channels else float("inf")

    def _expire(self, queue: PartitionQueue, now_s: float) -> list[Completion]:
        completions: list[Completion] = []
        for batch, in_flight in queue.expire(now_s):
            if in_flight and queue.channel is not None:
                queue.channel.in_flight.pop(batch.correlation_id, None)
            why = f"; the last attempt: {batch.last_error}" if batch.last_error else ""
            completions.append((batch, RequestTimedOutError(_expired(batch, self._config.delivery_timeout_ms) + why)))
        return completions + self._settle(queue)

    # ---- recovery ---------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        pace = RecoveryPace()
        while True:
            with self._recovery:
                self._recovery.wait_for(lambda: self._closed or self._recovering or self._refresh_wanted)
                if self._closed:
                    return
                self._refresh_wanted = False
            self._recovery_round()
            with self.lock:
                recovered = not self._recovering
            pause_s = self._metadata.backoff.wait_s(pace.after_round(recovered=recovered))
            if self._metadata.closing.wait(pause_s):
                return

    def _recovery_round(self) -> None:
        """One look at the metadata; then every partition goes on that can."""
        failure: SparkBrokerError | None = None
        try:
            self._metadata.refresh(Deadline.after_ms(self._config.request_timeout_ms))
            fresh = self._fresh_identities()
        except SparkBrokerError as error:
            # No broker answers. Appends wait until one does, or until their delivery time-out, which then says why.
            failure, fresh = error, {}
        broken: list[AppendChannel] = []
        with self.lock:
            completions = self._apply(self._metadata.view, broken) if failure is None else []
            woken: set[AppendChannel] = set()
            for queue in list(self._recovering):
                if failure is not None:
                    for batch in queue.unacked:
                        batch.last_error = failure
                    continue
                if queue in fresh and queue.needs_identity:
                    queue.take_identity(fresh[queue])
                completions += self._resume(queue)
                if not queue.recovering and queue.channel is not None:
                    woken.add(queue.channel)
            for channel in woken:
                channel.wake()
        for channel in broken:
            channel.close()
        self._complete(completions)

    def _fresh_identities(self) -> dict[PartitionQueue, Identity]:
        with self.lock:
            wanting = [queue for queue in self._recovering if queue.needs_identity]
        deadline = Deadline.after_ms(self._config.request_timeout_ms)
        return {queue: self._new_identity(deadline) for queue in wanting}

    def _new_identity(self, deadline: Deadline) -> Identity:
        answer = self._metadata.call_any(InitProducerId(), deadline)
        if not isinstance(answer, ProducerIdentity):
            raise UnknownServerError(f"InitProducerId was answered with {type(answer).__name__}")
        return Identity(answer.producer_id, answer.producer_epoch)

    def _apply(self, view: ClusterView, broken: list[AppendChannel]) -> list[Completion]:
        """Break the channels to brokers that are fenced or gone: a frozen one would hold its batches until time-out."""
        completions: list[Completion] = []
        for channel in list(self._channels.values()):
            broker = view.live_broker(channel.broker_id)
            if broker is None or address_of(broker) != channel.address:
                completions += self._break(channel, NetworkError(f"broker {channel.broker_id} is fenced or has moved"))
                broken.append(channel)
        return completions

    def _resume(self, queue: PartitionQueue) -> list[Completion]:
        now_s = time.monotonic()
        topic = self._metadata.view.topic(queue.topic_partition.topic)
        gone = queue.gone(None if topic is None else topic.topic_id, now_s)
        if gone is not None:
            self._recovering.discard(queue)
            self._queues.pop((queue.topic_id, queue.topic_partition.partition), None)
            return queue.fail_all(gone)
        state = self._metadata.view.partition(queue.topic_partition.topic, queue.topic_partition.partition)
        elected = state is not None and state.leader_epoch > queue.failed_epoch
        if not queue.settled or queue.needs_identity or not (elected or now_s >= queue.retry_at_s):
            return []
        if self._find_leader(queue, self._metadata.view):
            queue.recovering = False
            self._recovering.discard(queue)
            self._line_up(queue)
        return []


def _expired(batch: OutgoingBatch, timeout_ms: int) -> str:
    return f"a batch of {batch.rows} rows for {batch.topic_partition} was not acknowledged within {timeout_ms} ms"


def _closed_error() -> SparkBrokerError:
    return ClosedError("the producer was closed before the append was acknowledged")
