"""Which fetch session of each follower is its last one. What an earlier one reports does not hold any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from spark_broker.errors import InvalidRequestError
from spark_broker.protocol.messages import ReplicaFetchRequest


class _Follower:
    """Invariant, under the lock: `last` only grows."""

    __slots__ = ("last", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last = (-1, -1)  # broker epoch, number of the session


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
        """Take what a follower reports. Raises InvalidRequestError if a later session of it has begun.

        A report of another incarnation than the registered one is refused for each partition (`core/progress.py`).
        """
        if broker_epochs.get(request.broker_id) != request.broker_epoch:
            yield
            return
        with self._lock:
            follower = self._followers.setdefault(request.broker_id, _Follower())
        with follower.lock:
            session = (request.broker_epoch, request.session)
            if session < follower.last:
                raise InvalidRequestError(f"a later fetch session of broker {request.broker_id} has begun")
            follower.last = session
            yield
