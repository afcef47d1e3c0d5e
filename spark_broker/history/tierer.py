"""Moves what is sealed of a topic into its Delta table: every offset once, whoever else tiers, whenever a try ends.

`history/attempt.py` says what a try does, `history/spark_steps.py` does it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from functools import partial

from pyspark.sql import SparkSession

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import Reach, all_at, lookup_offsets
from spark_broker.client.retry import Deadline, call_with_retries
from spark_broker.config import AdminConfig
from spark_broker.errors import (
    ClosedError,
    HistoryNotFoundError,
    InvalidConfigError,
    MissingDependencyError,
    SparkBrokerError,
    StaleMetadataError,
    TieringStoppedError,
    UnknownTopicOrPartitionError,
    UnsupportedSparkError,
)
from spark_broker.history.attempt import Attempt, TieredTopic
from spark_broker.history.spark_steps import SparkSteps, Target
from spark_broker.history.steps import START_OVER
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import ListedOffset, Message, ReportTieringRequest
from spark_broker.spark.delta_session import CHECK_PAGES, check_delta
from spark_broker.times import LATEST

logger = logging.getLogger(__name__)

STOPPED_MAX = 4000
"""So much of a reason is in the topic's description."""

TRIES = 5
"""How often a run starts over because somebody else changed the table or the cluster."""


def tier_topic(
    spark: SparkSession, topic: str, bootstrap_servers: str, *, include_active_segments: bool = False
) -> TieredTopic:
    """Append to the topic's Delta table (`delta.path`) what is sealed and committed, in one commit.

    `include_active_segments`: all that is committed. Raises InvalidConfigError for a topic without `delta.path`,
    UnknownTopicOrPartitionError, UnsupportedSparkError for Spark Connect, MissingDependencyError where the session has
    no Delta, and TieringStoppedError where the table cannot be used. The topic's description shows that reason until a
    run succeeds. One of these is HistoryNotFoundError: brokers delete nothing until a run finds the table again.
    """
    if not isinstance(spark, SparkSession):
        raise UnsupportedSparkError(f"{type(spark).__module__}: tiering needs a session with a JVM, not Spark Connect")
    config = AdminConfig.parse({"bootstrap.servers": bootstrap_servers})
    metadata = ClusterMetadata.connect(config)
    try:
        tierer = Tierer(spark, metadata, config, include_active_segments=include_active_segments)
        return tierer.run(topic)
    finally:
        metadata.close()


class Tierer:
    """One run, over connections of its own."""

    def __init__(
        self, spark: SparkSession, metadata: ClusterMetadata, config: AdminConfig, *, include_active_segments: bool
    ) -> None:
        self._spark = own_session(spark)
        self._metadata = metadata
        self._config = config
        self._include_active_segments = include_active_segments

    def run(self, name: str) -> TieredTopic:
        """Try until a try succeeds; see `tier_topic`."""
        self._metadata.use([name])
        try:
            check_delta(self._spark)
        except MissingDependencyError as error:
            self._report(self._target(name), error.message)
            raise
        target = self._target(name)
        conflict: Exception | None = None
        for number in range(TRIES):
            if conflict is not None:
                if self._metadata.closing.wait(self._metadata.backoff.wait_s(number)):
                    raise ClosedError("the client was closed during the call")
                target = self._target(name)
            try:
                tiered = self._try(target)
            except START_OVER as error:
                logger.info("tiering of %s starts over: %s", name, error)
                conflict = error
            except TieringStoppedError as error:
                self._report(target, error.message, found=False if isinstance(error, HistoryNotFoundError) else None)
                raise
            except SparkBrokerError as error:  # One partition without a leader holds up all of them.
                self._report(target, error.message)
                raise
            else:
                self._report(target, "", found=True)
                return tiered
        stopped = f"gave up after {TRIES} tries, the last one: {conflict}"
        self._report(target, stopped)
        raise TieringStoppedError(stopped)

    def _report(self, target: Target, stopped: str, *, found: bool | None = None) -> None:
        if not self._metadata.closing.is_set():
            report_tiering(self._metadata, self._config, target.topic.name, target.topic.topic_id, stopped, found=found)

    def _target(self, name: str) -> Target:
        deadline = self._deadline()
        view = self._metadata.refresh(deadline)
        topic = self._metadata.topic(name, deadline)
        if topic.internal:
            raise InvalidConfigError(f"{name} is an internal topic: it has no history")
        if not topic.settings.delta_path:
            raise InvalidConfigError(f"topic {name!r} has no delta.path: set it to the URL of a Delta table")
        return Target(topic, view.cluster_id, view.controller_epoch)

    def _try(self, target: Target) -> TieredTopic:
        attempt = Attempt(
            target.topic, include_active_segments=self._include_active_segments, new_id=lambda: uuid.uuid4().hex
        )
        logs = partial(list_logs, self._metadata, self._config)
        shell = SparkSteps(self._spark, target, self._config.bootstrap_servers, logs, self._tell)
        steps = attempt.steps()
        while True:
            try:
                step = next(steps)
            except StopIteration as ended:
                tiered: TieredTopic = ended.value
                return tiered
            shell.carry_out(step)

    def _tell(self, request: Message) -> None:
        _tell(self._metadata, self._config, request)

    def _deadline(self) -> Deadline:
        return Deadline.after_ms(self._config.default_api_timeout_ms)


def list_logs(
    metadata: ClusterMetadata, config: AdminConfig, topic: TopicView, ends: Sequence[int]
) -> list[ListedOffset]:
    """The log of every partition: start, sealed end, last stable offset, and its size from the history's end on.

    Raises UnknownTopicOrPartitionError where the topic was created again. Raises StaleMetadataError where it has got
    columns that this view of it lacks: leaders may have records with them already.
    """
    deadline = Deadline.after_ms(config.default_api_timeout_ms)
    partitions = [TopicPartition(topic.name, state.partition) for state in topic.partitions]
    starts = [*ends, *[0] * (len(partitions) - len(ends))]
    reaches = {tp: Reach(start, max_bytes=1) for tp, start in zip(partitions, starts, strict=False)}
    listed = lookup_offsets(metadata, all_at(partitions, LATEST), deadline, read_committed=True, reaches=reaches)
    for tp, info in listed.items():
        if info.topic_id != topic.topic_id:
            raise UnknownTopicOrPartitionError(f"{tp} was deleted and created again meanwhile")
    recorded = metadata.recorded(topic.name, deadline)
    if recorded is not None and recorded.topic_id == topic.topic_id and len(recorded.schemas) > len(topic.schemas):
        raise StaleMetadataError(f"the columns of {topic.name} have changed, and a broker does not know it yet")
    return [listed[tp] for tp in partitions]


def report_tiering(
    metadata: ClusterMetadata,
    config: AdminConfig,
    topic: str,
    topic_id: str,
    stopped: str,
    *,
    found: bool | None = None,
) -> None:
    """Let the topic's description show why tiering has stopped; empty: it goes on. It counts without that, too.

    `found`: whether the table has what is recorded of the topic; None: nobody has looked.
    """
    try:
        _tell(metadata, config, ReportTieringRequest(topic_id, stopped[:STOPPED_MAX], found))
    except SparkBrokerError as error:
        logger.warning("the description of %s does not show how tiering ended: %s", topic, error)


def _tell(metadata: ClusterMetadata, config: AdminConfig, request: Message) -> None:
    """Tell the controller, through any broker. Raises what it answers."""
    deadline = Deadline.after_ms(config.default_api_timeout_ms)
    call_with_retries(
        lambda: metadata.call_any(request, deadline),
        deadline=deadline,
        backoff=metadata.backoff,
        closing=metadata.closing,
    )


_OF_ONE_SESSION = frozenset({"conf", "catalog", "streams", "_streamingCheckpointManager"})
"""What PySpark keeps in a session once it was asked for."""


def own_session(spark: SparkSession) -> SparkSession:
    """The user's session with its settings, and beside it: what is set here is not set there."""
    # A session that is constructed takes over `RDD.toDF` of the whole process: frames of the user would be made in it.
    own: SparkSession = object.__new__(type(spark))
    own.__dict__.update({name: value for name, value in vars(spark).items() if name not in _OF_ONE_SESSION})
    own._jsparkSession = spark._jsparkSession.cloneSession()
    # Other readers of the table, deltalake for one, take these; Spark's own default is a type of its own.
    own.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    # Only Spark itself reads dates of the old calendar right: for deltalake those before 1582 are days later.
    own.conf.set("spark.sql.parquet.datetimeRebaseModeInWrite", "CORRECTED")
    # Partition values are texts, and in zones with summer time an hour comes twice. Rules and generated columns mean
    # the same whoever tiers.
    own.conf.set("spark.sql.session.timeZone", "UTC")
    # A rule that fails for one record is broken by it, and holds up no other record.
    own.conf.set("spark.sql.ansi.enabled", "false")
    # With "dynamic", Delta does not write a partitioned table anew.
    own.conf.set("spark.sql.sources.partitionOverwriteMode", "static")
    # It rewrites files of the table: a row that a flipped bit has changed would get a right checksum then, and what a
    # read passes over would be gone.
    own.conf.set(CHECK_PAGES, "true")
    own.conf.set("spark.sql.files.ignoreCorruptFiles", "false")
    own.conf.set("spark.sql.files.ignoreMissingFiles", "false")
    return own
