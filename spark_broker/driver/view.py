"""What a running cluster shows of itself: a status, and the same as a table in a notebook."""

from __future__ import annotations

import collections
import html
from dataclasses import dataclass

from spark_broker.addresses import address_text
from spark_broker.config import TopicConfig
from spark_broker.driver.directories import Directories
from spark_broker.model import BrokerInfo
from spark_broker.protocol.messages import MetadataResponse, TopicMetadata
from spark_broker.troubles import Trouble, troubles


@dataclass(frozen=True)
class BrokerView:
    """A broker, and how many partitions it leads, holds a replica of, and is in sync for."""

    broker: BrokerInfo
    leaders: int
    replicas: int
    in_sync: int


@dataclass(frozen=True)
class ClusterStatus:
    """The cluster at one moment, as its controller sees it. `failures`: launches that did not last, oldest first."""

    cluster_id: str
    controller_epoch: int
    bootstrap_servers: str
    log_dirs: str
    metadata_dir: str
    topics: int
    partitions: int
    leaderless_partitions: int
    under_replicated_partitions: int
    under_min_isr_partitions: int
    brokers: tuple[BrokerView, ...]
    failures: tuple[str, ...]

    @property
    def live_brokers(self) -> tuple[BrokerView, ...]:
        """The brokers that are not fenced."""
        return tuple(status for status in self.brokers if not status.broker.fenced)


COLUMNS = ("broker", "address", "executor", "pid", "leads", "replicas", "in sync", "state")


def broker_statuses(metadata: MetadataResponse) -> tuple[BrokerView, ...]:
    """Every registered broker with its share of the partitions, internal topics included."""
    partitions = [partition for topic in metadata.topics for partition in topic.partitions]
    leaders = collections.Counter(partition.leader for partition in partitions)
    replicas = collections.Counter(id_ for partition in partitions for id_ in partition.replicas)
    in_sync = collections.Counter(id_ for partition in partitions for id_ in partition.isr)
    return tuple(BrokerView(b.to_info(), leaders[b.id], replicas[b.id], in_sync[b.id]) for b in metadata.brokers)


def cluster_status(metadata: MetadataResponse, directories: Directories, failures: tuple[str, ...]) -> ClusterStatus:
    """The controller's answer as a status. Internal topics count."""
    found = [trouble for topic in metadata.topics for trouble in _troubles(topic)]
    return ClusterStatus(
        cluster_id=metadata.cluster_id,
        controller_epoch=metadata.controller_epoch,
        bootstrap_servers=",".join(address_text(b.host, b.port) for b in metadata.brokers if not b.fenced),
        log_dirs=directories.log_dirs,
        metadata_dir=directories.metadata_dir,
        topics=len(metadata.topics),
        partitions=sum(len(topic.partitions) for topic in metadata.topics),
        leaderless_partitions=found.count(Trouble.OFFLINE),
        under_replicated_partitions=found.count(Trouble.UNDER_REPLICATED),
        under_min_isr_partitions=found.count(Trouble.UNDER_MIN_ISR),
        brokers=broker_statuses(metadata),
        failures=failures,
    )


def _troubles(topic: TopicMetadata) -> list[Trouble]:
    """What the topic's partitions suffer from, each kind once for each partition."""
    minimum = int(topic.config.get("min.insync.replicas", TopicConfig().min_insync_replicas))
    return [kind for p in topic.partitions for kind in troubles(p, minimum)]


def table_rows(status: ClusterStatus) -> list[tuple[str, ...]]:
    """One row of `COLUMNS` per broker."""
    return [
        (
            str(broker.broker.id),
            broker.broker.address,
            broker.broker.executor_id,
            str(broker.broker.pid),
            str(broker.leaders),
            str(broker.replicas),
            str(broker.in_sync),
            "fenced" if broker.broker.fenced else "live",
        )
        for broker in status.brokers
    ]


def to_html(status: ClusterStatus) -> str:
    """The table that a notebook shows."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table_rows(status)
    )
    caption = (
        f"spark-broker cluster <code>{html.escape(status.cluster_id)}</code> at "
        f"<code>{html.escape(status.bootstrap_servers)}</code>: {status.topics} topics, "
        f"{status.partitions} partitions, {status.under_replicated_partitions} under-replicated, "
        f"{status.under_min_isr_partitions} under min.insync.replicas, {status.leaderless_partitions} without a leader"
    )
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
