"""What a seed decides about groups whose members share partitions."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from spark_broker.config import ClusterSettings
from spark_broker.testing.simulation.group_draw import LEFT_OUT, GroupDraw
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.transaction_draw import TransactionDraw
from spark_broker.testing.simulation.unclean import SHARE as UNCLEAN_SHARE

SEGMENT_BYTES = 16_384
"""What one event of a group writes fits."""

SHARE = 0.12
"""Share of the schedules without other groups and transactions."""


@dataclass(frozen=True, slots=True)
class SharingDraw:
    """The draw of one seed. Times are virtual."""

    groups: int
    members: int  # of each group, at most
    partitions: int  # of a topic
    session_ms: int
    poll_interval_ms: int  # max.poll.interval.ms
    static_share: float  # of the members, those with an instance id
    pattern_share: float  # of the members, those that subscribe to a pattern
    listener_share: float  # of the members, those that take up partitions between two polls only
    commit_ms: float  # between automatic commits
    life_ms: float  # after which a member leaves, or dies
    crash_share: float  # of the members that go, those that die without a word
    freeze_share: float  # of the members that go, those that only stand still for a while
    rest_ms: float  # until the next life begins
    subscribe_ms: float  # between two changes of a subscription; 0: never
    inline_size_max: int  # a larger target is computed elsewhere
    offsets_partitions: int
    offsets_replicas: int
    offsets_min_isr: int
    clean_ms: float  # between two looks for something to compact; 0: nobody looks

    @staticmethod
    def draw(seed: int) -> SharingDraw | None:
        """None: the schedule has no such groups."""
        rng = random.Random(f"{seed}/sharing draw")
        unclean = random.Random(f"{seed}/unclean draw").random() < UNCLEAN_SHARE
        if rng.random() >= SHARE or unclean:
            return None
        if GroupDraw.draw(seed) is not None or TransactionDraw.draw(seed) is not None:
            return None
        return SharingDraw(
            groups=rng.choice([1, 1, 2]),
            members=rng.choice([2, 3, 3, 5, 8, 20]),
            partitions=rng.choice([2, 4, 4, 8]),
            session_ms=rng.choice([2000, 3000, 6000]),
            poll_interval_ms=rng.choice([1000, 3000, 6000]),
            static_share=rng.choice([0.0, 0.0, 0.3, 1.0]),
            pattern_share=rng.choice([0.0, 0.3, 1.0]),
            listener_share=rng.choice([0.0, 0.5, 1.0]),
            commit_ms=rng.choice([20.0, 100.0, 1000.0]),
            life_ms=rng.choice([200.0, 600.0, 2000.0]),
            crash_share=rng.choice([0.0, 0.3, 0.8]),
            freeze_share=rng.choice([0.0, 0.2, 0.5]),
            rest_ms=rng.choice([1.0, 60.0, 500.0]),
            subscribe_ms=rng.choice([0.0, 300.0, 1500.0]),
            inline_size_max=rng.choice([0, 10, 20_000]),
            offsets_partitions=rng.choice([1, 1, 2]),
            offsets_replicas=rng.choice([1, 2, 3, 3]),
            offsets_min_isr=rng.choice([1, 2]),
            clean_ms=rng.choice([30.0, 120.0, 500.0, 0.0]),
        )

    def adapt(self, swarm: Swarm) -> Swarm:
        """The schedule's other settings, with those of its groups."""
        cluster = replace(
            swarm.settings.cluster,
            offsets_topic_num_partitions=self.offsets_partitions,
            offsets_topic_replication_factor=self.offsets_replicas,
            group_min_session_timeout_ms=100,
            group_consumer_heartbeat_interval_ms=150,
            # Followers that fetch little at a time fall out of the ISR for ever, where many members keep writing.
            replica_fetch_max_bytes=max(swarm.settings.cluster.replica_fetch_max_bytes, SEGMENT_BYTES),
        )
        topic = replace(
            swarm.settings.topic,
            min_insync_replicas=min(self.offsets_min_isr, self.offsets_replicas),
            segment_bytes=max(swarm.settings.topic.segment_bytes, SEGMENT_BYTES),
        )
        return replace(
            swarm,
            partitions=self.partitions,
            settings=ClusterSettings(cluster=cluster, topic=topic),
            faults={name: weight for name, weight in swarm.faults.items() if name not in LEFT_OUT},
        )
