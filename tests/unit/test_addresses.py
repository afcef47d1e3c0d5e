"""What is announced as an address is what clients take, of IPv6 as well."""

from __future__ import annotations

import atexit
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn, cast

import pytest

from spark_broker.addresses import address_text, without_brackets
from spark_broker.client.settings import Address, parse_addresses
from spark_broker.config import load_cluster_settings
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.driver.controller_link import ControllerLink
from spark_broker.driver.directories import choose_directories
from spark_broker.driver.executors import _host
from spark_broker.errors import ClusterStartError
from spark_broker.model import BrokerInfo
from tests.driver.running_host import EXECUTOR, RunningHost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BROKER = BrokerInfo(0, "", 9092, None, 0, 0, "", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "node-1.example.org", "::1", "fe80::1%eth0"])
def test_what_a_broker_announces_is_parsed_into_its_host(host: str) -> None:
    """Story: `::1:9092` was announced, which no client took, and `[::1]:9092` had a host that no system knows."""
    announced = dataclasses.replace(BROKER, host=host).address
    assert parse_addresses((announced,)) == (Address(host, 9092),)
    assert str(Address(host, 9092)) == announced == address_text(host, 9092)


def test_brackets_are_no_part_of_the_host() -> None:
    assert address_text("::1", 5) == address_text("[::1]", 5) == "[::1]:5"
    assert (without_brackets("[::1]"), without_brackets("::1"), without_brackets("h")) == ("::1", "::1", "h")
    hosts = {"[::1]:5": "::1", "[::1]": "::1", "::1": "::1", "h:5": "h", "h": "h"}
    assert {listed: _host(listed) for listed in hosts} == hosts


@pytest.mark.parametrize("setting", ["spark.driver.host", "broker.host"])
def test_the_system_is_given_no_brackets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str) -> None:
    """Story: Spark wants `spark.driver.host=[2001:db8::5]`. The controller could not listen there: no such host."""
    of_spark = {} if setting == "broker.host" else {setting: "[2001:db8::5]"}
    of_cluster = {setting: "[2001:db8::5]"} if setting == "broker.host" else {}
    given = {"log.dirs": str(tmp_path), **of_cluster}
    sc = SimpleNamespace(master="spark://head:7077", applicationId="app", getConf=lambda: of_spark)
    session = cast("SparkSession", SimpleNamespace(sparkContext=sc))
    listened: list[str] = []

    def start(*_: object, host: str, **__: object) -> NoReturn:
        listened.append(host)
        raise ClusterStartError("far enough")

    monkeypatch.setattr("spark_broker.driver.cluster.check_session", lambda spark: None)
    monkeypatch.setattr(ControllerLink, "start", start)
    with pytest.raises(ClusterStartError, match="far enough"):
        BrokerCluster.start(session, 1, given)
    assert listened == ["2001:db8::5"]


def test_a_broker_is_given_no_brackets(tmp_path: Path) -> None:
    given = load_cluster_settings({"log.dirs": str(tmp_path), "broker.host": "[2001:db8::5]"})
    session = SimpleNamespace(sparkContext=SimpleNamespace(master="spark://head:7077"))
    link = SimpleNamespace(cluster_id="c", host="::1", port=1, earlier_launches=-1, watch=lambda _: None)
    directories = choose_directories(given.cluster, "app")
    cluster = BrokerCluster(
        cast("SparkSession", session), given, directories, cast("ControllerLink", link), RunningHost()
    )
    atexit.unregister(cluster._at_exit)
    assert cluster._spec(1, EXECUTOR).host == "2001:db8::5"
