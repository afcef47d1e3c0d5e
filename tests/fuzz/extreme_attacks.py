"""Sends messages with extreme values to brokers and to the controller, as any peer can.

`right_messages` has each message once, right in every field, so that an extreme value meets the code behind the first
checks.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from spark_broker import Admin, NewTopic
from spark_broker.client.local_files import this_boot_id
from spark_broker.errors import error_from_code
from spark_broker.protocol import wire
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.messages import (
    PROTOCOL_VERSION,
    AbortTransactionRequest,
    AddPartitionToTransactionRequest,
    AllocateProducerIdsRequest,
    AlterIsr,
    AlterPartitionRequest,
    AlterTopicConfigRequest,
    AlterTopicSchemaRequest,
    AnnounceTieringRequest,
    AppendRequest,
    CallRequest,
    CallResponse,
    CommittedOffset,
    CommitTransactionRequest,
    ConfirmHistoryRequest,
    ConsumerGroupHeartbeatRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    DeleteGroupOffsetsRequest,
    DeleteGroupRequest,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteTopicRequest,
    DescribeGroupRequest,
    DescribeTransactionsRequest,
    ElectLeadersRequest,
    EndTransactionRequest,
    EnsureOffsetsTopicRequest,
    EnsureTransactionsTopicRequest,
    FetchPartition,
    FetchRequest,
    HeartbeatRequest,
    InitProducerIdRequest,
    InitProducerIdResponse,
    InitTransactionsRequest,
    IsrMember,
    JoinTransactionRequest,
    ListGroupsRequest,
    ListOffsetsPartition,
    ListOffsetsRequest,
    LogEnd,
    MemberAbout,
    Message,
    MetadataRequest,
    MetadataUpdate,
    OffsetCommitRequest,
    OffsetFetchRequest,
    RaiseLogStartsRequest,
    ReassignPartitionRequest,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    ReplicaFetchRequest,
    ReplicaPartition,
    ReplicaStateRequest,
    ReportTieringRequest,
    StreamMessage,
    TopicPartitions,
    TransactionalOffsetCommitRequest,
    TransactionMarker,
    WriteTransactionMarkersRequest,
)
from spark_broker.protocol.schema import schema_to_bytes
from spark_broker.transport.frames import Frame, Operation
from tests.broker.raw_client import RawClient
from tests.fuzz.extremes import Case, cases
from tests.fuzz.samples import sample
from tests.support.raw_peer import RawPeer, refusal

STREAMS: dict[type[Message], str] = {
    AppendRequest: "append",
    FetchRequest: "fetch",
    ReplicaFetchRequest: "replica",
    RegisterBrokerRequest: "session",
    HeartbeatRequest: "session",
}
TRANSACTIONAL_ID = "extreme"
ANSWER_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 0.5
SESSION_MS = 1000
"""`group.min.session.timeout.ms`"""
WAITS = {"AppendRequest.acks", "FetchRequest.max_wait_ms", "ReplicaFetchRequest.max_wait_ms"}
"""No answer comes to acks=0, and none at once to a peer that is ready to wait."""
NO_ANSWER = "no answer"
CLOSED = "closed"

_numbers = itertools.count()
_SEQUENCE_AT = 1 + ConsumerGroupHeartbeatRequest.__struct_fields__.index("sequence")
_responses = msgspec.msgpack.Decoder(CallResponse)


@dataclass(frozen=True)
class Victim:
    """What anybody can learn of a topic with one partition. `leader`, `leader_at`: id, epoch and address."""

    topic: str
    topic_id: str
    schema: pa.Schema
    leader: IsrMember
    leader_at: tuple[str, int]
    leader_epoch: int
    cluster_id: str
    controller_epoch: int
    producer: InitProducerIdResponse


def learn(bootstrap: str, topic: NewTopic, schema: pa.Schema) -> Victim:
    """Create the topic if it does not exist, and learn what there is to know of it."""
    with Admin(bootstrap) as admin:
        if topic.name not in admin.list_topics():
            admin.create_topic(topic)
        description, cluster = admin.describe_topic(topic.name), admin.describe_cluster()
    client = RawClient(bootstrap)
    client.ensure_internal()
    partition = description.partitions[0]
    leader = next(broker for broker in cluster.brokers if broker.id == partition.leader)
    return Victim(
        topic.name,
        description.topic_id,
        schema,
        IsrMember(leader.id, leader.epoch),
        (leader.host, leader.port),
        partition.leader_epoch,
        cluster.cluster_id,
        cluster.controller_epoch,
        client.init(TRANSACTIONAL_ID),
    )


def right_messages(of: Victim) -> list[Message]:
    """Every message that a server takes, with values that are right for this topic."""
    return [*_clients(of), *_groups(of), *_transactions(of), *_administration(of), *_brokers(of)]


def _clients(of: Victim) -> list[Message]:
    at = (of.topic_id, 0, of.leader_epoch)
    committed = [CommittedOffset(of.topic, 0, 1, of.leader_epoch, "m")]
    return [
        MetadataRequest([of.topic], certain=True),
        ListOffsetsRequest([ListOffsetsPartition(*at, 0, start=0, max_bytes=1000)]),
        DeleteRecordsRequest([DeleteRecordsPartition(*at, 0)]),
        InitProducerIdRequest(),
        OffsetCommitRequest("extreme", committed),
        OffsetFetchRequest("extreme", [(of.topic, 0)]),
        AppendRequest(1, *at, -1, 1000),
        FetchRequest(
            1, 0, 1, 1 << 20, [FetchPartition(*at, 0, 1 << 20, of.leader_epoch, -1)], ["n"], boot_id=this_boot_id()
        ),
    ]


def _groups(of: Victim) -> list[Message]:
    """A member that joins. Its session is short, so that no answer is held back for long."""
    about = MemberAbout([of.topic], "v[a-z]*", "r", "c", "h", SESSION_MS, 60_000, "uniform")
    owned = [TopicPartitions(of.topic_id, [0], of.topic)]
    return [
        ConsumerGroupHeartbeatRequest("members", "member", 0, 1, -1, owned, about, "instance", "why"),
        ListGroupsRequest(),
        DescribeGroupRequest("members"),
        DeleteGroupRequest("extreme"),
        DeleteGroupOffsetsRequest("extreme", [(of.topic, 0)]),
    ]


def _transactions(of: Victim) -> list[Message]:
    producer = (of.producer.producer_id, of.producer.producer_epoch)
    marker = TransactionMarker(*producer, committed=True, partitions=[(of.topic_id, 0)])
    committed = [CommittedOffset(of.topic, 0, 1, of.leader_epoch, "m")]
    return [
        EnsureTransactionsTopicRequest(),
        InitTransactionsRequest("other", 1000),
        AddPartitionToTransactionRequest(TRANSACTIONAL_ID, *producer, of.topic_id, 0),
        EndTransactionRequest(TRANSACTIONAL_ID, *producer, committed=True),
        JoinTransactionRequest("application", 0, "execution", 1000),
        CommitTransactionRequest("application", 0, "execution", [producer[0]]),
        AbortTransactionRequest("application", 0, "execution"),
        WriteTransactionMarkersRequest([marker]),
        TransactionalOffsetCommitRequest("extreme", committed, TRANSACTIONAL_ID, *producer, 0),
        DescribeTransactionsRequest([TRANSACTIONAL_ID]),
    ]


def _administration(of: Victim) -> list[Message]:
    schema = schema_to_bytes(of.schema)
    return [
        CreateTopicRequest("created", 1, 1, schema, {"min.insync.replicas": "1"}, [[of.leader.broker_id]]),
        DeleteTopicRequest(of.topic),
        CreatePartitionsRequest(of.topic, 2),
        AlterTopicConfigRequest(of.topic, {"retention.ms": "1000000"}),
        AlterTopicSchemaRequest(of.topic, schema),
        ElectLeadersRequest([(of.topic, 0)]),
        ReassignPartitionRequest(of.topic, 0, [of.leader.broker_id]),
        ConfirmHistoryRequest(of.topic_id, of.controller_epoch, "t", 0, 0, [0], [0], 0, [of.leader_epoch], [-1]),
        RaiseLogStartsRequest(of.topic_id, [(0, 0)]),
        ReportTieringRequest(of.topic_id, ""),
        AnnounceTieringRequest({of.topic_id: 60_000}),
        EnsureOffsetsTopicRequest(),
    ]


def _brokers(of: Victim) -> list[Message]:
    """A registration is of a broker that does not exist. The rest is what the leader would say."""
    leader = (of.leader.broker_id, of.leader.broker_epoch)
    change = AlterIsr(of.topic_id, 0, of.leader_epoch, 0, [of.leader], [])
    position = ReplicaPartition(of.topic_id, 0, of.leader_epoch, 0, -1)
    now_ms = time.time_ns() // 1_000_000
    return [
        AlterPartitionRequest(*leader, [change]),
        AllocateProducerIdsRequest(*leader),
        ReplicaStateRequest(of.topic_id, 0, of.leader_epoch),
        ReplicaFetchRequest(1, *leader, 0, 1 << 20, [position], [(of.topic_id, 1)]),
        RegisterBrokerRequest(
            version=PROTOCOL_VERSION,
            cluster_id=of.cluster_id,
            launch=1,
            broker_id=-1,
            directory_id="extreme",
            incarnation="extreme",
            start_kind="clean",
            host="127.0.0.1",
            port=1,
            rack="r",
            machine="m",
            executor_id="e",
            executor_pid=0,
            pid=0,
            pid_start_time=0,
            log="l",
            earlier=["extreme"],
        ),
        HeartbeatRequest(
            0,
            2**62,
            1,
            ready=True,
            damaged=[(of.topic_id, 0, 1)],
            log_ends=[LogEnd(of.topic_id, 0, of.leader_epoch, -1, 0, 0)],
            wall_ms=now_ms,
            ahead_max_ms=0,
            offline={of.topic_id: [0]},
        ),
    ]


def all_cases(of: Victim) -> Iterator[Case]:
    """Every extreme of every field of every message. One that has no right values yet is tried with drawn ones."""
    messages = {type(message): message for message in right_messages(of)}
    for kind in (*CallRequest.__args__, *STREAMS):
        yield from cases(messages.get(kind) or sample(random.Random(kind.__name__), kind))


def drawn_pairs(of: Victim, rng: random.Random, count: int) -> Iterator[Case]:
    """Messages of which two fields are extreme."""
    by_message: dict[str, list[Case]] = {}
    for case in all_cases(of):
        by_message.setdefault(case.message, []).append(case)
    wide = [those for those in by_message.values() if len({case.path[:1] for case in those if case.path}) > 1]
    while count:
        one, other = rng.sample(rng.choice(wide), 2)
        if not one.meets(other):
            count -= 1
            yield one.and_also(other)


def of_groups(of: Victim) -> Iterator[Case]:
    """The extremes of every message about groups."""
    names = {type(message).__name__ for message in _groups(of)}
    return (case for case in all_cases(of) if case.message in names)


def may_wait(case: Case) -> bool:
    """Whether the peer asks for no answer, or is ready to wait for one."""
    return any(f"{case.message}.{field}" in WAITS for field in case.field.split(", "))


class ExtremePeer:
    """A hostile client of one server."""

    def __init__(self, host: str, port: int, of: Victim) -> None:
        self._at = host, port
        self._calls: RawPeer | None = None
        self._payload = encode_batch(pa.record_batch({"n": [1], "s": ["x"]}, schema=of.schema))
        register = next(message for message in right_messages(of) if isinstance(message, RegisterBrokerRequest))
        self._register = wire.encode(register)

    def close(self) -> None:
        """Leave."""
        if self._calls is not None:
            self._calls.sock.close()
            self._calls = None

    def _connect(self, timeout_s: float) -> RawPeer:
        host, port = self._at
        return RawPeer(port, host, timeout_s=timeout_s)

    def send(self, case: Case) -> str:
        """The name of the answer's type, or of the error that came back."""
        if case.message == CreateTopicRequest.__name__ and case.field != "name":
            case = case.with_value((1,), f"created-{next(_numbers)}")
        if case.message == ConsumerGroupHeartbeatRequest.__name__ and "sequence" not in case.field:
            case = case.with_value((_SEQUENCE_AT,), next(_numbers))  # Else it would count as one that came before.
        kind = next((kind for kind in STREAMS if kind.__name__ == case.message), None)
        return self._call(case.encoded) if kind is None else self._stream(case, kind)

    def _call(self, body: bytes) -> str:
        self._calls = self._calls or self._connect(ANSWER_TIMEOUT_S)
        try:
            self._calls.frame(Operation.CALL, body, correlation=next(_numbers) % 2**32)
            answer = self._calls.receive()
        except TimeoutError:
            self.close()  # else the answer would be taken for that of the next call
            return NO_ANSWER
        except ConnectionError:
            answer = None
        if answer is not None and answer.header.operation is Operation.ANSWER:
            return _name_of(_responses.decode(answer.message))
        self.close()
        return CLOSED if answer is None else type(refusal(answer)).__name__  # such as a request that is too large

    def _stream(self, case: Case, kind: type[Message]) -> str:
        with self._connect(WAIT_TIMEOUT_S if may_wait(case) else ANSWER_TIMEOUT_S) as peer:
            try:
                peer.open(STREAMS[kind])
                if kind is HeartbeatRequest:
                    peer.frame(Operation.MESSAGE, self._register, stream=1)
                    registered = _answer(peer)
                    if not isinstance(registered, RegisterBrokerResponse):
                        return _name_of(registered)
                    case = self._with_epoch(case, registered.broker_epoch)
                payload = self._payload if kind is AppendRequest else b""
                peer.frame(Operation.MESSAGE, case.encoded, payload, stream=1)
                return _name_of(_answer(peer))
            except TimeoutError:
                return NO_ANSWER
            except ConnectionError:
                return CLOSED

    def _with_epoch(self, case: Case, epoch: int) -> Case:
        at = 1 + HeartbeatRequest.__struct_fields__.index("broker_epoch")
        return case if case.field == "broker_epoch" else case.with_value((at,), epoch)


def _answer(peer: RawPeer) -> StreamMessage:
    """The first answer that is no news of the cluster. Raises ConnectionError at the end of the connection."""
    while True:
        frame: Frame | None = peer.receive()
        if frame is None or not frame.message:
            raise ConnectionError("the connection, or the stream, is over without a word")
        message = wire.decode_message(frame.message)
        if not isinstance(message, MetadataUpdate):
            return message


def _name_of(answer: Message) -> str:
    """The error in an answer (of the first partition that has one), or its type."""
    code = next(_error_codes(answer), 0)
    return type(error_from_code(code, "")).__name__ if code else type(answer).__name__


def _error_codes(value: object) -> Iterator[int]:
    """Every error code within."""
    if isinstance(value, list):
        for item in value:
            yield from _error_codes(item)
    elif isinstance(value, msgspec.Struct):
        code = getattr(value, "error_code", 0)
        if code:
            yield code
        for name in value.__struct_fields__:
            yield from _error_codes(getattr(value, name))
