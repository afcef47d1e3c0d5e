"""Sessions of brokers: which brokers are connected, in doubt, or to be fenced.

A session is a stream. When it ends, the broker's port is probed. If it refuses the connection, the process is gone,
and the broker is fenced at once. While the port answers, the same process has `controller.reconnect.grace.ms` to come
back. If several streams end within that time, or this controller itself was late, the fault may be the controller's.
Then only brokers whose port refuses are fenced before `broker.session.timeout.ms`.

A fence by time-out counts from the *receipt* of the last heartbeat. The broker's lease counts from the sending, so it
has ended by then. The other fences rest on epochs alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from spark_broker.controller.effects import CloseSession, FenceBrokers, Note, ProbePort, Send, SessionEffect
from spark_broker.controller.image import BrokerState
from spark_broker.errors import BrokerIdNotRegisteredError, StaleLaunchError, invariant
from spark_broker.protocol.messages import StopBroker


class SessionState(Enum):
    OPEN = auto()  # the stream is there
    STOPPING = auto()  # the broker was notified that it may stop: the end of its stream is expected
    BROKEN = auto()  # the stream ended; the same process may come back for a moment
    UNCERTAIN = auto()  # the stream ended when others did, or when the controller was late: wait for the time-out
    FENCED = auto()  # the session is over


class Signal(Enum):
    HEARTBEAT = auto()
    MAY_STOP = auto()
    STREAM_ENDED = auto()
    PORT_REFUSED = auto()
    PORT_ANSWERED = auto()
    GRACE_ENDED = auto()
    GRACE_ENDED_IN_DOUBT = auto()
    TIMED_OUT = auto()
    SPARK_LOST = auto()
    REOPENED = auto()


TRANSITIONS: dict[tuple[SessionState, Signal], SessionState] = {
    (SessionState.OPEN, Signal.HEARTBEAT): SessionState.OPEN,
    (SessionState.OPEN, Signal.MAY_STOP): SessionState.STOPPING,
    (SessionState.OPEN, Signal.STREAM_ENDED): SessionState.BROKEN,
    (SessionState.OPEN, Signal.TIMED_OUT): SessionState.FENCED,
    (SessionState.OPEN, Signal.SPARK_LOST): SessionState.FENCED,
    (SessionState.OPEN, Signal.REOPENED): SessionState.OPEN,
    (SessionState.STOPPING, Signal.HEARTBEAT): SessionState.STOPPING,
    (SessionState.STOPPING, Signal.MAY_STOP): SessionState.STOPPING,
    (SessionState.STOPPING, Signal.STREAM_ENDED): SessionState.FENCED,
    (SessionState.STOPPING, Signal.TIMED_OUT): SessionState.FENCED,
    (SessionState.STOPPING, Signal.SPARK_LOST): SessionState.FENCED,
    (SessionState.STOPPING, Signal.REOPENED): SessionState.OPEN,
    (SessionState.BROKEN, Signal.PORT_REFUSED): SessionState.FENCED,
    (SessionState.BROKEN, Signal.PORT_ANSWERED): SessionState.BROKEN,
    (SessionState.BROKEN, Signal.GRACE_ENDED): SessionState.FENCED,
    (SessionState.BROKEN, Signal.GRACE_ENDED_IN_DOUBT): SessionState.UNCERTAIN,
    (SessionState.BROKEN, Signal.TIMED_OUT): SessionState.FENCED,
    (SessionState.BROKEN, Signal.SPARK_LOST): SessionState.FENCED,
    (SessionState.BROKEN, Signal.REOPENED): SessionState.OPEN,
    (SessionState.UNCERTAIN, Signal.PORT_REFUSED): SessionState.FENCED,
    (SessionState.UNCERTAIN, Signal.PORT_ANSWERED): SessionState.UNCERTAIN,
    (SessionState.UNCERTAIN, Signal.TIMED_OUT): SessionState.FENCED,
    (SessionState.UNCERTAIN, Signal.SPARK_LOST): SessionState.FENCED,
    (SessionState.UNCERTAIN, Signal.REOPENED): SessionState.OPEN,
}

HAS_STREAM = (SessionState.OPEN, SessionState.STOPPING)

STOPPED_IN_ORDER = "it stopped in order"

IN_DOUBT = (
    "brokers {} are in doubt: their streams ended, but others ended at the same time or this controller was late; "
    "each has until broker.session.timeout.ms unless its port refuses connections"
)


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """How long things may take. `probe_interval_ms`: wait before a port that answered is probed again (a dying process
    closes its sockets one by one). `late_ms`: ticks further apart than this mean that the controller was late."""

    session_timeout_ms: int
    reconnect_grace_ms: int
    probe_interval_ms: int = 50
    late_ms: int = 300


DELAYS_MAX = 3
"""So often a session's deadline moves because the controller was late, until a heartbeat comes. What it had not read
before, it reads between two ticks. A controller that is late every time, because its store is slow, still fences."""


@dataclass(slots=True)
class Session:
    """A broker's session. `deadline_ms`: when the broker is fenced unless a heartbeat comes."""

    session_id: int
    broker_id: int
    broker_epoch: int
    launch: int
    host: str
    port: int
    deadline_ms: int
    state: SessionState = SessionState.OPEN
    metadata_offset: int = -1
    delays: int = 0  # of the deadline, since the last heartbeat
    broken_at_ms: int = 0
    next_probe_ms: int | None = None  # None: a probe is under way, or none is due

    def move(self, signal: Signal) -> None:
        allowed = (self.state, signal) in TRANSITIONS
        invariant(allowed, "broker %d: %s in %s", self.broker_id, signal.name, self.state.name)
        self.state = TRANSITIONS[self.state, signal]


class Sessions:
    """The sessions of all brokers, by broker id. A fenced session is forgotten: its broker registers again."""

    def __init__(self, times: SessionTimes) -> None:
        self._times = times
        self._sessions: dict[int, Session] = {}
        self._last_tick_ms: int | None = None
        self._late_at_ms: int | None = None
        self._breaks: dict[int, int] = {}  # broker id to the time of its last break, for twice the grace

    @property
    def connected(self) -> frozenset[int]:
        """Brokers that have a session or may still come back to theirs."""
        return frozenset(self._sessions)

    def of_broker(self, broker_id: int) -> Session | None:
        return self._sessions.get(broker_id)

    def of_stream(self, session_id: int) -> Session | None:
        return next((s for s in self._sessions.values() if s.session_id == session_id), None)

    def all(self) -> Iterable[Session]:
        return list(self._sessions.values())

    def opened(self, session_id: int, broker: BrokerState, now_ms: int) -> list[SessionEffect]:
        """A process registered on this stream. An earlier stream of the broker is closed."""
        effects: list[SessionEffect] = []
        previous = self._sessions.get(broker.id)
        if previous is not None:
            if previous.state in HAS_STREAM:
                effects = _supersede(previous, superseded=previous.broker_epoch != broker.epoch)
            previous.move(Signal.REOPENED)
        self._sessions[broker.id] = Session(
            session_id=session_id,
            broker_id=broker.id,
            broker_epoch=broker.epoch,
            launch=broker.launch,
            host=broker.host,
            port=broker.port,
            deadline_ms=now_ms + self._times.session_timeout_ms,
        )
        return effects

    def heartbeat(self, session_id: int, metadata_offset: int, received_ms: int) -> Session | None:
        """The session that the heartbeat keeps alive; None when the stream's session is over."""
        session = self.of_stream(session_id)
        if session is None or session.state not in HAS_STREAM:
            return None
        session.move(Signal.HEARTBEAT)
        session.deadline_ms = max(session.deadline_ms, received_ms + self._times.session_timeout_ms)
        session.delays = 0
        session.metadata_offset = max(session.metadata_offset, metadata_offset)
        return session

    def may_stop(self, session: Session) -> None:
        """The broker is about to be notified that it may stop."""
        session.move(Signal.MAY_STOP)

    def ended(self, session_id: int, now_ms: int) -> list[SessionEffect]:
        """The stream ended."""
        session = self.of_stream(session_id)
        if session is None or session.state not in HAS_STREAM:
            return []
        expected = session.state is SessionState.STOPPING
        session.move(Signal.STREAM_ENDED)
        if expected:
            return self._fence([session], STOPPED_IN_ORDER)
        session.broken_at_ms = now_ms
        self._breaks[session.broker_id] = now_ms
        return [ProbePort(session.broker_id, session.session_id, session.host, session.port)]

    def probed(self, broker_id: int, session_id: int, *, refused: bool, now_ms: int) -> list[SessionEffect]:
        """The answer to a ProbePort. One about an earlier stream is void."""
        session = self._sessions.get(broker_id)
        if session is None or session.session_id != session_id or session.state in HAS_STREAM:
            return []
        if refused:
            session.move(Signal.PORT_REFUSED)
            return self._fence([session], "its stream ended and its port refuses connections")
        session.move(Signal.PORT_ANSWERED)
        session.next_probe_ms = now_ms + self._times.probe_interval_ms
        return []

    def lost(self, launch: int) -> list[SessionEffect]:
        """Spark reports the loss of this launch: its broker is fenced, and no other."""
        session = next((s for s in self._sessions.values() if s.launch == launch), None)
        if session is None:
            return []
        return self._signal([session], Signal.SPARK_LOST, "Spark reported its executor or task as lost")

    def tick(self, now_ms: int) -> list[SessionEffect]:
        """Time passed: returns what is due. Fences that are due for one reason are one decision."""
        self._notice_lateness(now_ms)
        due = [s for s in self._sessions.values() if now_ms >= s.deadline_ms]
        effects = self._signal(due, Signal.TIMED_OUT, "it was not heard of for broker.session.timeout.ms")
        effects += self._end_graces(now_ms)
        effects += self._probes(now_ms)
        grace = self._times.reconnect_grace_ms
        self._breaks = {b: at for b, at in self._breaks.items() if now_ms - at <= 2 * grace}
        return effects

    def _notice_lateness(self, now_ms: int) -> None:
        """If the controller was late, heartbeats may be unread: deadlines move by the time that was lost."""
        last, self._last_tick_ms = self._last_tick_ms, now_ms
        if last is None or now_ms - last <= self._times.late_ms:
            return
        self._late_at_ms = now_ms
        for session in self._sessions.values():
            if session.delays < DELAYS_MAX:
                session.delays += 1
                session.deadline_ms += now_ms - last

    def _end_graces(self, now_ms: int) -> list[SessionEffect]:
        grace = self._times.reconnect_grace_ms
        over = [
            s for s in self._sessions.values() if s.state is SessionState.BROKEN and now_ms - s.broken_at_ms >= grace
        ]
        doubtful = [s for s in over if self._in_doubt(s)]
        for session in doubtful:
            session.move(Signal.GRACE_ENDED_IN_DOUBT)
        certain = [s for s in over if s not in doubtful]
        notes = [Note(IN_DOUBT.format(sorted(s.broker_id for s in doubtful)))] if doubtful else []
        return [*notes, *self._signal(certain, Signal.GRACE_ENDED, "its stream ended and it did not come back")]

    def _in_doubt(self, session: Session) -> bool:
        if self._late_at_ms is not None and self._late_at_ms >= session.broken_at_ms:
            return True
        near = self._times.reconnect_grace_ms
        others = (at for broker_id, at in self._breaks.items() if broker_id != session.broker_id)
        return any(abs(at - session.broken_at_ms) <= near for at in others)

    def _probes(self, now_ms: int) -> list[SessionEffect]:
        effects: list[SessionEffect] = []
        for session in self._sessions.values():
            if session.next_probe_ms is not None and now_ms >= session.next_probe_ms:
                session.next_probe_ms = None
                effects.append(ProbePort(session.broker_id, session.session_id, session.host, session.port))
        return effects

    def _signal(self, sessions: list[Session], signal: Signal, reason: str) -> list[SessionEffect]:
        had_stream = [s for s in sessions if s.state in HAS_STREAM]
        for session in sessions:
            session.move(signal)
        closes = [CloseSession(s.session_id, BrokerIdNotRegisteredError(f"fenced: {reason}")) for s in had_stream]
        return [*self._fence(sessions, reason), *closes]

    def _fence(self, sessions: list[Session], reason: str) -> list[SessionEffect]:
        for session in sessions:
            fenced = session.state is SessionState.FENCED
            invariant(fenced, "broker %d is fenced in %s", session.broker_id, session.state.name)
            del self._sessions[session.broker_id]
        return [FenceBrokers(tuple(sorted(s.broker_id for s in sessions)), reason)] if sessions else []


def _supersede(previous: Session, *, superseded: bool) -> list[SessionEffect]:
    if not superseded:
        return [CloseSession(previous.session_id, BrokerIdNotRegisteredError("the broker opened another session"))]
    reason = f"a later launch of broker {previous.broker_id} registered"
    return [
        Send(previous.session_id, StopBroker(superseded=True, reason=reason)),
        CloseSession(previous.session_id, StaleLaunchError(reason)),
    ]
