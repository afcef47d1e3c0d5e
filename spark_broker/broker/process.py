"""A broker's process: claims a log directory, serves, keeps its session, and ends in order."""

from __future__ import annotations

import logging
import os
import platform
import queue
import sys
import uuid
from pathlib import Path

from spark_broker.broker.answer_budget import AnswerBudget
from spark_broker.broker.append_stream import AppendStream
from spark_broker.broker.broker_calls import BrokerCalls
from spark_broker.broker.coordinator_thread import CoordinatorThread
from spark_broker.broker.custody import LeaveRequest
from spark_broker.broker.executor import ExecutorLog
from spark_broker.broker.fetch_stream import FetchStream
from spark_broker.broker.file_worker import FileWorker
from spark_broker.broker.group_coordinator import GroupCoordinator
from spark_broker.broker.isr_proposals import IsrProposals
from spark_broker.broker.lease import Lease
from spark_broker.broker.log_cleaner import LogCleanerThread
from spark_broker.broker.log_opener import InThreads
from spark_broker.broker.maintenance import Maintenance
from spark_broker.broker.memory import give_back
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_manager import Outward, ReplicaManager
from spark_broker.broker.replica_stream import ReplicaStream
from spark_broker.broker.request_queue import RequestQueue
from spark_broker.broker.service import BrokerService
from spark_broker.broker.session import ControllerSession, SessionEvents
from spark_broker.broker.spec import STOPPED, BrokerSpec
from spark_broker.broker.target_thread import TargetThread
from spark_broker.broker.transaction_service import TransactionService
from spark_broker.config import ClusterConfig, ClusterSettings, TopicConfig
from spark_broker.errors import InvalidConfigError, SparkBrokerError, StorageRefusedError
from spark_broker.ports import ports_to_try
from spark_broker.process_limits import limit_reached
from spark_broker.protocol.messages import PROTOCOL_VERSION, RegisterBrokerRequest, RegisterBrokerResponse
from spark_broker.short_pauses import ShortPauses
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.filesystem import LOCAL
from spark_broker.transport.client import Connection
from spark_broker.transport.server import Server
from spark_broker.transport.server_limits import ServerLimits
from spark_broker.transport.server_stream import ServerStream

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0002
"""One busy Python thread would otherwise hold the others back for 5 ms at a time."""


def run_broker(spec: BrokerSpec, leave: LeaveRequest) -> str:
    """Run a broker until it is stopped or superseded; returns which. Raises the error that ended it otherwise.

    The server is not shut down: the caller ends the process afterwards.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ShortPauses().install()
    settings = ClusterSettings(cluster=ClusterConfig.parse(spec.settings), topic=TopicConfig.parse(spec.topic_defaults))
    directory = LogDirectory.claim(
        Path(spec.log_dirs),
        cluster_id=spec.cluster_id,
        launch=spec.launch,
        superseded=lambda holder: spec.supersedes(holder.launch),
    )
    broker = Broker(spec, settings, directory)
    leave.subscribe(broker.leave)
    return broker.run()


class Broker:
    """Wires the parts of one broker together."""

    def __init__(self, spec: BrokerSpec, settings: ClusterSettings, directory: LogDirectory) -> None:
        self._spec = spec
        self._directory = directory
        self._incarnation, self._earlier = directory.begin_incarnation(uuid.uuid4().hex)
        # Read once: at a later session, this process may have no descriptor left.
        self._start_time = LOCAL.process().start_time
        self._ends: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
        self._lease = Lease()
        self._controller = Connection(spec.controller_host, spec.controller_port)
        timeout_ms = settings.cluster.request_timeout_ms
        self._proposals = IsrProposals(self._controller, timeout_ms, self._on_bug)
        self._files = FileWorker(self._on_bug)
        outward = Outward(
            self._proposals.propose,
            self._on_storage_failure,
            self._on_bug,
            on_quarantine=self._beat_now,
            on_room=self._beat_now,
            on_work=self._files.begin,
        )
        in_threads = InThreads(settings.cluster.num_recovery_threads_per_data_dir)
        self._manager = ReplicaManager(settings, directory, self._lease, outward, map_all=in_threads)
        self._proposals.manager = self._files.manager = self._manager
        self._calls = BrokerCalls(self._manager, self._controller, timeout_ms, self._on_bug)
        self._transactions = TransactionService(self._manager, settings.cluster, self._calls, self._on_bug)
        confirm = self._transactions.confirm
        self._groups = CoordinatorThread("groups", self._on_bug)
        self._targets = TargetThread(self._on_bug)
        coordinator = GroupCoordinator(
            self._manager, settings.cluster, confirm, wake=self._groups.wake, compute=self._targets.compute
        )
        self._groups.coordinator = coordinator
        self._queue, passing_on = (
            RequestQueue(settings.cluster.num_io_threads, settings.cluster.queued_max_requests) for _ in range(2)
        )
        self._service = BrokerService(
            self._manager, coordinator, self._transactions, self._controller, timeout_ms, self._queue, passing_on
        )
        self._maintenance = Maintenance(self._manager, settings.cluster, self._on_bug, give_back)
        self._cleaner = LogCleanerThread(self._manager, settings.cluster, self._on_bug)
        events = SessionEvents(self._on_registered, self._ends.put, self._ends.put, self._on_bug)
        self._session = ControllerSession(self._controller, self._registration, self._manager, self._lease, events)
        self._settings = settings
        self._server = self._serve()

    def _serve(self) -> Server:
        """Serve on the port that the directory remembers, so that a bootstrap list survives a restart; else on another
        one of `broker.ports`.
        """
        cluster = self._settings.cluster
        budget = AnswerBudget(cluster.fetch_answers_max_bytes)
        boot_id = self._directory.fs.boot_id()
        streams = {
            "append": self._serve_appends,
            "fetch": lambda stream: FetchStream(
                self._manager, stream, cluster.fetch_max_bytes, budget, self._queue, boot_id
            ).run(),
            "replica": lambda stream: ReplicaStream(
                self._manager,
                stream,
                cluster.replica_fetch_max_bytes,
                cluster.replica_fetch_response_max_bytes,
                cluster.replica_lag_time_max_ms,
            ).run(),
        }
        host, why = self._spec.host, ""
        for port in ports_to_try(cluster.broker_ports, self._directory.meta.port):
            try:
                return Server(
                    host,
                    port,
                    self._service.answer,
                    streams,
                    self._on_bug,
                    cluster.socket_request_max_bytes,
                    cluster.socket_send_timeout_ms,
                    ServerLimits.of(cluster),
                )
            except OSError as error:
                why = str(error)
                logger.info("port %s is taken: %s", port, error)
        if cluster.broker_ports:
            raise InvalidConfigError(
                f"broker.ports = {cluster.broker_ports}: a broker can serve on none of these ports of {host}: {why}",
                hint="Allow a port for each broker of the machine, and see what listens there (`ss -ltnp`).",
            )
        raise InvalidConfigError(
            f"broker.host: a broker cannot serve on {host}: {why}; is it an address of the executor's machine?"
        )

    def _serve_appends(self, stream: ServerStream) -> None:
        max_waiting = self._settings.cluster.queued_max_requests
        confirm = self._transactions.confirm
        AppendStream(self._manager, stream, max_waiting, confirm=confirm, queue=self._queue).run()

    def leave(self, why: str) -> None:
        """Hand over and stop, as soon as the controller agrees. From any thread."""
        logger.warning("leaving in order: %s", why)
        self._session.request_shutdown()

    def run(self) -> str:
        """Serve until there is a reason to end."""
        self._directory.update(port=self._server.port)
        cleaner = self._cleaner
        coordinators = (self._transactions, self._groups, self._targets)
        threads = (self._proposals, self._maintenance, cleaner, self._files, self._calls, *coordinators)
        for thread in (*threads, self._session):
            thread.start()
        logger.info("serving on %s:%s from %s", self._spec.host, self._server.port, self._directory.path)
        end = self._ends.get()
        manager = self._manager
        why = end if isinstance(end, str) else "it cannot go on"  # `serve` logs the error
        logger.info("broker %s, epoch %s, ends: %s", manager.broker_id, manager.broker_epoch, why)
        self._lease.drop()
        for part in (self._session, *threads):
            part.stop()
        if end == STOPPED:
            self._stop_in_order()
        else:
            self._manager.stop(clean=False)
        self._directory.release()
        if isinstance(end, BaseException):
            raise end
        return end

    def _stop_in_order(self) -> None:
        """Where a log was refused something, the stop is still one, but the next start counts as one after a crash."""
        try:
            self._manager.stop(clean=True)
        except StorageRefusedError as error:
            logger.warning("this end in order leaves no marker: %s", error)
        else:
            self._directory.mark_clean()
        logger.info("broker %s has stopped", self._manager.broker_id)

    def _registration(self) -> RegisterBrokerRequest:
        spec, meta = self._spec, self._directory.meta
        return RegisterBrokerRequest(
            version=PROTOCOL_VERSION,
            cluster_id=meta.cluster_id,
            launch=spec.launch,
            broker_id=meta.broker_id,
            directory_id=meta.directory_id,
            incarnation=self._incarnation,
            start_kind=self._directory.start_kind.value,
            host=spec.host,
            port=self._server.port,
            rack=spec.rack,
            machine=platform.node(),
            executor_id=spec.executor_id,
            executor_pid=spec.executor_pid,
            pid=os.getpid(),
            pid_start_time=self._start_time,
            log=ExecutorLog.of(spec.executor_pid).shown,
            earlier=self._earlier,
            directory=str(self._directory.path),
            seen=self._manager.seen,
        )

    def _on_registered(self, registered: RegisterBrokerResponse) -> None:
        self._directory.registered(registered.broker_id, self._incarnation)
        self._manager.registered(registered.broker_id, registered.broker_epoch)
        fields = {"broker_id": registered.broker_id, "broker_epoch": registered.broker_epoch}
        logger.info("registered as broker %(broker_id)s, epoch %(broker_epoch)s", fields)

    def _on_storage_failure(self, key: PartitionKey | None, error: SparkBrokerError) -> None:
        """Known bug 27: an I/O error stops the broker; its replicas elsewhere take over."""
        topic = None if key is None else self._manager.image.topics.get(key[0])
        name = self._directory.path if key is None or topic is None else f"{topic.name}-{key[1]}"
        logger.error("the disk failed for %s, and this broker ends: %s", name, error)
        self._lease.drop()
        self._ends.put(error)

    def _beat_now(self) -> None:
        """Send a heartbeat at once: until the controller knows, no broker may be serving the partition."""
        self._session.beat_now()

    def _on_bug(self, error: BaseException) -> None:
        self._lease.drop()
        try:
            limit = limit_reached(error)
            if limit is None:
                logger.critical("a bug: %s", error, exc_info=error)
            else:
                logger.critical("this broker ends at a limit of its process: %s", limit, exc_info=error)
        finally:  # Without memory, nothing may be told, but this broker ends.
            self._ends.put(error)
