"""`spark-broker produce` and `consume`: lines in, the same lines out, by place, number and form."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from spark_broker import Consumer, TopicPartition
from spark_broker.cli.produce import CHUNK_BYTES, LINE_BYTES_MAX
from spark_broker.client.producer import Producer
from spark_broker.errors import InvalidRecordError, SparkBrokerError
from spark_broker.model import RecordMetadata
from spark_broker.protocol.frame import BatchHeader
from spark_broker.protocol.messages import AppendRequest
from spark_broker.protocol.schema import DEFAULT_SCHEMA, TIMESTAMP_TYPE
from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster, StoreSilently
from tests.support.waiting import eventually

TYPED = pa.schema([("dest", pa.string()), ("delay", pa.int16()), ("at", TIMESTAMP_TYPE)])


def values(cluster: FakeCluster, topic: str, partition: int = 0) -> list[object]:
    return [row["value"] for row in cluster.rows(topic, partition)]


def test_each_line_is_a_record_in_order(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    ended = run("produce", "t", "--output", "json", stdin=b"one\r\ntwo\n\nfour, unfinished")
    assert ended.status == 0
    assert ended.json == {"topic": "t", "records": 4, "batches": 2}
    assert values(cluster, "t") == [b"one", b"two", b"", b"four, unfinished"]


def test_nothing_in_is_nothing_stored(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    assert run("produce", "t", "-o", "json").json["records"] == 0
    assert cluster.rows("t", 0) == []


def test_a_separator_parts_key_and_value_at_its_first_place(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    assert run("produce", "t", "--key-separator", ":", stdin=b"a:1\nb:2:3\n").status == 0
    assert [(row["key"], row["value"]) for row in cluster.rows("t", 0)] == [(b"a", b"1"), (b"b", b"2:3")]


def test_a_separator_may_be_bytes_that_are_no_text(cluster: FakeCluster, run: Run) -> None:
    """Story: lines of a file in Latin-1 were a traceback."""
    cluster.create("t")
    separator = os.fsdecode(b"\xa7")
    assert run("produce", "t", "--key-separator", separator, stdin=b"a\xa71\n").status == 0
    assert [(row["key"], row["value"]) for row in cluster.rows("t", 0)] == [(b"a", b"1")]
    assert r"line 1: '\\xa7' is not in 'ab'" in run("produce", "t", "--key-separator", separator, stdin=b"ab").err


def test_a_line_without_the_separator_is_shown_and_ends_the_input(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    ended = run("produce", "t", "--key-separator", ":", stdin=b"a:1\nno key\nb:2\n")
    assert ended.status == 1
    assert "line 2: ':' is not in 'no key'; 1 record was acknowledged before" in ended.err
    assert values(cluster, "t") == [b"1"]


def test_a_bad_line_after_many_says_what_is_stored_and_where_to_go_on(cluster: FakeCluster, run: Run) -> None:
    """Story: line 30,001 of a file was bad. Nobody knew which lines were stored."""
    cluster.create("t")
    lines = [b"key-%d:value-%d" % (number, number) for number in range(1, 30_003)]
    lines[30_000] = b"no key"
    ended = run("produce", "t", "--key-separator", ":", stdin=b"\n".join(lines))
    assert ended.status == 1
    assert "line 30,001: ':' is not in 'no key'; 30,000 records were acknowledged before" in ended.err
    assert "Mend line 30,001 and go on with it: `tail -n +30001 FILE`" in ended.err
    assert "--skip-bad" in ended.err
    assert len(values(cluster, "t")) == 30_000

    lines[30_000] = b"mended:value-30001"
    assert run("produce", "t", "--key-separator", ":", stdin=b"\n".join(lines[30_000:])).status == 0
    assert values(cluster, "t") == [b"value-%d" % number for number in range(1, 30_003)]


@pytest.mark.parametrize("typed", [False, True])
def test_bad_lines_are_skipped_if_that_is_asked_for(cluster: FakeCluster, run: Run, typed: bool) -> None:
    cluster.create("t", schema=TYPED if typed else DEFAULT_SCHEMA)
    good, bad = (b'{"dest": "SEA"}', b'{"dest": 5}') if typed else (b"a:1", b"no key")
    separator = () if typed else ("--key-separator", ":")
    lines = [bad, *[good] * 500, bad, good, *[bad] * 20]
    ended = run("produce", "t", "--skip-bad", *separator, "-o", "json", stdin=b"\n".join(lines))
    assert ended.status == 0
    assert ended.json == {"topic": "t", "records": 501, "batches": 1, "skipped": 22}
    assert len(cluster.rows("t", 0)) == 501
    told = [line for line in ended.err.splitlines() if line.startswith("skipped: ")]
    assert [line.split()[2].strip(":") for line in told[:4]] == ["1", "502", "504", "505"]
    assert (len(told), told[-1]) == (11, "skipped: more lines")
    ended = run("produce", "t", "--skip-bad", *separator, stdin=good + b"\n" + bad)
    assert ended.err.endswith("1 record in 1 batch acknowledged; 1 line was skipped\n")


def test_a_text_that_is_not_utf_8_is_a_bad_line_like_any_other(cluster: FakeCluster, run: Run) -> None:
    """Story: the broker refused the whole chunk, and named no line."""
    cluster.create("t", schema=TYPED)
    lines = [b'{"dest": "SEA"}', b'{"dest": "caf\xe9"}', b'{"dest": "ORD"}']
    ended = run("produce", "t", stdin=b"\n".join(lines))
    assert (ended.status, "line 2 is no JSON object" in ended.err) == (1, True)
    ended = run("produce", "t", "--skip-bad", "-o", "json", stdin=b"\n".join(lines))
    assert (ended.status, ended.json["records"], ended.json["skipped"]) == (0, 2, 1)


@pytest.mark.parametrize("line", [b"null", b"5", b'"text"', b"[]"])
def test_a_line_that_is_no_object_is_a_bad_line(cluster: FakeCluster, run: Run, line: bytes) -> None:
    """Story: Arrow crashed on a first line `null`; a later one became a record without values."""
    cluster.create("t", schema=TYPED)
    for lines in ([line, b'{"dest": "SEA"}'], [b'\xef\xbb\xbf{"dest": "SEA"}', b" " + line]):
        ended = run("produce", "t", "--skip-bad", "-o", "json", stdin=b"\n".join(lines))
        assert (ended.status, ended.json["records"], ended.json["skipped"]) == (0, 1, 1)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([b'{"delay": 1}{"delay": 2}'], "it is more than one object"),
        ([b'{"delay": 1} {"dest": "SEA"}'], "it is more than one object"),
        ([b'{"deep":', b'{"x": 1}}'], ""),
        ([b'{"delay": 1}{"delay": 2}', b'{"dest":', b'"SEA"}'], ""),  # as many objects as lines
    ],
)
def test_each_line_is_exactly_one_object(cluster: FakeCluster, run: Run, bad: list[bytes], why: str) -> None:
    """Story: the halves of two damaged lines became one record, also with --skip-bad. Two objects were two records."""
    cluster.create("t", schema=pa.schema([*TYPED, ("deep", pa.struct([("x", pa.int64())])), ("share", pa.float64())]))
    lines = [b'{"delay": 7}', *bad, b'\xef\xbb\xbf{"delay": 8, "share": NaN}']
    ended = run("produce", "t", stdin=b"\n".join(lines))
    assert ended.status == 1
    assert f"line 2 is no JSON object of the topic's columns: {why}" in ended.err
    ended = run("produce", "t", "--skip-bad", "-o", "json", stdin=b"\n".join(lines))
    assert (ended.status, ended.json["records"], ended.json["skipped"]) == (0, 2, len(bad))
    assert [row["delay"] for row in cluster.rows("t", 0)] == [7, 7, 8]


def test_a_line_of_json_may_be_larger_than_a_block_of_arrows(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", schema=TYPED)
    ended = run("produce", "t", "-o", "json", stdin=b'{"dest": "%s"}' % (b"x" * (5 << 20)))
    assert (ended.status, ended.json["records"]) == (0, 1)


def test_columns_with_the_names_of_places_are_shown_beside_the_places(cluster: FakeCluster, run: Run) -> None:
    """Story: the user's column `offset` was shown as the record's offset."""
    cluster.create("t", schema=pa.schema([("topic", "string"), ("offset", "int64"), ("partition", "int64")]))
    assert run("produce", "t", stdin=b'{"topic": "mine", "offset": 777, "partition": 9}').status == 0
    line = run("consume", "t", "--follow", "--num", "1").out
    assert line.startswith("0@0  ")
    assert "topic=mine" in line
    assert "offset=777" in line
    assert "mine" in run("consume", "t", "--offset", "earliest").out


def test_an_empty_line_is_no_object_and_no_mistake(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", schema=TYPED)
    ended = run("produce", "t", "-o", "json", stdin=b"\n")
    assert (ended.status, ended.json["records"]) == (0, 0)


def test_an_append_that_fails_says_what_is_stored_before_it(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")

    def refuse_the_second(broker: int, request: AppendRequest, header: BatchHeader) -> SparkBrokerError | None:
        return None if header.base_sequence == 0 else InvalidRecordError("not this one")

    cluster.append_hook = refuse_the_second
    lines = b"one\n" + b"x" * (2 * CHUNK_BYTES) + b"\n"
    ended = run("produce", "t", stdin=lines)
    assert ended.status == 1
    assert "[INVALID_RECORD] not this one; " in ended.err
    stored = len(values(cluster, "t"))
    said = f"{stored} {'record was' if stored == 1 else 'records were'} acknowledged before"
    assert f"{said}, and some of the lines from {stored + 1} on may be" in ended.err


def test_a_line_that_does_not_end_is_named_with_what_is_stored(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    ended = run("produce", "t", stdin=b"one\ntwo\n" + b"x" * (LINE_BYTES_MAX + CHUNK_BYTES + 1))
    assert ended.status == 1
    assert "line 3 has more than 16,777,216 bytes; 2 records were acknowledged before" in ended.err
    assert values(cluster, "t") == [b"one", b"two"]


def test_a_pause_of_a_pipe_that_does_not_block_is_not_its_end(cluster: FakeCluster) -> None:
    """Story: another process had set O_NONBLOCK. The first moment without data ended the command, with status 0."""
    cluster.create("t")
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.write(writer, b"one\ntwo\nth")
    command = [sys.executable, "-m", "spark_broker.cli.main", "produce", "t", "-b", cluster.bootstrap, "-o", "json"]
    with subprocess.Popen(command, stdin=reader, stdout=subprocess.PIPE) as process:
        os.close(reader)
        eventually(lambda: len(values(cluster, "t")) == 2)
        os.write(writer, b"ree\nfour")
        os.close(writer)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert values(cluster, "t") == [b"one", b"two", b"three", b"four"]
    assert b'"records":4' in said


def test_an_interrupt_says_what_is_stored(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    command = [sys.executable, "-m", "spark_broker.cli.main", "produce", "t", "-b", cluster.bootstrap]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"one\ntwo\nhalf of the th")
        process.stdin.flush()
        eventually(lambda: len(values(cluster, "t")) == 2)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read().decode()
    assert process.returncode != 0
    assert "2 records were acknowledged before: go on with line 3" in said


def test_an_interrupt_within_an_append_says_that_some_of_its_lines_may_be_stored(cluster: FakeCluster) -> None:
    """Story: the lines of one partition were handed on, those of another waited for room. After Ctrl-C the command said
    where to go on, and the first ones were stored twice."""
    cluster.create("t", 2)
    cluster.append_hook = lambda broker, request, header: StoreSilently()
    command = [sys.executable, "-m", "spark_broker.cli.main", "produce", "t", "-b", cluster.bootstrap]
    options = ("--key-separator", ":", "-c", "buffer.memory=1024")
    with subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"".join(b"%d:%s\n" % (number, b"x" * 300) for number in range(10)))
        process.stdin.flush()
        eventually(lambda: cluster.arrivals)
        process.send_signal(signal.SIGINT)
        said = process.stderr.readline().decode()
        process.kill()  # It waits for the answer.
    assert "0 records were acknowledged before, and some of the lines from 1 on may be" in said
    assert "going on with line 1 may store them twice" in said
    assert 0 < len(cluster.rows("t", 0) + cluster.rows("t", 1)) < 10


class InterruptedOnce(Future[list[RecordMetadata]]):
    """Ctrl-C ends the first wait for it."""

    def __init__(self, stored: Future[list[RecordMetadata]]) -> None:
        super().__init__()
        self._stored = stored
        self._was_interrupted = False

    def result(self, timeout: float | None = None) -> list[RecordMetadata]:
        if not self._was_interrupted:
            self._was_interrupted = True
            raise KeyboardInterrupt
        return self._stored.result(timeout)


def test_an_interrupt_while_the_last_append_is_awaited_counts_it(
    cluster: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the append was forgotten, and its lines were stored."""
    cluster.create("t")
    append = Producer.append

    def interrupted(
        producer: Producer, topic: str, data: object, *, partition: int | None = None
    ) -> Future[list[RecordMetadata]]:
        return InterruptedOnce(append(producer, topic, data, partition=partition))

    monkeypatch.setattr(Producer, "append", interrupted)
    ended = run("produce", "t", stdin=b"one\ntwo\n")
    assert (ended.status, ended.err) == (130, "2 records were acknowledged before: go on with line 3\n")
    assert values(cluster, "t") == [b"one", b"two"]


def test_a_typed_topic_takes_json_and_gives_it_back(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t", schema=TYPED)
    lines = b'{"dest":"SEA","delay":-3,"at":"2013-01-01T10:00:00Z"}\n{"delay":7,"dest":"LAX"}\n'
    assert run("produce", "t", stdin=lines).status == 0
    first, second = run("consume", "t", "-o", "json").json_lines
    assert (first["dest"], first["delay"], first["at"]) == ("SEA", -3, "2013-01-01T10:00:00Z")
    assert (second["dest"], second["at"], second["_offset"], second["_topic"]) == ("LAX", None, 1, "t")
    assert run("consume", "t", "-o", "value").out.splitlines()[1] == '{"dest":"LAX","delay":7,"at":null}'


def test_dates_are_text_wherever_they_are_in_a_line(cluster: FakeCluster, run: Run) -> None:
    """Story: a date was taken as a number of days alone, and every line of `consume` was refused by `produce`."""
    day = pa.date32()
    schema = pa.schema([("day", day), ("days", pa.list_(day)), ("deep", pa.struct([("day", day)])), ("n", pa.int8())])
    cluster.create("t", schema=schema)
    line = b'{"day":"2026-01-31","days":["2026-02-01",null],"deep":{"day":"1969-12-31"},"n":1}'
    assert run("produce", "t", stdin=line + b'\n{"n":2}\n').status == 0
    assert run("consume", "t", "-o", "value").out.splitlines()[0].encode() == line
    ended = run("produce", "t", stdin=b'{"day":"2026-01-31"}\n{"day":"31.1.2026"}\n')
    assert "line 2 is no JSON object of the topic's columns" in ended.err


@pytest.mark.parametrize("kind", [pa.map_(pa.string(), pa.int32()), pa.duration("us"), pa.list_(pa.time64("us"))])
def test_a_column_that_no_line_can_have_is_named_before_anything_is_read(
    cluster: FakeCluster, run: Run, kind: pa.DataType
) -> None:
    cluster.create("t", schema=pa.schema([("odd", kind)]))
    ended = run("produce", "t", stdin=b"{}\n")
    assert ended.status == 1
    assert "[INVALID_DATA] column 'odd' is" in ended.err
    assert "Producer.append" in ended.err


@pytest.mark.parametrize("line", [b'{"dest": 5}', b'{"nowhere": 1}', b"not json", b'{"delay": 70000}'])
def test_json_that_does_not_fit_the_columns_ends_the_input(cluster: FakeCluster, run: Run, line: bytes) -> None:
    cluster.create("t", schema=TYPED)
    ended = run("produce", "t", stdin=b'{"dest": "SEA"}\n' + line + b"\n")
    assert ended.status == 1
    assert "[INVALID_DATA] line 2 is no JSON object of the topic's columns: " in ended.err
    assert "1 record was acknowledged before" in ended.err
    assert [row["dest"] for row in cluster.rows("t", 0)] == ["SEA"]


@pytest.fixture
def ten(cluster: FakeCluster, run: Run) -> FakeCluster:
    """A topic `t` of two partitions: 0 to 9 in the first, as two batches, and one record in the second."""
    cluster.create("t", 2)
    for lines in (b"0\n1\n2\n3\n4\n5\n", b"6\n7\n8\n9\n"):
        run("produce", "t", "--partition", 0, stdin=lines)
    run("produce", "t", "--partition", 1, stdin=b"other\n")
    return cluster


def test_everything_is_read_once_and_the_command_ends(ten: FakeCluster, run: Run) -> None:
    assert sorted(run("consume", "t", "-o", "value").out.split()) == [*"0123456789", "other"]


def test_an_offset_inside_a_batch_and_a_number_cut_it(ten: FakeCluster, run: Run) -> None:
    ended = run("consume", "t", "-p", 0, "--offset", 4, "--num", 4, "-o", "value")
    assert ended.out.split() == ["4", "5", "6", "7"]


def test_json_names_the_place_as_the_dataframe_does(ten: FakeCluster, run: Run) -> None:
    (record,) = run("consume", "t", "-p", 1, "-o", "json").json_lines
    assert list(record) == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]
    assert (record["topic"], record["partition"], record["offset"], record["value"]) == ("t", 1, 0, "other")


def test_bytes_that_are_no_text_are_marked(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    run("produce", "t", stdin=b"\xff\xfe\n")
    (record,) = run("consume", "t", "-o", "json").json_lines
    assert base64.b64decode(record["value"]["base64"]) == b"\xff\xfe"


def test_a_record_stays_on_its_line_for_people_and_as_it_is_for_programs(cluster: FakeCluster, run: Run) -> None:
    """Story: `--follow` promises one record on one line. A value with a line feed was two, and ESC[2J cleared them."""
    value = "a\nb\x1b[2J\u2028\u202e\tc"
    cluster.create("t")
    cluster.store("t", 0, pa.RecordBatch.from_pylist([{"value": value.encode()}], schema=DEFAULT_SCHEMA))
    for options in ((), ("--follow", "-n", "1")):
        assert r"a\nb\x1b[2J\u2028\u202e\tc" in run("consume", "t", *options).out
    (line,) = run("consume", "t", "--follow", "-n", "1").out.split("\n")[:-1]
    assert line.startswith("0@0  ")
    assert run("consume", "t", "-o", "value").out == value + "\n"
    assert run("consume", "t", "-o", "json").json["value"] == value


@pytest.fixture
def with_one_of_the_year_50000(cluster: FakeCluster) -> FakeCluster:
    """Three records of a typed topic; Python cannot show the time of the second."""
    cluster.create("t", schema=pa.schema([("n", pa.int64()), ("at", TIMESTAMP_TYPE)]))
    times = pa.array([0, 1 << 61, 0], pa.int64()).cast(TIMESTAMP_TYPE)
    cluster.store("t", 0, pa.record_batch([pa.array([1, 2, 3], pa.int64()), times], names=["n", "at"]))
    return cluster


@pytest.mark.usefixtures("with_one_of_the_year_50000")
@pytest.mark.parametrize("options", [("-o", "json"), ("-o", "value"), (), ("--follow", "-n", 3)], ids=str)
def test_a_record_that_cannot_be_shown_is_left_out_and_the_status_is_one(run: Run, options: tuple[object, ...]) -> None:
    """Story: the output of a script lacked records, and the status was 0."""
    ended = run("consume", "t", *options)
    assert ended.status == 1
    assert ended.out.count("1970-01-01") == 2
    assert "error: [RECORD_NOT_SHOWABLE] t-0 offset 1, column at" in ended.err
    assert ended.err.endswith("\n1 record could not be shown\n")


@pytest.mark.usefixtures("with_one_of_the_year_50000")
def test_records_of_which_none_can_be_shown_are_not_told_to_be_none(run: Run) -> None:
    ended = run("consume", "t", "--offset", "1", "-n", "1")
    assert (ended.status, ended.out) == (1, "")
    assert "nothing to read" not in ended.err


@pytest.mark.usefixtures("with_one_of_the_year_50000")
def test_a_table_with_a_record_left_out_says_how_to_see_more(run: Run) -> None:
    assert "1 of up to 3 records; --num 3" in run("consume", "t", "-n", "2").err
    assert "of up to" not in run("consume", "t", "-n", "3").err


def test_latest_without_follow_says_that_there_is_nothing(ten: FakeCluster, run: Run) -> None:
    ended = run("consume", "t", "--offset", "latest")
    assert (ended.status, ended.out) == (0, "")
    assert "nothing to read" in ended.err


def test_a_time_before_everything_reads_all_and_one_after_nothing(ten: FakeCluster, run: Run) -> None:
    assert len(run("consume", "t", "--offset", "2001-01-01", "-o", "value").out.split()) == 11
    assert run("consume", "t", "--offset", "2101-01-01T00:00:00+02:00", "-o", "value").out == ""


@pytest.mark.usefixtures("in_tokyo")
def test_times_are_utc_where_they_are_read_and_where_they_are_typed(ten: FakeCluster, run: Run) -> None:
    """Story: a time that the table showed, given to --offset, was taken for local time: it was hours away."""
    with Producer(ten.bootstrap) as producer:
        producer.send("t", "x", partition=1, timestamp=datetime(2026, 11, 26, 2, 53, tzinfo=UTC)).result(30)
    assert "2026-11-26 02:53:00.000Z" in run("consume", "t", "-p", 1).out
    assert "timestamp=2026-11-26 02:53:00.000Z" in run("consume", "t", "-p", 1, "--follow", "-n", 2).out
    appended, second = "2023-11-14 22:13:20", "2023-11-14T22:13:21"  # The fake cluster has one time for all.
    for text in (appended, f"{appended}.000Z", "2023-11-15T07:13:20+09:00"):
        ended = run("consume", "t", "-p", 0, "--offset", text, "-o", "value")
        assert (len(ended.out.split()), ended.err) == (10, "from 2023-11-14 22:13:20.000Z on\n")
    ended = run("consume", "t", "-p", 0, "--offset", second, "-o", "value")
    assert (ended.out, ended.err) == ("", "from 2023-11-14 22:13:21.000Z on\n")


@pytest.mark.usefixtures("in_tokyo")
def test_a_column_without_a_zone_is_shown_as_it_is(cluster: FakeCluster, run: Run) -> None:
    schema = pa.schema([("at", TIMESTAMP_TYPE), ("local", pa.timestamp("us")), ("day", pa.date32())])
    cluster.create("t", schema=schema)
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    with Producer(cluster.bootstrap) as producer:
        producer.append("t", [{"at": noon, "local": noon.replace(tzinfo=None), "day": noon.date()}]).result(30)
    cells = run("consume", "t").out.splitlines()[3].split("  ")
    assert [cell.strip() for cell in cells if cell.strip()][:3] == [
        *("2026-01-31 12:00:00.000Z", "2026-01-31 12:00:00.000", "2026-01-31"),
    ]


def test_follow_goes_on_with_what_comes_later(ten: FakeCluster, run: Run) -> None:
    """Twelve records are asked for and eleven are there: only what is appended meanwhile ends the command."""

    def append_once_read() -> None:
        eventually(lambda: any(partition.offset == 1 for f in list(ten.fetches) for partition in f.partitions))
        with Producer(ten.bootstrap) as producer:
            producer.append("t", [{"value": b"late"}], partition=1).result(30)

    later = threading.Thread(target=append_once_read)
    later.start()
    ended = run("consume", "t", "--follow", "--num", 12, "-o", "value")
    later.join(30)
    assert ended.status == 0
    assert sorted(ended.out.split()) == [*"0123456789", "late", "other"]


def test_a_table_shows_the_first_records_and_how_to_see_more(cluster: FakeCluster, run: Run) -> None:
    cluster.create("t")
    run("produce", "t", stdin=b"".join(b"value-%d\n" % i for i in range(25)))
    ended = run("consume", "t")
    assert ended.out.count("value-") == 20
    assert "20 of up to 25 records" in ended.err


def test_records_of_open_and_aborted_transactions_are_left_out_unless_they_are_asked_for(
    ten: FakeCluster, run: Run
) -> None:
    with Producer(ten.bootstrap, transactional_id="x") as producer:
        for end, value in ((producer.abort_transaction, "aborted"), (producer.commit_transaction, "committed")):
            producer.begin_transaction()
            producer.send("t", value, partition=1)
            producer.flush()
            end()
        producer.begin_transaction()
        producer.send("t", "open", partition=1).result(30)
        read = run("consume", "t", "-p", 1, "-o", "value")
        assert read.out.split() == ["other", "committed"]
        read = run("consume", "t", "-p", 1, "-o", "value", "--isolation-level", "read_uncommitted")
        assert read.out.split() == ["other", "aborted", "committed", "open"]
        table = run("consume", "t", "-p", 1)
        assert (table.out.count("committed"), table.err) == (1, ""), (
            "all there is was shown: there is no more to ask for"
        )
        assert run("perf", "consume", "--topic", "t", "-o", "json").json["records"] == 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--offset", "9" * 5000), "99': earliest, latest, a number, or a time"),
        (("--bootstrap-server", "a:" + "9" * 5000), "is not `host:port`"),
        (("--offset", "soon"), "'soon': earliest, latest, a number, or a time"),
        (("--offset", "0001-01-01T00:00+01:00"), "'0001-01-01T00:00+01:00': earliest, latest, a number, or a time"),
        (("--partition", "7"), "partitions 0 to 1, not 7"),
        (("-c", "fetch.max.byte=1"), "did you mean 'fetch.max.bytes'?"),
    ],
)
def test_a_mistake_is_one_line(ten: FakeCluster, run: Run, arguments: tuple[str, ...], said: str) -> None:
    ended = run("consume", "t", *arguments)
    assert (ended.status, ended.out) == (1, "")
    assert said in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("said", [True, False])
def test_an_offset_below_the_log_start_reads_what_is_there(
    cluster: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch, said: bool
) -> None:
    """Story: the position went to the end, nothing was printed, and the status was 0. `said`: before the start."""
    cluster.create("t")
    for value in range(10):
        run("produce", "t", stdin=b"%d\n" % value)
    partition = cluster.topics["t"].partitions[0]

    def delete() -> None:
        partition.log, partition.log_start_offset = partition.log[5:], 5

    if said:
        delete()
        ended = run("consume", "t", "--offset", "2", "-o", "value")
        assert "before 5 are deleted" in ended.err
    else:
        beginning_offsets = Consumer.beginning_offsets

        def deleted_meanwhile(consumer: Consumer, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
            begins = beginning_offsets(consumer, partitions)
            delete()
            return begins

        monkeypatch.setattr(Consumer, "beginning_offsets", deleted_meanwhile)
        ended = run("consume", "t", "-o", "value")
    assert ended.out.split() == ["5", "6", "7", "8", "9"]


@pytest.mark.parametrize("follow", [False, True])
def test_an_offset_beyond_the_end_of_one_partition_reads_none_of_its_records(
    cluster: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    cluster.create("t", 2)
    for partition, values_there in ((0, b"0\n1\n"), (1, b"0\n1\n2\n3\n4\n5\n")):
        for value in values_there.split():
            run("produce", "t", "--partition", partition, stdin=value + b"\n")
    last = ("--follow", "--num", "2") if follow else ()
    ended = run("consume", "t", "--offset", "4", "-o", "value", *last)
    assert "t-0 ends at 2" in ended.err
    assert ended.out.split() == ["4", "5"]
