"""How long a broker may act without having heard from the controller."""

from __future__ import annotations

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock


class Lease:
    """Runs from the *sending* of the last answered heartbeat, on the machine's boot-time clock.

    Written by the session's thread, read by any. Invariant: `_until_ms` never falls, except to 0 when it is dropped.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._until_ms = 0
        self._session = False

    def extend(self, sent_ms: int, session_timeout_ms: int) -> None:
        """The heartbeat that was sent at `sent_ms` has been answered, and the broker is not fenced."""
        self._until_ms = max(self._until_ms, sent_ms + session_timeout_ms)
        self._session = True

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
