"""Reads one range of offsets exactly, from the current leader of the partition. An election fails no task."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from spark_broker.client.cluster_view import TopicView, address_of
from spark_broker.client.fetch_machine import FetchMachine, FetchTarget, Meaning, meaning_of
from spark_broker.client.history_reader import HistoryReader, check_start
from spark_broker.client.local_files import ForeignExtentError, UnusableExtentError, this_boot_id
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import lookup_offsets
from spark_broker.client.partition_position import FetchRetry
from spark_broker.client.retry import Deadline
from spark_broker.config import ConsumerConfig
from spark_broker.errors import (
    ClosedError,
    LeaderNotAvailableError,
    LogTruncationError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.model import NO_EPOCH, ConsumedBatch
from spark_broker.protocol.messages import ListedOffset
from spark_broker.spark.fetch_session import RangeSession
from spark_broker.spark.planned_topic import planned_topic
from spark_broker.spark.ranges import OffsetRange
from spark_broker.storage.filesystem import current_user
from spark_broker.times import LATEST

FIRST_ANSWER_TIMEOUT_MS = 2000
"""A frozen leader takes requests and never answers. A healthy one answers within milliseconds, because what is read is
committed. After this time the reader looks for another leader. Each time it waits twice as long, so that a slow leader
can answer.
"""

CORRUPT_ANSWERS_MAX = 3
"""The network may damage an answer. After this many damaged answers in a row, the leader's log counts as damaged."""

_log = logging.getLogger(__name__)


@cache
def _warn_of_rights(user: str) -> None:
    """Once: each file would make a line otherwise."""
    text = "%s may not read the files of leaders on this machine: records come through the brokers, which takes longer"
    _log.warning(text, user)


class RangeReader:
    """The batches of one range, in order, each offset once. For one thread.

    Not every offset of a range holds a record. Each marker of a transaction takes one, and read_committed leaves out
    aborted batches. The leader says up to which offset a range is read; rows are not counted.
    """

    def __init__(
        self,
        metadata: ClusterMetadata,
        part: OffsetRange,
        settings: ConsumerConfig,
        columns: list[str] | None,
        *,
        fail_on_data_loss: bool = True,
        local_reads: bool = True,
    ) -> None:
        """`local_reads`: read the files of a leader on this machine where possible."""
        self._metadata = metadata
        self._part = part
        self._settings = settings
        self._columns = columns
        self._fetches = self._fetch_machine(this_boot_id() if local_reads else "")
        self._fail_on_data_loss = fail_on_data_loss
        self._position = part.start  # Invariant: every record before it was yielded, left out, or given up as lost.
        self._session: RangeSession | None = None
        self._retry = FetchRetry()
        self._why: SparkBrokerError | None = None  # what has gone wrong since the last progress
        self._deadline = self._next_deadline()

    def batches(self) -> Iterator[list[ConsumedBatch]]:
        """One list for each answer of a leader. The last batch ends where the range does.

        Raises InconsistentTopicIdError when the topic was created again, and UnknownTopicOrPartitionError when it was
        deleted. Raises OffsetOutOfRangeError when records are gone (with failOnDataLoss=false they are passed over).
        Raises any other typed error that lasted for default.api.timeout.ms without progress.
        """
        try:
            while self._position < self._part.end:
                topic = self._topic()
                try:
                    fetched = self._fetch(topic)
                except UnusableExtentError as error:
                    if isinstance(error.__cause__, PermissionError):
                        _warn_of_rights(current_user())
                    level = logging.WARNING if isinstance(error, ForeignExtentError) else logging.INFO
                    _log.log(level, "%s: offset %d: %s; it comes from the leader", self._part.tp, self._position, error)
                    self._drop_session()
                    self._fetches = self._fetch_machine("")
                    continue
                except SparkBrokerError as error:
                    self._drop_session()
                    tiered_end = self._tiered_end(error)
                    if tiered_end > self._position:
                        yield from self._from_history(tiered_end)
                    else:
                        self._recover(error)
                    continue
                if fetched:
                    yield fetched
                    # The time before Spark asked for more does not count.
                    self._deadline = self._next_deadline()
        finally:
            self._drop_session()

    def _tiered_end(self, error: SparkBrokerError) -> int:
        """Up to where (exclusive) the topic's table is read, before the log; the position: it is not read."""
        if meaning_of(error) is not Meaning.TIERED:
            return self._position
        self._metadata.refresh(self._deadline)
        topic = self._topic()
        log_start = self._log_now().log_start_offset if topic.has_refused else -1
        start, end = topic.from_table(self._part.partition, log_start)
        return min(end, self._part.end) if start <= self._position < end else self._position

    def _from_history(self, end: int) -> Iterator[list[ConsumedBatch]]:
        """Read from the position up to `end` in the topic's table."""
        reader = HistoryReader(self._topic())
        self._deadline = self._next_deadline()  # It is for brokers: opening the table may have taken longer.
        recorded = self._metadata.as_recorded(self._topic(), self._deadline)
        try:
            check_start(recorded, self._part.partition, self._position)
        except OffsetOutOfRangeError as error:
            self._recover(error)
            return
        for batch in reader.batches(self._part.partition, self._position, end, self._columns):
            self._position = batch.next_offset
            yield [batch]
        self._position = end
        self._deadline = self._next_deadline()

    def _fetch(self, topic: TopicView) -> list[ConsumedBatch]:
        session = self._session
        if session is None:
            session = self._session = self._open(topic)
            session.request(self._position)
        part = session.answer(timeout_ms=self._answer_timeout_ms())
        position = max(self._position, part.response.next_offset)
        if not part.response.error_code and position < self._part.end:
            session.request(position)  # The next request is sent before this answer is decoded.
        answer = self._fetches.answer(part)
        if answer.error is not None:
            raise answer.error
        batches = [entry.decode() for entry in answer.fetched if entry.decode is not None]
        if position > self._position:
            self._position = position
            self._retry.failures, self._why = 0, None
            self._deadline = self._next_deadline()
        elif self._deadline.expired:
            raise OffsetNotAvailableError(f"{self._part.tp}: offset {self._position} is not committed any more")
        return [cut for batch in batches if (cut := _until(batch, self._part.end)) is not None]

    def _fetch_machine(self, boot_id: str) -> FetchMachine:
        return FetchMachine(self._settings, self._columns, self._metadata.backoff, boot_id=boot_id)

    def _topic(self) -> TopicView:
        return planned_topic(self._metadata, self._part.topic, self._part.topic_id, self._deadline)

    def _open(self, topic: TopicView) -> RangeSession:
        leader = self._metadata.view.leader(self._part.topic, self._part.partition)
        if leader is None:
            raise LeaderNotAvailableError(f"{self._part.tp} has no leader")
        broker, state = leader
        part = self._part
        target = FetchTarget(
            topic, part.partition, state.leader_epoch, self._position, read_epoch=part.read_epoch, read_to=part.read_to
        )
        if not broker.directory:
            self._fetches = self._fetch_machine("")  # a reader opens no file of which only the leader speaks
        return RangeSession(address_of(broker), broker.directory, target, self._fetches, self._settings)

    def _recover(self, error: SparkBrokerError) -> None:
        """Go on from the same position with fresh metadata. Raises an error that every leader would answer."""
        match meaning_of(error):
            case Meaning.TRUNCATED:
                self._read_what_is_there_now(error)
            case Meaning.OUT_OF_RANGE:
                self._skip_lost(error)
            case Meaning.RETRY | Meaning.TIERED:
                self._try_again(error)
            case Meaning.DAMAGED if self._retry.failures < CORRUPT_ANSWERS_MAX:
                self._try_again(error)
            case _:
                raise error

    def _try_again(self, error: SparkBrokerError) -> None:
        """Fetch fresh metadata after the back-off, if there is time for it.

        What went wrong first says more than that there was no time left for an answer.
        """
        if self._why is None or not isinstance(error, RequestTimedOutError):
            self._why = error
        error = self._why
        wait_s = self._fetches.back_off(self._retry, NO_EPOCH, 0.0) / 1000
        if wait_s > self._deadline.remaining_s:
            raise error
        if self._metadata.closing.wait(wait_s):
            raise ClosedError("the read was closed")
        try:
            self._metadata.refresh(self._deadline)
        except RequestTimedOutError as late:
            raise error from late

    def _read_what_is_there_now(self, error: SparkBrokerError) -> None:
        """An unclean election cut the log below the planned end. Other records may be at these offsets now."""
        tp, end = self._part.tp, self._part.end
        if self._fail_on_data_loss:
            raise LogTruncationError(f"{tp}: since the query was planned, {error.message}") from error
        latest = self._log_now()
        end = max(self._position, min(end, latest.offset))
        _log.warning("%s: since the query was planned, %s; reading what is there, up to %d", tp, error.message, end)
        self._part = replace(self._part, end=end, read_to=latest.offset, read_epoch=latest.last_epoch)

    def _skip_lost(self, error: SparkBrokerError) -> None:
        """The log start is past the position now, or the log was truncated (failOnDataLoss=false)."""
        tp, position = self._part.tp, self._position
        if self._fail_on_data_loss:
            raise OffsetOutOfRangeError(f"{tp}: records from offset {position} on are gone: {error.message}") from error
        log = self._log_now()
        topic = self._metadata.as_recorded(self._topic(), self._deadline)  # The metadata may lack the last deletion.
        parts = [(log.log_start_offset, log.offset), topic.history_of(tp.partition)]
        if any(start <= position < end for start, end in parts):
            self._try_again(error)  # It is there: whoever answered lagged behind.
            return
        # There may be a gap between the table's end and the log's start.
        self._position = min([start for start, end in parts if position < start < end] + [self._part.end])
        _log.warning("%s: records %d to %d (exclusive) are gone; reading on", tp, position, self._position)

    def _log_now(self) -> ListedOffset:
        """Where the partition's log begins and ends, for this read."""
        tp, read_committed = self._part.tp, self._settings.read_committed
        return lookup_offsets(self._metadata, {tp: LATEST}, self._deadline, read_committed=read_committed)[tp]

    def _answer_timeout_ms(self) -> int:
        patience_ms = FIRST_ANSWER_TIMEOUT_MS << min(self._retry.failures, 16)
        remaining_ms = self._deadline.remaining_ms
        if remaining_ms <= 0:
            raise RequestTimedOutError(f"{self._part.tp}: no answer in time")
        return max(1, min(patience_ms, self._settings.request_timeout_ms, remaining_ms))

    def _next_deadline(self) -> Deadline:
        return Deadline.after_ms(self._settings.default_api_timeout_ms)

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _until(batch: ConsumedBatch, end: int) -> ConsumedBatch | None:
    """The part of the batch before offset `end`."""
    rows = batch.rows_below(end)
    if rows == batch.data.num_rows:
        return batch
    return batch.slice(0, rows) if rows else None
