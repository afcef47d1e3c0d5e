"""What a seed decides about transactions: most schedules have none, which keeps them short."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from spark_broker.config import ClusterSettings
from spark_broker.testing.simulation.swarm import Swarm

SHARE = 0.25
"""Share of the schedules that have transactions."""

SEGMENT_BYTES = 2560
"""Small segments: only sealed ones are compacted."""

EXPIRY_MS = 1500
"""What the fault "expire producers" calls idle. Longer than a coordinator's confirmation holds (`core.leadership`)."""

FAULTS: Mapping[str, float] = {
    "kill coordinator before markers": 4,
    "kill leader before marker": 4,
    "pause coordinator before markers": 3,
    "freeze transactional client": 4,
    "kill transactional client": 4,
    "expire producers": 3,
}
"""Kinds of faults that aim at transactions, and how often each comes where a seed has chosen it."""


@dataclass(frozen=True, slots=True)
class TransactionDraw:
    """The draw of one seed. Times are virtual; shares are of the transactions."""

    producers: int  # transactional ids with one writer
    applications: int  # transactional ids with many writers
    writes: int  # like applications, but each version is an application for a single use
    plain_producers: int
    state_partitions: int
    state_replicas: int
    state_min_isr: int
    clean_ms: float  # between two looks for something to compact; 0: nobody looks
    retention_ms: int  # of tombstones
    end_keys_max: int  # tombstones in one append
    timeout_ms: int
    step_ms: float
    appends_max: int
    abort_share: float
    idle_share: float
    repeat_share: float
    restart_share: float  # of the versions, after which an application is stopped and restarts
    duplicate_rate: float
    late_rate: float
    reads_uncommitted: bool
    abrupt_end: bool
    faults: Mapping[str, float]

    @staticmethod
    def draw(seed: int) -> TransactionDraw | None:
        """None: the schedule has no transactions."""
        rng = random.Random(f"{seed}/transactions draw")
        if rng.random() >= SHARE:
            return None
        producers, applications = rng.choice([(1, 0), (2, 0), (0, 1), (1, 1)])
        share = rng.choice([0.2, 0.5])
        writes = _writes(seed) if applications else 0
        cleaning = random.Random(f"{seed}/transactions' cleaning draw")
        return TransactionDraw(
            producers=producers,
            applications=applications,
            writes=writes,
            plain_producers=rng.choice([0, 0, 1]),
            state_partitions=rng.choice([1, 1, 2]),
            state_replicas=rng.choice([2, 3, 3]),
            state_min_isr=rng.choice([1, 2, 2]),
            clean_ms=rng.choice([100.0, 400.0, 0.0]),
            retention_ms=cleaning.choice([0, 200, 2000]),
            end_keys_max=cleaning.choice([1, 3, 10]),
            timeout_ms=rng.choice([200, 200, 400] if writes else [300, 1000, 2500]),
            step_ms=rng.choice([4.0, 15.0, 40.0]),
            appends_max=rng.choice([2, 4, 6]),
            abort_share=rng.choice([0.1, 0.3, 0.6]),
            idle_share=rng.choice([0.0, 0.05, 0.2]),
            repeat_share=rng.choice([0.0, 0.3]),
            restart_share=rng.choice([0.0, 0.5]),
            duplicate_rate=rng.choice([0.0, 0.0, 0.3]),
            late_rate=rng.choice([0.0, 0.0, 0.2]),
            reads_uncommitted=rng.random() < 0.2,
            abrupt_end=rng.random() < 0.3,
            faults={name: weight * rng.choice([0.3, 1, 3]) for name, weight in FAULTS.items() if rng.random() < share},
        )

    @property
    def length(self) -> int:
        """How many times as many events as usual: only after a while are names forgotten, and used once more."""
        return 3 if self.writes else 1

    def adapt(self, swarm: Swarm) -> Swarm:
        """The schedule's other settings, with those of its transactions."""
        cluster = replace(
            swarm.settings.cluster,
            # An application for a single use is forgotten after this time: soon enough for a schedule to see it.
            transaction_max_timeout_ms=self.timeout_ms
            if self.writes
            else swarm.settings.cluster.transaction_max_timeout_ms,
            transaction_state_log_num_partitions=self.state_partitions,
            transaction_state_log_replication_factor=self.state_replicas,
            transaction_state_log_min_isr=self.state_min_isr,
        )
        expires = "expire producers" in self.faults
        topic = swarm.settings.topic
        if self.clean_ms:  # User topics name their own policy. These defaults are for the topic of the coordinators.
            topic = replace(
                topic,
                segment_bytes=min(topic.segment_bytes, SEGMENT_BYTES),
                min_cleanable_dirty_ratio=0.0,
                delete_retention_ms=self.retention_ms,
            )
        return replace(
            swarm,
            settings=ClusterSettings(cluster=cluster, topic=topic),
            faults={**swarm.faults, **self.faults},
            # Less of everything else: the events of a schedule are limited, and a transaction takes fifty.
            producers=self.plain_producers,
            consumers=1,
            produce_interval_ms=max(swarm.produce_interval_ms, 25.0),
            fault_interval_ms=max(swarm.fault_interval_ms, 120.0),
            # Without transactions no coordinator tells a late batch from a new producer's first one: the expiry must be
            # longer than every retry, and here it is not.
            plain_share=1.0 if expires else swarm.plain_share,
            clock_skew_ms=0 if expires else swarm.clock_skew_ms,
        )


def _writes(seed: int) -> int:
    """A generator of its own: other draws of the seed stay as they were."""
    return random.Random(f"{seed}/writes draw").choice([0, 0, 1])
