"""The controller as the cluster sees it: a process that takes commands over a pipe, and answers clients' calls.

A controller whose process was killed, or came to one of its limits, is started again on the same port, under a higher
epoch, and the brokers find it there. A controller that has said why it cannot go on is not started again, and the
cluster ends with it: another driver may have taken over, and the two would depose each other.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Self

import msgspec

from spark_broker.config import ClusterConfig, ClusterSettings
from spark_broker.driver.controller_client import ControllerClient
from spark_broker.driver.controller_pipe import BrokerStatus, ControllerConfig
from spark_broker.driver.directories import Directories, cluster_ids_in
from spark_broker.driver.metadata_claim import end_claim_of
from spark_broker.errors import ClusterInUseError, InvariantError, ProcessLimitError, SparkBrokerError
from spark_broker.protocol.messages import AnnounceTieringRequest, MetadataRequest, MetadataResponse
from spark_broker.threads import BeginAgain, Worker, start
from spark_broker.transport.client import Connection

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.2
RESTART_PAUSE_MAX_S = 5.0
LIMIT_PAUSE_S = 1.0
"""A controller that comes to a limit of its process is asked again after this time."""

LASTED_S = 10.0
"""A controller that ran this long is started again without a pause."""


class ControllerLink:
    """A running controller. Safe for use by many threads."""

    def __init__(self, client: ControllerClient, config: ControllerConfig, settings: ClusterConfig) -> None:
        self._client = client
        # Only the first start may take the directory over. A restart must not: another cluster may have taken it since.
        # Nor may it accept older metadata: what was there at the first start is what the operator has looked at.
        self._config = msgspec.structs.replace(config, port=client.port, take_over=False, accept_older_metadata=False)
        self._on_failure: Callable[[SparkBrokerError], None] = _unwatched
        self._request_timeout_ms = settings.request_timeout_ms
        self._shutdown_timeout_s = settings.controlled_shutdown_timeout_ms / 1000
        self._closed = threading.Event()
        self._lock = threading.Lock()  # held while the process is replaced or closed
        self._watch = Worker("controller-watch", BeginAgain(self._closed.is_set), self._keep)
        # The log may show brokers of an earlier run as live. Whether they are is not known yet.
        brokers = client.status().brokers
        self.earlier_launches = max((broker.launch for broker in brokers), default=-1)
        self._connection = Connection(client.host, client.port)

    @classmethod
    def start(
        cls,
        settings: ClusterSettings,
        directories: Directories,
        *,
        host: str,
        shared_executor: bool,
        take_over: bool = False,
        accept_older_metadata: bool = False,
    ) -> Self:
        """Start the controller's process. Raises the error that kept it from serving: ClusterInUseError (unless
        `take_over`), InconsistentClusterIdError, and others."""
        config = ControllerConfig(
            cluster=settings.cluster.to_dict(),
            topic=settings.topic.given(),
            metadata_dir=directories.metadata_dir,
            host=host,
            known_cluster_ids=cluster_ids_in(directories.log_dirs),
            shared_executor=shared_executor,
            log_level=settings.cluster.controller_log_level,
            run=uuid.uuid4().hex,
            take_over=take_over,
            accept_older_metadata=accept_older_metadata,
            log_dirs=directories.log_dirs,
        )
        client = ControllerClient.start(config)
        try:
            return cls(client, config, settings.cluster)
        except BaseException:  # Ctrl-C, too, must leave neither the process nor its claim.
            client.close()
            raise

    def watch(self, on_failure: Callable[[SparkBrokerError], None]) -> None:
        """Start the controller again when its process ends. Where that cannot help, `on_failure` gets the reason, once.

        Raises NoThreadError.
        """
        self._on_failure = on_failure
        start(self._watch)

    @property
    def host(self) -> str:
        return self._config.host

    @property
    def port(self) -> int:
        return self._config.port

    @property
    def cluster_id(self) -> str:
        return self._client.cluster_id

    @property
    def pid(self) -> int:
        """The pid of the process that serves now."""
        return self._client.pid

    def new_launch(self) -> int:
        """The next launch number, committed in the metadata log."""
        return self._client.new_launch()

    def spark_loss(self, launch: int) -> None:
        """Spark reports that this launch is over: fence its broker, and no other."""
        self._client.spark_loss(launch)

    def stop_broker(self, launch: int) -> None:
        """Controlled shutdown of this launch's broker; returns when it has left."""
        self._client.stop_broker(launch, self._shutdown_timeout_s)

    def live_brokers(self) -> list[BrokerStatus]:
        """The brokers of this run that are live."""
        return [b for b in self._client.status().brokers if not b.fenced and self._is_ours(b.launch)]

    def metadata(self) -> MetadataResponse:
        """The answer to a client's MetadataRequest; brokers of an earlier run that are not back count as fenced."""
        answer = self._connection.call(MetadataRequest(), timeout_ms=self._request_timeout_ms)
        if not isinstance(answer, MetadataResponse):
            raise InvariantError(f"a MetadataRequest was answered with {type(answer).__name__}")
        back = {broker.id for broker in self._client.status().brokers if self._is_ours(broker.launch)}
        brokers = [b if b.id in back else msgspec.structs.replace(b, fenced=True) for b in answer.brokers]
        return msgspec.structs.replace(answer, brokers=brokers)

    def announce_tiering(self, in_ms: Mapping[str, int]) -> None:
        """Say in how many ms the cluster tiers each topic next, by topic id."""
        self._connection.call(AnnounceTieringRequest(dict(in_ms)), timeout_ms=self._request_timeout_ms)

    def stop_brokers(self, timeout_s: float) -> None:
        """Controlled shutdown of every broker. An error is only logged: the launcher ends the rest by force."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                self._client.stop_brokers(max(until_s - time.monotonic(), 0))
                return
            except ProcessLimitError as error:
                if time.monotonic() > until_s or self._closed.wait(LIMIT_PAUSE_S):
                    logger.warning("the controlled shutdown did not begin: %s", error)
                    return
            except SparkBrokerError as error:
                logger.warning("the controlled shutdown did not end in order: %s", error)
                return

    def close(self) -> None:
        """End the process."""
        self._closed.set()
        with self._lock:
            self._client.close()
        end_claim_of(self._config.metadata_dir, self._config.run)
        self._connection.close()

    def _keep(self) -> None:
        pause_s, began_s = WATCH_INTERVAL_S, time.monotonic()
        while not self._closed.wait(pause_s):
            if self._client.alive:
                if time.monotonic() - began_s >= LASTED_S:
                    pause_s = WATCH_INTERVAL_S
                continue
            failure = self._client.failure or self._restart()
            if failure is not None and not self._closed.is_set():
                self._on_failure(failure)
                return
            pause_s, began_s = min(2 * pause_s, RESTART_PAUSE_MAX_S), time.monotonic()

    def _restart(self) -> SparkBrokerError | None:
        """Start an ended controller again; the next call repeats a failed start. Returns an error that is final."""
        logger.warning(
            "the controller's process, pid %d, ended and is started again: %s", self._client.pid, self._client.end
        )
        with self._lock:
            if self._closed.is_set():
                return None
            killed = self._client
            try:
                # Its log directories carry the cluster's id by now: a lost metadata log must not become a new cluster.
                config = msgspec.structs.replace(self._config, known_cluster_ids=[killed.cluster_id])
                self._client = ControllerClient.start(config)
            except ClusterInUseError as error:
                return error
            except SparkBrokerError as error:
                logger.warning("the controller did not start: %s", error)
                return None
            killed.close()
            return None

    def _is_ours(self, launch: int) -> bool:
        return launch > self.earlier_launches


def _unwatched(failure: SparkBrokerError) -> None:
    """Log a failure that comes before `watch`."""
    logger.error("the controller has ended: %s", failure)
