"""What is announced as an address is what clients take, of IPv6 as well."""

from __future__ import annotations

import dataclasses

import pytest

from spark_broker.addresses import address_text, without_brackets
from spark_broker.client.settings import Address, parse_addresses
from spark_broker.driver.executors import _host
from spark_broker.model import BrokerInfo

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
