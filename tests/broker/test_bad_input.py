"""Bad input is a typed error at the client that sent it, and the broker goes on serving all others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import (
    BootstrapUnreachableError,
    CorruptMessageError,
    FencedLeaderEpochError,
    InconsistentClusterIdError,
    InvalidConfigError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    InvalidSchemaError,
    InvalidTopicError,
    MessageTooLargeError,
    OffsetOutOfRangeError,
    SchemaMismatchError,
    SparkBrokerError,
    TopicAlreadyExistsError,
    UnknownLeaderEpochError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    error_from_code,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.messages import (
    AllocateProducerIdsRequest,
    AlterPartitionRequest,
    AppendRequest,
    AppendResponse,
    CallRequest,
    HeartbeatRequest,
    Message,
    MetadataRequest,
    MetadataResponse,
    RaiseLogStartsRequest,
)
from spark_broker.storage.directory import LogDirectory
from spark_broker.transport.client import Connection
from tests.conftest import WaitUntil
from tests.support.process_cluster import ProcessCluster
from tests.support.raw_peer import RawPeer

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string())])


@pytest.fixture(scope="module")
def admin(process_cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(process_cluster.bootstrap_servers) as admin:
        config = {"min.insync.replicas": 2, "max.message.bytes": 100_000}
        admin.create_topic(NewTopic("typed", partitions=1, replication_factor=3, schema=SCHEMA, config=config))
        yield admin


@pytest.fixture(autouse=True)
def still_serving(process_cluster: ProcessCluster, admin: Admin) -> Iterator[None]:
    """After each test, appends and reads go on, and no acknowledged record has changed."""
    before = everything(process_cluster)
    yield
    with Producer(process_cluster.bootstrap_servers) as producer:
        producer.append("typed", [{"n": len(before), "s": "after"}]).result(20)
    assert everything(process_cluster) == [*before, (len(before), "after")]


def everything(cluster: ProcessCluster) -> list[tuple[int, str]]:
    rows: list[tuple[int, str]] = []
    partition = TopicPartition("typed", 0)
    with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([partition])
        end = consumer.end_offsets([partition])[partition]
        while consumer.position(partition) < end:
            for batch in consumer.poll(timeout=1.0):
                rows += [(row["n"], row["s"]) for row in batch.data.to_pylist()]
    return rows


def leader_stream(admin: Admin) -> tuple[Connection, str, int]:
    """A raw connection to the leader of the topic's only partition, the topic's id and its leader epoch."""
    topic = admin.describe_topic("typed")
    leader = next(b for b in admin.describe_cluster().brokers if b.id == topic.partitions[0].leader)
    return Connection(leader.host, leader.port), topic.topic_id, topic.partitions[0].leader_epoch


def raw_append(admin: Admin, message: bytes, *, epoch_delta: int = 0) -> AppendResponse:
    connection, topic_id, epoch = leader_stream(admin)
    stream = connection.open_stream("append")
    stream.send(AppendRequest(1, topic_id, 0, epoch + epoch_delta, -1, 10_000), message)
    response, _ = stream.receive(timeout_ms=20_000)
    stream.close()
    connection.close()
    assert isinstance(response, AppendResponse)
    return response


def good_message() -> bytes:
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array(["a", "b"])], schema=SCHEMA)
    return encode_batch(batch)


@pytest.mark.parametrize("rows", [[{"n": "text", "s": "x"}], [{"n": None, "s": "x"}], [{"n": 1, "t": 2}]])
def test_a_batch_that_does_not_match_the_schema_is_refused(
    process_cluster: ProcessCluster, rows: list[dict[str, object]]
) -> None:
    with Producer(process_cluster.bootstrap_servers) as producer, pytest.raises(SchemaMismatchError):
        producer.append("typed", rows).result(20)


def test_a_row_that_is_larger_than_a_batch_may_be_is_refused(process_cluster: ProcessCluster) -> None:
    with Producer(process_cluster.bootstrap_servers) as producer, pytest.raises(MessageTooLargeError):
        producer.append("typed", [{"n": 1, "s": "x" * 200_000}]).result(20)


def test_the_leader_itself_refuses_an_oversize_batch(admin: Admin) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array(["x" * 200_000])], schema=SCHEMA)
    assert raw_append(admin, encode_batch(batch)).error_code == MessageTooLargeError.code


def test_every_flipped_byte_of_a_batch_is_noticed_or_harmless(admin: Admin) -> None:
    message = good_message()
    codes = set()
    for position in range(0, len(message), 37):
        broken = bytearray(message)
        broken[position] ^= 0x40
        codes.add(raw_append(admin, bytes(broken), epoch_delta=0).error_code)
    assert codes <= {CorruptMessageError.code, SchemaMismatchError.code}


def test_a_batch_of_another_schema_is_refused_by_the_leader(admin: Admin) -> None:
    other = pa.RecordBatch.from_arrays([pa.array([1.0])], names=["x"])
    assert raw_append(admin, encode_batch(other)).error_code == SchemaMismatchError.code


def test_another_leader_epoch_than_the_current_one_is_refused(admin: Admin, wait_until: WaitUntil) -> None:
    partition = admin.describe_topic("typed").partitions[0]
    admin.reassign_partition(TopicPartition("typed", 0), [*partition.replicas[1:], partition.replicas[0]])
    admin.elect_leaders()
    wait_until(lambda: admin.describe_topic("typed").partitions[0].leader_epoch > partition.leader_epoch, "an election")
    assert raw_append(admin, good_message(), epoch_delta=-1).error_code == FencedLeaderEpochError.code
    assert raw_append(admin, good_message(), epoch_delta=1).error_code == UnknownLeaderEpochError.code


def test_a_request_that_does_not_decode_ends_its_stream_with_a_typed_error(admin: Admin) -> None:
    connection, _, _ = leader_stream(admin)
    for kind in ("append", "fetch", "replica", "nonsense"):
        stream = connection.open_stream(kind)
        stream.send(HeartbeatRequest(1, 1, 1, True), b"garbage")
        with pytest.raises(InvalidRequestError):
            stream.receive(timeout_ms=10_000)
        stream.close()
    connection.close()


def test_a_message_beyond_the_limit_is_a_typed_error(admin: Admin) -> None:
    connection, topic_id, epoch = leader_stream(admin)
    stream = connection.open_stream("append")
    with suppress(InvalidRequestError):  # It may be refused before all of it was sent.
        stream.send(AppendRequest(1, topic_id, 0, epoch, -1, 10_000), bytes(3_000_000))
    with pytest.raises(InvalidRequestError, match="2000000"):
        stream.receive(timeout_ms=10_000)
    stream.close()
    connection.close()


def test_bytes_that_are_no_frames_at_all_do_no_harm(process_cluster: ProcessCluster) -> None:
    host, port = process_cluster.bootstrap_servers.split(",")[0].split(":")
    with RawPeer(int(port), host, greet=False) as peer:
        peer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 16)
        assert b"400 Bad Request" in peer.bytes_until_closed()


def test_an_unknown_topic_or_partition_is_named(process_cluster: ProcessCluster, admin: Admin) -> None:
    with Producer(process_cluster.bootstrap_servers, max_block_ms=3000) as producer:
        with pytest.raises(UnknownTopicOrPartitionError, match="typo"):
            producer.append("typo", [{"n": 1}]).result(20)
        with pytest.raises(UnknownTopicOrPartitionError):
            producer.append("typed", [{"n": 1, "s": ""}], partition=9).result(20)
    with pytest.raises(UnknownTopicOrPartitionError, match="typo"):
        admin.describe_topic("typo")


def test_nobody_but_a_broker_appends_to_an_internal_topic(process_cluster: ProcessCluster) -> None:
    partition = TopicPartition("typed", 0)
    with Consumer(process_cluster.bootstrap_servers, group_id="g") as consumer:
        consumer.commit({partition: 0})
    with Producer(process_cluster.bootstrap_servers) as producer, pytest.raises(InvalidTopicError):
        producer.append(CONSUMER_OFFSETS_TOPIC, [{"value": b"x"}]).result(20)


def test_an_offset_out_of_range_is_an_error_where_no_reset_is_wanted(process_cluster: ProcessCluster) -> None:
    partition = TopicPartition("typed", 0)
    with Consumer(process_cluster.bootstrap_servers, auto_offset_reset="none") as consumer:
        consumer.assign([partition])
        consumer.seek(partition, 1_000_000)
        with pytest.raises(OffsetOutOfRangeError, match="1000000"):
            consumer.poll(timeout=20.0)


def test_an_unreachable_bootstrap_address_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # It does not listen, and nobody else gets the port.
        port = silent.getsockname()[1]
        with (
            pytest.raises(BootstrapUnreachableError, match=str(port)),
            Admin(f"127.0.0.1:{port}", default_api_timeout_ms=2000) as admin,
        ):
            admin.list_topics()


def test_an_unknown_client_setting_names_the_nearest(process_cluster: ProcessCluster) -> None:
    with pytest.raises(InvalidConfigError, match=r"linger\.ms"):
        Producer(process_cluster.bootstrap_servers, lingr_ms=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("topic", "error"),
    [
        (NewTopic("typed", partitions=1), TopicAlreadyExistsError),
        (NewTopic("bad name!"), InvalidTopicError),
        (NewTopic("__mine"), InvalidTopicError),
        (NewTopic("p", partitions=0), InvalidPartitionsError),
        (NewTopic("r", replication_factor=9), InvalidReplicationFactorError),
        (NewTopic("c", config={"retention.millis": 1}), InvalidConfigError),
        (NewTopic("s", schema=pa.schema([("d", pa.dictionary(pa.int32(), pa.string()))])), InvalidSchemaError),
    ],
)
def test_a_topic_that_cannot_be_made_says_why(admin: Admin, topic: NewTopic, error: type[Exception]) -> None:
    with pytest.raises(error):
        admin.create_topic(topic)


def test_partitions_never_shrink(admin: Admin) -> None:
    admin.create_topic(NewTopic("grows", partitions=2, replication_factor=1))
    admin.create_partitions("grows", 3)
    for total in (3, 1):
        with pytest.raises(InvalidPartitionsError):
            admin.create_partitions("grows", total)
    assert len(admin.describe_topic("grows").partitions) == 3


def test_a_log_directory_of_another_cluster_is_refused_and_left_alone(tmp_path: Path) -> None:
    mine = LogDirectory.claim(tmp_path, cluster_id="one", launch=1)
    mine.release()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InconsistentClusterIdError, match="one"):
        LogDirectory.claim(tmp_path, cluster_id="two", launch=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_metadata_comes_from_any_broker(process_cluster: ProcessCluster) -> None:
    answers = []
    for address in process_cluster.bootstrap_servers.split(","):
        host, port = address.split(":")
        connection = Connection(host, int(port))
        answer = connection.call(MetadataRequest(["typed"]), timeout_ms=10_000)
        connection.close()
        assert isinstance(answer, MetadataResponse)
        answers.append((answer.cluster_id, {b.id for b in answer.brokers}, answer.topics[0].topic_id))
    assert len(answers) == 3
    assert all(answer == answers[0] for answer in answers)


def test_every_error_code_comes_back_as_its_own_type() -> None:
    for error in (CorruptMessageError, SchemaMismatchError, MessageTooLargeError):
        assert type(error_from_code(error.code, "why")) is error


def ask(admin: Admin, request: CallRequest) -> Message:
    """Send any message to a broker, as any peer can."""
    broker = admin.describe_cluster().brokers[0]
    connection = Connection(broker.host, broker.port)
    try:
        return connection.call(request, timeout_ms=20_000)
    finally:
        connection.close()


@pytest.mark.parametrize("start", [2**63 - 1, 2**62, 1, -1])
def test_records_are_deleted_up_to_any_offset_of_an_empty_partition(
    process_cluster: ProcessCluster, admin: Admin, start: int
) -> None:
    """Story: a TypeError ended a broker."""
    name = f"empty{start % 97}"
    admin.create_topic(NewTopic(name, 1, 3))
    with typed_errors():
        ask(admin, RaiseLogStartsRequest(admin.describe_topic(name).topic_id, [(0, start)]))
    with typed_errors(), Producer(process_cluster.bootstrap_servers) as producer:
        producer.append(name, [{"value": b"v"}], partition=0).result(20)


@contextmanager
def typed_errors() -> Iterator[None]:
    """What is done in this block may be refused, but not because of a bug."""
    refused: SparkBrokerError | None = None
    try:
        yield
    except SparkBrokerError as error:
        refused = error
    assert not isinstance(refused, UnknownServerError), refused


def test_what_brokers_ask_of_the_controller_is_not_passed_on(admin: Admin) -> None:
    for request in (AlterPartitionRequest(0, 1, []), AllocateProducerIdsRequest(0, 1)):
        with pytest.raises(InvalidRequestError, match="is not for clients"):
            ask(admin, request)


def test_the_files_of_a_broker_are_its_users_own(process_cluster: ProcessCluster) -> None:
    files = [path for path in process_cluster.log_dirs.rglob("*") if path.exists()]
    assert len(files) > 10
    open_to_others = [path for path in files if path.stat().st_mode & 0o077]
    assert open_to_others == []
