"""The sinks of the data source: a batch write and a stream's, each one version of an application's transactions.

Every task attempt joins the version and appends under a producer id of its own. Spark hands the messages of the
attempts that count to `commit`, which names them as the winners; all others are aborted by the same decision. A version
is committed once: a stream's batch that runs again after a crash finds it done.

    write            application                     version      execution
    ---------------  ------------------------------  -----------  ----------------------------------------------
    batch            a uuid, for a single use        0            a uuid, made with the writer
      txnAppId       txnAppId, and the topic's       txnVersion   likewise
    stream           the query's id                  batch id     a uuid, made by the planner for each run of it

A stream's planner does not know its query; the tasks do, and their messages carry it to the committing process.

Spark repeats only the newest batch of a stream, because it notes a batch right after the sink has committed it. A batch
below the last committed one has other rows than those that were written under its number: its checkpoint is an older
copy, and planned the batch anew.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from spark_broker.errors import (
    AlreadyCommittedError,
    InvalidTxnStateError,
    InvariantError,
    SparkBrokerError,
    invariant,
)
from spark_broker.quiet_end import end_in_silence
from spark_broker.spark.message_first import message_first
from spark_broker.spark.refusals import invalid_option
from spark_broker.spark.user_errors import message_alone
from spark_broker.spark.write_options import Idempotence, WriteOptions, parse_write_options
from spark_broker.spark.write_plan import OneTopic, WritePlan, plan_write

if TYPE_CHECKING:
    from spark_broker.client.transaction_group import TransactionGroup

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
"""Local properties of a stream's tasks."""

TOPIC_ID_CHARS = 8

OLDER_CHECKPOINT = (
    "Put the newest checkpoint back, and have one run of the query at a time. Or begin with a new checkpointLocation: "
    "that is a new query, which writes everything from its startingOffsets on."
)

ENDING_MODULE = "pyspark.sql.worker.python_streaming_sink_runner"
"""Spark's process that makes a stream's writer once more, to commit or abort a micro-batch."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Version:
    """One version of an application, and the execution that writes it. `single_use`: there is no other version."""

    application: str
    version: int
    execution: str
    single_use: bool = False

    def group(self, options: WriteOptions) -> TransactionGroup:
        """The transaction in which it is written."""
        from spark_broker.client.transaction_group import TransactionGroup

        return TransactionGroup(
            options.settings["bootstrap.servers"],
            self.application,
            self.version,
            self.execution,
            options.transaction_timeout_ms,
            options.settings,
            self.single_use,
        )


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What an attempt reports. `version` None: without a transaction. `producer_id` None: it has written nothing."""

    version: Version | None
    producer_id: int | None
    rows: int


@message_alone()
def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchWriter:
    """The sink of `df.write`. Raises typed errors of options, schema and cluster."""
    with message_first():
        end_in_silence()
        if overwrite:
            raise invalid_option('a topic is only ever appended to: use mode("append")')
        plan = plan_write(parse_write_options(options), schema)
        version = _batch_version(plan) if plan.options.transactional else None
        return BatchWriter(plan, version)


@message_alone()
def stream_writer(options: Mapping[str, str], schema: StructType) -> StreamWriter:
    """The sink of `df.writeStream`. Raises typed errors of options, schema and cluster."""
    with message_first():
        end_in_silence()
        parsed = parse_write_options(options)
        if parsed.idempotence is not None:
            raise invalid_option("txnAppId is for batch writes: a stream is its own application")
        plan = None if _ends_a_batch() else plan_write(parsed, schema)
        return StreamWriter(parsed, plan, uuid.uuid4().hex)


def _ends_a_batch() -> bool:
    """Whether this process of Spark commits or aborts a micro-batch, and writes nothing.

    It needs no plan. An error of the plan in the abort (the topic was deleted) would hide the query's own error.
    """
    # Spark's daemon imports the module. Without the daemon it is the main module.
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ENDING_MODULE in sys.modules or (spec is not None and spec.name == ENDING_MODULE)


def _batch_version(plan: WritePlan) -> Version:
    execution = uuid.uuid4().hex
    idempotence = plan.options.idempotence
    if idempotence is None:
        return Version(f"spark-write-{execution}", 0, execution, single_use=True)
    return Version(_application(plan, idempotence), idempotence.version, execution)


def _application(plan: WritePlan, idempotence: Idempotence) -> str:
    """Two topics of one `foreachBatch` may share a txnAppId, as two Delta tables may. So may a topic that was created
    again.
    """
    if not isinstance(plan.destination, OneTopic):
        return idempotence.app_id
    target = plan.destination.target
    return f"{idempotence.app_id}/{target.name}/{target.topic_id[:TOPIC_ID_CHARS]}"


class BatchWriter(DataSourceArrowWriter):
    """Made once for each write. Copies of it run `write`, `commit` and `abort`, each in a process of its own."""

    def __init__(self, plan: WritePlan, version: Version | None) -> None:
        self._plan = plan
        self._version = version

    @message_alone()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one attempt's rows. Returns once all are acknowledged. Raises typed errors."""
        with message_first():
            return write_attempt(self._plan, self._version, iterator)

    @message_alone()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the winners' rows visible. Raises typed errors. After RequestTimedOutError the outcome is not known."""
        with message_first():
            if self._version is not None:
                _commit(self._version, self._plan.options, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Best effort. What stays open is aborted at its time-out."""
        if self._version is not None:
            _abort(self._version, self._plan.options)


class StreamWriter(DataSourceStreamArrowWriter):
    """The planner makes one for each micro-batch. Spark makes another one to commit or abort it; the execution of that
    one is not used.

    `plan`: None in the process that only commits or aborts.
    """

    def __init__(self, options: WriteOptions, plan: WritePlan | None, execution: str) -> None:
        self.options = options
        self.plan = plan
        self.execution = execution

    @message_alone()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one attempt's rows. Returns once all are acknowledged. Raises typed errors."""
        with message_first():
            if self.plan is None:
                raise InvariantError("a task got the writer of a process that commits")
            version = stream_version(self.execution) if self.options.transactional else None
            return write_attempt(self.plan, version, iterator)

    @message_alone()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Make the winners' rows visible. If an earlier run of the batch was committed, nothing is done.

        Raises InvalidTxnStateError if a later batch was committed.
        """
        with message_first():
            for version in _versions(messages, batchId):
                _commit(version, self.options, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Best effort. If no attempt has reported, the query's next run aborts what is open, or the time-out does."""
        for version in _versions(messages, batchId):
            _abort(version, self.options)


def stream_version(execution: str) -> Version:
    """The version that the current task of a stream writes. Raises InvariantError outside of such a task."""
    context = TaskContext.get()
    query_id = None if context is None else context.getLocalProperty(QUERY_ID)
    batch_id = None if context is None else context.getLocalProperty(BATCH_ID)
    if query_id is None or batch_id is None:
        raise InvariantError("a stream's task does not know its query and its batch")
    return Version(query_id, int(batch_id), execution)


def _versions(messages: Sequence[WriterCommitMessage | None], batch_id: int) -> set[Version]:
    """The version that the messages name. There is at most one. None: there is no transaction, or no message."""
    versions = {message.version for message in messages if isinstance(message, Written) and message.version is not None}
    invariant(len(versions) <= 1, f"one execution writes batch {batch_id}")
    invariant(all(version.version == batch_id for version in versions), f"the messages are of batch {batch_id}")
    return versions


def write_attempt(plan: WritePlan, version: Version | None, batches: Iterator[pa.RecordBatch]) -> Written:
    """Join the version at the first row, and write. If the version is committed already, the rows are passed over.

    Raises InvalidTxnStateError if the version is a micro-batch, and a later one is committed.
    """
    from spark_broker.spark.kept import spare_collections

    end_in_silence()
    written = _written(plan, version, batches)
    spare_collections()
    return written


def _written(plan: WritePlan, version: Version | None, batches: Iterator[pa.RecordBatch]) -> Written:
    from spark_broker.client.producer import Producer
    from spark_broker.spark.task_write import TaskWrite

    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        return Written(version, None, 0)
    context = TaskContext.get()
    task = 0 if context is None else context.partitionId()
    rows = _chained(first, batches)
    if version is None:
        with Producer(config=plan.options.settings) as producer:
            return Written(None, None, TaskWrite(plan, producer, task).write(rows))
    try:
        writer = version.group(plan.options).join()
    except AlreadyCommittedError as error:
        _check_repeated(version, plan.options)
        logger.warning("nothing is written: %s", error.message)
        return Written(version, None, sum(batch.num_rows for batch in rows))
    with writer:
        written = TaskWrite(plan, writer, task).write(rows)
    return Written(version, writer.producer_id, written)


def _chained(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _commit(version: Version, options: WriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    winners = [
        message.producer_id for message in messages if isinstance(message, Written) and message.producer_id is not None
    ]
    if not version.group(options).commit(winners):
        _check_repeated(version, options)
        logger.warning("version %d of %s was committed before", version.version, version.application)


def _check_repeated(version: Version, options: WriteOptions) -> None:
    """Check that a version which was committed before is the same one, run again. Raises InvalidTxnStateError."""
    if version.single_use or options.idempotence is not None:
        return  # What txnAppId and txnVersion mean is that each version at or below the last one is done.
    last = version.group(options).last_committed()
    if last is not None and version.version < last:
        raise InvalidTxnStateError(
            f"micro-batch {version.version} of query {version.application} is older than micro-batch {last}, which the "
            "query has written: its checkpoint is an older copy, or another run of the query is ahead",
            hint=OLDER_CHECKPOINT,
        )


def _abort(version: Version, options: WriteOptions) -> None:
    try:
        version.group(options).abort()
    except SparkBrokerError as error:
        logger.warning("version %d of %s was not aborted: %s", version.version, version.application, error)
