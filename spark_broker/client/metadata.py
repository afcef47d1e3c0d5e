"""The client's cache of cluster metadata. Any broker answers; the client asks every broker that it has learned of."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from spark_broker.client import given
from spark_broker.client.cluster_view import ClusterView, TopicView, address_of, merge
from spark_broker.client.connections import ConnectionPool
from spark_broker.client.reachability import Unanswered, explained, no_broker_answered
from spark_broker.client.retry import Backoff, Deadline, Rounds, TopicGrace, call_with_retries
from spark_broker.client.settings import Address, parse_addresses
from spark_broker.errors import (
    BootstrapUnreachableError,
    ClosedError,
    InconsistentClusterIdError,
    LeaderNotAvailableError,
    NetworkError,
    RequestTimedOutError,
    SparkBrokerError,
    ThrottlingQuotaExceededError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    again,
)
from spark_broker.interrupts import Condition, Event, uninterrupted
from spark_broker.protocol.messages import (
    CallResponse,
    InitProducerIdRequest,
    Message,
    MetadataRequest,
    MetadataResponse,
)
from spark_broker.transport.origin import Origin

ATTEMPT_TIMEOUT_MS = 1000
"""A frozen broker accepts calls and never answers. After this time the client asks the next broker. A slow broker is
asked again, with twice the time each time.
"""

BOOTSTRAP_GRACE_MS = 3000
"""If no broker has ever answered, addresses without a listener are reported after this time."""

TOPICS_AT_ONCE = 10_000
"""So many topics fit into one request."""

IDLE_S = 300.0
"""How long after its last use the name of a topic that does not exist is asked for (Kafka: metadata.max.idle.ms)."""

_UNANSWERED = (NetworkError, RequestTimedOutError)

_FAILS_ALL = (BootstrapUnreachableError, InconsistentClusterIdError, ClosedError)
"""What one thread's question has met, another one's would meet. A question that timed out says nothing of the next."""


class ConnectionConfig(Protocol):
    """The settings that all clients have."""

    @property
    def bootstrap_servers(self) -> tuple[str, ...]: ...
    @property
    def request_timeout_ms(self) -> int: ...
    @property
    def retry_backoff_ms(self) -> int: ...
    @property
    def retry_backoff_max_ms(self) -> int: ...

    @property
    def metadata_max_age_ms(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Flight:
    """A question about these topics, of one thread. Others that want no other topics wait for its answer."""

    topics: frozenset[str]
    landed: bool = False
    answered: bool = False
    error: SparkBrokerError | None = None


class ClusterMetadata:
    """Metadata of the topics in use, and calls to any broker. Safe for use by many threads."""

    def __init__(
        self,
        bootstrap: tuple[Address, ...],
        pool: ConnectionPool,
        backoff: Backoff,
        *,
        request_timeout_ms: int,
        max_age_ms: int,
    ) -> None:
        self.pool = pool
        self.backoff = backoff
        self.closing = Event()
        self._origin = Origin()
        self._bootstrap = bootstrap
        self._request_timeout_ms = request_timeout_ms
        self._max_age_ms = max_age_ms
        self._rng = random.Random()
        self._lock = threading.Lock()
        self._landed = Condition(self._lock)
        self._view = ClusterView()
        self._lagging = False  # the last answer was older than the view
        self._topics: dict[str, float] = {}  # that are in use, and when they were used last
        self._flight: _Flight | None = None
        self._last_refresh_s = float("-inf")
        self._suspects: dict[Address, float] = {}

    @classmethod
    def connect(cls, config: ConnectionConfig) -> ClusterMetadata:
        """The parts that every client of a cluster has: metadata, connections, back-off. Raises InvalidConfigError."""
        return cls(
            parse_addresses(config.bootstrap_servers),
            ConnectionPool(),
            Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms),
            request_timeout_ms=config.request_timeout_ms,
            max_age_ms=config.metadata_max_age_ms,
        )

    @property
    def view(self) -> ClusterView:
        return self._view

    @property
    def age_s(self) -> float:
        """Seconds since the last answer; infinite before the first."""
        return time.monotonic() - self._last_refresh_s

    @property
    def stale(self) -> bool:
        """Whether the last answer is older than metadata.max.age.ms."""
        return self.fresh_s < 0

    @property
    def fresh_s(self) -> float:
        """Seconds until the last answer is older than metadata.max.age.ms; negative: it is."""
        return self._max_age_ms / 1000 - self.age_s

    def use(self, topics: Iterable[str]) -> None:
        """Also refresh these topics from now on. Who waits for one that does not exist says so each time.

        Raises InvalidTopicError for a name that no topic can have: no broker takes a request with it.
        """
        self._origin.check()
        names = [given.topic_name(topic) for topic in topics]
        with self._lock:
            self._topics.update(dict.fromkeys(names, time.monotonic()))

    def refresh(self, deadline: Deadline) -> ClusterView:
        """Ask a broker about the topics in use. Threads that ask meanwhile for no other topics wait for the same answer
        (single flight).

        Raises BootstrapUnreachableError, InconsistentClusterIdError, RequestTimedOutError or ClosedError.
        """
        self._origin.check()
        with uninterrupted():
            with self._lock:
                wanted = frozenset(self._topics)
            while True:
                with self._lock:
                    flight = self._flight
                    if flight is None:
                        flight = self._flight = _Flight(frozenset(self._topics))
                        break
                    if not self._landed.wait_for(lambda flight=flight: flight.landed, deadline.remaining_s):  # type: ignore[misc]
                        raise RequestTimedOutError("no broker answered a metadata request in time")
                if isinstance(flight.error, _FAILS_ALL):
                    raise again(flight.error)
                if flight.answered and flight.topics >= wanted:
                    return self._view
            try:
                self._fly(flight, deadline)
                return self._view
            except SparkBrokerError as error:
                flight.error = again(error)
                raise
            finally:
                with self._lock:
                    self._flight, flight.landed = None, True
                    self._landed.notify_all()

    def _fly(self, flight: _Flight, deadline: Deadline) -> None:
        topics = sorted(flight.topics)
        for first in range(0, len(topics) or 1, TOPICS_AT_ONCE):
            self.fetch(topics[first : first + TOPICS_AT_ONCE], deadline)
        self._last_refresh_s = time.monotonic()
        self._forget_absent()
        flight.answered = True

    def _forget_absent(self) -> None:
        """Forget names that no topic has any more, and that nobody has used for long. Otherwise a client that lives
        beside topics that come and go would ask for more names each time.
        """
        with self._lock:
            if not self._lagging:
                used_since_s = time.monotonic() - IDLE_S
                there = self._view.topics
                self._topics = {name: s for name, s in self._topics.items() if name in there or s >= used_since_s}

    def fetch(self, topics: list[str] | None, deadline: Deadline) -> ClusterView:
        """What a broker says now about these topics (None: all), and nothing else. The cache takes it, too.

        If the broker lags behind the cache, this is what the cache has.
        """
        answer = _metadata_of(self.call_any(MetadataRequest(topics), deadline))
        with self._lock:
            self._check_cluster(answer)
            lagging = self._lagging = self._view.is_newer_than(answer)
            view = self._view = merge(self._view, answer, topics)
        return view.only(topics) if lagging else merge(ClusterView(), answer, topics)

    def every_topic(self, deadline: Deadline) -> ClusterView:
        """What a broker says now about all topics. The cache does not take it: nobody refreshes topics that are not in
        use, and what it had of them would be out of date.
        """
        return merge(ClusterView(), _metadata_of(self.call_any(MetadataRequest(None), deadline)), None)

    def as_recorded(self, topic: TopicView, deadline: Deadline) -> TopicView:
        """`recorded`; the topic as it is, if it does not exist any more."""
        return topic.or_as(self.recorded(topic.name, deadline))

    def recorded(self, name: str, deadline: Deadline) -> TopicView | None:
        """The topic as the controller has it now, even if brokers lag behind; None: it does not exist.

        Raises the last retriable error at the deadline.
        """
        return self.all_recorded([name], deadline).get(name)

    def all_recorded(self, names: Iterable[str], deadline: Deadline) -> dict[str, TopicView]:
        """`recorded` of many topics: those that exist."""
        found: dict[str, TopicView] = {}
        asked = list(names)
        for first in range(0, len(asked), TOPICS_AT_ONCE):
            some = asked[first : first + TOPICS_AT_ONCE]
            request = MetadataRequest(some, certain=True)
            answer = call_with_retries(
                lambda request=request: self.call_any(request, deadline),  # type: ignore[misc]
                deadline=deadline,
                backoff=self.backoff,
                closing=self.closing,
            )
            found.update(merge(ClusterView(), _metadata_of(answer), some).topics)
        return found

    def topic(self, name: str, deadline: Deadline, *, partition: int = 0) -> TopicView:
        """The topic, with at least this partition, from the cache or a broker. A broker may not know it yet, so it is
        asked again.

        Raises UnknownTopicOrPartitionError once its absence is certain, and RequestTimedOutError when only brokers that
        lag behind have answered by the deadline.
        """
        view = self._view.topic(name)
        if view is not None and partition < len(view.partitions) and not self.stale:
            return view
        grace, rounds = TopicGrace(), Rounds(deadline, self.backoff, self.closing)
        failure: SparkBrokerError | None = None
        while True:
            self.use([name])
            try:
                view = self.refresh(deadline).topic(name)
            except RequestTimedOutError as error:
                raise rounds.reason(error, failure) from None
            if view is not None and partition < len(view.partitions):
                return view
            failure = _unknown(name, view, lagging=self._lagging)
            if not grace.retries(failure) or not rounds.next():
                raise failure

    def call_any(self, request: Message, deadline: Deadline) -> CallResponse:
        """A call that any broker answers. If one cannot be reached, or has too much to do, the next one is asked.

        Raises the broker's typed error. Raises RequestTimedOutError, with every address and its reason, when none
        answered by the deadline; ThrottlingQuotaExceededError when each said that it is overloaded;
        InconsistentClusterIdError when those that answer belong to another cluster;
        BootstrapUnreachableError, soon, when no broker was ever reached and no address has a listener.
        """
        grace = Deadline.after_ms(BOOTSTRAP_GRACE_MS)
        rounds = itertools.count()
        latest: dict[Address, Unanswered] = {}  # of each address, from all rounds

        def may_answer(error: SparkBrokerError) -> bool:
            if isinstance(error, BootstrapUnreachableError):
                return bool(self._view.brokers) or not grace.expired
            return isinstance(error, RequestTimedOutError | ThrottlingQuotaExceededError)

        try:
            return call_with_retries(
                lambda: self._ask_each(request, deadline, next(rounds), latest),
                deadline=deadline,
                backoff=self.backoff,
                closing=self.closing,
                retry=may_answer,
            )
        except (BootstrapUnreachableError, RequestTimedOutError) as error:
            raise explained(error, list(latest.values())) from None

    def call(self, address: Address, request: Message, deadline: Deadline) -> CallResponse:
        """One call to one broker, without retries. Raises NetworkError once the controller takes it for dead."""
        timeout_ms = min(self._request_timeout_ms, deadline.remaining_ms)
        try:
            return self._call(address, request, timeout_ms=max(1, timeout_ms))
        except _UNANSWERED:
            self._suspects[address] = time.monotonic()
            raise

    def _call(self, address: Address, request: Message, *, timeout_ms: int) -> CallResponse:
        """Wait for the answer of a broker as long as it is live: nobody else sees that a frozen one will not answer."""
        if not self._is_live(address):  # a bootstrap address may be another than the one that its broker has registered
            return self.pool.call(address, request, timeout_ms=timeout_ms)

        def meanwhile(remaining_s: float) -> None:
            self._suspects[address] = time.monotonic()
            with suppress(*_UNANSWERED, BootstrapUnreachableError, ThrottlingQuotaExceededError):
                self.fetch([], Deadline.after_ms(min(ATTEMPT_TIMEOUT_MS, remaining_s * 1000)))
            if not self._is_live(address):
                raise NetworkError(f"{address} has not answered, and the controller takes its broker for dead")

        return self.pool.call(address, request, timeout_ms=timeout_ms, meanwhile=meanwhile)

    def _is_live(self, address: Address) -> bool:
        return any(address_of(broker) == address and not broker.fenced for broker in self._view.brokers.values())

    def suspects_last(self, addresses: Iterable[Address]) -> list[Address]:
        """Those that have not answered lately come last, the one that has failed last at the end."""
        return sorted(addresses, key=lambda address: self._suspects.get(address, 0.0))

    def suspect(self, address: Address) -> None:
        """Ask this broker last for a while, because a stream to it broke."""
        self._suspects[address] = time.monotonic()

    def close(self) -> None:
        """Interrupt every wait, and close the connections."""
        if self._origin.is_elsewhere:
            return  # the parent's, whose threads hold its locks
        self.closing.set()
        with self._lock:
            self._landed.notify_all()
        self.pool.close()

    def _ask_each(
        self, request: Message, deadline: Deadline, round_: int, latest: dict[Address, Unanswered]
    ) -> CallResponse:
        """One round over the addresses. Afterwards `latest` has the addresses that did not answer, and why."""
        self._origin.check()
        candidates = self._candidates()
        for number, address in enumerate(candidates):
            if number and deadline.expired:
                break
            attempt_ms = self._attempt_timeout_ms(request, round_)
            timeout_ms = min(attempt_ms, max(1, deadline.remaining_ms))
            try:
                call = self.pool.call if isinstance(request, MetadataRequest) else self._call
                answer = call(address, request, timeout_ms=timeout_ms)
                self._check_cluster(answer)
            except (*_UNANSWERED, ThrottlingQuotaExceededError, InconsistentClusterIdError) as error:
                self._suspects[address] = time.monotonic()  # the others may have less to do
                if isinstance(error, RequestTimedOutError) and timeout_ms < attempt_ms:
                    # The caller's deadline cut this attempt short, so it says nothing of the broker. Keep its earlier
                    # reason.
                    latest.setdefault(address, Unanswered(address, error))
                else:
                    latest[address] = Unanswered(address, error)
            except LeaderNotAvailableError as error:
                # A broker that has just started knows nothing of the cluster yet. The others do.
                if not isinstance(request, MetadataRequest):
                    raise
                latest[address] = Unanswered(address, error)
            else:
                self._suspects.pop(address, None)
                return answer
        asked = [latest[address] for address in candidates if address in latest]
        raise no_broker_answered(asked, all_asked=len(asked) == len(candidates))

    def _check_cluster(self, answer: Message) -> None:
        """Raises InconsistentClusterIdError where another cluster answers than the first time: it knows neither the
        producer ids nor the offsets of this client.
        """
        known = self._view.cluster_id
        if isinstance(answer, MetadataResponse) and known and answer.cluster_id != known:
            raise InconsistentClusterIdError(f"cluster {answer.cluster_id} answers, and this client is of {known}")

    def _attempt_timeout_ms(self, request: Message, round_: int) -> int:
        """Only a read may be given up early. A change that was sent twice would fail the second time."""
        if not isinstance(request, MetadataRequest | InitProducerIdRequest):
            return self._request_timeout_ms
        return min(ATTEMPT_TIMEOUT_MS << min(round_, 10), self._request_timeout_ms)

    def _candidates(self) -> list[Address]:
        """Live brokers in any order, then the bootstrap addresses. Addresses that failed lately come last."""
        live = [address_of(broker) for broker in self._view.brokers.values() if not broker.fenced]
        fallback = [address for address in self._bootstrap if address not in live]
        self._rng.shuffle(live)
        self._rng.shuffle(fallback)
        return self.suspects_last([*live, *fallback])


def _metadata_of(answer: Message) -> MetadataResponse:
    if not isinstance(answer, MetadataResponse):
        raise UnknownServerError(f"metadata was answered with {type(answer).__name__}")
    return answer


def _unknown(name: str, view: TopicView | None, *, lagging: bool) -> SparkBrokerError:
    if lagging:
        return RequestTimedOutError(f"topic {name!r}: only brokers that lag behind the metadata log answer")
    if view is None:
        return UnknownTopicOrPartitionError(f"topic {name!r} does not exist")
    return UnknownTopicOrPartitionError(f"topic {name!r} has partitions 0 to {len(view.partitions) - 1}")
