"""Followers' streams: the production fetch session and replica session, with events for their waits."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.broker.fetch_session import RETRY_MS, FetcherSettings, FetchSession, ToRestart
from spark_broker.broker.notifier import Notifier
from spark_broker.broker.partition import Partition, PartitionKey
from spark_broker.broker.replica_session import ReplicaSession
from spark_broker.errors import NetworkError, RequestTimedOutError, SparkBrokerError
from spark_broker.protocol.messages import ReplicaFetchRequest, ReplicaFetchResponse
from spark_broker.testing.simulation.network import Address, End
from spark_broker.testing.simulation.scheduler import Timer

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess


class SimFetcher:
    """`broker.fetcher.ReplicaFetcher` without its thread: pulls from one leader."""

    def __init__(self, process: BrokerProcess, address: Address, settings: FetcherSettings) -> None:
        self._process = process
        self._address = address
        self._settings = settings
        self._partitions: dict[PartitionKey, Partition] = {}
        self._leader_epochs: dict[PartitionKey, int] = {}
        self._generation = 0
        self._end: End | None = None
        self._timer = Timer(process.world.scheduler, process, "fetch timed out", self._timed_out)

    @property
    def address(self) -> Address:
        return self._address

    @property
    def settings(self) -> FetcherSettings:
        return self._settings

    def start(self) -> None:
        """`follow` comes next."""

    def follow(self, partitions: dict[PartitionKey, Partition], leader_epochs: dict[PartitionKey, int]) -> None:
        if partitions == self._partitions and leader_epochs == self._leader_epochs:
            return
        self._partitions, self._leader_epochs = dict(partitions), dict(leader_epochs)
        self._interrupt()
        self._open_after(self._process.world.fetch_pause_ms(self._process))

    def stop(self) -> None:
        self._partitions = {}
        self._interrupt()

    def _interrupt(self) -> None:
        self._generation += 1
        self._timer.cancel()
        if self._end is not None:
            self._end.close()
            self._end = None

    def _open_after(self, delay_ms: float) -> None:
        generation = self._generation
        self._process.world.scheduler.after(delay_ms, self._process, "fetch", lambda: self._open(generation))

    def _open(self, generation: int) -> None:
        if generation != self._generation or not self._partitions:
            return
        end = self._process.world.network.open(self._process, self._address[0], self._address, "replica")
        session = FetchSession(self._settings, self._partitions, self._process.machine.clock)
        end.on_message = lambda message: self._received(end, session, message)
        end.on_break = lambda error: self._broke(generation, error)
        self._end = end
        self._ask(end, session)

    def _ask(self, end: End, session: FetchSession) -> None:
        if self._end is end and not end.closed:
            end.send(session.request())
            self._timer.set(self._settings.request_timeout_ms)

    def _received(self, end: End, session: FetchSession, message: object) -> None:
        if isinstance(message, SparkBrokerError):
            self._broke(self._generation, message)
            return
        if self._end is not end or not isinstance(message, tuple):
            return
        self._timer.cancel()
        response: ReplicaFetchResponse = message[0]
        diverging = any(answer.diverging_end_offset >= 0 for answer in response.partitions)
        late_ms = self._process.world.late_ms(overtaken=diverging)
        if late_ms:
            # A thread that has the answer in its hands carries it out, also when it was told to stop meanwhile.
            late = partial(self._apply, end, session, *message)
            self._process.world.scheduler.after(late_ms, self._process, "late answer", late)
            if diverging:
                # The worst that can be late: another fetcher cuts the log meanwhile, and fills it again.
                self._broke(self._generation, NetworkError("the fetcher was replaced"))
        else:
            self._apply(end, session, *message)

    def _apply(self, end: End, session: FetchSession, response: ReplicaFetchResponse, payload: bytes) -> None:
        restarts = session.received(response, memoryview(payload))
        if self._end is end:
            self._restart_next(end, session, restarts)

    def _restart_next(self, end: End, session: FetchSession, restarts: list[ToRestart]) -> None:
        """One call after the other, and only then the next request."""
        if not restarts:
            pause_ms = self._process.world.fetch_pause_ms(self._process)
            if pause_ms:
                self._process.world.scheduler.after(pause_ms, self._process, "fetch", lambda: self._ask(end, session))
            else:
                self._ask(end, session)
            return
        first, *others = restarts

        def answered(result: object) -> None:
            session.restart(first, lambda _: _raised(result))
            self._restart_next(end, session, others)

        self._process.world.trace.count("replicas made anew")
        self._process.world.network.call(
            self._process,
            self._address[0],
            self._address,
            first.request,
            timeout_ms=self._settings.request_timeout_ms,
            on_answer=answered,
            on_error=answered,
        )

    def _broke(self, generation: int, error: SparkBrokerError) -> None:
        del error
        if generation == self._generation:
            self._timer.cancel()
            if self._end is not None:
                self._end.close()
                self._end = None
            self._open_after(RETRY_MS)

    def _timed_out(self) -> None:
        self._broke(self._generation, RequestTimedOutError("the leader did not answer a fetch in time"))


class _Waker(Notifier):
    """Tells the simulated stream at once, where a thread would be woken."""

    def __init__(self, server: _FollowerServer) -> None:
        super().__init__()
        self._server = server

    def notify(self, key: Hashable) -> None:
        super().notify(key)
        self._server.wake()


class _FollowerServer:
    """`broker.replica_stream.ReplicaStream` without its thread."""

    def __init__(self, process: BrokerProcess, end: End) -> None:
        self._process = process
        self._end = end
        max_bytes = process.world.settings.cluster.replica_fetch_max_bytes
        lag_max_ms = process.world.settings.cluster.replica_lag_time_max_ms
        self._session = ReplicaSession(
            process.manager, max_bytes, _Waker(self), process.machine.clock, lag_max_ms=lag_max_ms
        )
        self._waiting = False
        self._waking = False
        self._timer = Timer(process.world.scheduler, process, "long poll ends", self._respond)
        end.on_message = self._received
        end.on_break = lambda _: self._closed()

    def wake(self) -> None:
        if self._waiting and not self._waking:
            self._waking = True
            self._process.world.scheduler.after(0, self._process, "news for a follower", self._poll)

    def _received(self, message: object) -> None:
        if isinstance(message, ReplicaFetchRequest):
            self._session.begin(message)
            self._waiting = True
            self._poll()
            if self._waiting:
                self._timer.set(message.max_wait_ms)

    def _poll(self) -> None:
        self._waking = False
        if self._waiting and self._session.poll():
            self._respond()

    def _respond(self) -> None:
        self._waiting = False
        self._timer.cancel()
        response, payload = self._session.finish()
        if not self._end.closed:
            self._end.send((response, b"".join(payload)))

    def _closed(self) -> None:
        self._waiting = False
        self._timer.cancel()
        self._session.close()


def serve_follower(process: BrokerProcess, end: End) -> None:
    """Serve a follower on its stream."""
    _FollowerServer(process, end)


def _raised(result: object) -> object:
    if isinstance(result, SparkBrokerError):
        raise result
    return result
