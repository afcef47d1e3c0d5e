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
        return Counter(one.leader for one in self.topic.partitions if one.leader is not None)

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
    """A line for each broker, then one for each partition; the killed broker and what it led stand out."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    found.add_column("")
    for snapshot in snapshots:
        found.add_column(snapshot.title)
    ids = sorted({broker.id for snapshot in snapshots for broker in snapshot.brokers})
    for broker in ids:
        cells = (_broker(snapshot, broker, victim) for snapshot in snapshots)
        found.add_row(f"broker {broker}", *cells, end_section=broker == ids[-1])
    for number in range(len(snapshots[0].topic.partitions)):
        found.add_row(f"partition {number}", *(_partition(snapshot, number, victim) for snapshot in snapshots))
    return found


def _broker(snapshot: Snapshot, broker: int, victim: int) -> str:
    found = next((one for one in snapshot.brokers if one.id == broker), None)
    if found is None:
        return "[red]gone[/]"
    text = f"executor {found.executor_id}, leads {snapshot.leads()[broker]}"
    return f"[yellow]{text}[/]" if broker == victim else text


def _partition(snapshot: Snapshot, number: int, victim: int) -> str:
    one = snapshot.topic.partitions[number]
    leader = "[red]none[/]" if one.leader is None else str(one.leader)
    if one.leader == victim:
        leader = f"[yellow]{leader}[/]"
    whole = set(one.isr) == set(one.replicas)
    isr = ",".join(str(broker) for broker in sorted(one.isr))
    return f"leader {leader}  ISR {isr if whole else f'[red]{isr}[/]'}"
