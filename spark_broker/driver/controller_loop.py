"""The controller's one thread: events in, records to the metadata log, effects after them.

Decisions that wait while a file is being written share the next one. Nothing of a decision is told to anybody before
its records are committed; a log that fails ends the controller, because what became of its decisions is unknown.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from spark_broker.controller.controller import Controller
from spark_broker.controller.effects import Effect
from spark_broker.controller.events import Event, Tick
from spark_broker.controller.records import MetadataRecord
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.errors import NotControllerError

logger = logging.getLogger(__name__)

TICK_S = 0.05
LOOK_S = 2.0
"""How often a controller looks whether it is still the newest; a write finds it out as well."""
MAX_WAITING_EVENTS = 100_000
MAX_BATCH = 1000


class Carrier(Protocol):
    """Who carries effects out. Neither method may block."""

    def publish(self, first_offset: int, records: Sequence[MetadataRecord]) -> None:
        """These records were committed, the first at this offset."""

    def carry(self, effect: Effect) -> None: ...


def now_ms() -> int:
    """The controller's clock: it never falls."""
    return time.monotonic_ns() // 1_000_000


class ControllerLoop(threading.Thread):
    """Runs until `stop` or the first failure, of which `on_failure` is told."""

    def __init__(
        self,
        controller: Controller,
        log: MetadataLog,
        carrier: Carrier,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="controller", daemon=True)
        self._controller = controller
        self._log = log
        self._carrier = carrier
        self._on_failure = on_failure
        self._events: queue.Queue[Event] = queue.Queue(MAX_WAITING_EVENTS)
        self._next_tick = 0.0
        self._next_look = time.monotonic() + LOOK_S
        self._stopped = threading.Event()

    def submit(self, event: Event) -> None:
        """Hand in an event, from any thread. Raises NotControllerError when too many wait."""
        try:
            self._events.put_nowait(event)
        except queue.Full:
            raise NotControllerError("the controller is overloaded") from None

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self.step(self._next_events())
                self._look_for_another()
        except BaseException as error:  # noqa: BLE001 (it is handed on, and ends this process)
            # Typed or not: what was decided and not committed must not be acted on, so nothing more is.
            self._stopped.set()
            self._on_failure(error)

    def _next_events(self) -> list[Event]:
        """Those that wait, up to a bound; then a tick, when it is due. Heartbeats that wait count before time does."""
        events: list[Event] = []
        try:
            events.append(self._events.get(timeout=max(self._next_tick - time.monotonic(), 0.0)))
            while len(events) < MAX_BATCH:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK_S
            events.append(Tick())
        return events

    def _look_for_another(self) -> None:
        """A deposed controller with nothing to write would keep its brokers' sessions from the one that took over."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._log.check_current()

    def step(self, events: Sequence[Event]) -> None:
        """Decide on the events, commit, and only then act."""
        outcomes = [self._controller.handle(event, now_ms()) for event in events]
        records = [record for outcome in outcomes for record in outcome.records]
        if records:
            first_offset = self._log.append(records)
            self._carrier.publish(first_offset, records)
        for outcome in outcomes:
            for effect in outcome.effects:
                self._carrier.carry(effect)
