"""The controller as a server: sessions of brokers, calls, and the commands of the driver."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

from spark_broker.broker.log_format import log_fields
from spark_broker.config import ClusterSettings
from spark_broker.controller.controller import Controller
from spark_broker.controller.effects import (
    CloseSession,
    Effect,
    LaunchNumber,
    Note,
    ProbePort,
    Reply,
    Send,
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
)
from spark_broker.controller.image import MetadataImage
from spark_broker.controller.partition_line import PartitionChanged
from spark_broker.controller.records import MetadataRecord
from spark_broker.controller.topic_config import altered_config
from spark_broker.controller.topics import NewTopicValues, defaults_of
from spark_broker.driver.broker_session import BrokerSession
from spark_broker.driver.controller_loop import ControllerLoop, now_ms, wall_ms
from spark_broker.driver.metadata_claim import Owner
from spark_broker.driver.metadata_log import START_PATIENCE_S, MetadataLog
from spark_broker.driver.metadata_publisher import MetadataPublisher
from spark_broker.driver.port_probe import PORTS_HINT, port_refuses
from spark_broker.driver.topic_schema import check_columns, check_table_columns, stored_schema
from spark_broker.errors import (
    ClusterStartError,
    InvalidRequestError,
    NotControllerError,
    RequestTimedOutError,
    SparkBrokerError,
    invariant,
)
from spark_broker.ports import ANY_PORT, ports_to_try
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    CallRequest,
    CreateTopicRequest,
    EnsureOffsetsTopicRequest,
    EnsureTransactionsTopicRequest,
    HeartbeatRequest,
    Message,
    RegisterBrokerRequest,
)
from spark_broker.protocol.schema import schema_from_bytes
from spark_broker.protocol.wire import error_response
from spark_broker.threads import ready_pool, start
from spark_broker.transport.answer_room import expect_small_answer
from spark_broker.transport.server import Server
from spark_broker.transport.server_stream import ServerStream

logger = logging.getLogger(__name__)

SESSION_STREAM = "session"
MAX_PROBES = 8
CLOSE_TIMEOUT_S = 5.0
OUTAGE_PATIENCE_S = 1.0
"""How long a call waits while the metadata store fails. Its sender then gets the reason, and asks again."""

Result = Message | LaunchNumber | StoppedBrokers


class ControllerService:
    """A controller that serves from `start` on. `on_failure` is called once, when it cannot go on, to end the process.

    `log` has been replayed and checked (`check_cluster_id`); this controller takes it over under a higher epoch.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        log: MetadataLog,
        on_failure: Callable[[BaseException], None],
        *,
        shared_executor: bool = False,
        log_dirs: str = "",
    ) -> None:
        self._settings = settings
        self._log_dirs = log_dirs
        self._log = log
        self._on_failure = on_failure
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._calls: dict[int, Future[Result]] = {}
        self._sessions: dict[int, BrokerSession] = {}
        self._publisher = MetadataPublisher(lambda: log.image, self._send)  # only the loop's thread uses it
        self._probes = ready_pool(MAX_PROBES, "probe")  # the loop hands probes in, and must not meet a limit there
        self._controller = Controller(log.image, settings, shared_executor=shared_executor)
        self._loop = ControllerLoop(self._controller, log, self, self._fail)
        self._server: Server | None = None

    def start(self, host: str, port: int, owner: Owner, *, accept_older_metadata: bool = False) -> None:
        """Take over the metadata log for this owner, and serve. Raises StaleControllerEpochError, MetadataStoreError,
        NoThreadError or, when the address cannot be bound, ClusterStartError."""
        started = ControllerStarted(
            self._log.writer, uuid.uuid4().hex, owner.host, owner.pid, owner.since_ms, accept_older_metadata
        )
        self._loop.step([started], patience_s=START_PATIENCE_S)
        self._server = self._serve(host, port)
        start(self._loop)

    def _serve(self, host: str, port: int) -> Server:
        """`port`: where an earlier process of this controller served. Brokers look for it there; no other will do."""
        allowed = self._settings.cluster.driver_ports
        why: Exception | None = None
        for candidate in [port] if port != ANY_PORT else ports_to_try(allowed):
            try:
                return Server(host, candidate, self._call, {SESSION_STREAM: self._session}, self._fail)
            except OSError as error:
                why = error
        where = f"{host}:{port}" if port != ANY_PORT else f"{host}, driver.ports = {allowed or 'any'}"
        raise ClusterStartError(f"the controller cannot serve on {where}: {why}", hint=PORTS_HINT) from why

    @property
    def port(self) -> int:
        invariant(self._server is not None, "the controller does not serve yet")
        return int(self._server.port) if self._server is not None else -1

    @property
    def image(self) -> MetadataImage:
        """What is committed."""
        return self._log.image

    def close(self) -> None:
        """Stop deciding. The server cannot be shut down in order (see `transport.server`): end the process."""
        self._loop.stop()
        if self._loop.is_alive():
            self._loop.join(CLOSE_TIMEOUT_S)  # it may still hand out probes
        self._fail_calls(NotControllerError("the controller is being closed"))
        self._probes.shutdown(wait=False, cancel_futures=True)

    def new_launch(self, timeout_s: float) -> int:
        """The next launch number, committed."""
        result = self._ask(LaunchRequested, timeout_s)
        return result.launch if isinstance(result, LaunchNumber) else -1

    def spark_loss(self, launch: int) -> None:
        """Spark reports the loss of this launch."""
        self._loop.submit(SparkLost(launch))

    def stop_brokers(self, launch: int | None, timeout_s: float) -> tuple[int, ...]:
        """Controlled shutdown of one launch, or of all brokers (None); returns the ids of brokers that have left.

        Raises RequestTimedOutError.
        """
        result = self._ask(lambda call_id: StopRequested(call_id, launch), timeout_s, patience_s=timeout_s)
        return result.broker_ids if isinstance(result, StoppedBrokers) else ()

    def _call(self, request: CallRequest) -> Message:
        # A broker's session has the same connection: behind a call that waits for room, no heartbeat would be read.
        expect_small_answer()
        new_topic = self._new_topic(request)
        timeout_s = self._settings.cluster.request_timeout_ms / 1000
        result = self._ask(lambda call_id: CallReceived(call_id, request, new_topic), timeout_s)
        invariant(isinstance(result, Message), f"a call was answered with {type(result).__name__}")
        return result if isinstance(result, Message) else error_response(InvalidRequestError())

    def _new_topic(self, request: CallRequest) -> NewTopicValues | None:
        match request:
            case CreateTopicRequest():
                config = {**self._settings.topic.to_dict(), **request.config}
                return NewTopicValues(uuid.uuid4().hex, stored_schema(request.schema, config))
            case EnsureOffsetsTopicRequest() | EnsureTransactionsTopicRequest():
                return NewTopicValues(uuid.uuid4().hex, stored_schema(b"", {}))
            case AlterTopicConfigRequest():
                self._check_columns(request)
        return None

    def _check_columns(self, request: AlterTopicConfigRequest) -> None:
        topic = self.image.topic(request.name)
        if topic is not None:
            defaults = defaults_of(self._settings, topic.name, internal=topic.internal)
            config = altered_config(defaults, topic.config, request.values)
            schema = schema_from_bytes(topic.schemas[-1])
            check_columns(schema, config)
            if request.values.get("delta.path"):
                check_table_columns(schema)

    def _ask(
        self, make_event: Callable[[int], Event], timeout_s: float, *, patience_s: float = OUTAGE_PATIENCE_S
    ) -> Result:
        """Submit the event of a call and wait for its reply, at most `patience_s` while the metadata store fails.

        Raises the reply's error, or RequestTimedOutError.
        """
        call_id = next(self._ids)
        future: Future[Result] = Future()
        with self._lock:
            if self._failure is not None:
                raise NotControllerError(f"the controller failed: {self._failure}")
            self._calls[call_id] = future
        try:
            self._loop.submit(make_event(call_id))
            return self._await(future, timeout_s, patience_s)
        finally:
            with self._lock:
                self._calls.pop(call_id, None)

    def _await(self, future: Future[Result], timeout_s: float, patience_s: float) -> Result:
        began = time.monotonic()
        while True:
            waited_s = time.monotonic() - began
            trouble = self._log.health.trouble
            if trouble and waited_s >= patience_s:
                raise RequestTimedOutError(f"nothing is decided while the metadata store fails: {trouble}")
            if waited_s >= timeout_s:
                raise RequestTimedOutError(f"the controller did not decide within {timeout_s} s")
            with contextlib.suppress(FutureTimeoutError):
                return future.result(min(timeout_s - waited_s, OUTAGE_PATIENCE_S))

    def _session(self, stream: ServerStream) -> None:
        received = stream.receive()
        if received is None:
            return
        if not isinstance(received[0], RegisterBrokerRequest):
            raise InvalidRequestError("a session begins with RegisterBroker")
        self._check_directory(received[0])
        session = BrokerSession(next(self._ids), stream, self._fail)
        with self._lock:
            self._sessions[session.session_id] = session
        try:
            self._loop.submit(BrokerRegisters(session.session_id, received[0], wall_ms()))
            connected = self._listen(session, stream)
        finally:
            with self._lock:
                self._sessions.pop(session.session_id, None)
            session.close()
            self._loop.submit(SessionEnded(session.session_id))
        if connected:
            # The stream ends with this method. Before that the broker has to read why its session was closed.
            session.wait_sent(CLOSE_TIMEOUT_S)

    def _check_directory(self, request: RegisterBrokerRequest) -> None:
        """Readers on the broker's machine open what is in its directory: no process may name another one."""
        where = Path(request.directory).parent
        if self._log_dirs and request.directory and where != Path(self._log_dirs):
            raise InvalidRequestError(f"{request.directory!r} is not in log.dirs, {self._log_dirs}")

    def _listen(self, session: BrokerSession, stream: ServerStream) -> bool:
        """Take heartbeats until the session ends. Returns whether the broker is still connected."""
        while not session.closed:
            received = stream.receive()
            if received is None:
                return False
            if not isinstance(received[0], HeartbeatRequest):
                raise InvalidRequestError(f"{type(received[0]).__name__} does not belong on a session")
            self._loop.submit(HeartbeatReceived(session.session_id, received[0], now_ms(), wall_ms()))
        return True

    def publish(self, first_offset: int, records: Sequence[MetadataRecord]) -> None:
        """Send committed records to every broker that has what comes before them."""
        self._publisher.publish(first_offset, records)

    def carry(self, effect: Effect) -> None:
        """Carry one effect out."""
        match effect:
            case Send():
                self._send(effect.session_id, effect.message)
            case Subscribe():
                self._publisher.subscribe(effect.session_id)
            case CloseSession():
                self._close_session(effect.session_id, effect.error)
            case ProbePort():
                self._probes.submit(self._probe, effect).add_done_callback(self._probed)
            case Reply():
                self._reply(effect)
            case Note() | PartitionChanged():
                level = logging.INFO if effect.expected else logging.WARNING
                if logger.isEnabledFor(level):
                    log_fields(logger, level, effect.text, effect.fields)

    def _send(self, session_id: int, message: Message) -> bool:
        """Send the message. False: the session is over."""
        session = self._sessions.get(session_id)
        if session is None or session.closed:
            return False
        session.send(message)
        return True

    def _close_session(self, session_id: int, error: SparkBrokerError) -> None:
        self._publisher.unsubscribe(session_id)
        session = self._sessions.get(session_id)
        if session is not None:
            logger.info("session %d is closed: %s", session_id, error)
            session.close(error_response(error))

    def _probe(self, effect: ProbePort) -> None:
        refused = port_refuses(effect.host, effect.port)
        self._loop.submit(PortProbed(effect.broker_id, effect.session_id, refused))

    def _probed(self, probe: Future[None]) -> None:
        """A probe that has failed leaves the controller waiting for its result: the controller ends."""
        if not probe.cancelled() and (error := probe.exception()) is not None:
            self._fail(error)

    def _reply(self, effect: Reply) -> None:
        with self._lock:
            future = self._calls.get(effect.call_id)
        if future is None or future.done():
            return  # its caller has given up, or the controller failed
        if isinstance(effect.result, Exception):
            future.set_exception(effect.result)
        else:
            future.set_result(effect.result)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            first = self._failure is None
            self._failure = self._failure or error
        self._loop.stop()
        try:
            self._fail_calls(NotControllerError(f"the controller failed: {error}"))
        finally:  # Without memory, too: nobody may take this process for one that decides.
            if first:
                self._on_failure(error)

    def _fail_calls(self, error: SparkBrokerError) -> None:
        with self._lock:
            futures: Collection[Future[Result]] = list(self._calls.values())
            self._calls.clear()
        for future in futures:
            if not future.done():
                future.set_exception(error)
