"""Gets batches to their leaders: in order, at most five unacknowledged for each partition, again after a failure.

A state machine: events and the time in, effects out. It has no thread, clock, socket or randomness: `Sender` carries
the effects out with threads, the simulator with timers. `PartitionQueue` has the rules of one partition.

A partition that failed recovers in rounds, one after another, for all partitions that recover:

    round        event                                     next
    -----------  ----------------------------------------  ---------------------------------------------------
    IDLE         a partition recovers, or metadata is old  REFRESHING (RefreshMetadata), after the pause
    REFRESHING   metadata came, producer ids are needed    IDENTIFYING (RequestProducerIds)
    REFRESHING   metadata came                             IDLE, pausing
    IDENTIFYING  producer ids came                         IDLE, pausing
    either       no broker answered                        IDLE, pausing

Once metadata has come, each partition goes on whose leader is known, if a newer one is elected or its back-off is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from spark_broker.client.cluster_view import ClusterView, address_of
from spark_broker.client.leader_channel import InFlight, LeaderChannel
from spark_broker.client.outgoing import OutgoingBatch
from spark_broker.client.partition_queue import PartitionQueue, QueueState
from spark_broker.client.retry import Backoff, RecoveryPace
from spark_broker.client.sender_effects import (
    BatchDivided,
    CloseChannel,
    CompleteBatch,
    RefreshMetadata,
    RequestProducerIds,
    SendAppends,
    SenderEffect,
)
from spark_broker.config import ProducerConfig
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import (
    ClosedError,
    DuplicateSequenceNumberError,
    NetworkError,
    RequestTimedOutError,
    SparkBrokerError,
    error_from_code,
    invariant,
)
from spark_broker.protocol.messages import ACKS_ALL, AppendRequest, AppendResponse, BrokerMetadata

STALLED_MS = 500
"""When an append waits for longer than this, the sender asks whether its leader still leads."""

LOOK_AGAIN_MS = 100
"""What is due and under way is looked at again after this time."""

UNANSWERED_AGE_MAX_MS = 1000
"""Age of the metadata with acks=0: no answer would say that the leader has moved."""


class SenderMachine:
    """One event at a time. Times are in ms, of any clock that never goes back.

    `due_ms`: when `tick` is to be called at the latest; infinite: never. Invariants: a batch is in at most one queue; a
    queue is in `_recovering` from when it is settled until it is resumed; `_channels` has no broken channel.
    """

    def __init__(self, config: ProducerConfig, backoff: Backoff) -> None:
        self.due_ms: float = math.inf
        self.acks = ACKS_ALL if config.acks in ("all", "-1") else int(config.acks)
        self.numbered = config.enable_idempotence and self.acks == ACKS_ALL
        self.identity: ProducerIdentity | None = None
        self.acknowledged_rows = 0
        self.acknowledged_batches = 0
        self.retries = 0
        self.divided_batches = 0
        self._config = config
        self._backoff = backoff
        self._refusal: SparkBrokerError | None = None
        self._queues: dict[tuple[str, int], PartitionQueue] = {}
        self._channels: dict[int, LeaderChannel] = {}
        self._recovering: dict[PartitionQueue, None] = {}
        self._correlation_id = 0
        self._closed = False
        self._pace = RecoveryPace()
        self._asking = False  # REFRESHING or IDENTIFYING
        self._refresh_wanted = False
        self._next_round_ms = 0

    @property
    def open_batches(self) -> int:
        """Batches without an outcome."""
        return sum(len(queue.unacked) for queue in self._queues.values())

    def enqueue(self, batch: OutgoingBatch, view: ClusterView, now_ms: int) -> list[SenderEffect]:
        """Take a batch. Raises ClosedError after `close`, and what `refuse` was given."""
        refusal = _closed_error() if self._closed else self._refusal
        if refusal is not None:
            raise refusal
        batch.deadline_ms = now_ms + self._config.delivery_timeout_ms
        self._look_by(batch.deadline_ms)
        queue = self._queue_of(batch)
        queue.unacked.append(batch)
        return [] if queue.recovering else self._route(queue, view, now_ms)

    def begin_epoch(self, identity: ProducerIdentity) -> None:
        """Number from 0 on, in every partition, under this identity. Every batch has its outcome."""
        invariant(not self._drop_queues(_closed_error()), "no batch is left when a transaction ends")
        self.identity, self._refusal = identity, None

    def refuse(self, error: SparkBrokerError) -> list[SenderEffect]:
        """Fail what is not acknowledged, and what is enqueued from now on, until the next epoch begins.

        What is in flight may still be stored.
        """
        self._refusal = error
        return self._drop_queues(error)

    def close(self) -> list[SenderEffect]:
        """Fail what is left."""
        self._closed = True
        effects = self._drop_queues(_closed_error())
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            channel.broken = True
        return [*effects, *(CloseChannel(channel) for channel in channels)]

    def next_append(self, channel: LeaderChannel, now_ms: int) -> tuple[AppendRequest, OutgoingBatch] | None:
        """Number and take the next batch of the channel's line. Partitions take turns. None: nothing can be sent."""
        while channel.line:
            queue = channel.line.popleft()
            queue.ready = False
            batch = queue.sendable(self._config.max_in_flight_requests_per_connection)
            if batch is None:
                continue
            queue.sent(batch)
            self._correlation_id += 1
            batch.correlation_id = self._correlation_id
            channel.in_flight[batch.correlation_id] = InFlight(queue, batch, now_ms)
            self._look_by(now_ms + min(STALLED_MS, self._config.request_timeout_ms))
            self._line_up(queue)
            return self._request(channel, queue, batch), batch
        return None

    def written(self, channel: LeaderChannel, batch: OutgoingBatch, now_ms: int) -> list[SenderEffect]:
        """The transport has taken the batch. With acks=0 there is no answer, so the batch is done."""
        entry = channel.in_flight.pop(batch.correlation_id, None) if self.acks == 0 else None
        return [] if entry is None else self._acknowledge(entry.queue, batch, None, now_ms)

    def answered(self, channel: LeaderChannel, response: AppendResponse, now_ms: int) -> list[SenderEffect]:
        """The leader stored the batch, or says why not."""
        entry = channel.in_flight.pop(response.correlation_id, None)
        if entry is None:  # expired meanwhile
            return []
        queue, batch, _ = entry
        batch.correlation_id = -1
        if response.error_code in (0, DuplicateSequenceNumberError.code):
            # The broker may not know the offset of a duplicate any more. It is in the log all the same.
            base_offset = None if response.error_code else response.base_offset
            effects = self._acknowledge(queue, batch, base_offset, now_ms)
            if response.newer_schema_id <= batch.schema_id:
                return effects
            self._refresh_wanted = True
            return [*effects, *self._begin_round(now_ms)]
        queue.failed(batch, error_from_code(response.error_code, response.error_message))
        return self._settle(queue, now_ms)

    def broke(self, channel: LeaderChannel, error: SparkBrokerError, now_ms: int) -> list[SenderEffect]:
        """It is not known whether the batches in flight were stored. They are sent again, to the broker that leads
        then.
        """
        return [] if channel.broken else self._break(channel, error, now_ms, suspect=True)

    def tick(self, now_ms: int, metadata_age_ms: float) -> list[SenderEffect]:
        """`due_ms` has come. `metadata_age_ms`: since a broker last answered about the topics in use."""
        effects = [effect for queue in list(self._queues.values()) for effect in self._expire(queue, now_ms)]
        stalled = any(channel.age_ms(now_ms) > STALLED_MS for channel in self._channels.values())
        for channel in list(self._channels.values()):
            if channel.age_ms(now_ms) > self._config.request_timeout_ms:
                late = RequestTimedOutError(f"{channel.address} did not answer an append in time")
                effects += self._break(channel, late, now_ms, suspect=True)
        age_max_ms = self._metadata_age_max_ms(stalled=stalled)
        self._refresh_wanted |= metadata_age_ms > age_max_ms
        self.due_ms = self._next_look_ms(now_ms, age_max_ms - metadata_age_ms)
        return [*effects, *self._begin_round(now_ms)]

    def _next_look_ms(self, now_ms: int, fresh_ms: float) -> float:
        """The earliest deadline of a batch, a leader's answer, and the metadata, which is fresh for `fresh_ms`."""
        due = [float(queue.unacked[0].deadline_ms) for queue in self._queues.values() if queue.unacked]
        for channel in self._channels.values():
            if channel.in_flight:
                age_ms = channel.age_ms(now_ms)
                limits = (STALLED_MS, self._config.request_timeout_ms)
                due += [now_ms + limit - age_ms + 1 for limit in limits if age_ms <= limit]
        if self._channels:
            due.append(now_ms + fresh_ms)
        return max(min(due, default=math.inf), now_ms + LOOK_AGAIN_MS)

    def _metadata_age_max_ms(self, *, stalled: bool) -> float:
        if stalled:
            return STALLED_MS / 2
        if self.acks == 0 and self._channels:
            return UNANSWERED_AGE_MAX_MS
        return self._config.metadata_max_age_ms if self._channels else math.inf

    def _look_by(self, at_ms: float) -> None:
        self.due_ms = min(self.due_ms, at_ms)

    def _expire(self, queue: PartitionQueue, now_ms: int) -> list[SenderEffect]:
        effects: list[SenderEffect] = []
        for batch, in_flight in queue.expire(now_ms):
            if in_flight and queue.channel is not None:
                queue.channel.in_flight.pop(batch.correlation_id, None)
            effects.append(CompleteBatch(batch, _expired(batch, self._config.delivery_timeout_ms)))
        return effects + self._settle(queue, now_ms)

    def metadata_refreshed(self, view: ClusterView, now_ms: int) -> list[SenderEffect]:
        """A broker has answered. Each partition that can go on does so."""
        self._refresh_wanted = False
        effects = [*self._close_moved(view, now_ms), *self._resume_all(view, now_ms)]
        wanting = sum(queue.needs_identity for queue in self._recovering)
        if wanting:
            return [*effects, RequestProducerIds(wanting)]
        return [*effects, *self._end_round(now_ms)]

    def producer_ids_came(
        self, identities: Sequence[ProducerIdentity], view: ClusterView, now_ms: int
    ) -> list[SenderEffect]:
        """Each partition whose sequence numbers have a gap goes on under a new producer id."""
        wanting = [queue for queue in self._recovering if queue.needs_identity]
        for queue, identity in zip(wanting, identities, strict=False):  # it may have been given up meanwhile
            queue.take_identity(identity)
        return [*self._resume_all(view, now_ms), *self._end_round(now_ms)]

    def refresh_failed(self, error: SparkBrokerError, now_ms: int) -> list[SenderEffect]:
        """No broker answered. Appends wait until one does, or until their delivery time-out. The error of a time-out
        names this reason.
        """
        for queue in self._recovering:
            for batch in queue.unacked:
                batch.last_error = error
        return self._end_round(now_ms)

    def _begin_round(self, now_ms: int) -> list[SenderEffect]:
        if self._asking or self._closed or not (self._recovering or self._refresh_wanted):
            return []
        if now_ms < self._next_round_ms:
            self._look_by(self._next_round_ms)
            return []
        self._asking = True
        return [RefreshMetadata()]

    def _end_round(self, now_ms: int) -> list[SenderEffect]:
        self._asking = False
        attempt = self._pace.after_round(recovered=not self._recovering)
        self._next_round_ms = now_ms + self._wait_ms(attempt)
        return self._begin_round(now_ms)

    def _wait_ms(self, attempt: int) -> int:
        return max(1, round(self._backoff.wait_s(attempt) * 1000))

    def _close_moved(self, view: ClusterView, now_ms: int) -> list[SenderEffect]:
        """Break the channels to brokers that are fenced or gone. A frozen broker would hold its batches until their
        time-out.
        """
        effects: list[SenderEffect] = []
        for channel in list(self._channels.values()):
            broker = view.live_broker(channel.broker_id)
            if broker is None or address_of(broker) != channel.address:
                moved = NetworkError(f"broker {channel.broker_id} is fenced or has moved")
                effects += self._break(channel, moved, now_ms, suspect=False)
        return effects

    def _resume_all(self, view: ClusterView, now_ms: int) -> list[SenderEffect]:
        effects: list[SenderEffect] = []
        woken: dict[LeaderChannel, None] = {}
        for queue in list(self._recovering):
            effects += self._resume(queue, view, now_ms)
            if not queue.recovering and queue.channel is not None:
                woken[queue.channel] = None
        return [*effects, *map(SendAppends, woken)]

    def _resume(self, queue: PartitionQueue, view: ClusterView, now_ms: int) -> list[SenderEffect]:
        """Let the partition go on, if it may. Its batches fail when its topic is gone."""
        tp = queue.topic_partition
        topic = view.topic(tp.topic)
        gone = queue.gone(None if topic is None else topic.topic_id, now_ms)
        if gone is not None:
            del self._recovering[queue]
            del self._queues[queue.topic_id, tp.partition]
            return _completed(queue.fail_all(), gone)
        state = view.partition(tp.topic, tp.partition)
        elected = state is not None and state.leader_epoch > queue.failed_epoch
        may_go_on = not queue.needs_identity and (elected or now_ms >= queue.retry_at_ms)
        if not may_go_on or topic is None or not self._find_leader(queue, view):
            return []
        del self._recovering[queue]
        divided = queue.divide(min(topic.settings.max_message_bytes, topic.settings.segment_bytes))
        self.divided_batches += len(divided)
        queue.resume()
        self._line_up(queue)
        return [BatchDivided(batch, pieces) for batch, pieces in divided]

    def _settle(self, queue: PartitionQueue, now_ms: int) -> list[SenderEffect]:
        """Once every answer of a failed round is in: the partition recovers."""
        if queue.state is not QueueState.DRAINING or queue.in_flight:
            return []
        effects: list[SenderEffect] = [CompleteBatch(batch, error) for batch, error in queue.settle()]
        queue.retry_at_ms = now_ms + self._wait_ms(queue.failures)
        queue.failures += 1
        self.retries += len(queue.unacked)
        self._recovering[queue] = None
        return [*effects, *self._begin_round(now_ms)]

    def _queue_of(self, batch: OutgoingBatch) -> PartitionQueue:
        key = (batch.topic_id, batch.topic_partition.partition)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = PartitionQueue(
                batch.topic_partition,
                batch.topic_id,
                self.identity,
                numbered=self.numbered,
                renumbers=not self._config.transactional_id,
            )
        return queue

    def _route(self, queue: PartitionQueue, view: ClusterView, now_ms: int) -> list[SenderEffect]:
        """Put the queue in its leader's line; without a leader it recovers."""
        routed = queue.channel is not None and not queue.channel.broken and queue.in_flight > 0
        if not routed and not self._find_leader(queue, view):
            queue.stop()
            return self._settle(queue, now_ms)
        return self._lined_up(queue)

    def channel_to(self, broker: BrokerMetadata) -> LeaderChannel | None:
        """The channel of a leader; None: it has moved to another address, and `_close_moved` breaks the old one."""
        channel = self._channels.get(broker.id)
        if channel is None:
            channel = self._channels[broker.id] = LeaderChannel(broker.id, address_of(broker))
        return channel if channel.address == address_of(broker) else None

    def _find_leader(self, queue: PartitionQueue, view: ClusterView) -> bool:
        tp = queue.topic_partition
        topic, leader = view.topic(tp.topic), view.leader(tp.topic, tp.partition)
        if topic is None or topic.topic_id != queue.topic_id or leader is None:
            return False
        broker, state = leader
        channel = self.channel_to(broker)
        if channel is None:
            return False
        if queue.ready and queue.channel is not None and queue.channel is not channel:
            # No batch may go to the old leader any more. In its line, the queue would only be passed over.
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

    def _lined_up(self, queue: PartitionQueue) -> list[SenderEffect]:
        self._line_up(queue)
        return [SendAppends(queue.channel)] if queue.ready and queue.channel is not None else []

    def _request(self, channel: LeaderChannel, queue: PartitionQueue, batch: OutgoingBatch) -> AppendRequest:
        return AppendRequest(
            correlation_id=batch.correlation_id,
            topic_id=batch.topic_id,
            partition=batch.topic_partition.partition,
            leader_epoch=queue.leader_epoch,
            acks=self.acks,
            timeout_ms=self._config.request_timeout_ms,
            schema_id=batch.schema_id,
            transactional_id=self._config.transactional_id,
        )

    def _acknowledge(
        self, queue: PartitionQueue, batch: OutgoingBatch, base_offset: int | None, now_ms: int
    ) -> list[SenderEffect]:
        queue.acknowledged(batch)
        self.acknowledged_rows += batch.rows
        self.acknowledged_batches += 1
        more = self._settle(queue, now_ms) if queue.recovering else self._lined_up(queue)
        return [CompleteBatch(batch, batch.metadata(base_offset)), *more]

    def _break(
        self, channel: LeaderChannel, error: SparkBrokerError, now_ms: int, *, suspect: bool
    ) -> list[SenderEffect]:
        channel.broken = True
        if self._channels.get(channel.broker_id) is channel:
            del self._channels[channel.broker_id]
        touched = dict.fromkeys([entry.queue for entry in channel.in_flight.values()] + list(channel.line))
        # A typed error of the stream as a whole says nothing certain about one append.
        lost = error if error.retriable else NetworkError(f"{channel.address}: {error}")
        for entry in channel.in_flight.values():
            entry.batch.correlation_id = -1
            entry.queue.failed(entry.batch, lost)
        for queue in channel.line:  # What waits there was not sent, and has no answer of its own.
            for batch in queue.unacked:
                batch.last_error = lost
        channel.in_flight.clear()
        channel.line.clear()
        effects: list[SenderEffect] = []
        for queue in touched:
            queue.ready = False
            queue.stop()
            effects += self._settle(queue, now_ms)
        return [*effects, CloseChannel(channel, suspect=suspect)]

    def _drop_queues(self, error: SparkBrokerError) -> list[SenderEffect]:
        """Forget every batch, and the state of its partition. Answers that come later are ignored."""
        effects = [effect for queue in self._queues.values() for effect in _completed(queue.fail_all(), error)]
        self._queues.clear()
        self._recovering.clear()
        for channel in self._channels.values():
            channel.line.clear()
            channel.in_flight.clear()
        return effects


def _completed(batches: Iterable[OutgoingBatch], error: SparkBrokerError) -> list[SenderEffect]:
    return [CompleteBatch(batch, error) for batch in batches]


def _expired(batch: OutgoingBatch, timeout_ms: int) -> SparkBrokerError:
    why = f"; the last attempt: {batch.last_error}" if batch.last_error else ""
    return RequestTimedOutError(
        f"a batch of {batch.rows} rows for {batch.topic_partition} was not acknowledged within {timeout_ms} ms{why}"
    )


def _closed_error() -> SparkBrokerError:
    return ClosedError("the producer was closed before the append was acknowledged")
