"""A broker's process: the production replicas, storage and rules, with simulated threads and streams around them.

What is a thread in `broker.process` is an event here: the session, heartbeats, maintenance, ISR proposals, fetchers and
the streams that are served. Nothing else differs: the decisions are production code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

from spark_broker.broker.group_coordinator import GroupCoordinator
from spark_broker.broker.lease import Lease
from spark_broker.broker.log_cleaner import LogCleaner
from spark_broker.broker.maintenance import Maintenance
from spark_broker.broker.membership import RECONNECT_MS, Membership, MembershipState, SessionEvents
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.proposal_queue import RETRY_MS, ProposalQueue, Proposals, request_of, settle, still_open
from spark_broker.broker.replica_manager import Outward, ReplicaManager
from spark_broker.broker.reply import Reply as Answered
from spark_broker.broker.requests import BrokerRequests
from spark_broker.broker.spec import STOPPED
from spark_broker.core.effects import ProposeIsr
from spark_broker.errors import (
    InvariantError,
    KafkaStorageError,
    OlderMetadataError,
    RequestTimedOutError,
    SparkBrokerError,
    StorageRefusedError,
    UnknownServerError,
    invariant,
)
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.messages import (
    PROTOCOL_VERSION,
    CallRequest,
    ConfirmHistoryRequest,
    Message,
    MetadataRequest,
    MetadataUpdate,
    RaiseLogStartsRequest,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
)
from spark_broker.storage.directory import LogDirectory
from spark_broker.testing.simulation import trace
from spark_broker.testing.simulation.clock_jumps import SETTLED_MS
from spark_broker.testing.simulation.compaction import STEP_MS
from spark_broker.testing.simulation.controller import CONTROLLER_ADDRESS, CONTROLLER_HOST
from spark_broker.testing.simulation.coordination import Coordination
from spark_broker.testing.simulation.coordinator_driver import Driver
from spark_broker.testing.simulation.filesystem import SimFileSystem
from spark_broker.testing.simulation.machine import SimulatedMachine
from spark_broker.testing.simulation.network import End, NetworkNode, Reply
from spark_broker.testing.simulation.replication import SimFetcher
from spark_broker.testing.simulation.scheduler import Timer
from spark_broker.testing.simulation.serving import serve_appends, serve_fetches, serve_follower

if TYPE_CHECKING:
    from spark_broker.testing.simulation.world import World

LOG_DIRS = Path("/log")
REGISTRATION_TIMEOUT_MS = 1000
"""Shorter than in production: a message that is lost with its stream costs a schedule less of its time."""
MAINTENANCE_MS = 150
WORK_MS = 20.0
"""The longest time between two pieces of work on replicas' files."""
COMPUTE_MS = 20.0
"""How long the target of a large group takes, at most."""


class BrokerProcess(NetworkNode):
    """One launch on one machine, from the claim of its log directory to its end."""

    def __init__(self, world: World, machine: SimulatedMachine, launch: int, fs: SimFileSystem) -> None:
        super().__init__(world.unique_name(f"{machine.host}#{launch}"), machine.host)
        self.world = world
        self.machine = machine
        self.launch = launch
        self.fs = fs
        self.registered = False  # whether the controller has answered its registration
        self.directory = LogDirectory.claim(
            LOG_DIRS, cluster_id="simulated", launch=launch, superseded=lambda _: True, fs=self.fs
        )
        self._incarnation, self._earlier = self.directory.begin_incarnation(self.name)
        self.lease = Lease(machine.clock, SETTLED_MS)
        outward = Outward(
            self._propose,
            self._on_storage_failure,
            self._on_bug,
            self._send_heartbeat,
            self._beat_soon,
            self._work_soon,
        )
        self._works = False  # whether an event is scheduled that does work on files
        self.manager = ReplicaManager(
            world.settings,
            self.directory,
            self.lease,
            outward,
            clock=machine.clock,
            new_fetcher=lambda host, port, settings, _: SimFetcher(self, (host, port), settings),
        )
        events = SessionEvents(self._on_registered, self._on_end, self._on_failure, self._on_bug)
        self.membership = Membership(
            self.manager, self.lease, events, machine.clock, world.read_update, REGISTRATION_TIMEOUT_MS
        )
        self._session: End | None = None
        self._stalled: list[object] | None = None  # messages that the session's thread has not taken yet
        self._heard = Timer(world.scheduler, self, "session timed out", self._session_timed_out)
        self._beat = Timer(world.scheduler, self, "heartbeat", self._send_heartbeat)
        self._proposals = ProposalQueue()
        self._sending_proposals = False
        cluster = world.settings.cluster
        self._groups = Driver(self, "groups")
        groups = GroupCoordinator(
            self.manager, cluster, wake=self._groups.wake, compute=self._compute, clock=machine.clock
        )
        if world.sharing is not None:
            groups.compute_beyond(world.sharing.draw.inline_size_max)
        self._groups.coordinator = groups
        self._maintenance = Maintenance(self.manager, cluster, self._on_bug)
        self._cleaner = LogCleaner(self.manager, cluster, machine.clock)
        self.coordination = Coordination(self, world.transactional) if world.transactional is not None else None
        answer_transactional = self.coordination.requests.answer if self.coordination is not None else _serves_none
        self._requests = BrokerRequests(self.manager, groups, answer_transactional, self._ask_controller, machine.clock)

    def _compute(self, name: str, work: Callable[[], None]) -> None:
        """As `broker.target_thread` does: later."""
        self.world.scheduler.after(COMPUTE_MS * self.world.rng.random(), self, f"target of {name}", work)

    def start(self) -> None:
        """Serve, and open the first session."""
        scheduler = self.world.scheduler
        self.world.network.listeners[self.machine.address] = self
        self.directory.update(port=self.machine.address[1])
        self._maintenance.begin(scheduler.now_us / 1e6)
        scheduler.after(MAINTENANCE_MS * self.world.rng.random(), self, "maintenance", self._maintain)
        if self.world.groups is not None or self.world.sharing is not None:
            self._groups.start()
        if self.coordination is not None:
            self.coordination.start()
        if self.world.cleaning_ms:
            self._clean_later(self.world.cleaning_ms)
        self._connect()

    def _clean_later(self, interval_ms: float) -> None:
        delay_ms = interval_ms * (0.5 + self.world.rng.random())
        self.world.scheduler.after(delay_ms, self, "compaction", lambda: self._clean(interval_ms))

    def _clean(self, interval_ms: float) -> None:
        """Begin a pass, if one is due."""
        partition = self._cleaner.next_pass()
        if partition is None:
            self._clean_later(interval_ms)
        else:
            self.world.trace.count("passes of compaction")
            if partition.topic.name == TRANSACTION_STATE_TOPIC:
                self.world.trace.count("passes over logs of transactions")
            self._clean_on(self._cleaner.steps(partition), interval_ms)

    def _clean_on(self, steps: Generator[None], interval_ms: float) -> None:
        """One step of a pass after the other."""
        try:
            next(steps)
        except StopIteration:
            self._clean_later(interval_ms)
        else:
            delay_ms = STEP_MS * 2 * self.world.rng.random()
            self.world.scheduler.after(delay_ms, self, "compaction", lambda: self._clean_on(steps, interval_ms))

    def _maintain(self) -> None:
        try:
            self._maintenance.run_due(self.world.scheduler.now_us / 1e6)
        except KafkaStorageError as error:
            self._on_failure(error)
        self.world.scheduler.after(MAINTENANCE_MS, self, "maintenance", self._maintain)

    def _work_soon(self) -> None:
        """Work on replicas' files in events of its own: a few at a time, and others happen in between."""
        if not self._works:
            self._works = True
            delay_ms = WORK_MS * self.world.files_rng.random()
            self.world.scheduler.after(delay_ms, self, "work on files", self._work)

    def _work(self) -> None:
        self._works = False
        if self.manager.work(self.world.files_rng.choice([1, 2, 100])):
            self._work_soon()

    def _connect(self) -> None:
        self.membership.connects()
        end = self.world.network.open(self, CONTROLLER_HOST, CONTROLLER_ADDRESS, "session")
        self._session = end
        end.on_message = self._received
        end.on_break = self._session_ended
        self._heard.set(self.membership.patience_ms)
        end.send(self._registration())

    def _registration(self) -> RegisterBrokerRequest:
        meta, machine = self.directory.meta, self.machine
        return RegisterBrokerRequest(
            version=PROTOCOL_VERSION,
            cluster_id=meta.cluster_id,
            launch=self.launch,
            broker_id=meta.broker_id,
            directory_id=meta.directory_id,
            incarnation=self._incarnation,
            start_kind=self.directory.start_kind.value,
            host=machine.address[0],
            port=machine.address[1],
            rack=None,
            machine=machine.host,
            executor_id=machine.host,
            executor_pid=1,
            pid=self.launch,
            pid_start_time=1,
            earlier=self._earlier,
            seen=self.manager.seen,
        )

    def _received(self, message: object) -> None:
        if self._stalled is not None:
            self._stalled.append(message)
            return
        late_ms = self.world.late_ms() if isinstance(message, MetadataUpdate) else 0.0
        if late_ms:
            # The session's thread is slow to apply it (logs to open), while all others go on.
            self._stalled, session = [message], self._session
            self.world.scheduler.after(late_ms, self, "metadata applied late", lambda: self._go_on(session))
        else:
            self._take(message)

    def _go_on(self, session: End | None) -> None:
        if self._session is not session:
            return  # the messages that wait now belong to a later session
        messages, self._stalled = self._stalled or [], None
        for message in messages:
            if self._session is session:
                self._take(message)

    def _take(self, message: object) -> None:
        if isinstance(message, SparkBrokerError):
            self._session_ended(message)
            return
        registers = self.membership.state is MembershipState.REGISTERING
        try:
            beat_now = self.membership.received(message)  # type: ignore[arg-type]
        except SparkBrokerError as error:
            self._session_ended(error)
            return
        self._heard.set(self.membership.patience_ms)
        if beat_now:
            self._send_heartbeat()
        elif registers:
            self._beat.set(self.membership.heartbeat_interval_ms or 0)

    def _send_heartbeat(self) -> None:
        interval_ms = self.membership.heartbeat_interval_ms
        if interval_ms is not None and self._session is not None and not self._session.closed:
            self._session.send(self.membership.heartbeat())
            self._beat.set(interval_ms)

    def _beat_soon(self) -> None:
        """Send a heartbeat in an event of its own: the caller has a partition's lock, for which a thread would wait."""
        self.world.scheduler.after(0, self, "heartbeat", self._send_heartbeat)

    def _session_timed_out(self) -> None:
        self._session_ended(RequestTimedOutError("the controller was not heard of in time"))

    def _session_ended(self, error: SparkBrokerError) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        self._stalled = None
        self._heard.cancel()
        self._beat.cancel()
        self.membership.session_ended(error)
        if not self.membership.over:
            self.world.scheduler.after(RECONNECT_MS, self, "reconnect", self._connect)

    def _on_registered(self, registered: RegisterBrokerResponse) -> None:
        self.directory.registered(registered.broker_id, self._incarnation)
        self.machine.broker_id = registered.broker_id
        self.registered = True
        self.world.older_metadata.registered(self.name)
        self.manager.registered(registered.broker_id, registered.broker_epoch)

    def _propose(self, key: PartitionKey, proposal: ProposeIsr) -> None:
        self._proposals.add(key, proposal)
        self._send_proposals(self.world.faults.proposal_delay_ms(key, proposal))

    def _send_proposals(self, delay_ms: float = 0.0) -> None:
        if self._proposals.is_due and not self._sending_proposals:
            self._sending_proposals = True
            self.world.scheduler.after(delay_ms, self, "propose ISR", self._take_proposals)

    def _take_proposals(self) -> None:
        self._sending_proposals = False
        proposals = self._proposals.take()
        self.world.network.call(
            self,
            CONTROLLER_HOST,
            CONTROLLER_ADDRESS,
            request_of(self.manager, proposals),
            timeout_ms=self.world.settings.cluster.request_timeout_ms,
            on_answer=lambda answer: self._proposals_answered(answer, proposals),
            on_error=lambda _: self._proposals_failed(proposals),
        )

    def _proposals_answered(self, answer: object, proposals: Proposals) -> None:
        settle(self.manager, answer, proposals)
        self._proposals.settled()
        self._send_proposals()

    def _proposals_failed(self, proposals: Proposals) -> None:
        self.world.scheduler.after(RETRY_MS, self, "propose again", lambda: self._propose_again(proposals))

    def _propose_again(self, proposals: Proposals) -> None:
        self._proposals.put_back(still_open(self.manager, proposals))
        self._send_proposals()

    def accept(self, kind: str, end: End) -> None:
        match kind:
            case "replica":
                serve_follower(self, end)
            case "append":
                serve_appends(self, end)
            case "fetch":
                serve_fetches(self, end)
            case _:
                end.close(UnknownServerError(f"unknown stream {kind!r}"))

    def answer(self, request: object, reply: Reply) -> None:
        try:
            self._answer(request, reply)
        except SparkBrokerError as error:
            reply(error)

    def _answer(self, request: object, reply: Reply) -> None:
        if isinstance(request, MetadataRequest) and not request.certain:
            reply(self.world.describe(self._requests.image))
        else:
            self._requests.answer(request, reply)  # type: ignore[arg-type]

    def _ask_controller(self, request: Message, reply: Answered) -> None:
        self.world.network.call(
            self,
            CONTROLLER_HOST,
            CONTROLLER_ADDRESS,
            request,
            timeout_ms=self.world.settings.cluster.request_timeout_ms,
            on_answer=reply,  # type: ignore[arg-type]
            on_error=reply,
        )

    def _on_end(self, reason: str) -> None:
        self.world.scheduler.after(0, self, reason, lambda: self._end(reason))

    def _on_failure(self, error: SparkBrokerError) -> None:
        """The process ends. What was refused for want of room, or by a limit, is no reason to end."""
        invariant(not isinstance(error, StorageRefusedError), "%s ends: %s", self.name, error)
        self.world.note(self.name, trace.TraceKind.PROCESS, f"ends: {error}")
        if isinstance(error, OlderMetadataError):
            self.world.older_metadata.refused()
        self.world.invariants.interrupted(self.machine)
        self.world.scheduler.after(0, self, "failed", lambda: self._end("failed"))

    def _on_storage_failure(self, key: PartitionKey | None, error: SparkBrokerError) -> None:
        """Known bug 27: an I/O error stops the broker; its replicas elsewhere take over."""
        del key
        self.lease.drop()
        self._on_failure(error)

    def _on_bug(self, error: BaseException) -> None:
        raise error

    def _end(self, reason: str) -> None:
        """End as `broker.process` does: in order only when it was asked to stop."""
        self.lease.drop()
        try:
            self.manager.stop(clean=reason == STOPPED)
            if reason == STOPPED:
                self.directory.mark_clean()
            self.directory.release()
        except SparkBrokerError as error:
            # The process ends with this error instead: it leaves no marker.
            self.world.invariants.interrupted(self.machine)
            reason = str(error)
        self.world.note(self.name, trace.TraceKind.PROCESS, f"has ended: {reason}")
        self.world.process_ended(self)


def _serves_none(request: CallRequest, reply: Answered) -> bool:
    """Stands in for the coordinator of a schedule without transactions, which has no transactional requests."""
    del reply
    if isinstance(request, ConfirmHistoryRequest | RaiseLogStartsRequest | MetadataRequest):
        return False
    raise InvariantError(f"a {type(request).__name__} in a schedule without transactions")
