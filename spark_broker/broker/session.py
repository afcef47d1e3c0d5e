"""The broker's session with the controller: registration, heartbeats up, metadata down."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from spark_broker.broker.lease import Lease
from spark_broker.broker.membership import RECONNECT_MS, Membership, SessionEvents
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import RegisterBrokerRequest
from spark_broker.threads import Fate, Worker, start
from spark_broker.transport.client import Connection
from spark_broker.transport.client_stream import ClientStream

__all__ = ["ControllerSession", "SessionEvents"]

logger = logging.getLogger(__name__)


class ControllerSession(Worker):
    """Keeps one session open, opens the next when it breaks, and applies metadata in this thread."""

    def __init__(
        self,
        controller: Connection,
        registration: Callable[[], RegisterBrokerRequest],
        manager: ReplicaManager,
        lease: Lease,
        events: SessionEvents,
    ) -> None:
        super().__init__("controller-session", events.on_bug)
        self._controller = controller
        self._registration = registration
        self._membership = Membership(manager, lease, events)
        self._on_bug = events.on_bug
        self._stopped = threading.Event()
        self._heartbeats: _Heartbeats | None = None

    def beat_now(self) -> None:
        """Send the next heartbeat at once, without waiting for its interval. From any thread."""
        heartbeats = self._heartbeats
        if heartbeats is not None:
            heartbeats.beat_now()

    def stop(self) -> None:
        self._stopped.set()

    def request_shutdown(self) -> None:
        """Leave in order: the next heartbeat says so, and `on_end` follows when the controller agrees."""
        self._membership.shutting_down = True
        self.beat_now()

    def work(self) -> None:
        while not (self._stopped.is_set() or self._membership.over):
            self._run_once()

    def _run_once(self) -> None:
        try:
            self._session()
        except SparkBrokerError as error:
            self._membership.session_ended(error)
            if not self._membership.over:
                self._stopped.wait(RECONNECT_MS / 1000)

    def _session(self) -> None:
        self._membership.connects()
        stream = self._controller.open_stream("session")
        try:
            stream.send(self._registration())
            self._receive(stream)
            heartbeats = self._heartbeats = _Heartbeats(stream, self._membership, self._on_bug)
            start(heartbeats)
            try:
                while not (self._stopped.is_set() or self._membership.over):
                    if self._receive(stream):
                        heartbeats.beat_now()
            finally:
                heartbeats.stop()
        finally:
            stream.close()

    def _receive(self, stream: ClientStream) -> bool:
        message, _ = stream.receive(timeout_ms=self._membership.patience_ms)
        return self._membership.received(message)


class _Heartbeats(Worker):
    """Sends heartbeats on one session's stream, at the interval and whenever metadata was applied."""

    def __init__(self, stream: ClientStream, membership: Membership, on_bug: Fate) -> None:
        super().__init__("heartbeats", on_bug)
        self._stream = stream
        self._interval_ms = membership.heartbeat_interval_ms
        self._membership = membership
        self._due = threading.Event()
        self._stopped = False

    def beat_now(self) -> None:
        self._due.set()

    def stop(self) -> None:
        self._stopped = True
        self._due.set()

    def work(self) -> None:
        while self._interval_ms is not None:
            self._due.wait(self._interval_ms / 1000)
            self._due.clear()
            if self._stopped:
                return
            heartbeat = self._membership.heartbeat()
            try:
                self._stream.send(heartbeat)
            except SparkBrokerError as error:
                # The session's own thread sees the same end, and opens the next session.
                logger.info("no heartbeat could be sent: %s", error)
                return
