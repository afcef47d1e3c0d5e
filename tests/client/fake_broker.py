"""A small cluster in memory behind real streams and calls: several brokers in one process that share one state.

A test changes leaders, kills and freezes brokers (through a TCP proxy, so that clients see what they would see),
and decides what happens to an append or a call by a hook. Every append that arrives is recorded.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from spark_broker.broker.fetch_operation import refused
from spark_broker.core.batch import batch_info
from spark_broker.core.divergence import FetchPosition, check_lineage
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.producers import ProducerStates
from spark_broker.errors import (
    ElectionNotNeededError,
    EligibleLeadersNotAvailableError,
    FencedLeaderEpochError,
    InconsistentTopicIdError,
    InvalidRequestError,
    LeaderNotAvailableError,
    MessageTooLargeError,
    NotLeaderOrFollowerError,
    OffsetMovedToTieredStorageError,
    OffsetOutOfRangeError,
    SparkBrokerError,
    TopicAlreadyExistsError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC
from spark_broker.protocol.arrow_message import assign, decode_batch, encode_batch, encode_marker, layout_of, validate
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.frame import CONTROL, TRANSACTIONAL, BatchHeader, Frame, encode_frames
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    AlterTopicSchemaRequest,
    AppendRequest,
    AppendResponse,
    BrokerMetadata,
    CallRequest,
    CommittedOffset,
    ControllerMetadata,
    CreatePartitionsRequest,
    CreateTopicRequest,
    DeletedRecords,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteTopicRequest,
    DescribeLogDirRequest,
    DescribeLogDirResponse,
    ElectionResult,
    ElectLeadersRequest,
    ElectLeadersResponse,
    EmptyResponse,
    EnsureOffsetsTopicRequest,
    EnsureTransactionsTopicRequest,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    HistoryMetadata,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListedOffset,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    PartitionMetadata,
    ReassignPartitionRequest,
    ReplicaSetAside,
    StoredReplica,
    TopicMetadata,
)
from spark_broker.protocol.murmur2 import group_partition
from spark_broker.protocol.schema import DEFAULT_SCHEMA, columns_stored, schema_from_bytes, schema_to_bytes
from spark_broker.protocol.schema_evolution import evolved
from spark_broker.times import EARLIEST
from spark_broker.transport.server import Server
from spark_broker.transport.server_stream import ServerStream
from tests.client.fake_coordinator import FakeTransactions, Key, check_coordinator, coordinated_id
from tests.client.fake_groups import FakeGroups, GroupRequest
from tests.client.proxy import Proxy

APPEND_TIME_MS = 1_700_000_000_000


@dataclass
class FakePartition:
    """`high_watermark` None: everything is committed as soon as it is appended. `adding`: brokers that a move adds."""

    leader: int
    leader_epoch: int = 0
    log_start_offset: int = 0
    log: list[Frame] = field(default_factory=list)
    producers: ProducerStates = field(default_factory=ProducerStates)
    high_watermark: int | None = None
    adding: list[int] = field(default_factory=list)

    @property
    def log_end_offset(self) -> int:
        return self.log[-1].header.next_offset if self.log else self.log_start_offset

    @property
    def epochs(self) -> EpochHistory:
        """The leader-epoch history that the batches of the log give."""
        history = EpochHistory()
        for frame in self.log:
            history = history.assign(max(frame.header.leader_epoch, history.latest_epoch), frame.header.base_offset)
        return history

    @property
    def committed(self) -> int:
        return self.log_end_offset if self.high_watermark is None else self.high_watermark

    def latest(self, read_committed: bool) -> int:
        return self.producers.transactions.last_stable_offset(self.committed) if read_committed else self.committed

    def left_out(self, header: BatchHeader, read_committed: bool) -> bool:
        if header.attributes & CONTROL or not read_committed or not header.attributes & TRANSACTIONAL:
            return bool(header.attributes & CONTROL)
        return self.producers.transactions.is_aborted(header.producer_id, header.base_offset)


@dataclass
class FakeTopic:
    name: str
    partitions: list[FakePartition]
    schemas: list[bytes]
    config: dict[str, str]
    topic_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    history: HistoryMetadata | None = None
    log_starts: list[int] = field(default_factory=list)
    next_tiering_ms: int = -1
    sealed_offset: int = -1
    lagging: int = 0
    """So many answers to questions for metadata still come from brokers that only know `before_the_lag`."""
    before_the_lag: tuple[HistoryMetadata | None, list[int]] = (None, [])
    """History and log starts."""

    def history_end(self, partition: int) -> int:
        """As the leader knows it."""
        if self.history is None or not self.config.get("delta.path"):
            return -1
        return self.history.ends[partition] if partition < len(self.history.ends) else 0

    def has_in_table(self, partition: int, offset: int) -> bool:
        deleted = self.log_starts[partition] if partition < len(self.log_starts) else 0
        return deleted <= offset < self.history_end(partition)

    @property
    def parsed_schemas(self) -> list[pa.Schema]:
        return [schema_from_bytes(data) for data in self.schemas]


@dataclass(frozen=True)
class Arrival:
    """An append that reached a broker, whatever came of it."""

    broker: int
    partition: int
    leader_epoch: int
    producer_id: int
    sequence: int
    rows: int
    body: bytes
    producer_epoch: int = -1
    transactional_id: str = ""


class Reaction:
    """What a hook makes of an append."""


class StoreSilently(Reaction):
    """Store it and never answer."""


class BreakAfterStoring(Reaction):
    """Store it, then cut the broker's connections."""


AppendHook = Callable[[int, AppendRequest, BatchHeader], "Reaction | SparkBrokerError | None"]
CallHook = Callable[[int, CallRequest], "Message | None"]


class FakeCluster:
    """Brokers 0 to n-1. All state is under `lock`; `changed` is notified of every change."""

    def __init__(self, brokers: int = 3) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.topics: dict[str, FakeTopic] = {}
        self.committed: dict[tuple[str, str, int], CommittedOffset] = {}
        self.commits: list[OffsetCommitRequest] = []
        self.groups = FakeGroups(self.topics, self.committed)
        self.arrivals: list[Arrival] = []
        self.fetches: list[FetchRequest] = []
        self.calls: list[tuple[int, CallRequest]] = []
        self.fenced: set[int] = set()
        self.controller = ControllerMetadata()
        self.logs: dict[int, str] = {}  # by broker id
        self.set_aside: dict[int, list[ReplicaSetAside]] = {}  # by broker id
        self.controller_epoch = 1
        self.cluster_id = "fake"
        self.metadata_offset = -1
        self.append_hook: AppendHook = lambda broker, request, header: None
        self.call_hook: CallHook = lambda broker, request: None
        self._next_producer_id = 1000
        self.transactions = FakeTransactions(self._new_producer_id, self._write_marker)
        self.transactions.committed_offsets = self._commit_offset
        self.transactions.has_topic = lambda topic_id: any(t.topic_id == topic_id for t in self.topics.values())
        self.brokers = [FakeBroker(self, broker_id) for broker_id in range(brokers)]
        self._moved: list[FakeBroker] = []

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{broker.port}" for broker in self.brokers)

    def create(
        self,
        name: str,
        partitions: int = 1,
        *,
        schema: pa.Schema = DEFAULT_SCHEMA,
        config: dict[str, str] | None = None,
    ) -> FakeTopic:
        leaders = [index % len(self.brokers) for index in range(partitions)]
        topic = FakeTopic(name, [FakePartition(leader) for leader in leaders], [schema_to_bytes(schema)], config or {})
        with self.changed:
            self.topics[name] = topic
            self.changed.notify_all()
        return topic

    def make_anew(self) -> None:
        """Another cluster is at the same addresses. Nothing of the first one is there."""
        with self.changed:
            self.cluster_id = uuid.uuid4().hex
            self.topics.clear()
            self.committed.clear()
            self._next_producer_id = 1000
            self.changed.notify_all()

    def store(self, topic: str, partition: int, batch: pa.RecordBatch, *, schema_id: int = 0) -> int:
        """Append a batch as if a producer had; returns its base offset."""
        with self.changed:
            part = self.topics[topic].partitions[partition]
            base_offset = part.log_end_offset
            self._append(part, encode_batch(batch, schema_id=schema_id), schema_id)
            self.changed.notify_all()
            return base_offset

    def elect(self, topic: str, partition: int, leader: int) -> None:
        """Elect another leader (or the same one) under a new epoch."""
        with self.changed:
            part = self.topics[topic].partitions[partition]
            part.leader, part.leader_epoch = leader, part.leader_epoch + 1
            self.changed.notify_all()

    def cut(self, topic: str, partition: int, batches: int) -> None:
        """An unclean election: the new leader has only the first batches of what was committed."""
        with self.changed:
            part = self.topics[topic].partitions[partition]
            part.log = part.log[:batches]
            self.elect(topic, partition, part.leader)

    def kill(self, broker: int, *, fail_over: bool = True) -> None:
        """Kill a broker; with `fail_over` the next live one leads its partitions."""
        self.brokers[broker].proxy.kill()
        if fail_over:
            self.fence(broker)

    def move(self, broker: int) -> None:
        """The broker dies and comes back at another port."""
        with self.changed:
            self.brokers[broker].proxy.kill()
            self._moved.append(self.brokers[broker])
            self.brokers[broker] = FakeBroker(self, broker)

    def fence(self, broker: int) -> None:
        """The controller counts the broker as lost and elects others."""
        with self.changed:
            self.fenced.add(broker)
            live = [candidate.id for candidate in self.brokers if candidate.id not in self.fenced]
            for topic in self.topics.values():
                for index, part in enumerate(topic.partitions):
                    if part.leader == broker:
                        self.elect(topic.name, index, live[index % len(live)] if live else -1)
            self.changed.notify_all()

    def rows(self, topic: str, partition: int) -> list[dict[str, object]]:
        """Every stored row."""
        stored_topic = self.topics[topic]
        with self.lock:
            frames = list(stored_topic.partitions[partition].log)
        schemas = stored_topic.parsed_schemas
        return [row for f in frames for row in decode_batch(f.message, schemas[f.header.schema_id]).to_pylist()]

    def close(self) -> None:
        for broker in [*self.brokers, *self._moved]:
            broker.proxy.kill()
        for broker in [*self.brokers, *self._moved]:
            broker.server.close()

    def find(self, topic_id: str, partition: int) -> tuple[FakeTopic, FakePartition]:
        topic = next((topic for topic in self.topics.values() if topic.topic_id == topic_id), None)
        if topic is None:
            raise UnknownTopicIdError(f"no topic {topic_id}")
        if partition >= len(topic.partitions):
            raise UnknownTopicOrPartitionError(f"no partition {partition}")
        return topic, topic.partitions[partition]

    def led(self, broker: int, topic_id: str, partition: int, leader_epoch: int) -> tuple[FakeTopic, FakePartition]:
        topic, part = self.find(topic_id, partition)
        if part.leader != broker:
            raise NotLeaderOrFollowerError(f"broker {broker} does not lead {topic.name}-{partition}")
        if leader_epoch != part.leader_epoch:
            kind = FencedLeaderEpochError if leader_epoch < part.leader_epoch else UnknownLeaderEpochError
            raise kind(f"epoch {leader_epoch}, not {part.leader_epoch}")
        return topic, part

    def append(self, broker: int, request: AppendRequest, payload: memoryview) -> AppendResponse | Reaction:
        with self.changed:
            try:
                message = bytearray(payload)
                topic, part = self.find(request.topic_id, request.partition)
                layout = layout_of(topic.schemas[request.schema_id])
                header = validate(message, layout, max_uncompressed_bytes=2**31).header
                self._record(broker, request, header, message)
                reaction = self.append_hook(broker, request, header)
                if isinstance(reaction, SparkBrokerError):
                    raise reaction
                self.led(broker, request.topic_id, request.partition, request.leader_epoch)
                limit = int(topic.config.get("max.message.bytes", 2**31))
                if len(message) > limit:
                    raise MessageTooLargeError(f"{len(message)} bytes")
                validate(message, layout, max_uncompressed_bytes=limit)
                if header.attributes & TRANSACTIONAL:
                    key = (request.topic_id, request.partition)
                    self.transactions.add(request.transactional_id, header.producer_id, header.producer_epoch, key)
                base_offset = self._store_once(part, header, message, request.schema_id)
            except SparkBrokerError as error:
                return AppendResponse(request.correlation_id, error.code, error.message)
            self.changed.notify_all()
            return reaction or AppendResponse(request.correlation_id, 0, "", base_offset)

    def _store_once(self, part: FakePartition, header: BatchHeader, message: bytearray, schema_id: int) -> int:
        if header.producer_id < 0:
            return self._append(part, message, schema_id)
        earlier = part.producers.check(
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            transactional=bool(header.attributes & TRANSACTIONAL),
        )
        if earlier is not None:
            return earlier.base_offset
        base_offset = self._append(part, message, schema_id)
        stored = batch_info(header._replace(base_offset=base_offset))
        part.producers.replay(stored)
        return base_offset

    def _append(self, part: FakePartition, message: bytes | bytearray, schema_id: int) -> int:
        base_offset = part.log_end_offset
        header, stored = assign(
            bytearray(message),
            base_offset=base_offset,
            leader_epoch=part.leader_epoch,
            append_time_ms=APPEND_TIME_MS,
            max_timestamp_us=APPEND_TIME_MS * 1000,
            schema_id=schema_id,
        )
        part.log.append(Frame(header, bytes(stored)))
        return base_offset

    def _write_marker(self, key: Key, producer_id: int, producer_epoch: int, committed: bool) -> None:
        topic, part = self.find(*key)
        schema_id = len(topic.schemas) - 1
        marker = encode_marker(
            topic.parsed_schemas[-1],
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            committed=committed,
            schema_id=schema_id,
        )
        self._append(part, marker, schema_id)
        part.producers.replay(batch_info(part.log[-1].header))

    def _new_producer_id(self) -> int:
        self._next_producer_id += 1
        return self._next_producer_id

    def _commit_offset(self, group: str, one: CommittedOffset) -> None:
        self.committed[group, one.topic, one.partition] = one

    def _record(self, broker: int, request: AppendRequest, header: BatchHeader, message: bytearray) -> None:
        arrival = Arrival(
            broker,
            request.partition,
            request.leader_epoch,
            header.producer_id,
            header.base_sequence,
            header.row_count,
            bytes(message),
            header.producer_epoch,
            request.transactional_id,
        )
        self.arrivals.append(arrival)

    def fetch(
        self, broker: int, request: FetchRequest, cancelled: Callable[[], bool]
    ) -> tuple[FetchResponse, list[bytes]]:
        with self.changed:
            self.fetches.append(request)
            waited_s = 0.0
            while True:
                answers, payload = self._read_all(broker, request)
                moved = any(a.next_offset > p.offset for a, p in zip(answers, request.partitions, strict=True))
                failed = moved or any(answer.error_code for answer in answers)
                size = sum(len(part) for part in payload)
                if failed or size >= request.min_bytes or waited_s * 1000 >= request.max_wait_ms or cancelled():
                    return FetchResponse(request.correlation_id, answers), payload
                self.changed.wait(0.02)
                waited_s += 0.02

    def _read_all(self, broker: int, request: FetchRequest) -> tuple[list[FetchedPartition], list[bytes]]:
        answers, payload = [], []
        for wanted in request.partitions:
            log_start = -1
            try:
                topic, part = self.led(broker, wanted.topic_id, wanted.partition, wanted.leader_epoch)
                log_start = part.log_start_offset
                if wanted.offset < part.log_start_offset and topic.has_in_table(wanted.partition, wanted.offset):
                    raise OffsetMovedToTieredStorageError(f"{wanted.offset} is in the table")
                read = self._read(part, wanted, request.read_committed)
                frames = [frame for frame in read if not part.left_out(frame.header, request.read_committed)]
            except SparkBrokerError as error:
                answers.append(refused(wanted, error, log_start))
                continue
            if request.columns is not None:
                frames = [_projected(topic, frame, request.columns) for frame in frames]
            data = b"".join(encode_frames(frames))
            payload.append(data)
            answers.append(
                FetchedPartition(
                    topic_id=wanted.topic_id,
                    partition=wanted.partition,
                    error_code=0,
                    leader_epoch=part.leader_epoch,
                    high_watermark=part.committed,
                    log_start_offset=part.log_start_offset,
                    length=len(data),
                    next_offset=read[-1].header.next_offset if read else wanted.offset,
                    next_epoch=read[-1].header.leader_epoch if read else -1,
                )
            )
        return answers, payload

    def _read(self, part: FakePartition, wanted: FetchPartition, read_committed: bool) -> list[Frame]:
        read_to = wanted.offset if wanted.read_to < 0 else wanted.read_to
        read = FetchPosition(part.leader_epoch, read_to, wanted.last_fetched_epoch)
        check_lineage(part.epochs, part.log_start_offset, part.log_end_offset, read)
        if not part.log_start_offset <= wanted.offset <= part.log_end_offset:
            raise OffsetOutOfRangeError(f"{wanted.offset} is not in {part.log_start_offset}..{part.log_end_offset}")
        frames: list[Frame] = []
        size = 0
        for frame in part.log:
            if frame.header.next_offset <= wanted.offset:
                continue
            if frame.header.next_offset > part.latest(read_committed) or (
                frames and size + len(frame.message) > wanted.max_bytes
            ):
                break
            frames.append(frame)
            size += len(frame.message)
        return frames

    def call(self, broker: int, request: CallRequest) -> Message:
        with self.changed:
            self.calls.append((broker, request))
            self.changed.notify_all()
        hooked = self.call_hook(broker, request)
        if hooked is not None:
            return hooked
        with self.changed:
            answer = self._answer(broker, request)
            self.changed.notify_all()
            return answer

    def _answer(self, broker: int, request: CallRequest) -> Message:
        if isinstance(request, GroupRequest):
            return self.groups.answer(broker, request)
        match request:
            case MetadataRequest():
                return self.metadata(request.topics, certain=request.certain)
            case InitProducerIdRequest():
                return InitProducerIdResponse(self._new_producer_id(), 0)
            case ListOffsetsRequest():
                return ListOffsetsResponse([self._offset_info(broker, spec) for spec in request.partitions])
            case DeleteRecordsRequest():
                return DeleteRecordsResponse([self._deleted(broker, spec) for spec in request.partitions])
            case OffsetCommitRequest() | OffsetFetchRequest():
                return self._group(broker, request)
            case DescribeLogDirRequest():
                return self._log_dir(broker)
            case _:
                coordinated = coordinated_id(request)
                if coordinated is not None:
                    topic = self.topics.get(TRANSACTION_STATE_TOPIC)
                    leaders = [] if topic is None else [part.leader for part in topic.partitions]
                    check_coordinator(leaders, group_partition(coordinated, len(leaders) or 1), broker)
                answer = self.transactions.answer(request)
                return self._administer(request) if answer is None else answer

    def _deleted(self, broker: int, spec: DeleteRecordsPartition) -> DeletedRecords:
        try:
            _, part = self.led(broker, spec.topic_id, spec.partition, spec.leader_epoch)
            if spec.offset > part.committed:
                raise OffsetOutOfRangeError(f"{spec.offset} is not committed")
        except SparkBrokerError as error:
            return DeletedRecords(spec.topic_id, spec.partition, error.code, error.message)
        deleted = part.committed if spec.offset < 0 else spec.offset
        part.log_start_offset = max(part.log_start_offset, deleted)
        return DeletedRecords(spec.topic_id, spec.partition, 0, log_start_offset=part.log_start_offset)

    def _log_dir(self, broker: int) -> DescribeLogDirResponse:
        replicas = [
            StoredReplica(name, number, 100) for name, t in self.topics.items() for number in range(len(t.partitions))
        ]
        return DescribeLogDirResponse(f"/logs/broker-{broker}", replicas, self.set_aside.get(broker, []))

    def _administer(self, request: CallRequest) -> Message:
        match request:
            case CreateTopicRequest():
                if request.name in self.topics:
                    raise TopicAlreadyExistsError(f"topic {request.name!r} exists")
                schema = schema_from_bytes(request.schema) if request.schema else DEFAULT_SCHEMA
                self.create(request.name, max(1, request.partitions), schema=schema, config=dict(request.config))
            case DeleteTopicRequest():
                self._topic(request.name)
                del self.topics[request.name]
            case CreatePartitionsRequest():
                topic = self._topic(request.name, request.topic_id)
                while len(topic.partitions) < request.total:
                    topic.partitions.append(FakePartition(len(topic.partitions) % len(self.brokers)))
            case AlterTopicConfigRequest():
                topic = self._topic(request.name, request.topic_id)
                config = {**topic.config, **request.values}
                topic.config = {name: value for name, value in config.items() if value is not None}
            case AlterTopicSchemaRequest():
                topic = self._topic(request.name, request.topic_id)
                schema = evolved(topic.parsed_schemas[-1], schema_from_bytes(request.schema))
                topic.schemas.append(schema_to_bytes(schema))
            case EnsureOffsetsTopicRequest():
                if CONSUMER_OFFSETS_TOPIC not in self.topics:
                    self.create(CONSUMER_OFFSETS_TOPIC, 3)
            case EnsureTransactionsTopicRequest():
                if TRANSACTION_STATE_TOPIC not in self.topics:
                    self.create(TRANSACTION_STATE_TOPIC, 3)
            case ElectLeadersRequest(partitions):
                return ElectLeadersResponse([self._elect(name, number, request) for name, number in partitions or []])
            case ReassignPartitionRequest():
                self._topic(request.topic, request.topic_id)
                return EmptyResponse()
            case _:
                raise InvalidRequestError(f"{type(request).__name__} is not a client's call")
        return EmptyResponse()

    def _elect(self, name: str, number: int, request: ElectLeadersRequest) -> ElectionResult:
        """The next live broker leads a partition without a leader, if an unclean election is asked for."""
        part = self._topic(name, request.topic_ids.get(name, "")).partitions[number]
        live = [broker.id for broker in self.brokers if broker.id not in self.fenced]
        if part.leader >= 0:
            return ElectionResult(name, number, ElectionNotNeededError.code, f"broker {part.leader} leads")
        if not request.unclean or not live:
            return ElectionResult(name, number, EligibleLeadersNotAvailableError.code, "nobody is live")
        self.elect(name, number, live[0])
        return ElectionResult(name, number, 0)

    def _topic(self, name: str, topic_id: str = "") -> FakeTopic:
        if name not in self.topics:
            raise UnknownTopicOrPartitionError(f"topic {name!r} does not exist")
        if topic_id not in ("", self.topics[name].topic_id):
            raise InconsistentTopicIdError(f"topic {name!r} is another one")
        return self.topics[name]

    def metadata(self, names: list[str] | None, *, certain: bool = False) -> MetadataResponse:
        """The answer of every broker, or (`certain`) of the controller."""
        wanted = self.topics.values() if names is None else [self.topics[n] for n in names if n in self.topics]
        brokers = [
            BrokerMetadata(
                *(
                    broker.id,
                    "127.0.0.1",
                    broker.port,
                    None,
                    1,
                    0,
                    "",
                    0,
                    broker.id in self.fenced,
                    self.logs.get(broker.id, ""),
                )
            )
            for broker in self.brokers
        ]
        topics = [self._topic_metadata(topic, certain=certain) for topic in wanted]
        return MetadataResponse(
            self.cluster_id, self.controller_epoch, brokers, topics, self.controller, self.metadata_offset
        )

    def _topic_metadata(self, topic: FakeTopic, *, certain: bool) -> TopicMetadata:
        ids = [broker.id for broker in self.brokers]
        live = [id_ for id_ in ids if id_ not in self.fenced] or ids
        partitions = [
            PartitionMetadata(
                *(index, part.leader, part.leader_epoch, ids, [id_ for id_ in live if id_ not in part.adding]),
                part.leader_epoch,
                adding=part.adding,
            )
            for index, part in enumerate(topic.partitions)
        ]
        history, log_starts = topic.history, topic.log_starts
        if topic.lagging and not certain:
            topic.lagging -= 1
            history, log_starts = topic.before_the_lag
        return TopicMetadata(
            topic.name,
            topic.topic_id,
            partitions,
            topic.schemas,
            topic.config,
            history,
            log_starts,
            topic.next_tiering_ms,
        )

    def _offset_info(self, broker: int, spec: ListOffsetsPartition) -> ListedOffset:
        try:
            topic, part = self.led(broker, spec.topic_id, spec.partition, spec.leader_epoch)
        except SparkBrokerError as error:
            return ListedOffset(spec.topic_id, spec.partition, error.code, error.message)
        offset = part.log_start_offset if spec.at == EARLIEST else part.latest(spec.read_committed)
        if isinstance(spec.at, int):
            offset = -1
        if isinstance(spec.at, int) and spec.at <= APPEND_TIME_MS * 1000 and part.log:
            offset = max(part.log[0].header.base_offset, part.log_start_offset)
        first = next((i for i, f in enumerate(part.log) if f.header.next_offset > spec.start), 0)
        lengths = [f.header.length for f in part.log[first:] if f.header.next_offset <= offset]
        fitting = sum(total <= spec.max_bytes for total in itertools.accumulate(lengths))
        return ListedOffset(
            spec.topic_id,
            spec.partition,
            0,
            offset=offset,
            leader_epoch=part.leader_epoch,
            log_start_offset=part.log_start_offset,
            high_watermark=part.committed,
            last_epoch=part.epochs.epoch_at(offset - 1) if offset > 0 else -1,
            start_epoch=part.epochs.epoch_at(spec.start - 1) if spec.start > part.log_start_offset else -1,
            size_bytes=sum(lengths),
            fitting_offset=part.log[first + max(1, fitting) - 1].header.next_offset if lengths else spec.start,
            sealed_offset=topic.sealed_offset,
            history_end_offset=topic.history_end(spec.partition),
        )

    def _group(self, broker: int, request: OffsetCommitRequest | OffsetFetchRequest) -> Message:
        topic = self.topics.get(CONSUMER_OFFSETS_TOPIC)
        if topic is None:
            raise LeaderNotAvailableError("no offsets topic")
        if all(part.leader != broker for part in topic.partitions):
            raise NotLeaderOrFollowerError("not the coordinator")
        if isinstance(request, OffsetCommitRequest):
            self.groups.check_commit(request)
            self.commits.append(request)
            for offset in request.offsets:
                self.committed[request.group_id, offset.topic, offset.partition] = offset
            return EmptyResponse()
        wanted = request.partitions
        return OffsetFetchResponse(
            [
                offset
                for (group, topic_name, partition), offset in self.committed.items()
                if group == request.group_id and (wanted is None or (topic_name, partition) in wanted)
            ]
        )


def _projected(topic: FakeTopic, frame: Frame, columns: list[str]) -> Frame:
    stored = topic.parsed_schemas[frame.header.schema_id]
    batch = decode_batch(frame.message, stored, columns_stored(stored, columns))
    message = encode_batch(batch, schema_id=frame.header.schema_id)
    return Frame(frame.header._replace(length=len(message), message_crc=crc32c(message)), message)


class FakeBroker:
    """One server of the cluster, behind a proxy whose port clients see."""

    def __init__(self, cluster: FakeCluster, broker_id: int) -> None:
        self.id = broker_id
        self._cluster = cluster
        self.bugs: list[BaseException] = []
        self.server = Server(
            "127.0.0.1",
            0,
            lambda request: cluster.call(broker_id, request),
            {"append": self._appends, "fetch": self._fetches},
            self.bugs.append,
        )
        self.proxy = Proxy(self.server.port)

    @property
    def port(self) -> int:
        return self.proxy.port

    def _appends(self, stream: ServerStream) -> None:
        while (received := stream.receive()) is not None:
            request, payload = received
            if not isinstance(request, AppendRequest):
                raise InvalidRequestError("not an append")
            answer = self._cluster.append(self.id, request, payload)
            if isinstance(answer, BreakAfterStoring):
                self.proxy.kill()
                self.proxy.revive()
            elif isinstance(answer, AppendResponse) and request.acks != 0:
                stream.send(answer)

    def _fetches(self, stream: ServerStream) -> None:
        while (received := stream.receive()) is not None:
            request, _ = received
            if not isinstance(request, FetchRequest):
                raise InvalidRequestError("not a fetch")
            response, payload = self._cluster.fetch(self.id, request, lambda: stream.cancelled)
            stream.send(response, *payload)
