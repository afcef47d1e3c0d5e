"""The transaction coordinator of a broker: a shard for each partition of `__transaction_state` that it leads."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.coordinator_runtime import AppendOfShard, CoordinatorRuntime, Led
from spark_broker.broker.internal_records import row_batches, rows_of
from spark_broker.broker.marker_queue import MarkerQueue, Round
from spark_broker.broker.marker_writer import MarkerWriter
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Answer, Reply
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import BrokerState
from spark_broker.core.transaction_changes import decode_any, encode_any
from spark_broker.core.transaction_coordinator import (
    AnswerRequest,
    AppendRecords,
    CoordinatorRequest,
    DecideAgain,
    Effect,
    MarkerTarget,
    ProducerIdPool,
    Resources,
    StoreAnew,
    TransactionShard,
    WriteMarkers,
    transactional_id_of,
)
from spark_broker.core.transaction_decision import END_KEYS_MAX
from spark_broker.core.transaction_records import encode_record
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InvalidTopicError,
    KafkaStorageError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.messages import (
    AddPartitionToTransactionRequest,
    AllocateProducerIdsResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    Message,
    TransactionDescription,
)

logger = logging.getLogger(__name__)

PRODUCER_IDS_MIN = 500
REQUESTS_MAX = 20_000
"""Requests that may wait at a time; beyond it, they are refused."""

MARKERS_TIMEOUT_MS = 10_000
ALLOCATION_BACKOFF_MS = 200


class Peers(Protocol):
    """The rest of the cluster. Both methods return at once. The answer may come from any thread, or never."""

    def send(self, broker: BrokerState, request: Message, timeout_ms: int, answered: Reply) -> None: ...

    def allocate_producer_ids(self, answered: Reply) -> None: ...


class TransactionCoordinator(CoordinatorRuntime[TransactionShard]):
    """`handle`, `describe`, `tick` and `pump` are safe from any thread."""

    topic_name = TRANSACTION_STATE_TOPIC

    def __init__(
        self,
        manager: ReplicaManager,
        config: ClusterConfig,
        peers: Peers,
        markers: MarkerWriter,
        *,
        wake: Callable[[], None],
        clock: Clock = SYSTEM_CLOCK,
        end_keys_max: int = END_KEYS_MAX,
    ) -> None:
        """`end_keys_max`: see `core.transaction_decision`."""
        super().__init__(manager, wake=wake, clock=clock)
        self._config = config
        self._peers = peers
        self._markers = markers
        self._replies: dict[object, Reply] = {}
        self._next_token = 0
        self._queue = MarkerQueue()
        self._markers_due = False
        self._anew: dict[int, _StoredAnew] = {}  # by partition, until it is committed
        self._producer_ids = ProducerIdPool()
        self._end_keys_max = end_keys_max
        self._allocation_due_ms = 0  # when to ask again; a request that is out counts as lost then

    def handle(self, request: CoordinatorRequest, deadline_ms: int, reply: Reply) -> None:
        """Answer a request, now or later. `deadline_ms`: on the boot-time clock."""
        with self._turn():
            try:
                if len(self._replies) >= REQUESTS_MAX:
                    raise CoordinatorNotAvailableError(f"{REQUESTS_MAX} requests wait at this coordinator")
                self._request(request, deadline_ms, reply)
            except SparkBrokerError as error:
                self._outbox.append(partial(reply, error))

    def _request(self, request: CoordinatorRequest, deadline_ms: int, reply: Reply) -> None:
        led_shard = self._shard_of(transactional_id_of(request))
        if isinstance(request, AddPartitionToTransactionRequest):
            self._check_partition(led_shard, request)
        self._next_token += 1
        self._replies[self._next_token] = reply
        now_ms = self._clock.boottime_ms()
        self._carry_out(led_shard, led_shard.shard.request(self._next_token, request, deadline_ms, now_ms))
        self._allocate_producer_ids(now_ms)

    def _check_partition(self, led: Led[TransactionShard], request: AddPartitionToTransactionRequest) -> None:
        """Check that the partition exists, by an image in which this broker leads the shard: see `MarkerQueue.gone`."""
        image = self._manager.image
        state = image.partition(led.partition.key[0], led.number)
        if state is None or (state.leader, state.leader_epoch) != (self._manager.broker_id, led.leader_epoch):
            raise NotLeaderOrFollowerError("another broker coordinates the transactional id")
        topic = image.topics.get(request.topic_id)
        if topic is None:
            raise UnknownTopicIdError(f"no topic has the id {request.topic_id}")
        if topic.name == TRANSACTION_STATE_TOPIC:
            raise InvalidTopicError(f"{topic.name} is no part of any transaction")
        if request.partition >= len(topic.partitions):
            raise UnknownTopicOrPartitionError(f"{topic.name} has no partition {request.partition} here yet")

    def describe(self, request: DescribeTransactionsRequest) -> DescribeTransactionsResponse:
        """The transactions that this broker coordinates, in their present state. Unknown ids are left out.

        Raises NotLeaderOrFollowerError or CoordinatorNotAvailableError when it does not coordinate an id that is named.
        """
        with self._turn():
            return DescribeTransactionsResponse(self._describe(request.transactional_ids))

    def _describe(self, transactional_ids: list[str] | None) -> list[TransactionDescription]:
        now_ms = self._clock.boottime_ms()
        if transactional_ids is None:
            return [
                description
                for led_shard in self._shards.values()
                for description in led_shard.shard.describe(None, now_ms, led_shard.leader_epoch)
            ]
        descriptions: list[TransactionDescription] = []
        for transactional_id in transactional_ids:
            led_shard = self._shard_of(transactional_id)
            led_shard.check_leadership()
            descriptions += led_shard.shard.describe([transactional_id], now_ms, led_shard.leader_epoch)
        return descriptions

    def _time_passes(self) -> None:
        """Time out transactions, send markers again, fetch producer ids."""
        now_ms = self._clock.boottime_ms()
        for led in list(self._shards.values()):
            self._carry_out(led, led.shard.tick(now_ms))
        for number, target in self._queue.gone(self._manager.image):
            self._marked(number, target)
        self._allocate_producer_ids(now_ms)
        self._markers_due = True

    def _allocate_producer_ids(self, now_ms: int) -> None:
        if not self._shards or len(self._producer_ids) >= PRODUCER_IDS_MIN or now_ms < self._allocation_due_ms:
            return
        self._allocation_due_ms = now_ms + self._config.request_timeout_ms

        def answered(answer: Answer) -> None:
            self.note(partial(self._allocated, answer))

        self._outbox.append(partial(self._peers.allocate_producer_ids, answered))

    def _allocated(self, answer: Answer) -> None:
        self._allocation_due_ms = 0
        if isinstance(answer, AllocateProducerIdsResponse):
            self._producer_ids.refill(answer.first_id, answer.count)
        else:
            logger.info("no producer ids yet: %s", answer)
            self._allocation_due_ms = self._clock.boottime_ms() + ALLOCATION_BACKOFF_MS

    def _new_shard(self, partition: Partition) -> TransactionShard:
        timeout_max_ms = self._config.transaction_max_timeout_ms
        resources = Resources(self._producer_ids, timeout_max_ms, self._end_keys_max, self._has_topic)
        expiration_ms = self._config.transactional_id_expiration_ms
        return TransactionShard(resources, id_expiration_ms=expiration_ms, name=str(partition))

    def _has_topic(self, topic_id: str) -> bool:
        return topic_id in self._manager.image.topics

    def _replay(self, led: Led[TransactionShard], frame: Frame) -> None:
        for key, value in rows_of(led.partition.reader.decode(frame)):
            led.shard.replay(decode_any(key, value))

    def _loaded(self, led: Led[TransactionShard]) -> None:
        effects = led.shard.loaded(self._clock.boottime_ms())
        logger.info("coordinates %s transactional ids of %s", len(led.shard.transactions), led.partition)
        try:
            self._carry_out(led, effects)
        except SparkBrokerError as error:
            self._unload(led)
            what = f"{led.partition}: records of an earlier version are not taken over yet"
            raise CoordinatorNotAvailableError(f"{what}: {error.message}") from None

    def _unloaded(self, led: Led[TransactionShard]) -> None:
        self._queue.drop(led.number)
        self._anew.pop(led.number, None)
        for effect in led.shard.dropped():
            self._answer(effect)

    def _carry_out(self, led: Led[TransactionShard], effects: list[Effect]) -> None:
        """Depth first, so that an append is done before the next decision is made."""
        waiting = deque(effects)
        while waiting:
            waiting.extendleft(reversed(self._carry_out_one(led, waiting.popleft())))

    def _carry_out_one(self, led: Led[TransactionShard], effect: Effect) -> list[Effect]:
        """Returns the effects that follow from it."""
        match effect:
            case AnswerRequest():
                self._answer(effect)
            case StoreAnew():
                self._store_anew(led, effect)
            case AppendRecords():
                return self._append_records(led, effect)
            case DecideAgain(waiting):
                return led.shard.decide(waiting, self._clock.boottime_ms())
            case WriteMarkers(targets):
                self._queue.add(led.number, targets)
                self._markers_due = True
        return []

    def _answer(self, effect: AnswerRequest) -> None:
        reply = self._replies.pop(effect.token)
        self._outbox.append(partial(reply, effect.answer))

    def _append_records(self, led: Led[TransactionShard], append: AppendRecords) -> list[Effect]:
        try:
            self._append(led, [encode_record(record) for record in led.shard.records(append)])
        except SparkBrokerError as error:
            return led.shard.append_refused(append, error)
        return led.shard.appended(append, self._clock.boottime_ms())

    def _store_anew(self, led: Led[TransactionShard], anew: StoreAnew) -> None:
        """Write the whole state at the log's end. Once it is committed, what is older is dropped.

        Raises the error that refuses an append: the shard may not be used then.
        """
        logger.info("%s: %s records take the place of those of an earlier version", led.partition, len(anew.records))
        first: AppendOfShard[TransactionShard] | None = None
        for rows in row_batches([encode_any(record) for record in anew.records]):
            append = self._append(led, rows)
            led.shard.stored_anew()
            first = first or append
        if first is not None:
            self._anew[led.number] = _StoredAnew(first, led.appended)

    def _committed(self, led: Led[TransactionShard]) -> None:
        self._carry_out(led, led.shard.committed(led.committed))
        anew = self._anew.get(led.number)
        if anew is not None and anew.last <= led.committed:
            del self._anew[led.number]
            try:
                led.partition.advance_log_start(anew.first.base_offset)
            except (KafkaStorageError, NotLeaderOrFollowerError) as error:
                # The partition has gone offline already, damaged or not, and the broker was notified.
                self.append_lost(led, error)

    def _settle(self) -> None:
        self._send_markers()

    def _send_markers(self) -> None:
        if not self._markers_due:
            return
        self._markers_due = False
        for sent in self._queue.next_rounds(self._manager.image, self._clock.boottime_ms()):
            self._outbox.append(partial(self._send_round, sent))

    def _send_round(self, sent: Round) -> None:
        def answered(answer: Answer) -> None:
            self.note(partial(self._markers_answered, sent, answer))

        if sent.broker_id == self._manager.broker_id:
            self._markers.write(sent.request, self._clock.boottime_ms() + MARKERS_TIMEOUT_MS, answered)
        else:
            self._peers.send(sent.broker, sent.request, MARKERS_TIMEOUT_MS, answered)

    def _markers_answered(self, sent: Round, answer: Answer) -> None:
        for number, target in self._queue.answered(sent, answer, self._clock.boottime_ms()):
            self._marked(number, target)
        self._markers_due = True

    def _marked(self, number: int, target: MarkerTarget) -> None:
        led_shard = self._shards.get(number)
        if led_shard is not None:
            self._carry_out(led_shard, led_shard.shard.marked(target))


@dataclass(frozen=True, slots=True)
class _StoredAnew:
    """What takes the place of an earlier version's records: its first append, and the number of its last one."""

    first: AppendOfShard[TransactionShard]
    last: int
