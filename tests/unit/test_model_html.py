"""Descriptions render in a notebook, whatever their names contain."""

from __future__ import annotations

from spark_broker import BrokerInfo, ClusterDescription, PartitionInfo, TopicDescription
from spark_broker.protocol.schema import DEFAULT_SCHEMA


def test_a_topic_shows_its_partitions() -> None:
    partition = PartitionInfo("t", 0, leader=2, leader_epoch=7, replicas=(2, 0), isr=(2,), high_watermark=42)
    html = TopicDescription("<t>", "0" * 32, (partition,), DEFAULT_SCHEMA, 0, {})._repr_html_()
    assert "topic &lt;t&gt;" in html
    assert "<td>2, 0</td>" in html
    assert "<td>42</td>" in html
    assert "<td>–</td>" in html, "the log start is not known"


def test_a_cluster_shows_its_brokers() -> None:
    broker = BrokerInfo(1, "h", 9, rack="<r>", epoch=2, pid=3, executor_id="4", executor_pid=5, fenced=True)
    html = ClusterDescription("c", 3, (broker,))._repr_html_()
    assert "controller epoch 3" in html
    assert "<td>h:9</td><td>&lt;r&gt;</td>" in html
    assert "fenced" in html
