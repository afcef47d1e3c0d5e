"""Followers: the production fetcher, with events for its waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.broker.fetch_session import FetcherSettings, FetchSession
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_fetcher import ReplicaFetcher
from spark_broker.errors import (
    InvariantError,
    NetworkError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.protocol.messages import ReplicaFetchResponse, ReplicaStateRequest
from spark_broker.testing.simulation.network import Address, End
from spark_broker.testing.simulation.scheduler import Timer

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess


class SimFetcher:
    """Runs a `ReplicaFetcher`, as `broker.fetcher.ReplicaFetcherThread` does, but in events."""

    def __init__(self, process: BrokerProcess, address: Address, settings: FetcherSettings) -> None:
        self._process = process
        self._world = process.world
        self.address = address
        self._clock = process.machine.clock
        self._fetcher = ReplicaFetcher(f"{address[0]}:{address[1]}", settings, self._clock)
        self._end: End | None = None
        self._timeout = Timer(process.world.scheduler, process, "fetch timed out", self._timed_out)
        self._back_off = Timer(process.world.scheduler, process, "fetch", self._begin)

    @property
    def settings(self) -> FetcherSettings:
        return self._fetcher.settings

    def start(self) -> None:
        """`follow` comes next."""

    def follow(self, partitions: dict[PartitionKey, Partition], leader_epochs: dict[PartitionKey, int]) -> None:
        if self._fetcher.follow(partitions, leader_epochs):
            self._close()
            self._after(self._world.fetch_pause_ms(self._process), self._fetcher.session, self._begin)

    def stop(self) -> None:
        self._fetcher.stop()
        self._close()

    def _after(self, delay_ms: float, session: FetchSession | None, action: Callable[[], None]) -> None:
        """Call `action` after the delay, unless the session is over by then."""
        due = partial(self._unless_over, session, action)
        self._world.scheduler.after(delay_ms, self._process, "fetch", due)

    def _unless_over(self, session: FetchSession | None, action: Callable[[], None]) -> None:
        if session is self._fetcher.session:
            action()

    def _close(self) -> None:
        self._timeout.cancel()
        self._back_off.cancel()
        if self._end is not None:
            self._end.close()
            self._end = None

    def _begin(self) -> None:
        self._fetcher.tick()
        session = self._fetcher.session
        if session is None:
            return
        end = self._world.network.open(self._process, self.address[0], self.address, "replica")
        end.on_message = partial(self._received, session)
        end.on_break = partial(self._failed, session)
        self._end = end
        self._ask(session)

    def _ask(self, session: FetchSession) -> None:
        if self._fetcher.session is not session or self._end is None:
            return
        request = session.next_request()
        if isinstance(request, ReplicaStateRequest):
            self._call(session, request)
        else:
            self._end.send(request)
            self._timeout.set(self.settings.request_timeout_ms)

    def _call(self, session: FetchSession, request: ReplicaStateRequest) -> None:
        def answered(answer: object) -> None:
            session.state_received(answer)
            self._go_on(session)

        self._world.trace.count("replicas rebuilt")
        self._world.network.call(
            self._process,
            self.address[0],
            self.address,
            request,
            timeout_ms=self.settings.request_timeout_ms,
            on_answer=answered,
            on_error=answered,
        )

    def _received(self, session: FetchSession, message: object) -> None:
        if isinstance(message, SparkBrokerError):
            self._failed(session, message)
            return
        if not isinstance(message, tuple):
            raise InvariantError(f"a {type(message).__name__} on a follower's stream")
        self._timeout.cancel()
        response: ReplicaFetchResponse = message[0]
        diverging = any(answer.diverging_end_offset >= 0 for answer in response.partitions)
        late_ms = self._world.late_ms(overtaken=diverging)
        if late_ms:
            # A thread that has received an answer applies it, even if it was stopped meanwhile.
            late = partial(self._apply, session, *message)
            self._world.scheduler.after(late_ms, self._process, "late answer", late)
            if diverging:
                # This answer does the most harm when late: another fetcher truncates the log meanwhile, and fills it.
                self._failed(session, NetworkError("the fetcher was replaced"))
        else:
            self._apply(session, *message)

    def _apply(self, session: FetchSession, response: ReplicaFetchResponse, payload: bytes) -> None:
        session.received(response, memoryview(payload))
        self._go_on(session)

    def _go_on(self, session: FetchSession) -> None:
        """Send the next request, after the pause of a slow follower."""
        pause_ms = self._world.fetch_pause_ms(self._process)
        if pause_ms:
            self._after(pause_ms, session, partial(self._ask, session))
        else:
            self._ask(session)

    def _failed(self, session: FetchSession, error: SparkBrokerError) -> None:
        self._fetcher.failed(session, error)
        deadline_ms = self._fetcher.deadline_ms
        if self._fetcher.session is None and deadline_ms is not None:
            self._close()
            self._back_off.set(deadline_ms - self._clock.boottime_ms())

    def _timed_out(self) -> None:
        session = self._fetcher.session
        if session is not None:
            self._failed(session, RequestTimedOutError("the leader did not answer a fetch in time"))
