"""The consumer's background thread: metadata, first positions, automatic commits. Poll never waits for a broker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from spark_broker.client.assignment import Assignment, PartitionState, Start
from spark_broker.client.cluster_view import ClusterView, TopicView, address_of
from spark_broker.client.fetcher import LeaderFetcher
from spark_broker.client.group_offsets import GroupOffsets
from spark_broker.client.metadata import UNKNOWN_TOPIC_GRACE_MS, ClusterMetadata
from spark_broker.client.offset_lookup import try_lookup_offsets
from spark_broker.client.retry import Deadline, RecoveryPace
from spark_broker.config import ConsumerConfig
from spark_broker.errors import (
    BootstrapUnreachableError,
    ClosedError,
    CoordinatorNotAvailableError,
    InconsistentTopicIdError,
    InvariantError,
    NetworkError,
    OffsetOutOfRangeError,
    RequestTimedOutError,
    SparkBrokerError,
    ThrottlingQuotaExceededError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import OffsetAndMetadata, TopicPartition
from spark_broker.protocol.messages import EARLIEST_TIMESTAMP_MS, LATEST_TIMESTAMP_MS

logger = logging.getLogger(__name__)

ROUND_TIMEOUT_MS = 2000
"""A round of lookups gives up after this long and begins anew, so that one slow partition does not hold up others."""

STALLED_S = 0.5
"""A long poll that is overdue by this much makes the consumer look whether the leader still leads."""

_NOBODY_TO_COMMIT_TO = (
    BootstrapUnreachableError,
    CoordinatorNotAvailableError,
    NetworkError,
    RequestTimedOutError,
    ThrottlingQuotaExceededError,
)

TICK_S = 0.1


class ConsumerWork:
    """Runs until `close`. Everything that it finds goes into the assignment."""

    def __init__(
        self,
        assignment: Assignment,
        metadata: ClusterMetadata,
        config: ConsumerConfig,
        group: GroupOffsets | None,
        columns: Sequence[str] | None,
    ) -> None:
        self._assignment = assignment
        self._metadata = metadata
        self._config = config
        self._group = group
        self._columns = columns
        self._fetchers: dict[int, LeaderFetcher] = {}
        self._applied = metadata.view  # whose leaders have fetchers
        self._missing_since: dict[str, float] = {}
        self._commit_lock = threading.Lock()
        self._pending_commit: dict[TopicPartition, OffsetAndMetadata] = {}
        self._committed: dict[TopicPartition, OffsetAndMetadata] = {}  # as far as it is known: none while one is sent
        self._thread = threading.Thread(target=self._run, name=f"{config.client_id or 'consumer'}-work", daemon=True)
        self._thread.start()

    @property
    def first_start(self) -> Start:
        """Where a partition begins that has just been assigned."""
        return Start.COMMITTED if self._group is not None else self.reset

    @property
    def reset(self) -> Start:
        return Start(self._config.auto_offset_reset)

    # ---- commits ----------------------------------------------------------------------------------------------------

    def commit_later(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit from the background thread. A later commit of the same partition takes its place."""
        with self._assignment.changed:
            changed = {tp: one for tp, one in offsets.items() if self._committed.get(tp) != one}
            self._pending_commit.update(changed)
            if changed:
                self._assignment.changed.notify_all()

    def commit_now(
        self, group: GroupOffsets, offsets: dict[TopicPartition, OffsetAndMetadata], deadline: Deadline
    ) -> None:
        """Commit and wait. Commits are one after the other: an older one never overwrites a newer one."""
        with self._commit_lock:
            with self._assignment.lock:
                for tp in offsets:
                    self._pending_commit.pop(tp, None)
                    self._committed.pop(tp, None)
            group.commit(offsets, deadline)
            with self._assignment.lock:
                self._committed.update(offsets)

    def commit_last(
        self, group: GroupOffsets, offsets: dict[TopicPartition, OffsetAndMetadata], deadline: Deadline
    ) -> None:
        """Commit what has changed, at close. A cluster that is gone already must not keep the caller from closing."""
        changed = {tp: one for tp, one in offsets.items() if self._committed.get(tp) != one}
        if not changed:
            return
        try:
            self.commit_now(group, changed, deadline)
        except _NOBODY_TO_COMMIT_TO as error:
            logger.warning("the last positions could not be committed: %s", error)

    def _commit_pending(self) -> None:
        if self._group is None or not self._pending_commit:
            return
        with self._commit_lock:
            with self._assignment.lock:
                offsets, self._pending_commit = self._pending_commit, {}
                for tp in offsets:
                    self._committed.pop(tp, None)
            if not offsets:
                return
            try:
                self._group.commit(offsets, Deadline.after_ms(ROUND_TIMEOUT_MS))
            except ClosedError:
                return
            except SparkBrokerError as error:
                with self._assignment.changed:
                    if error.retriable:
                        # The next interval commits these positions or later ones.
                        logger.warning("an automatic commit failed and is tried again: %s", error)
                    else:
                        self._assignment.failure = error
                        self._assignment.changed.notify_all()
                return
            with self._assignment.lock:
                self._committed.update(offsets)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the fetchers; the thread ends with the metadata's `close`."""
        with self._assignment.changed:
            self._assignment.closed = True
            fetchers = list(self._fetchers.values())
            for fetcher in fetchers:
                fetcher.close()
            self._assignment.changed.notify_all()
        self._metadata.close()
        for one in fetchers:
            one.join(1.0)
        self._thread.join(1.0)

    def interrupt_fetchers(self, partitions: Sequence[TopicPartition] = ()) -> None:
        """Positions have changed: long polls that are under way ask for the wrong thing. Under the lock."""
        view = self._metadata.view
        for tp in partitions or self._assignment.partitions:
            leader = view.leader(tp.topic, tp.partition)
            if leader is not None and leader[0].id in self._fetchers:
                self._fetchers[leader[0].id].interrupt()
        self._assignment.changed.notify_all()

    def _run(self) -> None:
        pace = RecoveryPace()
        try:
            while self._wait_for_work():
                recovered = self._round()
                attempt = pace.after_round(recovered=recovered)
                if not recovered and self._metadata.closing.wait(self._metadata.backoff.wait_s(attempt)):
                    return
        except Exception as error:
            with self._assignment.changed:
                self._assignment.failure = InvariantError(
                    f"the consumer's thread ended: {type(error).__name__}: {error}"
                )
                self._assignment.changed.notify_all()
            raise

    def _wait_for_work(self) -> bool:
        """False: closed."""
        with self._assignment.changed:
            while not self._assignment.closed:
                if self._has_work():
                    return True
                self._assignment.changed.wait(self._quiet_s())
            return False

    def _quiet_s(self) -> float:
        """For how long nothing can be late, whatever is asked meanwhile."""
        now_s = time.monotonic()
        dues_s = [one.due_s or now_s for one in self._fetchers.values()]
        overdue_s = min(dues_s, default=now_s + STALLED_S) + STALLED_S
        return max(min(overdue_s - now_s, self._metadata.fresh_s), TICK_S)

    def _has_work(self) -> bool:
        if self._assignment.refresh_wanted or self._pending_commit:
            return True
        reading = bool(self._assignment.partitions or self._assignment.topics)
        if reading and (self._metadata.stale or self._is_stalled()):
            self._assignment.refresh_wanted = True
            return True
        if reading and self._metadata.view is not self._applied:
            return True
        return any(state.start is not None and state.error is None for state in self._assignment.partitions.values())

    def _is_stalled(self) -> bool:
        now_s = time.monotonic()
        late = any(0 < one.due_s < now_s - STALLED_S for one in self._fetchers.values())
        return late and self._metadata.age_s > STALLED_S

    def _round(self) -> bool:
        """Whatever there is to do, once; False: something has to be tried again, after a backoff."""
        with self._assignment.lock:
            refresh, self._assignment.refresh_wanted = self._assignment.refresh_wanted, False
            topics = {tp.topic for tp in self._assignment.partitions} | self._assignment.topics
        done = True
        try:
            if refresh:
                self._metadata.use(topics)
                self._metadata.refresh(Deadline.after_ms(self._config.request_timeout_ms))
            # A lookup or a call of the caller refreshes the metadata too.
            if refresh or self._metadata.view is not self._applied:
                with self._assignment.changed:
                    if self._assignment.closed:
                        return False  # a fetcher that is made now would be ended by nobody
                    done = self._apply(self._metadata.view)
                    self._assignment.failure = None
                    self._assignment.changed.notify_all()
            done = self._find_starts() and done
            self._commit_pending()
        except ClosedError:
            return False
        except SparkBrokerError as error:
            with self._assignment.changed:
                self._assignment.refresh_wanted = True
                if not error.retriable and not self._metadata.view.brokers:
                    self._assignment.failure = error  # no address of bootstrap.servers ever answered
                    self._assignment.changed.notify_all()
            return False
        return done

    # ---- metadata ---------------------------------------------------------------------------------------------------

    def _apply(self, view: ClusterView) -> bool:
        """Under the lock: topics that came, went or grew; leaders that moved. False: look again soon."""
        self._applied = view
        settled = True
        for name in sorted(self._assignment.topics):
            self._assign_all(name, view.topic(name))
        names = {tp.topic for tp in self._assignment.partitions} | self._assignment.topics
        for name in names:
            settled = self._check_topic(name, view.topic(name)) and settled
        for state in self._assignment.partitions.values():
            settled = self._check_partition(state, view) and settled
        self._keep_fetchers(view)
        if not settled:
            self._assignment.refresh_wanted = True
        return settled

    def _assign_all(self, name: str, topic: TopicView | None) -> None:
        """Every partition of a subscribed topic. All records of one that is added later are new to this consumer."""
        if topic is None:
            return
        grown = any(tp.topic == name for tp in self._assignment.partitions)
        reset = Start.EARLIEST if grown and self.reset is Start.LATEST else self.reset
        start = Start.COMMITTED if self._group is not None else reset
        for number in range(len(topic.partitions)):
            tp = TopicPartition(name, number)
            if tp not in self._assignment.partitions:
                self._assignment.partitions[tp] = PartitionState(tp, start, reset, topic.topic_id)

    def _check_topic(self, name: str, topic: TopicView | None) -> bool:
        """A topic that is missing, or is another one of that name, for longer than a broker may lag behind."""
        ids = {
            state.topic_id for tp, state in self._assignment.partitions.items() if tp.topic == name and state.topic_id
        }
        if topic is not None and ids <= {topic.topic_id}:
            self._missing_since.pop(name, None)
            self._assignment.topic_errors.pop(name, None)
            return True
        since_s = self._missing_since.setdefault(name, time.monotonic())
        if (time.monotonic() - since_s) * 1000 >= UNKNOWN_TOPIC_GRACE_MS:
            self._assignment.topic_errors[name] = (
                UnknownTopicOrPartitionError(f"topic {name!r} does not exist")
                if topic is None
                else InconsistentTopicIdError(f"topic {name!r} was deleted and created again")
            )
        return False

    def _check_partition(self, state: PartitionState, view: ClusterView) -> bool:
        topic = view.topic(state.tp.topic)
        if topic is None:
            return False
        if state.tp.partition >= len(topic.partitions):
            state.error = UnknownTopicOrPartitionError(f"topic {topic.name!r} has {len(topic.partitions)} partitions")
            return True
        state.topic_id = state.topic_id or topic.topic_id
        known = topic.partitions[state.tp.partition].leader_epoch
        return view.leader(state.tp.topic, state.tp.partition) is not None and known >= state.last_epoch

    def _keep_fetchers(self, view: ClusterView) -> None:
        """A fetcher for each live leader; a frozen broker that was fenced must not hold its fetcher until time-out."""
        leaders = {}
        for tp in self._assignment.partitions:
            found = view.leader(tp.topic, tp.partition)
            if found is not None:
                leaders[found[0].id] = address_of(found[0])
        for broker_id, fetcher in list(self._fetchers.items()):
            if leaders.get(broker_id) != fetcher.address:
                fetcher.close()
                del self._fetchers[broker_id]
        for broker_id, address in leaders.items():
            if broker_id not in self._fetchers:
                self._fetchers[broker_id] = LeaderFetcher(
                    broker_id, address, self._assignment, self._metadata, self._config, self._columns
                )

    # ---- first positions --------------------------------------------------------------------------------------------

    def _find_starts(self) -> bool:
        with self._assignment.lock:
            starting = [
                (state, state.start, state.generation)
                for state in self._assignment.partitions.values()
                if state.start is not None
                and state.error is None
                and state.tp.topic not in self._assignment.topic_errors
            ]
        if not starting:
            return True
        found = self._committed_starts([one for one in starting if one[1] is Start.COMMITTED])
        moved = self._looked_up_starts([one for one in starting if one[1] in (Start.EARLIEST, Start.LATEST)])
        with self._assignment.changed:
            if found or moved:
                self.interrupt_fetchers()
            return all(state.start is None or state.error is not None for state, _, _ in starting)

    def _committed_starts(self, starting: list[tuple[PartitionState, Start | None, int]]) -> bool:
        if not starting or self._group is None:
            return False
        committed = self._group.fetch([state.tp for state, _, _ in starting], Deadline.after_ms(ROUND_TIMEOUT_MS))
        with self._assignment.changed:
            for state, _, generation in starting:
                if state.generation != generation:
                    continue
                offset = committed.get(state.tp)
                if offset is not None:
                    state.move_to(offset.offset, offset.leader_epoch)
                    self._committed[state.tp] = offset
                elif state.reset is Start.NONE:
                    state.error = OffsetOutOfRangeError(
                        f"{state.tp} has no committed offset, and auto.offset.reset is none"
                    )
                else:
                    state.start = state.reset
            self._assignment.refresh_wanted = True
            self._assignment.changed.notify_all()
        return True

    def _looked_up_starts(self, starting: list[tuple[PartitionState, Start | None, int]]) -> bool:
        if not starting:
            return False
        wanted = {
            state.tp: EARLIEST_TIMESTAMP_MS if start is Start.EARLIEST else LATEST_TIMESTAMP_MS
            for state, start, _ in starting
        }
        found, failures = try_lookup_offsets(
            self._metadata,
            wanted,
            Deadline.after_ms(ROUND_TIMEOUT_MS),
            read_committed=self._config.read_committed,
        )
        with self._assignment.changed:
            for state, _, generation in starting:
                if state.generation != generation:
                    continue
                if state.tp in found:
                    state.move_to(found[state.tp].offset, found[state.tp].last_epoch)
                elif state.tp in failures and not failures[state.tp].retriable:
                    state.error = failures[state.tp]
            self._assignment.changed.notify_all()
        return bool(found)
