"""The controller as one state machine: events and the time go in; records, and the effects after them, come out.

The shell hands in one event after the other, appends the records of each outcome to the metadata log, and only then
carries out its effects. `image` is ahead of the log by the outcomes that are not written yet. It is never shown to
brokers or clients before they are.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spark_broker.config import ClusterSettings
from spark_broker.controller import damage, fencing, lineage, offline, partition_notes, room, shutdown, topics, unclean
from spark_broker.controller.absence import Absences
from spark_broker.controller.calls import CallContext, answer, check_caller, reason
from spark_broker.controller.clocks import ClockBounds, Clocks
from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.effects import (
    CloseSession,
    ControllerResult,
    Effect,
    FenceBrokers,
    LaunchNumber,
    Note,
    Reply,
    Send,
    SessionEffect,
    StoppedBrokers,
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
from spark_broker.controller.housekeeping import Housekeeping
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.log_ends import Key, LogEnds
from spark_broker.controller.records import (
    ClusterRecord,
    ControllerEpochRecord,
    LaunchRecord,
    MetadataRecord,
    PartitionChangeRecord,
)
from spark_broker.controller.registration import Registration, RegistrationRules, older_copy, register
from spark_broker.controller.sessions import HAS_STREAM, STOPPED_IN_ORDER, Session, Sessions, SessionState, SessionTimes
from spark_broker.controller.topic_notes import topic_notes
from spark_broker.controller.topic_schema import adopted
from spark_broker.core.machine import Machine
from spark_broker.core.machine import event as event_of_machine
from spark_broker.errors import (
    BrokerIdNotRegisteredError,
    InvariantError,
    NoMemoryError,
    OlderMetadataError,
    SparkBrokerError,
    StaleLaunchError,
    UnknownServerError,
    invariant,
)
from spark_broker.model import NO_LEADER
from spark_broker.protocol.messages import (
    AnnounceTieringRequest,
    EmptyResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    StopBroker,
)

MAX_LOST_LAUNCHES = 10_000


def _as_typed(bug: Exception) -> SparkBrokerError:
    """The error for a peer, with the place of the bug: the note of it is all that the log has."""
    if isinstance(bug, MemoryError):
        return NoMemoryError("the controller has no memory for this")
    place = traceback.extract_tb(bug.__traceback__)[-1]
    return UnknownServerError(f"{type(bug).__name__}: {bug} ({place.filename}:{place.lineno})")


@dataclass(frozen=True, slots=True)
class _PendingStop:
    call_id: int
    broker_ids: tuple[int, ...]


class ControllerStanding(NamedTuple):
    """Where the controller stands between two events."""

    controller_epoch: int
    next_offset: int

    def __str__(self) -> str:
        return f"epoch {self.controller_epoch}, metadata up to {self.next_offset}"


class Controller(Machine[ControllerStanding]):
    """The cluster's decisions. `shared_executor`: brokers may share one executor (plain `local[N]`).

    Invariants: a session has the registered epoch of its broker; a broker that is not fenced has a session; the
    controller epoch and the metadata offset never fall; an elected leader is not fenced.
    """

    def __init__(self, image: MetadataImage, settings: ClusterSettings, *, shared_executor: bool = False) -> None:
        super().__init__("the controller")
        cluster = settings.cluster
        self.image = image
        self._let_in = False  # whether a broker has registered with this controller
        self._fits = False  # whether one of these has seen metadata of this cluster before
        self._refused_older = False  # whether one was refused that has seen more than the metadata
        self._began = False  # before ControllerStarted, the image's live brokers are an earlier controller's
        self.sessions = Sessions(SessionTimes(cluster.broker_session_timeout_ms, cluster.controller_reconnect_grace_ms))
        self._settings = settings
        self._shared_executor = shared_executor
        self._clocks = Clocks(
            ClockBounds(cluster.controller_clock_skew_warn_ms, cluster.controller_clock_skew_fence_ms)
        )
        self._absences = Absences()
        self._log_ends = LogEnds()
        self._disks = ALL_WELL
        self._next_tiering_at_ms: Mapping[str, int] = {}  # by topic id, as the cluster's schedule says
        self._housekeeping = Housekeeping(cluster, self._absences, set(), self._log_ends)
        self._lost_launches: dict[int, None] = {}  # in order of loss; beyond the bound the oldest is dropped
        self._shutdown_offsets: dict[int, int] = {}  # by broker id: end offset of the decision that began its shutdown
        # (broker epoch, topic id, partition, number of the damage)
        self._damage_known: dict[int, frozenset[tuple[int, str, int, int]]] = {}
        self._pending_stops: list[_PendingStop] = []
        self._cluster_stops = False
        self._elections_wait = False  # for brokers that are being started: see `fencing.OTHERS_COME_MS`
        self._records: list[MetadataRecord] = []
        self._effects: list[Effect] = []
        self._certain = False  # whether the answer to the call in hand must be

    @property
    def disks(self) -> Disks:
        """What the brokers that have a session have said of their disks."""
        return self._disks

    def check(self) -> ControllerStanding:
        brokers = self.image.brokers
        for session in self.sessions.all():
            broker = brokers.get(session.broker_id)
            current = broker is not None and broker.epoch == session.broker_epoch
            invariant(current, "session %d is of no registered epoch: %s", session.session_id, session)
        if self._began:
            connected = self.sessions.connected
            for broker in brokers.values():
                fenced_or_connected = broker.fenced or broker.id in connected
                invariant(fenced_or_connected, "broker %d is live and has no session", broker.id)
        return ControllerStanding(self.image.controller_epoch, self.image.next_offset)

    def check_step(self, name: str, before: ControllerStanding, after: ControllerStanding) -> bool:
        """Check what never falls, and each election. The controller has moved if it has decided something."""
        risen = after.controller_epoch >= before.controller_epoch and after.next_offset >= before.next_offset
        invariant(risen, "%s takes the controller back from %s to %s", name, before, after)
        counted = after.next_offset - before.next_offset >= len(self._records)
        invariant(counted, "%d records lead from %s to %s", len(self._records), before, after)
        for record in self._records:
            if isinstance(record, PartitionChangeRecord) and record.leader not in (None, NO_LEADER):
                self._check_elected(record)
        return before != after

    def _check_elected(self, record: PartitionChangeRecord) -> None:
        state = self.image.partition(record.topic_id, record.partition)
        if state is not None and state.leader == record.leader:  # Else a later record of the outcome changed it.
            leads = not self.image.brokers[state.leader].fenced
            invariant(leads, "%s-%d: a fenced broker is elected: %s", record.topic_id, record.partition, state)

    def describe_state(self) -> str:
        live = sorted(broker.id for broker in self.image.brokers.values() if broker.live)
        sessions = [f"{s.session_id} of broker {s.broker_id}: {s.state.name}" for s in self.sessions.all()]
        partitions = sum(len(topic.partitions) for topic in self.image.topics.values())
        return f"epoch {self.image.controller_epoch}, live brokers {live}, {sessions}, {partitions} partitions"

    def remember(self, name: str, arguments: Sequence[object], outcome: object, *, moved: bool = False) -> None:
        """Ticks are frequent: one is remembered only if something followed from it."""
        if moved or not isinstance(arguments[0], Tick):
            super().remember(name, arguments, outcome, moved=moved)

    def _kept(self, value: object) -> object:
        """Only an event's kind and the session, launch or call that it concerns: messages may be large."""
        match value:
            case CallReceived():
                return f"call {type(value.request).__name__}"
            case BrokerRegisters():
                return f"session {value.session_id} registers launch {value.request.launch}"
            case HeartbeatReceived():
                return f"heartbeat of session {value.session_id}, metadata {value.heartbeat.metadata_offset}"
            case SessionEnded() | PortProbed() | SparkLost() | StopRequested():
                return value
            case _:
                return super()._kept(value)

    @event_of_machine
    def handle(self, event: Event, now_ms: int) -> ControllerResult:
        """Decide on one event. `now_ms` never falls from one event to the next."""
        self._records, self._effects, self._certain = [], [], False
        disks = self._disks
        self._dispatch(event, now_ms)
        self._began = self._began or isinstance(event, ControllerStarted)
        if self._elections_wait and (self._records or self._disks != disks):
            # A preferred replica that is waited for may have left the ISR, or its disk may have failed it.
            records = fencing.elect_leaders(self.image, others_come=True, disks=self._disks)
            self._apply(records, "nobody is left who would rather lead")
        self._answer_stops()
        return ControllerResult(tuple(self._records), tuple(self._effects), self._certain)

    def _dispatch(self, event: Event, now_ms: int) -> None:
        match event:
            case HeartbeatReceived():
                self._heartbeat(event, now_ms)
            case Tick():
                self._tick(now_ms)
            case CallReceived():
                self._call(event, now_ms)
            case BrokerRegisters():
                self._register(event, now_ms)
            case SessionEnded():
                self._session_ended(event.session_id, now_ms)
            case PortProbed():
                probed = self.sessions.probed(event.broker_id, event.session_id, refused=event.refused, now_ms=now_ms)
                self._follow(probed, now_ms)
            case SparkLost():
                self._spark_lost(event.launch, now_ms)
            case LaunchRequested():
                self._apply([LaunchRecord(self.image.last_launch + 1)], "a launch")
                self._effects.append(Reply(event.call_id, LaunchNumber(self.image.last_launch)))
            case StopRequested():
                self._stop(event)
            case ControllerStarted():
                self._start(event, now_ms)

    def _apply(self, records: Sequence[MetadataRecord], why: str, *, leaderless_expected: bool = False) -> None:
        """`why`: the reason that the log gives for the partitions that change."""
        if records:
            before, self.image = self.image, self.image.apply(records)
            self._records += records
            self._effects += topic_notes(before, self.image, records)
            self._effects += partition_notes.notes(
                before, self.image, records, why, leaderless_expected=leaderless_expected or self._cluster_stops
            )

    def _note(self, text: str, *, expected: bool = True, **fields: object) -> None:
        self._effects.append(Note(text, expected=expected, fields=fields))

    def _start(self, event: ControllerStarted, now_ms: int) -> None:
        """Begin a higher epoch: messages of an older controller are refused from now on."""
        why = "a controller begins"
        if not self.image.cluster_id:
            self._apply([ClusterRecord(event.cluster_id)], why)
        last = self.image
        epoch = last.controller_epoch + 1
        self._apply([ControllerEpochRecord(epoch, event.writer, event.host, event.pid, event.started_ms)], why)
        was = f" (epoch {epoch - 1} was pid {last.controller_pid} on host {last.controller_host})"
        begins = f"controller epoch {epoch} begins: pid {event.pid} on host {event.host}"
        self._note(begins + was if last.controller_host else begins, controller_epoch=epoch)
        why = f"every broker registers anew in controller epoch {epoch}"
        self._apply(fencing.fence_all(self.image), why, leaderless_expected=True)
        if event.accept_older_metadata:
            self._note("metadata that may be older than what brokers have seen is accepted", expected=False)
            self._apply(lineage.accept(self.image), "older metadata is accepted", leaderless_expected=True)
        self._apply(topics.complete_internal(self.image, self._settings), "internal topics have what they need")
        self._absences.all_left(self.image, now_ms)

    def _tick(self, now_ms: int) -> None:
        self._follow(self.sessions.tick(now_ms), now_ms)
        if self._elections_wait and not self._absences.just_begun(fencing.OTHERS_COME_MS, now_ms):
            self._elections_wait = False
            self._apply(fencing.elect_leaders(self.image, disks=self._disks), "who would rather lead is not back")
        if not self._cluster_stops:
            for decision in self._housekeeping.tick(self.image, self._disks, now_ms):
                self._apply(decision.records, decision.why)

    def _follow(self, effects: Iterable[SessionEffect], now_ms: int) -> None:
        """Turn fences into decisions and pass the rest on."""
        for effect in effects:
            if isinstance(effect, FenceBrokers):
                self._fence(effect, now_ms)
            else:
                self._effects.append(effect)

    def _session_ended(self, session_id: int, now_ms: int) -> None:
        session = self.sessions.of_stream(session_id)
        if session is not None and session.state in HAS_STREAM:
            self._note_session(session, "ends: its stream ended")
        self._follow(self.sessions.ended(session_id, now_ms), now_ms)

    def _note_session(self, session: Session, what: str) -> None:
        self._note(
            f"session {session.session_id} of broker {session.broker_id} {what}",
            session_id=session.session_id,
            broker_id=session.broker_id,
            broker_epoch=session.broker_epoch,
            launch=session.launch,
        )

    def _fence(self, fence: FenceBrokers, now_ms: int) -> None:
        brokers = [self.image.brokers[broker_id] for broker_id in fence.broker_ids if broker_id in self.image.brokers]
        names = ", ".join(f"broker {broker.id} of launch {broker.launch}" for broker in brokers)
        expected, reason = fence.reason == STOPPED_IN_ORDER, fence.reason
        self._note(f"fenced {names}: {reason}", expected=expected, broker_ids=[b.id for b in brokers], why=reason)
        why = f"{names} {'are' if len(brokers) > 1 else 'is'} fenced"
        self._apply(fencing.fence(self.image, fence.broker_ids, shrink=not self._cluster_stops, disks=self._disks), why)
        for broker_id in fence.broker_ids:
            if self.sessions.of_broker(broker_id) is None:
                self._clocks.forget(broker_id)
                self._disks = self._disks.without(broker_id)
            self._absences.left(broker_id, now_ms)
            self._shutdown_offsets.pop(broker_id, None)
        self._absences.note_live(self.image, now_ms)

    def _spark_lost(self, launch: int, now_ms: int) -> None:
        self._lost_launches[launch] = None
        while len(self._lost_launches) > MAX_LOST_LAUNCHES:
            del self._lost_launches[next(iter(self._lost_launches))]
        self._follow(self.sessions.lost(launch), now_ms)

    def _register(self, event: BrokerRegisters, now_ms: int) -> None:
        try:
            registration = self._registration(event.request, now_ms)
        except InvariantError:
            raise
        except Exception as found:  # noqa: BLE001 (nothing has been decided yet; the note says where it came from)
            error = found if isinstance(found, SparkBrokerError) else _as_typed(found)
            self._refused_older = self._refused_older or isinstance(error, OlderMetadataError)
            self._effects.append(CloseSession(event.session_id, error))
            text = f"launch {event.request.launch} may not register: {error}"
            self._note(text, expected=False, launch=event.request.launch, session_id=event.session_id)
            return
        broker_id, self._let_in = registration.broker_id, True
        self._fits = self._fits or event.request.seen is not None
        known = self.image.brokers.get(broker_id)
        new_directory = known is not None and known.directory_id != event.request.directory_id
        start = f"{event.request.start_kind} start"
        self._apply(registration.records, f"broker {broker_id} registered ({start})")
        self._returned(broker_id, now_ms, new_id=registration.new_id, new_directory=new_directory)
        self._clocks.forget(broker_id)
        if not registration.resumed:
            self._shutdown_offsets.pop(broker_id, None)
        previous = self.sessions.of_broker(broker_id)
        if previous is not None and previous.state in HAS_STREAM:
            self._note_session(previous, f"ends: session {event.session_id} replaces it")
        self._follow(self.sessions.opened(event.session_id, self.image.brokers[broker_id], now_ms), now_ms)
        if registration.older_copy:
            text = older_copy(broker_id, event.request.launch, registration.also_on)
            self._note(text, expected=False, broker_id=broker_id)
        how = "resumed its session" if registration.resumed else f"registered ({start})"
        name = f"broker {broker_id} of launch {event.request.launch}"
        self._effects += [
            Send(event.session_id, self._registered(registration, event.wall_ms)),
            Subscribe(event.session_id),
        ]
        self._note(
            f"{name} {how}, broker epoch {registration.broker_epoch}: session {event.session_id} begins",
            broker_id=broker_id,
            broker_epoch=registration.broker_epoch,
            launch=event.request.launch,
            session_id=event.session_id,
        )

    def _returned(self, broker_id: int, now_ms: int, *, new_id: bool = False, new_directory: bool = False) -> None:
        """The broker is no longer away. One that is new, or was away for long, is to get its share of replicas."""
        away_long = broker_id in self._absences.away_for(self._settings.cluster.replica_reassignment_delay_ms, now_ms)
        if new_id or away_long:
            self._housekeeping.joined.add(broker_id)
        self._absences.returned(broker_id, new_directory=new_directory)
        self._absences.note_live(self.image, now_ms)

    def _registration(self, request: RegisterBrokerRequest, now_ms: int) -> Registration:
        if self._cluster_stops:
            raise StaleLaunchError("the cluster is being stopped")
        rules = RegistrationRules(
            connected=self.sessions.connected,
            lost_launches=self._lost_launches,
            lost_brokers=self._lost_brokers(now_ms),
            shared_executor=self._shared_executor,
            disks=self._disks,
        )
        return register(self.image, request, rules)

    def _lost_brokers(self, now_ms: int) -> frozenset[int]:
        """Brokers that have been away for so long that their replicas are being rebuilt anyway."""
        delay_ms = self._settings.cluster.replica_reassignment_delay_ms
        return self._absences.away_for(delay_ms, now_ms) - self.sessions.connected

    def _registered(self, registration: Registration, wall_ms: int) -> RegisterBrokerResponse:
        cluster = self._settings.cluster
        return RegisterBrokerResponse(
            cluster_id=self.image.cluster_id,
            controller_epoch=self.image.controller_epoch,
            broker_id=registration.broker_id,
            broker_epoch=registration.broker_epoch,
            session_timeout_ms=cluster.broker_session_timeout_ms,
            heartbeat_interval_ms=cluster.broker_heartbeat_interval_ms,
            wall_ms=wall_ms,
        )

    def _heartbeat(self, event: HeartbeatReceived, now_ms: int) -> None:
        beat = event.heartbeat
        session = self.sessions.of_stream(event.session_id)
        if session is not None and session.broker_epoch == beat.broker_epoch:
            session = self.sessions.heartbeat(event.session_id, beat.metadata_offset, event.received_ms)
        else:
            session = None
        if session is None:
            error = BrokerIdNotRegisteredError("the session of this stream is over")
            self._effects.append(CloseSession(event.session_id, error))
            return
        if not self._cluster_stops:
            self._follow(self._clocks.heard(session.broker_id, event), now_ms)
        self._quarantine_damaged(session, beat)
        told = f"broker {session.broker_id} has told of schemas that older metadata lacks"
        self._apply(adopted(self.image, beat.schemas), told)
        leaderless = self._log_ends.report(self.image, session.broker_id, beat.log_ends)
        may_stop = beat.wants_shutdown and self._shut_down(session)
        self._hear_of_disk(session, beat)
        if not beat.wants_shutdown:
            self._unfence_if_ready(session, beat, now_ms)
        self._apply(unclean.recover(self.image, self._log_ends, leaderless), "every replica was compared")
        fenced = self.image.brokers[session.broker_id].fenced
        heard = max((number for _, _, number in beat.damaged), default=0)
        reason = self._clocks.reason(session.broker_id)
        answer = HeartbeatResponse(beat.sent_ms, fenced, may_stop, heard, event.wall_ms, reason)
        self._effects.append(Send(event.session_id, answer))

    def answer_meanwhile(self, event: HeartbeatReceived, committed: MetadataImage) -> HeartbeatResponse | None:
        """The answer to a live broker while decisions are being written: it stays live. None if the broker has to wait.

        The heartbeat is also handled later, with the time at which it came: the broker's session then outlasts the
        lease that this answer extends. A broker that the waiting decisions fence gets no answer.
        """
        session, beat = self.sessions.of_stream(event.session_id), event.heartbeat
        if session is None or session.state is not SessionState.OPEN or session.broker_epoch != beat.broker_epoch:
            return None
        for image in (committed, self.image):
            if not image.is_live(session.broker_id) or image.brokers[session.broker_id].epoch != beat.broker_epoch:
                return None
        return HeartbeatResponse(beat.sent_ms, fenced=False, wall_ms=event.wall_ms)

    def _quarantine_damaged(self, session: Session, beat: HeartbeatRequest) -> None:
        """Decide once on each report: the broker may still repeat it when the replica is rebuilt and in sync again."""
        earlier = self._damage_known.get(session.broker_id, frozenset())
        reported = {(session.broker_epoch, *damaged) for damaged in beat.damaged}
        if reported - earlier:
            self._damage_known[session.broker_id] = frozenset(reported)
            new = sorted((topic_id, partition) for _, topic_id, partition, _ in reported - earlier)
            why = f"broker {session.broker_id} has set damaged replicas aside"
            self._apply(damage.quarantine(self.image, session.broker_id, new, self._disks), why)

    def _hear_of_disk(self, session: Session, beat: HeartbeatRequest) -> None:
        broker_id, before = session.broker_id, self._disks
        offline = [(topic_id, number) for topic_id, numbers in beat.offline.items() for number in numbers]
        self._disks = before.heard(broker_id, full=beat.full, offline=offline)
        self._hear_of_room(broker_id, was_full=broker_id in before.full)
        self._hear_of_offline(broker_id, before.offline.get(broker_id, frozenset()))

    def _hear_of_room(self, broker_id: int, *, was_full: bool) -> None:
        """A full broker resigns at each heartbeat: others may have joined ISRs, or got room, since the last one."""
        if broker_id not in self._disks.full:
            if was_full:
                self._note(room.has_room(broker_id), expected=False)
            return
        moves = [] if self._cluster_stops else room.resign(self.image, broker_id, self._disks)
        self._apply(moves, f"broker {broker_id} has no room")
        if moves or not was_full:
            self._note(room.has_none(self.image, broker_id, len(moves)), expected=False)

    def _hear_of_offline(self, broker_id: int, before: frozenset[Key]) -> None:
        """An offline replica steps back at each heartbeat. One that is back may lead a partition that has no leader."""
        now = self._disks.offline.get(broker_id, frozenset())
        if now:
            records = offline.step_back(self.image, broker_id, self._disks, shrink=not self._cluster_stops)
            self._apply(records, f"broker {broker_id} cannot use its replica")
        if now - before:
            self._note(offline.is_offline(self.image, broker_id, now - before), expected=False)
        if back := before - now:
            self._apply(
                fencing.elect_leaders(self.image, disks=self._disks), f"broker {broker_id} has its replica again"
            )
            self._note(offline.is_back(broker_id, len(back)), expected=False)

    def _unfence_if_ready(self, session: Session, beat: HeartbeatRequest, now_ms: int) -> None:
        broker = self.image.brokers[session.broker_id]
        caught_up = beat.metadata_offset >= broker.epoch
        if self._clocks.is_wrong(broker.id):
            return
        if broker.fenced and not broker.in_controlled_shutdown and beat.ready and caught_up:
            name = f"broker {broker.id} of launch {broker.launch}"
            text = f"{name} is live: it may lead and join ISRs"
            self._note(text, broker_id=broker.id, broker_epoch=broker.epoch, launch=broker.launch)
            others_come = self._absences.just_begun(fencing.OTHERS_COME_MS, now_ms)
            self._elections_wait = self._elections_wait or others_come
            records = fencing.unfence(self.image, broker.id, others_come=others_come, disks=self._disks)
            self._apply(records, f"{name} is live")
            self._returned(broker.id, now_ms)

    def _shut_down(self, session: Session) -> bool:
        """Begin the broker's shutdown. Returns True once every other live broker knows the new leaders."""
        broker_id = session.broker_id
        name = f"broker {broker_id} of launch {session.launch}"
        if not self.image.brokers[broker_id].in_controlled_shutdown:
            text = f"{name} hands over and leaves in order"
            self._note(text, broker_id=broker_id, broker_epoch=session.broker_epoch, launch=session.launch)
        self._apply(shutdown.begin_shutdown(self.image, broker_id, self._disks), f"{name} leaves in order")
        end = self._shutdown_offsets.setdefault(broker_id, self.image.next_offset)
        others = [s for s in self.sessions.all() if s.broker_id != broker_id and self.image.is_live(s.broker_id)]
        # The last record of the decision has the offset end - 1.
        may_stop = self._cluster_stops or all(other.metadata_offset >= end - 1 for other in others)
        if may_stop:
            self.sessions.may_stop(session)
        return may_stop

    def _call(self, event: CallReceived, now_ms: int) -> None:
        cluster = self._settings.cluster
        patience_ms = max(cluster.replica_reassignment_delay_ms, cluster.broker_session_timeout_ms)
        expected = len(self.image.brokers) - len(self._absences.away_for(patience_ms, now_ms))
        if isinstance(event.request, AnnounceTieringRequest):
            self._next_tiering_at_ms = {id_: now_ms + in_ms for id_, in_ms in event.request.in_ms.items()}
            self._effects.append(Reply(event.call_id, EmptyResponse()))
            return
        try:
            context = CallContext(
                self._settings, event.new_topic, expected, self._log_ends, self._disks, self._next_tiering_at_ms, now_ms
            )
            let_in = self._fits or (self._let_in and not self._refused_older)
            check_caller(self.image, event.request, self.sessions.connected, let_in=let_in)
            decision = answer(self.image, event.request, context)
        except SparkBrokerError as error:
            self._effects.append(Reply(event.call_id, error))
            return
        except InvariantError:
            raise
        except Exception as error:  # noqa: BLE001 (the caller's thread logs it)
            # Nothing has been decided yet: only this call ends, whatever its sender has found.
            self._effects.append(Reply(event.call_id, error))
            return
        self._certain = decision.certain
        self._apply(decision.records, reason(event.request))
        self._effects.append(Reply(event.call_id, decision.response))

    def _stop(self, event: StopRequested) -> None:
        sessions = [s for s in self.sessions.all() if event.launch in (None, s.launch)]
        if event.launch is None:
            self._cluster_stops = True
            stopping = [s.broker_id for s in sessions]
            self._note(f"the cluster stops: brokers {', '.join(map(str, sorted(stopping))) or 'none'}")
            self._apply(shutdown.begin_cluster_shutdown(self.image, stopping), "the cluster stops")
        reason = "the cluster stops" if event.launch is None else "the broker is to stop"
        self._effects += [Send(s.session_id, StopBroker(reason=reason)) for s in sessions if s.state in HAS_STREAM]
        self._pending_stops.append(_PendingStop(event.call_id, tuple(sorted(s.broker_id for s in sessions))))

    def _answer_stops(self) -> None:
        connected = self.sessions.connected
        done = [stop for stop in self._pending_stops if connected.isdisjoint(stop.broker_ids)]
        for stop in done:
            self._pending_stops.remove(stop)
            self._effects.append(Reply(stop.call_id, StoppedBrokers(stop.broker_ids)))
        invariant(len(self._pending_stops) <= 1000, "too many stops are pending")
