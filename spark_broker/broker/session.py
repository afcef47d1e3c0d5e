"""The broker's session with the controller: registration, heartbeats up, metadata down."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.lease import Lease
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.spec import STOPPED, SUPERSEDED
from spark_broker.controller.image import image_from_snapshot
from spark_broker.controller.records import decode_records
from spark_broker.errors import (
    BrokerIdNotRegisteredError,
    NetworkError,
    RequestTimedOutError,
    SparkBrokerError,
    StaleControllerEpochError,
    StaleLaunchError,
)
from spark_broker.protocol.messages import (
    Heartbeat,
    HeartbeatAnswer,
    MetadataUpdate,
    RegisterBroker,
    Registered,
    StopBroker,
    StreamMessage,
)
from spark_broker.transport.client import ClientStream, Connection

logger = logging.getLogger(__name__)

RECONNECT_S = 0.05


@dataclass(frozen=True, slots=True)
class SessionEvents:
    """Whom the session tells. `on_registered` comes before any metadata; `on_end` names why the broker is to end."""

    on_registered: Callable[[Registered], None]
    on_end: Callable[[str], None]
    on_failure: Callable[[SparkBrokerError], None]
    on_bug: Callable[[BaseException], None]


class ControllerSession(threading.Thread):
    """Keeps one session open, opens the next when it breaks, and applies metadata in this thread."""

    def __init__(
        self,
        controller: Connection,
        registration: Callable[[], RegisterBroker],
        manager: ReplicaManager,
        lease: Lease,
        events: SessionEvents,
    ) -> None:
        super().__init__(name="controller-session", daemon=True)
        self._controller = controller
        self._registration = registration
        self._manager = manager
        self._lease = lease
        self._events = events
        self._stopped = threading.Event()
        self._controller_epoch = -1
        self._shutting_down = False

    def stop(self) -> None:
        self._stopped.set()

    def request_shutdown(self) -> None:
        """Leave in order: the next heartbeat says so, and `on_end` follows when the controller agrees."""
        self._shutting_down = True

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._run_once()
        except BaseException as error:
            self._events.on_bug(error)
            raise

    def _run_once(self) -> None:
        try:
            self._session()
        except (NetworkError, RequestTimedOutError, StaleControllerEpochError, BrokerIdNotRegisteredError) as error:
            self._lease.session_lost()
            logger.info("the session with the controller ended: %s", error)
            self._stopped.wait(RECONNECT_S)
        except StaleLaunchError as error:
            self._lease.drop()
            logger.warning("%s", error)
            self._finish(lambda: self._events.on_end(SUPERSEDED))
        except SparkBrokerError as error:
            self._lease.drop()
            failure = error
            self._finish(lambda: self._events.on_failure(failure))

    def _finish(self, tell: Callable[[], None]) -> None:
        self._stopped.set()
        tell()

    def _session(self) -> None:
        stream = self._controller.open_stream("session")
        try:
            registration = self._registration()
            stream.send(registration)
            registered, _ = stream.receive(timeout_ms=10_000)
            if not isinstance(registered, Registered):
                raise NetworkError(f"the controller answered a registration with {type(registered).__name__}")
            self._accept(registered)
            heartbeats = _Heartbeats(stream, registered, self)
            heartbeats.start()
            try:
                self._listen(stream, registered, heartbeats)
            finally:
                heartbeats.stop()
        finally:
            stream.close()

    def _accept(self, registered: Registered) -> None:
        """KNOWN_BUGS 18: what an older driver still says is refused."""
        if registered.controller_epoch < self._controller_epoch:
            raise StaleControllerEpochError(f"controller epoch {registered.controller_epoch} is over")
        self._controller_epoch = registered.controller_epoch
        self._events.on_registered(registered)

    def _listen(self, stream: ClientStream, registered: Registered, heartbeats: _Heartbeats) -> None:
        while not self._stopped.is_set():
            message, _ = stream.receive(timeout_ms=registered.session_timeout_ms)
            self._handle(message, registered, heartbeats)

    def _handle(self, message: StreamMessage, registered: Registered, heartbeats: _Heartbeats) -> None:
        match message:
            case HeartbeatAnswer():
                self._answered(message, registered)
            case MetadataUpdate():
                self._apply(message)
                heartbeats.beat_now()
            case StopBroker(superseded=True):
                self._lease.drop()
                self._finish(lambda: self._events.on_end(SUPERSEDED))
            case StopBroker():
                self._shutting_down = True
                heartbeats.beat_now()
            case _:
                raise NetworkError(f"the controller sent a {type(message).__name__}")

    def _answered(self, answer: HeartbeatAnswer, registered: Registered) -> None:
        if answer.shut_down:
            self._finish(lambda: self._events.on_end(STOPPED))
        elif answer.fenced:
            self._lease.drop()
        else:
            self._lease.extend(answer.sent_ms, registered.session_timeout_ms)

    def _apply(self, update: MetadataUpdate) -> None:
        """A broker's metadata is a prefix of the controller's: an update that does not fit ends the session."""
        if update.controller_epoch < self._controller_epoch:
            raise StaleControllerEpochError(f"an update of controller epoch {update.controller_epoch}")
        records = decode_records(update.records)
        if update.snapshot:
            image = image_from_snapshot(records, update.next_offset)
        elif update.first_offset == self._manager.image.next_offset:
            image = self._manager.image.apply(records)
        else:
            raise NetworkError(f"metadata from {update.first_offset}, known is {self._manager.image.next_offset}")
        self._manager.apply(image)

    def heartbeat(self, registered: Registered) -> Heartbeat:
        offset = self._manager.image.next_offset
        return Heartbeat(
            broker_epoch=registered.broker_epoch,
            metadata_offset=offset,
            sent_ms=SYSTEM_CLOCK.boottime_ms(),
            ready=offset > registered.broker_epoch,
            wants_shutdown=self._shutting_down,
            damaged=self._manager.damaged,
        )


class _Heartbeats(threading.Thread):
    """Sends heartbeats on one session's stream, at the interval and whenever metadata was applied."""

    def __init__(self, stream: ClientStream, registered: Registered, session: ControllerSession) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self._stream = stream
        self._registered = registered
        self._session = session
        self._due = threading.Event()
        self._stopped = False

    def beat_now(self) -> None:
        self._due.set()

    def stop(self) -> None:
        self._stopped = True
        self._due.set()

    def run(self) -> None:
        interval_s = self._registered.heartbeat_interval_ms / 1000
        while True:
            self._due.wait(interval_s)
            self._due.clear()
            if self._stopped:
                return
            try:
                self._stream.send(self._session.heartbeat(self._registered))
            except (NetworkError, RequestTimedOutError) as error:
                # The session's own thread sees the same end, and opens the next session.
                logger.info("no heartbeat could be sent: %s", error)
                return
