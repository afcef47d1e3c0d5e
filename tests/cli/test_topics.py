"""`spark-broker topics`: what it does, what it prints, and what a mistake gets."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spark_broker.protocol.messages import HistoryMetadata
from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster


def test_a_topic_is_created_listed_described_grown_and_deleted(cluster: FakeCluster, run: Run) -> None:
    assert run("topics", "create", "t", "--partitions", 2, "-c", "retention.ms=1000").status == 0
    assert cluster.topics["t"].config == {"retention.ms": "1000"}
    assert run("topics", "list").out == "t\n"
    assert run("topics", "add-partitions", "t", "--partitions", 3).status == 0
    described = run("topics", "describe", "t", "--output", "json").json
    assert [partition["partition"] for partition in described["partitions"]] == [0, 1, 2]
    assert run("topics", "delete", "t").status == 0
    assert run("topics", "list", "-o", "json").json == []


def test_settings_are_changed_and_reset(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", config={"retention.ms": "1000", "segment.bytes": "2000"})
    ended = run(
        "topics", "alter-config", "t", "-c", "retention.ms=5", "-c", "max.message.bytes=10", "--reset", "segment.bytes"
    )
    assert (ended.status, ended.out) == (0, "")
    assert ended.err == "topic t has max.message.bytes=10, retention.ms=5\n"
    assert cluster.topics["t"].config == {"retention.ms": "5", "max.message.bytes": "10"}
    ended = run("topics", "alter-config", "t", "--reset", "retention.ms", "-o", "json")
    assert (ended.status, ended.json) == (0, {"max.message.bytes": "10"})
    ended = run("topics", "alter-config", "t", "--reset", "max.message.bytes")
    assert ended.err == "topic t has the defaults of the cluster\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "nothing is named to change"),
        (("-c", "retention.msec=5"), "retention.ms"),
        (("--reset", "retention.msec"), "retention.ms"),
        (("-c", "retention.ms=soon"), "retention.ms"),
        (("-c", "retention.ms=5", "--reset", "retention.ms"), "retention.ms is to be set and reset"),
    ],
)
def test_a_mistake_in_a_change_of_settings_changes_nothing(
    cluster: FakeCluster, run: Run, given: tuple[str, ...], said: str
) -> None:
    cluster.create("t", config={"retention.ms": "1000"})
    ended = run("topics", "alter-config", "t", *given)
    assert (ended.status, ended.err.startswith("error: [INVALID_CONFIG]")) == (1, True)
    assert said in ended.err
    assert cluster.topics["t"].config == {"retention.ms": "1000"}


def test_columns_are_given_by_name_and_type(cluster: FakeCluster, run: Run) -> None:
    columns = ("--column", "dest:string", "--column", "delay:int16", "--column", "at:timestamp")
    assert run("topics", "create", "t", *columns, "-c", "key.columns=dest").status == 0
    described = run("topics", "describe", "t", "-o", "json").json
    assert described["schema"] == {"dest": "string", "delay": "int16", "at": "timestamp[us, tz=UTC]"}
    assert cluster.topics["t"].parsed_schemas[0].field("delay").type == pa.int16()


def test_what_was_created_is_said(run: Run, cluster: FakeCluster) -> None:
    assert run("topics", "create", "t", "--partitions", 2).err == "created topic t: 2 partitions, 3 replicas of each\n"
    assert "3 at most" in " ".join(run("topics", "create", "--help").out.split())


def test_a_column_of_no_type_is_refused_and_nothing_is_created(cluster: FakeCluster, run: Run) -> None:
    ended = run("topics", "create", "t", "--column", "n:number")
    assert ended.status == 1
    assert "'number' is no type" in ended.err
    assert cluster.topics == {}


def test_a_table_shows_leaders_and_offsets_of_each_partition(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", 2)
    lines = run("topics", "describe", "t").out.splitlines()
    cells = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert cells == [["0", "0", "0", "0,1,2", "0,1,2", "0", "0"], ["1", "1", "0", "0,1,2", "0,1,2", "0", "0"]]


def test_a_table_shows_the_history_of_each_partition_and_why_tiering_stopped(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", 2, config={"delta.path": "/lake/t"})
    assert "history in /lake/t: not begun" in run("topics", "describe", "t").out
    cluster.topics["t"].history = HistoryMetadata("a-table", 4, 7, [0], [5], "the table is gone", 12)
    cluster.topics["t"].sealed_offset = 9
    ended = run("topics", "describe", "t")
    assert "history in /lake/t: table version 7" in ended.out
    assert "tiering has stopped: the table is gone" in ended.err
    assert "12 records that the table refuses are in /lake/t_dead_letters" in ended.err
    cells = [line.split() for line in ended.out.splitlines() if line.strip()[:1].isdigit()]
    assert cells[2:] == [["0", "0..5", "9", "0"], ["1", "-", "9", "0"]]
    assert "no run of the cluster's own is known" in ended.err
    described = run("topics", "describe", "t", "-o", "json").json
    assert described["history"] == {
        "path": "/lake/t",
        "table_version": 7,
        "stopped": "the table is gone",
        "quarantined": 12,
        "dead_letters": "/lake/t_dead_letters",
        "next_run_s": None,
        "by_time": True,
    }


def test_a_table_says_when_the_next_run_comes_and_what_it_waits_for(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", 1, config={"delta.path": "/lake/t"})
    cluster.topics["t"].next_tiering_ms = 34_000
    assert "next run begins in 34 s, and appends what is committed then" in " ".join(
        run("topics", "describe", "t").err.split()
    )
    cluster.topics["t"].config["delta.commit.interval.ms"] = "-1"
    said = " ".join(run("topics", "describe", "t").err.split())
    assert "in 34 s, and appends what is sealed: a record seals a segment that is full (segment.bytes)" in said
    cluster.topics["t"].next_tiering_ms = 0
    said = " ".join(run("topics", "describe", "t").err.split())
    assert "a run has begun, or is due, and appends what is sealed" in said, "it said: in 0 s, for minutes"


def test_an_existing_topic_is_an_error_unless_asked(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    ended = run("topics", "create", "t")
    assert (ended.status, ended.out) == (1, "")
    assert "TOPIC_ALREADY_EXISTS" in ended.err
    assert run("topics", "create", "t", "--if-not-exists").status == 0


def test_an_unknown_setting_names_the_nearest_before_anything_is_created(cluster: FakeCluster, run: Run) -> None:
    ended = run("topics", "create", "t", "--config", "retention.m=5")
    assert ended.status == 1
    assert "did you mean 'retention.ms'?" in ended.err
    assert cluster.topics == {}


def test_an_error_is_one_line_with_what_to_do_next(cluster: FakeCluster, run: Run) -> None:
    ended = run("topics", "describe", "nowhere")
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("error: [UNKNOWN_TOPIC_OR_PARTITION] ")
    assert "->" in ended.err


def test_a_partition_with_two_offsets_loses_no_record(cluster: FakeCluster, run: Run) -> None:
    """Story: `--before 0=9 --before 0=5` took the last without a word, and nothing brings records back."""
    cluster.create("t")
    run("produce", "t", stdin=b"a\nb\nc\n")
    ended = run("topics", "delete-records", "t", "--before", "0=1", "--before", "0=2")
    assert ended.status == 1
    assert "[INVALID_CONFIG] --before names partition 0 with two offsets" in ended.err
    assert cluster.topics["t"].partitions[0].log_start_offset == 0


def test_a_setting_with_two_values_is_refused_and_one_that_is_repeated_counts_once(
    cluster: FakeCluster, run: Run
) -> None:
    """Story: the last one counted, without a word."""
    ended = run("topics", "create", "t", "-c", "retention.ms=5", "-c", "retention.ms = 6")
    assert "[INVALID_CONFIG] retention.ms has two values, '5' and '6'" in ended.err
    assert cluster.topics == {}
    assert run("topics", "create", "t", "-c", "retention.ms=5", "-c", "retention.ms = 5").status == 0
    assert cluster.topics["t"].config == {"retention.ms": "5"}


@pytest.mark.parametrize("letter", ["湖", "\N{LATIN SMALL LETTER E}\N{COMBINING ACUTE ACCENT}", "\N{WATER WAVE}"])
def test_a_row_in_a_pipe_is_one_line_however_wide_its_letters_are(cluster: FakeCluster, run: Run, letter: str) -> None:
    """Story: letters that take two places of a terminal were counted as one, and rows were wrapped."""
    path = f"/lake/{letter * 60}/flights"
    cluster.create("t", config={"delta.path": path})
    rows = [line.split() for line in run("topics", "describe", "t").out.splitlines()]
    assert ["delta.path", path] in rows
