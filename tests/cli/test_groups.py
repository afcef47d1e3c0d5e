"""`spark-broker groups`: what it shows of groups, what it deletes, and what a mistake gets."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spark_broker.cli.partition_lists import listed, parse_topic
from spark_broker.errors import InvalidConfigError
from spark_broker.group_model import GROUP_STATES
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, TopicPartition
from spark_broker.protocol.messages import CommittedOffset, MemberAbout
from spark_broker.protocol.schema import DEFAULT_SCHEMA, conform
from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster

ABOUT = MemberAbout(["t"], "", "", "my-client", "my-host", 45_000, 300_000, "")


@pytest.fixture
def topics(cluster: FakeCluster) -> FakeCluster:
    """The topic t has three partitions, the first one with ten records."""
    cluster.create(CONSUMER_OFFSETS_TOPIC, 3)
    cluster.create("t", 3)
    values = pa.RecordBatch.from_arrays([pa.array([b"x"] * 10, pa.binary())], names=["value"])
    cluster.store("t", 0, conform(values, DEFAULT_SCHEMA))
    return cluster


def commit(cluster: FakeCluster, group: str, offset: int, partition: int = 0) -> None:
    cluster.committed[group, "t", partition] = CommittedOffset("t", partition, offset)


def cells(out: str, first: str) -> list[list[str]]:
    """The rows of a table that begin with this text."""
    return [line.split() for line in out.splitlines() if line.split()[:1] == [first]]


def test_groups_are_listed_by_state(topics: FakeCluster, run: Run) -> None:
    commit(topics, "idle", 3)
    topics.groups.join("busy", "m", ABOUT)
    listing = run("groups", "list", "-o", "json").json
    assert [(group["group_id"], group["state"], group["members"]) for group in listing] == [
        *(("busy", "Stable", 1), ("idle", "Empty", 0)),
    ]
    assert cells(run("groups", "list").out, "busy") == [["busy", "Stable", "1", str(listing[0]["coordinator"])]]
    assert [group["group_id"] for group in run("groups", "list", "--state", "stable", "-o", "json").json] == ["busy"]
    assert run("groups", "list", "--state", "stable", "--state", "Empty", "-o", "json").json == listing


@pytest.mark.parametrize("state", GROUP_STATES)
def test_every_state_can_be_asked_for(topics: FakeCluster, run: Run, state: str) -> None:
    assert run("groups", "list", "--state", state, "-o", "json").json == []


def test_a_state_that_no_group_has_is_a_mistake_in_use(topics: FakeCluster, run: Run) -> None:
    ended = run("groups", "list", "--state", "stabel")
    assert ended.status == 2
    assert "'stable'" in ended.err


def test_a_cluster_without_groups_has_an_empty_list(cluster: FakeCluster, run: Run) -> None:
    assert run("groups", "list", "-o", "json").json == []


def test_a_description_shows_members_offsets_and_rebalances(topics: FakeCluster, run: Run) -> None:
    commit(topics, "g", 4)
    topics.groups.join("g", "m", ABOUT, "my-instance")
    out = run("groups", "describe", "g").out
    assert cells(out, "state") == [["state", "Stable"]]
    assert cells(out, "assignor") == [["assignor", "uniform"]]
    assert cells(out, "1")[0][-2:] == ["m", "joined"]
    assert cells(out, "m") == [["m", "my-instance", "my-client", "my-host", "1", "stable", "t:0-2"]]
    assert cells(out, "t") == [
        *(["t", "0", "4", "10", "6", "m"], ["t", "1", "-", "0", "0", "m"], ["t", "2", "-", "0", "0", "m"]),
    ]


def test_a_member_that_waits_and_one_that_gives_up_show_what(topics: FakeCluster, run: Run) -> None:
    topics.groups.join("g", "first", ABOUT)
    topics.groups.join("g", "second", ABOUT)
    out = run("groups", "describe", "g", "--members").out
    assert "gives up" in out
    assert cells(out, "first")[0][-4:] == ["revoking", "t:0,1", "t:2", "-"]
    assert cells(out, "second")[0][-4:] == ["waiting", "-", "-", "t:2"]


def test_parts_of_a_description_are_asked_for_one_by_one(topics: FakeCluster, run: Run) -> None:
    commit(topics, "g", 4)
    topics.groups.join("g", "m", ABOUT)

    def parts(*options: str) -> list[str]:
        return list(run("groups", "describe", "g", *options, "-o", "json").json)

    state = ["state", "epoch", "target_epoch", "assignor", "coordinator", "coordinator_epoch", "rebalances"]
    assert parts() == ["group_id", *state, "members", "offsets"]
    assert parts("--state") == ["group_id", *state]
    assert parts("--members") == ["group_id", "members"]
    assert parts("--offsets") == ["group_id", "offsets"]
    first, *_ = run("groups", "describe", "g", "-o", "json").json["offsets"]
    assert (first["committed"], first["end_offset"], first["lag"], first["member_id"]) == (4, 10, 6, "m")


def test_a_group_without_members_shows_its_offsets(topics: FakeCluster, run: Run) -> None:
    commit(topics, "g", 4)
    out = run("groups", "describe", "g").out
    assert cells(out, "t") == [["t", "0", "4", "10", "6"]]
    assert "my-client" not in out


def test_a_group_that_is_not_there_is_an_error_of_one_line(topics: FakeCluster, run: Run) -> None:
    for command in (("describe", "g"), ("delete-offsets", "g", "--topic", "t")):
        ended = run("groups", *command)
        assert (ended.status, ended.out) == (1, "")
        assert ended.err.startswith("error: [GROUP_ID_NOT_FOUND] there is no group 'g' -> ")


def test_each_group_that_is_deleted_is_said_and_each_that_is_not(topics: FakeCluster, run: Run) -> None:
    commit(topics, "a", 1)
    topics.groups.join("b", "m", ABOUT)
    ended = run("groups", "delete", "a", "b", "c")
    assert ended.status == 1
    said = [line.split(" -> ")[0] for line in ended.err.splitlines()]
    assert said[0] == "deleted group a"
    assert said[1].startswith("error: [NON_EMPTY_GROUP]")
    assert said[2].startswith("error: [GROUP_ID_NOT_FOUND]")
    assert topics.committed == {}
    results = run("groups", "delete", "b", "-o", "json")
    assert results.status == 1
    assert [(result["group_id"], result["error"]) for result in results.json] == [("b", "NON_EMPTY_GROUP")]


def test_a_group_is_deleted(topics: FakeCluster, run: Run) -> None:
    commit(topics, "a", 1)
    ended = run("groups", "delete", "a", "--output", "json")
    assert (ended.status, ended.json) == (0, [{"group_id": "a", "error": None, "message": ""}])


def test_offsets_of_some_partitions_are_deleted(topics: FakeCluster, run: Run) -> None:
    for partition in range(3):
        commit(topics, "g", 1, partition)
    ended = run("groups", "delete-offsets", "g", "--topic", "t:0,2")
    assert (ended.status, ended.err) == (0, "deleted the offsets that group g had committed of t:0,2\n")
    assert list(topics.committed) == [("g", "t", 1)]
    rest = run("groups", "delete-offsets", "g", "--topic", "t", "-o", "json").json
    assert rest == [{"topic": "t", "partition": 1, "committed": 1}]
    assert topics.committed == {}


def test_offsets_that_members_read_are_not_deleted(topics: FakeCluster, run: Run) -> None:
    commit(topics, "g", 1)
    topics.groups.join("g", "m", ABOUT)
    ended = run("groups", "delete-offsets", "g", "--topic", "t")
    assert ended.status == 1
    assert "GROUP_SUBSCRIBED_TO_TOPIC" in ended.err


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("t", ("t", None)),
        ("t:0", ("t", [0])),
        ("t:2,0", ("t", [0, 2])),
        ("a.b_c-d:0,3-5,4", ("a.b_c-d", [0, 3, 4, 5])),
    ],
)
def test_partitions_are_named_in_few_words(text: str, parsed: tuple[str, list[int] | None]) -> None:
    assert parse_topic(text) == parsed


@pytest.mark.parametrize("text", ["", ":", "t:", ":0", "t:x", "t:1-", "t:-1", "t:2-1", "t:0-99999999999", "t:0,,1"])
def test_a_text_that_names_no_partitions_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="TOPIC:PARTITIONS"):
        parse_topic(text)


def test_what_is_shown_of_partitions_can_be_typed() -> None:
    partitions = [TopicPartition("t", number) for number in (0, 1, 5, 6, 7)] + [TopicPartition("s", 2)]
    assert listed(partitions) == "s:2 t:0,1,5-7"
    assert listed([]) == "-"
    typed = [(topic, number) for topic, numbers in map(parse_topic, ["s:2", "t:0,1,5-7"]) for number in numbers or ()]
    assert [TopicPartition(*each) for each in typed] == sorted(partitions)
