"""A firewall needs to know the ports: `broker.ports` for brokers, `driver.ports` for the controller and the keepers."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from spark_broker.config import load_cluster_settings
from spark_broker.driver.keeper_connections import KeeperConnections, KeeperListener
from spark_broker.errors import ClusterStartError, InvalidConfigError
from spark_broker.ports import ports_of, ports_to_try
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

LOOPBACK = "127.0.0.1"


def free_ports(count: int) -> range:
    """As many ports in a row that are free now, below those that the system gives to anybody who asks."""
    for first in range(20_000, 32_000, count):
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    taken.enter_context(socket.create_server((LOOPBACK, port)))
            except OSError:
                continue
            return range(first, first + count)
    raise AssertionError("no free ports")


def as_text(ports: range) -> str:
    return f"{ports[0]}-{ports[-1]}"


@pytest.mark.parametrize(
    ("text", "ports"),
    [("", [0]), ("9092", [9092]), ("9092-9094", [9092, 9093, 9094]), ("65535", [65535])],
)
def test_a_port_or_a_range_is_what_it_says(text: str, ports: list[int]) -> None:
    assert list(ports_of(text) or ()) == ports


@pytest.mark.parametrize("text", ["0", "9094-9092", "65536", "9092,9093", "-1", "any", "9092-", "0-10"])
def test_any_other_text_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"broker.ports = .*: must be .* such as 9092-9099"):
        load_cluster_settings({"broker.ports": text})


def test_a_remembered_port_is_tried_first_if_it_is_allowed() -> None:
    assert ports_to_try("", 9092) == [9092, 0]
    assert ports_to_try("", 0) == [0]
    assert ports_to_try("9091-9093", 9092) == [9092, 9091, 9093]
    assert ports_to_try("9091-9093", 4711) == [9091, 9092, 9093]


def listen(allowed: str) -> KeeperConnections:
    connections = KeeperConnections(LOOPBACK, cast("KeeperListener", None), allowed)
    connections.start()
    return connections


def test_keepers_are_accepted_on_the_first_port_that_is_free() -> None:
    ports = free_ports(2)
    first, second = listen(as_text(ports)), listen(as_text(ports))
    assert [first.port, second.port] == [*ports]
    with pytest.raises(ClusterStartError, match=rf"driver.ports = {as_text(ports)} .* -> driver.ports needs two ports"):
        listen(as_text(ports))
    for connections in (first, second):
        connections.close()


def brokers(cluster: ProcessCluster) -> list[int]:
    return sorted(int(address.rpartition(":")[2]) for address in cluster.bootstrap_servers.split(","))


def test_every_process_of_a_cluster_listens_where_it_may_and_one_without_a_port_says_why(tmp_path: Path) -> None:
    ports = free_ports(3)
    allowed = as_text(ports[:2])
    config = {"broker.ports": allowed, "driver.ports": str(ports[2])}
    with ProcessCluster(tmp_path, 3, config, output=tmp_path, live=2) as cluster:
        assert brokers(cluster) == [*ports[:2]]
        assert cluster.controller.port == ports[2]
        eventually(lambda: len(cluster.ended()) == 1, timeout_s=30)
        (without,) = cluster.ended()
        said = (tmp_path / f"slot-{without}.log").read_text()
        assert f"broker.ports = {allowed}: a broker can serve on none of these ports of 127.0.0.1" in said
