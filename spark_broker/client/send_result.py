"""The Futures of `send`. Each one gets its result from that of its micro-batch.

The lock, the condition and the lists of a `concurrent.futures.Future` cost more than the rest of `send`. A record's
Future has none of them until a thread waits for it. Then it is like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from spark_broker.client.dividing import Divided, Result, failures
from spark_broker.client.outgoing import Outcome
from spark_broker.client.unseen import Unseen, ending_itself
from spark_broker.errors import SparkBrokerError, invariant
from spark_broker.model import RecordMetadata

Callback = Callable[[Future[RecordMetadata]], object]

_FIELDS = frozenset(vars(Future()))
"""What a Future has of its own."""


class SendResult:
    """The result of one micro-batch of `send`: `outcome` is None until it is known. Safe for use by many threads.

    No record's own lock is taken under the lock here, because a thread that holds a record's lock may wait for this
    one.

    A record of a batch that failed counts in `unseen` until somebody looks at it. `records`: how many there are, once
    the micro-batch is full or due.

    Invariant: a record that has callbacks, or fields and no outcome, is in `_watched`, by its index, until `outcome` is
    known.
    """

    __slots__ = ("_lock", "_looked_at", "_unseen", "_watched", "outcome", "records")

    def __init__(self, unseen: Unseen) -> None:
        self.outcome: Result | None = None
        self.records = 0
        self._unseen = unseen
        self._looked_at: set[int] = set()  # by index; of a batch that was stored, only those with a callback
        self._lock = threading.Lock()
        self._watched: dict[int, FutureRecordMetadata] = {}

    def complete(self, outcome: Result) -> None:
        """The micro-batch was stored or has failed. Runs the callbacks, in the order of the records."""
        with self._lock:
            invariant(self.outcome is None, "a micro-batch has one outcome")
            for error, rows in failures(outcome, self.records):
                self._unseen.failed(error, len(rows) - sum(index in rows for index in self._looked_at))
            self.outcome = outcome
            watched, self._watched = self._watched, {}
        for index in sorted(watched):
            watched[index].settle(_of(outcome, index))

    def look_at(self, index: int) -> None:
        """Somebody has seen the record's error, or will."""
        with self._lock:
            outcome = None if self.outcome is None else _of(self.outcome, index)
            if index not in self._looked_at and isinstance(outcome, SparkBrokerError):
                self._unseen.seen(outcome)
            self._looked_at.add(index)

    def give_fields(self, record: FutureRecordMetadata) -> None:
        """A thread uses the record as a Future."""
        with self._lock:
            record.take_fields(None if self.outcome is None else _of(self.outcome, record.index))
            if self.outcome is None:
                self._watched[record.index] = record

    def call_later(self, record: FutureRecordMetadata, callback: Callback) -> bool:
        """Run the callback when the outcome is known; returns False when it is known already."""
        with self._lock:
            if self.outcome is not None:
                return False
            record.keep_callback(callback)
            self._watched[record.index] = record
            return True


def _of(result: Result, index: int) -> Outcome:
    """The outcome of the record with this index."""
    return result.of(index) if isinstance(result, Divided) else result


class FutureRecordMetadata(Future[RecordMetadata]):
    """The Future of one record: it has offset `base_offset + index` of its micro-batch. It cannot be cancelled."""

    __slots__ = ("_batch", "index")

    def __init__(self, batch: SendResult, index: int) -> None:
        # Future's own fields come with `take_fields`.
        self._batch = batch
        self.index = index

    def __getattr__(self, name: str) -> Any:
        """A method of Future, `wait` or `as_completed` asks for a field that is not there yet."""
        if name not in _FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        self._batch.give_fields(self)
        return self.__dict__[name]

    def done(self) -> bool:
        return self._batch.outcome is not None

    def running(self) -> bool:
        return self._batch.outcome is None

    def cancelled(self) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> RecordMetadata:
        outcome = self._batch.outcome
        if isinstance(outcome, RecordMetadata):
            return self._metadata(outcome)
        try:
            return super().result(timeout)
        except SparkBrokerError:
            self._batch.look_at(self.index)
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        outcome = self._batch.outcome
        if isinstance(outcome, RecordMetadata):
            return None
        error = super().exception(timeout)
        if error is not None:
            self._batch.look_at(self.index)
        return error

    def add_done_callback(self, fn: Callback) -> None:
        self._batch.look_at(self.index)
        if not self._batch.call_later(self, ending_itself(fn)):
            super().add_done_callback(fn)

    @property
    def has_fields(self) -> bool:
        return "_condition" in self.__dict__

    def take_fields(self, outcome: Outcome | None) -> None:
        """Become a Future like any other, all at once. Under the batch's lock.

        Fields that are there already stay: callbacks, and every field where another thread was first.
        """
        fields: Future[RecordMetadata] = Future()
        if outcome is not None:
            self._finish(fields, outcome)
        self.__dict__.update({**vars(fields), **self.__dict__})

    def keep_callback(self, callback: Callback) -> None:
        """Where Future keeps its callbacks. Under the batch's lock."""
        self.__dict__.setdefault("_done_callbacks", []).append(callback)

    def settle(self, outcome: Outcome) -> None:
        """Wake the threads that wait, and run the callbacks. Once."""
        if self.has_fields and not super().done():
            self._finish(self, outcome)
        else:
            self._invoke_callbacks()

    def _finish(self, future: Future[RecordMetadata], outcome: Outcome) -> None:
        if isinstance(outcome, SparkBrokerError):
            future.set_exception(outcome)
        else:
            future.set_result(self._metadata(outcome))

    def _metadata(self, batch: RecordMetadata) -> RecordMetadata:
        offset = None if batch.base_offset is None else batch.base_offset + self.index
        return RecordMetadata(batch.topic, batch.partition, offset, 1)
