"""`spark-broker leader-election`: Kafka's options, what each partition got, and the status."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster


def leaderless(cluster: FakeCluster) -> None:
    """Three partitions, of which the second has no leader."""
    cluster.create("t", 3)
    cluster.elect("t", 1, -1)


def test_an_unclean_election_gives_a_partition_a_leader(cluster: FakeCluster, run: Run) -> None:
    leaderless(cluster)
    ended = run("leader-election", "--election-type", "unclean", "--topic", "t", "--partition", 1, "-o", "json")
    assert (ended.status, ended.json) == (0, [{"topic": "t", "partition": 1, "error": None, "message": ""}])
    assert cluster.topics["t"].partitions[1].leader == 0


def test_every_partition_of_a_topic_has_its_result(cluster: FakeCluster, run: Run) -> None:
    leaderless(cluster)
    ended = run("leader-election", "--election-type", "unclean", "--topic", "t")
    lines = [line.split()[:3] for line in ended.out.splitlines() if line.split()[:1] == ["t"]]
    assert lines == [["t", "0", "[ELECTION_NOT_NEEDED]"], ["t", "1", "elected"], ["t", "2", "[ELECTION_NOT_NEEDED]"]]
    assert ended.status == 0


def test_a_partition_that_got_no_leader_is_status_1(cluster: FakeCluster, run: Run) -> None:
    leaderless(cluster)
    ended = run("leader-election", "--election-type", "preferred", "--topic", "t", "--partition", 1)
    assert ended.status == 1
    assert "ELIGIBLE_LEADERS_NOT_AVAILABLE" in ended.out


def test_all_partitions_of_all_topics_may_need_none(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", 3)
    ended = run("leader-election", "--election-type", "preferred", "--all-topic-partitions")
    assert (ended.status, ended.out) == (0, "")
    assert "no partition needs an election" in ended.err


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--topic", "t", "--all-topic-partitions"),
        ("--partition", 0, "--all-topic-partitions"),
        ("--partition", 0),
    ],
)
def test_what_to_elect_for_must_be_said_and_said_once(
    cluster: FakeCluster, run: Run, options: tuple[object, ...]
) -> None:
    cluster.create("t")
    ended = run("leader-election", "--election-type", "unclean", *options)
    assert ended.status == 1
    assert "--all-topic-partitions" in ended.err


def test_a_description_shows_who_is_eligible(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    described = run("topics", "describe", "t", "-o", "json").json["partitions"][0]
    assert (described["elr"], described["last_known_elr"]) == ([], [])
    assert "last known elr" in run("topics", "describe", "t").out
