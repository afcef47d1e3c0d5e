"""Long polls: streams whose requests wait for news on a broker, in events. The readers of some schedules wait so."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from spark_broker.broker.fetch_operation import FetchAnswer
from spark_broker.broker.notifier import Notifier
from spark_broker.broker.replica_session import ReplicaAnswer
from spark_broker.errors import SparkBrokerError
from spark_broker.testing.simulation.network import End
from spark_broker.testing.simulation.scheduler import Timer
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess

SHARE = 0.3
"""Share of the schedules whose readers wait on their leaders."""

WAITS_MS = (40, 150)


def with_long_polls(seed: int, swarm: Swarm) -> Swarm:
    """The draw of a seed, with readers that wait if it has them. A generator of its own leaves the other seeds as they
    are.
    """
    rng = random.Random(f"{seed}/long polls draw")
    return replace(swarm, reader_wait_ms=rng.choice(WAITS_MS)) if rng.random() < SHARE else swarm


class Waker(Notifier):
    """Calls `on_news` where production wakes a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.on_news: Callable[[], None] = lambda: None

    def notify(self, key: Hashable) -> None:
        super().notify(key)
        self.on_news()


class _Operation(Protocol):
    """A production operation whose requests wait for news."""

    deadline_ms: int

    def cancelled(self) -> None: ...


class LongPolls:
    """A stream whose requests wait, one at a time. When its client leaves, nobody waits any more.

    No news may be lost: at the end of a wait without news there is nothing that the client has waited for.
    """

    def __init__(
        self,
        process: BrokerProcess,
        end: End,
        operation: _Operation,
        waker: Waker,
        received: Callable[[object, int], None],
        try_answer: Callable[[int], FetchAnswer | ReplicaAnswer | None],
    ) -> None:
        self._process = process
        self._end = end
        self._operation = operation
        self._received = received
        self._try_answer = try_answer
        self._waiting = False
        self._waking = False
        self._timer = Timer(process.world.scheduler, process, "long poll ends", self._ended)
        waker.on_news = self.wake
        end.on_message = self._asked
        end.on_break = lambda _: self._left()

    def wake(self) -> None:
        """There is news. Its thread runs a moment later."""
        if self._waiting and not self._waking:
            self._waking = True
            self._process.world.scheduler.after(0, self._process, "news for a reader", self._woken)

    def _asked(self, message: object) -> None:
        now_ms = self._process.machine.clock.boottime_ms()
        try:
            self._received(message, now_ms)
        except SparkBrokerError as error:
            self._end.close(error)
            return
        self._waiting = True
        if not self._answered():
            self._timer.set(self._operation.deadline_ms - now_ms)

    def _woken(self) -> None:
        self._waking = False
        if self._waiting:
            self._answered()

    def _ended(self) -> None:
        if self._waiting and not self._waking:
            self._answered(late=True)

    def _answered(self, *, late: bool = False) -> bool:
        answer = self._try_answer(self._operation.deadline_ms if late else self._process.machine.clock.boottime_ms())
        if answer is None:
            return False
        self._waiting = False
        self._timer.cancel()
        # Nobody wakes when the lease ends: time has passed, and nothing has happened.
        if late and answer.complete and self._process.lease.allows_reads:
            raise ViolationError("news wakes who waits", f"{self._process}: a {self._end.kind} slept over news")
        if not self._end.closed:
            self._end.send((answer.response, b"".join(answer.payload)))
        return True

    def _left(self) -> None:
        self._waiting = False
        self._timer.cancel()
        self._operation.cancelled()
