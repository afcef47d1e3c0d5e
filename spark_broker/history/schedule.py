"""The cluster's own schedule for tiering: the code of `jobs/tier.py`, on a thread of the driver, in its session.

It takes the task slots that brokers leave to queries. A user's own runs of the job do no harm to it, nor it to them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from spark_broker.client.metadata import ClusterMetadata
from spark_broker.config import AdminConfig
from spark_broker.driver.executors import is_stopped
from spark_broker.errors import MissingDependencyError, SparkBrokerError
from spark_broker.history.attempt import TieredTopic
from spark_broker.history.tierer import Tierer, report_tiering
from spark_broker.protocol.messages import MetadataResponse, TopicMetadata
from spark_broker.spark.delta_session import check_delta
from spark_broker.threads import BeginAgain, Worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 20.0
CANCEL_INTERVAL_S = 0.5

ROUND_FAILURES = (SparkBrokerError, PySparkException, Py4JError, OSError)
"""What a round may meet: the next one tries again."""


class TieringSchedule:
    """Tiers each topic that has a `delta.path`, one after the other, `interval_ms` after the last round has ended.

    `metadata` asks the controller which topics there are; `bootstrap_servers` gives brokers that are live now.
    """

    def __init__(
        self,
        spark: SparkSession,
        interval_ms: int,
        metadata: Callable[[], MetadataResponse],
        bootstrap_servers: Callable[[], str],
    ) -> None:
        self._spark = spark
        self._interval_s = interval_ms / 1000
        self._cluster_metadata = metadata
        self._bootstrap_servers = bootstrap_servers
        self._tag = f"spark-broker-tiering-{id(self)}"
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._client: ClusterMetadata | None = None  # of the round that runs; guarded by the lock
        # What was logged last of a topic whose runs fail; under the empty name: of all topics.
        self._said: dict[str, str] = {}
        self._thread = Worker("tiering", BeginAgain(self._stopping.is_set), self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the run that is under way, and wait for its end. A commit of it counts, and is found by the next run."""
        self._stopping.set()
        with self._lock:
            if self._client is not None:
                self._client.close()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        sc = self._spark.sparkContext
        while self._thread.is_alive() and time.monotonic() < deadline:
            # Again and again: the run may be about to submit its next job.
            if not is_stopped(sc):
                sc.cancelJobsWithTag(self._tag)
            self._thread.join(CANCEL_INTERVAL_S)
        if self._thread.is_alive():
            logger.warning(
                "a run of tiering has not ended after %.0f s; it ends with its Spark session", STOP_TIMEOUT_S
            )

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._round()
            except ROUND_FAILURES as error:
                if self._is_ending():
                    return
                self._say("", f"a round of tiering failed: {error}")
            except (AssertionError, AttributeError):
                if not self._is_ending():  # A stopped context raises them, because its JVM is None.
                    raise
                return

    def _is_ending(self) -> bool:
        return self._stopping.is_set() or is_stopped(self._spark.sparkContext)

    def _round(self) -> None:
        topics = [t for t in self._cluster_metadata().topics if t.config.get("delta.path")]
        if not topics:
            return
        with self._lock:
            if self._stopping.is_set():
                return
            config = AdminConfig.parse({"bootstrap.servers": self._bootstrap_servers()})
            client = self._client = ClusterMetadata.connect(config)
        try:
            missing = self._missing()
            for topic in topics:
                if self._stopping.is_set():
                    return
                if missing is None:
                    self._tier(client, config, topic.name)
                else:
                    self._report(client, config, topic, missing)
        finally:
            client.close()
            with self._lock:
                self._client = None

    def _missing(self) -> str | None:
        """What this session lacks of Delta. It is said once."""
        try:
            check_delta(self._spark)
        except MissingDependencyError as error:
            text = f"the cluster's own schedule cannot tier: {error.message}"
            self._say("", f"{text}. {error.hint}")
            return text
        return None

    def _tier(self, client: ClusterMetadata, config: AdminConfig, name: str) -> None:
        """One run for this topic. What stops it is in the topic's description, and is logged when it changes."""
        sc = self._spark.sparkContext
        sc.addJobTag(self._tag)
        sc.setJobDescription(f"tiering of {name}")
        began = time.monotonic()
        try:
            tiered = Tierer(self._spark, client, config, include_active_segments=False).run(name)
        except SparkBrokerError as error:
            if not self._is_ending():
                self._say(name, f"tiering of {name} did not succeed: {error}")
        else:
            self._succeeded(tiered, time.monotonic() - began)

    def _succeeded(self, tiered: TieredTopic, took_s: float) -> None:
        if self._said.pop(tiered.topic, None):
            logger.warning("tiering of %s goes on", tiered.topic)
        if tiered.table_version is not None:
            logger.info(
                "tiered %d records of %s into %s, version %d, in %.1f s",
                *(tiered.records, tiered.topic, tiered.path, tiered.table_version, took_s),
            )

    def _report(self, client: ClusterMetadata, config: AdminConfig, topic: TopicMetadata, stopped: str) -> None:
        """Show it in the description of a topic that nobody has tiered. Others have a job, which reports for itself."""
        history = topic.history
        if history is not None and (history.version >= 0 or history.stopped == stopped):
            return
        report_tiering(client, config, topic.name, topic.topic_id, stopped)

    def _say(self, name: str, text: str) -> None:
        if self._said.get(name) != text:
            self._said[name] = text
            logger.warning("%s", text)
