"""What a seed decides before anything happens: the cluster's size, its settings, and which faults come how often.

Every seed draws its own mix (swarm testing): a schedule with all faults at once never gets far enough to show the bug
that needs only two of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from spark_broker.config import ClusterConfig, ClusterSettings, TopicConfig

FAULTS: Mapping[str, float] = {
    "kill broker": 4,
    "bounce broker": 4,
    "kill leader": 4,
    "bounce follower, kill leader": 4,
    "stop broker": 1,
    "pause broker": 3,
    "lose machine": 3,
    "spark lost": 2,
    "isolate broker": 3,
    "one way": 3,
    "cut from controller": 3,
    "clog": 2,
    "break streams": 4,
    "kill controller": 2,
    "depose controller": 1,
    "kill driver": 0.5,
    "disk full": 1,
    "disk error": 1,
    "torn write": 2,
    "failed sync, lost power": 2,
    "slow follower": 3,
    "lose joining follower": 2,
    "elect preferred": 2,
    "reassign": 1.5,
    "new partitions": 0.5,
    "new topic": 0.5,
    "change minimum": 1,
    "delete records": 3,
}
"""Kinds of faults and of administration, and how often each comes where a seed has chosen it."""


@dataclass(frozen=True, slots=True)
class Swarm:
    """The draw of one seed. Times are virtual."""

    brokers: int
    partitions: int
    replication_factor: int
    min_insync_replicas: int
    producers: int
    consumers: int
    latency_ms: float
    spike_rate: float
    loss_rate: float
    store_latency_ms: float
    store_fault_rate: float
    produce_interval_ms: float
    in_flight_max: int
    plain_share: float
    delivery_timeout_ms: int
    fault_interval_ms: float
    fetch_pause_ms: float
    late_rate: float
    restart_ms: float
    signal_ms: float
    clock_skew_ms: int
    idempotent_open_max: int
    faults: Mapping[str, float]
    settings: ClusterSettings
    topic_allows_unclean_election: bool = False
    reader_wait_ms: int = 0  # how long a reader's fetch waits for records
    alone_ms: float = 0.0  # how much later than the first one the other brokers are launched

    @staticmethod
    def draw(rng: random.Random) -> Swarm:
        """The same generator gives the same draw."""
        brokers = rng.choice([3, 3, 3, 4, 5])
        replication_factor = rng.choice([2, 3, 3, 3])
        share = rng.choice([0.07, 0.12, 0.25, 0.6])
        faults = {name: weight * rng.choice([0.3, 1, 3]) for name, weight in FAULTS.items() if rng.random() < share}
        return Swarm(
            brokers=brokers,
            partitions=rng.choice([1, 1, 1, 2, 3]),
            replication_factor=replication_factor,
            min_insync_replicas=rng.choice([1, 2, 2]),
            producers=rng.choice([1, 1, 2]),
            consumers=rng.choice([0, 1, 1]),
            latency_ms=rng.choice([0.5, 2.0, 8.0]),
            spike_rate=rng.choice([0.0, 0.02, 0.1]),
            loss_rate=rng.choice([0.0, 0.0, 0.1, 0.4]),
            store_latency_ms=rng.choice([1.0, 5.0, 40.0]),
            store_fault_rate=rng.choice([0.0, 0.0, 0.05]),
            produce_interval_ms=rng.choice([8.0, 25.0, 80.0]),
            in_flight_max=rng.choice([1, 5, 5]),
            plain_share=rng.choice([0.0, 0.2, 0.5]),
            delivery_timeout_ms=rng.choice([1_500, 120_000, 120_000]),
            fault_interval_ms=rng.choice([60.0, 200.0, 500.0]),
            fetch_pause_ms=rng.choice([0.0, 0.0, 15.0, 60.0]),
            late_rate=rng.choice([0.0, 0.1, 0.4]),
            restart_ms=rng.choice([20.0, 200.0, 800.0]),
            signal_ms=rng.choice([5.0, 100.0, 1000.0]),
            clock_skew_ms=rng.choice([0, 0, 1000, 60_000]),
            idempotent_open_max=rng.choice([3, 8]),
            faults=faults,
            settings=_settings(rng),
        )


def _settings(rng: random.Random) -> ClusterSettings:
    """Short times, so that what takes minutes in a cluster happens within a schedule."""
    heartbeat_ms = rng.choice([250, 400])
    cluster = ClusterConfig(
        broker_heartbeat_interval_ms=heartbeat_ms,
        broker_session_timeout_ms=rng.choice([2, 4]) * heartbeat_ms,
        controller_reconnect_grace_ms=rng.choice([50, 300]),
        replica_lag_time_max_ms=rng.choice([300, 1000, 3000]),
        replica_fetch_wait_max_ms=rng.choice([150, 400]),
        replica_fetch_response_max_bytes=rng.choice([1500, 16_777_216]),
        replica_fetch_max_bytes=rng.choice([1024, 4_194_304]),
        replica_high_watermark_checkpoint_interval_ms=rng.choice([200, 1000, 5000]),
        replica_reassignment_delay_ms=rng.choice([-1, 2000, 30_000]),
        leader_imbalance_check_interval_ms=rng.choice([700, 300_000]),
        log_flush_interval_ms=rng.choice([500, 60_000]),
        log_retention_check_interval_ms=300_000,
        request_timeout_ms=rng.choice([150, 1000]),
        # Above the two minutes by which drawn clocks may differ: a broker that is always fenced would test nothing.
        controller_clock_skew_fence_ms=130_000,
        metadata_log_max_records_between_snapshots=rng.choice([20, 1000]),
    )
    topic = TopicConfig(
        segment_bytes=rng.choice([2048, 2048, 1_073_741_824]),
        flush_messages=rng.choice([1, 2**63 - 1, 2**63 - 1]),
    )
    return ClusterSettings(cluster=cluster, topic=topic)
