"""What the demo shows of the cluster: brokers, leaders and ISR at three moments, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from spark_broker.client.admin import Admin
from spark_broker.model import BrokerInfo, TopicDescription


@dataclass(frozen=True)
class Snapshot:
    """The live brokers and the topic at one moment."""

    title: str
    brokers: tuple[BrokerInfo, ...]
    topic: TopicDescription

    def leads(self) -> Counter[int]:
        """Broker id to the number of partitions that it leads."""
        return Counter(partition.leader for partition in self.topic.partitions if partition.leader is not None)

    def isr_is_whole(self) -> bool:
        """Whether every replica is in sync."""
        return all(set(partition.isr) == set(partition.replicas) for partition in self.topic.partitions)

    def busiest(self) -> BrokerInfo:
        """The broker that leads the most partitions; the first of them by id."""
        leads = self.leads()
        return max(self.brokers, key=lambda broker: (leads[broker.id], -broker.id))


def take(admin: Admin, topic: str, title: str) -> Snapshot:
    """The cluster as it is now."""
    return Snapshot(title, admin.describe_cluster().brokers, admin.describe_topic(topic))


def table(snapshots: Sequence[Snapshot], victim: int) -> Table:
    """A line for each broker, then one for each partition; the killed broker and what it led stand out."""
    lines = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    lines.add_column("")
    for snapshot in snapshots:
        lines.add_column(snapshot.title)
    ids = sorted({broker.id for snapshot in snapshots for broker in snapshot.brokers})
    for broker in ids:
        cells = (_broker(snapshot, broker, victim) for snapshot in snapshots)
        lines.add_row(f"broker {broker}", *cells, end_section=broker == ids[-1])
    for number in range(len(snapshots[0].topic.partitions)):
        lines.add_row(f"partition {number}", *(_partition(snapshot, number, victim) for snapshot in snapshots))
    return lines


def _broker(snapshot: Snapshot, broker: int, victim: int) -> str:
    info = next((info for info in snapshot.brokers if info.id == broker), None)
    if info is None:
        return "[red]gone[/]"
    text = f"executor {info.executor_id}, leads {snapshot.leads()[broker]}"
    return f"[yellow]{text}[/]" if broker == victim else text


def _partition(snapshot: Snapshot, number: int, victim: int) -> str:
    partition = snapshot.topic.partitions[number]
    leader = "[red]none[/]" if partition.leader is None else str(partition.leader)
    if partition.leader == victim:
        leader = f"[yellow]{leader}[/]"
    whole = set(partition.isr) == set(partition.replicas)
    isr = ",".join(str(broker) for broker in sorted(partition.isr))
    return f"leader {leader}  ISR {isr if whole else f'[red]{isr}[/]'}"
