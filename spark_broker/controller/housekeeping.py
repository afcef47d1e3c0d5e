"""The controller's timed decisions, one after the other. Each uses the image that the last one made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spark_broker.config import ClusterConfig
from spark_broker.controller.absence import Absences
from spark_broker.controller.cluster_loss import begin_anew
from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.fencing import drop_absent
from spark_broker.controller.healing import fill_up, heal
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.leader_balance import balance_leaders
from spark_broker.controller.log_ends import LogEnds
from spark_broker.controller.reassignment import moves_in_progress, retry_completions
from spark_broker.controller.records import MetadataRecord
from spark_broker.controller.replica_balance import balance_replicas
from spark_broker.controller.unclean import elect_allowed

INTERVAL_MS = 250
FIRST_BALANCE_MS = 10_000
"""Time from a start to the first balancing of leaders: the last brokers are back by then (Kafka: 5 s)."""


Decide = Callable[[MetadataImage, int], tuple[MetadataRecord, ...]]


@dataclass(frozen=True, slots=True)
class TimedDecision:
    """Records, and the reason that the log gives for the partitions that they change."""

    why: str
    records: tuple[MetadataRecord, ...]


@dataclass
class Housekeeping:
    """Timed decisions. `joined`: brokers that are to get their share of replicas."""

    config: ClusterConfig
    absences: Absences
    joined: set[int]
    log_ends: LogEnds
    disks: Disks = ALL_WELL
    next_due_ms: int = 0
    next_leader_balance_ms: int = 0

    def tick(self, image: MetadataImage, disks: Disks, now_ms: int) -> tuple[TimedDecision, ...]:
        """The decisions that are due now, in order."""
        self.disks = disks
        if now_ms < self.next_due_ms:
            return ()
        self.next_due_ms = now_ms + INTERVAL_MS
        decisions: list[TimedDecision] = []
        self.log_ends.forget_led(image)
        for why, decide in self._rules():
            records = decide(image, now_ms)
            if records:
                image = image.apply(records)
                decisions.append(TimedDecision(why, records))
        return tuple(decisions)

    def _rules(self) -> tuple[tuple[str, Decide], ...]:
        return (
            ("members of the ISR stay away", self._drop_absent),
            ("unclean.leader.election.enable of the topic", self._elect_allowed),
            ("every broker that had replicas stays away: their disks count as lost", self._begin_anew),
            ("replicas move away from brokers that stay away", self._heal),
            ("there are brokers for replicas that were lacking", self._fill_up),
            ("moves of replicas end", self._complete_moves),
            ("replicas move to brokers that joined", self._share),
            ("preferred replicas lead again", self._balance_leaders),
        )

    def _drop_absent(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        away = self.absences.away_for(self.config.broker_session_timeout_ms, now_ms)
        return drop_absent(image, away) if away else ()

    def _elect_allowed(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        away = self.absences.away_for(self.config.broker_session_timeout_ms, now_ms)
        return elect_allowed(image, self.log_ends, away, self.disks)

    def _begin_anew(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        lost = self.absences.all_lost_for(self.config.cluster_loss_delay_ms, now_ms)
        return begin_anew(image, lost, self.absences.replaced, self.disks)

    def _heal(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        away = self.absences.away_for(self.config.replica_reassignment_delay_ms, now_ms)
        return heal(image, away, self.config.replica_reassignment_max_partitions, self.disks) if away else ()

    def _fill_up(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        del now_ms
        return fill_up(image, self.config.replica_reassignment_max_partitions, self.disks)

    def _complete_moves(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        del now_ms
        return retry_completions(image, self.disks)

    def _share(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        del now_ms
        live = [broker for broker in sorted(self.joined) if image.is_live(broker) and broker not in self.disks.full]
        if not live:
            return ()
        records = balance_replicas(image, live, self.config.replica_reassignment_max_partitions, self.disks)
        if not records and not moves_in_progress(image, self.disks):
            # Replicas are balanced, or no move keeps the failure domains: these brokers are now like the others.
            self.joined.difference_update(live)
        return records

    def _balance_leaders(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        if self.absences.just_begun(FIRST_BALANCE_MS, now_ms):
            self.next_leader_balance_ms = now_ms
        if now_ms < self.next_leader_balance_ms or not self.config.auto_leader_rebalance_enable:
            return ()
        self.next_leader_balance_ms = now_ms + self.config.leader_imbalance_check_interval_ms
        return balance_leaders(image, self.config.leader_imbalance_per_broker_percentage, self.disks)
