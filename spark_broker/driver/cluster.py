"""A cluster in the user's own Spark session: the controller in a child process, brokers on the executors."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from spark_broker.addresses import address_text, without_brackets
from spark_broker.broker.spec import BrokerSpec, new_secret
from spark_broker.config import ClusterSettings, load_cluster_settings
from spark_broker.driver.controller_link import ControllerLink
from spark_broker.driver.controller_pipe import BrokerStatus
from spark_broker.driver.directories import Directories, choose_directories, lasting_metadata_dir
from spark_broker.driver.executors import Executor, is_stopped
from spark_broker.driver.hosts import BrokerHost
from spark_broker.driver.keeper_host import KeeperHost
from spark_broker.driver.launcher import BrokerLauncher
from spark_broker.driver.master import is_local, is_loopback
from spark_broker.driver.replication import with_default_replication
from spark_broker.driver.room import check_resource, check_settings_for_room, check_slots, wait_for_executors
from spark_broker.driver.session import LOOPBACK, check_session
from spark_broker.driver.view import ClusterStatus, cluster_status, to_html
from spark_broker.errors import ClosedError, ClusterStartError, SparkBrokerError, UnknownServerError
from spark_broker.left_open import close_left
from spark_broker.model import ClusterDescription
from spark_broker.process_limits import limit_reached
from spark_broker.threads import begin
from spark_broker.transport.origin import Origin

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from spark_broker.history.schedule import TieringSchedule

logger = logging.getLogger(__name__)

POLL_S = 0.1

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Is called during a start with what is awaited ("executors" or "brokers"), how many there are, and how many are
needed."""

LogConfig = Mapping[str, object] | str | Path | None

_started: weakref.WeakSet[BrokerCluster] = weakref.WeakSet()
"""Clusters of this process, some of which have stopped."""


class BrokerCluster:
    """A running cluster. Make one with `BrokerCluster.start`; it is a context manager. Safe for use by many threads."""

    def __init__(
        self,
        spark: SparkSession,
        settings: ClusterSettings,
        directories: Directories,
        controller: ControllerLink,
        host: BrokerHost,
    ) -> None:
        self._origin = Origin()
        self._spark = spark
        self._settings = settings
        self._directories = directories
        self._controller = controller
        self._lock = threading.Lock()
        self._stopped = False
        self._failure: SparkBrokerError | None = None
        self._launcher = BrokerLauncher(host, controller, self._spec, self._abandon)
        self._tiering: TieringSchedule | None = None
        controller.watch(self._controller_failed)
        atexit.register(self._at_exit)

    @classmethod
    def start(
        cls,
        spark: SparkSession,
        brokers: int = 3,
        config: LogConfig = None,
        *,
        take_over: bool = False,
        accept_older_metadata: bool = False,
        on_progress: Progress | None = None,
    ) -> Self:
        """Start `brokers` brokers on the session's executors and wait until all of them are live.

        `config` is a TOML file or a mapping of dotted names. `take_over`: start even if another live cluster uses the
        directories, and end that one. `accept_older_metadata`: start even if metadata.dir lacks what brokers have seen;
        then all replicas are compared, and what the metadata does not know is set aside. Raises UnsupportedSparkError
        where the session cannot host brokers, ClusterStartError where there are too few executors or brokers do not
        come up in time, InvalidConfigError, ClusterInUseError, OlderMetadataError, and InconsistentClusterIdError where
        the directories are another cluster's.
        """
        check_session(spark)
        settings = load_cluster_settings(config)
        sc = spark.sparkContext
        check_settings_for_room(sc, brokers, _slots_taken(sc, lasting_metadata_dir(settings.cluster)))
        check_resource(sc, settings.cluster)
        if is_local(sc.master):
            logger.warning("%s has one executor: all %d brokers share it and fail together with it", sc.master, brokers)
        settings = with_default_replication(settings, brokers, shared_executor=is_local(sc.master))
        cluster = cls._open(spark, settings, take_over=take_over, accept_older_metadata=accept_older_metadata)
        try:
            cluster._launch(brokers, on_progress or _silent)
            cluster._begin_tiering()
        except BaseException:
            cluster._end(timeout_s=0.0)
            raise
        _started.add(cluster)
        return cluster

    @classmethod
    def running(cls) -> list[BrokerCluster]:
        """The clusters that this process has started and not stopped."""
        return [cluster for cluster in _started if not cluster.stopped]

    @classmethod
    def _open(
        cls, spark: SparkSession, settings: ClusterSettings, *, take_over: bool, accept_older_metadata: bool
    ) -> Self:
        sc = spark.sparkContext
        address = _driver_address(spark, settings)
        with ExitStack() as undo:
            directories = choose_directories(settings.cluster, sc.applicationId)
            undo.callback(directories.remove_temporary)
            controller = ControllerLink.start(
                settings,
                directories,
                host=address,
                shared_executor=is_local(sc.master),
                take_over=take_over,
                accept_older_metadata=accept_older_metadata,
            )
            undo.callback(controller.close)
            host = KeeperHost(
                sc,
                address,
                resource=settings.cluster.broker_executor_resource,
                driver_ports=settings.cluster.driver_ports,
            )
            undo.callback(host.close)
            cluster = cls(spark, settings, directories, controller, host)
            undo.pop_all()
        return cluster

    def _launch(self, brokers: int, on_progress: Progress) -> None:
        deadline = time.monotonic() + self._settings.cluster.broker_start_timeout_ms / 1000
        sc = self._spark.sparkContext
        taken = _slots_taken(sc, self.metadata_dir)
        wait_for_executors(self._launcher, sc, brokers, deadline, on_progress, taken=taken)
        for _ in range(brokers):
            self._launcher.add_slot()
        self._wait_live(
            lambda live: len(live) >= brokers,
            deadline,
            lambda live: on_progress("brokers", min(live, brokers), brokers),
        )

    def _begin_tiering(self) -> None:
        interval_ms = self._settings.cluster.tiering_interval_ms
        if interval_ms < 0:
            return
        # The history is a layer above: it reads and writes through clients. This is the one place that knows both.
        from spark_broker.history.schedule import TieringSchedule

        self._tiering = TieringSchedule(
            self._spark,
            interval_ms,
            self._controller.metadata,
            lambda: self.bootstrap_servers,
            self._controller.announce_tiering,
        )
        self._tiering.start()

    # What is running.

    @property
    def bootstrap_servers(self) -> str:
        """`host:port,host:port`: the live brokers, any one of which is enough for a client."""
        self._check_open()
        return ",".join(address_text(broker.host, broker.port) for broker in self._controller.live_brokers())

    @property
    def cluster_id(self) -> str:
        return self._controller.cluster_id

    @property
    def log_dirs(self) -> str:
        """The directory under which each broker keeps its own log directory."""
        return self._directories.log_dirs

    @property
    def metadata_dir(self) -> str:
        """The directory, or URL, of the metadata log."""
        return self._directories.metadata_dir

    @property
    def stopped(self) -> bool:
        """Whether the cluster has ended: by `stop`, with its Spark session, or by itself (`failure`)."""
        return self._stopped

    @property
    def failure(self) -> SparkBrokerError | None:
        """Why the cluster ended by itself, such as StaleControllerEpochError where another driver took over."""
        return self._failure

    def describe(self) -> ClusterDescription:
        """The cluster as its controller sees it, like `Admin.describe_cluster`. Raises ClosedError once stopped."""
        self._check_open()
        return self._controller.metadata().to_description(include_fenced=True)

    def status(self) -> ClusterStatus:
        """Brokers with what they lead, partitions without a leader or with too few replicas, and recent failures."""
        self._check_open()
        failures = tuple(str(failure) for failure in self._launcher.failures())
        return cluster_status(self._controller.metadata(), self._directories, failures)

    def add_broker(self) -> int:
        """Start one more broker on a free executor, wait until it is live, and return its id.

        Raises ClusterStartError where no executor is free or the broker does not come up in time, UnsupportedSparkError
        where it would take the last slot, and NoThreadError. After an error the cluster does not go on trying.
        """
        self._check_open()
        if self._launcher.free_executors() == 0:
            raise ClusterStartError("no executor is free: every one has a broker; give the Spark application one more")
        if self._launcher.needs_executors:
            sc = self._spark.sparkContext
            cores = [executor.cores for executor in self._launcher.executors()]
            check_slots(sc, cores, len(self._launcher.running()) + 1, _slots_taken(sc, self.metadata_dir))
        deadline = time.monotonic() + self._settings.cluster.broker_start_timeout_ms / 1000
        slot = self._launcher.add_slot()
        try:
            return self._wait_live(lambda live: self._ids_in(slot, live), deadline, slot=slot)[0]
        except BaseException:  # Ctrl-C, too. Whoever calls again would otherwise get two brokers.
            self._launcher.give_up(slot)
            raise

    def _ids_in(self, slot: int, live: list[BrokerStatus]) -> list[int]:
        launches = {placement.launch for placement in self._launcher.running() if placement.slot == slot}
        return [broker.id for broker in live if broker.launch in launches]

    def _wait_live(
        self,
        find: Callable[[list[BrokerStatus]], T],
        deadline: float,
        tell: Callable[[int], None] = lambda _: None,
        slot: int | None = None,
    ) -> T:
        """Wait until `find` finds something among the live brokers; returns it. `slot`: only this one is awaited."""
        pause = threading.Event()
        while True:
            live = self._controller.live_brokers()
            tell(len(live))
            if result := find(live):
                return result
            failure = self._launcher.fatal(slot)
            if failure is not None:
                raise failure
            if self._launcher.session_over:
                raise ClusterStartError("the Spark session ended while brokers started")
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                who = f"{len(live)} brokers are" if slot is None else "the broker is not"
                raise ClusterStartError(f"{who} live after broker.start.timeout.ms{self._why(slot)}")
            pause.wait(POLL_S)

    def _why(self, slot: int | None) -> str:
        failures = self._launcher.failures(slot)
        last = str(failures[-1]) if failures else self._launcher.trouble
        return f"; the last failure was: {last}" if last else "; none has failed, they are slow or wait"

    # The end.

    def stop(self) -> None:
        """Stop in order: brokers hand over, sync and leave; then the controller ends. Does nothing the second time."""
        self._end(self._settings.cluster.controlled_shutdown_timeout_ms / 1000)

    def _end(self, timeout_s: float) -> None:
        if self._origin.is_elsewhere:
            return  # A child of the driver ends: the cluster is its parent's.
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        _do_all(
            (
                self._end_tiering,
                self._launcher.begin_stop,
                lambda: self._ask_brokers_to_leave(timeout_s),
                lambda: self._end_brokers(timeout_s),
                self._controller.close,
                self._directories.remove_temporary,
            )
        )

    def _end_tiering(self) -> None:
        if self._tiering is not None:
            self._tiering.stop()

    def _ask_brokers_to_leave(self, timeout_s: float) -> None:
        # The executors of a session that has ended are gone, except that of `local[N]`, which is this process's JVM.
        if timeout_s > 0 and not (self._launcher.session_over and self._launcher.needs_executors):
            self._controller.stop_brokers(timeout_s)

    def _end_brokers(self, timeout_s: float) -> None:
        session_over = self._launcher.session_over
        # Once the session has ended, no keeper is left that could report the brokers' ends.
        if not self._launcher.stop(0.0 if session_over else timeout_s) and timeout_s > 0 and not session_over:
            logger.warning("brokers did not leave within controlled.shutdown.timeout.ms and were ended by force")

    def _at_exit(self) -> None:
        """Stop the cluster, and the session with it, when the driver's Python ends without `stop`. The ending JVM would
        otherwise start executors, with a flood of errors."""
        if not self._origin.is_elsewhere:
            _do_all((close_left, self.stop, self._end_session))

    def _end_session(self) -> None:
        if not is_stopped(self._spark.sparkContext):
            self._spark.stop()

    def _abandon(self) -> None:
        """The Spark session has ended, and its executors with it."""
        if not self._stopped:
            logger.warning("the Spark session has ended, and the cluster with it; stop the cluster before the session")
            timeout_s = self._settings.cluster.controlled_shutdown_timeout_ms / 1000
            begin("cluster-end", self._end_failed, lambda: self._end(timeout_s))

    def _controller_failed(self, error: SparkBrokerError) -> None:
        """End the cluster: its controller was deposed, or has a bug. If it were started again, two controllers would
        depose each other for ever."""
        logger.error("the cluster ends: its controller cannot go on: %s", error)
        self._failure = error
        begin("cluster-end", self._end_failed, lambda: self._end(0.0))

    def _end_failed(self, error: BaseException) -> None:
        """Whoever uses the cluster next is told. What is left ends with the session, and with this process."""
        self._failure = limit_reached(error) or UnknownServerError(f"the cluster's end failed: {error!r}")

    def _check_open(self) -> None:
        if self._stopped:
            raise ClosedError(f"the cluster has ended: {self._failure}" if self._failure else "the cluster is stopped")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else self.bootstrap_servers
        return f"<BrokerCluster {self.cluster_id}: {state}>"

    def _repr_html_(self) -> str:
        return "<p>a stopped spark-broker cluster</p>" if self._stopped else to_html(self.status())

    def _spec(self, launch: int, executor: Executor) -> BrokerSpec:
        cluster = self._settings.cluster
        alone = is_loopback(self._spark.sparkContext.master)
        return BrokerSpec(
            cluster_id=self.cluster_id,
            controller_host=self._controller.host,
            controller_port=self._controller.port,
            launch=launch,
            log_dirs=self.log_dirs,
            host=without_brackets(cluster.broker_host) or (LOOPBACK if alone else executor.host),
            rack=cluster.broker_rack or None,
            executor_id=executor.id,
            settings={
                **cluster.to_dict(),
                "log.level": cluster.broker_log_level(shares_terminal=is_local(self._spark.sparkContext.master)),
            },
            topic_defaults=self._settings.topic.to_dict(),
            secret=new_secret(),
            earlier_launches=self._controller.earlier_launches,
        )


def _do_all(steps: Iterable[Callable[[], object]]) -> None:
    """Do each step, even if one before it has failed. Raises the first error at the end; later ones are logged."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # Ctrl-C, too, must not leave the process of the controller behind.
            if first is None:
                first = error
            else:
                logger.error("the cluster's end failed once more: %s", error, exc_info=error)
    if first is not None:
        raise first


def _slots_taken(sc: SparkContext, metadata_dir: str | None) -> int:
    """Task slots that the session's other clusters take.

    Without that on the same metadata: the start is refused for its sake, or takes it over.
    """
    others = [cluster for cluster in BrokerCluster.running() if cluster.metadata_dir != metadata_dir]
    return sum(cluster._launcher.task_slots for cluster in others if cluster._spark.sparkContext is sc)


def _driver_address(spark: SparkSession, settings: ClusterSettings) -> str:
    """The address on which the controller and the keepers' host listen: the one at which executors find the driver."""
    sc = spark.sparkContext
    if is_loopback(sc.master):
        return LOOPBACK
    # Spark takes an address of IPv6 in brackets only.
    return without_brackets(settings.cluster.broker_host or sc.getConf().get("spark.driver.host") or LOOPBACK)


def _silent(what: str, ready: int, needed: int) -> None:
    """Ignore the progress."""
