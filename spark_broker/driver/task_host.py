"""One Spark job per broker: one task each, pinned to one executor, submitted from the thread that waits for it.

Not one job with N tasks: a single lost executor uses up that job's retries and takes every broker down.
"""

from __future__ import annotations

import logging
import threading

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import RDD, SparkContext
from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests

from spark_broker.broker.spec import LOST, BrokerOutcome, BrokerSpec
from spark_broker.driver.broker_task import RUN_BROKER, broker_task
from spark_broker.driver.executors import Executor, is_stopped, live_executors, pinned_rdd
from spark_broker.driver.hosts import HostListener

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
"""The controller notices a broken session sooner; this finds executors that came, and those that a SIGSTOP hides."""

CLOSE_TIMEOUT_S = 5


class TaskHost:
    """Runs each broker as a Spark job of its own. `resource`: ask for one `broker` resource per task."""

    shared_executor = False

    def __init__(self, sc: SparkContext, *, resource: bool = False, entry: str = RUN_BROKER) -> None:
        self._sc = sc
        self._entry = entry
        self._profile = _broker_profile() if resource else None
        self._lock = threading.Lock()
        self._executors: list[Executor] = []
        self._running: dict[int, Executor] = {}
        self._gone: set[int] = set()  # running launches whose executor is gone
        self._listener: HostListener | None = None
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watch_executors, name="executors", daemon=True)

    def open(self, listener: HostListener) -> None:
        self._listener = listener
        self._executors = live_executors(self._sc)
        self._watch.start()

    def executors(self) -> list[Executor]:
        with self._lock:
            return list(self._executors)

    def run(self, executor: Executor, spec: BrokerSpec) -> BrokerOutcome:
        with self._lock:
            self._running[spec.launch] = executor
        try:
            self._sc.setJobGroup(_group(spec.launch), f"broker, launch {spec.launch}, on executor {executor.id}", True)
            rdd: RDD[bytes] = pinned_rdd(self._sc, executor, spec.to_json()).mapPartitions(broker_task(self._entry))
            if self._profile is not None:
                rdd = rdd.withResources(self._profile)
            rows = rdd.collect()
        except (Py4JError, OSError, AssertionError, AttributeError) as error:
            # The last two are what pyspark raises once its context is stopped: the JVM behind it is None.
            with self._lock:
                gone = spec.launch in self._gone
            return BrokerOutcome(reason=LOST, error_message="its executor is gone" if gone else _summary(error))
        finally:
            with self._lock:
                del self._running[spec.launch]
                self._gone.discard(spec.launch)
        if len(rows) != 1:
            return BrokerOutcome(reason=LOST, error_message=f"its task returned {len(rows)} rows")
        return BrokerOutcome.from_json(bytes(rows[0]))

    def cancel(self, launch: int) -> None:
        if not self._closed.is_set() and not is_stopped(self._sc):
            self._sc.cancelJobGroup(_group(launch))

    def close(self) -> None:
        with self._lock:
            launches = list(self._running)
        for launch in launches:
            self.cancel(launch)
        self._closed.set()
        if threading.current_thread() is not self._watch:
            self._watch.join(CLOSE_TIMEOUT_S)

    def _watch_executors(self) -> None:
        while not self._closed.wait(WATCH_INTERVAL_S):
            if is_stopped(self._sc):
                break
            try:
                self._update(live_executors(self._sc))
            except (Py4JError, OSError, AssertionError, AttributeError) as error:
                logger.warning("the Spark session does not answer any more: %s", _summary(error))
                break
        if not self._closed.is_set() and self._listener is not None:
            self._listener.session_ended()

    def _update(self, executors: list[Executor]) -> None:
        alive = {e.id for e in executors}
        with self._lock:
            changed = executors != self._executors
            self._executors = executors
            lost = {launch for launch, executor in self._running.items() if executor.id not in alive} - self._gone
            self._gone |= lost
        if self._listener is None:
            return
        for launch in lost:
            self._listener.executor_lost(launch)
            # Where no other executor has a free core, Spark would keep the job waiting to repeat a launch that is over.
            self.cancel(launch)
        if changed:
            self._listener.executors_changed()


def _group(launch: int) -> str:
    return f"spark-broker-launch-{launch}"


def _broker_profile() -> ResourceProfile:
    return ResourceProfileBuilder().require(TaskResourceRequests().cpus(1).resource("broker", 1)).build


def _summary(error: BaseException) -> str:
    """One line of what Spark says; a Java exception's text is a page."""
    if isinstance(error, Py4JJavaError):
        return str(error.java_exception.getMessage() or error.java_exception).splitlines()[0]
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
