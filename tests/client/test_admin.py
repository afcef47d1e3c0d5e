"""The admin client answers with typed errors, from whichever broker is there."""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

import pyarrow as pa
import pytest

from spark_broker import Admin, NewTopic, TopicPartition
from spark_broker.client.metadata import BOOTSTRAP_GRACE_MS
from spark_broker.errors import (
    BootstrapUnreachableError,
    ClosedError,
    InconsistentTopicIdError,
    InvalidConfigError,
    InvalidDataError,
    InvalidPartitionsError,
    InvalidRequestError,
    InvalidSchemaError,
    NotControllerError,
    RequestTimedOutError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    AlterTopicSchemaRequest,
    CallRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    ElectLeadersRequest,
    EmptyResponse,
    ErrorResponse,
    Message,
    MetadataRequest,
    ReassignPartitionRequest,
)
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from tests.client.fake_broker import FakeCluster, FakePartition, FakeTopic
from tests.client.proxy import Proxy


@pytest.fixture
def admin(cluster: FakeCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap) as client:
        yield client


def test_a_topic_is_created_described_and_deleted(cluster: FakeCluster, admin: Admin) -> None:
    schema = pa.schema([("city", pa.large_string()), ("n", pa.int64())])
    admin.create_topic(NewTopic("b", partitions=3, schema=schema, config={"key.columns": ["city"], "retention.ms": 5}))
    admin.create_topics([NewTopic("a")])
    assert admin.list_topics() == ["a", "b"]
    topic = admin.describe_topic("b")
    assert topic.schema == pa.schema([("city", pa.string()), ("n", pa.int64())])
    assert topic.config == {"key.columns": "city", "retention.ms": "5"}
    assert [(p.partition, p.leader, p.log_start_offset, p.high_watermark) for p in topic.partitions] == [
        (0, 0, 0, 0),
        (1, 1, 0, 0),
        (2, 2, 0, 0),
    ]
    assert admin.describe_topic("a").schema == DEFAULT_SCHEMA
    admin.delete_topic("b")
    assert admin.list_topics() == ["a"]


def test_a_topics_schema_may_be_ddl(cluster: FakeCluster, admin: Admin) -> None:
    admin.create_topic(NewTopic("a", schema="city STRING NOT NULL, n LONG"))
    created = admin.describe_topic("a").schema
    assert created == pa.schema([pa.field("city", pa.string(), nullable=False), ("n", pa.int64())])
    with pytest.raises(InvalidSchemaError, match="did you mean STRING"):
        admin.create_topic(NewTopic("b", schema="city STRNG"))
    assert admin.list_topics() == ["a"]


def test_create_topic_returns_when_every_partition_has_a_leader(cluster: FakeCluster, admin: Admin) -> None:
    def hook(broker: int, request: CallRequest) -> Message | None:
        topic = cluster.topics.get("t")
        if topic is not None and topic.partitions[1].leader < 0:
            looks.append(request)
            if len(looks) == 3:
                cluster.elect("t", 1, 2)
        elif isinstance(request, CreateTopicRequest):
            cluster.create("t", 2)
            cluster.elect("t", 1, -1)
            return EmptyResponse()
        return None

    looks: list[CallRequest] = []
    cluster.call_hook = hook
    admin.create_topic(NewTopic("t", partitions=2))
    assert len(looks) == 3


def test_create_topic_returns_when_brokers_that_lag_know_the_topic(cluster: FakeCluster, admin: Admin) -> None:
    """A client may ask any broker. One that lags would answer that the topic does not exist."""
    asked_of_the_last = 0

    def hook(broker: int, request: CallRequest) -> Message | None:
        nonlocal asked_of_the_last
        if broker != 2 or not isinstance(request, MetadataRequest) or request.certain:
            return None
        asked_of_the_last += 1
        return cluster.metadata([]) if asked_of_the_last <= 5 else None

    cluster.call_hook = hook
    admin.create_topic(NewTopic("t", partitions=2))
    assert asked_of_the_last > 5
    with Admin(f"127.0.0.1:{cluster.brokers[2].port}") as other:
        assert other.list_topics() == ["t"]


def test_delete_topic_returns_when_brokers_that_lag_do_not_show_the_topic(cluster: FakeCluster, admin: Admin) -> None:
    """A client may ask any broker. One that lags would show a topic that is gone."""
    cluster.create("t", 2)
    before = cluster.metadata(["t"])
    asked_of_the_last = 0

    def hook(broker: int, request: CallRequest) -> Message | None:
        nonlocal asked_of_the_last
        if broker != 2 or not isinstance(request, MetadataRequest) or request.certain or "t" in cluster.topics:
            return None
        asked_of_the_last += 1
        return before if asked_of_the_last <= 5 else None

    cluster.call_hook = hook
    admin.delete_topic("t")
    assert asked_of_the_last > 5
    with Admin(f"127.0.0.1:{cluster.brokers[2].port}") as other:
        assert other.list_topics() == []


def test_alter_topic_config_returns_when_brokers_that_lag_know_the_settings(cluster: FakeCluster, admin: Admin) -> None:
    """Else a leader refuses records by settings that are gone."""
    cluster.create("t", config={"cleanup.policy": "compact"})
    before, answered = cluster.metadata(["t"]), 0

    def hook(broker: int, request: CallRequest) -> Message | None:
        nonlocal answered
        if not isinstance(request, MetadataRequest) or cluster.topics["t"].config or request.certain:
            return None
        answered += 1
        return before if answered <= 5 else None

    cluster.call_hook = hook
    admin.alter_topic_config("t", {"cleanup.policy": None})
    assert answered > 5


def test_a_change_is_made_although_the_controller_is_gone_right_after_it(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create("t")

    def hook(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, MetadataRequest) and request.certain and cluster.topics["t"].config:
            return ErrorResponse(NotControllerError.code, "no controller")
        return None

    cluster.call_hook = hook
    admin.alter_topic_config("t", {"retention.ms": 5})
    assert cluster.topics["t"].config == {"retention.ms": "5"}


def test_alter_topic_schema_returns_when_brokers_that_lag_know_the_schema(cluster: FakeCluster, admin: Admin) -> None:
    """Even if the first broker that is asked lags, too: producers would refuse rows of the new schema."""
    cluster.create("t", schema=pa.schema([("id", pa.int32())]))
    before, answered = copy.deepcopy(cluster.metadata(["t"])), 0

    def hook(broker: int, request: CallRequest) -> Message | None:
        nonlocal answered
        changed = isinstance(request, MetadataRequest) and len(cluster.topics["t"].schemas) > 1
        if not changed or request.certain:  # type: ignore[union-attr]
            return None
        answered += 1
        return before if answered <= 5 else None

    cluster.call_hook = hook
    admin.alter_topic_schema("t", pa.schema([("id", pa.int64())]))
    assert answered > 5


def test_several_topics_are_created_and_deleted_past_one_that_fails(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create("there")
    created = admin.create_topics([NewTopic("a"), NewTopic("there"), NewTopic("b")])
    assert [type(error) for error in created.values()] == [type(None), TopicAlreadyExistsError, type(None)]
    assert list(created) == ["a", "there", "b"]
    deleted = admin.delete_topics(["a", "absent", "b"])
    assert [type(error) for error in deleted.values()] == [type(None), UnknownTopicOrPartitionError, type(None)]
    assert admin.list_topics() == ["there"]


def test_several_topics_are_not_tried_one_by_one_where_no_broker_can_be_reached() -> None:
    with Admin("127.0.0.1:1", default_api_timeout_ms=500) as admin, pytest.raises(BootstrapUnreachableError):
        admin.delete_topics(["a", "b"])


def test_a_moment_of_another_kind_is_refused(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create("t")
    with pytest.raises(InvalidRequestError, match="neither a datetime"):
        admin.list_offsets({TopicPartition("t", 0): -1})  # type: ignore[dict-item]


def test_create_topic_waits_only_so_long_for_a_broker_that_lags(
    cluster: FakeCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_broker.client.admin.KNOWN_MS", 100)
    cluster.call_hook = lambda broker, request: (
        cluster.metadata([]) if broker == 2 and isinstance(request, MetadataRequest) and not request.certain else None
    )
    began = time.monotonic()
    admin.create_topic(NewTopic("t", partitions=2))
    assert time.monotonic() - began < 20, "it waited for as long as any call may take"


def test_a_change_is_tried_again_while_the_controller_is_away(cluster: FakeCluster, admin: Admin) -> None:
    left = [NotControllerError("no controller")] * 3

    def hook(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, CreateTopicRequest) and left:
            error = left.pop()
            return ErrorResponse(error.code, error.message)
        return None

    cluster.call_hook = hook
    admin.create_topic(NewTopic("t"))
    assert admin.list_topics() == ["t"]


def test_a_dead_broker_is_passed_over(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create("t", 3)
    cluster.kill(0)
    cluster.kill(1)
    assert admin.list_topics() == ["t"]
    assert [p.leader for p in admin.describe_topic("t").partitions] == [2, 2, 2]
    assert [broker.id for broker in admin.describe_cluster().brokers] == [2]
    assert [(b.id, b.fenced) for b in admin.describe_cluster(include_fenced=True).brokers] == [
        (0, True),
        (1, True),
        (2, False),
    ]


def test_learned_brokers_are_asked_when_the_bootstrap_address_is_gone(cluster: FakeCluster) -> None:
    with Admin(cluster.bootstrap.split(",", maxsplit=1)[0]) as admin:
        assert len(admin.describe_cluster().brokers) == 3
        cluster.kill(0)
        assert admin.list_topics() == []


def test_a_description_does_not_fail_on_a_broker_that_is_slow_in_its_last_moment(
    cluster: FakeCluster, admin: Admin
) -> None:
    """A partition without a leader is looked at until the time for its offsets is over."""
    looks: list[int] = []

    def hook(broker: int, request: CallRequest) -> Message | None:
        if isinstance(request, MetadataRequest):
            looks.append(broker)
            if len(looks) == 3:
                for fake_broker in cluster.brokers:
                    fake_broker.proxy.freeze()
        return None

    cluster.create("t", 1)
    cluster.elect("t", 0, -1)
    cluster.call_hook = hook
    try:
        assert [p.high_watermark for p in admin.describe_topic("t").partitions] == [None]
    finally:
        for fake_broker in cluster.brokers:
            fake_broker.proxy.thaw()
    assert len(looks) == 3


def test_a_partition_without_a_leader_is_described_without_offsets(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create("t", 2)
    cluster.elect("t", 0, -1)
    first, second = admin.describe_topic("t").partitions
    assert (first.leader, first.log_start_offset, first.high_watermark) == (None, None, None)
    assert (second.leader, second.log_start_offset, second.high_watermark) == (1, 0, 0)


def test_topics_are_described_without_offsets_in_one_question(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create(CONSUMER_OFFSETS_TOPIC)
    cluster.create("b", config={"retention.ms": "1"}).partitions[0].leader = -1
    cluster.create("a", 2)
    whole, asked = admin.describe_topic("a"), list[CallRequest]()
    cluster.call_hook = lambda broker, request: asked.append(request)
    a, b = admin.describe_topics()
    assert [type(request) for request in asked] == [MetadataRequest]
    assert [topic.name for topic in admin.describe_topics(include_internal=True)] == [CONSUMER_OFFSETS_TOPIC, "a", "b"]
    assert (b.config, b.partitions[0].leader) == ({"retention.ms": "1"}, None)
    assert [p.high_watermark for p in (*a.partitions, *b.partitions)] == [None, None, None]
    alone = admin.describe_topic("a", with_offsets=False)
    assert (alone.topic_id, alone.partitions) == (a.topic_id, a.partitions)
    assert [p.leader for p in a.partitions] == [p.leader for p in whole.partitions]
    assert all(isinstance(request, MetadataRequest) for request in asked)
    with pytest.raises(UnknownTopicOrPartitionError):
        admin.describe_topic("nope", with_offsets=False)


def test_errors_of_the_controller_come_back_as_their_type(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create("t")
    with pytest.raises(TopicAlreadyExistsError, match="'t'"):
        admin.create_topic(NewTopic("t"))
    for act in (admin.delete_topic, admin.describe_topic, lambda name: admin.create_partitions(name, 3)):
        with pytest.raises(UnknownTopicOrPartitionError, match="'nope'"):
            act("nope")
    with pytest.raises(InvalidSchemaError):
        admin.create_topic(NewTopic("u", schema=pa.schema([("d", pa.dictionary(pa.int8(), pa.float16()))])))
    assert admin.list_topics() == ["t"]


def test_partitions_are_added_and_settings_are_changed(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create("t", config={"retention.ms": "1"})
    admin.create_partitions("t", 3)
    assert len(admin.describe_topic("t").partitions) == 3
    admin.alter_topic_config("t", {"retention.ms": None, "max.message.bytes": 10, "key.columns": ["a", "b"]})
    assert admin.describe_topic("t").config == {"max.message.bytes": "10", "key.columns": "a,b"}


def test_internal_topics_are_hidden_unless_asked_for(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create(CONSUMER_OFFSETS_TOPIC)
    assert admin.list_topics() == []
    assert admin.list_topics(include_internal=True) == [CONSUMER_OFFSETS_TOPIC]
    assert admin.describe_topic(CONSUMER_OFFSETS_TOPIC).internal


def test_offsets_are_listed_by_time(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create("t").partitions[0].log_start_offset = 7
    tp = TopicPartition("t", 0)
    assert admin.list_offsets({tp: "earliest"}) == admin.list_offsets({tp: "latest"}) == {tp: 7}


@pytest.mark.parametrize("servers", ["localhost", "host:port", "", [], "a:1,b", "h:99999", "http://h:1", "::1:9"])
def test_a_bad_bootstrap_address_is_named(servers: str | list[str]) -> None:
    with pytest.raises(InvalidConfigError, match=r"bootstrap\.servers"):
        Admin(servers)


@pytest.mark.slow
def test_unreachable_addresses_are_all_named() -> None:
    with Admin("127.0.0.1:1,127.0.0.1:2") as admin, pytest.raises(BootstrapUnreachableError) as caught:
        admin.list_topics()
    assert "127.0.0.1:1" in str(caught.value)
    assert "127.0.0.1:2" in str(caught.value)


@pytest.mark.slow
def test_a_slow_broker_is_asked_again_until_the_deadline_and_one_that_refuses_is_not_waited_for(
    cluster: FakeCluster,
) -> None:
    """A busy machine takes longer than the 3 s after which addresses without a listener are given up."""
    cluster.create("t")
    slow = Proxy(cluster.brokers[0].port)
    slow.freeze()
    threading.Timer(BOOTSTRAP_GRACE_MS / 1000 + 1.5, slow.thaw).start()
    try:
        with Admin(f"127.0.0.1:1,127.0.0.1:{slow.port}", default_api_timeout_ms=60_000) as admin:
            assert admin.list_topics() == ["t"]
    finally:
        slow.kill()


@contextmanager
def something_else(said: bytes) -> Iterator[int]:
    """A server that answers whatever it gets with this, and hangs up. Yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):  # until it is closed
                while True:
                    peer, _ = listening.accept()
                    with peer:
                        peer.recv(65_536)
                        peer.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "who"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "a web server"), (b"\x15\x03\x03\0\x02\x02\x46", "of TLS")]
)
def test_a_port_of_something_else_is_reported_soon_and_for_what_it_is(said: bytes, who: str) -> None:
    """Story: it took a minute, and then the broker "is overloaded or frozen". The advice was a longer time-out."""
    with (
        something_else(said) as port,
        Admin(f"127.0.0.1:{port},127.0.0.1:1", default_api_timeout_ms=60_000) as admin,
        pytest.raises(BootstrapUnreachableError, match=who) as caught,
    ):
        admin.list_topics()
    assert "overloaded" not in caught.value.message
    assert "127.0.0.1:1 refuses connections" in caught.value.message


def test_a_port_that_hangs_up_is_not_called_overloaded() -> None:
    with (
        something_else(b"") as port,
        Admin(f"127.0.0.1:{port}", default_api_timeout_ms=1000) as admin,
        pytest.raises(RequestTimedOutError, match="the peer closed the connection") as caught,
    ):
        admin.list_topics()
    assert "overloaded" not in caught.value.message


def test_a_broker_beside_something_else_is_found(cluster: FakeCluster) -> None:
    with (
        something_else(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port,
        Admin(f"127.0.0.1:{port},{cluster.bootstrap}", default_api_timeout_ms=60_000) as admin,
    ):
        assert admin.list_topics() == []


def test_a_broker_that_stays_silent_is_a_time_out_and_not_called_unreachable(cluster: FakeCluster) -> None:
    silent = Proxy(cluster.brokers[0].port)
    silent.freeze()
    try:
        with (
            Admin(f"127.0.0.1:{silent.port}", default_api_timeout_ms=1500) as admin,
            pytest.raises(RequestTimedOutError, match=str(silent.port)),
        ):
            admin.list_topics()
    finally:
        silent.kill()


def test_a_host_that_nobody_knows_is_reported_soon() -> None:
    with (
        Admin("no-such-host.invalid:9092", default_api_timeout_ms=120_000) as admin,
        pytest.raises(BootstrapUnreachableError, match="no-such-host"),
    ):
        admin.list_topics()


def test_a_closed_admin_client_says_so(cluster: FakeCluster) -> None:
    admin = Admin(cluster.bootstrap)
    admin.close()
    admin.close()
    with pytest.raises(ClosedError):
        admin.list_topics()


def test_the_package_loads_neither_spark_nor_grpc_before_a_client_is_made() -> None:
    code = "import sys, spark_broker; print([m for m in ('pyspark', 'pyarrow.flight') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_topics_that_are_named_twice_are_created_and_deleted_once(cluster: FakeCluster, admin: Admin) -> None:
    """Story: the second try failed, and its error stood for the first: what was done was reported as failed."""
    same = NewTopic("a", 2, config={"retention.ms": 5}), NewTopic("a", 2, config={"retention.ms": "5"})
    bad = NewTopic("b", schema="city STRNG")
    results = admin.create_topics([*same, bad, NewTopic("b", schema="city STRNG")])
    assert (results["a"], type(results["b"])) == (None, InvalidSchemaError)
    assert len(cluster.topics["a"].partitions) == 2
    with pytest.raises(InvalidRequestError, match="two topics are to be called 'd', and they are not the same"):
        admin.create_topics([NewTopic("c"), NewTopic("d", 1), NewTopic("d", 2)])
    assert list(cluster.topics) == ["a"]
    assert admin.delete_topics(["a", "a"]) == {"a": None}
    assert cluster.topics == {}


class Number:
    """An integer that is equal to no other."""

    def __index__(self) -> int:
        return 0


def test_a_mapping_that_names_a_partition_twice_is_refused(cluster: FakeCluster, admin: Admin) -> None:
    cluster.create("t")
    twice = {TopicPartition("t", 0): 0, TopicPartition("t", cast("int", Number())): 1}
    with pytest.raises(InvalidDataError, match="t-0 is named twice"):
        admin.delete_records(twice)


def test_partitions_that_an_earlier_try_has_added_are_no_failure(cluster: FakeCluster) -> None:
    """Story: the store of the metadata failed for a moment, the request was sent again, and the second was refused."""
    cluster.create("t", 2)
    tries: list[Message] = []

    def done_but_not_answered(broker: int, request: Message) -> Message | None:
        if not isinstance(request, CreatePartitionsRequest):
            return None
        tries.append(request)
        if len(tries) == 1:
            cluster.topics["t"].partitions += [FakePartition(0), FakePartition(1)]
            late = RequestTimedOutError("the controller did not answer in time")
            return ErrorResponse(late.code, late.message)
        refused = InvalidPartitionsError("topic t has 4 partitions, 4 were asked for")
        return ErrorResponse(refused.code, refused.message)

    cluster.call_hook = done_but_not_answered
    with Admin(cluster.bootstrap) as admin:
        admin.create_partitions("t", 4)
        with pytest.raises(InvalidPartitionsError):
            admin.create_partitions("t", 4)
    assert len(tries) == 3


def test_new_partitions_do_not_wait_for_the_leaders_of_others(cluster: FakeCluster) -> None:
    cluster.create("t", 2)
    cluster.topics["t"].partitions[0].leader = -1
    with Admin(cluster.bootstrap, default_api_timeout_ms=20_000) as admin:
        admin.create_partitions("t", 3)


def test_a_deletion_does_not_wait_for_the_next_topic_of_the_name_to_go(cluster: FakeCluster) -> None:
    cluster.create("t")
    first = cluster.topics["t"].topic_id

    def again(broker: int, request: Message) -> Message | None:
        if isinstance(request, MetadataRequest) and "t" not in cluster.topics:
            cluster.create("t")
        return None

    cluster.call_hook = again
    with Admin(cluster.bootstrap, default_api_timeout_ms=20_000) as admin:
        admin.delete_topic("t")
    assert cluster.topics["t"].topic_id != first


def test_a_creation_does_not_wait_for_a_topic_that_was_deleted_meanwhile(cluster: FakeCluster) -> None:
    def deleted(broker: int, request: Message) -> Message | None:
        if isinstance(request, MetadataRequest):
            cluster.topics.pop("t", None)
        return None

    cluster.call_hook = deleted
    with (
        Admin(cluster.bootstrap, default_api_timeout_ms=20_000) as admin,
        pytest.raises(UnknownTopicOrPartitionError, match="meanwhile"),
    ):
        admin.create_topic(NewTopic("t", 1, 1))


WIDER = pa.schema([*DEFAULT_SCHEMA, pa.field("more", pa.int64())])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (AlterTopicConfigRequest, lambda admin: admin.alter_topic_config("t", {"retention.ms": 1000})),
        (AlterTopicSchemaRequest, lambda admin: admin.alter_topic_schema("t", WIDER)),
        (CreatePartitionsRequest, lambda admin: admin.create_partitions("t", 2)),
        (ReassignPartitionRequest, lambda admin: admin.reassign_partition(TopicPartition("t", 0), [1])),
        (ElectLeadersRequest, lambda admin: admin.elect_leaders([TopicPartition("t", 0)], unclean=True)),
    ],
    ids=["settings", "schema", "partitions", "replicas", "leader"],
)
def test_a_change_that_is_tried_again_does_nothing_to_the_next_topic_of_the_name(
    cluster: FakeCluster, admin: Admin, kind: type[CallRequest], change: Callable[[Admin], object]
) -> None:
    """Story: the controller moved, and the nightly reload came between two tries. The new topic got retention.ms=1000,
    and its records went.
    """
    cluster.create("t")

    def replaced(broker: int, request: CallRequest) -> None:
        if isinstance(request, kind) and not again:
            del cluster.topics["t"]
            again.append(cluster.create("t"))
            cluster.elect("t", 0, -1)
            raise NotControllerError("it has moved")

    again: list[FakeTopic] = []
    cluster.call_hook = replaced
    with pytest.raises(InconsistentTopicIdError):
        change(admin)
    (topic,) = again
    assert (topic.config, len(topic.schemas), len(topic.partitions), topic.partitions[0].leader) == ({}, 1, 1, -1)


@pytest.mark.parametrize(
    "change",
    [
        lambda admin: admin.alter_topic_config("t", {"retention.ms": 1000}),
        lambda admin: admin.alter_topic_schema("t", WIDER),
        lambda admin: admin.create_partitions("t", 2),
        lambda admin: admin.reassign_partition(TopicPartition("t", 0), [1]),
        lambda admin: admin.elect_leaders([TopicPartition("t", 0)]),
    ],
)
def test_a_change_of_a_topic_that_is_not_there_is_refused(admin: Admin, change: Callable[[Admin], object]) -> None:
    with pytest.raises(UnknownTopicOrPartitionError):
        change(admin)
