"""Carries out what a `SenderMachine` decides: threads, streams, the buffer's bound, the batches' outcomes.

The machine is under one lock; nothing under it waits, does I/O or runs a user's callback. Threads: one sends and one
receives for each leader (`append_channel`), one keeps the deadlines, one asks brokers: it is the only one that waits
for metadata.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from spark_broker.client.append_channel import AppendChannel
from spark_broker.client.leader_channel import LeaderChannel
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.outgoing import Outcome, OutgoingBatch
from spark_broker.client.reentry import refuse_within
from spark_broker.client.retry import Deadline
from spark_broker.client.sender_effects import (
    BatchDivided,
    CloseChannel,
    CompleteBatch,
    RefreshMetadata,
    RequestProducerIds,
    SendAppends,
    SenderEffect,
)
from spark_broker.client.sender_machine import SenderMachine
from spark_broker.config import ProducerConfig
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import (
    BufferExhaustedError,
    ClientEndedError,
    ClosedError,
    NoThreadError,
    SparkBrokerError,
    UnknownServerError,
    again,
)
from spark_broker.interrupts import Condition, interruptible, uninterrupted
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import AppendRequest, AppendResponse, InitProducerIdRequest, InitProducerIdResponse
from spark_broker.threads import LONGEST_WAIT_S, begin, client_ended
from spark_broker.transport.origin import Origin


class Sender:
    """Owns a producer's machine and the streams to leaders.

    With a transactional id, `take_identity` gives the identities. `on_failure` is called for each batch that failed for
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
        self._metadata = metadata
        self._config = config
        self._machine = SenderMachine(config, metadata.backoff)
        self._streams: dict[LeaderChannel, AppendChannel] = {}
        # Only `lock` is taken, and no condition: a signal handler could raise within the condition's own code.
        self._changed = Condition(self.lock)  # buffer freed, or a batch completed
        self._asked = Condition(self.lock)
        self._question: RefreshMetadata | RequestProducerIds | None = None  # the machine has one at a time
        self._sooner = Condition(self.lock)
        self._wakes_at_ms = math.inf  # until when the thread of the deadlines sleeps
        self._incomplete: set[OutgoingBatch] = set()
        self._gates: dict[threading.Lock, set[OutgoingBatch]] = {}  # locked until these are complete
        self._reporting = threading.local()  # `batches`: those whose callbacks run in this thread
        self._completing: set[OutgoingBatch] = set()  # of these, the ones whose outcome is being reported
        self._failure: ClientEndedError | None = None  # set: a thread has died
        self._buffered_bytes = 0
        self._identity_lock = threading.Lock()
        self._origin = Origin()
        self._closed = False
        self._name = config.client_id or "producer"
        try:
            for target, what in ((self._keep_deadlines, "deadlines"), (self._ask_brokers, "recovery")):
                begin(f"{self._name}-{what}", self.died, target)
        except NoThreadError:
            self.close()  # Nobody else would end the thread that has begun.
            raise

    @property
    def acknowledged_rows(self) -> int:
        return self._machine.acknowledged_rows

    @property
    def acknowledged_batches(self) -> int:
        return self._machine.acknowledged_batches

    @property
    def retries(self) -> int:
        """How many batches were sent again."""
        return self._machine.retries

    @property
    def divided_batches(self) -> int:
        """How many batches were larger than their topic takes, and were sent again in pieces."""
        return self._machine.divided_batches

    def prepare(self, deadline: Deadline) -> None:
        """Get a producer id, once. Raises typed errors when no broker gives one in time."""
        self._check_open()
        if not self._machine.numbered or self._machine.identity is not None:
            return
        with interruptible(), self._identity_lock:
            if self._machine.identity is None:
                self._machine.identity = self._new_identity(deadline)

    def expect(self, partition: TopicPartition) -> None:
        """Records of the partition begin to gather: have the threads that its leader needs (see `AppendChannel`)."""
        leader = self._metadata.view.leader(partition.topic, partition.partition)
        if leader is None:
            return
        with uninterrupted(self.lock):
            if self._is_over:
                return
            channel = self._machine.channel_to(leader[0])
            if channel is not None:
                with suppress(NoThreadError):  # There may be one when they are sent.
                    self._stream(channel)

    def reserve(self, size_bytes: int, deadline: Deadline) -> None:
        """Wait for room in the buffer. Raises BufferExhaustedError at the deadline, ClosedError after close.

        A callback does not wait: the thread that it would hold up makes the room. It may take as much again.
        """
        waits = not self.reports_here
        limit = self._config.buffer_memory * (1 if waits else 2)

        def has_room() -> bool:
            # A batch that is larger than the whole buffer goes alone.
            return self._is_over or not self._buffered_bytes or self._buffered_bytes + size_bytes <= limit

        if self.lock.locked():
            refuse_within(self)
        with self.lock:
            room = has_room()
            if not room and waits:
                room = self._changed.wait_for(has_room, deadline.remaining_s)
            self._check_open()
            if not room:
                raise BufferExhaustedError(
                    f"{self._buffered_bytes} of {limit} bytes wait to be acknowledged; "
                    f"{size_bytes} more did not fit in time"
                )
            self._buffered_bytes += size_bytes

    def enqueue(self, batch: OutgoingBatch) -> None:
        """Take a batch for which room is reserved. Write it in this thread when no other batch is before it.

        Raises ClosedError after close, and the error that `refuse` was given.
        """
        with self.lock:
            try:
                self._check_open()
                effects = self._machine.enqueue(batch, self._metadata.view, _now_ms())
            except SparkBrokerError:
                self._buffered_bytes -= batch.size_bytes
                self._changed.notify_all()
                raise
            self._incomplete.add(batch)
            streams = self._notify(effects)
        for stream in streams:
            stream.write_now()
        self._finish(effects)

    def drain(self, deadline: Deadline) -> bool:
        """Wait until every batch that is enqueued now has its outcome; returns whether all have.

        But for the batch whose callback calls this: it has its outcome.
        """
        self._origin.check()
        gate = threading.Lock()
        with self.lock:
            awaited = self._incomplete.difference(self._reported_here())
            if not awaited:
                return True
            gate.acquire()
            self._gates[gate] = awaited
        try:
            return self.wait_without_lock(gate, deadline)
        finally:
            with self.lock:
                self._gates.pop(gate, None)

    def wait_without_lock(self, gate: threading.Lock, deadline: Deadline) -> bool:
        """The handler of a signal may call the client meanwhile (`reentry`)."""
        with interruptible():
            return gate.acquire(timeout=min(max(deadline.remaining_s, 0), threading.TIMEOUT_MAX))

    def has_others(self) -> bool:
        """Whether there is a batch without an outcome, besides the one whose callback calls this."""
        with self.lock:
            return not self._incomplete.issubset(self._reported_here())

    @property
    def reports_here(self) -> bool:
        """Whether this thread runs the callbacks of a batch: it completes the others only afterwards."""
        return bool(self._reported_here())

    def _reported_here(self) -> list[OutgoingBatch]:
        batches: list[OutgoingBatch] = getattr(self._reporting, "batches", [])
        return batches

    def _report(self, batch: OutgoingBatch, outcome: Outcome) -> None:
        """Complete the batch's Futures. Their callbacks may append."""
        outer = self._reported_here()
        self._reporting.batches = [*outer, batch]
        try:
            batch.complete(outcome)
        finally:
            self._reporting.batches = outer

    def check(self) -> None:
        """Raises ClientEndedError if a thread of this sender has died."""
        if self._failure is not None:
            raise again(self._failure)

    def _check_open(self) -> None:
        self._origin.check()  # A child that sends what it has inherited would use the parent's sequence numbers.
        self.check()
        if self._closed:
            raise ClosedError("the producer is closed")

    def died(self, error: BaseException) -> None:
        """A thread has ended by an error of our own, and the machine cannot be relied on any more: what waits fails,
        and so does whatever is asked from now on."""
        with self.lock:
            if self._failure is not None:
                return
            self._failure = failure = client_ended(error)
            left = self._incomplete - self._completing
            streams = list(self._streams.items())
            for channel, _ in streams:
                channel.broken = True
            for condition in (self._asked, self._changed, self._sooner):
                condition.notify_all()
        for batch in left:
            self._on_failure(failure)
            self._report(batch, failure)
        for _, stream in streams:
            stream.close()
        self._forget(left)

    def take_identity(self, identity: ProducerIdentity) -> None:
        """Number from 0 on, in every partition, under this identity. Every batch has its outcome."""
        with self.lock:
            self._machine.begin_epoch(identity)

    def refuse(self, error: SparkBrokerError) -> None:
        """Fail what is not acknowledged, and what is enqueued from now on, until there is another identity. What is in
        flight may still be stored.
        """
        self._handle(lambda now_ms: self._machine.refuse(error))

    def close(self) -> None:
        """Fail what is left and end the threads."""
        with uninterrupted():
            with self.lock:
                self._closed = True
                effects = self._machine.close()
                self._notify(effects)
                for condition in (self._asked, self._changed, self._sooner):
                    condition.notify_all()
            self._finish(effects)

    def next_append(self, channel: LeaderChannel) -> tuple[AppendRequest, OutgoingBatch] | None:
        """Number and take the next batch for the leader. None: nothing can be sent now."""
        with self.lock:
            taken = self._machine.next_append(channel, _now_ms())
            self._notify([])
            return taken

    def written(self, channel: LeaderChannel, batch: OutgoingBatch) -> None:
        """The transport has taken the batch."""
        if self._machine.acks == 0:
            self._handle(lambda now_ms: self._machine.written(channel, batch, now_ms))

    def answered(self, channel: LeaderChannel, response: AppendResponse) -> None:
        """The leader answered one append."""
        self._handle(lambda now_ms: self._machine.answered(channel, response, now_ms))

    def broke(self, channel: LeaderChannel, error: SparkBrokerError) -> None:
        """The stream is broken."""
        self._handle(lambda now_ms: self._machine.broke(channel, error, now_ms))

    def _handle(self, event: Callable[[int], list[SenderEffect]]) -> None:
        """Hand the machine an event, and carry out its effects."""
        with uninterrupted():
            with self.lock:
                effects = event(_now_ms())
                for stream in self._notify(effects):
                    stream.wake()
            self._finish(effects)

    def _notify(self, effects: list[SenderEffect]) -> list[AppendChannel]:
        """Under the lock: wake the threads that have something to do now. Returns the streams that have.

        A stream for which there is no thread counts as broken. What follows from that is added to the effects.
        """
        streams: list[AppendChannel] = []
        for effect in effects:
            if isinstance(effect, SendAppends):
                try:
                    streams.append(self._stream(effect.channel))
                except NoThreadError as error:
                    effects += self._machine.broke(effect.channel, error, _now_ms())
            elif isinstance(effect, RefreshMetadata | RequestProducerIds):
                self._question = effect
                self._asked.notify()
            elif isinstance(effect, BatchDivided):
                self._replace(effect.batch, effect.pieces)
            elif isinstance(effect, CompleteBatch) and self._failure is None:
                self._completing.add(effect.batch)
        if self._machine.due_ms < self._wakes_at_ms:
            self._wakes_at_ms = self._machine.due_ms
            self._sooner.notify()
        return streams

    def _finish(self, effects: list[SenderEffect]) -> None:
        """Outside the lock: complete the Futures (their callbacks may append), and then count the batches as done."""
        done = [e for e in effects if isinstance(e, CompleteBatch) and e.batch in self._completing]
        for effect in effects:
            if isinstance(effect, CloseChannel):
                self._close_stream(effect)
        for batch, outcome in ((effect.batch, effect.outcome) for effect in done):
            if isinstance(outcome, SparkBrokerError):
                self._on_failure(outcome)
            self._report(batch, outcome)
        if done:
            self._forget([effect.batch for effect in done])

    def _forget(self, done: Iterable[OutgoingBatch]) -> None:
        """These batches have their outcomes, and their callbacks have run."""
        with self.lock:
            for batch in done:
                self._incomplete.discard(batch)
                self._completing.discard(batch)
                self._buffered_bytes -= batch.size_bytes
            for gate, awaited in list(self._gates.items()):
                awaited.intersection_update(self._incomplete)
                if not awaited:
                    del self._gates[gate]
                    gate.release()
            self._changed.notify_all()

    def _replace(self, batch: OutgoingBatch, pieces: list[OutgoingBatch]) -> None:
        """Under the lock: who waits for the batch waits for its pieces."""
        for batches in (self._incomplete, *self._gates.values()):
            if batch in batches:
                batches.remove(batch)
                batches.update(pieces)
        self._buffered_bytes += sum(piece.size_bytes for piece in pieces) - batch.size_bytes

    def _stream(self, channel: LeaderChannel) -> AppendChannel:
        """Under the lock: the channel's stream."""
        stream = self._streams.get(channel)
        if stream is None:
            stream = AppendChannel(self, channel, self._config.request_timeout_ms, self._name)
            self._streams[channel] = stream
        return stream

    def _close_stream(self, effect: CloseChannel) -> None:
        if effect.suspect:
            self._metadata.suspect(effect.channel.address)
        with self.lock:
            stream = self._streams.pop(effect.channel, None)
        if stream is not None:
            stream.close()

    @property
    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def _keep_deadlines(self) -> None:
        """Sleeps until the earliest deadline. A producer that does nothing costs nothing."""
        machine = self._machine
        while True:
            with self.lock:
                while not self._is_over and (left_ms := machine.due_ms - _now_ms()) > 0:
                    self._wakes_at_ms = machine.due_ms
                    self._sooner.wait(min(left_ms / 1000, LONGEST_WAIT_S))
                if self._is_over:
                    return
                self._wakes_at_ms = -math.inf  # awake: it looks at `due_ms` again before it sleeps
                effects = machine.tick(_now_ms(), self._metadata.age_s * 1000)
                for stream in self._notify(effects):
                    stream.wake()
            self._finish(effects)

    def _ask_brokers(self) -> None:
        while True:
            with self.lock:
                self._asked.wait_for(lambda: self._is_over or self._question is not None)
                if self._is_over:
                    return
                question, self._question = self._question, None
            event = self._ask(question)
            self._handle(event)

    def _ask(self, question: RefreshMetadata | RequestProducerIds | None) -> Callable[[int], list[SenderEffect]]:
        """The event that the brokers' answer is."""
        machine, metadata = self._machine, self._metadata
        deadline = Deadline.after_ms(self._config.request_timeout_ms)
        try:
            if isinstance(question, RequestProducerIds):
                identities = [self._new_identity(deadline) for _ in range(question.count)]
                return lambda now_ms: machine.producer_ids_came(identities, metadata.view, now_ms)
            metadata.refresh(deadline)
            return lambda now_ms: machine.metadata_refreshed(metadata.view, now_ms)
        except SparkBrokerError as error:
            failure = error
            return lambda now_ms: machine.refresh_failed(failure, now_ms)

    def _new_identity(self, deadline: Deadline) -> ProducerIdentity:
        answer = self._metadata.call_any(InitProducerIdRequest(), deadline)
        if not isinstance(answer, InitProducerIdResponse):
            raise UnknownServerError(f"InitProducerId was answered with {type(answer).__name__}")
        return ProducerIdentity(answer.producer_id, answer.producer_epoch)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
