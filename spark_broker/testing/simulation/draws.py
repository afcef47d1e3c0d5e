"""All that a seed decides about a schedule before it begins."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from spark_broker.config import ClusterSettings
from spark_broker.testing.simulation.bit_flips import with_bit_flips
from spark_broker.testing.simulation.clock_jumps import with_clock_jumps
from spark_broker.testing.simulation.compaction import CompactionDraw
from spark_broker.testing.simulation.disk_faults import with_disk_faults
from spark_broker.testing.simulation.group_draw import COMMIT_BYTES, GroupDraw
from spark_broker.testing.simulation.lone_start import with_lone_start
from spark_broker.testing.simulation.long_polls import with_long_polls
from spark_broker.testing.simulation.older_metadata import with_older_metadata
from spark_broker.testing.simulation.sharing_draw import SharingDraw
from spark_broker.testing.simulation.store import with_store_outages
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.tiering import TieringDraw
from spark_broker.testing.simulation.transaction_draw import TransactionDraw
from spark_broker.testing.simulation.unclean import with_unclean_elections


@dataclass(frozen=True, slots=True)
class Draws:
    """`swarm`: the size, the settings and the faults, with what the features of the schedule need. A feature is None
    where the schedule does not have it.
    """

    swarm: Swarm
    transactions: TransactionDraw | None = None
    groups: GroupDraw | None = None
    compaction: CompactionDraw | None = None
    tiering: TieringDraw | None = None
    sharing: SharingDraw | None = None

    @staticmethod
    def of(seed: int, draw: random.Random) -> Draws:
        """`draw` is for the swarm. Each feature has a generator of its own, which leaves the others as they are."""
        swarm = Swarm.draw(draw)
        transactions = TransactionDraw.draw(seed)
        if transactions is not None:
            swarm = transactions.adapt(swarm)
        groups = GroupDraw.draw(seed)
        if groups is not None:
            swarm = groups.adapt(swarm)
        sharing = SharingDraw.draw(seed)
        swarm = with_disk_faults(seed, with_store_outages(seed, with_bit_flips(seed, swarm)))
        swarm = with_long_polls(seed, with_older_metadata(seed, swarm))
        if transactions is None:
            swarm = with_clock_jumps(seed, with_unclean_elections(seed, swarm))
        compaction = CompactionDraw.draw(seed, swarm, transactional=transactions is not None)
        if compaction is not None:
            swarm = compaction.adapt(swarm)
        grouped = groups is not None or sharing is not None
        tiering = TieringDraw.draw(seed, swarm, compacts=compaction is not None, grouped=grouped)
        if tiering is not None:
            swarm = tiering.adapt(swarm)
        if sharing is not None:
            swarm = sharing.adapt(swarm)
        if grouped or transactions is not None:
            swarm = with_lone_start(seed, swarm)
        swarm = _with_small_internal_segments(swarm)
        return Draws(swarm, transactions, groups, compaction, tiering, sharing)

    @staticmethod
    def by_hand(swarm: Swarm, groups: GroupDraw | None) -> Draws:
        """For a scene."""
        swarm = swarm if groups is None else groups.adapt(swarm)
        return Draws(_with_small_internal_segments(swarm), groups=groups)


def _with_small_internal_segments(swarm: Swarm) -> Swarm:
    """Internal topics roll as often as others, but a commit fits into a segment."""
    cluster, segment_bytes = swarm.settings.cluster, swarm.settings.topic.segment_bytes
    cluster = replace(
        cluster,
        offsets_topic_segment_bytes=max(segment_bytes, COMMIT_BYTES),
        transaction_state_log_segment_bytes=segment_bytes,
    )
    return replace(swarm, settings=ClusterSettings(cluster=cluster, topic=swarm.settings.topic))
