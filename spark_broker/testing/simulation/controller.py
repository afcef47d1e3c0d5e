"""The controller's process: the production state machines and metadata log, with sessions over the simulated network.

A crash may come between a decision and its file in the metadata log, or between that file and the decision's effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spark_broker.controller.controller import Controller
from spark_broker.controller.decisions import Decisions
from spark_broker.controller.effects import (
    CloseSession,
    Effect,
    Note,
    ProbePort,
    Reply,
    Send,
    Subscribe,
)
from spark_broker.controller.events import (
    BrokerRegisters,
    CallReceived,
    ControllerStarted,
    Event,
    HeartbeatReceived,
    LaunchRequested,
    PortProbed,
    SessionEnded,
    SparkLost,
    StopRequested,
    Tick,
)
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.partition_line import PartitionChanged
from spark_broker.controller.records import MetadataRecord
from spark_broker.controller.topics import NewTopicValues
from spark_broker.driver.controller_loop import LOOK_S
from spark_broker.driver.metadata_log import MetadataLog
from spark_broker.driver.metadata_publisher import MetadataPublisher
from spark_broker.driver.topic_schema import stored_schema
from spark_broker.errors import MetadataStoreError, SparkBrokerError, StaleControllerEpochError
from spark_broker.protocol.messages import (
    CreateTopicRequest,
    EnsureOffsetsTopicRequest,
    EnsureTransactionsTopicRequest,
    HeartbeatRequest,
    RegisterBrokerRequest,
)
from spark_broker.testing.simulation import trace
from spark_broker.testing.simulation.machine import EPOCH_MS
from spark_broker.testing.simulation.network import Address, End, NetworkNode
from spark_broker.testing.simulation.network import Reply as Answer

if TYPE_CHECKING:
    from spark_broker.testing.simulation.world import World

CONTROLLER_HOST = "controller"
CONTROLLER_ADDRESS: Address = (CONTROLLER_HOST, 9090)
TICK_MS = 180


class SimulatedController(NetworkNode):
    """One run of the controller."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(f"controller#{number}", CONTROLLER_HOST)
        self._world = world
        self._retry_ms = 0.0
        self._next_look_ms = world.scheduler.now_ms + LOOK_S * 1000
        self.log = MetadataLog(
            world.store,
            records_between_snapshots=world.settings.cluster.metadata_log_max_records_between_snapshots,
            writer=f"{number:032x}",
            wait=world.store.wait,
        )
        self._decisions = Decisions(Controller(self.log.image, world.settings))
        self._next_id = 0
        self._ends: dict[int, End] = {}
        self._publisher = MetadataPublisher(lambda: self.log.image, self._send)
        self._replies: dict[int, Answer] = {}

    @property
    def image(self) -> MetadataImage:
        return self.log.image

    def start(self) -> None:
        """Take the metadata log over and serve."""
        self._world.network.listeners[CONTROLLER_ADDRESS] = self
        accepts = self._world.older_metadata.accepted()
        self._submit(ControllerStarted(self.log.writer, "simulated", accept_older_metadata=accepts))
        self._tick()

    def _tick(self) -> None:
        self._submit(Tick())
        self._look_for_another()
        if not self.alive:
            return
        self._world.scheduler.after(TICK_MS, self, "tick", self._tick)

    def _look_for_another(self) -> None:
        now_ms = self._world.scheduler.now_ms
        if self._decisions.is_writing or now_ms < self._next_look_ms:
            return
        self._next_look_ms = now_ms + LOOK_S * 1000
        try:
            self.log.check_current()
        except StaleControllerEpochError as error:
            self._world.note(self.name, trace.TraceKind.METADATA, f"is deposed: {error.message}")
            self._world.controller_ended(self)

    def _submit(self, event: Event) -> None:
        if not self._decisions.is_writing:
            self._step([event])
            return
        answer = self._decisions.let_wait(event, self._world.scheduler.now_ms)
        if answer is not None:
            self._world.trace.count("heartbeats answered while the store failed")
            self._carry_one(answer)

    def _step(self, events: Sequence[Event]) -> None:
        records = self._decisions.decide(events, self.log.image, self._world.scheduler.now_ms)
        if not self._decisions.is_writing:
            self._carry()
            return
        written = self._world.rng.random() < 0.5  # the file may be there long before its effects
        first_offset = self._append(records) if written else -1
        delay_ms = self._world.swarm.store_latency_ms * (0.5 + self._world.rng.random()) + self._retry_ms
        self._retry_ms = 0.0
        self._world.scheduler.after(delay_ms, self, "metadata written", lambda: self._committed(first_offset, records))

    def _append(self, records: Sequence[MetadataRecord]) -> int:
        """Write the file, or check that the log is still ours. A log that fails ends the controller: what became of its
        decisions is unknown."""
        self._world.store.waited_ms, before = 0.0, self.log.image
        try:
            offset = self.log.append(records) if records else self._checked()
        except (MetadataStoreError, StaleControllerEpochError) as error:
            self._world.note(self.name, trace.TraceKind.METADATA, f"cannot write its log: {error.message}")
            self._world.controller_ended(self)
            return -1
        finally:
            self._retry_ms, self._world.store.waited_ms = self._world.store.waited_ms, 0.0
        if records and not self._world.older_metadata.on_trial:
            self._world.invariants.metadata_committed(before, records, self.log.image)
        return offset

    def _checked(self) -> int:
        self.log.ensure_current()
        return self.log.image.next_offset

    def _committed(self, first_offset: int, records: Sequence[MetadataRecord]) -> None:
        if first_offset < 0:
            first_offset = self._append(records)
        if not self.alive:
            return
        if self._retry_ms:
            again_ms, self._retry_ms = self._retry_ms, 0.0
            written = lambda: self._committed(first_offset, records)  # noqa: E731
            self._world.scheduler.after(again_ms, self, "metadata written", written)
            return
        if records:
            self._publisher.publish(first_offset, records)
        self._carry()
        if len(self._decisions) and not self._decisions.is_writing:
            self._step(self._decisions.next_events())

    def _carry(self) -> None:
        for effect in self._decisions.committed():
            self._carry_one(effect)

    def _carry_one(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect.session_id, effect.message)
            case Subscribe():
                self._publisher.subscribe(effect.session_id)
            case CloseSession():
                self._close_session(effect.session_id, effect.error)
            case ProbePort():
                self._probe(effect)
            case Reply():
                reply = self._replies.pop(effect.call_id, None)
                if isinstance(effect.result, Exception) and not isinstance(effect.result, SparkBrokerError):
                    raise effect.result  # in production, such a bug ends the call alone
                if reply is not None:
                    reply(effect.result)
            case Note() | PartitionChanged() if self._world.trace.wants_notes:
                self._world.note(self.name, trace.TraceKind.METADATA, effect.text)

    def _send(self, session_id: int, message: object) -> bool:
        end = self._ends.get(session_id)
        if end is None or end.closed:
            return False
        end.send(message)
        return True

    def _close_session(self, session_id: int, error: SparkBrokerError) -> None:
        self._publisher.unsubscribe(session_id)
        end = self._ends.get(session_id)
        if end is not None and not end.closed:
            end.close(error)
            self._session_over(session_id)

    def _probe(self, effect: ProbePort) -> None:
        """Submit whether the port refuses. An unreachable machine's port does not: it may have a live broker."""
        network = self._world.network
        reachable = effect.host not in network.down and not network.is_blocked(self.host, effect.host)
        listener = network.listeners.get((effect.host, effect.port))
        refused = reachable and (listener is None or not listener.alive)
        probed = PortProbed(effect.broker_id, effect.session_id, refused)
        delay_ms = network.delay_us(self.host, effect.host) * 2 / 1000 if reachable else 200.0
        self._world.scheduler.after(delay_ms, self, "port probed", lambda: self._submit(probed))

    def accept(self, kind: str, end: End) -> None:
        del kind
        self._next_id += 1
        session_id = self._next_id
        end.on_message = lambda message: self._session_message(session_id, message)
        end.on_break = lambda _: self._session_over(session_id)
        self._ends[session_id] = end

    def _session_message(self, session_id: int, message: object) -> None:
        if isinstance(message, RegisterBrokerRequest):
            self._submit(BrokerRegisters(session_id, message, self._wall_ms))
        elif isinstance(message, HeartbeatRequest):
            self._submit(HeartbeatReceived(session_id, message, self._world.scheduler.now_ms, self._wall_ms))

    @property
    def _wall_ms(self) -> int:
        """The driver's clock is right; brokers' clocks differ from it as the schedule draws."""
        return EPOCH_MS + self._world.scheduler.now_us // 1000

    def _session_over(self, session_id: int) -> None:
        if self._ends.pop(session_id, None) is not None:
            self._submit(SessionEnded(session_id))

    def answer(self, request: object, reply: Answer) -> None:
        new_topic = None
        if isinstance(request, CreateTopicRequest):
            new_topic = NewTopicValues(self._world.new_topic_id(), self._world.payloads.schema_bytes)
        elif isinstance(request, EnsureTransactionsTopicRequest | EnsureOffsetsTopicRequest):
            new_topic = NewTopicValues(self._world.new_topic_id(internal=True), stored_schema(b"", {}))
        self._ask(lambda call_id: CallReceived(call_id, request, new_topic), reply)  # type: ignore[arg-type]

    def request_launch(self, reply: Answer) -> None:
        """The next launch number, committed."""
        self._ask(LaunchRequested, reply)

    def stop_broker(self, launch: int) -> None:
        """Controlled shutdown of one launch."""
        self._ask(lambda call_id: StopRequested(call_id, launch), lambda _: None)

    def spark_lost(self, launch: int) -> None:
        """Spark reports the loss of this launch."""
        self._submit(SparkLost(launch))

    def _ask(self, make_event: Callable[[int], Event], reply: Answer) -> None:
        self._next_id += 1
        self._replies[self._next_id] = reply
        self._submit(make_event(self._next_id))
