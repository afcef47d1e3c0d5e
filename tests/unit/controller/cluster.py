"""A cluster in memory: the controller's state machine, and brokers that are a few lines each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from spark_broker.config import ClusterSettings, load_cluster_settings
from spark_broker.controller.controller import Controller
from spark_broker.controller.effects import CloseSession, ControllerResult, Effect, LaunchNumber, Note, Reply, Send
from spark_broker.controller.events import (
    BrokerRegisters,
    CallReceived,
    ControllerStarted,
    Event,
    HeartbeatReceived,
    LaunchRequested,
    SessionEnded,
    Tick,
)
from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage, PartitionRegistration, TopicState
from spark_broker.controller.log_ends import Key, is_asked_for
from spark_broker.controller.partition_line import PartitionChanged
from spark_broker.controller.records import PartitionChangeRecord
from spark_broker.controller.snapshot import image_from_snapshot, to_records
from spark_broker.controller.topics import NewTopicValues
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import (
    PROTOCOL_VERSION,
    AlterIsr,
    AlterPartitionRequest,
    CallRequest,
    CreateTopicRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    IsrMember,
    LogEnd,
    Message,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    TopicSchema,
)

CLUSTER_ID = "test-cluster"
EPOCH_MS = 1_700_000_000_000


def settings(**values: object) -> ClusterSettings:
    """Settings by name with underscores for dots."""
    return load_cluster_settings({name.replace("_", "."): value for name, value in values.items()})


def registration(launch: int, directory: str, **changes: object) -> RegisterBrokerRequest:
    """A first registration of an empty directory, on an executor of its own."""
    values: dict[str, object] = {
        "version": PROTOCOL_VERSION,
        "cluster_id": "",
        "launch": launch,
        "broker_id": -1,
        "directory_id": directory,
        "incarnation": f"incarnation-{launch}",
        "start_kind": "clean",
        "host": "127.0.0.1",
        "port": 9000 + launch,
        "rack": None,
        "machine": "machine",
        "executor_id": f"executor-{launch}",
        "executor_pid": 1,
        "pid": 100 + launch,
        "pid_start_time": 5,
    }
    return RegisterBrokerRequest(**{**values, **changes})  # type: ignore[arg-type]


def by_topic(keys: Iterable[Key]) -> dict[str, list[int]]:
    """Partitions as heartbeats name them."""
    numbers: dict[str, list[int]] = {}
    for topic_id, number in sorted(keys):
        numbers.setdefault(topic_id, []).append(number)
    return numbers


class Cluster:
    """Drives a Controller; `now_ms` is the time. Every event's outcome is also replayed, as a broker would."""

    def __init__(self, image: MetadataImage = EMPTY_IMAGE, shared_executor: bool = False, **values: object) -> None:
        self.now_ms = 0
        self.replayed = image
        self.unclean: set[tuple[str, int, int]] = set()  # (topic id, number, leader epoch) of unclean elections
        self.certain = False  # whether the last answer of the controller had to be
        self.effects: list[Effect] = []
        self.notes: list[str] = []
        self.controller = Controller(image, settings(**values), shared_executor=shared_executor)
        self.ids = itertools.count(1)  # of calls, sessions and topics
        self.session_of: dict[int, int] = {}
        self.skews_ms: dict[int, int] = {}  # how far each broker's wall clock is ahead
        self.own_skew_ms = 0  # how far the controller's is ahead
        self.full: set[int] = set()  # brokers whose disks have no room
        self.silent: set[int] = set()  # brokers that do not say how far their replicas reach
        self.offline: dict[int, set[Key]] = {}  # by broker, the replicas that it cannot use
        self.schemas: dict[int, list[TopicSchema]] = {}  # by broker, those that it misses in the metadata
        self.logs: dict[tuple[int, str, int], tuple[int, int]] = {}  # (broker, topic id, number) to (epoch, end)
        self.handle(ControllerStarted("w" * 32, CLUSTER_ID))

    @property
    def image(self) -> MetadataImage:
        return self.controller.image

    @property
    def wall_ms(self) -> int:
        """The controller's wall clock (UTC)."""
        return EPOCH_MS + self.now_ms + self.own_skew_ms

    def handle(self, event: Event) -> ControllerResult:
        outcome = self.controller.handle(event, self.now_ms)
        self.replayed = self.replayed.apply(outcome.records)
        assert self.replayed == self.controller.image
        for record in outcome.records:
            if isinstance(record, PartitionChangeRecord) and record.unclean:
                state = self.replayed.partition(record.topic_id, record.partition)
                assert state is not None
                self.unclean.add((record.topic_id, record.partition, state.unclean_epoch))
        self.notes += [effect.text for effect in outcome.effects if isinstance(effect, Note | PartitionChanged)]
        self.effects = [effect for effect in outcome.effects if not isinstance(effect, Note | PartitionChanged)]
        self.certain = outcome.certain
        return ControllerResult(outcome.records, tuple(self.effects))

    def tick(self, ms: int = 0, step_ms: int = 50) -> list[Effect]:
        """Let time pass in ticks (at least one); returns all effects."""
        effects: list[Effect] = []
        end = self.now_ms + ms
        while True:
            self.now_ms = min(self.now_ms + step_ms, end)
            effects += self.handle(Tick()).effects
            if self.now_ms >= end:
                return effects

    def pass_time(self, ms: int, alive: Sequence[int] = ()) -> None:
        """Let time pass while these brokers send heartbeats."""
        for _ in range(0, ms, 500):
            for broker in alive:
                self.beat(broker)
            self.tick(500)

    def new_launch(self) -> int:
        (reply,) = self.handle(LaunchRequested(next(self.ids))).effects
        assert isinstance(reply, Reply)
        assert isinstance(reply.result, LaunchNumber)
        return reply.result.launch

    def register(self, request: RegisterBrokerRequest) -> RegisterBrokerResponse | SparkBrokerError:
        session = next(self.ids)
        for effect in self.handle(BrokerRegisters(session, request)).effects:
            if isinstance(effect, CloseSession) and effect.session_id == session:
                return effect.error
            if isinstance(effect, Send) and isinstance(effect.message, RegisterBrokerResponse):
                self.session_of[effect.message.broker_id] = session
                return effect.message
        raise AssertionError("a registration without an answer")

    def beat(
        self, broker: int, *, wants_shutdown: bool = False, ready: bool = True, full: bool | None = None
    ) -> HeartbeatResponse | None:
        """A heartbeat of a broker that has all metadata. `full`: whether its disk is full from now on."""
        if full is not None:
            (self.full.add if full else self.full.discard)(broker)
        beat = HeartbeatRequest(
            broker_epoch=self.image.brokers[broker].epoch,
            metadata_offset=self.image.next_offset,
            sent_ms=self.now_ms,
            ready=ready,
            wants_shutdown=wants_shutdown,
            log_ends=[] if broker in self.silent else self.log_ends(broker),
            wall_ms=self.wall_ms + self.skews_ms.get(broker, 0) - self.own_skew_ms,
            ahead_max_ms=self.skews_ms.get(broker, 0) - self.own_skew_ms,
            full=broker in self.full,
            offline=by_topic(self.offline.get(broker, ())),
            schemas=self.schemas.get(broker, []),
        )
        outcome = self.handle(HeartbeatReceived(self.session_of[broker], beat, self.now_ms, self.wall_ms))
        sent = [e.message for e in outcome.effects if isinstance(e, Send)]
        return next((message for message in sent if isinstance(message, HeartbeatResponse)), None)

    def log_ends(self, broker: int) -> list[LogEnd]:
        """The log ends that a broker with all metadata reports."""
        ends = []
        for topic, number, state in self.image.partitions():
            if is_asked_for(state, broker):
                last_epoch, end = self.logs.get((broker, topic.topic_id, number), (0, 10))
                ends.append(LogEnd(topic.topic_id, number, state.leader_epoch, last_epoch, end))
        return ends

    def start_broker(self, directory: str, **changes: object) -> int:
        """A launch that registers and becomes live; returns its broker id."""
        answer = self.register(registration(self.new_launch(), directory, **changes))
        assert isinstance(answer, RegisterBrokerResponse), answer
        self.beat(answer.broker_id)
        return answer.broker_id

    def start_brokers(self, count: int, **changes: object) -> None:
        for number in range(count):
            self.start_broker(f"directory-{number}", **changes)

    def end_session(self, broker: int) -> list[Effect]:
        return list(self.handle(SessionEnded(self.session_of[broker])).effects)

    def call(self, request: CallRequest) -> Message:
        """The response of a call; raises its error."""
        number = next(self.ids)
        schema = request.schema if isinstance(request, CreateTopicRequest) else b""
        new_topic = NewTopicValues(f"{number:032x}", schema or b"schema")
        outcome = self.handle(CallReceived(number, request, new_topic))
        (result,) = [e.result for e in outcome.effects if isinstance(e, Reply) and e.call_id == number]
        if isinstance(result, SparkBrokerError):
            raise result
        assert isinstance(result, Message)
        return result

    def create_topic(
        self,
        name: str = "t",
        partitions: int = 1,
        factor: int = 3,
        config: Mapping[str, str] | None = None,
        schema: bytes = b"",
    ) -> TopicState:
        self.call(CreateTopicRequest(name, partitions, factor, schema, dict(config or {})))
        return self.topic(name)

    def topic(self, name: str = "t") -> TopicState:
        topic = self.image.topic(name)
        assert topic is not None
        return topic

    def partition(self, name: str = "t", number: int = 0) -> PartitionRegistration:
        return self.topic(name).partitions[number]


def catch_up(cluster: Cluster, name: str = "t") -> int:
    """Every live replica joins its ISR; returns how many partitions changed."""
    changed = 0
    topic = cluster.topic(name)
    for number, state in enumerate(topic.partitions):
        isr = [b for b in state.replicas if b in state.isr or cluster.image.is_live(b)]
        if state.leader != -1 and set(isr) != set(state.isr):
            members = [IsrMember(b, cluster.image.brokers[b].epoch) for b in isr]
            change = AlterIsr(topic.topic_id, number, state.leader_epoch, state.partition_epoch, members)
            cluster.call(AlterPartitionRequest(state.leader, cluster.image.brokers[state.leader].epoch, [change]))
            changed += 1
    return changed


def settle(cluster: Cluster, alive: Sequence[int], *names: str) -> None:
    """Time passes and the topics' replicas (by default those of `t`) catch up until nothing moves any more. A snapshot
    says all of it.
    """
    topics = names or ("t",)
    for _ in range(200):
        cluster.pass_time(500, alive=alive)
        assert image_from_snapshot(to_records(cluster.image), cluster.image.next_offset) == cluster.image
        changed = [catch_up(cluster, name) for name in topics]
        if not any(changed) and not any(p.reassigning for name in topics for p in cluster.topic(name).partitions):
            return
    raise AssertionError("the replicas never come to rest")
