"""Names that no broker takes are refused at once, by the client that was given them."""

from __future__ import annotations

import pytest

from spark_broker import Admin, Consumer, Producer
from spark_broker.errors import (
    InvalidConfigError,
    InvalidRegularExpressionError,
    InvalidSubscriptionError,
    InvalidTopicError,
)
from spark_broker.model import NAME_MAX

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize("length", [NAME_MAX + 1, 5000])
def test_a_group_id(length: int) -> None:
    """Story: polls returned nothing and commits stored nothing."""
    with pytest.raises(InvalidConfigError, match=rf"group\.id has {length} characters; coordinators take 1 to 249"):
        Consumer(NOWHERE, group_id="g" * length)


@pytest.mark.parametrize("name", ["group.instance.id", "client.rack"])
def test_what_a_member_says_of_itself(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"{name} has 250 characters; 249 may be"):
        Consumer(NOWHERE, group_id="g", topics=["t"], config={name: "i" * (NAME_MAX + 1)})


def test_a_subscription() -> None:
    with pytest.raises(InvalidRegularExpressionError, match="a pattern of 257 characters; 256 may be"):
        Consumer(NOWHERE, group_id="g", pattern="p" * 257)
    with pytest.raises(InvalidSubscriptionError, match="10,001 topics"):
        Consumer(NOWHERE, group_id="g", topics=[f"t{number}" for number in range(10_001)])


def test_a_transactional_id() -> None:
    with pytest.raises(InvalidConfigError, match=r"transactional\.id has 250 characters"):
        Producer(NOWHERE, transactional_id="t" * (NAME_MAX + 1))


@pytest.mark.parametrize("name", ["n" * (NAME_MAX + 1), ""])
def test_a_topic(name: str) -> None:
    with pytest.raises(InvalidTopicError, match="topic name"):
        Consumer(NOWHERE, topics=[name])
    with Producer(NOWHERE) as producer, pytest.raises(InvalidTopicError, match="topic name"):
        producer.append(name, [{"value": b"v"}]).result(20)
    with Admin(NOWHERE) as admin, pytest.raises(InvalidTopicError, match="topic name"):
        admin.describe_topic(name)
