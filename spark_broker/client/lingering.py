"""`send`: one slot per partition, handed on when it is full or has waited for linger.ms."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from spark_broker.client.record_builder import Record, RecordBuilder, Slot
from spark_broker.errors import ClosedError
from spark_broker.model import RecordMetadata, TopicPartition

Dispatch = Callable[[TopicPartition, RecordBuilder], None]
"""Hands a full builder on; it never raises: the builder's futures say what went wrong."""


class Lingering:
    """The records of `send` that are not in a micro-batch yet. Safe for use by many threads."""

    def __init__(self, dispatch: Dispatch, *, linger_ms: int, batch_size_bytes: int, name: str) -> None:
        self._dispatch = dispatch
        self._linger_s = linger_ms / 1000
        self._batch_size_bytes = batch_size_bytes
        self._name = name
        self._lock = threading.Lock()
        self._slots: dict[TopicPartition, Slot] = {}
        self._waiting = threading.Condition(self._lock)
        self._due: dict[TopicPartition, float] = {}  # oldest first: every slot waits equally long
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, partition: TopicPartition, record: Record, *, alone: bool = False) -> Future[RecordMetadata]:
        """Take a record; the calling thread hands the slot on when it is full. `alone`: in a batch of its own.

        Raises ClosedError.
        """
        slot = self._slot(partition)
        while (put := self._put(partition, slot, record, alone=alone)) is None:
            self._hand_on(partition, slot)
        future, full = put
        if full:
            self._hand_on(partition, slot)
        return future

    def hand_on(self, topic: str | None = None) -> None:
        """Hand on what waits, of one topic or of all, and wait for what another thread is just handing on."""
        if not self._slots:
            return
        with self._lock:
            slots = [(tp, slot) for tp, slot in self._slots.items() if topic is None or tp.topic == topic]
        for partition, slot in slots:
            self._hand_on(partition, slot)

    def close(self) -> None:
        """Hand on what waits and end the thread. What comes later is refused."""
        with self._waiting:
            self._closed = True
            self._waiting.notify_all()
        self.hand_on()

    def _put(
        self, partition: TopicPartition, slot: Slot, record: Record, *, alone: bool
    ) -> tuple[Future[RecordMetadata], bool] | None:
        """The record's future, and whether the slot is full now; None: it has to be handed on before."""
        with slot.lock:
            if self._closed:  # set before the last slots are handed on: what is put behind that would stay for ever
                raise ClosedError("the producer is closed")
            if slot.builder is None:
                slot.builder = RecordBuilder(alone=alone)
                self._expect(partition)
            elif not slot.builder.fits(record, self._batch_size_bytes, alone=alone):
                return None
            future = slot.builder.add(record)
            return future, alone or not self._linger_s or slot.builder.size_bytes >= self._batch_size_bytes

    def _slot(self, partition: TopicPartition) -> Slot:
        slot = self._slots.get(partition)
        if slot is None:
            with self._lock:
                slot = self._slots.setdefault(partition, Slot())
        return slot

    def _hand_on(self, partition: TopicPartition, slot: Slot, *, due_s: float = float("inf")) -> None:
        """Hand on what the slot holds, if it began by `due_s`. Others may fill the slot again meanwhile."""
        with slot.order:
            with slot.lock:
                builder = slot.builder
                if builder is None or builder.first_at_s > due_s:
                    return
                slot.builder = None
                with self._lock:
                    self._due.pop(partition, None)
            self._dispatch(partition, builder)

    def _expect(self, partition: TopicPartition) -> None:
        with self._waiting:
            self._due[partition] = time.monotonic() + self._linger_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name}-linger", daemon=True)
                self._thread.start()
            if len(self._due) == 1:
                self._waiting.notify_all()

    def _run(self) -> None:
        while True:
            with self._waiting:
                self._waiting.wait_for(lambda: self._closed or self._due)
                if self._closed:
                    return
                partition, due_s = next(iter(self._due.items()))
                left_s = due_s - time.monotonic()
                if left_s > 0:
                    self._waiting.wait(left_s)
                    continue
            # It may have been handed on meanwhile, and a new one begun.
            self._hand_on(partition, self._slot(partition), due_s=due_s - self._linger_s)
