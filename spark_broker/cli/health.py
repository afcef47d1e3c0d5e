"""What a cluster suffers from: `cluster status` counts it, `doctor` says where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from spark_broker.cli.output import counted
from spark_broker.config import TopicConfig
from spark_broker.model import ClusterDescription, PartitionInfo, TopicDescription
from spark_broker.troubles import Trouble, troubles

_MIN_ISR = "min.insync.replicas"


class Health(msgspec.Struct, frozen=True):
    """Counts. A partition may be offline and under-replicated, and counts as both."""

    brokers: int
    fenced_brokers: int
    partitions: int
    offline_partitions: int
    under_replicated_partitions: int
    under_min_isr_partitions: int

    @property
    def well(self) -> bool:
        """Whether nothing has to be done."""
        of_partitions = (self.offline_partitions, self.under_replicated_partitions, self.under_min_isr_partitions)
        return not any((self.fenced_brokers, *of_partitions))

    def __str__(self) -> str:
        fenced = f"{self.fenced_brokers} of {counted(self.brokers, 'broker', 'brokers')} fenced"
        offline = f"{self.offline_partitions} of {counted(self.partitions, 'partition', 'partitions')} offline"
        return (
            f"{fenced}; {offline}, {self.under_replicated_partitions} under-replicated, "
            f"{self.under_min_isr_partitions} under {_MIN_ISR}"
        )


@dataclass(frozen=True)
class Suffering:
    """A partition with what it suffers from."""

    partition: PartitionInfo
    troubles: set[Trouble]


def suffering(topic: TopicDescription) -> list[Suffering]:
    """The partitions that suffer from anything."""
    minimum = int(topic.config.get(_MIN_ISR, TopicConfig().min_insync_replicas))
    judged = (Suffering(p, troubles(p, minimum)) for p in topic.partitions)
    return [partition for partition in judged if partition.troubles]


def health(cluster: ClusterDescription, topics: Sequence[TopicDescription]) -> Health:
    """The counts. `cluster` has the fenced brokers, too."""
    sufferings = [partition.troubles for topic in topics for partition in suffering(topic)]
    return Health(
        brokers=len(cluster.brokers),
        fenced_brokers=sum(broker.fenced for broker in cluster.brokers),
        partitions=sum(len(topic.partitions) for topic in topics),
        offline_partitions=sum(Trouble.OFFLINE in found for found in sufferings),
        under_replicated_partitions=sum(Trouble.UNDER_REPLICATED in found for found in sufferings),
        under_min_isr_partitions=sum(Trouble.UNDER_MIN_ISR in found for found in sufferings),
    )
