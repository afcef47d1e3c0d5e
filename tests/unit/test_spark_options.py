"""Options of a read are those of Spark's Kafka source in any case; a mistake is a typed error that helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spark_broker.errors import InvalidConfigError
from spark_broker.model import TopicPartition
from spark_broker.spark.bounds import ByOffset, ByTimestamp, Earliest, Latest
from spark_broker.spark.limits import Limits
from spark_broker.spark.option_table import SETTINGS, TABLE, WITHOUT_EFFECT, Option, Query
from spark_broker.spark.options import ReadOptions, parse_options
from spark_broker.spark.ranges import TaskRules, TaskSize
from spark_broker.spark.selection import Assign, SubscribedTopics, SubscribePattern

SERVERS = {"bootstrap.servers": "127.0.0.1:9092"}


def parse(**options: str) -> ReadOptions:
    return parse_options({**SERVERS, "subscribe": "flights", **options})


def parse_stream(**options: str) -> ReadOptions:
    return parse_options({**SERVERS, "subscribe": "flights", **options}, Query.STREAM)


def test_a_job_for_sparks_kafka_source_needs_another_format_name_and_nothing_else() -> None:
    kafka = {
        "kafka.bootstrap.servers": "a:1,b:2",
        "subscribe": "flights, trains,flights",
        "startingOffsets": "earliest",
        "endingOffsets": "latest",
        "includeHeaders": "true",
        "failOnDataLoss": "false",
        "minPartitions": "8",
        "kafka.request.timeout.ms": "1234",
        "maxOffsetsPerTrigger": "1000",
        "minOffsetsPerTrigger": "10",
        "maxTriggerDelay": "5m",
        **dict.fromkeys(WITHOUT_EFFECT, "1"),
    }
    options = parse_options({name.lower(): value for name, value in kafka.items()})
    assert options.selection == SubscribedTopics(("flights", "trains"))
    assert (options.start, options.end) == (Earliest(), Latest())
    assert (options.include_headers, options.fail_on_data_loss, options.tasks.at_least) == (True, False, 8)
    assert options.settings.bootstrap_servers == ("a:1", "b:2")
    assert options.settings.request_timeout_ms == 1234


def test_the_defaults_are_those_of_a_batch_read_of_kafka() -> None:
    options = parse()
    assert (options.start, options.end) == (Earliest(), Latest())
    assert (options.include_headers, options.fail_on_data_loss, options.columns) == (False, True, None)
    assert options.tasks == TaskRules(TaskSize(records=100_000, bytes=16 << 20))


@pytest.mark.parametrize(
    ("options", "selection"),
    [
        ({"subscribe": "a"}, SubscribedTopics(("a",))),
        ({"path": "a"}, SubscribedTopics(("a",))),
        ({"paths": '["a","b"]'}, SubscribedTopics(("a", "b"))),
        ({"subscribepattern": "fl.*"}, SubscribePattern("fl.*")),
        ({"assign": '{"a":[2,0,2],"b":[1]}'}, Assign({"a": (0, 2), "b": (1,)})),
    ],
)
def test_topics_are_named_in_any_of_these_ways(options: dict[str, str], selection: object) -> None:
    assert parse_options({**SERVERS, **options}).selection == selection


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"subscribe": "a", "assign": '{"a":[0]}'},
        {"subscribe": "a", "path": "a"},
        {"subscribe": " , "},
        {"subscribepattern": "fl(*"},
        {"assign": "[1]"},
        {"assign": "{}"},
        {"assign": '{"a":[]}'},
        {"assign": '{"a":["0"]}'},
        {"assign": '{"a":[true]}'},
        {"assign": '{"a":[-1]}'},
        {"assign": "{"},
        {"paths": '"a"'},
    ],
)
def test_a_selection_that_is_not_exactly_one_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(InvalidConfigError):
        parse_options({**SERVERS, **options})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("startingoffset", "'startingOffsets'"),
        ("subscibe", "'subscribe'"),
        ("bootstrap.server", "'bootstrap.servers'"),
        ("kafka.requst.timeout.ms", "'kafka.request.timeout.ms'"),
        ("faiondataloss", "'failOnDataLoss'"),
        ("column", "'columns'"),
    ],
)
def test_an_unknown_option_names_the_nearest_one_as_it_is_written_in_the_documentation(given: str, meant: str) -> None:
    with pytest.raises(InvalidConfigError, match="did you mean") as raised:
        parse(**{given: "1"})
    assert meant in str(raised.value)


def test_settings_that_the_source_decides_are_refused_with_what_to_use() -> None:
    with pytest.raises(InvalidConfigError, match="startingOffsets"):
        parse(**{"kafka.auto.offset.reset": "latest"})


def test_no_address_is_an_error_and_two_that_differ_are_too() -> None:
    with pytest.raises(InvalidConfigError, match=r"bootstrap\.servers is missing"):
        parse_options({"subscribe": "a"})
    with pytest.raises(InvalidConfigError, match="differ"):
        parse(**{"kafka.bootstrap.servers": "elsewhere:1"})


def test_offsets_are_given_for_each_partition() -> None:
    options = parse(
        startingOffsets='{"flights":{"0":23,"1":-2}}', endingOffsets=json.dumps({"flights": {"0": 50, "1": -1}})
    )
    assert options.start == ByOffset(
        "startingOffsets", {TopicPartition("flights", 0): 23, TopicPartition("flights", 1): -2}
    )
    assert options.end == ByOffset(
        "endingOffsets", {TopicPartition("flights", 0): 50, TopicPartition("flights", 1): -1}
    )


@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": "latest"},
        {"endingOffsets": "earliest"},
        {"startingOffsets": "soon"},
        {"startingOffsets": "[]"},
        {"startingOffsets": '{"flights":5}'},
        {"startingOffsets": '{"flights":{"0":-1}}'},
        {"endingOffsets": '{"flights":{"0":-2}}'},
        {"startingOffsets": '{"flights":{"0":-3}}'},
        {"startingOffsets": '{"flights":{"0":1.5}}'},
        {"startingOffsets": '{"flights":{"zero":1}}'},
        {"startingOffsets": '{"flights":{"-1":1}}'},
        {"endingOffsets": '{"flights":{"0":9223372036854775808}}'},
        {"startingTimestamp": "yesterday"},
        {"startingTimestamp": "-5"},
        {"endingOffsetsByTimestamp": '{"flights":{"0":-5}}'},
        {"startingOffsetsByTimestampStrategy": "guess"},
        {"minPartitions": "0"},
        {"minPartitions": "many"},
        {"recordsPerTask": "0"},
        {"bytesPerTask": ""},
        {"includeHeaders": "yes"},
        {"failOnDataLoss": ""},
        {"columns": " , "},
        {"kafka.request.timeout.ms": "soon"},
    ],
)
def test_a_value_that_is_not_legal_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(InvalidConfigError):
        parse(**options)


def test_a_time_for_all_comes_before_times_for_each_and_those_before_offsets() -> None:
    offsets = {"startingOffsets": '{"flights":{"0":1}}'}
    each = {"startingOffsetsByTimestamp": '{"flights":{"0":2000}}'}
    every = {"startingTimestamp": "3000"}
    tp = TopicPartition("flights", 0)
    assert parse(**offsets, **each, **every).start == ByTimestamp("startingTimestamp", for_all_us=3_000_000)
    assert parse(**offsets, **each).start == ByTimestamp("startingOffsetsByTimestamp", times_us={tp: 2_000_000})
    assert parse(endingTimestamp="4000").end == ByTimestamp("endingTimestamp", for_all_us=4_000_000)


def test_columns_are_a_list() -> None:
    assert parse(columns="dest, _offset,dest").columns == ("dest", "_offset")


def test_create_table_is_refused_because_spark_would_drop_the_options_of_its_queries() -> None:
    with pytest.raises(InvalidConfigError, match="CREATE TEMPORARY VIEW"):
        parse(provider="spark_broker", **{"option.subscribe": "flights"})


def test_a_stream_begins_at_the_latest_and_may_name_it() -> None:
    assert parse_stream().start == Latest()
    named = parse_stream(startingOffsets='{"flights":{"0":-1,"1":-2}}').start
    assert named == ByOffset("startingOffsets", {TopicPartition("flights", 0): -1, TopicPartition("flights", 1): -2})
    assert parse_stream(startingOffsets="earliest").start == Earliest()


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"])
def test_a_stream_has_no_end(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"{name}: a streaming query has no end"):
        parse_stream(**{name: "latest"})


def test_before_spark_says_which_kind_of_query_it_will_be_what_one_of_them_refuses_passes() -> None:
    options = {**SERVERS, "subscribe": "flights", "startingOffsets": "latest", "endingTimestamp": "5"}
    assert parse_options(options, Query.EITHER).start == Latest()


def test_the_limits_of_a_stream() -> None:
    assert parse_stream().limits == Limits(max_offsets=0, max_bytes=0, min_offsets=0, max_delay_ms=15 * 60_000)
    limits = parse_stream(
        maxOffsetsPerTrigger="100", minOffsetsPerTrigger="10", maxTriggerDelay="90s", maxBytesPerTrigger="4096"
    ).limits
    assert limits == Limits(max_offsets=100, max_bytes=4096, min_offsets=10, max_delay_ms=90_000)
    with pytest.raises(InvalidConfigError, match="minOffsetsPerTrigger = 10 is more than maxOffsetsPerTrigger = 5"):
        parse_stream(maxOffsetsPerTrigger="5", minOffsetsPerTrigger="10")
    for option in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxBytesPerTrigger"):
        with pytest.raises(InvalidConfigError, match=option):
            parse_stream(**{option: "0"})


@pytest.mark.parametrize(
    ("text", "ms"), [("1500", 1500), ("250ms", 250), ("2s", 2000), ("3 min", 180_000), ("1h", 3_600_000), ("0s", 0)]
)
def test_durations_are_written_as_for_spark(text: str, ms: int) -> None:
    assert parse_stream(maxTriggerDelay=text).limits.max_delay_ms == ms


@pytest.mark.parametrize("text", ["soon", "-1s", "1.5h", "5 parsecs", ""])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="maxTriggerDelay"):
        parse_stream(maxTriggerDelay=text)


def test_the_group_whose_offsets_are_the_querys_progress() -> None:
    assert parse_stream().group == ""
    assert parse_stream(group="reports").group == "reports"
    with pytest.raises(InvalidConfigError, match="group"):
        parse_stream(group=" ")


def documented() -> dict[str, tuple[str, str]]:
    """Defaults of a batch and of a stream, by option, as the table in the documentation has them."""
    text = (Path(__file__).parents[2] / "docs" / "dataframes.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): (row[1].strip("`"), row[2].strip("`")) for row in rows if len(row) == 5}


def test_the_table_of_the_documentation_has_the_options_of_the_code_in_their_order_with_their_defaults() -> None:
    def shown(option: Option, query: Query) -> str:
        if option.queries in (query, Query.EITHER):
            return option.default_in(query)
        return "*ignored*" if query is Query.BATCH else "*refused*"

    listed = [option for option in TABLE if option.name not in ("path", "paths")]
    first, last = SETTINGS
    assert list(documented().items()) == [
        (option.name, (shown(option, Query.BATCH), shown(option, Query.STREAM))) for option in (first, *listed, last)
    ]


def test_the_documentation_names_the_options_that_do_nothing() -> None:
    text = (Path(__file__).parents[2] / "docs" / "dataframes.md").read_text(encoding="utf-8")
    assert {name for name in WITHOUT_EFFECT if name != "group.id" and f"`{name}`" not in text} == set()


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_options_of_the_kafka_source_without_a_meaning_here_change_nothing(name: str) -> None:
    assert parse(**{name: "5"}) == parse()
    assert parse_stream(**{name: "5"}) == parse_stream()


@pytest.mark.parametrize("option", [option for option in TABLE if option.default], ids=lambda option: option.name)
def test_a_default_that_is_written_out_changes_nothing(option: Option) -> None:
    if option.queries is not Query.STREAM:
        assert parse(**{option.name: option.default_in(Query.BATCH)}) == parse()
    if option.queries is not Query.BATCH:
        assert parse_stream(**{option.name: option.default_in(Query.STREAM)}) == parse_stream()
