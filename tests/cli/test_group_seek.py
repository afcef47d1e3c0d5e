"""`spark-broker groups seek`: a preview, then the same with --execute; every target, every scope, every mistake."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker.cli.group_seek import parse_duration
from spark_broker.errors import InvalidConfigError
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import CommittedOffset, MemberAbout
from spark_broker.protocol.schema import DEFAULT_SCHEMA, conform
from tests.cli.conftest import Run
from tests.client.fake_broker import APPEND_TIME_MS, FakeCluster

BEFORE = (datetime.fromtimestamp(APPEND_TIME_MS / 1000, UTC) - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M")
EARLIEST = ("--to-earliest",)


@pytest.fixture
def topics(cluster: FakeCluster) -> FakeCluster:
    """The topic t has two partitions, with records 2 to 9 and none. The group g has committed 5 in the first one."""
    cluster.create(CONSUMER_OFFSETS_TOPIC, 3)
    cluster.create("t", 2)
    values = pa.RecordBatch.from_arrays([pa.array([b"x"] * 2, pa.binary())], names=["value"])
    for _ in range(5):
        cluster.store("t", 0, conform(values, DEFAULT_SCHEMA))
    partition = cluster.topics["t"].partitions[0]
    partition.log, partition.log_start_offset = partition.log[1:], 2
    commit(cluster, "g", 5)
    return cluster


def commit(cluster: FakeCluster, group: str, offset: int, partition: int = 0) -> None:
    cluster.committed[group, "t", partition] = CommittedOffset("t", partition, offset)


def committed(cluster: FakeCluster, group: str = "g") -> dict[int, int]:
    return {key[2]: offset.offset for key, offset in cluster.committed.items() if key[0] == group}


def test_a_preview_shows_the_move_and_changes_nothing(topics: FakeCluster, run: Run) -> None:
    ended = run("groups", "seek", "g", *EARLIEST, "--topic", "t")
    assert [line.split() for line in ended.out.splitlines() if line.split()[:1] == ["t"]] == [
        *(["t", "0", "5", "2", "8"], ["t", "1", "-", "0", "0"]),
    ]
    assert "group g would be moved" in ended.out
    assert "Add --execute" in ended.err
    assert (ended.status, committed(topics)) == (0, {0: 5})


def test_the_same_with_execute_is_done(topics: FakeCluster, run: Run) -> None:
    ended = run("groups", "seek", "g", *EARLIEST, "--topic", "t", "--execute")
    assert "group g was moved" in ended.out
    assert (ended.status, ended.err, committed(topics)) == (0, "", {0: 2, 1: 0})


def test_a_script_gets_one_document(topics: FakeCluster, run: Run) -> None:
    document = run("groups", "seek", "g", "--to-latest", "--topic", "t:0", "--execute", "-o", "json").json
    assert document == {
        "group_id": "g",
        "executed": True,
        "offsets": [
            {
                "topic": "t",
                "partition": 0,
                "committed": 5,
                "new_offset": 10,
                "start_offset": 2,
                "end_offset": 10,
                "lag_after": 0,
            }
        ],
    }
    assert committed(topics) == {0: 10}


@pytest.mark.parametrize(
    ("target", "offset"),
    [
        (EARLIEST, 2),
        (("--to-latest",), 10),
        (("--to-offset", 7), 7),
        (("--to-datetime", BEFORE), 2),
        (("--to-datetime", "2050-01-01"), 10),
        (("--by-duration", "1d"), 10),
        (("--by-duration", "p2000w"), 2),
        (("--shift-by", 3), 8),
        (("--shift-by", -3), 2),
        (("--shift-by", -100), 2),
        (("--shift-by", 100), 10),
        (("--to-earliest", "--shift-by", 1), 3),
        (("--to-latest", "--shift-by", -1), 9),
        (("--to-offset", 100, "--shift-by", -95), 5),
    ],
)
def test_every_target_leads_to_its_offset(
    topics: FakeCluster, run: Run, target: tuple[object, ...], offset: int
) -> None:
    assert run("groups", "seek", "g", *target, "--topic", "t:0", "--execute").status == 0
    assert committed(topics) == {0: offset}


def test_a_shift_that_stops_at_an_edge_says_so(topics: FakeCluster, run: Run) -> None:
    ended = run("groups", "seek", "g", "--shift-by", 100, "--topic", "t:0")
    assert "t:0: there are no records that far away" in ended.err


def test_a_duration_says_from_when_on(topics: FakeCluster, run: Run) -> None:
    assert "to the first record from 20" in run("groups", "seek", "g", "--by-duration", "1h", "--topic", "t").err


@pytest.mark.parametrize(("offset", "where"), [(11, "beyond the end 10"), (1, "before the first record 2")])
@pytest.mark.parametrize("execute", [False, True])
def test_an_offset_of_the_users_own_that_cannot_be_is_refused(
    topics: FakeCluster, run: Run, offset: int, where: str, execute: bool
) -> None:
    ended = run("groups", "seek", "g", "--to-offset", offset, "--topic", "t:0", *(["--execute"] if execute else []))
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith(f"error: [OFFSET_OUT_OF_RANGE] t-0: the offset {offset} is {where}")
    assert committed(topics) == {0: 5}


def test_all_topics_of_the_group_are_meant_with_all_their_partitions(topics: FakeCluster, run: Run) -> None:
    topics.create("other")
    assert run("groups", "seek", "g", "--to-latest", "--all-topics", "--execute").status == 0
    assert committed(topics) == {0: 10, 1: 0}
    assert ("g", "other", 0) not in topics.committed


def test_a_group_may_begin_where_another_one_stands(topics: FakeCluster, run: Run) -> None:
    assert run("groups", "seek", "new", "--to-group", "g", "--execute").status == 0
    assert committed(topics, "new") == {0: 5}
    ended = run("groups", "seek", "newer", "--to-group", "g", "--topic", "t", "--execute")
    assert "nothing is committed for t:1: left out" in ended.err
    assert committed(topics, "newer") == {0: 5}
    ended = run("groups", "seek", "newest", "--to-group", "g", "--topic", "t:1", "--execute")
    assert ended.status == 1
    assert "there is no offset to move to for t:1" in ended.err


def test_what_another_group_has_read_and_retention_has_deleted_is_not_sought(topics: FakeCluster, run: Run) -> None:
    commit(topics, "g", 1)
    assert run("groups", "seek", "new", "--to-group", "g", "--execute").status == 0
    assert committed(topics, "new") == {0: 2}


def test_offsets_are_read_from_a_file(topics: FakeCluster, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "offsets.csv"
    file.write_text("topic,partition,offset\nt, 0, 7\n\nt,1,0\n")
    assert run("groups", "seek", "g", "--from-file", file, "--execute").status == 0
    assert committed(topics) == {0: 7, 1: 0}
    file.write_text("topic,partition,offset\nt,0,6\n", encoding="utf-8-sig")  # as spreadsheets write it
    assert run("groups", "seek", "g", "--from-file", file, "--execute").status == 0
    assert committed(topics) == {0: 6, 1: 0}
    file.write_text("t,0,11\n")
    assert "OFFSET_OUT_OF_RANGE" in run("groups", "seek", "g", "--from-file", file).err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"t,0\n", "line 1: 't,0'"),
        (b"t,0,5,6\n", "line 1"),
        (b"t,0,5\nt,x,5\n", "line 2: 't,x,5'"),
        (b"t,0,-1\n", "line 1"),
        (b"t,0," + b"9" * 5000 + b"\n", "line 1"),
        (b",0,5\n", "line 1"),
        (b"t,0,5\nt,0,6\n", "line 2: t-0 a second time"),
        (b"", "has no offsets"),
        (b"topic,partition,offset\n", "has no offsets"),
        (b"\xff\xfe", "cannot be read"),
        (b"t,0,\0" + b"x" * 200_000, "cannot be read"),
    ],
)
def test_a_file_that_has_no_offsets_is_refused_with_the_line(
    topics: FakeCluster, run: Run, tmp_path: Path, content: bytes, complaint: str
) -> None:
    file = tmp_path / "offsets.csv"
    file.write_bytes(content)
    ended = run("groups", "seek", "g", "--from-file", file, "--execute")
    assert ended.status == 1
    assert ended.err.startswith("error: [INVALID_DATA] ")
    assert complaint in ended.err
    assert committed(topics) == {0: 5}


def test_a_group_with_members_is_shown_but_not_moved(topics: FakeCluster, run: Run) -> None:
    topics.groups.join("g", "m", MemberAbout(["t"], "", "", "c", "h", 45_000, 300_000, ""))
    preview = run("groups", "seek", "g", *EARLIEST, "--topic", "t")
    assert preview.status == 0
    assert "The group has 1 member. Stop its consumers first" in preview.err
    ended = run("groups", "seek", "g", *EARLIEST, "--topic", "t", "--execute")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith("error: [NON_EMPTY_GROUP]")
    assert committed(topics) == {0: 5}


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--topic", "t"), "Give one of --to-earliest"),
        ((*EARLIEST, "--to-latest", "--topic", "t"), "Give one of --to-earliest"),
        (("--to-datetime", "2026-01-01", "--by-duration", "1h", "--topic", "t"), "Give one of --to-earliest"),
        (EARLIEST, "--all-topics"),
        ((*EARLIEST, "--topic", "t", "--all-topics"), "--all-topics"),
        (("--to-datetime", "yesterday", "--topic", "t"), "2026-01-31T12:00"),
        (("--by-duration", "1y", "--topic", "t"), "15m, 2h, 1d"),
        (("--by-duration", "999999999w", "--topic", "t"), "--to-earliest"),
        (("--by-duration", "999999w", "--topic", "t"), "--to-earliest"),
        ((*EARLIEST, "--topic", "t:x"), "flights:0,3-5"),
        (("--shift-by", 1, "--topic", "t:1"), "Give one of --to-earliest"),
    ],
)
def test_a_mistake_in_the_options_is_one_line_that_helps(
    topics: FakeCluster, run: Run, options: tuple[object, ...], hint: str
) -> None:
    ended = run("groups", "seek", "g", *options)
    assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert hint in ended.err.split(" -> ")[1]


def test_a_file_beside_a_topic_and_one_that_is_missing_are_mistakes(
    topics: FakeCluster, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "offsets.csv"
    assert run("groups", "seek", "g", "--from-file", file).status == 2
    file.write_text("t,0,5\n")
    ended = run("groups", "seek", "g", "--from-file", file, "--topic", "t")
    assert ended.status == 1
    assert "--from-file says itself which partitions" in ended.err


@pytest.mark.parametrize("scope", [("--all-topics",), ("--topic", "nowhere"), ("--topic", "t:2")])
def test_partitions_and_groups_that_are_not_there_are_named(
    topics: FakeCluster, run: Run, scope: tuple[str, ...]
) -> None:
    ended = run("groups", "seek", "nobody", *EARLIEST, *scope)
    assert (ended.status, ended.out) == (1, "")
    name = "GROUP_ID_NOT_FOUND" if scope == ("--all-topics",) else "UNKNOWN_TOPIC_OR_PARTITION"
    assert ended.err.startswith(f"error: [{name}]")


def test_a_partition_without_a_leader_cannot_be_sought(topics: FakeCluster, run: Run) -> None:
    topics.elect("t", 0, -1)
    ended = run("groups", "seek", "g", *EARLIEST, "--topic", "t:0")
    assert ended.status == 1
    assert ended.err.startswith("error: [LEADER_NOT_AVAILABLE] t-0")


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("90s", timedelta(seconds=90)),
        ("15m", timedelta(minutes=15)),
        ("2H", timedelta(hours=2)),
        ("1d", timedelta(days=1)),
        ("1w", timedelta(weeks=1)),
        ("PT1H30M", timedelta(minutes=90)),
        ("P1DT0.5S", timedelta(days=1, seconds=0.5)),
    ],
)
def test_durations_are_short_or_of_iso_8601(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "P", "PT", "1", "-1h", "1h30m", "PT1.5H", "9" * 5000 + "s", "٣h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="no duration"):
        parse_duration(text)
