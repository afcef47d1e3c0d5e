"""A broker's sessions with the controller: registration, heartbeats up, metadata down, and when the next one begins.

It knows no thread and no socket. `broker.session` runs it in threads, the simulator in events.

    state          event             -> state          what the shell does
    --------------------------------------------------------------------------------------------------------------
    DISCONNECTED   CONNECTS          -> REGISTERING    opens a stream, sends the registration
    REGISTERING    REGISTERS         -> REGISTERED     sends a heartbeat at each interval from now on
    REGISTERED     SESSION_ENDS      -> DISCONNECTED   closes the stream, connects again after RECONNECT_MS
    REGISTERING    SESSION_ENDS      -> DISCONNECTED   as above
    any            BROKER_ENDS       -> OVER           closes the stream; nothing follows
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.lease import Lease
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.spec import STOPPED, SUPERSEDED
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.records import decode_records
from spark_broker.controller.snapshot import image_from_snapshot
from spark_broker.errors import (
    BrokerIdNotRegisteredError,
    NetworkError,
    ProcessLimitError,
    RequestTimedOutError,
    SparkBrokerError,
    StaleControllerEpochError,
    StaleLaunchError,
    invariant,
)
from spark_broker.protocol.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    MetadataUpdate,
    RegisterBrokerResponse,
    StopBroker,
    StreamMessage,
)

logger = logging.getLogger(__name__)

ENDS_ONE_SESSION = (
    NetworkError,
    RequestTimedOutError,
    StaleControllerEpochError,
    BrokerIdNotRegisteredError,
    ProcessLimitError,
)
"""Errors after which the broker opens its next session. The last one is of the controller's process, or of what a
session needs here; not of what a message does here, which may be half done."""

RECONNECT_MS = 50
"""Wait between two sessions."""

REGISTRATION_TIMEOUT_MS = 10_000
"""How long the controller may take to answer a registration."""


class MembershipState(Enum):
    DISCONNECTED = auto()
    REGISTERING = auto()  # the registration was sent and is not answered yet
    REGISTERED = auto()  # heartbeats go up, metadata comes down
    OVER = auto()  # the broker ends


class MembershipEvent(Enum):
    CONNECTS = auto()
    REGISTERS = auto()
    SESSION_ENDS = auto()
    BROKER_ENDS = auto()


TRANSITIONS: dict[tuple[MembershipState, MembershipEvent], MembershipState] = {
    (MembershipState.DISCONNECTED, MembershipEvent.CONNECTS): MembershipState.REGISTERING,
    (MembershipState.REGISTERING, MembershipEvent.REGISTERS): MembershipState.REGISTERED,
    (MembershipState.REGISTERING, MembershipEvent.SESSION_ENDS): MembershipState.DISCONNECTED,
    (MembershipState.REGISTERING, MembershipEvent.BROKER_ENDS): MembershipState.OVER,
    (MembershipState.REGISTERED, MembershipEvent.SESSION_ENDS): MembershipState.DISCONNECTED,
    (MembershipState.REGISTERED, MembershipEvent.BROKER_ENDS): MembershipState.OVER,
    # The session's stream still exists until the shell has closed it.
    (MembershipState.OVER, MembershipEvent.SESSION_ENDS): MembershipState.OVER,
    (MembershipState.OVER, MembershipEvent.BROKER_ENDS): MembershipState.OVER,
}

ReadUpdate = Callable[[MetadataImage, MetadataUpdate], MetadataImage]


def read_update(known: MetadataImage, update: MetadataUpdate) -> MetadataImage:
    """The image after an update that fits."""
    records = decode_records(update.records)
    return image_from_snapshot(records, update.next_offset) if update.snapshot else known.apply(records)


@dataclass(frozen=True, slots=True)
class SessionEvents:
    """The session's callbacks. `on_registered` comes before any metadata; `on_end` gets why the broker must end."""

    on_registered: Callable[[RegisterBrokerResponse], None]
    on_end: Callable[[str], None]
    on_failure: Callable[[SparkBrokerError], None]
    on_bug: Callable[[BaseException], None]


class Membership:
    """This broker as a member of the cluster, over all of its sessions. There is one session at a time.

    Invariants: the controller epoch never falls; the image is a prefix of the controller's; a heartbeat is due only
    while REGISTERED. One thread connects and hands in messages. Another thread may call `heartbeat`.
    """

    def __init__(
        self,
        manager: ReplicaManager,
        lease: Lease,
        events: SessionEvents,
        clock: Clock = SYSTEM_CLOCK,
        read: ReadUpdate = read_update,
        registration_timeout_ms: int = REGISTRATION_TIMEOUT_MS,
    ) -> None:
        self.state = MembershipState.DISCONNECTED
        self.shutting_down = False
        self._registration_timeout_ms = registration_timeout_ms
        self._manager = manager
        self._lease = lease
        self._events = events
        self._clock = clock
        self._read = read
        self._controller_epoch = -1
        self._registered: RegisterBrokerResponse | None = None
        self._ahead_max_ms: int | None = None  # see `HeartbeatRequest`
        self._reason = ""
        self._live = False  # as the controller's last answer says
        self._half_done: ProcessLimitError | None = None  # what kept this process from handling a message

    @property
    def over(self) -> bool:
        """Whether the broker ends."""
        return self.state is MembershipState.OVER

    @property
    def patience_ms(self) -> int:
        """How long the controller may be silent before the session counts as ended."""
        registered = self._registered if self.state is MembershipState.REGISTERED else None
        return registered.session_timeout_ms if registered is not None else self._registration_timeout_ms

    @property
    def heartbeat_interval_ms(self) -> int | None:
        """None: no heartbeat is sent before the controller has answered the registration."""
        registered = self._registered if self.state is MembershipState.REGISTERED else None
        return registered.heartbeat_interval_ms if registered is not None else None

    def connects(self) -> None:
        """A stream is about to be opened; the registration is the first message on it."""
        self._move(MembershipEvent.CONNECTS)

    def received(self, message: StreamMessage) -> bool:
        """Handle a message; returns whether a heartbeat is due at once. Raises the error that ends the session."""
        try:
            return self._received(message)
        except ProcessLimitError as error:
            self._half_done = error
            raise

    def _received(self, message: StreamMessage) -> bool:
        match self.state:
            case MembershipState.REGISTERING:
                self._accept(message)
                return False
            case MembershipState.REGISTERED:
                return self._handle(message)
            case _:
                invariant(self.over, f"a {type(message).__name__} while {self.state.name}")
                return False

    def _move(self, event: MembershipEvent) -> None:
        invariant((self.state, event) in TRANSITIONS, f"membership: {event.name} in {self.state.name}")
        self.state = TRANSITIONS[self.state, event]

    def _accept(self, message: StreamMessage) -> None:
        """The first message of a session. Known bug 18: what an older driver still says is refused."""
        if not isinstance(message, RegisterBrokerResponse):
            raise NetworkError(f"the controller answered a registration with {type(message).__name__}")
        if message.controller_epoch < self._controller_epoch:
            raise StaleControllerEpochError(f"controller epoch {message.controller_epoch} is over")
        self._controller_epoch = message.controller_epoch
        self._registered = message
        self._compare_clocks(message.wall_ms)
        self._events.on_registered(message)
        self._move(MembershipEvent.REGISTERS)

    def _handle(self, message: StreamMessage) -> bool:
        match message:
            case HeartbeatResponse():
                self._answered(message)
                return False
            case MetadataUpdate():
                self._apply(message)
                return True
            case StopBroker(superseded=True):
                self._lease.drop()
                self._end(SUPERSEDED)
                return False
            case StopBroker():
                self.shutting_down = True
                return True
            case _:
                raise NetworkError(f"the controller sent a {type(message).__name__}")

    def session_ended(self, error: SparkBrokerError) -> None:
        """The session ended with this error: another follows after RECONNECT_MS, unless the broker is `over` now."""
        if isinstance(error, ENDS_ONE_SESSION) and error is not self._half_done:
            self._move(MembershipEvent.SESSION_ENDS)
            self._lease.session_lost()
            logger.info("the session with the controller ended: %s", error)
            return
        self._lease.drop()
        logger.warning("%s", error)
        if isinstance(error, StaleLaunchError):
            self._end(SUPERSEDED)
        else:
            self._move(MembershipEvent.BROKER_ENDS)
            self._events.on_failure(error)

    def heartbeat(self) -> HeartbeatRequest:
        """The heartbeat to send now. It says how far metadata is applied, and so whether this broker may be unfenced.

        It may be unfenced only when every log is open: otherwise it would lead partitions that it cannot serve yet.
        """
        offset = self._manager.applied_offset
        epoch = self._registered.broker_epoch if self._registered is not None else -1
        return HeartbeatRequest(
            broker_epoch=epoch,
            metadata_offset=offset,
            sent_ms=self._clock.boottime_ms(),
            ready=offset > epoch,
            wants_shutdown=self.shutting_down,
            damaged=self._manager.damage_reports,
            log_ends=self._manager.log_ends(),
            wall_ms=self._clock.wall_ms(),
            ahead_max_ms=self._ahead_max_ms,
            full=self._manager.room.full,
            offline=self._manager.offline,
            schemas=self._manager.lost_schemas(),
        )

    def _compare_clocks(self, controller_wall_ms: int) -> None:
        """The controller's clock has advanced since it was read, so this clock is ahead by the difference at most."""
        self._ahead_max_ms = self._clock.wall_ms() - controller_wall_ms if controller_wall_ms >= 0 else None

    def _answered(self, answer: HeartbeatResponse) -> None:
        self._compare_clocks(answer.wall_ms)
        if answer.reason != self._reason:
            self._reason = answer.reason
            if answer.reason:
                logger.warning("this broker is fenced: %s", answer.reason)
        self._manager.damage_heard(answer.damage_heard)
        if answer.shut_down:
            self._end(STOPPED)
        elif answer.fenced:
            self._say_live(live=False)
            self._lease.drop()
        elif self._registered is not None:
            self._say_live(live=True)
            self._lease.extend(answer.sent_ms, self._registered.session_timeout_ms)

    def _say_live(self, *, live: bool) -> None:
        """Log every change once."""
        if live != self._live:
            self._live = live
            epoch = self._registered.broker_epoch if self._registered is not None else -1
            how = "is live" if live else "is fenced: it serves nothing until the controller counts it as live"
            level = logging.INFO if live else logging.WARNING
            fields = {"broker_id": self._manager.broker_id, "broker_epoch": epoch, "how": how}
            logger.log(level, "broker %(broker_id)d, epoch %(broker_epoch)d, %(how)s", fields)

    def _apply(self, update: MetadataUpdate) -> None:
        """A broker's metadata is a prefix of the controller's: an update that does not fit ends the session."""
        if update.controller_epoch < self._controller_epoch:
            raise StaleControllerEpochError(f"an update of controller epoch {update.controller_epoch}")
        image = self._manager.image
        if not update.snapshot and update.first_offset != image.next_offset:
            raise NetworkError(f"metadata from {update.first_offset}, known is {image.next_offset}")
        self._manager.apply(self._read(image, update))

    def _end(self, reason: str) -> None:
        self._move(MembershipEvent.BROKER_ENDS)
        self._events.on_end(reason)
