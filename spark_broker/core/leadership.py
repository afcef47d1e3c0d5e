"""What a replica keeps only while it leads: its followers, the ISR that it proposes, the transactions it may write.

Each leader epoch has a new `Leadership`: a leader trusts nothing that an earlier leader knew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_broker.core.effects import ProposeIsr
from spark_broker.core.events import LeaderAndIsr
from spark_broker.core.progress import FollowerProgress
from spark_broker.errors import (
    NotLeaderOrFollowerError,
    StaleBrokerEpochError,
    UnknownLeaderEpochError,
    broken,
    invariant,
)

CONFIRMATION_MS = 60_000
"""A transaction that goes on is confirmed again after at most this long, or sooner if the coordinator says so. The
confirmation also renews the transaction's time-out at the coordinator."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The coordinator has added the partition to the transaction of this epoch. It is asked again at `until_ms`."""

    producer_epoch: int
    until_ms: int


class Leadership:
    """The leader's side of one leader epoch.

    Invariants: `followers` are the replicas of the assignment without the leader; at most one proposal is open, made at
    the assignment's partition epoch.
    """

    def __init__(
        self, me: int, assignment: LeaderAndIsr, epoch_start_offset: int, broker_epochs: Mapping[int, int], now_ms: int
    ) -> None:
        self._me = me
        self._assignment = assignment
        self._confirmed: dict[int, Confirmation] = {}  # by producer id, until the marker
        self.epoch_start_offset = epoch_start_offset
        self.proposed_isr: tuple[int, ...] | None = None
        self.followers: dict[int, FollowerProgress] = {}
        self._update_followers(broker_epochs, now_ms)

    def reassign(self, assignment: LeaderAndIsr, broker_epochs: Mapping[int, int], now_ms: int) -> None:
        """A newer assignment in the same leader epoch. It settles an open proposal."""
        if assignment.partition_epoch > self._assignment.partition_epoch:
            self.proposed_isr = None
        self._assignment = assignment
        self._update_followers(broker_epochs, now_ms)

    def check(self, assignment: LeaderAndIsr, log_end_offset: int) -> None:
        """Raises InvariantError where an invariant does not hold. `log_end_offset`: the leader's."""
        proposed = self.proposed_isr
        if self._assignment is not assignment:
            broken("a leadership of another assignment")
        if not 0 <= self.epoch_start_offset <= log_end_offset:
            broken("the epoch begins at %d", self.epoch_start_offset)
        if self._me in self.followers:
            broken("a leader that follows itself")
        if proposed is not None and self._me not in proposed:
            broken("the leader asks for an ISR %s without itself", proposed)

    def _update_followers(self, broker_epochs: Mapping[int, int], now_ms: int) -> None:
        """Forget what an earlier incarnation of a follower had fetched (KAFKA-14139)."""
        earlier_followers = self.followers
        self.followers = {}
        for broker in self._assignment.replicas:
            if broker == self._me:
                continue
            progress = earlier_followers.get(broker)
            epoch = broker_epochs.get(broker, -1)
            if progress is None or progress.broker_epoch != epoch:
                progress = FollowerProgress(epoch, progress.last_caught_up_ms if progress else now_ms)
            self.followers[broker] = progress

    def progress(self, follower: int, broker_epoch: int) -> FollowerProgress:
        """The progress of a follower that fetches.

        Raises NotLeaderOrFollowerError for a broker that is no follower. Raises StaleBrokerEpochError or
        UnknownLeaderEpochError for an older or a newer incarnation of the follower.
        """
        progress = self.followers.get(follower)
        if progress is None:
            raise NotLeaderOrFollowerError(f"broker {follower} is no replica of this partition")
        if broker_epoch < progress.broker_epoch:
            raise StaleBrokerEpochError(f"broker {follower} has epoch {progress.broker_epoch}, not {broker_epoch}")
        if broker_epoch > progress.broker_epoch:
            raise UnknownLeaderEpochError(f"broker {follower} with epoch {broker_epoch} is not known here yet")
        return progress

    @property
    def maximal_isr(self) -> frozenset[int]:
        """The current and the proposed ISR together: committed records are on all of it, whichever ISR is chosen."""
        return frozenset(self._assignment.isr) | frozenset(self.proposed_isr or ())

    def replicated_offset(self, log_end_offset: int) -> int:
        """Every member of the maximal ISR has everything below this offset; -1 while a member has not fetched yet."""
        ends = [log_end_offset]
        for broker in self.maximal_isr:
            if broker != self._me:
                progress = self.followers.get(broker)
                ends.append(progress.log_end_offset if progress else -1)
        return min(ends)

    def copied_to(self, now_ms: int, lag_max_ms: int) -> list[int]:
        """The log ends of the followers that have fetched within `lag_max_ms`."""
        progress = self.followers.values()
        return [p.log_end_offset for p in progress if p.last_fetch_ms >= 0 and now_ms - p.last_fetch_ms <= lag_max_ms]

    def grow(self, follower: int, live: Mapping[int, int], high_watermark: int) -> list[ProposeIsr]:
        """Propose a follower that has reached the high watermark and the start of the leader's epoch (known bug 11).

        A follower without room for the next batches is not proposed: it would leave and join the ISR again and again.
        """
        progress = self.followers[follower]
        needed = max(high_watermark, self.epoch_start_offset)
        if self.proposed_isr is not None or follower in self._assignment.isr or progress.log_end_offset < needed:
            return []
        if live.get(follower) != progress.broker_epoch or progress.no_room:
            return []
        reason = f"broker {follower} has caught up: it ends at {progress.log_end_offset}"
        return [self._propose((*self._assignment.isr, follower), live, reason=reason)]

    def shrink(
        self,
        broker_epochs: Mapping[int, int],
        high_watermark: int,
        log_end_offset: int,
        now_ms: int,
        lag_max_ms: int,
    ) -> list[ProposeIsr]:
        """Propose an ISR without members that lag too long, have no room or report that they lack committed records."""
        if self.proposed_isr is not None:
            return []
        lagging = {
            broker
            for broker in self._assignment.isr
            if (progress := self.followers.get(broker)) is not None
            and (progress.lacks(high_watermark) or progress.is_lagging(log_end_offset, now_ms, lag_max_ms))
        }
        if not lagging:
            return []
        kept = tuple(broker for broker in self._assignment.isr if broker not in lagging)
        epochs = {**broker_epochs}
        epochs.update({broker: p.broker_epoch for broker, p in self.followers.items()})
        lacking = tuple(broker for broker in sorted(lagging) if self.followers[broker].lacks(high_watermark))
        reason = "; ".join(
            f"broker {broker} {self.followers[broker].describe(log_end_offset, now_ms)}" for broker in sorted(lagging)
        )
        return [self._propose(kept, epochs, lacking, reason)]

    def _propose(
        self,
        isr: tuple[int, ...],
        broker_epochs: Mapping[int, int],
        lacking: tuple[int, ...] = (),
        reason: str = "",
    ) -> ProposeIsr:
        invariant(self.proposed_isr is None, "asked for ISR %s and for %s at a time", self.proposed_isr, isr)
        replicas = self._assignment.replicas
        invariant(set(isr) <= set(replicas), "asked for ISR %s of the replicas %s", isr, replicas)
        self.proposed_isr = isr
        members = tuple((broker, broker_epochs.get(broker, -1)) for broker in isr)
        return ProposeIsr(self._assignment.leader_epoch, self._assignment.partition_epoch, members, lacking, reason)

    def confirm(self, producer_id: int, producer_epoch: int, asked_ms: int, valid_ms: int) -> None:
        self._confirmed[producer_id] = Confirmation(producer_epoch, asked_ms + min(valid_ms, CONFIRMATION_MS))

    def is_confirmed(self, producer_id: int, producer_epoch: int, now_ms: int) -> bool:
        """Whether the producer's batches may be appended without asking the coordinator again."""
        confirmation = self._confirmed.get(producer_id)
        return (
            confirmation is not None
            and confirmation.producer_epoch == producer_epoch
            and now_ms < confirmation.until_ms
        )

    def forget_confirmation(self, producer_id: int) -> None:
        """A marker comes. For a batch that is on its way, the coordinator is asked again, and refuses it."""
        self._confirmed.pop(producer_id, None)
