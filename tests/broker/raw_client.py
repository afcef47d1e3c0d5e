"""A transactional client without the client library: requests, batches and reads as on the wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import pyarrow as pa

from spark_broker.errors import (
    LeaderNotAvailableError,
    NetworkError,
    RequestTimedOutError,
    SparkBrokerError,
    error_from_code,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC
from spark_broker.protocol.arrow_message import decode_batch, encode_batch
from spark_broker.protocol.frame import TRANSACTIONAL, decode_frames
from spark_broker.protocol.messages import (
    AppendRequest,
    AppendResponse,
    CreateTopicRequest,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EndTransactionRequest,
    EnsureOffsetsTopicRequest,
    EnsureTransactionsTopicRequest,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    InitProducerIdResponse,
    InitTransactionsRequest,
    JoinTransactionRequest,
    Message,
    MetadataRequest,
    MetadataResponse,
    TopicMetadata,
    TransactionDescription,
)
from spark_broker.protocol.murmur2 import group_partition
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream

T = TypeVar("T")

TIMEOUT_S = 60.0
RETRY_S = 0.05


def rows(values: Iterable[bytes]) -> pa.RecordBatch:
    """Records as Kafka's, with these values."""
    column = list(values)
    nulls = [pa.nulls(len(column), DEFAULT_SCHEMA.field(name).type) for name in ("key", "headers")]
    times = pa.array([0] * len(column), pa.int64()).cast(DEFAULT_SCHEMA.field("timestamp").type)
    return pa.RecordBatch.from_arrays([nulls[0], pa.array(column, pa.binary()), nulls[1], times], schema=DEFAULT_SCHEMA)


class RawClient:
    """Knows the cluster by its bootstrap addresses, and repeats every call while its error is retriable."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = [Connection(host, int(port)) for host, port in (a.split(":") for a in bootstrap.split(","))]
        self._connections: dict[str, Connection] = {}
        self._pause = threading.Event()
        self.retried: list[str] = []  # names of the errors that were retried

    def call_any(self, request: Message) -> Message:
        """Ask the brokers in turn. One that has not answered is asked last from then on."""
        error: SparkBrokerError = NetworkError("no broker was asked")
        for connection in list(self._bootstrap):
            try:
                answer: Message = connection.call(request, timeout_ms=3000)
            except (NetworkError, RequestTimedOutError) as failed:
                error = failed
                self._bootstrap = [*(other for other in self._bootstrap if other is not connection), connection]
            else:
                return answer
        raise error

    def metadata(self) -> MetadataResponse:
        answer = self.call_any(MetadataRequest(None))
        assert isinstance(answer, MetadataResponse)
        return answer

    def topic(self, name: str) -> TopicMetadata:
        return next(topic for topic in self.metadata().topics if topic.name == name)

    def create(self, name: str, partitions: int = 1, replicas: int = 3, min_insync_replicas: int = 1) -> TopicMetadata:
        config = {"min.insync.replicas": str(min_insync_replicas)}
        self._retry(lambda: self.call_any(CreateTopicRequest(name, partitions, replicas, b"", config)))
        return self._retry(lambda: self._led(name))

    def ensure_internal(self) -> None:
        for request, name in (
            (EnsureTransactionsTopicRequest(), TRANSACTION_STATE_TOPIC),
            (EnsureOffsetsTopicRequest(), CONSUMER_OFFSETS_TOPIC),
        ):
            self._retry(lambda request=request: self.call_any(request))  # type: ignore[misc]
            self._retry(lambda name=name: self._led(name))  # type: ignore[misc]

    def _led(self, name: str) -> TopicMetadata:
        topic_metadata = next((topic for topic in self.metadata().topics if topic.name == name), None)
        if topic_metadata is None or any(partition.leader < 0 for partition in topic_metadata.partitions):
            raise NetworkError(f"{name} has no leaders yet")
        return topic_metadata

    def leader(self, name: str, partition: int) -> int:
        return self.topic(name).partitions[partition].leader

    def coordinator(self, transactional_id: str, topic: str = TRANSACTION_STATE_TOPIC) -> int:
        """The broker that coordinates the id (or the group, with `__consumer_offsets`)."""
        return self.leader(topic, group_partition(transactional_id, len(self.topic(topic).partitions)))

    def number(self, transactional_id: str, topic: str = TRANSACTION_STATE_TOPIC) -> int:
        """The partition of the internal topic that the id belongs to."""
        return group_partition(transactional_id, len(self.topic(topic).partitions))

    def connection(self, broker_id: int) -> Connection:
        broker = next((b for b in self.metadata().brokers if b.id == broker_id), None)
        if broker is None:
            raise LeaderNotAvailableError("no broker leads")
        address = f"{broker.host}:{broker.port}"
        return self._connections.setdefault(address, Connection(broker.host, broker.port))

    def pid(self, broker_id: int) -> int:
        return next(b.pid for b in self.metadata().brokers if b.id == broker_id)

    def ask(
        self, name: str, request: Message, topic: str = TRANSACTION_STATE_TOPIC, timeout_ms: int = 30_000
    ) -> Message:
        """Ask the present coordinator of this name."""

        def once() -> Message:
            answer: Message = self.connection(self.coordinator(name, topic)).call(request, timeout_ms=timeout_ms)
            return answer

        return self._retry(once)

    def init(self, transactional_id: str, timeout_ms: int = 60_000) -> InitProducerIdResponse:
        answer = self.ask(transactional_id, InitTransactionsRequest(transactional_id, timeout_ms))
        assert isinstance(answer, InitProducerIdResponse)
        return answer

    def end(self, transactional_id: str, who: InitProducerIdResponse, *, committed: bool) -> InitProducerIdResponse:
        request = EndTransactionRequest(transactional_id, who.producer_id, who.producer_epoch, committed)
        answer = self.ask(transactional_id, request)
        assert isinstance(answer, InitProducerIdResponse)
        return answer

    def join(self, application: str, version: int, execution: str, timeout_ms: int = 60_000) -> InitProducerIdResponse:
        answer = self.ask(application, JoinTransactionRequest(application, version, execution, timeout_ms))
        assert isinstance(answer, InitProducerIdResponse)
        return answer

    def describe(self, transactional_id: str) -> TransactionDescription:
        def once() -> TransactionDescription:
            request = DescribeTransactionsRequest([transactional_id])
            connection = self.connection(self.coordinator(transactional_id))
            answer = connection.call(request, timeout_ms=5000)
            assert isinstance(answer, DescribeTransactionsResponse)
            if not answer.transactions:
                raise NetworkError("not loaded yet")
            return answer.transactions[0]

        return self._retry(once)

    def append(
        self,
        topic: str,
        partition: int,
        values: Iterable[bytes],
        who: InitProducerIdResponse,
        sequence: int,
        transactional_id: str,
    ) -> int:
        """Append a transactional batch; returns its base offset. Raises the final error that refuses it."""
        message = encode_batch(
            rows(values),
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            base_sequence=sequence,
            attributes=TRANSACTIONAL,
        )

        def once() -> int:
            state = self.topic(topic)
            stream = self.connection(state.partitions[partition].leader).open_stream("append")
            request = AppendRequest(
                1,
                state.topic_id,
                partition,
                state.partitions[partition].leader_epoch,
                -1,
                10_000,
                transactional_id=transactional_id,
            )
            answer = _exchange(stream, request, message)
            assert isinstance(answer[0], AppendResponse)
            if answer[0].error_code:
                raise error_from_code(answer[0].error_code, answer[0].error_message)
            return answer[0].base_offset

        return self._retry(once)

    def read(self, topic: str, partition: int = 0, *, read_committed: bool = True) -> list[bytes]:
        """Every value, up to the last stable offset or the high watermark."""
        return self._retry(lambda: self._read(topic, partition, read_committed))

    def _read(self, topic: str, partition: int, read_committed: bool) -> list[bytes]:
        state = self.topic(topic)
        stream = self.connection(state.partitions[partition].leader).open_stream("fetch")
        values: list[bytes] = []
        offset = 0
        while True:
            wanted = FetchPartition(
                state.topic_id, partition, state.partitions[partition].leader_epoch, offset, 1 << 20
            )
            request = FetchRequest(1, 10, 1, 1 << 20, [wanted], read_committed=read_committed)
            stream.send(request)
            answer, payload = stream.receive(timeout_ms=10_000)
            assert isinstance(answer, FetchResponse)
            fetched = answer.partitions[0] if answer.partitions else None
            if fetched is not None and fetched.error_code:
                raise error_from_code(fetched.error_code, fetched.error_message)
            if fetched is None or fetched.next_offset <= offset:
                stream.close()
                return values
            for frame in decode_frames(payload):
                values += decode_batch(frame.message, DEFAULT_SCHEMA).column("value").to_pylist()
            offset = fetched.next_offset

    def _retry(self, once: Callable[[], T]) -> T:
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return once()
            except SparkBrokerError as error:
                if not error.retriable or time.monotonic() > end_s:
                    raise
                self.retried.append(error.name)
            self._pause.wait(RETRY_S)


def _exchange(stream: ClientStream, request: Message, payload: bytes) -> tuple[Message, memoryview]:
    try:
        stream.send(request, payload)
        return stream.receive(timeout_ms=15_000)
    finally:
        stream.close()
