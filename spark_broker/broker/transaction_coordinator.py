"""The transaction coordinator of a broker: a shard for each partition of `__transaction_state` that it leads.

Nothing here waits or starts a thread, so that simulated brokers run the same class. When something happens elsewhere
(an append is committed, another broker answers), a thread notes it as an event, and wakes the owner to call `pump`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.marker_queue import MarkerQueue, Round
from spark_broker.broker.marker_writer import MarkerWriter
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.state_lock import StateLock
from spark_broker.broker.transaction_shard import LedShard
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import BrokerState, TopicState
from spark_broker.core.transaction_coordinator import (
    AnswerRequest,
    AppendRecords,
    CoordinatorRequest,
    DecideAgain,
    Effect,
    MarkerTarget,
    ProducerIdPool,
    Resources,
    WriteMarkers,
    transactional_id_of,
)
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
from spark_broker.protocol.messages import (
    AddPartitionToTransactionRequest,
    AllocateProducerIdsResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    Message,
    TransactionDescription,
)
from spark_broker.protocol.murmur2 import group_partition

logger = logging.getLogger(__name__)

Answer = Message | SparkBrokerError
Reply = Callable[[Answer], None]
"""Takes the answer to a request; called once, outside of every lock, and must not block."""

PRODUCER_IDS_MIN = 500
REQUESTS_MAX = 20_000
"""Requests that may wait at a time; beyond it, they are refused."""

MARKERS_TIMEOUT_MS = 10_000
ALLOCATION_BACKOFF_MS = 200


class Peers(Protocol):
    """The rest of the cluster. Both methods return at once. The answer may come from any thread, or never."""

    def send(self, broker: BrokerState, request: Message, timeout_ms: int, answered: Reply) -> None: ...

    def allocate_producer_ids(self, answered: Reply) -> None: ...


class TransactionCoordinator:
    """`handle`, `describe`, `tick` and `pump` are safe from any thread.

    Continuations run outside of the lock. The locks of this broker's partitions are taken under it, never the other way
    round: callbacks of a partition only note an event.
    """

    def __init__(
        self,
        manager: ReplicaManager,
        config: ClusterConfig,
        peers: Peers,
        markers: MarkerWriter,
        *,
        wake: Callable[[], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._manager = manager
        self._config = config
        self._peers = peers
        self._markers = markers
        self._wake = wake
        self._clock = clock
        self._lock = StateLock()
        self._events: deque[Callable[[], None]] = deque()
        self._outbox: deque[Callable[[], None]] = deque()
        self._shards: dict[int, LedShard] = {}
        self._replies: dict[object, Reply] = {}
        self._next_token = 0
        self._queue = MarkerQueue()
        self._markers_due = False
        self._producer_ids = ProducerIdPool()
        self._allocation_due_ms = 0  # when to ask again; a request that is out counts as lost then

    def handle(self, request: CoordinatorRequest, deadline_ms: int, reply: Reply) -> None:
        """Answer a request, now or later. `deadline_ms`: on the boot-time clock."""
        with self._lock:
            try:
                self._run_events()
                if len(self._replies) >= REQUESTS_MAX:
                    raise CoordinatorNotAvailableError(f"{REQUESTS_MAX} requests wait at this coordinator")
                self._request(request, deadline_ms, reply)
            except SparkBrokerError as error:
                self._outbox.append(partial(reply, error))
        self.pump()

    def _request(self, request: CoordinatorRequest, deadline_ms: int, reply: Reply) -> None:
        led_shard = self._shard_of(transactional_id_of(request))
        if isinstance(request, AddPartitionToTransactionRequest):
            self._check_partition(led_shard, request)
        self._next_token += 1
        self._replies[self._next_token] = reply
        now_ms = self._clock.boottime_ms()
        self._carry_out(led_shard, led_shard.shard.request(self._next_token, request, deadline_ms, now_ms))
        self._allocate_producer_ids(now_ms)

    def _check_partition(self, led: LedShard, request: AddPartitionToTransactionRequest) -> None:
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
        try:
            with self._lock:
                self._run_events()
                return DescribeTransactionsResponse(self._describe(request.transactional_ids))
        finally:
            self.pump()

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

    def note(self, event: Callable[[], None]) -> None:
        """Note an event. Called from any thread, perhaps under a partition's lock."""
        self._events.append(event)
        self._wake()

    def pump(self) -> None:
        """Handle the events, and send what results from them. Returns when nothing is left to do at once."""
        while self._events or self._outbox or self._markers_due:
            with self._lock:
                self._run_events()
                self._send_markers()
                leaving, self._outbox = self._outbox, deque()
            self._send_out(leaving)

    def _send_out(self, leaving: deque[Callable[[], None]]) -> None:
        """Run what leaves this coordinator. An error ends the call in hand; what belongs to others is sent by the next
        one who pumps."""
        try:
            while leaving:
                leaving.popleft()()
        finally:
            if leaving:
                with self._lock:
                    self._outbox.extendleft(reversed(leaving))

    def _run_events(self) -> None:
        while self._events:
            self._events.popleft()()

    def tick(self) -> None:
        """Time passes: load and drop shards, time out transactions, send markers again, fetch producer ids."""
        with self._lock:
            self._run_events()
            self._follow_leadership()
            now_ms = self._clock.boottime_ms()
            for led_shard in list(self._shards.values()):
                self._carry_out(led_shard, led_shard.shard.tick(now_ms))
            for number, target in self._queue.gone(self._manager.image):
                self._marked(number, target)
            self._allocate_producer_ids(now_ms)
            self._markers_due = True
        self.pump()

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

    def _shard_of(self, transactional_id: str) -> LedShard:
        topic = self._manager.image.topic(TRANSACTION_STATE_TOPIC)
        if topic is None:
            raise CoordinatorNotAvailableError(f"{TRANSACTION_STATE_TOPIC} does not exist yet")
        number = group_partition(transactional_id, len(topic.partitions))
        return self._led(topic, number)

    def _led(self, topic: TopicState, number: int) -> LedShard:
        """The shard of a partition that this broker leads, loaded. Raises the error that says why there is none."""
        partition = self._manager.partition(topic.topic_id, number)
        current = self._shards.get(number)
        if current is not None:
            if current.is_current(partition):
                return current
            self._drop(current)
        resources = Resources(self._producer_ids, self._config.transaction_max_timeout_ms)
        led_shard = LedShard.load(
            number, partition, resources, self._config.transactional_id_expiration_ms, self._clock
        )
        self._shards[number] = led_shard
        logger.info("coordinates %s transactional ids of %s", len(led_shard.shard.transactions), partition)
        self._carry_out(led_shard, led_shard.shard.loaded(self._clock.boottime_ms()))
        return led_shard

    def _follow_leadership(self) -> None:
        """Load the shards that this broker leads now, so that decided and idle transactions go on. Drop the others."""
        topic = self._manager.image.topic(TRANSACTION_STATE_TOPIC)
        states = topic.partitions if topic is not None else ()
        led_partitions = {number for number, state in enumerate(states) if state.leader == self._manager.broker_id}
        for number, shard in list(self._shards.items()):
            if number not in led_partitions:
                self._drop(shard)
        for number in sorted(led_partitions):
            try:
                if topic is not None:
                    self._led(topic, number)
            except SparkBrokerError as error:
                logger.debug("%s-%s is not loaded yet: %s", TRANSACTION_STATE_TOPIC, number, error)

    def _drop(self, led: LedShard) -> None:
        if self._shards.get(led.number) is led:
            del self._shards[led.number]
            self._queue.drop(led.number)
            for effect in led.shard.dropped():
                self._answer(effect)

    def _carry_out(self, led: LedShard, effects: list[Effect]) -> None:
        """Depth first, so that an append is done before the next decision is made."""
        for effect in effects:
            match effect:
                case AnswerRequest():
                    self._answer(effect)
                case AppendRecords():
                    self._append(led, effect)
                case DecideAgain(waiting):
                    self._carry_out(led, led.shard.decide(waiting, self._clock.boottime_ms()))
                case WriteMarkers(targets):
                    self._queue.add(led.number, targets)
                    self._markers_due = True

    def _answer(self, effect: AnswerRequest) -> None:
        reply = self._replies.pop(effect.token)
        self._outbox.append(partial(reply, effect.answer))

    def _append(self, led: LedShard, append: AppendRecords) -> None:
        token = _Token(self, led, led.shard.appended_count + 1)
        try:
            led.append(append.records(), token)
        except SparkBrokerError as error:
            self._carry_out(led, led.shard.append_refused(append, error))
            return
        self._carry_out(led, led.shard.appended(append, self._clock.boottime_ms()))
        if led.appended_records >= self._config.transaction_state_log_snapshot_records:
            self._snapshot(led)

    def _snapshot(self, led: LedShard) -> None:
        """Until compaction exists: write the whole state at the log's end. Once it is committed, drop what is older."""
        led.appended_records = 0
        first: _Token | None = None
        for records in led.snapshot_batches():
            token = _Token(self, led, led.shard.appended_count + 1)
            try:
                led.append(records, token, snapshot=True)
            except SparkBrokerError as error:
                logger.info("%s: the snapshot waits: %s", led.partition, error)
                return
            led.shard.snapshot_appended()
            first = first or token
        if first is not None:
            led.snapshot_end, led.snapshot_first = led.shard.appended_count, first

    def committed(self, led: LedShard, position: int) -> None:
        """Event: the append of this number is committed, and with it every earlier one."""
        if self._shards.get(led.number) is not led or position <= led.shard.committed_count:
            return
        self._carry_out(led, led.shard.committed(position))
        first = led.snapshot_first
        if first is not None and led.snapshot_end <= position:
            led.snapshot_first = None
            try:
                led.partition.advance_log_start(first.base_offset)
            except (KafkaStorageError, NotLeaderOrFollowerError) as error:
                # The partition has gone offline already, damaged or not, and the broker was notified.
                self.lost(led, error)

    def lost(self, led: LedShard, error: SparkBrokerError) -> None:
        """Event: it is not known whether an append will be committed. The shard is loaded again from its log."""
        if self._shards.get(led.number) is led:
            logger.info("%s is loaded anew: %s", led.partition, error.message)
            self._drop(led)

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


class _Token:
    """An append to a shard's log, on its way. Called under the partition's lock."""

    def __init__(self, coordinator: TransactionCoordinator, led: LedShard, position: int) -> None:
        self._coordinator = coordinator
        self._led = led
        self._position = position
        self.base_offset = -1

    def acknowledge(self, base_offset: int) -> None:
        self.base_offset = base_offset
        self._coordinator.note(partial(self._coordinator.committed, self._led, self._position))

    def refuse(self, error: SparkBrokerError) -> None:
        self._coordinator.note(partial(self._coordinator.lost, self._led, error))
