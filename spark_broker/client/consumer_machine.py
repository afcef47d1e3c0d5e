"""The consumer as a state machine without thread, clock or socket: events and the time in, effects out.

A shell hands in what users and brokers do, and carries out the effects of `step`. It sends the fetch that
`leaders.next_fetch` returns for each leader. It calls `step` again at `wake_ms`. Times are milliseconds of a clock that
never goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from spark_broker.client import consumer_errors
from spark_broker.client.cluster_view import ClusterView, TopicView
from spark_broker.client.commit_queue import CommitQueue, check_commit
from spark_broker.client.consumer_effects import (
    CommitOffsets,
    Effect,
    FetchCommitted,
    Generations,
    ListTopics,
    LookUpOffsets,
    Offsets,
    ReadHistory,
    RefreshMetadata,
    Round,
)
from spark_broker.client.consumer_errors import LASTING
from spark_broker.client.fetch_machine import FetchMachine
from spark_broker.client.group_offsets import NOBODY
from spark_broker.client.group_reading import Change, GroupReading
from spark_broker.client.history_turns import HistoryTurns
from spark_broker.client.leader_fetches import LeaderFetches
from spark_broker.client.membership import Membership
from spark_broker.client.partition_position import POLL_BATCHES_MAX, HandedOut, PartitionPosition, Prefetched, Start
from spark_broker.client.retry import Backoff, Tries
from spark_broker.client.topic_checks import TopicChecks
from spark_broker.config import ConsumerConfig
from spark_broker.errors import (
    BootstrapUnreachableError,
    InvariantError,
    PolicyViolationError,
    RequestTimedOutError,
    SparkBrokerError,
    again,
)
from spark_broker.model import (
    CONSUMER_OFFSETS_TOPIC,
    ConsumedBatch,
    ConsumedRecord,
    GroupMetadata,
    OffsetAndMetadata,
    TopicPartition,
    known_epoch,
)
from spark_broker.protocol.messages import ListedOffset
from spark_broker.times import EARLIEST, LATEST, Moment

STALLED_MS = 500
"""When a long poll is overdue by this much, the consumer asks whether the leader still leads."""

ABSENT = ("", 0)
"""How a subscription finds a topic that is not there: without an id and partitions."""


class ConsumerMachine:
    """All partitions of a consumer: their positions, fetched batches, commits and errors."""

    def __init__(
        self,
        config: ConsumerConfig,
        columns: Sequence[str] | None,
        backoff: Backoff,
        *,
        fetches: FetchMachine | None = None,
        membership: Membership | None = None,
    ) -> None:
        """`membership`: of the consumer's group, which decides what is read of a subscription."""
        self.partitions: dict[TopicPartition, PartitionPosition] = {}
        self.topics: set[str] = set()
        self.pattern = ""
        self.checks = TopicChecks(self.partitions, columns)
        self.failure: SparkBrokerError | InvariantError | None = None  # of the consumer; poll raises it
        self._unreachable: SparkBrokerError | None = None  # why the last try found no broker of the cluster
        self.closed = False
        fetch_machine = FetchMachine(config, columns, backoff) if fetches is None else fetches
        self.leaders = LeaderFetches(config, fetch_machine, self.partitions)
        self._config = config
        self._reset = Start(config.auto_offset_reset)
        self._first_start = Start.COMMITTED if config.group_id else self._reset
        self._commits = CommitQueue()
        self.handed: Sequence[HandedOut] = ()  # by the poll that has not returned yet
        self._sought: dict[str, Start] = {}  # by topic: where its partitions begin, once they are known
        self._generation = 0  # in which the next new position begins: no answer for an earlier one fits it
        self.group: GroupReading | None = None
        if membership is not None:
            parts = (self.partitions, self._forget, self._add, self._is_absent)
            self.group = GroupReading(membership, *parts, self._reset, self._sought)
        # Ids of topics and numbers of their partitions, as the subscription found them.
        self._first_known: dict[str, tuple[str, int]] = {}
        self._first_list: Mapping[str, tuple[str, int]] | None = None  # all that were there when the pattern came
        self._listed_for = ""  # which pattern
        self._turn: PartitionPosition | None = None  # whose batch is handed out record by record
        self._turns: deque[PartitionPosition] = deque()
        self._round: Round | None = None
        self._history = HistoryTurns(config)
        self._refreshes = Tries(backoff)
        self._lookups = Tries(backoff)  # own tries: a missing topic does not delay other topics' first positions
        self._refreshed_ms = float("-inf")

    def subscribe(self, topics: Iterable[str], pattern: str = "", *, now_ms: float = 0.0) -> None:
        """Read every partition of these topics, also those that are added later; in a group, a share of them.

        `pattern`: of names of topics, in a group.
        """
        if not self.topics and not self.pattern:
            self.unsubscribe()  # from what was assigned by hand
        self.topics, self.pattern = set(topics), pattern
        if not pattern:
            self._first_list, self._listed_for = None, ""
        self._first_known = {name: known for name, known in self._first_known.items() if name in self.topics}
        if self.group is not None:
            self.group.membership.subscribe(self.topics, pattern, now_ms)
        else:
            for tp in [tp for tp in self.partitions if tp.topic not in self.topics]:
                self._forget(tp)
            for name in self._sought.keys() - self.topics:
                del self._sought[name]
        self.reading_changed()

    def unsubscribe(self) -> None:
        """Read nothing. A member has left its group before."""
        self.topics, self.pattern = set(), ""
        self._sought.clear()
        self._first_known.clear()
        self._first_list, self._listed_for = None, ""
        if self.group is not None:
            self.group.sought_any = None
            self.group.membership.forget_failure()
        for tp in list(self.partitions):
            self._forget(tp)
        self.reading_changed()

    def polling(self, now_ms: float) -> None:
        """The caller waits for records: what it got before it has done with."""
        if self.group is not None:
            self.group.membership.polling(now_ms)

    def polled(self, now_ms: float) -> None:
        """The caller has got what it waited for."""
        if self.group is not None:
            self.group.membership.polled(now_ms)

    def identity(self, life: int | None = None) -> GroupMetadata:
        """Who asks the coordinator. Raises UnknownMemberIdError for what was read in another life than the present
        one.
        """
        return NOBODY if self.group is None else self.group.membership.identity(life)

    def committer(self, commit: CommitOffsets) -> GroupMetadata:
        """Who commits. Raises RequestTimedOutError if that was not known by the deadline, the error that keeps the
        consumer out of its group, and as `identity` does.
        """
        member = None if self.group is None else self.group.membership
        if member is not None and member.is_between:
            raise member.failure or RequestTimedOutError(
                f"the coordinator of group {member.group_id!r} has not said in time whether this consumer is a member"
            )
        return self.identity(commit.life)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions and no others. Those that stay keep their positions."""
        self.topics = set()
        self._sought.clear()
        self._first_known.clear()
        assigned = dict.fromkeys(partitions)
        for tp in [tp for tp in self.partitions if tp not in assigned]:
            self._forget(tp)
        for tp in assigned:
            if tp not in self.partitions:
                self._add(PartitionPosition(tp, self._first_start, self._reset))
        self.reading_changed()

    def _forget(self, tp: TopicPartition) -> None:
        self.leaders.break_fetch(tp)
        position = self.partitions.pop(tp)
        if self._turn is position:
            self._turn = None
        position.generation += 1
        self._generation = max(self._generation, position.generation)
        self._commits.known.pop(tp, None)

    def _add(self, position: PartitionPosition) -> None:
        position.generation = self._generation
        self.partitions[position.tp] = position

    def reading_changed(self) -> None:
        """Partitions came or went."""
        self.checks.keep(self._topic_names())
        self.leaders.refresh_wanted = True

    def is_unresolved(self, tp: TopicPartition) -> bool:
        """Whether the partition's topic is subscribed, but it is not known yet which of its partitions are read."""
        if self.is_member:
            return self.group is not None and not self.group.membership.assigned
        return tp.topic in self.topics and all(assigned.topic != tp.topic for assigned in self.partitions)

    @property
    def is_member(self) -> bool:
        """Whether a group decides what is read."""
        return self.group is not None and bool(self.topics or self.pattern)

    def partition(self, tp: TopicPartition) -> PartitionPosition:
        """Raises PolicyViolationError for a partition that is not assigned."""
        position = self.partitions.get(tp)
        if position is None:
            raise PolicyViolationError(f"{tp} is not assigned to this consumer")
        return position

    def seek(self, tp: TopicPartition, offset: OffsetAndMetadata) -> None:
        """Read on from this offset. Raises PolicyViolationError."""
        self.partition(tp).move_to(offset.offset, offset.leader_epoch, chosen=True)
        self._moved_by_caller(tp)

    def seek_to(self, tp: TopicPartition, start: Start) -> None:
        """Read on from the log start or the end. Raises PolicyViolationError."""
        self.partition(tp).find_start(start, chosen=True)
        self._moved_by_caller(tp)

    def seek_all_to(self, start: Start) -> None:
        """The same for every partition, also for those that are not known yet. What a group assigns later was another
        member's, unless its topic is not there yet.
        """
        known = {tp.topic for tp in self.partitions}
        is_first = self.group is None or not self.group.membership.assigned
        awaited = [name for name in self.topics - known if is_first or self._is_absent(name)]
        self._sought.update(dict.fromkeys(awaited, start))
        if self.group is not None and is_first and self.pattern and not known:
            self.group.sought_any = start
        for tp in self.partitions:
            self.seek_to(tp, start)

    def _is_absent(self, topic: str) -> bool:
        """Whether a broker has answered that there is no such topic."""
        return self._refreshed_ms > float("-inf") and self.view.topic(topic) is None

    def _moved_by_caller(self, tp: TopicPartition) -> None:
        self._commits.known.pop(tp, None)  # The topic may be another one of this name.
        self.leaders.break_fetch(tp)
        if self.checks.chosen_in(self.partitions[tp], self.view.topic(tp.topic)):
            self.leaders.refresh_wanted = True

    def pause(self, tp: TopicPartition, *, paused: bool) -> None:
        """Hand out nothing of the partition, or go on. Raises PolicyViolationError."""
        position = self.partition(tp)
        was_paused, position.paused = position.paused, paused
        if was_paused and not paused:
            self.leaders.break_fetch(tp)

    def poll(self) -> tuple[list[ConsumedBatch], bool]:
        """The batches fetched ahead, an equal share of each partition, and whether any position moved.

        A position also moves past offsets without records. What has failed stands still (`raise_error`). Raises at
        once, and once, that a log was truncated or that the whole consumer failed. `take_back` undoes it.
        """
        self._raise_at_once()
        batches: list[ConsumedBatch] = []
        ready = [p for p in self.partitions.values() if p.buffer and self._may_hand_out(p)]
        handed = self.handed = [position.about_to_hand_out() for position in ready]
        for of in handed:
            batches += of.of.take(max(POLL_BATCHES_MAX // len(ready), 1), of)
        return batches, any(of.of.position > of.position for of in handed)

    def take_back(self) -> None:
        """The caller of the last poll did not get its batches."""
        handed, self.handed = self.handed, ()
        for of in handed:
            of.of.take_back(of)

    def record_came(self) -> None:
        """The caller has got every record so far."""
        if self._turn is not None:
            self._turn.newest = None

    def take_record_back(self) -> None:
        """The caller did not get the record that was taken since `record_came`, if any was."""
        if self._turn is not None:
            self._turn.take_record_back()

    def _may_hand_out(self, position: PartitionPosition) -> bool:
        return not position.paused and position.error is None and position.tp.topic not in self.checks.errors

    def next_record(self) -> tuple[ConsumedRecord | None, bool]:
        """The next record fetched ahead, and whether there is room to fetch more. Partitions take turns by batches.

        Raises as `poll` does.
        """
        self._raise_at_once()
        position = self._turn
        if position is None or not position.is_inside_a_batch or not self._may_hand_out(position):
            position = self._turn = self._next_turn()
        if position is None:
            return None, False
        buffered = len(position.buffer)
        record = position.take_record()
        return record, len(position.buffer) < buffered or position.error is not None

    def _next_turn(self) -> PartitionPosition | None:
        while self._turns:
            position = self._turns.popleft()
            if position.buffer and self.partitions.get(position.tp) is position and self._may_hand_out(position):
                return position
        self._turns.extend(p for p in self.partitions.values() if p.buffer and self._may_hand_out(p))
        return self._turns.popleft() if self._turns else None

    @property
    def stands_still(self) -> bool:
        """Whether nothing can be handed out before a caller acts: each partition has failed."""
        return consumer_errors.stands_still(self.partitions, self.checks.errors)

    def errors(self) -> dict[TopicPartition, SparkBrokerError]:
        """The partitions that stand still, and why."""
        return consumer_errors.errors_of(self.partitions, self.checks.errors)

    def raise_error(self) -> None:
        """Raises the error of a partition, where there is one, as long as its cause lasts."""
        self._raise_at_once()
        consumer_errors.raise_first(self.partitions, self.checks.errors)

    def raise_error_of(self, position: PartitionPosition) -> None:
        """Raises the error of this partition, paused or not. Other partitions that have failed do not concern it."""
        self._raise_at_once()
        error = position.error or self.checks.errors.get(position.tp.topic)
        if error is not None:
            raise again(error)

    def _raise_at_once(self) -> None:
        """Raises what concerns the whole consumer, and that a log was truncated: what was read is not there."""
        while self.leaders.truncated:  # Before each record: no loop over all partitions.
            position = self.leaders.truncated.popleft()
            error = position.notify_truncation() if self.partitions.get(position.tp) is position else None
            if error is not None:
                raise error
        if self.failure is not None:
            self.raise_lasting()
        failure, self.failure, self._unreachable = self.failure or self._unreachable, None, None
        if failure is None and self.group is not None:
            failure = self.group.take_failure()
        if failure is not None:
            raise again(failure)

    def raise_lasting(self) -> None:
        """Raises the failure that the consumer does not recover from, if there is one."""
        if isinstance(self.failure, LASTING):
            raise again(self.failure)

    def failed(self, error: SparkBrokerError | InvariantError) -> None:
        """The consumer has failed as a whole. The first failure that lasts stays."""
        if not isinstance(self.failure, LASTING):
            self.failure = error

    @property
    def committed(self) -> Offsets:
        """The offsets that the coordinator has, as far as they are known."""
        return self._commits.known

    def positions_to_commit(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Positions after what was handed out, and those that a caller chose, of topics that are there; none that was
        only looked up. A truncation that poll has not raised yet has moved none of them.
        """
        there = self.checks.readable(self.partitions.values())
        return {p.tp: p.to_commit for p in there if p.has_position and p.chosen}

    def positions_to_keep(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What is committed from time to time, before partitions are given up, and at the end (enable.auto.commit): of
        these partitions or of all, the positions to commit, and with auto.offset.reset=latest also those where nothing
        was handed out yet. Otherwise who reads on would begin at the end, and pass what was appended meanwhile.
        """
        chosen = self.partitions if partitions is None else partitions
        there = self.checks.readable(self.partitions[tp] for tp in chosen if tp in self.partitions)
        return {p.tp: p.to_commit for p in there if p.has_position and (p.chosen or p.reset is Start.LATEST)}

    def uncommitted_positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The positions to keep, without those that the coordinator is known to have."""
        return self._commits.changed(self.positions_to_keep())

    def renew_commits(self) -> None:
        """Send offsets again that have not changed. The coordinator forgets those of a group without members."""
        if not self.is_member:
            self._commits.known.clear()

    @property
    def is_committing(self) -> bool:
        """Whether a commit is under way, or waits."""
        return self._commits.is_busy

    def topic_ids(self) -> dict[TopicPartition, str]:
        """Of the topics that are read."""
        return {tp: position.topic_id for tp, position in self.partitions.items()}

    def check_commit(self, offsets: Offsets) -> None:
        """Raises OffsetOutOfRangeError and PolicyViolationError: a commit never passes records not handed out."""
        check_commit(self.partitions, offsets)

    def commit(self, offsets: Offsets, deadline_ms: float) -> CommitOffsets:
        """Commit these offsets for a caller that waits until it is done."""
        return self._commit(offsets, deadline_ms, background=False)

    def commit_later(self, offsets: Offsets, deadline_ms: float) -> None:
        """Commit the offsets that have changed; no caller waits. A partition's later commit replaces this one."""
        if changed := self._commits.new(offsets):
            self._commit(changed, deadline_ms, background=True)

    def _commit(self, offsets: Offsets, deadline_ms: float, *, background: bool) -> CommitOffsets:
        ids = {tp: id_ for tp, id_ in self.topic_ids().items() if tp in offsets}
        life = 0 if self.group is None else self.group.membership.life
        commit = CommitOffsets(dict(offsets), deadline_ms, background, ids, life)
        self._commits.add(commit)
        return commit

    def prepare(self, change: Change, deadline_ms: float) -> bool:
        """Before a member gives these partitions up: commit their positions (enable.auto.commit), and wait for commits
        that are under way, which the coordinator would refuse later. False: call it again.
        """
        if self.group is None:
            raise InvariantError(f"{change} of a consumer without a group")
        if self._commits.is_busy:
            return False
        if self.group.prepared != change:
            self.group.prepared = change
            if self._config.enable_auto_commit:
                self.commit_later(self.positions_to_keep(change.partitions), deadline_ms)
        return not self._commits.is_busy

    def commit_ended(self, commit: CommitOffsets, error: SparkBrokerError | None = None) -> None:
        """Without `error` the offsets are stored; with it they may be. The next commit stores them or later ones."""
        self._commits.ended(commit, error)
        if error is None:
            return
        self.leaders.refresh_wanted = True
        told_otherwise = consumer_errors.MEMBER_IS_GONE if self.is_member else consumer_errors.TOPIC_IS_GONE
        if commit.background and not error.retriable and not isinstance(error, told_otherwise):
            self.failed(error)

    def step(self, now_ms: float) -> list[Effect]:
        """The effects to carry out now. The shell has already begun those of earlier steps."""
        if not self.closed:
            if self.group is not None and self.group.take_up(now_ms):
                self.reading_changed()
            self._begin_round(now_ms)
            commit = None if now_ms < self._commits_wait_until_ms() else self._commits.next()
            if commit is not None:
                self.leaders.effects.append(commit)
            if self.group is not None:
                self.leaders.effects += self.group.membership.heartbeats(now_ms)
            part = self._history.next(self.partitions.values(), self.view)
            if part is not None:
                self.leaders.effects.append(part)
        effects, self.leaders.effects = self.leaders.effects, []
        return effects

    def _commits_wait_until_ms(self) -> float:
        """A commit waits while the group takes this member in, or lets it go; at most until its own deadline."""
        member = None if self.group is None else self.group.membership
        if member is None or not member.is_between or member.failure is not None or not self._commits.waiting:
            return 0.0
        return self._commits.waiting[0].deadline_ms

    def wake_ms(self, now_ms: float) -> float:
        """When to call `step` again at the latest; infinity: there is nothing to wait for."""
        times = [position.retry.at_ms for position in self.partitions.values() if position.retry.at_ms > now_ms]
        if self.group is not None:
            times.append(self.group.membership.wake_ms())
            if (commits_ms := self._commits_wait_until_ms()) > now_ms:
                times.append(commits_ms)
        if self._round is None and self._awaits_list:
            times.append(self._refreshes.next_ms)
        elif self._round is None and self._is_reading:
            refresh_ms = now_ms if self.leaders.refresh_wanted else self._refresh_due_ms()
            times.append(max(refresh_ms, self._refreshes.next_ms))
            if self._starting():
                times.append(self._lookups.next_ms)
        return min(times, default=float("inf"))

    def close(self) -> None:
        """Leave every leader. Nothing begins after that."""
        self.closed = True
        self.leaders.leave_all()

    @property
    def view(self) -> ClusterView:
        """What is known of the cluster."""
        return self.leaders.view

    @property
    def _is_reading(self) -> bool:
        return bool(self.partitions or self.topics)

    @property
    def _awaits_list(self) -> bool:
        """Whether it is not known yet which topics were there when the pattern came. With auto.offset.reset=latest no
        place in a partition is looked up before: a topic that comes later begins elsewhere.
        """
        return self.pattern not in ("", self._listed_for) and self._reset is Start.LATEST

    def _refresh_due_ms(self) -> float:
        """When metadata is too old. It is too old sooner while a leader does not answer its fetch in time."""
        stalled_ms = max(self.leaders.due_ms, self._refreshed_ms) + STALLED_MS
        return min(stalled_ms, self._refreshed_ms + self._config.metadata_max_age_ms)

    def _begin_round(self, now_ms: float) -> None:
        if self._round is not None or not (self._is_reading or self._awaits_list):
            return
        if now_ms > self._refresh_due_ms():
            self.leaders.refresh_wanted = True
        if self._awaits_list:
            self._round = ListTopics() if now_ms >= self._refreshes.next_ms else None
        elif self.leaders.refresh_wanted and now_ms >= self._refreshes.next_ms:
            self.leaders.refresh_wanted = False
            offsets_topic = {CONSUMER_OFFSETS_TOPIC} if self._config.group_id else set()
            self._round = RefreshMetadata(frozenset(self._topic_names() | offsets_topic))
        elif now_ms >= self._lookups.next_ms:
            self._round = self._next_lookup()
        if self._round is not None:
            self.leaders.effects.append(self._round)

    def _starting(self) -> list[PartitionPosition]:
        """Partitions that still need their first position. One that is not there has no end, and may come later."""
        return [
            position
            for position in self.partitions.values()
            if position.start is not None
            and position.start is not Start.NONE
            and position.error is None
            and position.tp.topic not in self.checks.errors
            and position.tp not in self.checks.beyond_since_ms
            and (position.start is not Start.LATEST or self._is_shown(position.tp))
        ]

    def _next_lookup(self) -> FetchCommitted | LookUpOffsets | None:
        starting = self._starting()
        committed = {p.tp: p.generation for p in starting if p.start is Start.COMMITTED}
        if committed:
            return FetchCommitted(committed)
        moments: dict[TopicPartition, Moment] = {
            p.tp: EARLIEST if p.start is Start.EARLIEST else LATEST for p in starting
        }
        generations = {p.tp: p.generation for p in starting}
        return LookUpOffsets(moments, generations) if starting else None

    def round_failed(self, error: SparkBrokerError, now_ms: float) -> None:
        """No broker answered the round's request, or one answered with this error."""
        is_refresh = isinstance(self._round, RefreshMetadata | ListTopics)
        tries = self._refreshes if is_refresh else self._lookups
        tries.ended(now_ms, recovered=False)
        self._round = None
        self.leaders.refresh_wanted = True
        nobody_there = isinstance(error, BootstrapUnreachableError)  # Brokers that were there may come back.
        if not error.retriable and (not self.view.brokers or (is_refresh and not nobody_there)):
            self._unreachable = error

    def topics_listed(self, topics: Mapping[str, TopicView], now_ms: float) -> None:
        """Which topics there are: one that is not among them comes later than the pattern."""
        if self._awaits_list:
            self._first_list = {name: (topic.topic_id, len(topic.partitions)) for name, topic in topics.items()}
            self._listed_for = self.pattern
        self._refreshes.ended(now_ms, recovered=True)
        self._round = None

    def metadata_came(self, view: ClusterView, now_ms: float) -> None:
        """New metadata: topics were created or deleted or got partitions, or leaders moved."""
        self.leaders.view = view
        self._refreshed_ms = now_ms
        self._unreachable = None
        self._note_absent()
        for name in sorted(self.topics if self.group is None else ()):
            self._assign_all(name, view.topic(name))
        self._note_topics(view)
        checked = [self.checks.check(name, view.topic(name), now_ms) for name in sorted(self._topic_names())]
        checked += [self._check_partition(position, now_ms) for position in self.partitions.values()]
        self.leaders.learned(view)
        settled = all(checked)
        self.leaders.refresh_wanted = self.leaders.refresh_wanted or not settled
        self._refreshes.ended(now_ms, recovered=settled)
        self._round = None

    def learned(self, view: ClusterView) -> None:
        """Newer metadata came with another answer."""
        self._note_topics(view)
        self.leaders.learned(view)

    def _note_absent(self) -> None:
        """Note what a broker was asked about and does not have: when that comes, it begins at its first record."""
        asked = self._round.topics if isinstance(self._round, RefreshMetadata) else frozenset()
        for name in self.topics & asked:
            if self.view.topic(name) is None:
                self._first_known.setdefault(name, ABSENT)
        for position in self.partitions.values():
            if not position.topic_id and position.tp.topic in asked and not self._is_shown(position.tp):
                position.came_later()

    def _is_shown(self, tp: TopicPartition) -> bool:
        return self.view.partition(tp.topic, tp.partition) is not None

    def _note_topics(self, view: ClusterView) -> None:
        for name in self.topics if self.is_member else ():
            if (topic := view.topic(name)) is not None:
                self._first_known.setdefault(name, (topic.topic_id, len(topic.partitions)))

    def _topic_names(self) -> set[str]:
        return {tp.topic for tp in self.partitions} | self.topics

    def _assign_all(self, name: str, topic: TopicView | None) -> None:
        """Assign every partition of a subscribed topic. One that was added later is read from its first record, and so
        is a topic that was created later.
        """
        if topic is None:
            return
        came_later = name in self._first_known or any(tp.topic == name for tp in self.partitions)
        reset = Start.EARLIEST if came_later and self._reset is Start.LATEST else self._reset
        sought = self._sought.pop(name, None)
        start = sought or (Start.COMMITTED if self._config.group_id else reset)
        for number in range(len(topic.partitions)):
            tp = TopicPartition(name, number)
            if tp not in self.partitions:
                chosen = sought is not None
                self._add(PartitionPosition(tp, start, reset, topic.topic_id, chosen=chosen))

    def _check_partition(self, position: PartitionPosition, now_ms: float) -> bool:
        """False: it is not there, its leader is not known, or metadata lags behind what was read."""
        tp = position.tp
        topic = self.view.topic(tp.topic)
        if topic is None:
            return False
        if tp.partition >= len(topic.partitions) and self.is_member:
            return False  # its group has heard of a new partition before this consumer
        if not self.checks.has_partition(position, topic, now_ms):
            return False
        position.topic_id = position.topic_id or topic.topic_id
        position.check_start()
        leader = self.view.leader(tp.topic, tp.partition)
        return leader is not None and leader[1].leader_epoch >= position.last_epoch

    def committed_came(self, asked: FetchCommitted, committed: Offsets, now_ms: float) -> None:
        """The group's committed offsets; a partition without one begins where auto.offset.reset says."""
        for position in self._still(asked.generations):
            offset = committed.get(position.tp)
            if offset is not None:
                self._begin_at(position, offset, chosen=True)
                self._commits.known[position.tp] = offset
            else:
                if self._came_later(position):
                    position.came_later()
                position.start = position.reset
                position.check_start()
        self.leaders.refresh_wanted = True
        self._lookups.ended(now_ms, recovered=True)
        self._round = None

    def _came_later(self, position: PartitionPosition) -> bool:
        """Whether the partition was added, or its topic created or created again, since this member subscribed to the
        topic by its name or by a pattern.
        """
        name = position.tp.topic
        known = self._first_known.get(name)
        if known is None and self._first_list is not None and name not in self.topics:
            known = self._first_list.get(name, ABSENT)
        if known is None or not self.is_member:
            return False
        topic_id, partitions = known
        return position.topic_id != topic_id or position.tp.partition >= partitions

    def offsets_came(
        self,
        asked: LookUpOffsets,
        infos: Mapping[TopicPartition, ListedOffset],
        failures: Mapping[TopicPartition, SparkBrokerError],
        now_ms: float,
    ) -> None:
        """Log starts and ends, from the partitions' leaders."""
        recovered = True
        for position in self._still(asked.generations):
            info, error = infos.get(position.tp), failures.get(position.tp)
            if info is not None:
                self._begin_at(position, self._with_history(position, info))
            elif error is not None and not error.retriable:
                position.error = error
            else:
                recovered, self.leaders.refresh_wanted = False, True
        self._lookups.ended(now_ms, recovered=recovered)
        self._round = None

    def _with_history(self, position: PartitionPosition, info: ListedOffset) -> OffsetAndMetadata:
        """The offset found. The earliest one is in the topic's table, if that begins before the log."""
        topic = self.view.topic(position.tp.topic)
        if position.start is Start.EARLIEST and topic is not None:
            begins = topic.begins(position.tp.partition, info.offset)
            if begins < info.offset:
                return OffsetAndMetadata(begins)
        return OffsetAndMetadata(info.offset, known_epoch(info.last_epoch))

    def history_came(self, asked: ReadHistory, fetched: Sequence[Prefetched]) -> None:
        """A part of a topic's table, from the position's fetch offset on."""
        self._history.came(self._still({asked.tp: asked.generation}), fetched)

    def history_failed(self, asked: ReadHistory, error: SparkBrokerError, now_ms: float) -> None:
        """A part of a topic's table cannot be read."""
        for position in self._history.failed(self._still({asked.tp: asked.generation}), error):
            self.leaders.back_off(position, now_ms)

    def _still(self, generations: Generations) -> list[PartitionPosition]:
        """The positions that nobody has moved meanwhile."""
        positions = (self.partitions.get(tp) for tp in generations)
        return [p for p in positions if p is not None and p.generation == generations[p.tp]]

    def _begin_at(self, position: PartitionPosition, offset: OffsetAndMetadata, *, chosen: bool | None = None) -> None:
        position.move_to(offset.offset, offset.leader_epoch, chosen=chosen)
        self.leaders.break_fetch(position.tp)
