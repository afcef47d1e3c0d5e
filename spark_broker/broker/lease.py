"""How long a broker may act without having heard from the controller, and whether it may go by its wall clock."""

from __future__ import annotations

import logging

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger(__name__)

STEP_MS = 60_000
"""A clock that goes on as it should differs from the time since the boot by less, from one heartbeat to the next."""

SETTLED_MS = 3_600_000
"""A clock that was set wrong is found to be so within this time."""


class Lease:
    """Runs from the *sending* of the last answered heartbeat, on the machine's boot-time clock.

    Written by the session's thread, read by any. Invariant: `_until_ms` never falls, except to 0 when it is dropped.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, settled_ms: int = SETTLED_MS) -> None:
        self._clock = clock
        self._settled_ms = settled_ms
        self._until_ms = 0
        self._session = False
        self._offset_ms: int | None = None  # the wall clock minus the time since the boot, at the last heartbeat
        self._set_ms: int | None = None  # when the wall clock was found to be set

    def extend(self, sent_ms: int, session_timeout_ms: int) -> None:
        """The heartbeat that was sent at `sent_ms` has been answered, and the broker is not fenced."""
        self._until_ms = max(self._until_ms, sent_ms + session_timeout_ms)
        self._session = True
        step_ms = self._step_ms()
        if abs(step_ms) > STEP_MS:
            self._set_ms = self._clock.boottime_ms()
            text = "this broker's clock was set by %+.0f s: for an hour, nothing is deleted or forgotten for its age"
            logger.warning(text, step_ms / 1000)
        self._offset_ms = self._now_offset_ms()

    def session_lost(self) -> None:
        """No session: appends are refused from now on, committed reads go on until the lease ends."""
        self._session = False

    def drop(self) -> None:
        """The controller has fenced this broker."""
        self._session = False
        self._until_ms = 0

    @property
    def allows_reads(self) -> bool:
        return self._clock.boottime_ms() < self._until_ms

    @property
    def allows_appends(self) -> bool:
        return self._session and self.allows_reads

    @property
    def allows_expiry(self) -> bool:
        """Whether what is old by the wall clock may go. The controller has compared the clock with others, and nobody
        has set it lately: where all clocks are one machine's, none of the others shows that it is wrong.
        """
        if not self.allows_appends or abs(self._step_ms()) > STEP_MS:
            return False
        return self._set_ms is None or self._clock.boottime_ms() - self._set_ms >= self._settled_ms

    def _step_ms(self) -> int:
        """By how much the wall clock was set since the last heartbeat."""
        return 0 if self._offset_ms is None else self._now_offset_ms() - self._offset_ms

    def _now_offset_ms(self) -> int:
        return self._clock.wall_ms() - self._clock.boottime_ms()
