"""The threads that carry out what a `ConsumerMachine` wants. `poll` never waits for a broker.

One thread asks for metadata and offsets, and one asks the group's coordinator; two send heartbeats to it. Each leader
has one that fetches (`client/fetcher.py`). The machine has one lock. `changed` is notified whenever a waiting thread
may go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from functools import partial

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.collected import end_with
from spark_broker.client.consumer_effects import (
    BreakFetch,
    CommitOffsets,
    Effect,
    FetchCommitted,
    FollowLeader,
    LeaveLeader,
    ListTopics,
    LookUpOffsets,
    ReadHistory,
    RefreshMetadata,
)
from spark_broker.client.consumer_machine import ConsumerMachine
from spark_broker.client.fetcher import LeaderFetcher
from spark_broker.client.group_offsets import GroupOffsets
from spark_broker.client.history_reader import HistoryParts
from spark_broker.client.membership import IN_FLIGHT_MAX, Membership, SendHeartbeat
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import try_lookup_offsets
from spark_broker.client.retry import Deadline
from spark_broker.client.settings import Address
from spark_broker.config import ConsumerConfig
from spark_broker.errors import ClosedError, InvariantError, NoThreadError, SparkBrokerError
from spark_broker.interrupts import Condition, interruptible, uninterrupted
from spark_broker.model import GroupMetadata
from spark_broker.threads import LONGEST_WAIT_S, Worker, begin, client_ended

_log = logging.getLogger(__name__)

LEAVE_WAIT_S = 2.0
"""How long a consumer that leaves waits for the answer. Without it, its partitions move when its session ends."""

ROUND_TIMEOUT_MS = 2000
"""A lookup gives up after this time and begins again. So one slow partition does not hold up the others."""

WAIT_MIN_S = 0.01
"""Threads that wait for a time look no more often than this."""

NO_THREAD_PAUSE_S = 1.0
"""How often an effect is tried again that got no thread."""

JOIN_TIMEOUT_S = 1.0


class ConsumerThreads:
    """Runs until `close`. Every answer and every error goes into the machine."""

    def __init__(
        self, machine: ConsumerMachine, metadata: ClusterMetadata, config: ConsumerConfig, group: GroupOffsets | None
    ) -> None:
        self.machine = machine
        # Callers take `lock`, and not `changed`: a signal handler could raise within the condition's own code.
        self.lock = threading.RLock()
        self.changed = Condition(self.lock)
        self._metadata = metadata
        self._config = config
        self._group = group
        self._fetchers: dict[int, LeaderFetcher] = {}
        self._asked: deque[Effect] = deque()  # of the leaders and of any broker; at most one at a time
        self._asked_of_group: deque[Effect] = deque()  # at most a round and a commit
        self._heartbeats: deque[Effect] = deque()  # at most as many as threads for them
        self._asked_of_history: deque[Effect] = deque()  # at most one
        self._unbegun: list[Effect] = []  # for which there was no thread: they are tried again, in order
        self._again_ms = 0.0  # when
        self._history: HistoryParts | None = None
        self._heartbeat_threads = 0  # One may wait for an answer that is held back. They begin with the membership.
        self._name = config.client_id or "consumer"
        self._threads = [self._start(f"{self._name}-work", self._asked)]
        if group is not None:
            try:
                self._threads.append(self._start(f"{self._name}-group", self._asked_of_group))
            except NoThreadError:
                self.close()  # Nobody else would end the thread that has begun.
                raise

    def now_ms(self) -> float:
        return time.monotonic() * 1000

    def advance(self, *, news: bool = True) -> None:
        """Begin what the machine wants now. The caller holds the lock. `news`: notify the threads that wait.

        What gets no thread is tried again from time to time, and `poll` raises why.
        """
        with uninterrupted():  # An effect that nobody begins never ends, and the machine waits for its end.
            effects = self.machine.step(self.now_ms())
            if self._unbegun and (effects or self.now_ms() >= self._again_ms):
                effects, self._unbegun = [*self._unbegun, *effects], []
            for effect in effects:
                try:
                    self._begin(effect)
                except NoThreadError as error:
                    self._unbegun.append(effect)
                    self._again_ms = self.now_ms() + NO_THREAD_PAUSE_S * 1000
                    if self.machine.failure is None:
                        self.machine.failed(error)
            if effects or news:
                self.changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait, under the lock, until something changes or the machine is to be looked at; False: neither came."""
        now_ms = self.now_ms()
        wake_ms = self.machine.wake_ms(now_ms)
        wake_s = max((wake_ms - now_ms) / 1000, WAIT_MIN_S) if wake_ms < float("inf") else None
        again_s = NO_THREAD_PAUSE_S if self._unbegun else LONGEST_WAIT_S
        return self.changed.wait(min(s for s in (wake_s, timeout_s, again_s) if s is not None))

    def suspect(self, address: Address) -> None:
        """A stream to this broker broke. It is the last to be asked for a while."""
        self._metadata.suspect(address)

    def close(self) -> None:
        """End all threads. Those that wait for a broker end when the metadata is closed."""
        with uninterrupted():
            with self.lock:
                fetchers = list(self._fetchers.values())
                self.machine.close()
                self.advance()
            self._metadata.close()
            with interruptible():
                for fetcher in fetchers:
                    fetcher.join(JOIN_TIMEOUT_S)
                for thread in self._threads:
                    thread.join(JOIN_TIMEOUT_S)

    def belong_to(self, consumer: object) -> None:
        """End with the consumer."""
        end_with(consumer, self._end_collected, self.died, lambda: self.machine.closed)

    def _end_collected(self) -> None:
        """Nobody has the consumer any more. Its group gets its partitions at once."""
        _log.warning("a consumer was garbage collected without close(): what it read last is not committed")
        with self.lock:
            group = self.machine.group
            if group is not None and self.machine.is_member:
                group.left(self.now_ms(), "it was garbage collected")
                self.machine.reading_changed()
                self.advance()
                limit = Deadline.after_ms(LEAVE_WAIT_S * 1000)
                while group.membership.is_leaving and not limit.expired:
                    self.wait(limit.remaining_s)
        self.close()

    def died(self, error: BaseException) -> None:
        """A thread has ended by an error of our own: from now on, poll raises it."""
        with self.lock:
            self.machine.failed(client_ended(error))
            self.changed.notify_all()

    def _start(self, name: str, asked: deque[Effect]) -> Worker:
        return begin(name, self.died, partial(self._run, asked))

    def _begin(self, effect: Effect) -> None:
        match effect:
            case FollowLeader(broker_id, address):
                timeout_ms = self._config.request_timeout_ms
                self._fetchers[broker_id] = LeaderFetcher(self, broker_id, address, timeout_ms)
            case LeaveLeader(broker_id):
                fetcher = self._fetchers.pop(broker_id, None)
                if fetcher is not None:
                    fetcher.leave()
                self._unbegun = [e for e in self._unbegun if not _follows(e, broker_id)]
            case BreakFetch(broker_id):
                self._fetchers[broker_id].interrupt()
            case FetchCommitted() | CommitOffsets():
                self._asked_of_group.append(effect)
            case SendHeartbeat():
                self._begin_heartbeat_threads()
                self._heartbeats.append(effect)
            case ReadHistory():
                if self._history is None:
                    self._threads.append(self._start("consumer-history", self._asked_of_history))
                    part_bytes = self._config.max_partition_fetch_bytes
                    wanted_of = self.machine.leaders.machine.wanted_of
                    self._history = HistoryParts(wanted_of, part_bytes, self._as_recorded)
                self._asked_of_history.append(effect)
            case _:
                self._asked.append(effect)

    def _begin_heartbeat_threads(self) -> None:
        """Raises NoThreadError if there is none. One alone sends, too, though it may wait for an answer."""
        try:
            while self._heartbeat_threads < IN_FLIGHT_MAX:
                self._threads.append(self._start(f"{self._name}-heartbeat", self._heartbeats))
                self._heartbeat_threads += 1
        except NoThreadError:
            if not self._heartbeat_threads:
                raise

    @property
    def _membership(self) -> Membership:
        if self.machine.group is None:
            raise InvariantError("a heartbeat of a consumer without a group")
        return self.machine.group.membership

    def _member(self) -> GroupMetadata:
        """Who asks the coordinator. Raises UnknownMemberIdError where what was read is lost."""
        with self.lock:
            return self.machine.identity()

    def _as_recorded(self, topic: TopicView) -> TopicView:
        return self._metadata.as_recorded(topic, Deadline.after_ms(self._config.request_timeout_ms))

    def _run(self, asked: deque[Effect]) -> None:
        while True:
            with self.lock:
                while not asked and not self.machine.closed:
                    self.wait()
                    self.advance(news=False)
                if self.machine.closed:
                    return
                effect = asked.popleft()
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        try:
            self._ask(effect)
        except ClosedError as error:
            self._failed(effect, error)
        except SparkBrokerError as error:
            if isinstance(effect, CommitOffsets) and effect.background:
                _log.warning("a commit failed; the next commit stores its offsets or later ones: %s", error)
            if isinstance(effect, ReadHistory) and error.retriable:
                _log.warning("%s: the topic's table is read later, from offset %d: %s", effect.tp, effect.start, error)
            self._failed(effect, error)

    def _failed(self, effect: Effect, error: SparkBrokerError) -> None:
        with self.lock:
            if isinstance(effect, CommitOffsets):
                self.machine.commit_ended(effect, error)
            elif isinstance(effect, SendHeartbeat):
                self._membership.failed(effect, error, self.now_ms())
            elif isinstance(effect, ReadHistory):
                self.machine.learned(self._metadata.view)
                self.machine.history_failed(effect, error, self.now_ms())
            else:
                self.machine.round_failed(error, self.now_ms())
            self.advance()

    def _ask(self, effect: Effect) -> None:
        """One request and its retries. Raises what it ends with."""
        machine = self.machine
        match effect:
            case ListTopics():
                there = self._metadata.every_topic(Deadline.after_ms(self._config.request_timeout_ms))
                with self.lock:
                    machine.topics_listed(there.topics, self.now_ms())
                    self.advance()
            case RefreshMetadata(topics):
                self._metadata.use(topics)
                view = self._metadata.refresh(Deadline.after_ms(self._config.request_timeout_ms))
                with self.lock:
                    machine.metadata_came(view, self.now_ms())
                    self.advance()
            case LookUpOffsets(moments):
                infos, failures = try_lookup_offsets(
                    self._metadata,
                    moments,
                    Deadline.after_ms(ROUND_TIMEOUT_MS),
                    read_committed=self._config.read_committed,
                )
                with self.lock:
                    machine.learned(self._metadata.view)
                    machine.offsets_came(effect, infos, failures, self.now_ms())
                    self.advance()
            case FetchCommitted(generations) if self._group is not None:
                deadline, stable = Deadline.after_ms(ROUND_TIMEOUT_MS), self._config.read_committed
                member = self._member()
                committed = self._group.fetch(generations, deadline, require_stable=stable, member=member)
                with self.lock:
                    machine.learned(self._metadata.view)
                    machine.committed_came(effect, committed, self.now_ms())
                    self.advance()
            case CommitOffsets(offsets, deadline_ms) if self._group is not None:
                with self.lock:
                    member = machine.committer(effect)
                self._group.commit(offsets, Deadline(deadline_ms / 1000), effect.topic_ids, member)
                with self.lock:
                    machine.commit_ended(effect)
                    self.advance()
            case SendHeartbeat(request, timeout_ms) if self._group is not None:
                answer = self._group.heartbeat(request, Deadline.after_ms(timeout_ms))
                with self.lock:
                    self._membership.answered(effect, answer, self.now_ms())
                    self.advance()
            case ReadHistory() if self._history is not None:
                fetched = self._history.next(effect)
                with self.lock:
                    machine.history_came(effect, fetched)
                    self.advance()
            case _:
                raise InvariantError(f"no thread is there for {effect}")


def _follows(effect: Effect, broker_id: int) -> bool:
    return isinstance(effect, FollowLeader) and effect.broker_id == broker_id
