"""One replica of one partition, as a pure state machine.

An event is a method: it takes what happened and the time, changes the state and returns effects for the shell to carry
out in order. The shell holds the partition's lock meanwhile. Each write that the shell has done is an event, too.

`core.roles` has the transition table. The docstring of a method says what its event does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spark_broker.core.batch import NO_PRODUCER, BatchInfo
from spark_broker.core.divergence import Diverging, FetchPosition, check_lineage, find_divergence, truncation_offset
from spark_broker.core.effects import (
    Acknowledge,
    AdvanceLogStart,
    Effect,
    HighWatermarkAdvanced,
    Refuse,
    RestartLog,
    SaveEpochs,
    SetAside,
    TruncateLog,
)
from spark_broker.core.epochs import UNDEFINED_EPOCH, EpochHistory
from spark_broker.core.events import AppendGrant, AwaitTransaction, Beginning, Fetched, LeaderAndIsr, RecoveredLog
from spark_broker.core.leadership import CONFIRMATION_MS, Leadership
from spark_broker.core.machine import Machine, event
from spark_broker.core.pending import PendingAppend, PendingAppends
from spark_broker.core.producers import ProducerStates, StoredBatch
from spark_broker.core.progress import FollowerProgress
from spark_broker.core.roles import TRANSITIONS, ReplicaEvent, Role
from spark_broker.errors import (
    FencedLeaderEpochError,
    IneligibleReplicaError,
    InvalidRequestError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RequestTimedOutError,
    SparkBrokerError,
    UnknownLeaderEpochError,
    broken,
    invariant,
)

__all__ = [
    "ACKS_ALL",
    "AppendGrant",
    "LeaderAndIsr",
    "AwaitTransaction",
    "BatchInfo",
    "Diverging",
    "FetchPosition",
    "Fetched",
    "RecoveredLog",
    "Replica",
    "Role",
]

ACKS_ALL = -1

CERTAIN_REFUSALS = frozenset({IneligibleReplicaError.code, InvalidRequestError.code})
"""Errors that the controller answers only after it has compared the epochs: the proposal was certainly not accepted."""


class ReplicaStanding(NamedTuple):
    """Where a replica stands between two events."""

    role: Role
    leader_epoch: int
    partition_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int

    def __str__(self) -> str:
        role, leader_epoch, partition_epoch, *offsets = self
        return f"{role.value} in leader epoch {leader_epoch}, partition epoch {partition_epoch}, offsets {offsets}"


class Replica(Machine[ReplicaStanding]):
    """The replica of a partition on broker `me`. Not thread-safe: the shell's partition lock covers it.

    Invariants: log_start_offset <= high_watermark <= log_end_offset; the high watermark never falls; the leader epoch
    and the partition epoch never fall; `leadership` is there exactly while this replica leads.
    """

    remembered = Machine.remembered | {LeaderAndIsr, BatchInfo, Diverging, Fetched, FetchPosition}

    def __init__(
        self, me: int, log: RecoveredLog, *, min_insync_replicas: int, lag_max_ms: int, name: str = "replica"
    ) -> None:
        """`name`: the topic-partition, for people."""
        super().__init__(f"{name} on broker {me}")
        self.me = me
        self.role = Role.OFFLINE
        self.assignment = LeaderAndIsr(leader=-1, leader_epoch=-1, partition_epoch=-1, replicas=(), isr=())
        self.min_insync_replicas = min_insync_replicas
        self.lag_max_ms = lag_max_ms
        self.leadership: Leadership | None = None
        self.pending = PendingAppends()
        self.deleted_before = 0  # Invariant: never falls; what the controller has recorded
        self._follow_log(log)

    def _follow_log(self, log: RecoveredLog) -> None:
        """Take the state from the recovered log alone."""
        self.log_start_offset = log.log_start_offset
        self.log_end_offset = log.log_end_offset
        self.high_watermark = min(max(log.high_watermark, log.log_start_offset), log.log_end_offset)
        self.epochs = log.epochs.truncate_to(log.log_end_offset)
        self._saved_epochs: EpochHistory | None = None  # Unknown: the file may name epochs past the log end.
        self.producers = log.producers
        self.producers.committed(self.high_watermark)
        self.purge_offset = log.purge_offset  # Invariant: falls only with a restart

    def check(self) -> ReplicaStanding:
        start, high, end = self.log_start_offset, self.high_watermark, self.log_end_offset
        leadership, assignment, role, history = self.leadership, self.assignment, self.role, self.epochs.entries
        if not 0 <= start <= high <= end:
            broken("log start %d, high watermark %d, log end %d", start, high, end)
        if (leadership is not None) is not (role is Role.LEADER):
            broken("a leadership without the role, or the reverse")
        if history and history[-1].start_offset > end:
            broken("an epoch begins past the log end %d", end)
        if leadership is None:
            if len(self.pending):
                broken("appends wait for a replica that does not lead")
        else:
            if assignment.leader != self.me:
                broken("it leads what broker %d was given", assignment.leader)
            if not history or history[-1].epoch != assignment.leader_epoch:
                broken("the log's newest epoch is another")
            leadership.check(assignment, end)
        return ReplicaStanding(role, assignment.leader_epoch, assignment.partition_epoch, start, high, end)

    def check_step(self, name: str, before: ReplicaStanding, after: ReplicaStanding) -> bool:
        """Check what may not fall: epochs; but for a restart the high watermark and the log start; a leader's log end.

        A stopped replica stays so. Returns whether role, epochs or log start changed.
        """
        if before == after:
            return False
        if after.leader_epoch < before.leader_epoch or after.partition_epoch < before.partition_epoch:
            broken("an epoch falls from %s", before)
        if before.role is Role.STOPPED and after.role is not Role.STOPPED:
            broken("a stopped replica is revived")
        if name != "restarted" and after.high_watermark < before.high_watermark:
            broken("the high watermark falls from %d", before.high_watermark)
        if name != "restarted" and after.log_start_offset < before.log_start_offset:
            broken("the log start falls from %d", before.log_start_offset)
        leads_on = before.role is after.role is Role.LEADER
        if leads_on and after.log_end_offset < before.log_end_offset:
            broken("the log end of a leader falls from %d", before.log_end_offset)
        return before[:4] != after[:4]

    def check_log_end(self, log_end_offset: int) -> None:
        """After the shell has changed its log, both log ends must agree, unless the disk has failed meanwhile."""
        agree = log_end_offset == self.log_end_offset or self.role is Role.STOPPED
        self.invariant(agree, "the log ends at %d, the replica at %d", log_end_offset, self.log_end_offset)

    def describe_state(self) -> str:
        return (
            f"{self.role.value}, {self.assignment}, log start {self.log_start_offset}, high watermark "
            f"{self.high_watermark}, log end {self.log_end_offset}, epochs {self.epochs.to_pairs()}, proposed ISR "
            f"{self.proposed_isr}, followers {dict(self.followers)}, {len(self.pending)} appends wait"
        )

    @property
    def followers(self) -> Mapping[int, FollowerProgress]:
        return self.leadership.followers if self.leadership else {}

    @property
    def proposed_isr(self) -> tuple[int, ...] | None:
        return self.leadership.proposed_isr if self.leadership else None

    @property
    def is_replaceable(self) -> bool:
        """Whether the controller may elect another leader while this one is live: another replica may be in the ISR."""
        return self.leadership is not None and self.leadership.maximal_isr != {self.me}

    @property
    def leader_epoch_start_offset(self) -> int:
        """Where the epoch begins in which this replica leads."""
        return self.leadership.epoch_start_offset if self.leadership else 0

    @event
    def assign(self, assignment: LeaderAndIsr, broker_epochs: Mapping[int, int], now_ms: int) -> list[Effect]:
        """The controller's assignment; an older one is ignored. `broker_epochs`: each registered broker's epoch."""
        current = self.assignment
        if self.role is Role.STOPPED:
            return []
        if (assignment.leader_epoch, assignment.partition_epoch) < (current.leader_epoch, current.partition_epoch):
            return self._advance_high_watermark()
        event = self._assigned(assignment)
        self.assignment = assignment
        match event:
            case ReplicaEvent.FOLLOWS:
                effects = self._follow()
            case ReplicaEvent.LEADS:
                effects = self._lead(broker_epochs, now_ms)
            case _:
                self._move(ReplicaEvent.REASSIGNED)
                effects = []
                if self.leadership is not None:
                    self.leadership.reassign(assignment, broker_epochs, now_ms)
        return effects + self._advance_high_watermark()

    def begins_anew(self, assignment: LeaderAndIsr, beginning: Beginning) -> bool:
        """Whether this replica is to lead with a log that is not the topic's: it ends too early, or has other records.

        That is so after an election that lost records, or every disk. What lies below `beginning` is in the topic's
        table, or was deleted. The log is to restart there before the assignment is handed in: no offset is given twice,
        and what is in the table is neither cut off nor contradicted.
        """
        if self.role not in (Role.OFFLINE, Role.FOLLOWER) or assignment.leader != self.me:
            return False
        newer = assignment.leader_epoch > self.assignment.leader_epoch or self.role is Role.OFFLINE
        return newer and (self.log_end_offset < beginning.offset or self._departs_from(beginning))

    def _departs_from(self, beginning: Beginning) -> bool:
        """Two logs that have a record of the same epoch at the same offset are the same up to there."""
        if beginning.history_end <= self.log_start_offset or beginning.history_epoch == UNDEFINED_EPOCH:
            return False
        return self.epochs.epoch_at(beginning.history_end - 1) not in (beginning.history_epoch, UNDEFINED_EPOCH)

    def _assigned(self, assignment: LeaderAndIsr) -> ReplicaEvent:
        """Which event the assignment is for this replica."""
        current = self.assignment
        if assignment.leader_epoch > current.leader_epoch or self.role is Role.OFFLINE:
            return ReplicaEvent.LEADS if assignment.leader == self.me else ReplicaEvent.FOLLOWS
        invariant(assignment.leader == current.leader, "another leader in the same leader epoch")
        return ReplicaEvent.REASSIGNED

    def _move(self, event: ReplicaEvent) -> None:
        role = TRANSITIONS.get((self.role, event))
        if role is None:
            epoch, end = self.assignment.leader_epoch, self.log_end_offset
            invariant(False, f"{event.name} of a {self.role.value} on broker {self.me}, epoch {epoch}, log end {end}")
        else:
            self.role = role

    def _follow(self) -> list[Effect]:
        self._move(ReplicaEvent.FOLLOWS)
        self.leadership = None
        refused = self._refuse_pending(NotLeaderOrFollowerError("the leader changed before the batch was committed"))
        return [*self._set_epochs(self.epochs.truncate_to(self.log_end_offset)), *refused]

    def _lead(self, broker_epochs: Mapping[int, int], now_ms: int) -> list[Effect]:
        """Invariant: (epoch, log end) is in the history before the first append or read of the epoch."""
        # If this replica had led in the epoch before and lost its log's end since, two batches could have one offset
        # and epoch.
        invariant(self.assignment.leader_epoch > self.epochs.latest_epoch, "elected in an epoch that the log has seen")
        self._move(ReplicaEvent.LEADS)
        self.leadership = Leadership(self.me, self.assignment, self.log_end_offset, broker_epochs, now_ms)
        return self._set_epochs(self.epochs.assign(self.assignment.leader_epoch, self.log_end_offset))

    @event
    def stop(self, error: SparkBrokerError) -> list[Effect]:
        """Stop: the topic is deleted, the disk failed, or the broker leaves. No later assignment revives it."""
        self._move(ReplicaEvent.STOPPED)
        self.leadership = None
        return self._refuse_pending(error)

    def _refuse_pending(self, error: SparkBrokerError) -> list[Effect]:
        return [Refuse(append.token, error) for append in self.pending.take_all()]

    def _set_epochs(self, history: EpochHistory) -> list[Effect]:
        self.epochs = history
        return self._save_epochs(history)

    def _save_epochs(self, history: EpochHistory) -> list[Effect]:
        if history == self._saved_epochs:
            return []
        self._saved_epochs = history
        return [SaveEpochs(history)]

    @property
    def effective_min_isr(self) -> int:
        return min(self.min_insync_replicas, max(len(self.assignment.replicas), 1))

    def check_leader(self, leader_epoch: int) -> Leadership:
        """Check the leader epoch that a request names (KIP-320). -1 stands for any epoch."""
        if leader_epoch >= 0 and leader_epoch < self.assignment.leader_epoch:
            raise FencedLeaderEpochError(
                f"the request names leader epoch {leader_epoch}, current is {self.assignment.leader_epoch}"
            )
        if leader_epoch > self.assignment.leader_epoch:
            raise UnknownLeaderEpochError(
                f"the request names leader epoch {leader_epoch}, known is {self.assignment.leader_epoch}"
            )
        if self.leadership is None:
            raise NotLeaderOrFollowerError(f"broker {self.me} does not lead; broker {self.assignment.leader} does")
        return self.leadership

    @event
    def prepare_append(
        self,
        leader_epoch: int,
        acks: int,
        producer_id: int,
        producer_epoch: int,
        sequence: int,
        *,
        transactional: bool = False,
        now_ms: int = 0,
    ) -> AppendGrant | StoredBatch | AwaitTransaction:
        """Where the batch goes, or where it already is, or that its transaction must be confirmed first.

        Raises the error that refuses it; nothing has changed then.
        """
        leadership = self.check_leader(leader_epoch)
        if transactional and (producer_id == NO_PRODUCER or acks != ACKS_ALL):
            raise InvalidRequestError("a transactional batch needs a producer id and acks=all")
        if producer_id != NO_PRODUCER:
            stored = self.producers.check(producer_id, producer_epoch, sequence, transactional=transactional)
            if stored is not None:
                return stored
        if acks == ACKS_ALL:
            self._check_min_isr()
        if transactional and not leadership.is_confirmed(producer_id, producer_epoch, now_ms):
            return AwaitTransaction()
        return AppendGrant(self.log_end_offset, self.assignment.leader_epoch)

    def _check_min_isr(self) -> None:
        if len(self.assignment.isr) < self.effective_min_isr:
            raise NotEnoughReplicasError(
                f"the ISR has {len(self.assignment.isr)} of the {self.effective_min_isr} replicas that must be in sync"
            )

    @event
    def transaction_confirmed(
        self, leader_epoch: int, producer_id: int, producer_epoch: int, asked_ms: int, valid_ms: int = CONFIRMATION_MS
    ) -> None:
        """The coordinator was asked at `asked_ms`, and has this partition in the producer's open transaction.

        If batches still come `valid_ms` later, it is asked again, which keeps the transaction from timing out.
        """
        if self.leadership is None or leader_epoch != self.assignment.leader_epoch:
            return
        # The answer may come after the marker. It is not kept then, since nothing would remove it.
        if not self.producers.is_fenced(producer_id, producer_epoch):
            self.leadership.confirm(producer_id, producer_epoch, asked_ms, valid_ms)

    @event
    def prepare_marker(self, leader_epoch: int, producer_id: int, producer_epoch: int) -> AppendGrant | None:
        """The place of the marker that ends the producer's transaction and begins this epoch; None: it is in the log.

        A marker is written even where the producer has appended nothing: after it, a late batch is refused.
        """
        leadership = self.check_leader(leader_epoch)
        if not self.producers.check_marker(producer_id, producer_epoch):
            return None
        self._check_min_isr()
        leadership.forget_confirmation(producer_id)
        return AppendGrant(self.log_end_offset, self.assignment.leader_epoch)

    @event
    def appended(self, batch: BatchInfo, now_ms: int) -> list[Effect]:
        """The shell has written the batch that `prepare_append` granted."""
        del now_ms
        self._move(ReplicaEvent.APPENDED)
        invariant(batch.base_offset == self.log_end_offset, "appended elsewhere than granted")
        self._remember(batch)
        return self._advance_high_watermark()

    @event
    def await_commit(self, token: object, base_offset: int, next_offset: int, deadline_ms: int) -> list[Effect]:
        """acks=all for a batch that is in the log, new or a retry: acknowledge when it is committed."""
        if next_offset <= self.high_watermark:
            return [Acknowledge(token, base_offset)]
        self.pending.add(PendingAppend(next_offset, base_offset, deadline_ms, token))
        return []

    def _remember(self, batch: BatchInfo) -> None:
        self.log_end_offset = batch.next_offset
        self.producers.replay(batch)

    @event
    def follower_fetch(
        self, follower: int, broker_epoch: int, position: FetchPosition, live: Mapping[int, int], now_ms: int
    ) -> tuple[Diverging | None, list[Effect]]:
        """A follower fetches from its log end on. `live`: brokers that may be in an ISR, with their epochs.

        Raises the error that the follower gets. A divergence changes nothing. A follower that ends below the log start
        gets no batches: the answer names the log start, and the follower restarts its log there.

        The shell repeats the event from time to time for a follower whose position does not change. The follower may
        have become fit for the ISR (it was fenced or refused before), or a late request on an older stream may have
        named a lower offset.
        """
        leadership = self.check_leader(position.leader_epoch)
        self._move(ReplicaEvent.FOLLOWER_FETCHED)
        progress = leadership.progress(follower, broker_epoch)
        diverging = find_divergence(self.epochs, self.log_end_offset, position)
        if diverging is not None:
            return diverging, []
        progress.fetched(position.fetch_offset, self.log_end_offset, now_ms, no_room=position.no_room)
        raised = self._advance_high_watermark()
        return None, [*raised, *leadership.grow(follower, live, self.high_watermark)]

    def _advance_high_watermark(self) -> list[Effect]:
        """Raise the high watermark to the smallest log end of the maximal ISR, unless the ISR is below the minimum."""
        if self.leadership is None or self.high_watermark == self.log_end_offset:  # an idle partition: nothing to raise
            return []
        if len(self.assignment.isr) < self.effective_min_isr:
            return []
        return self._raise_high_watermark(self.leadership.replicated_offset(self.log_end_offset))

    def _raise_high_watermark(self, offset: int) -> list[Effect]:
        offset = min(offset, self.log_end_offset)
        if offset <= self.high_watermark:
            return []
        self.high_watermark = offset
        self.producers.committed(offset)
        committed = self.pending.take_committed(offset)
        # Producers come first: hundreds of waiting consumers may compete for the broker's time once they are awake.
        return [*(Acknowledge(a.token, a.base_offset) for a in committed), HighWatermarkAdvanced(offset)]

    @event
    def tick(self, broker_epochs: Mapping[int, int], now_ms: int) -> list[Effect]:
        """Time passes: slow followers leave the ISR, and appends that waited too long fail."""
        expired: list[Effect] = [
            Refuse(append.token, RequestTimedOutError("the batch was not committed in time; it may be later"))
            for append in self.pending.take_expired(now_ms)
        ]
        if self.leadership is None:
            return expired
        lag = (self.high_watermark, self.log_end_offset, now_ms, self.lag_max_ms)
        return [*expired, *self.leadership.shrink(broker_epochs, *lag)]

    @event
    def isr_refused(self, leader_epoch: int, partition_epoch: int, error_code: int) -> list[Effect]:
        """The controller has answered the proposal that was made at these epochs with an error.

        A stale epoch may mean that the controller has accepted an earlier copy of the proposal, whose answer was lost.
        The proposal's members therefore count until the newer state of the partition arrives.
        """
        current = (self.assignment.leader_epoch, self.assignment.partition_epoch)
        if self.leadership is None or current != (leader_epoch, partition_epoch) or error_code not in CERTAIN_REFUSALS:
            return []
        self._move(ReplicaEvent.ISR_REFUSED)
        self.leadership.proposed_isr = None
        return self._advance_high_watermark()

    def fetch_position(self) -> FetchPosition:
        last_epoch = self.epochs.epoch_at(self.log_end_offset - 1)
        return FetchPosition(self.assignment.leader_epoch, self.log_end_offset, last_epoch)

    def awaits(self, answer: Fetched) -> bool:
        """Whether the answer is to this replica's current request.

        A late answer (to a fetcher that was replaced meanwhile) is ignored. A cut where the log diverged *then* could
        lose batches that the leader has counted since.
        """
        same_epoch = answer.leader_epoch == self.assignment.leader_epoch
        return self.role is Role.FOLLOWER and same_epoch and answer.position == self.fetch_position()

    @event
    def fetched(self, answer: Fetched, first: BatchInfo | None = None) -> list[Effect]:
        """The leader's answer. The shell then writes the batches that follow the log end (`follower_appended`).

        `first`: the first batch that came. An empty log that ends within it began anew (`begins_anew`) at an offset
        within a batch of the log that leads now. The batch cannot be appended to it.
        """
        if not self.awaits(answer):
            return []
        self._move(ReplicaEvent.FETCHED)
        if answer.diverging is not None:
            return self._truncate(answer.diverging)
        if answer.log_start_offset > self.log_end_offset:
            return [
                RestartLog(f"the leader's log starts at {answer.log_start_offset}, ours ends at {self.log_end_offset}")
            ]
        if self.purge_offset < answer.purge_offset > self.log_end_offset:
            # Our log may have records whose deletion the leader's log does not name any more.
            why = f"the leader has forgotten deletions below {answer.purge_offset}, ours ends at {self.log_end_offset}"
            return [RestartLog(why)]
        empty = self.log_start_offset == self.log_end_offset
        if first is not None and empty and first.base_offset < self.log_end_offset < first.next_offset:
            batch = f"the leader's batch from {first.base_offset} to {first.next_offset}"
            return [RestartLog(f"{batch} cannot be appended: our log ends within it, at {self.log_end_offset}")]
        return self.advance_log_start(answer.log_start_offset)

    def _truncate(self, diverging: Diverging) -> list[Effect]:
        offset = truncation_offset(self.epochs, self.log_end_offset, diverging)
        if offset < self.high_watermark:
            # KAFKA-7897: a sparse history must not truncate committed records. This replica is rebuilt instead.
            return [self._rebuild_below_high_watermark(offset, diverging)]
        leader = f"broker {self.assignment.leader}, which leads in leader epoch {self.assignment.leader_epoch}"
        ours = f"our log ends at {self.log_end_offset} in epoch {self.epochs.epoch_at(self.log_end_offset - 1)}"
        return self.truncate_to(offset, f"{leader}, has epoch {diverging.epoch} up to {diverging.end_offset}; {ours}")

    def _rebuild_below_high_watermark(self, offset: int, diverging: Diverging) -> Effect:
        """An unclean election may have lost what was committed. Without one, the leader has lost it in another way."""
        why = f"the leader's log diverges from ours at {offset}, below the high watermark {self.high_watermark}"
        if self.assignment.unclean_epoch > self.epochs.latest_epoch or diverging.end_offset >= self.high_watermark:
            return RestartLog(why)
        leader = f"broker {self.assignment.leader}, which leads in leader epoch {self.assignment.leader_epoch}"
        theirs = f"{leader}, has epoch {diverging.epoch} up to {diverging.end_offset}"
        return SetAside(f"{why}; ours ends at {self.log_end_offset}; {theirs}, and no unclean election explains it")

    @event
    def truncate_to(self, offset: int, reason: str = "") -> list[Effect]:
        """Ask the shell to cut the log at `offset`. `truncated` then changes the state: a full disk may refuse the cut.

        The history is saved first. After a crash in between, the next start completes it from the uncut batches.
        """
        invariant(offset >= self.high_watermark, "truncation below the high watermark")
        history = self.epochs.truncate_to(offset)
        if offset >= self.log_end_offset:
            return self._set_epochs(history)
        return [*self._save_epochs(history), TruncateLog(offset, reason)]

    @event
    def truncated(self, producers: ProducerStates, log_end_offset: int) -> list[Effect]:
        """The shell has cut the log, and rebuilt the producers from it.

        The cut may be the beginning of a batch, below the offset asked for. All state follows the log (KAFKA-5435).
        """
        self._move(ReplicaEvent.TRUNCATED)
        invariant(log_end_offset >= self.high_watermark, "a cut below the high watermark")
        self.producers = producers
        producers.committed(self.high_watermark)
        self.log_end_offset = log_end_offset
        return self._set_epochs(self.epochs.truncate_to(log_end_offset))

    @event
    def follower_appended(self, batches: Sequence[BatchInfo], leader_high_watermark: int) -> list[Effect]:
        """The shell has written these batches of the leader unchanged."""
        self._move(ReplicaEvent.FOLLOWER_APPENDED)
        history = self.epochs
        for batch in batches:
            invariant(batch.base_offset == self.log_end_offset, "a gap in what the leader sent")
            invariant(batch.leader_epoch <= self.assignment.leader_epoch, "a batch from a later epoch")
            if batch.leader_epoch != history.latest_epoch:
                history = history.assign(batch.leader_epoch, batch.base_offset)
            self._remember(batch)
        return [*self._set_epochs(history), *self._raise_high_watermark(leader_high_watermark)]

    @event
    def restarted(self, log: RecoveredLog) -> None:
        """The log was dropped. It is empty and begins at the leader's log start, or at what the topic has already
        (`begins_anew`): what lies below is committed.

        A full disk may have allowed only a part of that. The recovered log says what is left.
        """
        self._move(ReplicaEvent.RESTARTED)
        self._follow_log(log)

    @property
    def has_other_copy(self) -> bool:
        """Whether another replica has all that is committed, so that this one can be rebuilt from it."""
        if self.role is Role.LEADER:
            return any(member != self.me for member in self.assignment.isr)
        return self.role is Role.FOLLOWER and self.assignment.leader not in (-1, self.me)

    @property
    def first_offset(self) -> int:
        """The first offset that readers are given. Batches go whole: that of this offset may have deleted records.

        What was deleted is committed, but this replica may not know that yet.
        """
        return max(self.log_start_offset, min(self.deleted_before, self.high_watermark))

    @property
    def last_stable_offset(self) -> int:
        """Below this offset every transaction is decided, and the decision is committed. It never falls.

        KAFKA-9491: a follower learns its log start before it learns that every transaction below it is decided.
        """
        return max(self.producers.transactions.last_stable_offset(self.high_watermark), self.log_start_offset)

    def check_lineage(self, leader_epoch: int, offset: int, last_epoch: int) -> None:
        """Check that a reader's last record, which is before `offset` and of `last_epoch`, is in the log (KIP-320).

        Raises LogTruncationError if it is not. Raises UnknownLeaderEpochError if the reader must ask a later leader.
        """
        self.check_leader(leader_epoch)
        read = FetchPosition(self.assignment.leader_epoch, offset, last_epoch)
        check_lineage(self.epochs, self.log_start_offset, self.log_end_offset, read)

    def check_read(self, leader_epoch: int, offset: int, *, read_committed: bool = False) -> int:
        """The end (exclusive) of what a consumer may read from `offset` on: high watermark or last stable offset.

        If it equals `offset`, there is nothing to read yet.
        """
        leadership = self.check_leader(leader_epoch)
        if self.first_offset <= offset <= self.log_end_offset:
            return max(self.last_stable_offset if read_committed else self.high_watermark, offset)
        if offset > self.log_end_offset and self.high_watermark < leadership.epoch_start_offset:
            raise OffsetNotAvailableError("the new leader does not know yet what is committed")
        raise OffsetOutOfRangeError(f"offset {offset} is outside {self.first_offset} to {self.high_watermark}")

    def latest_offset(self, leader_epoch: int, *, read_committed: bool = False) -> int:
        """The high watermark, or the last stable offset; never lower than one shown before (KIP-207), or than the first
        offset: records of an undecided transaction may have been deleted.
        """
        leadership = self.check_leader(leader_epoch)
        if self.high_watermark < leadership.epoch_start_offset:
            raise OffsetNotAvailableError("the new leader does not know yet what is committed")
        return max(self.last_stable_offset if read_committed else self.high_watermark, self.first_offset)

    @event
    def advance_log_start(self, offset: int) -> list[Effect]:
        """Raise the log start to `offset`, where a batch begins, and the high watermark at least as far (KAFKA-9491).

        A leader keeps undecided transactions. If it dropped them, the next leader, whose log starts earlier, would
        still have them: its last stable offset would be lower, and the latest offset shown would fall (KIP-207).
        """
        if offset <= self.log_start_offset:
            return []
        self._move(ReplicaEvent.LOG_START_ADVANCED)
        # What lies below a leader's log start is committed.
        bound = self.last_stable_offset if self.role is Role.LEADER else self.log_end_offset
        invariant(offset <= bound, "log start past what is committed")
        self.log_start_offset = offset
        self.producers.start_at(offset)
        raised = self._raise_high_watermark(offset)
        # The history is not saved: the next start removes the same part from the saved one.
        self.epochs = self.epochs.start_at(offset)
        return [AdvanceLogStart(offset), *raised]

    def purgeable_to(self, offset: int, now_ms: int) -> int:
        """Up to which offset, `offset` at most, compaction may remove tombstones and markers.

        A follower that copies the log now gets them first: otherwise it would have to begin again.
        """
        leadership = self.leadership
        return offset if leadership is None else min([offset, *leadership.copied_to(now_ms, self.lag_max_ms)])

    @event
    def compacted(self, purge_offset: int) -> None:
        """The shell has put a compacted segment into the log. Tombstones and markers below the offset may be gone."""
        self._move(ReplicaEvent.COMPACTED)
        committed = purge_offset <= max(self.high_watermark, self.purge_offset)
        invariant(committed, "deletions up to %d go, %d is committed", purge_offset, self.high_watermark)
        self.purge_offset = max(self.purge_offset, purge_offset)

    @event
    def swept(self, offset: int) -> None:
        """The shell has ended a pass of compaction over what is below the offset."""
        self._move(ReplicaEvent.COMPACTED)
        self.producers.transactions.swept(offset)

    @event
    def expire_producers(self, before_ms: int, ended_before_ms: int) -> list[int]:
        """Forget idle producers: those whose last append has an append time before `before_ms` (UTC), and those whose
        last transaction ended before `ended_before_ms`.
        """
        return self.producers.expire(before_ms, ended_before_ms)

    @event
    def configure(self, min_insync_replicas: int, deleted_before: int = 0) -> None:
        """The topic's min.insync.replicas, and before which offset its records were deleted.

        What that commits is found by the `assign` that follows: settings and ISR belong together. A minimum that was
        lowered since another leader was elected would commit what the old leader alone has.
        """
        self.min_insync_replicas = min_insync_replicas
        self.deleted_before = max(self.deleted_before, deleted_before)
