"""What the controller does of itself as time passes: one decision after the other, each on the image of the last."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spark_broker.config import ClusterConfig
from spark_broker.controller.absence import Absences
from spark_broker.controller.fencing import drop_absent
from spark_broker.controller.healing import heal
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.leader_balance import balance_leaders
from spark_broker.controller.log_ends import LogEnds
from spark_broker.controller.reassignment import moves_in_progress, retry_completions
from spark_broker.controller.records import MetadataRecord
from spark_broker.controller.replica_balance import balance_replicas
from spark_broker.controller.unclean import elect_allowed

INTERVAL_MS = 250


@dataclass
class Housekeeping:
    """Timed decisions. `joined`: brokers that are to get their share of replicas. `full`: those without room."""

    config: ClusterConfig
    absences: Absences
    joined: set[int]
    log_ends: LogEnds
    full: Collection[int]
    next_due_ms: int = 0
    next_leader_balance_ms: int | None = None

    def tick(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        """The records that are due now."""
        if now_ms < self.next_due_ms:
            return ()
        self.next_due_ms = now_ms + INTERVAL_MS
        records: list[MetadataRecord] = []
        self.log_ends.forget_led(image)
        for decide in (
            self._drop_absent,
            self._elect_allowed,
            self._heal,
            self._complete_moves,
            self._share,
            self._balance_leaders,
        ):
            decided = decide(image, now_ms)
            image = image.apply(decided) if decided else image
            records += decided
        return tuple(records)

    def _drop_absent(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        away = self.absences.away_for(self.config.broker_session_timeout_ms, now_ms)
        return drop_absent(image, away) if away else ()

    def _elect_allowed(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        return elect_allowed(
            image, self.log_ends, self.absences.away_for(self.config.broker_session_timeout_ms, now_ms)
        )

    def _heal(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        away = self.absences.away_for(self.config.replica_reassignment_delay_ms, now_ms)
        return heal(image, away, self.config.replica_reassignment_max_partitions, self.full) if away else ()

    def _complete_moves(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        del now_ms
        return retry_completions(image, self.full)

    def _share(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        del now_ms
        live = [broker for broker in sorted(self.joined) if image.is_live(broker)]
        if not live:
            return ()
        records = balance_replicas(image, live, self.config.replica_reassignment_max_partitions, self.full)
        if not records and not moves_in_progress(image):
            # Balanced, or nothing can be moved without loss of failure domains: it is a broker like the others now.
            self.joined.difference_update(live)
        return records

    def _balance_leaders(self, image: MetadataImage, now_ms: int) -> tuple[MetadataRecord, ...]:
        due = self.next_leader_balance_ms
        if due is None or now_ms >= due:
            self.next_leader_balance_ms = now_ms + self.config.leader_imbalance_check_interval_ms
        if due is None or now_ms < due or not self.config.auto_leader_rebalance_enable:
            return ()
        return balance_leaders(image, self.config.leader_imbalance_per_broker_percentage, self.full)
