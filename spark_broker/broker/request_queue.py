"""Limits how many requests of clients a broker works on at a time. The others wait for their turn, for a while.

Python runs one thread at a time, and each thread that waits to run has an equal chance of being next. If the threads of
all clients competed, those of followers, of the controller's session and of the lease would be a few among hundreds.
Busy clients would push the followers out of the ISR, and the broker out of the cluster. So clients' threads first wait
here for their turn, on a lock that costs nothing meanwhile. Threads for replicas and the controller do not wait here.

A request that cannot have its turn soon is refused with THROTTLING_QUOTA_EXCEEDED, and its client backs off. Nothing
has been done for the request by then, except that a long call may have read.

A turn is bounded. A call about 10,000 partitions works piece by piece, and gives way between two pieces when its turn
has lasted `TURN_MAX_S`. Otherwise a few such calls would have all turns, and every append would wait for their end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import TracebackType
from typing import Self, TypeVar

from spark_broker.config import ClusterConfig
from spark_broker.errors import ThrottlingQuotaExceededError, invariant

TURN_MAX_S = 0.01
"""After this time a request gives way, at the end of the piece that it works on. A piece takes about a millisecond."""

RESUME_WAIT_S = 10.0
"""How long a request that has given way waits to go on: less than its client waits for an answer."""

GiveWay = Callable[[], object]
"""Called between two pieces of a request's work, and never under a lock. Raises ThrottlingQuotaExceededError."""


T = TypeVar("T")


def keep_on() -> None:
    """The `GiveWay` of work for which nobody waits."""


def pieces(items: Iterable[T], give_way: GiveWay) -> Iterator[T]:
    """The items, each a piece of a request's work: it gives way between two of them."""
    for item in items:
        yield item
        give_way()


class RequestKind(Enum):
    """Kinds take turns, however many requests each has: a new client's call does not wait behind a thousand fetches.

    LONG: requests that have given way. New ones do not wait behind them.
    """

    CALL = "calls"
    APPEND = "appends"
    FETCH = "fetches"
    LONG = "long requests"


class RequestQueue:
    """One queue for all clients of a broker. Each kind is served in the order of arrival. Thread-safe.

    Up to `handlers` requests have a turn at a time, and up to `max_waiting` of each kind wait. Invariant: no request
    waits while a handler is free.
    """

    def __init__(
        self, handlers: int = ClusterConfig().num_io_threads, max_waiting: int = ClusterConfig().queued_max_requests
    ) -> None:
        self._handlers = handlers
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._working = 0
        self._lanes: dict[RequestKind, deque[threading.Lock]] = {kind: deque() for kind in RequestKind}
        self._order = list(RequestKind)  # which kind is first when a turn ends

    @property
    def working(self) -> int:
        """How many requests have their turn now."""
        return self._working

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return sum(map(len, self._lanes.values()))

    def turn(self, kind: RequestKind, wait_s: float) -> Turn:
        """A context manager: waits up to `wait_s` for a turn, and has it until the block ends.

        Entering raises ThrottlingQuotaExceededError when the turn does not come in time, or too many wait already.
        """
        return Turn(self, kind, wait_s)

    def enter(self, kind: RequestKind, wait_s: float) -> None:
        """Used by `Turn`."""
        lane = self._lanes[kind]
        with self._lock:
            invariant(0 <= self._working <= self._handlers, "%d requests have a turn", self._working)
            if self._working < self._handlers:
                idle = not any(self._lanes.values())
                invariant(idle, "%d requests wait while a handler is free", self.waiting)
                self._working += 1
                return
            if len(lane) >= self._max_waiting:
                raise ThrottlingQuotaExceededError(f"{len(lane)} {kind.value} wait for their turn already")
            mine = threading.Lock()
            mine.acquire()
            lane.append(mine)
        if mine.acquire(timeout=wait_s):
            return
        with self._lock:
            if mine in lane:
                lane.remove(mine)
                why = f"a turn did not come within {wait_s * 1000:.0f} ms; {len(lane)} {kind.value} wait for theirs"
                raise ThrottlingQuotaExceededError(why)
        # The turn came at the last moment: the thread that took `mine` out of the lane has handed its turn over.

    def leave(self) -> None:
        """Used by `Turn`: the turn goes to a request that waits. Its kind becomes the last in the order."""
        with self._lock:
            invariant(self._working > 0, "a turn ends that nobody had")
            if not self._hand_over():
                self._working -= 1

    def step_back(self) -> bool:
        """Used by `Turn`: hand the turn to a request that waits; the caller `enter`s again. False: none waits."""
        with self._lock:
            invariant(self._working > 0, "a turn is handed over that nobody had")
            return self._hand_over()

    def _hand_over(self) -> bool:
        """Under the lock."""
        for place, kind in enumerate(self._order):
            if self._lanes[kind]:
                self._lanes[kind].popleft().release()
                self._order.append(self._order.pop(place))
                return True
        return False


class Turn:
    """One request's turn. A thread that must wait for something else ends it early, and may begin it again."""

    __slots__ = ("_has", "_kind", "_queue", "_since_s", "_wait_s")

    def __init__(self, queue: RequestQueue, kind: RequestKind, wait_s: float) -> None:
        self._queue = queue
        self._kind = kind
        self._wait_s = wait_s
        self._has = False
        self._since_s = 0.0

    def begin(self) -> None:
        """Wait for the turn. Raises ThrottlingQuotaExceededError."""
        self._queue.enter(self._kind, self._wait_s)
        self._got()

    def _got(self) -> None:
        self._has, self._since_s = True, time.monotonic()

    def give_way(self) -> None:
        """Let another request have the turn if this one has lasted `TURN_MAX_S`, and wait for the next turn.

        Does nothing if no request waits, or if this turn has ended. Raises ThrottlingQuotaExceededError.
        """
        if not self._has or time.monotonic() - self._since_s < TURN_MAX_S:
            return
        if self._queue.step_back():
            self._has = False
            self._queue.enter(RequestKind.LONG, RESUME_WAIT_S)
        self._got()

    def end(self) -> None:
        """Let the next request have the turn. Does nothing if this one has ended it already."""
        if self._has:
            self._has = False
            self._queue.leave()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
