"""Which fetch session of each follower is its last one. What an earlier one reports does not hold any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from spark_broker.errors import InvalidFetchSessionEpochError
from spark_broker.protocol.messages import ReplicaFetchRequest

AHEAD_MAX = 2**42
"""How far the number of a session may be ahead of the last one. Followers count by milliseconds: that is 139 years. A
message with the largest number that there is must not keep a follower out for ever."""

AFTER_REFUSAL = AHEAD_MAX // 2
"""How far a follower whose session was refused goes ahead. It does not know the last number."""


class _Follower:
    """Invariant, under the lock: `number` only grows within a broker epoch."""

    __slots__ = ("epoch", "lock", "number")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.epoch = -1
        self.number = 0


class FollowerSessions:
    """A request of an earlier session may still be on its way, or in another thread's hands, when the next one begins.

    Meanwhile the follower may have begun its log anew: the offset that the request reports would move the high
    watermark past what the follower has. So reports of one follower are taken one after the other, and none of a
    session that is not its last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: dict[int, _Follower] = {}  # of brokers that the metadata knows

    @contextmanager
    def turn(self, request: ReplicaFetchRequest, broker_epochs: Mapping[int, int]) -> Iterator[None]:
        """Take what a follower reports. Raises InvalidFetchSessionEpochError if a later session of it has begun.

        A report of another incarnation than the registered one is refused for each partition (`core/progress.py`).
        """
        if broker_epochs.get(request.broker_id) != request.broker_epoch:
            yield
            return
        with self._lock:
            follower = self._followers.setdefault(request.broker_id, _Follower())
        with follower.lock:
            last = follower.number if follower.epoch == request.broker_epoch else 0
            if not last <= request.session <= last + AHEAD_MAX:
                raise InvalidFetchSessionEpochError(
                    f"session {request.session} of broker {request.broker_id}; the last one has number {last}"
                )
            follower.epoch, follower.number = request.broker_epoch, request.session
            yield
