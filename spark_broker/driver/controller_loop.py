"""The controller's one thread: events in, records to the metadata log, effects after them.

The log is written by another thread, because a store may be slow or fail for minutes. Decisions that wait while a file
is being written share the next one. The heartbeats of live brokers are answered meanwhile, so they stay live. No part
of a decision leaves the controller before its records are committed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from spark_broker.controller.controller import Controller
from spark_broker.controller.decisions import MAX_BATCH, Decisions
from spark_broker.controller.effects import Effect
from spark_broker.controller.events import CallReceived, Event, Tick
from spark_broker.controller.records import MetadataRecord
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.errors import MetadataStoreError, NotControllerError, SparkBrokerError
from spark_broker.threads import Worker, ready_pool

logger = logging.getLogger(__name__)

TICK_S = 0.05
LOOK_S = 2.0
"""How often a controller checks that it is still the newest. Every write checks it as well."""
MAX_WAITING_EVENTS = 100_000
SLOW_S = 10.0
"""A store that has not answered for so long counts as one that fails."""


Done = TypeVar("Done")


class Carrier(Protocol):
    """Carries effects out. Neither method may block."""

    def publish(self, first_offset: int, records: Sequence[MetadataRecord]) -> None:
        """These records were committed, the first at this offset."""

    def carry(self, effect: Effect) -> None: ...


def now_ms() -> int:
    """The controller's clock: it never falls."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """UTC by the driver's clock. It is only compared with the brokers' clocks."""
    return time.time_ns() // 1_000_000


class ControllerLoop(Worker):
    """Runs until `stop` or the first failure, with which `on_failure` is called.

    All threads that it needs are there from the beginning. Raises NoThreadError if they cannot be started.
    """

    def __init__(
        self,
        controller: Controller,
        log: MetadataLog,
        carrier: Carrier,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__("controller", self._failed)
        self._log = log
        self._carrier = carrier
        self._on_failure = on_failure
        self._events: queue.Queue[Event | None] = queue.Queue()  # None: a file has been written
        self._decisions = Decisions(controller)  # only the loop's thread uses it
        self._store = ready_pool(1, "metadata-log")
        self._looking: Future[None] | None = None
        self._next_tick = 0.0
        self._next_look = time.monotonic() + LOOK_S
        self._stopped = threading.Event()

    def submit(self, event: Event) -> None:
        """Hand in an event, from any thread. Raises NotControllerError when it is a call and too many events wait.

        Events of brokers' sessions are never refused: they are few, and a broker whose heartbeats are lost is fenced.
        """
        if isinstance(event, CallReceived) and self._events.qsize() + len(self._decisions) >= MAX_WAITING_EVENTS:
            raise NotControllerError("the controller is overloaded")
        self._events.put(event)

    def stop(self) -> None:
        """Decide nothing more. A decision that waits for its store is given up."""
        self._stopped.set()
        self._log.give_up()
        if not self.is_alive():
            self._store.shutdown(wait=False)

    def work(self) -> None:
        try:
            while not self._stopped.is_set():
                self.step(self._next_events())
                self._look_for_another()
        except SparkBrokerError as error:
            if self._stopped.is_set() and isinstance(error, MetadataStoreError):
                logger.info("a decision was given up: %s", error)
            else:
                self._failed(error)
        finally:
            self._store.shutdown(wait=False)

    def _failed(self, error: BaseException) -> None:
        """Whatever the error is: no effect of an uncommitted decision may be carried out, so the loop ends."""
        self._stopped.set()
        self._on_failure(error)

    def _next_events(self) -> list[Event]:
        """The events that wait, up to a bound, then a tick that is due: heartbeats count before their time-outs do."""
        events = self._decisions.next_events()
        try:
            if not events:
                self._add_to(events, self._events.get(timeout=max(self._next_tick - time.monotonic(), 0.0)))
            while len(events) < MAX_BATCH:
                self._add_to(events, self._events.get_nowait())
        except queue.Empty:
            pass
        if time.monotonic() >= self._next_tick and not len(self._decisions):
            self._next_tick = time.monotonic() + TICK_S
            events.append(Tick())
        return events

    @staticmethod
    def _add_to(events: list[Event], event: Event | None) -> None:
        if event is not None:
            events.append(event)

    def _look_for_another(self) -> None:
        """A deposed controller with nothing to write would keep its brokers' sessions from the one that took over."""
        if self._looking is not None and self._looking.done():
            looked, self._looking = self._looking, None
            looked.result()
        if self._looking is None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._looking = self._store.submit(self._log.check_current)

    def step(self, events: Sequence[Event], *, patience_s: float = math.inf) -> None:
        """Decide on the events, commit, and only then act. Raises what `MetadataLog.append` does."""
        records = self._decisions.decide(events, self._log.image, now_ms())
        if records:
            first_offset = self._await(self._store.submit(self._log.append, records, patience_s=patience_s))
            self._carrier.publish(first_offset, records)
        elif self._decisions.is_writing:
            self._await(self._store.submit(self._log.ensure_current, patience_s=patience_s))
        for effect in self._decisions.committed():
            self._carrier.carry(effect)

    def _await(self, writing: Future[Done]) -> Done:
        """Wait until the store has done it. Events that come meanwhile wait for the next decision."""
        writing.add_done_callback(lambda _: self._events.put(None))
        began = time.monotonic()
        while not writing.done():
            with contextlib.suppress(queue.Empty):
                self._let_wait(self._events.get(timeout=SLOW_S))
            if time.monotonic() - began >= SLOW_S:
                self._log.health.hangs(began)
        return writing.result()

    def _let_wait(self, event: Event | None) -> None:
        answer = None if event is None else self._decisions.let_wait(event, now_ms())
        if answer is not None:
            self._carrier.carry(answer)
