"""A whole simulated cluster: machines, the controller and its launcher, clients, and the rules that watch them."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from pathlib import Path

from spark_broker.broker.membership import read_update
from spark_broker.client.cluster_view import ClusterView
from spark_broker.client.outgoing import Outcome
from spark_broker.client.partition_queue import MAY_BE_STORED
from spark_broker.controller.describe import describe
from spark_broker.controller.effects import LaunchNumber
from spark_broker.controller.image import BrokerState, MetadataImage
from spark_broker.errors import (
    InvariantError,
    KafkaStorageError,
    LogDirectoryLockedError,
    RequestTimedOutError,
    SparkBrokerError,
    StorageRefusedError,
)
from spark_broker.model import NAME_MAX, TRANSACTION_STATE_TOPIC, TopicPartition
from spark_broker.protocol.messages import CreateTopicRequest, MetadataResponse, MetadataUpdate
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.simulation.aside import AsideTopics, is_aside
from spark_broker.testing.simulation.batches import Payloads, values_of
from spark_broker.testing.simulation.bit_flips import BitFlips
from spark_broker.testing.simulation.broker import BrokerProcess
from spark_broker.testing.simulation.compaction import Compactions
from spark_broker.testing.simulation.consumer import SimConsumer
from spark_broker.testing.simulation.controller import CONTROLLER_ADDRESS, CONTROLLER_HOST, SimulatedController
from spark_broker.testing.simulation.draws import Draws
from spark_broker.testing.simulation.faults import Faults
from spark_broker.testing.simulation.filesystem import ProcessKilled
from spark_broker.testing.simulation.group_draw import GroupDraw
from spark_broker.testing.simulation.groups import Groups
from spark_broker.testing.simulation.invariants import Invariants
from spark_broker.testing.simulation.lost_files import LostFiles
from spark_broker.testing.simulation.machine import SimulatedMachine
from spark_broker.testing.simulation.network import Network, NetworkNode
from spark_broker.testing.simulation.older_metadata import OlderMetadata
from spark_broker.testing.simulation.producer import SimProducer
from spark_broker.testing.simulation.scheduler import Scheduler
from spark_broker.testing.simulation.shadow import Key
from spark_broker.testing.simulation.sharing import Sharing
from spark_broker.testing.simulation.store import SimStore
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.tiering import Tiering
from spark_broker.testing.simulation.trace import Trace, TraceKind
from spark_broker.testing.simulation.transactional import Transactional
from spark_broker.testing.simulation.unclean import UncleanElections
from spark_broker.testing.simulation.violation import ViolationError

TOPIC = "t"
RETRY_MS = 200
DESCRIBED_MAX = 16
"""Images whose descriptions are kept."""


class World:
    """One schedule. The same seed gives the same world and the same story."""

    first_topic = TOPIC

    def __init__(
        self, seed: int, *, keep_notes: bool = True, swarm: Swarm | None = None, groups: GroupDraw | None = None
    ) -> None:
        """`swarm` and `groups` replace what the seed draws, for a scene that is set by hand."""
        self.seed = seed
        draw = random.Random(f"{seed}/draw")
        drawn = Draws.of(seed, draw) if swarm is None else Draws.by_hand(swarm, groups)
        self.swarm = drawn.swarm
        self.settings = self.swarm.settings
        self.rng = random.Random(f"{seed}/world")
        self.files_rng = random.Random(f"{seed}/work on files")
        self.client_rng = random.Random(f"{seed}/clients")
        self.trace = Trace(keep_notes=keep_notes)
        self.scheduler = Scheduler(self.trace)
        self.network = Network(
            self.scheduler,
            random.Random(f"{seed}/network"),
            random.Random(f"{seed}/late requests"),
            latency_ms=self.swarm.latency_ms,
            spike_rate=self.swarm.spike_rate,
            loss_rate=self.swarm.loss_rate,
        )
        self.store = SimStore(self.rng, self.swarm.store_fault_rate, lambda: self.scheduler.now_ms)
        skews = [draw.randint(-self.swarm.clock_skew_ms, self.swarm.clock_skew_ms) for _ in range(self.swarm.brokers)]
        self.machines = [SimulatedMachine(number, self.scheduler, skew) for number, skew in enumerate(skews)]
        self.history = HistoryRecorder()
        self.payloads = Payloads(keyed=drawn.compaction is not None)
        self.compactions = Compactions(self, drawn.compaction)
        self.invariants = Invariants(self)
        self.bit_flips = BitFlips(self)
        self.unclean = UncleanElections(self)
        self.operator = NetworkNode("operator", "operator")
        self.controller: SimulatedController | None = None
        self.faults = Faults(self, random.Random(f"{seed}/faults"))
        self.producers = [SimProducer(self, f"p{number}") for number in range(self.swarm.producers)]
        self.consumers = [SimConsumer(self, f"c{number}") for number in range(self.swarm.consumers)]
        self.transactional = Transactional(self, drawn.transactions) if drawn.transactions is not None else None
        self.groups = Groups(self, drawn.groups) if drawn.groups is not None else None
        self.sharing = Sharing(self, drawn.sharing) if drawn.sharing is not None else None
        self.cleaning_ms = 0.0  # from one look for something to compact to the next; 0: nobody looks
        if self.compactions.draw is not None:
            self.cleaning_ms = self.compactions.draw.interval_ms
        elif drawn.transactions is not None:
            self.cleaning_ms = drawn.transactions.clean_ms
        elif drawn.groups is not None:
            self.cleaning_ms = drawn.groups.clean_ms
        elif drawn.sharing is not None:
            self.cleaning_ms = drawn.sharing.clean_ms
        self.tiering = Tiering(self, drawn.tiering) if drawn.tiering is not None else None
        self._controllers: list[SimulatedController] = []
        self._names: Counter[str] = Counter()  # of processes
        self._topics = 0  # requested so far
        self.aside = AsideTopics(self.swarm)
        self.lost_files = LostFiles(self)
        self.older_metadata = OlderMetadata(self)
        self._topic_ids = 0
        self._batches = 0
        self._described: dict[int, tuple[MetadataImage, MetadataResponse]] = {}
        self._read: dict[int, tuple[MetadataUpdate, MetadataImage, MetadataImage]] = {}

    def start(self) -> None:
        """Start everything; the topic follows once the brokers are there."""
        self.start_controller()
        for number, machine in enumerate(self.machines):
            self.launch(machine, after_ms=1.0 + (self.swarm.alone_ms if number else 0.0))
        if self.swarm.alone_ms:
            self.scheduler.after(50, self.operator, "create internal topics", self._create_internal_topics)
        self.scheduler.after(50, self.operator, "create topic", self._create_topic)

    def step(self) -> None:
        """Let one event happen, and check the rules after it. Raises ViolationError."""
        scheduler = self.scheduler
        try:
            if not scheduler.step():
                raise ViolationError("something happens", "nothing is left to happen")
        except ProcessKilled:
            self.process_killed()
            return
        except InvariantError as error:
            raise ViolationError("the code's own invariants", f"{scheduler.acting}: {error}") from error
        except (ViolationError, KeyboardInterrupt):
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
            message = f"{scheduler.acting}: {type(error).__name__}: {error} (in {where})"
            raise ViolationError("no unexpected error", message) from error
        acting = scheduler.acting
        if isinstance(acting, BrokerProcess) and acting.alive:
            if acting.fs.alive:
                self.invariants.check(acting)
            else:  # Its replacement has killed it, and could not claim the directory all the same.
                self.process_killed()

    def note(self, who: str, kind: TraceKind, text: str, partition: str = "") -> None:
        self.trace.note(who, kind, text, partition)

    def start_controller(self) -> None:
        """A (further) controller takes over. One that is still there is deposed, and notices it when it writes."""
        try:
            self.controller = SimulatedController(self, len(self._controllers) + 1)
            self._controllers.append(self.controller)
        except SparkBrokerError as error:
            self.note("operator", TraceKind.METADATA, f"the controller does not start: {error.message}")
            self.controller = None
            self.scheduler.after(RETRY_MS, self.operator, "start controller", self.start_controller)
            return
        self.note(self.controller.name, TraceKind.PROCESS, "starts")
        self.controller.start()

    def controller_ended(self, process: SimulatedController) -> None:
        """The controller failed or was deposed. Another one is started, unless one has taken over."""
        self._kill(process, silently=False)
        if self.controller is process:
            self.scheduler.after(RETRY_MS, self.operator, "start controller", self._restart_controller)

    def _restart_controller(self) -> None:
        if self.controller is None or not self.controller.alive:
            self.trace.count("controller restarts")
            self.start_controller()

    def kill_controller(self, restart_ms: float) -> None:
        """kill -9 of the controller; another one is started later."""
        if self.controller is not None and self.controller.alive:
            self._kill(self.controller, silently=False)
            self.scheduler.after(restart_ms, self.operator, "start controller", self._restart_controller)

    def unique_name(self, name: str) -> str:
        """A name that no process had before. Older metadata gives out launch numbers twice."""
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}/{self._names[name]}"

    def end_controllers(self) -> None:
        """kill -9 of every controller, also of those that were deposed and do not know it."""
        for controller in self._controllers:
            if controller.alive:
                self._kill(controller, silently=False)

    def start_controller_soon(self, after_ms: float) -> None:
        """Start a controller, unless another one is quicker."""
        self.scheduler.after(after_ms, self.operator, "start controller", self._restart_controller)

    def launch(self, machine: SimulatedMachine, after_ms: float) -> None:
        """Start a broker on the machine: a launch number first, then the process."""
        if not machine.launching:
            machine.launching = True
            self.scheduler.after(after_ms, self.operator, "launch", lambda: self._ask_launch(machine))

    def _ask_launch(self, machine: SimulatedMachine) -> None:
        controller = self.controller
        if controller is None or not controller.alive or controller.paused or not machine.powered:
            self.scheduler.after(RETRY_MS, self.operator, "launch", lambda: self._ask_launch(machine))
            return
        asked = [False]

        def answered(result: object) -> None:
            if not asked[0]:
                asked[0] = True
                delay_ms = self.swarm.restart_ms * 0.1
                self.scheduler.after(delay_ms, self.operator, "spawn", lambda: self._spawn(machine, result))

        controller.request_launch(answered)
        self.scheduler.after(
            2000, self.operator, "launch again", lambda: None if asked[0] else self._give_up(asked, machine)
        )

    def _give_up(self, asked: list[bool], machine: SimulatedMachine) -> None:
        asked[0] = True
        self._ask_launch(machine)

    def _spawn(self, machine: SimulatedMachine, result: object) -> None:
        if not isinstance(result, LaunchNumber) or not machine.powered:
            self.scheduler.after(RETRY_MS, self.operator, "launch", lambda: self._ask_launch(machine))
            return
        machine.launching = False
        earlier = machine.process
        fs = machine.fs.another_process()
        try:
            process = BrokerProcess(self, machine, result.launch, fs)
        except (KafkaStorageError, StorageRefusedError, LogDirectoryLockedError) as error:
            self.note(
                machine.host, TraceKind.PROCESS, f"launch {result.launch} cannot claim its directory: {error.message}"
            )
            self.trace.count("failed claims")
            fs.crash_process()
            self.launch(machine, RETRY_MS)
            return
        if earlier is not None and earlier.alive:
            self.note(earlier.name, TraceKind.PROCESS, "is killed by its replacement, which needs the log directory")
            self._kill(earlier, silently=False)
        machine.process = process
        self.trace.count(f"{process.directory.start_kind.value} starts")
        self.note(process.name, TraceKind.PROCESS, f"starts ({process.directory.start_kind.value})")
        process.start()

    def kill(self, machine: SimulatedMachine, *, restart_ms: float | None = None) -> None:
        """kill -9 of the broker's process; Spark notices later and starts another."""
        process = machine.process
        if process is not None and process.alive:
            process.fs.crash_process()
            self._kill(process, silently=False)
            self._replace(process, restart_ms)

    def lose_machine(self, machine: SimulatedMachine, down_ms: float) -> None:
        """Power fails: every process is gone, unsynced data is lost by chance, and the peers are not notified."""
        process = machine.process
        machine.powered = False
        machine.incomplete = True
        machine.launching = False
        self.network.down.add(machine.host)
        machine.fs = machine.fs.crash_machine(self.rng)
        if process is not None and process.alive:
            self._kill(process, silently=True)
        self.scheduler.after(down_ms, self.operator, "power on", lambda: self._power_on(machine, process))

    def _power_on(self, machine: SimulatedMachine, process: BrokerProcess | None) -> None:
        machine.powered = True
        machine.clock.reboot()
        self.network.down.discard(machine.host)
        self.note(machine.host, TraceKind.PROCESS, "has power again")
        if process is not None:
            self._tell_spark_loss(process)
        self.launch(machine, self.swarm.restart_ms)

    def process_ended(self, process: BrokerProcess) -> None:
        """The process ended by itself."""
        if process.fs.alive:
            process.fs.crash_process()
        self._kill(process, silently=False)
        self._replace(process, None)

    def process_killed(self) -> None:
        """A fault of the file system killed the process in the middle of an operation."""
        for machine in self.machines:
            process = machine.process
            if process is not None and process.alive and not process.fs.alive:
                self.note(process.name, TraceKind.FAULT, "dies in the middle of a write")
                self.invariants.interrupted(machine)
                self.invariants.died(process)
                self._kill(process, silently=False)
                self._replace(process, None)

    def _replace(self, process: BrokerProcess, restart_ms: float | None) -> None:
        self.scheduler.after(
            self.swarm.signal_ms * self.rng.random(),
            self.operator,
            "loss noticed",
            lambda: self._tell_spark_loss(process),
        )
        delay_ms = self.swarm.restart_ms * (0.3 + self.rng.random()) if restart_ms is None else restart_ms
        self.launch(process.machine, delay_ms)

    def _tell_spark_loss(self, process: BrokerProcess) -> None:
        controller = self.controller
        if controller is not None and controller.alive and not controller.paused:
            controller.spark_lost(process.launch)

    def end_client(self, client: NetworkNode) -> None:
        """A client's process is gone."""
        self._kill(client, silently=False)

    def _kill(self, process: NetworkNode, *, silently: bool) -> None:
        if isinstance(process, BrokerProcess):
            self.invariants.forget_dropped(process)
        process.alive = False
        process.backlog.clear()
        self.network.process_died(process, silently=silently)

    def _create_topic(self) -> None:
        if len(self.invariants.image.live_brokers()) < len(self.machines):
            self.scheduler.after(30, self.operator, "create topic", self._create_topic)
            return
        self.call_controller(self.new_topic_request(), "create topic", again=self._create_topic)
        self._create_internal_topics()

    def _create_internal_topics(self) -> None:
        for coordinated in (self.transactional, self.groups, self.sharing):
            if coordinated is not None:
                coordinated.create_topic()

    @property
    def is_up(self) -> bool:
        """Whether there is something for clients to use."""
        image = self.invariants.image
        if self.groups is not None and not self.groups.is_up:
            return False
        if self.sharing is not None and not self.sharing.is_up:
            return False
        return bool(image.topics) and (self.transactional is None or image.topic(TRANSACTION_STATE_TOPIC) is not None)

    def new_topic_request(self) -> CreateTopicRequest:
        self._topics += 1
        swarm, name = self.swarm, TOPIC if self._topics == 1 else f"{TOPIC}{self._topics}"
        if self._topics % 2 == 0:
            name = name.ljust(NAME_MAX, "-")  # Names of files and directories are made from it.
        return CreateTopicRequest(
            name=name,
            partitions=swarm.partitions,
            replication_factor=swarm.replication_factor,
            schema=b"",
            config={
                "min.insync.replicas": str(min(swarm.min_insync_replicas, swarm.replication_factor)),
                **self.unclean.topic_config,
                **(self.compactions.draw.topic_config if self.compactions.draw is not None else {}),
                **(self.tiering.topic_config(name) if self.tiering is not None else {}),
            },
        )

    def new_topic_id(self, *, internal: bool = False) -> str:
        self._topic_ids += not internal
        return f"{1 << 64:032x}" if internal else f"{self._topic_ids:032x}"

    def call_controller(self, request: object, label: str, again: object = None) -> None:
        """An operator's call; `again` is called when it failed."""

        def failed(error: object) -> None:
            self.note("operator", TraceKind.CLIENT, f"{label}: {error}")
            if callable(again):
                self.scheduler.after(RETRY_MS, self.operator, label, again)

        self.network.call(
            self.operator,
            CONTROLLER_HOST,
            CONTROLLER_ADDRESS,
            request,
            timeout_ms=2000,
            on_answer=lambda _: None,
            on_error=failed,
        )

    def read_update(self, known: MetadataImage, update: MetadataUpdate) -> MetadataImage:
        """Read an update as production does, once for all brokers that have the same image."""
        cached = self._read.get(id(update))
        if cached is not None and (update.snapshot or cached[1] is known):
            return cached[2]
        image = read_update(known, update)
        self._read[id(update)] = (update, known, image)
        return image

    def describe(self, image: MetadataImage) -> MetadataResponse:
        """What a broker with this image answers to clients, computed once for all that ask."""
        cached = self._described.get(id(image))
        if cached is None:
            if len(self._described) == DESCRIBED_MAX:
                self._described.clear()
            cached = self._described[id(image)] = (image, describe(image))
        return cached[1]

    def registered(self, broker: BrokerState) -> None:
        """A registration is committed: a machine that had lost data is out of every ISR now."""
        for machine in self.machines:
            if machine.host == broker.host:
                machine.broker_id = broker.id
                if broker.start_kind == "machine_crash" or machine.restored:
                    machine.incomplete = machine.restored = False

    def machine_of(self, broker_id: int) -> SimulatedMachine | None:
        return next((machine for machine in self.machines if machine.broker_id == broker_id), None)

    @property
    def keeps_values(self) -> bool:
        """Whether records may be deleted, compacted, or moved into tables."""
        removes = self.cleaning_ms > 0 or self.tiering is not None
        return "delete records" in self.swarm.faults or removes

    @property
    def producers_expire(self) -> bool:
        """Whether brokers forget idle producers."""
        return "expire producers" in self.swarm.faults

    def deleted_before(self, key: Key) -> int:
        """Records of the partition before this offset are deleted, as the metadata log has it."""
        topic = self.invariants.image.topics.get(key[0])
        return 0 if topic is None else topic.log_start(key[1])

    def known_partitions(self, view: ClusterView) -> list[tuple[str, TopicPartition]]:
        """What a client with this metadata may append to and read from."""
        return [
            (topic.topic_id, TopicPartition(topic.name, state.partition))
            for topic in view.topics.values()
            if not topic.internal and not is_aside(topic.name)
            for state in topic.partitions
        ]

    def next_batch(self) -> int:
        self._batches += 1
        return self._batches

    def fetch_pause_ms(self, process: BrokerProcess) -> float:
        """How long a slow follower waits before it fetches again."""
        return self.faults.fetch_pause_ms(process.machine)

    def late_ms(self, *, overtaken: bool = False) -> float:
        """How long a thread is kept from carrying out an answer that it has received; mostly 0.

        `overtaken`: half of these answers are late where a schedule has late answers, because these matter most.
        """
        rate = 0.0 if self.faults.over else self.swarm.late_rate
        rate = 0.5 if rate and overtaken else rate
        return 600 * self.rng.random() if rate and self.rng.random() < rate else 0.0

    def invoked(self, writer: str, tp: TopicPartition, number: int, rows: int, transaction: int | None = None) -> int:
        """A client begins to append this batch; returns its operation."""
        payloads = self.payloads
        keys, tombstones = payloads.keys(number, rows), payloads.tombstones(number, rows)
        return self.history.invoked(writer, tp, values_of(number, rows), transaction, keys=keys, tombstones=tombstones)

    def append_outcome(self, operation: int, outcome: Outcome) -> None:
        """An idempotent append has its outcome. Without an unclean election only a time-out may fail it, or that of one
        before it, where it may be stored itself.
        """
        if not isinstance(outcome, SparkBrokerError):
            if outcome.base_offset is None:
                raise ViolationError("a retry gets its own offset", f"append {operation} was answered without one")
            self.append_acknowledged(operation, outcome.base_offset)
            return
        self.history.failed(operation, outcome)
        self.note("clients", TraceKind.CLIENT, f"append {operation} failed: {outcome}")
        if isinstance(outcome, RequestTimedOutError) or MAY_BE_STORED in outcome.message:
            return
        if not self.unclean.released:
            raise ViolationError("appends fail only in time", f"append {operation} failed: {outcome}")

    def append_acknowledged(self, operation: int, base_offset: int) -> None:
        self.history.acknowledged(operation, base_offset)

    def check_out_of_range(self, key: Key, position: int, message: str) -> None:
        """A consumer was answered "out of range": only deleted records or an unclean election are a reason for that."""
        if key in self.unclean.released:
            return
        start = max((s.start_offset for (_, k), s in self.invariants.shadows.items() if k == key), default=0)
        if max(start, self.deleted_before(key)) <= position:
            raise ViolationError("readers are never out of range", f"at {position}: {message}", str(key))
