"""How a follower pulls from one leader broker: which partitions, when, and when it begins a new session.

It knows no thread and no socket. `broker.fetcher` runs it in a thread, the simulator in events.

    state        event            -> state         what the shell does
    --------------------------------------------------------------------------------------------------------------
    IDLE         FOLLOWS          -> FETCHING      opens a stream for the new session
    FETCHING     FOLLOWS          -> FETCHING      closes the stream, opens one for the new session
    FETCHING     FOLLOWS_NOTHING  -> IDLE          closes the stream
    FETCHING     SESSION_FAILED   -> BACKING_OFF   closes the stream
    BACKING_OFF  BACK_OFF_ENDED   -> FETCHING      opens a stream for the new session
    BACKING_OFF  FOLLOWS          -> FETCHING      as above: a change does not wait for the back-off
    any          STOP             -> STOPPED       closes the stream; nothing follows
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.fetch_session import FetcherSettings, FetchSession
from spark_broker.broker.follower_sessions import AFTER_REFUSAL
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_lines import ConnectionLines
from spark_broker.errors import InvalidFetchSessionEpochError, NetworkError, SparkBrokerError, invariant

BACK_OFF_MS = 50
"""Wait before the next session after one that failed."""


class FetcherState(Enum):
    IDLE = auto()  # this broker follows no partition of the leader
    FETCHING = auto()  # `session` says what to ask
    BACKING_OFF = auto()  # the last session failed
    STOPPED = auto()  # for good


class FetcherEvent(Enum):
    FOLLOWS = auto()
    FOLLOWS_NOTHING = auto()
    SESSION_FAILED = auto()
    BACK_OFF_ENDED = auto()
    STOP = auto()


TRANSITIONS: dict[tuple[FetcherState, FetcherEvent], FetcherState] = {
    (FetcherState.IDLE, FetcherEvent.FOLLOWS): FetcherState.FETCHING,
    (FetcherState.IDLE, FetcherEvent.STOP): FetcherState.STOPPED,
    (FetcherState.FETCHING, FetcherEvent.FOLLOWS): FetcherState.FETCHING,
    (FetcherState.FETCHING, FetcherEvent.FOLLOWS_NOTHING): FetcherState.IDLE,
    (FetcherState.FETCHING, FetcherEvent.SESSION_FAILED): FetcherState.BACKING_OFF,
    (FetcherState.FETCHING, FetcherEvent.STOP): FetcherState.STOPPED,
    (FetcherState.BACKING_OFF, FetcherEvent.FOLLOWS): FetcherState.FETCHING,
    (FetcherState.BACKING_OFF, FetcherEvent.FOLLOWS_NOTHING): FetcherState.IDLE,
    (FetcherState.BACKING_OFF, FetcherEvent.BACK_OFF_ENDED): FetcherState.FETCHING,
    (FetcherState.BACKING_OFF, FetcherEvent.STOP): FetcherState.STOPPED,
    # A broker that stops may still receive metadata.
    (FetcherState.STOPPED, FetcherEvent.FOLLOWS): FetcherState.STOPPED,
    (FetcherState.STOPPED, FetcherEvent.FOLLOWS_NOTHING): FetcherState.STOPPED,
    (FetcherState.STOPPED, FetcherEvent.STOP): FetcherState.STOPPED,
}


class Fetcher(Protocol):
    """A shell around `ReplicaFetcher`, as the replica manager uses it."""

    @property
    def address(self) -> tuple[str, int]: ...

    @property
    def settings(self) -> FetcherSettings: ...

    def start(self) -> None: ...

    def follow(self, partitions: dict[PartitionKey, Partition], leader_epochs: dict[PartitionKey, int]) -> None: ...

    def stop(self) -> None: ...


class ReplicaFetcher:
    """Not thread-safe. Nothing here waits or takes another lock, so a shell may guard it with any.

    Invariants: `session` is there exactly while FETCHING, `deadline_ms` (boot-time clock) exactly while BACKING_OFF.
    A stream belongs to one session: the shell closes a stream that belongs to another one.
    """

    def __init__(self, leader: str, settings: FetcherSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self.state = FetcherState.IDLE
        self.session: FetchSession | None = None
        self.deadline_ms: int | None = None
        self.settings = settings
        self._leader = leader
        self._lines = ConnectionLines(leader)
        self._clock = clock
        self._partitions: dict[PartitionKey, Partition] = {}
        self._leader_epochs: dict[PartitionKey, int] = {}
        self._number = 0  # of the last session

    def follow(self, partitions: dict[PartitionKey, Partition], leader_epochs: dict[PartitionKey, int]) -> bool:
        """Pull exactly these from now on, at these leader epochs. False: nothing is new, and the session goes on.

        A change ends the session, so that a new partition does not wait for a long poll to end.
        """
        if partitions == self._partitions and leader_epochs == self._leader_epochs:
            return False
        self._partitions, self._leader_epochs = dict(partitions), dict(leader_epochs)
        self._move(FetcherEvent.FOLLOWS if partitions else FetcherEvent.FOLLOWS_NOTHING)
        return True

    def stop(self) -> None:
        """Pull nothing any more."""
        self._partitions, self._leader_epochs = {}, {}
        self._move(FetcherEvent.STOP)

    def failed(self, session: FetchSession, error: SparkBrokerError) -> None:
        """The session's stream broke, or the leader refused it. Ignored when the session is an earlier one."""
        if session is not self.session:
            return
        now_ms = self._clock.boottime_ms()
        if isinstance(error, InvalidFetchSessionEpochError):
            self._number += AFTER_REFUSAL
        self._lines.failed(now_ms, error.message if isinstance(error, NetworkError) else error)
        self._move(FetcherEvent.SESSION_FAILED)
        self.deadline_ms = now_ms + BACK_OFF_MS

    def answered(self) -> None:
        """The leader has answered a fetch."""
        self._lines.worked(self._clock.boottime_ms())

    def tick(self) -> None:
        """Time passed."""
        if self.deadline_ms is not None and self._clock.boottime_ms() >= self.deadline_ms:
            self._move(FetcherEvent.BACK_OFF_ENDED)

    def _move(self, event: FetcherEvent) -> None:
        invariant((self.state, event) in TRANSITIONS, f"{self._leader}: {event.name} in {self.state.name}")
        self.state = TRANSITIONS[self.state, event]
        fetching = self.state is FetcherState.FETCHING
        self.session = self._new_session() if fetching else None
        self.deadline_ms = None

    def _new_session(self) -> FetchSession:
        # By the time, so that it is larger than the numbers of a fetcher that pulled from this leader before.
        self._number = max(self._number + 1, self._clock.boottime_ms())
        return FetchSession(self.settings, self._partitions, self._clock, self._number)
