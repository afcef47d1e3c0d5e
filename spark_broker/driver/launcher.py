"""Keeps the brokers running: a slot per broker, each a thread that launches its broker again whenever it ends.

Slots are not brokers: a broker's id belongs to the log directory that its launch claims. Every launch has a number from
the metadata log; a loss is reported under that number, and the next launch gets a higher one.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spark_broker.broker.spec import FAILED, MOVED, STOPPED, BrokerOutcome, BrokerSpec
from spark_broker.driver.executors import Executor
from spark_broker.driver.hosts import BrokerHost
from spark_broker.errors import ProcessLimitError, SparkBrokerError, error_from_code, invariant
from spark_broker.threads import BeginAgain, Worker, begin

logger = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
LASTED_S = 10.0
"""A launch that ran this long was not a failed start: the next one follows without a pause."""

SHORT_LIVED_MAX = 3
"""An executor on which so many launches in a row did not last comes after all others, also those beside brokers."""

MAX_OVER = 100
"""A new launch is given the numbers of at most this many earlier launches that are over."""

LEAVE_AGAIN_S = 1.0
"""A broker that is to leave, and has not, is asked again after this time."""

EXECUTOR_WAIT_S = 5.0
"""How long one wait for a free executor lasts before the slot looks again whether it is still wanted."""


class LaunchController(Protocol):
    """What the launcher needs of the controller."""

    def new_launch(self) -> int:
        """The next launch number, committed in the metadata log."""

    def spark_loss(self, launch: int) -> None:
        """Spark reports that this launch is over: fence its broker, and no other."""

    def stop_broker(self, launch: int) -> None:
        """Controlled shutdown of this launch's broker; returns when it has left."""


SpecMaker = Callable[[int, Executor], BrokerSpec]
"""The specification of a launch on an executor."""


@dataclass(frozen=True)
class Placement:
    """A launch that runs now, and where."""

    slot: int
    launch: int
    executor: Executor


@dataclass(frozen=True)
class LaunchFailure:
    """The end of a launch that was meant to go on."""

    slot: int
    launch: int
    executor_id: str
    outcome: BrokerOutcome

    def __str__(self) -> str:
        detail = f": {self.outcome.error_message}" if self.outcome.error_message else ""
        return f"launch {self.launch} on executor {self.executor_id} ended, {self.outcome.reason}{detail}"


class BrokerLauncher:
    """Launches brokers on a host, each again and again until `stop`. Safe for use by many threads."""

    def __init__(
        self,
        host: BrokerHost,
        controller: LaunchController,
        make_spec: SpecMaker,
        on_session_over: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._controller = controller
        self._make_spec = make_spec
        self._on_session_over = on_session_over
        self._changed = threading.Condition()
        self._stopping = False
        self._session_over = False
        self._slots: list[Worker] = []
        self._wanted: set[int] = set()  # slots that are to have a broker
        self._taken: dict[int, Executor] = {}  # by slot; invariant: distinct executors, unless the host shares one
        self._running: dict[int, Placement] = {}  # by slot
        self._moving: set[int] = set()  # running launches that leave an executor which Spark takes away
        self._failures: collections.deque[LaunchFailure] = collections.deque(maxlen=20)
        self._short_lived: collections.Counter[str] = collections.Counter()  # by executor: launches in a row
        # Launches that are over, but whose process may still run and hold its log directory, which any slot may need.
        self._over: collections.deque[int] = collections.deque(maxlen=MAX_OVER)
        host.open(self)

    # What the host reports.

    def executors_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def executor_lost(self, launch: int) -> None:
        self._report_loss(launch)

    def executor_leaving(self, launch: int) -> None:
        logger.warning("launch %d leaves in order: Spark is about to take its executor away", launch)
        with self._changed:  # The launch's end, which asks whether it moves, waits for the lock.
            begin(f"leave-{launch}", BeginAgain(self._is_over), lambda: self._leave(launch))
            self._moving.add(launch)

    def session_ended(self) -> None:
        with self._changed:
            self._session_over = True
            self._changed.notify_all()
        self._on_session_over()

    # What the cluster asks.

    def add_slot(self) -> int:
        """Launch one more broker, as soon as an executor is free for it; returns the slot. Raises NoThreadError."""
        with self._changed:
            invariant(not self._stopping, "a slot is added to a launcher that stops")
            slot = len(self._slots)
            fate = BeginAgain(lambda: self._ends(slot))
            # Its thread waits for the lock.
            self._slots.append(begin(f"broker-slot-{slot}", fate, lambda: self._keep(slot)))
            self._wanted.add(slot)
        return slot

    def give_up(self, slot: int) -> None:
        """Launch nothing more in the slot, and ask a broker that runs or comes up there to leave.

        Raises NoThreadError: that one stays until it ends, and no other follows it.
        """
        with self._changed:
            self._wanted.discard(slot)
            self._changed.notify_all()
            placement = self._running.get(slot)
            if placement is not None:
                launch = placement.launch
                begin(f"leave-{launch}", BeginAgain(self._is_over), lambda: self._leave(launch))

    @property
    def needs_executors(self) -> bool:
        """Whether each broker needs an executor of its own."""
        return not self._host.shared_executor

    def wait_executors(self, enough: Callable[[Sequence[Executor]], bool], timeout_s: float) -> list[Executor]:
        """Wait until the executors that are alive are enough; returns them, enough or not."""
        with self._changed:
            self._changed.wait_for(lambda: self._session_over or enough(self._host.executors()), timeout_s)
            return self._host.executors()

    def executors(self) -> list[Executor]:
        """The executors that are alive, and are to stay."""
        return self._host.executors()

    def free_executors(self) -> int:
        """Executors that no slot has, or waits for. A host that shares its executor always has room."""
        with self._changed:
            if self._host.shared_executor:
                return 1
            # A slot has no executor while it pauses before its next launch, which needs one all the same.
            return max(len(self._free()) - len(self._wanted - self._taken.keys()), 0)

    def running(self) -> list[Placement]:
        """The launches that run now."""
        with self._changed:
            return sorted(self._running.values(), key=lambda placement: placement.launch)

    @property
    def task_slots(self) -> int:
        """How many task slots the brokers' tasks take, also those that are about to start. A shared executor has one
        task for all brokers.
        """
        with self._changed:
            brokers = sum(slot.is_alive() for slot in self._slots)
        return min(brokers, 1) if self._host.shared_executor else brokers

    def failures(self, slot: int | None = None) -> list[LaunchFailure]:
        """The last few launches that did not last, oldest first. `slot`: only those of this slot."""
        with self._changed:
            return [failure for failure in self._failures if slot is None or failure.slot == slot]

    @property
    def trouble(self) -> str:
        """What last went wrong with the tasks that keep brokers; empty: nothing did."""
        return self._host.trouble

    def fatal(self, slot: int | None = None) -> SparkBrokerError | None:
        """The last failure's error if no repetition can help, as with another cluster's directory; else None.

        `slot`: only its own failures count. Those of others may be long over.
        """
        failures = self.failures(slot)
        return _fatal_error(failures[-1].outcome) if failures else None

    @property
    def session_over(self) -> bool:
        """Whether the Spark application has ended under the brokers."""
        with self._changed:
            return self._session_over

    def begin_stop(self) -> None:
        """Launch nothing any more. Brokers that run are not touched."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def stop(self, timeout_s: float) -> bool:
        """Wait for the brokers to end; after `timeout_s` end the rest by force. Returns whether all left in order."""
        self.begin_stop()
        try:
            with self._changed:
                # Once the session has ended, nobody is left that could report an end.
                self._changed.wait_for(lambda: self._session_over or not self._running, timeout_s)
                in_order = not self._running
        finally:  # Ctrl-C may end the wait.
            self._host.close()
        for thread in self._slots:
            thread.join(timeout=BACKOFF_MAX_S)
        return in_order

    # A slot.

    def _keep(self, slot: int) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._ends(slot):
            executor = self._claim(slot)
            if executor is None:
                continue
            began = time.monotonic()
            try:
                outcome = self._launch(slot, executor)
            except SparkBrokerError as error:
                logger.warning("slot %d cannot launch a broker: %s", slot, error)
                outcome = None
            finally:
                lasted = time.monotonic() - began >= LASTED_S
                self._release(slot, lasted=lasted)
            if outcome is not None and outcome.reason == STOPPED:
                break  # a controlled shutdown: this broker, or the whole cluster, is meant to be gone
            if lasted:
                backoff_s = BACKOFF_FIRST_S
            self._pause(slot, backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
        with self._changed:
            self._wanted.discard(slot)

    def _launch(self, slot: int, executor: Executor) -> BrokerOutcome:
        launch = self._controller.new_launch()
        spec = self._make_spec(launch, executor)
        logger.info("launch %d starts on executor %s (%s)", launch, executor.id, executor.host)
        with self._changed:
            if self._stopping or slot not in self._wanted:
                return BrokerOutcome(reason=STOPPED)
            spec = dataclasses.replace(spec, replaces=tuple(self._over))
            self._running[slot] = Placement(slot, launch, executor)
        try:
            outcome = self._host.run(executor, spec)
        finally:
            with self._changed:
                del self._running[slot]
                self._over.append(launch)
                moves = launch in self._moving
                self._moving.discard(launch)
                self._changed.notify_all()
        if outcome.reason == STOPPED:
            logger.info("launch %d on executor %s ended in order", launch, executor.id)
            return BrokerOutcome(reason=MOVED) if moves else outcome
        self._note_end(LaunchFailure(slot, launch, executor.id, outcome))
        return outcome

    def _note_end(self, failure: LaunchFailure) -> None:
        with self._changed:
            expected = self._stopping
            if not expected:
                self._failures.append(failure)
                self._changed.notify_all()
                logger.warning("%s", failure)
        if not expected:
            self._report_loss(failure.launch)

    def _leave(self, launch: int) -> None:
        """Ask the launch's broker to leave, until the launch has ended. It may not have registered yet, or the
        controller may be away: Spark gives the executor up only when nothing runs there.
        """
        said = ""
        while True:
            try:
                self._controller.stop_broker(launch)
            except ProcessLimitError:
                raise  # The worker begins again after a pause.
            except SparkBrokerError as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("launch %d was not stopped in order yet: %s", launch, error)
            with self._changed:
                if self._changed.wait_for(lambda: self._is_over() or not self._runs(launch), LEAVE_AGAIN_S):
                    return

    def _runs(self, launch: int) -> bool:
        return any(placement.launch == launch for placement in self._running.values())

    def _report_loss(self, launch: int) -> None:
        try:
            self._controller.spark_loss(launch)
        except SparkBrokerError as error:
            # The controller fences by its own means too: a broken session, or the session's time-out.
            logger.warning("launch %d: the controller did not take the loss signal: %s", launch, error)

    def _claim(self, slot: int) -> Executor | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ends(slot) or self._free(), EXECUTOR_WAIT_S)
            free = self._free()
            if self._ends(slot) or not free:
                return None
            chosen = self._most_distant(free)
            self._taken[slot] = chosen
            return chosen

    def _free(self) -> list[Executor]:
        executors = self._host.executors()
        if self._host.shared_executor:
            return executors
        taken = {executor.id for executor in self._taken.values()}
        return [executor for executor in executors if executor.id not in taken]

    def _most_distant(self, free: list[Executor]) -> Executor:
        """A free executor on the host with the fewest brokers: replicas can then lie on different hosts. One on which
        no broker lasts comes last.
        """
        brokers = collections.Counter(executor.host for executor in self._taken.values())
        short = self._short_lived
        return min(free, key=lambda e: (short[e.id] >= SHORT_LIVED_MAX, brokers[e.host], short[e.id]))

    def _release(self, slot: int, *, lasted: bool) -> None:
        with self._changed:
            executor = self._taken.pop(slot)
            if lasted:
                self._short_lived.pop(executor.id, None)
            else:
                self._short_lived[executor.id] += 1
            self._changed.notify_all()

    def _is_over(self) -> bool:
        with self._changed:
            return self._stopping or self._session_over

    def _ends(self, slot: int) -> bool:
        """Whether the slot launches nothing any more."""
        with self._changed:
            return slot not in self._wanted or self._is_over()

    def _pause(self, slot: int, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ends(slot), seconds)


def _fatal_error(outcome: BrokerOutcome) -> SparkBrokerError | None:
    """The broker's error if a new launch would fail as well (another cluster's directory); None otherwise (a lock)."""
    if outcome.reason != FAILED:
        return None
    error = error_from_code(outcome.error_code, outcome.error_message)
    passing = {"DUPLICATE_BROKER_REGISTRATION", "STALE_LAUNCH", "STALE_BROKER_EPOCH"}
    return None if error.retriable or error.name in passing else error
