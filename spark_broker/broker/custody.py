"""The keepers of a broker's process, and when the process must leave.

The process belongs to its executor's JVM: when the JVM ends, so does the broker. While the JVM lives, a keeper (a Spark
task) is connected to the broker. A keeper may be lost at any time, through no fault of the broker, and the launcher
sends another one. The broker leaves when no keeper comes for `broker.adoption.timeout.ms`.

`Custody` has the rules, without thread, clock or socket; `CustodyThread` carries them out.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from enum import Enum, auto

from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.executor import LOOK_S, WatchedProcess, peer_of
from spark_broker.broker.spec import LOST, STOPPED, BrokerOutcome
from spark_broker.errors import invariant
from spark_broker.storage.filesystem import ProcessIdentity
from spark_broker.threads import Worker

logger = logging.getLogger(__name__)

NEVER = -1

EXECUTOR_GONE_MS = 1000
"""How long a broker may take to hand its leaderships over after its executor's JVM has ended."""

ENDED_BY_FORCE = 3
"""Exit status of a broker that did not leave in time."""


class CustodyState(Enum):
    KEPT = auto()  # a keeper is connected
    ALONE = auto()  # no keeper is connected; another one is to come
    LEAVING = auto()  # the broker was asked to hand over and leave
    OVER = auto()  # the broker did not leave in time: the process is ended


class CustodyEvent(Enum):
    KEEPER_CAME = auto()
    LAST_KEEPER_WENT = auto()
    NOBODY_CAME = auto()
    EXECUTOR_ENDED = auto()
    OUT_OF_TIME = auto()


TRANSITIONS: dict[tuple[CustodyState, CustodyEvent], CustodyState] = {
    (CustodyState.KEPT, CustodyEvent.KEEPER_CAME): CustodyState.KEPT,
    (CustodyState.KEPT, CustodyEvent.LAST_KEEPER_WENT): CustodyState.ALONE,
    (CustodyState.KEPT, CustodyEvent.EXECUTOR_ENDED): CustodyState.LEAVING,
    (CustodyState.ALONE, CustodyEvent.KEEPER_CAME): CustodyState.KEPT,
    (CustodyState.ALONE, CustodyEvent.NOBODY_CAME): CustodyState.LEAVING,
    (CustodyState.ALONE, CustodyEvent.EXECUTOR_ENDED): CustodyState.LEAVING,
    # A broker that is leaving goes on leaving when a keeper comes. It must be quick once its executor has ended.
    (CustodyState.LEAVING, CustodyEvent.KEEPER_CAME): CustodyState.LEAVING,
    (CustodyState.LEAVING, CustodyEvent.LAST_KEEPER_WENT): CustodyState.LEAVING,
    (CustodyState.LEAVING, CustodyEvent.EXECUTOR_ENDED): CustodyState.LEAVING,
    (CustodyState.LEAVING, CustodyEvent.OUT_OF_TIME): CustodyState.OVER,
}


class Custody:
    """The rules. Times are milliseconds of a clock that never goes back. The time-out `NEVER` means none.

    Invariants: `deadline_ms` is None in KEPT; `why` is set in LEAVING and OVER, and not before.
    """

    def __init__(self, now_ms: int, *, adoption_timeout_ms: int, shutdown_timeout_ms: int) -> None:
        self.state = CustodyState.ALONE
        self.why = ""
        self.deadline_ms: int | None = None
        self._adoption_timeout_ms = adoption_timeout_ms
        self._shutdown_timeout_ms = shutdown_timeout_ms
        self._keepers = 0
        self._wait_for_keeper(now_ms)

    def keeper_came(self) -> None:
        """Another keeper is connected."""
        self._keepers += 1
        self._move(CustodyEvent.KEEPER_CAME)
        if self.state is CustodyState.KEPT:
            self.deadline_ms = None

    def keeper_went(self, now_ms: int) -> None:
        """A keeper's connection ended."""
        invariant(self._keepers > 0, "a keeper went that had not come")
        self._keepers -= 1
        if self._keepers == 0:
            self._move(CustodyEvent.LAST_KEEPER_WENT)
            if self.state is CustodyState.ALONE:
                self._wait_for_keeper(now_ms)

    def executor_ended(self, now_ms: int, why: str) -> None:
        """The executor's JVM has ended."""
        self._move(CustodyEvent.EXECUTOR_ENDED)
        self.why = why
        self._hurry(now_ms + EXECUTOR_GONE_MS)

    def tick(self, now_ms: int) -> None:
        """Time passed."""
        if self.deadline_ms is None or now_ms < self.deadline_ms:
            return
        if self.state is CustodyState.LEAVING:
            self._move(CustodyEvent.OUT_OF_TIME)
            self.deadline_ms = None
        elif self.state is CustodyState.ALONE:
            self._move(CustodyEvent.NOBODY_CAME)
            self.why = f"no keeper came for {self._adoption_timeout_ms} ms (broker.adoption.timeout.ms)"
            self.deadline_ms = now_ms + self._shutdown_timeout_ms

    def _wait_for_keeper(self, now_ms: int) -> None:
        forever = self._adoption_timeout_ms == NEVER
        self.deadline_ms = None if forever else now_ms + self._adoption_timeout_ms

    def _hurry(self, deadline_ms: int) -> None:
        self.deadline_ms = deadline_ms if self.deadline_ms is None else min(self.deadline_ms, deadline_ms)

    def _move(self, event: CustodyEvent) -> None:
        invariant((self.state, event) in TRANSITIONS, f"custody: {event.name} in {self.state.name}")
        self.state = TRANSITIONS[self.state, event]


class LeaveRequest:
    """Asks a broker, once, to hand over and leave. A late subscriber is called at once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: str | None = None
        self._subscriber: Callable[[str], None] | None = None

    def send(self, why: str) -> None:
        """Ask. Nothing happens the second time."""
        with self._lock:
            if self._why is not None:
                return
            self._why = why
            subscriber = self._subscriber
        if subscriber is not None:
            subscriber(why)

    def subscribe(self, subscriber: Callable[[str], None]) -> None:
        """Call this one when the broker is to leave."""
        with self._lock:
            self._subscriber = subscriber
            why = self._why
        if why is not None:
            subscriber(why)


class CustodyThread(Worker):
    """Accepts keepers, watches the executor, and asks the broker to leave. Ends the process if the broker does not."""

    def __init__(
        self,
        listener: socket.socket,
        first_keeper: socket.socket,
        executor: ProcessIdentity,
        custody: Custody,
        *,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        # Without this thread, the broker would outlive its executor for ever.
        super().__init__("custody", lambda _: end_process(ENDED_BY_FORCE))
        self.leave = LeaveRequest()
        self._listener = listener
        self._executor = executor
        self._custody = custody
        self._end_process = end_process
        self._lock = threading.Lock()  # of the listener and the keepers, to which the broker's main thread reports
        self._reported = False
        first_keeper.setblocking(False)
        self._keepers = {first_keeper}
        self._pause = threading.Event()  # never set
        listener.setblocking(False)  # the other thread may have accepted what this one saw waiting
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._watched: WatchedProcess | None = None  # the executor's JVM, until it has ended
        self._admit(first_keeper)

    def work(self) -> None:
        self._watch_executor()
        while self._custody.state is not CustodyState.OVER:
            self._look()
        logger.error("did not leave in time: %s", self._custody.why)
        self._end_process(ENDED_BY_FORCE)

    def _look(self) -> None:
        """Wait for the next event, and act on it."""
        for key, _ in self._selector.select(self._patience_s()):
            self._take(key.fileobj)
        if self._watched is not None and self._watched.has_ended:
            self._note_executor_end(self._watched)
        self._custody.tick(SYSTEM_CLOCK.boottime_ms())
        if self._custody.state is CustodyState.LEAVING:
            self.leave.send(self._custody.why)

    def report(self, outcome: BrokerOutcome) -> None:
        """The broker has ended: tell every keeper how. The process ends next."""
        if outcome.reason == STOPPED and self._custody.why:
            # It left in order, but nobody had stopped it: the launcher must start another broker.
            outcome = BrokerOutcome(reason=LOST, error_message=self._custody.why)
        line = outcome.to_json() + b"\n"
        with self._lock:
            for keeper in self._keepers:
                _tell(keeper, line)
            for keeper in self._waiting():
                with keeper:
                    _tell(keeper, line)

    def _waiting(self) -> Iterator[socket.socket]:
        """Keepers that have connected but were not accepted. Later ones are refused, and wait for the process's end.

        Without an answer they would see only the end of their connection, and report the broker as lost.
        """
        self._reported = True
        self._listener.shutdown(socket.SHUT_RD)
        while True:
            try:
                keeper = self._accept_one()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("a keeper cannot be told of the end: %s", error)
                return
            if keeper is not None:
                yield keeper

    def _watch_executor(self) -> None:
        try:
            self._watched = WatchedProcess(self._executor)
        except ProcessLookupError:
            self._custody.executor_ended(SYSTEM_CLOCK.boottime_ms(), self._why_executor_ended)
            return
        if self._watched.descriptor is not None:
            self._selector.register(self._watched.descriptor, selectors.EVENT_READ)

    def _note_executor_end(self, watched: WatchedProcess) -> None:
        if watched.descriptor is not None:
            self._selector.unregister(watched.descriptor)
        watched.close()
        self._watched = None
        self._custody.executor_ended(SYSTEM_CLOCK.boottime_ms(), self._why_executor_ended)

    @property
    def _why_executor_ended(self) -> str:
        return f"its executor's JVM, process {self._executor.pid}, has ended"

    def _take(self, ready: object) -> None:
        if ready is self._listener:
            self._accept()
        elif isinstance(ready, socket.socket):
            self._hear(ready)

    def _accept(self) -> None:
        try:
            keeper = self._take_in()
        except OSError as error:
            # The broker may have no file descriptor left. The keeper waits, and so does this thread.
            logger.warning("a keeper cannot be taken in: %s", error)
            self._pause.wait(LOOK_S)
            return
        if keeper is not None:
            self._admit(keeper)

    def _take_in(self) -> socket.socket | None:
        with self._lock:
            if self._reported:
                self._selector.unregister(self._listener)  # a listener that is shut down is always ready
                return None
            keeper = self._accept_one()
            if keeper is not None:
                self._keepers.add(keeper)
            return keeper

    def _accept_one(self) -> socket.socket | None:
        """The next keeper that waits; None if it is another user's. Raises BlockingIOError when none waits."""
        keeper, _ = self._listener.accept()
        if peer_of(keeper).uid != os.getuid():
            keeper.close()
            return None
        keeper.setblocking(False)  # a keeper that reads nothing must not delay the broker's end
        return keeper

    def _admit(self, keeper: socket.socket) -> None:
        self._selector.register(keeper, selectors.EVENT_READ)
        alone = self._custody.state is CustodyState.ALONE
        self._custody.keeper_came()
        if alone:
            logger.info("kept by a task")

    def _hear(self, keeper: socket.socket) -> None:
        """Keepers send nothing, so a connection becomes readable when it ends."""
        try:
            if keeper.recv(1024):
                return
        except OSError as error:
            logger.info("a keeper's connection broke: %s", error)
        self._selector.unregister(keeper)
        with self._lock:
            self._keepers.discard(keeper)
        keeper.close()
        self._custody.keeper_went(SYSTEM_CLOCK.boottime_ms())
        if self._custody.state is CustodyState.ALONE:
            logger.warning("the keeper is gone; the broker goes on, and waits for another one")

    def _patience_s(self) -> float | None:
        deadline_ms = self._custody.deadline_ms
        wait_s = None if deadline_ms is None else max(0.0, (deadline_ms - SYSTEM_CLOCK.boottime_ms()) / 1000)
        if self._watched is not None and self._watched.descriptor is None:
            return LOOK_S if wait_s is None else min(wait_s, LOOK_S)
        return wait_s


def _tell(keeper: socket.socket, line: bytes) -> None:
    try:
        keeper.sendall(line)
    except OSError:
        logger.info("a keeper went before it could be told of the end")
