"""Virtual time: one queue of events, and the processes that they happen to.

Nothing here depends on a hash or a real clock: the same pushes give the same order. Time is in microseconds; events at
one instant happen in the order in which they were pushed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from spark_broker.testing.simulation.trace import Trace

Action = Callable[[], object]
_Event = tuple[int, int, "Process", str, Action]


class Process:
    """Something that acts: a broker's process, the controller, a client, the world itself.

    Nothing happens to a dead process any more. The events of a paused one (SIGSTOP) wait until `resume`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.backlog: list[tuple[str, Action]] = []

    def __repr__(self) -> str:
        return self.name


class Timer:
    """Calls `action` once at the deadline, which may be moved any number of times; moving it costs nothing."""

    __slots__ = ("_action", "_armed", "_deadline_us", "_label", "_owner", "_scheduler")

    def __init__(self, scheduler: Scheduler, owner: Process, label: str, action: Action) -> None:
        self._scheduler = scheduler
        self._owner = owner
        self._label = label
        self._action = action
        self._deadline_us = -1
        self._armed = False

    def set(self, delay_ms: float) -> None:
        """From now on the deadline is `delay_ms` from now."""
        self._deadline_us = self._scheduler.now_us + int(delay_ms * 1000)
        if not self._armed:
            self._armed = True
            self._scheduler.push_quiet(self._deadline_us, self._owner, self._fire)

    def cancel(self) -> None:
        self._deadline_us = -1

    def _fire(self) -> None:
        self._armed = False
        if self._deadline_us < 0:
            return
        if self._deadline_us > self._scheduler.now_us:
            self._armed = True
            self._scheduler.push_quiet(self._deadline_us, self._owner, self._fire)
            return
        self._deadline_us = -1
        self._scheduler.count(self._owner, self._label)
        self._action()


class Scheduler:
    """The queue. `events` counts what really happened: a moved timer, or an action of a dead process, is no event."""

    def __init__(self, trace: Trace) -> None:
        self.now_us = 0
        self.events = 0
        self.trace = trace
        self.acting: Process | None = None  # the process to which the last event happened
        self._queue: list[_Event] = []
        self._pushed = 0

    @property
    def now_ms(self) -> int:
        return self.now_us // 1000

    def after(self, delay_ms: float, owner: Process, label: str, action: Action) -> None:
        """Let `action` happen to `owner` after this delay."""
        self._pushed += 1
        heapq.heappush(self._queue, (self.now_us + int(delay_ms * 1000), self._pushed, owner, label, action))

    def push_quiet(self, time_us: int, owner: Process, action: Action) -> None:
        """Queue an action that counts itself as an event, if it becomes one."""
        self._pushed += 1
        heapq.heappush(self._queue, (max(time_us, self.now_us), self._pushed, owner, "", action))

    def count(self, owner: Process, label: str) -> None:
        self.events += 1
        self.acting = owner
        self.trace.event(self.now_us, owner.name, label)

    def step(self) -> bool:
        """Let the next event happen, to `acting`. False: nothing is left to happen."""
        while self._queue:
            time_us, _, owner, label, action = heapq.heappop(self._queue)
            self.now_us = time_us
            if not owner.alive:
                continue
            if owner.paused:
                owner.backlog.append((label, action))
                continue
            self.acting = owner
            if label:
                self.events += 1
                self.trace.event(time_us, owner.name, label)
            action()
            return True
        return False

    def resume(self, process: Process) -> None:
        """SIGCONT: what waited happens now, in its order."""
        process.paused = False
        waiting, process.backlog = process.backlog, []
        for label, action in waiting:
            self._pushed += 1
            heapq.heappush(self._queue, (self.now_us, self._pushed, process, label, action))
