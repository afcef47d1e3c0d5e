"""Every public method of the clients, with every argument of a wrong type or value, one at a time.

Each call succeeds, or raises a typed error, at once. The methods and their parameters are found by introspection, so a
new one is tried, too; a parameter of a new name needs a good value in GOOD.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from spark_broker import (
    Admin,
    Consumer,
    JoinedProducer,
    NewTopic,
    OffsetAndMetadata,
    Producer,
    TopicPartition,
    TransactionGroup,
)
from spark_broker.client.group_admin import GroupAdmin
from spark_broker.client.rebalance_listener import RebalanceListener
from spark_broker.config import AdminConfig, Config, ConsumerConfig, ProducerConfig
from spark_broker.errors import InvalidConfigError, InvalidDataError, InvalidTopicError, SparkBrokerError
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from spark_broker.visible import shown
from tests.client.fake_broker import FakeCluster

T0 = TopicPartition("t", 0)
SOON_MS = 30
AT_ONCE_S = 5.0
"""Far above the time-outs here: what hangs is found, and a machine that is busy is not."""


class Text(str):
    __slots__ = ()


class Mute:
    """Nobody can say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


LEAVES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, math.nan, 2**31, 2**63, -(2**63) - 1, 2**300, 1j, Decimal("1.5"), ...),
    *(10**5000, Mute()),
    *("", "x", "t", "\ud800", "t" * 300, "1", Text("t"), b"t", b"\xff", bytearray(b"t"), object(), str, len),
    *(np.int64(1), np.float64("nan"), np.str_("t"), np.bool_(True), np.array(1), np.array([1, 2]), np.array([[b"x"]])),
    *(pa.scalar(1), pa.array([1]), pd.NaT, pd.NA, pd.Series([1]), pd.Timestamp.max),
    *(datetime.max, datetime.min),  # noqa: DTZ901  (a time without a zone is UTC)
    *(datetime.max.replace(tzinfo=timezone(timedelta(hours=-3))), date(2026, 1, 1)),
    *(datetime(2026, 1, 1, tzinfo=UTC), timedelta(1)),
    *(T0, TopicPartition("t", None), TopicPartition(None, 0), TopicPartition("t", -1), TopicPartition("t", 2**40)),  # type: ignore[arg-type]
    *(OffsetAndMetadata(-1), OffsetAndMetadata(None), OffsetAndMetadata(1, "x"), OffsetAndMetadata(1, 1, None)),  # type: ignore[arg-type]
    OffsetAndMetadata(1, -2),
    *(NewTopic("n", 1, 1), NewTopic(None), NewTopic("n", "1"), NewTopic("n", 1, 1, config=5), NewTopic("\ud800")),  # type: ignore[arg-type]
    *(NewTopic("n", 1, 1, config={1: 1}), NewTopic("n", 1, 1, config={"retention.ms": [None]}), NewTopic("n", 2**40)),  # type: ignore[dict-item]
    *(NewTopic("n", schema=text) for text in ("", "a", "a INT,", f"a DECIMAL({'9' * 5000})", "\ud800", 5, object())),
]


def wrong_values() -> Iterator[Any]:
    """What no method takes, or not everywhere: alone, in a list, and as the key and the value of a dict."""
    for leaf in LEAVES:
        yield leaf
        yield [leaf]
        yield {T0: leaf}
        yield {"value": leaf}
        yield {"value": [leaf]}
        try:
            yield {leaf: 1}
        except TypeError:
            continue  # no key
    yield from ([], {}, (), set(), [[T0]], {T0: {}}, [{"value": {"value": 1}}], [{1: b"x"}], [("a",)], [("a", b"", 1)])
    yield from (lambda: None, (n for n in [1]), range(3), memoryview(b"t"), released_view(), pa.table({"nope": [1]}))


def released_view() -> memoryview:
    view = memoryview(b"t")
    view.release()
    return view


GOOD: Mapping[str, Any] = {
    **dict.fromkeys(("topic", "name"), "t"),
    **dict.fromkeys(("unclean", "include_internal", "include_fenced", "single_use", "with_offsets"), False),
    **dict.fromkeys(("partition", "timestamp", "bootstrap_servers"), None),
    **dict.fromkeys(("names", "topics", "data", "headers", "winners", "states", "group_ids"), ()),
    **dict.fromkeys(("times", "moments", "values", "config"), MappingProxyType({})),
    **dict.fromkeys(("value", "key"), b"v"),
    **dict.fromkeys(("offset", "timeout"), 0),
    **dict.fromkeys(("group_id", "transactional_id", "application", "execution"), "x"),
    "partitions": (T0,),
    "offsets": MappingProxyType({T0: 0}),
    "replicas": (0,),
    "schema": "a INT",
    "total": 2,
    "acks": "all",
    "columns": ("value",),
    "pattern": "t.*",
    "listener": RebalanceListener(),
    "version": 1,
    "timeout_ms": 60_000,
}
GOOD_OF_METHODS: Mapping[str, Mapping[str, Any]] = {
    "create_topic": {"topic": NewTopic("t")},
    **{name: {"partitions": T0} for name in ("pause", "resume", "seek_to_beginning", "seek_to_end")},
    **{name: {"partition": T0} for name in ("seek", "position", "committed", "reassign_partition")},
}

SOON = {"default.api.timeout.ms": SOON_MS, "request.timeout.ms": SOON_MS}
PRODUCER_SOON = {"max.block.ms": SOON_MS, "delivery.timeout.ms": 2 * SOON_MS, "request.timeout.ms": SOON_MS}


def open_admin(cluster: FakeCluster) -> Admin:
    return Admin(cluster.bootstrap, config=SOON)


def open_consumer(cluster: FakeCluster) -> Consumer:
    consumer = Consumer(cluster.bootstrap, group_id="g", config={**SOON, "auto.offset.reset": "earliest"})
    consumer.assign([T0])
    return consumer


def open_producer(cluster: FakeCluster) -> Producer:
    return Producer(cluster.bootstrap, config=PRODUCER_SOON)


def open_transactional(cluster: FakeCluster) -> Producer:
    producer = Producer(cluster.bootstrap, transactional_id="x", config={**PRODUCER_SOON, "max.block.ms": 2000})
    producer.begin_transaction()
    return producer


def a_group(cluster: FakeCluster) -> TransactionGroup:
    return TransactionGroup(cluster.bootstrap, "a", 1, "e", config=PRODUCER_SOON)


def open_joined(cluster: FakeCluster) -> JoinedProducer:
    return TransactionGroup(cluster.bootstrap, "a", 1, "e", config={**PRODUCER_SOON, "max.block.ms": 2000}).join()


Opened = Admin | Consumer | Producer | TransactionGroup
Opener = Callable[[FakeCluster], Opened]
OPENINGS: list[tuple[type[Any], Opener]] = [
    *(
        (Admin, open_admin),
        (GroupAdmin, open_admin),
        (Consumer, open_consumer),
        (Producer, open_producer),
        (Producer, open_transactional),
    ),
    *((TransactionGroup, a_group), (JoinedProducer, open_joined)),
]


def methods_of(kind: type[Any], opener: Opener) -> Iterator[tuple[str, inspect.Parameter]]:
    """The public methods, each with each of its parameters. Once each: what is inherited was tried before."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        of_transactions = opener is open_transactional
        inherited = name not in vars(kind) or (name == "send_offsets_to_transaction") is not of_transactions
        if not name.startswith("_") and not inherited:
            for parameter in list(inspect.signature(method).parameters.values())[1:]:
                yield name, parameter


def arguments(method: Callable[..., object], name: str, wrong: str, value: object) -> tuple[list[Any], dict[str, Any]]:
    """Good values for what has to be given, and this one."""
    good = {**GOOD, **GOOD_OF_METHODS.get(name, {})}
    by_place: list[Any] = []
    by_name: dict[str, Any] = {}
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        given = value if parameter.name == wrong else good[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            by_place.append(given)
        else:
            by_name[parameter.name] = given
    return by_place, by_name


def is_long(value: object) -> bool:
    """A time-out that is right, but takes too long for a test."""
    return isinstance(value, int | float | Decimal | np.integer) and bool(value > 2)


@pytest.mark.parametrize(("kind", "opener"), OPENINGS, ids=[opener.__name__ for _, opener in OPENINGS])
def test_the_good_values_are_good(cluster: FakeCluster, kind: type[Any], opener: Opener) -> None:
    """Otherwise a call would fail by another argument than the wrong one."""
    for name in dict.fromkeys(name for name, _ in methods_of(kind, opener)):
        cluster.topics.pop("t", None)
        if name != "create_topic":
            cluster.create(
                "t", schema=pa.schema([("a", pa.int32())]) if name == "alter_topic_schema" else DEFAULT_SCHEMA
            )
        client = opener(cluster)
        method = getattr(client, name)
        by_place, by_name = arguments(method, name, "", None)
        try:
            of_futures(method(*by_place, **by_name))
        except (InvalidConfigError, InvalidDataError, InvalidTopicError):
            raise
        except SparkBrokerError:
            pass  # There is no transaction or group of this name.
        if not isinstance(client, TransactionGroup):
            client.close()


def of_futures(result: object) -> None:
    """What a call returned has no other errors either."""
    if isinstance(result, Future):
        result.result(AT_ONCE_S)
    elif isinstance(result, Mapping):
        for value in result.values():
            assert not isinstance(value, BaseException) or isinstance(value, SparkBrokerError)


def outcome_of(call: Callable[[], object]) -> tuple[bool, str]:
    """Whether the call failed, and what is wrong: nothing, if it took no time, and its error is typed."""
    began_s, failed = time.monotonic(), False
    try:
        of_futures(call())
    except SparkBrokerError as error:
        failed = True
        if not error.message or not error.hint:
            return failed, f"{error.name} says nothing"
    except Exception as error:  # noqa: BLE001  (which ones come is what is tested)
        return True, f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - began_s
    return failed, f"it took {took_s:.1f} s" if took_s > AT_ONCE_S else ""


@pytest.mark.parametrize(
    "every", [pytest.param(4, marks=pytest.mark.quick), pytest.param(1, marks=pytest.mark.full)], ids=["some", "all"]
)
@pytest.mark.parametrize(("kind", "opener"), OPENINGS, ids=[opener.__name__ for _, opener in OPENINGS])
def test_every_argument_is_taken_or_a_typed_error(
    cluster: FakeCluster, kind: type[Any], opener: Opener, every: int
) -> None:
    """Story: TypeError, AttributeError and OverflowError came, from the call or from a thread of the client."""
    cluster.create("t")
    client = opener(cluster)
    faults: list[str] = []
    tried, failed = 0, False
    for number, (name, parameter) in enumerate(methods_of(kind, opener)):
        for value in islice(wrong_values(), number % every, None, every):  # each method gets others
            if parameter.name == "timeout" and is_long(value):
                continue
            if name == "close" or (opener is open_transactional and failed):
                client.close()  # type: ignore[union-attr]  # a group has neither the method nor this argument
                client = opener(cluster)
            method = getattr(client, name)
            by_place, by_name = arguments(method, name, parameter.name, value)
            failed, fault = outcome_of(partial(method, *by_place, **by_name))
            faults += [f"{name}({parameter.name}={shown(value)}): {fault}"] if fault else []
            tried += 1
            if "t" not in cluster.topics:
                cluster.create("t")
    if not isinstance(client, TransactionGroup):
        client.close()
    assert not faults
    assert tried > 100 // every


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Admin, Consumer, Producer, TransactionGroup, JoinedProducer])
def test_every_argument_of_an_opening_is_taken_or_a_typed_error(cluster: FakeCluster, kind: type[Any]) -> None:
    faults: list[str] = []
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for value in wrong_values():
            good = {} if kind is JoinedProducer else arguments(kind, "", parameter.name, value)[1]
            good = good or {parameter.name: value}
            if parameter.name != "bootstrap_servers" and kind is not JoinedProducer:
                good["bootstrap_servers"] = cluster.bootstrap
            if kind is Producer and parameter.name != "transactional_id":
                good["transactional_id"] = None

            def opens(good: dict[str, Any] = good) -> None:
                client = kind(**good)
                if not isinstance(client, TransactionGroup):
                    client.close(0) if isinstance(client, Producer) else client.close()

            _, fault = outcome_of(opens)
            faults += [f"{parameter.name}={shown(value)}: {fault}"] if fault else []
    assert not faults


@pytest.mark.parametrize("kind", [AdminConfig, ConsumerConfig, ProducerConfig])
def test_every_value_of_a_setting_is_taken_or_an_error_of_the_configuration(kind: type[Config]) -> None:
    for name in kind.setting_names():
        for value in wrong_values():
            try:
                parsed = kind.parse({"bootstrap.servers": "127.0.0.1:1", name: value})
            except InvalidConfigError:
                continue
            attribute = getattr(parsed, name.replace(".", "_"))
            assert type(attribute) in (bool, int, str, tuple, float), f"{name} = {shown(value)}"


@pytest.mark.parametrize("opener", [open_admin, open_consumer, open_producer, open_transactional, open_joined])
@pytest.mark.parametrize("copied", [ForkingPickler.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy])
def test_a_client_that_is_pickled_says_what_to_do(
    cluster: FakeCluster, opener: Opener, copied: Callable[[object], object]
) -> None:
    """Story: "cannot pickle '_thread.lock' object"."""
    cluster.create("t")
    client = opener(cluster)
    with pytest.raises(InvalidDataError, match="cannot be pickled") as raised:
        copied(client)
    assert "open a client where it is used" in str(raised.value)
    assert not isinstance(client, TransactionGroup)
    client.close()


def test_a_group_of_writers_and_errors_can_be_pickled(cluster: FakeCluster) -> None:
    """They go to tasks, and come back from there."""
    group = a_group(cluster)
    assert cloudpickle.loads(ForkingPickler.dumps(group)) == group
    error = cloudpickle.loads(ForkingPickler.dumps(InvalidDataError("what", hint="how")))
    assert (error.message, error.hint) == ("what", "how")


class Stream:
    """Any library's: what has the method is taken."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


class Array:
    def __arrow_c_array__(self, requested_schema: object = None) -> object:
        return pa.record_batch({"value": [b"a", b"b"]}).__arrow_c_array__(requested_schema)


class Failing:
    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        raise OSError("the connection of the database is closed")


class Columns:
    """A schema of another library, as polars and nanoarrow have them."""

    def __arrow_c_schema__(self) -> object:
        return pa.schema([("a", pa.int32())]).__arrow_c_schema__()


ROWS = pa.table({"value": [b"a", b"b"]})


@pytest.mark.parametrize(
    "data",
    [
        Stream(ROWS),
        Array(),
        ROWS,
        ROWS.to_batches()[0],
        ROWS.to_reader(),
        ROWS.to_pandas(),
        ROWS.to_pandas().set_index(pd.Index([7, 8], name="k")),
        ROWS.to_pylist(),
        tuple(ROWS.to_pylist()),
        pa.chunked_array([pa.StructArray.from_arrays([ROWS["value"].chunk(0)], ["value"])]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_whatever_has_an_arrow_stream_is_data(cluster: FakeCluster, data: object) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap) as producer:
        stored = producer.append("t", data, partition=0).result(10)
    assert sum(one.count for one in stored) == 2
    assert [row["value"] for row in cluster.rows("t", 0)] == [b"a", b"b"]


def test_a_stream_is_read_once_though_the_schema_has_changed(cluster: FakeCluster) -> None:
    """The producer learns of a newer schema when the data does not fit, and a reader cannot be read again."""
    cluster.create("t", schema=pa.schema([("a", pa.int64())]))
    with Producer(cluster.bootstrap) as producer, Admin(cluster.bootstrap) as admin:
        producer.append("t", [{"a": 1}]).result(10)
        admin.alter_topic_schema("t", "b STRING")
        newer = pa.table({"a": pa.array([2], pa.int64()), "b": ["x"]})
        assert producer.append("t", newer.to_reader()).result(10)[0].count == 1


def test_a_stream_that_fails_and_what_is_no_table_fail_the_append(cluster: FakeCluster) -> None:
    cluster.create("t")
    with Producer(cluster.bootstrap) as producer:
        with pytest.raises(InvalidDataError, match="the connection of the database is closed"):
            producer.append("t", Failing()).result(10)
        with pytest.raises(InvalidDataError, match="__arrow_c_stream__"):
            producer.append("t", iter([{"value": b"a"}])).result(10)


def test_whatever_has_an_arrow_schema_is_a_schema(cluster: FakeCluster) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic(NewTopic("typed", schema=Columns()))
        assert admin.describe_topic("typed").schema == pa.schema([("a", pa.int32())])


def test_the_list_of_wrong_values_has_wrong_ones() -> None:
    assert len(list(wrong_values())) > 300
