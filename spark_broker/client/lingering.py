"""`send`: one slot for each partition. A slot is handed on when it is full or has waited for linger.ms."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from spark_broker.client.record_builder import Pairs, RecordBuilder, Slot
from spark_broker.client.reentry import refuse_within
from spark_broker.client.retry import Deadline
from spark_broker.client.send_result import FutureRecordMetadata
from spark_broker.client.unseen import Unseen
from spark_broker.errors import NoThreadError, SparkBrokerError
from spark_broker.interrupts import Condition, uninterrupted
from spark_broker.model import TopicPartition
from spark_broker.threads import LONGEST_WAIT_S, Fate, Worker, begin, client_ended

Dispatch = Callable[[TopicPartition, RecordBuilder, Deadline | None], None]
"""Hands a full builder on. An error goes into the builder's result. Raises OutOfTimeError at the deadline, if there is
one: nothing was done then.
"""

_AT_ONCE_S = -math.inf

LEFT_MAX = 64
"""How many builders a slot has at most before a callback waits for whoever hands them on."""


class OutOfTimeError(Exception):
    """The time of a `flush`, a `close` or an `append` is over. The records wait on."""


class Lingering:
    """The records of `send` that are not in a micro-batch yet. Safe for use by many threads."""

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        linger_ms: int,
        name: str,
        died: Fate,
        unseen: Unseen,
        lost: Callable[[SparkBrokerError], None],
        calls_back: Callable[[], bool] = lambda: False,
    ) -> None:
        """`died` is called if the thread has ended by an error of our own. `unseen`: where records that fail count.
        `lost`: is told of an error of our own that took records, before their Futures are. `calls_back`: whether the
        calling thread runs a callback.
        """
        self._calls_back = calls_back
        self._unseen = unseen
        self._died = died
        self._lost = lost
        self._dispatch = dispatch
        self._linger_s = linger_ms / 1000
        self._name = name
        self._lock = threading.Lock()
        self._slots: dict[TopicPartition, Slot] = {}
        # Only `_lock` is taken, and never `_waiting`: a signal handler could raise within the condition's own code.
        self._waiting = Condition(self._lock)
        self._due: dict[Slot, float] = {}  # oldest first: every slot waits equally long
        self._thread: Worker | None = None
        self._idle = True  # whether the thread waits until it is notified
        self._closed = False

    def slot(self, partition: TopicPartition) -> Slot:
        """Where records of the partition gather. It is always the same slot."""
        with self._lock:
            return self._slots.setdefault(partition, Slot(partition))

    def add(
        self,
        slot: Slot,
        batch_bytes: int,
        key: bytes | None,
        value: bytes | None,
        headers: Pairs | None,
        timestamp_us: int,
        size_bytes: int,
    ) -> FutureRecordMetadata:
        """Take a record. The calling thread hands the slot on when it is full.

        A micro-batch takes records of `batch_bytes` together, or a single larger one.
        """
        while True:
            future, waits = None, True
            if slot.lock.locked():
                refuse_within(self)
            with slot.lock:  # Between `acquire` and `try`, a signal handler could raise.
                builder = slot.builder
                if builder is None:
                    builder = RecordBuilder(batch_bytes, self._unseen)
                    waits = self._expect(slot)
                    slot.builder = builder
                    future = builder.add(key, value, headers, timestamp_us, size_bytes)
                elif size_bytes <= builder.room_bytes:
                    future = builder.add(key, value, headers, timestamp_us, size_bytes)
                if future is not None and waits and builder.room_bytes > 0:
                    return future
            if not self._left(slot):
                self._hand_on(slot)
            if future is not None:
                return future

    def hand_on(self, topic: str | None = None, deadline: Deadline | None = None) -> bool:
        """Hand on what waits, of one topic or of all. Wait for what another thread is handing on.

        Whether all was done by the deadline. What was not waits on.
        """
        if not self._slots:
            return True
        with self._lock:
            slots = [slot for tp, slot in self._slots.items() if topic is None or tp.topic == topic]
        try:
            for slot in slots:
                self._hand_on(slot, deadline=deadline)
        except OutOfTimeError:
            return False
        return True

    def has_records(self) -> bool:
        """Whether records wait to be handed on."""
        return any(slot.builder is not None or slot.sealed for slot in list(self._slots.values()))

    def close(self, deadline: Deadline | None = None) -> None:
        """Hand on what waits, as far as there is time, and end the thread. Records that are added from now on are
        handed on at once.
        """
        with self._lock:
            self._closed = True
            self._waiting.notify_all()
        self.hand_on(deadline=deadline)

    def _hand_on(self, slot: Slot, *, due_s: float = math.inf, deadline: Deadline | None = None) -> None:
        """Hand on what the slot holds, if it began by `due_s`. Others may fill the slot again meanwhile.

        Raises OutOfTimeError.
        """
        here = threading.get_ident()
        if slot.order_of == here:
            # In a callback of what this thread has just handed on, the next may follow.
            refuse_within(self)
            self._hand_on_in_order(slot, due_s, deadline)
            return
        if slot.order.is_taken:
            refuse_within(self)
        with uninterrupted():
            if not slot.order.take(None if deadline is None else deadline.remaining_s):
                raise OutOfTimeError
            try:
                slot.order_of = here
                self._hand_on_in_order(slot, due_s, deadline)
            finally:
                slot.order_of = 0
                slot.order.give_back()

    def _left(self, slot: Slot) -> bool:
        """Whether the full slot is left to the thread. Who hands it on now may wait for room, which is made once the
        callback that calls this has returned.
        """
        if not slot.order.is_taken or slot.order_of == threading.get_ident() or not self._calls_back():
            return False
        refuse_within(self)
        with slot.lock, self._lock:
            if self._closed or len(slot.sealed) >= LEFT_MAX:
                return False
            try:
                self._at_once(slot)
            except NoThreadError:
                return False
            self._seal(slot, math.inf)
        return True

    def _seal(self, slot: Slot, due_s: float) -> None:
        """Under the slot's lock: close what began by `due_s`."""
        builder = slot.builder
        if builder is not None and builder.first_at_s <= due_s:
            builder.seal()
            sealed = [*slot.sealed, builder] if builder.result.records else slot.sealed
            slot.sealed, slot.builder = sealed, None

    def _hand_on_in_order(self, slot: Slot, due_s: float, deadline: Deadline | None) -> None:
        with slot.lock:
            self._seal(slot, due_s)
            if slot.builder is None:
                with self._lock:
                    self._due.pop(slot, None)
        while slot.sealed:
            with uninterrupted() as block:
                with slot.lock:
                    builder, *slot.sealed = slot.sealed
                try:
                    self._dispatch(slot.topic_partition, builder, deadline)
                except BaseException as error:
                    if error is block.raised or isinstance(error, OutOfTimeError):
                        self._keep(slot, builder)
                    else:
                        self._lose(builder, error)
                    raise

    def _keep(self, slot: Slot, builder: RecordBuilder) -> None:
        """The time, or what a signal handler raised, has ended the wait for room or for a broker. The linger thread
        goes on.
        """
        with slot.lock:
            slot.sealed = [builder, *slot.sealed]
        with self._lock:
            if not self._closed:
                self._at_once(slot)

    def _at_once(self, slot: Slot) -> None:
        """Under the lock: the thread hands this slot on before all others."""
        self._due.pop(slot, None)
        self._due = {slot: _AT_ONCE_S, **self._due}
        self._wake()
        self._waiting.notify_all()

    def _lose(self, builder: RecordBuilder, error: BaseException) -> None:
        """An error of our own. Nobody else knows these records: their Futures would never end."""
        if threading.current_thread() is self._thread:
            self._died(error)  # before anybody learns of it
        if builder.result.outcome is None:
            failure = client_ended(error)
            self._lost(failure)
            builder.result.complete(failure)

    def _expect(self, slot: Slot) -> bool:
        """Whether the thread will hand on the slot's new builder when it is due. If not, the caller does so at once."""
        if not self._linger_s:
            return False
        with self._lock:
            if self._closed:
                return False
            if self._due.get(slot) != _AT_ONCE_S:
                self._due[slot] = time.monotonic() + self._linger_s
            self._wake()
            return True

    def _wake(self) -> None:
        """Under the lock: let the thread look at what is due."""
        if self._thread is None:
            self._thread = begin(f"{self._name}-linger", self._ended, self._run)
        # If it is not idle, it waits for an older slot and wakes up before this one is due.
        if self._idle:
            self._waiting.notify_all()

    def _ended(self, error: BaseException) -> None:
        self._died(error)
        self.close()  # what waits gets the error, and so does what comes

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                self._idle = not self._due
                if self._idle:
                    self._waiting.wait()
                    continue
                slot, due_s = next(iter(self._due.items()))
                left_s = due_s - time.monotonic()
                if left_s > 0:
                    self._waiting.wait(min(left_s, LONGEST_WAIT_S))
                    continue
            # Another thread may have handed it on meanwhile, and begun a new one.
            self._hand_on(slot, due_s=math.inf if due_s == _AT_ONCE_S else due_s - self._linger_s)
