"""Every option of a read and of a write, with texts that it cannot have: each is taken, or an error of the options."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import pytest

from spark_broker import group_lag, lag, read_topic
from spark_broker.config import ConsumerConfig, ProducerConfig, TopicConfig
from spark_broker.errors import InvalidConfigError, InvalidDataError
from spark_broker.spark import option_table, write_options
from spark_broker.spark.option_table import Query
from spark_broker.spark.options import parse_options
from spark_broker.spark.write_options import parse_write_options

MANY_DIGITS = "9" * 5000
"""Python's `int` refuses them with a ValueError."""

TEXTS = [
    *("", " ", "x", "null", "[]", "{}", "1", "-1", "1.5", "1e999", "NaN", "9" * 30, MANY_DIGITS, "\x00", "٣", "²"),
    *(
        "true",
        "TRUE ",
        ",",
        "t,t",
        "*",
        "(((",
        "a:b",
        "[::1]:5",
        "5 m",
        "9" * 30 + "h",
        MANY_DIGITS + "d",
        "[" * 100_000,
    ),
    *('"x"', "[1]", '{"t":0}', '{"t":null}', '{"t":[0,"1"]}', '{"t":{"0":1}}', '{"t":{"0":"x"}}', '{"t":{"0":1.5}}'),
    *('{"t":{"0":null}}', '{"t":{"0":NaN}}', '{"t":{"0":true}}', '{"t":{"x":1}}', '{"":{"0":1}}'),
    *(f'{{"t":{{"{MANY_DIGITS}":1}}}}', f'{{"t":{{"0":{MANY_DIGITS}}}}}', f'{{"t":[{MANY_DIGITS}]}}'),
]
SERVERS = {"kafka.bootstrap.servers": "127.0.0.1:1"}


def read_as(query: Query) -> Callable[[Mapping[str, str]], object]:
    return lambda options: parse_options(options, query)


READS = [*option_table.OPTIONS, *ConsumerConfig.setting_names(), "kafka.bootstrap.servers", "kafka.", ""]
WRITES = [
    *(*write_options.OPTIONS, *ProducerConfig.setting_names(), ""),
    *(write_options.TOPIC_PREFIX + name for name in TopicConfig.setting_names()),
]


@pytest.mark.parametrize(
    ("parse", "names", "beside"),
    [
        *((read_as(query), READS, beside) for query in Query for beside in ({}, {"subscribe": "t"})),
        *((parse_write_options, WRITES, beside) for beside in ({}, {"txnAppId": "a", "txnVersion": "1"})),
        (parse_write_options, WRITES, {"topic": "t", "createTopic": "true"}),
    ],
)
def test_each_option_is_taken_or_an_error_of_the_options(
    parse: Callable[[Mapping[str, str]], object], names: list[str], beside: Mapping[str, str]
) -> None:
    faults = []
    for name in names:
        for text in TEXTS:
            try:
                with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of `re`, for "[["
                    parse({**SERVERS, **beside, name: text})
            except InvalidConfigError:
                continue
            except Exception as error:  # noqa: BLE001  (which ones come is what is tested)
                faults.append(f"{name} = {text[:40]!r}: {type(error).__name__}: {error}")
    assert not faults


class Session:
    """As far as arguments are looked at before Spark is asked."""

    readStream = None  # noqa: N815  (Spark's name)


@pytest.mark.parametrize(
    "call",
    [
        lambda: read_topic(None, "t"),  # type: ignore[arg-type]
        lambda: read_topic(Session(), None),  # type: ignore[arg-type]
        lambda: read_topic(Session(), "t", columns=[1]),  # type: ignore[list-item, arg-type]
        lambda: read_topic(Session(), "t", columns=5),  # type: ignore[arg-type]
        lambda: read_topic(Session(), "t", stream="false"),  # type: ignore[arg-type]
        lambda: read_topic(Session(), "t", minPartitions="\ud800"),  # type: ignore[arg-type]
        lambda: read_topic(Session(), "t", bootstrap_servers=5.5),  # type: ignore[arg-type]
        lambda: group_lag("127.0.0.1:1", None),  # type: ignore[arg-type]
        lambda: group_lag(5.5, "g"),  # type: ignore[arg-type]
        lambda: lag(None),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_are_typed_errors_before_spark_is_asked(call: Callable[[], object]) -> None:
    with pytest.raises((InvalidDataError, InvalidConfigError)):
        call()
