"""What a seed decides about consumer groups: few schedules have any, and none that has transactions."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from spark_broker.config import ClusterSettings
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.transaction_draw import TransactionDraw
from spark_broker.testing.simulation.unclean import SHARE as UNCLEAN_SHARE

SHARE = 0.12
"""Share of the schedules that have groups."""

SHARE_OF_UNCLEAN = 0.5
"""The share where elections are unclean: there a committed offset needs its leader epoch (known bug 17)."""

LEFT_OUT = frozenset({"delete records"})
"""A group whose position is moved on by deleted records commits past records that were not handed out, by design. And
only its coordinator may shorten the log of committed offsets."""


STRAND = "strand coordinator"
"""The coordinator of a group does not learn that another broker leads now."""


COMMIT_BYTES = 4096
"""A commit for every partition fits, also where names are at their longest."""


@dataclass(frozen=True, slots=True)
class GroupDraw:
    """The draw of one seed. Times are virtual. A group has one member, which is assigned everything."""

    groups: int
    commit_ms: float  # from a poll that has moved the position to the commit
    life_ms: float  # after which a member goes; its successor resumes from what is committed
    crash_share: float  # of the members that go, those that go without a last commit
    restart_share: float  # of the leader changes that a member sees: it is killed then, and another resumes
    rest_ms: float  # until the successor begins
    offsets_partitions: int
    offsets_replicas: int
    offsets_min_isr: int
    clean_ms: float  # between two looks for something to compact; 0: nobody looks
    strand_share: float  # faults that strand a coordinator, for each other fault

    @staticmethod
    def draw(seed: int) -> GroupDraw | None:
        """None: the schedule has no groups."""
        rng = random.Random(f"{seed}/groups draw")
        unclean = random.Random(f"{seed}/unclean draw").random() < UNCLEAN_SHARE
        if rng.random() >= (SHARE_OF_UNCLEAN if unclean else SHARE) or TransactionDraw.draw(seed) is not None:
            return None
        drawn = GroupDraw(
            groups=rng.choice([1, 1, 2]),
            commit_ms=rng.choice([10.0, 10.0, 60.0, 250.0]),
            life_ms=rng.choice([150.0, 500.0, 2000.0]),
            crash_share=rng.choice([0.2, 0.5, 1.0]),
            restart_share=rng.choice([0.0, 0.3, 0.9]),
            rest_ms=rng.choice([1.0, 60.0]),
            offsets_partitions=rng.choice([1, 1, 2]),
            offsets_replicas=rng.choice([2, 3, 3]),
            offsets_min_isr=rng.choice([1, 2, 2]),
            clean_ms=rng.choice([30.0, 120.0, 500.0, 0.0]),
            strand_share=rng.choice([0.0, 0.05, 0.2]),
        )
        return drawn._hasty() if unclean else drawn

    def _hasty(self) -> GroupDraw:
        """For unclean elections: the group commits records that only the leader has, even if followers fall behind, and
        a successor of the member meets the next leader."""
        return replace(self, commit_ms=10.0, restart_share=0.9, offsets_replicas=1, offsets_min_isr=1)

    def adapt(self, swarm: Swarm) -> Swarm:
        """The schedule's other settings, with those of its groups."""
        cluster = replace(
            swarm.settings.cluster,
            offsets_topic_num_partitions=self.offsets_partitions,
            offsets_topic_replication_factor=self.offsets_replicas,
        )
        # User topics name their own minimum; this default is for topics that the cluster creates by itself.
        topic = replace(
            swarm.settings.topic,
            min_insync_replicas=min(self.offsets_min_isr, self.offsets_replicas),
            segment_bytes=max(swarm.settings.topic.segment_bytes, COMMIT_BYTES),
        )
        faults = {name: weight for name, weight in swarm.faults.items() if name not in LEFT_OUT}
        if self.strand_share and self.offsets_replicas > 1:
            faults[STRAND] = self.strand_share * (sum(faults.values()) or 1.0)
        return replace(
            swarm,
            settings=ClusterSettings(cluster=cluster, topic=topic),
            faults=faults,
            consumers=0,  # the members read everything as well
        )
