"""Groups on real brokers without Spark: members without the client library, `Admin`, and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from spark_broker import Admin, NewTopic, Producer, TopicPartition
from spark_broker.errors import (
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    NonEmptyGroupError,
    OffsetOutOfRangeError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from tests.broker.raw_client import RawClient
from tests.support.group_members import RawMember, settle
from tests.support.process_cluster import ProcessCluster

PARTITIONS = 4
T = [TopicPartition("t", number) for number in range(PARTITIONS)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    config = {"offsets.topic.num.partitions": 4, "broker.session.timeout.ms": 3000}
    with ProcessCluster(tmp_path_factory.mktemp("groups"), 3, config) as cluster:
        with Admin(cluster.bootstrap_servers) as admin, Producer(cluster.bootstrap_servers) as producer:
            admin.create_topic(NewTopic("t", PARTITIONS, 3))
            for number in range(PARTITIONS):
                producer.append("t", [{"value": b"x"}] * 10, partition=number)
            producer.flush()
        yield cluster


@pytest.fixture
def client(cluster: ProcessCluster) -> RawClient:
    client = RawClient(cluster.bootstrap_servers)
    client.ensure_internal()
    return client


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


def command(cluster: ProcessCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spark_broker.cli.main", "groups", *arguments, "-b", cluster.bootstrap_servers],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_members_share_partitions_and_who_leaves_leaves_them_to_the_others(client: RawClient, admin: Admin) -> None:
    first = RawMember(client, "shared", "first", ["t"])
    second = RawMember(client, "shared", "second", ["t"], instance_id="two")
    settle(first)
    assert first.partitions == [0, 1, 2, 3]
    settle(first, second)
    assert sorted(first.partitions + second.partitions) == [0, 1, 2, 3]
    assert len(first.partitions) == 2
    described = admin.describe_group("shared")
    assert described.state == "Stable"
    assert [(m.member_id, m.instance_id, len(m.assigned), m.kind) for m in described.members] == [
        *(("first", None, 2, "stable"), ("second", "two", 2, "stable")),
    ]
    assert [rebalance.reason for rebalance in described.rebalances] == ["first joined", "second joined"]
    with pytest.raises(NonEmptyGroupError):
        admin.alter_group_offsets("shared", {T[0]: 1})
    with pytest.raises(NonEmptyGroupError):
        admin.delete_group("shared")
    second.leave()
    settle(first)
    assert first.partitions == [0, 1, 2, 3]
    first.leave()
    assert admin.describe_group("shared").state == "Empty"
    admin.delete_group("shared")
    with pytest.raises(GroupIdNotFoundError):
        admin.describe_group("shared")


def test_offsets_are_set_shown_and_deleted(client: RawClient, admin: Admin) -> None:
    admin.alter_group_offsets("offsets", {T[0]: 10, T[1]: 4})
    with pytest.raises(OffsetOutOfRangeError, match="t-2: the offset 11 is beyond the end 10"):
        admin.alter_group_offsets("offsets", {T[0]: 0, T[2]: 11})
    offsets = admin.group_offsets("offsets")
    assert {tp: (offset.committed, offset.lag) for tp, offset in offsets.items()} == {T[0]: (10, 0), T[1]: (4, 6)}
    member = RawMember(client, "offsets", "m", ["t"])
    settle(member)
    with pytest.raises(GroupSubscribedToTopicError):
        admin.delete_group_offsets("offsets", T)
    member.leave()
    admin.delete_group_offsets("offsets", [T[0]])
    assert list(admin.group_offsets("offsets")) == [T[1]]


@pytest.mark.full
def test_the_command_line_moves_a_group(cluster: ProcessCluster, admin: Admin) -> None:
    admin.alter_group_offsets("moved", {T[0]: 10})
    assert command(cluster, "seek", "moved", "--topic", "t:0,1", "--shift-by", "-3").returncode == 0
    assert admin.group_offsets("moved")[T[0]].committed == 10
    done = command(cluster, "seek", "moved", "--topic", "t:0", "--shift-by", "-3", "--execute", "-o", "json")
    assert json.loads(done.stdout)["offsets"][0]["lag_after"] == 3
    assert admin.group_offsets("moved")[T[0]].committed == 7
    described = command(cluster, "describe", "moved")
    assert [line.split() for line in described.stdout.splitlines() if line.split()[:1] == ["t"]] == [
        ["t", "0", "7", "10", "3"]
    ]
    assert command(cluster, "delete", "moved").stderr == "deleted group moved\n"
    assert command(cluster, "describe", "moved").returncode == 1


def test_a_full_output_is_an_error_of_one_line(cluster: ProcessCluster) -> None:
    listing = f"{sys.executable} -m spark_broker.cli.main groups list -b {cluster.bootstrap_servers} > /dev/full"
    done = subprocess.run(["bash", "-c", listing], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_groups_outlive_their_coordinator(cluster: ProcessCluster, client: RawClient, admin: Admin) -> None:
    """The list is whole again as soon as others lead. The members go on with what they have."""
    names = [f"g{number}" for number in range(12)]
    for name in names:
        admin.alter_group_offsets(name, {T[0]: 1})
    member = RawMember(client, "g0", "m", ["t"])
    settle(member)
    before = {group.group_id: group for group in admin.list_groups()}
    assert set(names) <= set(before)
    assert len({before[name].coordinator for name in names}) > 1
    killed = client.coordinator("g0", CONSUMER_OFFSETS_TOPIC)
    os.kill(client.pid(killed), signal.SIGKILL)
    after = {group.group_id: group for group in admin.list_groups()}
    assert after.keys() == before.keys()
    assert killed not in {group.coordinator for group in after.values()}
    assert (after["g0"].state, after["g0"].members) == ("Stable", 1)
    assert [m.member_id for m in admin.describe_group("g0").members] == ["m"]
    assert admin.group_offsets("g0")[T[0]].member_id == "m"


def test_a_frozen_coordinator_is_waited_for_only_until_another_one_leads(
    cluster: ProcessCluster, client: RawClient, admin: Admin
) -> None:
    cluster.launch_ended()
    cluster.await_live(3)
    admin.alter_group_offsets("frozen", {T[0]: 1})
    pid = client.pid(client.coordinator("frozen", CONSUMER_OFFSETS_TOPIC))
    os.kill(pid, signal.SIGSTOP)
    try:
        assert "frozen" in {group.group_id for group in admin.list_groups()}
        assert admin.describe_group("frozen").state == "Empty"
    finally:
        os.kill(pid, signal.SIGCONT)
