"""Options of a write are those of Spark's Kafka sink in any case; a mistake is a typed error that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_broker.client.transaction_group import TIMEOUT_MS
from spark_broker.errors import InvalidConfigError
from spark_broker.spark.write_options import (
    OPTIONS,
    TRANSACTION_TIMEOUT_MS,
    WITHOUT_EFFECT,
    Idempotence,
    TopicToCreate,
    WriteOptions,
    parse_write_options,
)

SERVERS = {"bootstrap.servers": "127.0.0.1:9092"}


def parse(**options: str) -> WriteOptions:
    return parse_write_options({**SERVERS, **options})


def test_a_job_for_sparks_kafka_sink_needs_another_format_name_and_nothing_else() -> None:
    kafka = {
        "kafka.bootstrap.servers": "a:1,b:2",
        "topic": "flights",
        "kafka.acks": "all",
        "kafka.enable.idempotence": "true",
        "kafka.compression.type": "lz4",
        "kafka.linger.ms": "100",
        "kafka.batch.size": "1000",
        "kafka.request.timeout.ms": "1234",
        **dict.fromkeys(WITHOUT_EFFECT, "1"),
    }
    write = parse_write_options({name.lower(): value for name, value in kafka.items()})
    assert write.topic == "flights"
    assert write.producer.bootstrap_servers == ("a:1", "b:2")
    assert (write.producer.compression_type, write.producer.request_timeout_ms) == ("lz4", 1234)


def test_a_write_is_one_transaction_unless_told_otherwise() -> None:
    write = parse()
    assert (write.topic, write.transactional, write.idempotence, write.create) == (None, True, None, None)
    assert write.transaction_timeout_ms == TRANSACTION_TIMEOUT_MS == TIMEOUT_MS
    assert not parse(transactional="FALSE").transactional
    assert parse(**{"kafka.transaction.timeout.ms": "5000"}).transaction_timeout_ms == 5000
    assert parse(txnappid=" daily ", txnversion="7").idempotence == Idempotence("daily", 7)


@pytest.mark.parametrize(("options", "topic"), [({"topic": "a"}, "a"), ({"path": "a"}, "a"), ({}, None)])
def test_the_topic_is_an_option_or_what_is_saved_to(options: dict[str, str], topic: str | None) -> None:
    assert parse(**options).topic == topic


def test_a_topic_to_create_has_its_own_settings() -> None:
    options = {"topic.partitions": "6", "topic.replication.factor": "3", "topic.min.insync.replicas": "2"}
    assert parse(topic="t", createTopic="true", **options).create == TopicToCreate(6, 3, {"min.insync.replicas": "2"})
    assert parse(topic="t", createTopic="true").create == TopicToCreate(None, None, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topik": "t"}, "did you mean 'topic'"),
        ({"txnappids": "t"}, "did you mean 'txnAppId'"),
        ({"topic.min.insync.replica": "2"}, "did you mean 'topic.min.insync.replicas'"),
        ({"kafka.compression.typ": "lz4"}, "did you mean 'kafka.compression.type'"),
        ({"topic": "a", "path": "b"}, r"topic = 'a' and save\('b'\) differ"),
        ({"topic": " "}, "topic is empty"),
        ({"acks": "1"}, "a write always has acks = all"),
        ({"kafka.enable.idempotence": "false"}, "a write always has enable.idempotence = true"),
        ({"kafka.transactional.id": "x"}, "txnAppId and txnVersion"),
        ({"txnAppId": "a"}, "txnAppId needs txnVersion"),
        ({"txnVersion": "1"}, "txnVersion needs txnAppId"),
        ({"txnAppId": " ", "txnVersion": "1"}, "txnAppId is empty"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "txnVersion = '-1' is not a number from 0 on"),
        ({"txnAppId": "a", "txnVersion": str(2**63)}, "is not a number from 0 on"),
        ({"txnAppId": "a", "txnVersion": "1", "transactional": "false"}, "leave out transactional=false"),
        ({"transactional": "no"}, "transactional = 'no' is neither true nor false"),
        ({"createTopic": "true"}, "createTopic needs the option topic"),
        ({"topic": "t", "topic.partitions": "3"}, "topic.partitions needs createTopic=true"),
        ({"topic": "t", "topic.retention.ms": "3"}, "topic.retention.ms needs createTopic=true"),
        ({"topic": "t", "createTopic": "true", "topic.partitions": "0"}, "topic.partitions = '0' is not a number"),
        ({"topic": "t", "createTopic": "true", "topic.retention.ms": "x"}, "retention.ms = 'x' is not a whole number"),
        ({"transaction.timeout.ms": "soon"}, "transaction.timeout.ms = 'soon'"),
        ({"kafka.bootstrap.servers": "other:1"}, "bootstrap.servers and kafka.bootstrap.servers differ"),
    ],
)
def test_a_mistake_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        parse(**options)


def test_a_write_needs_a_cluster() -> None:
    with pytest.raises(InvalidConfigError, match=r"bootstrap\.servers is missing"):
        parse_write_options({"topic": "t"})


def test_every_option_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "dataframes.md").read_text().partition("## Writing")[2]
    assert [name for name in (*OPTIONS, *WITHOUT_EFFECT) if f"`{name}`" not in documented and name != "path"] == []
