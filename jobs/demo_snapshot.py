"""What the demo shows of the cluster: brokers, leaders and ISR at three moments, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from spark_broker.client.admin import Admin
from spark_broker.model import NO_LEADER, BrokerInfo, TopicDescription


@dataclass(frozen=True)
class Snapshot:
    """The live brokers and the topic at one moment."""

    title: str
    brokers: tuple[BrokerInfo, ...]
    topic: TopicDescription

    def leads(self) -> Counter[int]:
        """Broker id to the number of partitions that it leads."""
        return Counter(one.leader for one in self.topic.partitions if one.leader != NO_LEADER)

    def isr_is_whole(self) -> bool:
        """Whether every replica is in sync."""
        return all(set(one.isr) == set(one.replicas) for one in self.topic.partitions)

    def busiest(self) -> BrokerInfo:
        """The broker that leads the most partitions; the first of them by id."""
        leads = self.leads()
        return max(self.brokers, key=lambda broker: (leads[broker.id], -broker.id))


def take(admin: Admin, topic: str, title: str) -> Snapshot:
    """The cluster as it is now."""
    return Snapshot(title, admin.describe_cluster().brokers, admin.describe_topic(topic))


def table(snapshots: Sequence[Snapshot], victim: int) -> Table:
    """Brokers above, then one line for each partition; what the killed broker led stands out."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    found.add_column("")
    for snapshot in snapshots:
        found.add_column(snapshot.title)
    found.add_row("brokers", *(_brokers(snapshot, victim) for snapshot in snapshots), end_section=True)
    for number in range(len(snapshots[0].topic.partitions)):
        found.add_row(f"partition {number}", *(_partition(snapshot, number, victim) for snapshot in snapshots))
    return found


def _brokers(snapshot: Snapshot, victim: int) -> str:
    leads = snapshot.leads()
    lines = []
    for broker in snapshot.brokers:
        line = f"{broker.id} on executor {broker.executor_id}, leads {leads[broker.id]}"
        lines.append(f"[yellow]{line}[/]" if broker.id == victim else line)
    if victim not in {broker.id for broker in snapshot.brokers}:
        lines.append(f"[red]{victim} is gone[/]")
    return "\n".join(lines)


def _partition(snapshot: Snapshot, number: int, victim: int) -> str:
    one = snapshot.topic.partitions[number]
    leader = "[red]none[/]" if one.leader == NO_LEADER else str(one.leader)
    if one.leader == victim:
        leader = f"[yellow]{leader}[/]"
    whole = set(one.isr) == set(one.replicas)
    isr = ",".join(str(broker) for broker in sorted(one.isr))
    return f"leader {leader}  ISR {isr if whole else f'[red]{isr}[/]'}"
