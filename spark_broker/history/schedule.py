"""The cluster's own schedule for tiering: the code of `jobs/tier.py`, on a thread of the driver, in its session.

A topic reaches its table by time (`timetable.py`): a run takes all that is committed, unless the topic says that only
sealed segments go. It takes the task slots that brokers leave to queries. A user's own runs of the job do no harm to
it, nor it to them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import all_at, try_lookup_offsets
from spark_broker.client.retry import Deadline
from spark_broker.config import AdminConfig, TopicConfig
from spark_broker.driver.executors import is_stopped, says_that_it_is_stopped
from spark_broker.errors import MissingDependencyError, SparkBrokerError
from spark_broker.history.attempt import TieredTopic
from spark_broker.history.tierer import Tierer, report_tiering
from spark_broker.history.timetable import RunKind, Timetable
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import MetadataResponse, TopicMetadata
from spark_broker.spark.delta_session import check_delta
from spark_broker.threads import BeginAgain, Worker, start
from spark_broker.times import LATEST

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_SETTINGS = ("delta.path", "delta.commit.interval.ms")

STOP_TIMEOUT_S = 20.0
CANCEL_INTERVAL_S = 0.5

ROUND_FAILURES = (SparkBrokerError, PySparkException, Py4JError, OSError)
"""What a round may meet: the next one tries again."""

PAUSE_MS, FAILED_PAUSE_MS = 100, 1000
"""The shortest pauses between two rounds, and after one that failed."""

LEADERLESS_MS = 3000
"""How long a topic's run waits for a leader that a partition does not have: the tables of other topics wait, too."""

LOOK_INTERVAL_MS = 5000
"""How often the schedule looks which topics there are."""


class TieringSchedule:
    """Tiers each topic that has a `delta.path`, one after the other, when it is due.

    `interval_ms`: `tiering.interval.ms`. `metadata` asks the controller which topics there are; `bootstrap_servers`
    gives brokers that are live now; `announce` tells the controller in how many ms each topic's next run comes, by id.
    """

    def __init__(
        self,
        spark: SparkSession,
        interval_ms: int,
        metadata: Callable[[], MetadataResponse],
        bootstrap_servers: Callable[[], str],
        announce: Callable[[Mapping[str, int]], None],
    ) -> None:
        self._spark = spark
        self._timetable = Timetable(interval_ms)
        self._cluster_metadata = metadata
        self._bootstrap_servers = bootstrap_servers
        self._announce = announce
        self._tag = f"spark-broker-tiering-{id(self)}"
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._client: ClusterMetadata | None = None  # of the round that runs; guarded by the lock
        # What was logged last of a topic whose runs fail; under the empty name: of all topics.
        self._said: dict[str, str] = {}
        self._has_tables = False  # whether any topic had one at the last look
        self._thread = Worker("tiering", BeginAgain(self._stopping.is_set), self._run)

    def start(self) -> None:
        """Raises NoThreadError."""
        start(self._thread)

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
        pause_ms = 0  # Nothing may be due, or fail, so often that this thread and the controller do nothing else.
        while not self._stopping.wait(max(pause_ms, self._timetable.wait_ms(_now_ms(), LOOK_INTERVAL_MS)) / 1000):
            pause_ms = PAUSE_MS
            try:
                self._round()
            except ROUND_FAILURES as error:
                pause_ms = FAILED_PAUSE_MS
                if self._is_ending():
                    return
                if self._has_tables:  # Others need not hear that the controller was away.
                    self._say("", f"a round of tiering failed: {error}")
            except (AssertionError, AttributeError):
                if not self._is_ending():  # A stopped context raises them, because its JVM is None.
                    raise
                return

    def _is_ending(self) -> bool:
        """A session that does not answer may do so later: the cluster stops this if it has ended."""
        with suppress(Py4JError, OSError):
            return self._stopping.is_set() or says_that_it_is_stopped(self._spark.sparkContext)
        return False

    def _round(self) -> None:
        """Run what is due, and say when the rest is."""
        topics = {t.topic_id: t for t in self._cluster_metadata().topics if t.config.get("delta.path")}
        self._timetable.show(
            {id_: _settings(topic).delta_commit_interval_ms for id_, topic in topics.items()}, _now_ms()
        )
        if topics or self._has_tables:
            self._announce_next(topics)
        self._has_tables = bool(topics)
        due = self._timetable.due(_now_ms())
        if not due:
            return
        with self._lock:
            if self._stopping.is_set():
                return
            config = AdminConfig.parse({"bootstrap.servers": self._bootstrap_servers()})
            client = self._client = ClusterMetadata.connect(config)
        try:
            self._run_due(client, config, [(topics[id_], kind) for id_, kind in due])
        finally:
            client.close()
            with self._lock:
                self._client = None
            for id_, kind in due:  # Also what failed: it is tried again after its interval.
                if self._timetable.next_ms(id_) <= _now_ms():
                    self._timetable.ran(id_, kind, _now_ms())
        self._announce_next(topics)

    def _run_due(
        self, client: ClusterMetadata, config: AdminConfig, due: Sequence[tuple[TopicMetadata, RunKind]]
    ) -> None:
        missing = self._missing()
        for topic, kind in due:
            if self._stopping.is_set():
                return
            began_ms = _now_ms()
            if missing is not None:
                self._report(client, config, topic, missing)
            elif kind is RunKind.WHOLE or self._has_new(client, _patience(config, topic), topic):
                self._tier(client, _patience(config, topic), topic)
            self._timetable.ran(topic.topic_id, kind, began_ms)

    def _has_new(self, client: ClusterMetadata, config: AdminConfig, topic: TopicMetadata) -> bool:
        """Whether leaders have committed records that are not in the table. What has stopped waits for a whole run."""
        history = topic.history
        if history is not None and history.stopped:
            return False
        ends = [] if history is None else history.ends
        partitions = [TopicPartition(topic.name, state.partition) for state in topic.partitions]
        deadline = Deadline.after_ms(config.default_api_timeout_ms)
        listed, _ = try_lookup_offsets(client, all_at(partitions, LATEST), deadline, read_committed=True)
        return any(
            info.offset > max(info.log_start_offset, ends[tp.partition] if tp.partition < len(ends) else 0)
            for tp, info in listed.items()
        )

    def _announce_next(self, topics: Collection[str]) -> None:
        now_ms = _now_ms()
        self._announce({id_: max(0, self._timetable.next_ms(id_) - now_ms) for id_ in topics})

    def _missing(self) -> str | None:
        """What this session lacks of Delta. It is said once."""
        try:
            check_delta(self._spark)
        except MissingDependencyError as error:
            text = f"the cluster's own schedule cannot tier: {error.message}"
            self._say("", f"{text}. {error.hint}")
            return text
        return None

    def _tier(self, client: ClusterMetadata, config: AdminConfig, topic: TopicMetadata) -> None:
        """One run for this topic. What stops it is in the topic's description, and is logged when it changes."""
        name, by_time = topic.name, _settings(topic).delta_commit_interval_ms >= 0
        sc = self._spark.sparkContext
        sc.addJobTag(self._tag)
        sc.setJobDescription(f"tiering of {name}")
        began = time.monotonic()
        try:
            tiered = Tierer(self._spark, client, config, include_active_segments=by_time).run(name)
        except ROUND_FAILURES as error:  # The other topics have their turn all the same.
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


def _patience(config: AdminConfig, topic: TopicMetadata) -> AdminConfig:
    """The settings for a run of this topic."""
    led = all(state.leader >= 0 for state in topic.partitions)
    return config if led else config.with_values({"default.api.timeout.ms": LEADERLESS_MS})


def _settings(topic: TopicMetadata) -> TopicConfig:
    return TopicConfig.parse({name: value for name, value in topic.config.items() if name in _SETTINGS})


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
