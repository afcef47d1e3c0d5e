"""What happens to brokers, as steps of the stories that the tests tell."""

from __future__ import annotations

from collections.abc import Sequence

from spark_broker.controller.effects import ProbePort
from spark_broker.controller.events import HeartbeatReceived, PortProbed
from spark_broker.protocol.messages import HeartbeatRequest
from tests.unit.controller.cluster import Cluster, registration


def lose(cluster: Cluster, *brokers: int) -> None:
    """The processes end one after the other: the stream ends and the port refuses."""
    for broker in brokers:
        (probe,) = cluster.end_session(broker)
        assert isinstance(probe, ProbePort)
        cluster.handle(PortProbed(broker, probe.session_id, refused=True))


def register_again(cluster: Cluster, broker: int, start_kind: str = "process_crash") -> None:
    """A new process on the broker's directory; it is not ready yet."""
    directory = cluster.image.brokers[broker].directory_id
    cluster.register(registration(cluster.new_launch(), directory, broker_id=broker, start_kind=start_kind))


def come_back(cluster: Cluster, broker: int, start_kind: str = "process_crash") -> None:
    """A new process that is ready at once."""
    register_again(cluster, broker, start_kind)
    cluster.beat(broker)


def restarted(cluster: Cluster, **values: object) -> Cluster:
    """The driver starts again on the same metadata."""
    return Cluster(cluster.image, **values)  # type: ignore[arg-type]


def damage(cluster: Cluster, broker: int, partitions: Sequence[tuple[str, int]], number: int = 1) -> None:
    """The broker has opened its logs and reports these as quarantined. It has given the damage its `number`."""
    beat = HeartbeatRequest(
        broker_epoch=cluster.image.brokers[broker].epoch,
        metadata_offset=cluster.image.next_offset,
        sent_ms=cluster.now_ms,
        ready=True,
        damaged=[(*key, number) for key in partitions],
    )
    cluster.handle(HeartbeatReceived(cluster.session_of[broker], beat, cluster.now_ms))
