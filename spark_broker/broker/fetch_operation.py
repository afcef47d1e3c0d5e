"""A consumer's fetches, without a transport: what is read for each, and whether it waits for more."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from spark_broker.broker.notifier import WAIT_MAX_MS, Notifier
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_reader import PartitionRead
from spark_broker.broker.projection import check_columns, project_frames
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.request_queue import GiveWay, keep_on, pieces
from spark_broker.errors import LogTruncationError, OffsetMovedToTieredStorageError, SparkBrokerError
from spark_broker.protocol.frame import encode_frames, pack_header
from spark_broker.protocol.messages import FetchedPartition, FetchPartition, FetchRequest, FetchResponse, FileExtent
from spark_broker.protocol.wire import Buffer
from spark_broker.storage.stored_run import StoredRun

EXTENTS_MAX = 10_000
"""An answer with more pieces of files than this sends the batches instead."""


class FetchAnswer(NamedTuple):
    """What the client gets. `complete`: it is what the client waited for, and not merely the end of its wait."""

    response: FetchResponse
    payload: list[Buffer]
    complete: bool


class FetchOperation:
    """The fetches of one stream, one at a time: `received`, then `try_answer` until there is an answer.

    Between two tries it waits for `deadline_ms`, or for news of its partitions, which wake `notifier`. Invariant: it
    listens to partitions only between `received` and the answer.
    """

    def __init__(self, manager: ReplicaManager, notifier: Notifier | None = None, boot_id: str = "") -> None:
        """`boot_id` is this machine's. If it is empty, no client is referred to the files."""
        self.notifier = notifier if notifier is not None else Notifier()
        self.deadline_ms = 0  # until when the client waits, on the clock of `received`
        self._manager = manager
        self._boot_id = boot_id
        self._request: FetchRequest | None = None
        self._listening: list[Partition] = []

    def received(self, request: FetchRequest, now_ms: int) -> None:
        """The client waits for an answer to this from now on."""
        self._end()
        self._request = request
        self.deadline_ms = now_ms + min(request.max_wait_ms, WAIT_MAX_MS)
        for wanted in request.partitions:
            partition = self._manager.find(wanted.topic_id, wanted.partition)
            if partition is not None:
                partition.listen(self.notifier, commits=True)
                self._listening.append(partition)

    def try_answer(self, now_ms: int, limit_bytes: int, give_way: GiveWay = keep_on) -> FetchAnswer | None:
        """The answer, of about `limit_bytes`; None: the client waits for more. Raises ThrottlingQuotaExceededError of
        `give_way`.
        """
        request = self._request
        if request is None:
            return None
        # What comes from now on is news again. Without news, reading would find the same: a long wait costs no reads.
        self.notifier.take()
        answers, payload, size, done = self._read(request, limit_bytes, give_way)
        complete = done or size >= min(request.min_bytes, limit_bytes)
        if not complete and now_ms < self.deadline_ms:
            return None
        self._end()
        return FetchAnswer(FetchResponse(request.correlation_id, answers), payload, complete)

    def refuse(self, error: SparkBrokerError) -> FetchResponse | None:
        """The answer that says of each partition why it is not read now; None: nobody waits."""
        request = self._request
        if request is None:
            return None
        self._end()
        return FetchResponse(request.correlation_id, [refused(wanted, error) for wanted in request.partitions])

    def cancelled(self) -> None:
        """Nobody waits for an answer any more."""
        self._end()

    def _end(self) -> None:
        self._request = None
        for partition in self._listening:
            partition.forget(self.notifier)
        self._listening.clear()

    def _read(
        self, request: FetchRequest, limit: int, give_way: GiveWay
    ) -> tuple[list[FetchedPartition], list[Buffer], int, bool]:
        """Answers and their payload; the bytes of all batches; whether the client has something to act on."""
        answers: list[FetchedPartition] = []
        payload: list[Buffer] = []
        size, done = 0, False
        for wanted in pieces(request.partitions, give_way):
            budget = min(wanted.max_bytes, limit - size)
            if budget <= 0 and size > 0:
                break
            try:
                answer, parts = self._read_partition(request, wanted, max(budget, 1))
            except SparkBrokerError as error:
                answers.append(self._refusal(wanted, error))
                done = True
                continue
            answers.append(answer)
            # All batches that were read are left out: the client goes on behind them.
            done |= not parts and answer.next_offset > wanted.offset
            payload += parts
            size += answer.length + sum(extent.length for extent in answer.extents)
        return answers, payload, size, done

    def _refusal(self, wanted: FetchPartition, error: SparkBrokerError) -> FetchedPartition:
        """A reader that is sent to the table learns where the log begins: from there on it may have more."""
        if not isinstance(error, OffsetMovedToTieredStorageError):
            return refused(wanted, error)
        try:
            reader = self._manager.partition(wanted.topic_id, wanted.partition).reader
            log_start, _ = reader.offsets(wanted.leader_epoch)
        except SparkBrokerError as since:
            return refused(wanted, since)  # This broker leads no more: the next leader's log may begin elsewhere.
        return refused(wanted, error, log_start)

    def _read_partition(
        self, request: FetchRequest, wanted: FetchPartition, max_bytes: int
    ) -> tuple[FetchedPartition, list[Buffer]]:
        partition = self._manager.partition(wanted.topic_id, wanted.partition)
        columns, read_committed = request.columns, request.read_committed
        if columns is not None:
            check_columns(partition.topic, columns)
        if wanted.last_fetched_epoch >= 0:
            read_to = wanted.offset if wanted.read_to < 0 else wanted.read_to
            partition.reader.check_lineage(wanted.leader_epoch, read_to, wanted.last_fetched_epoch)
        position = (wanted.leader_epoch, wanted.offset, max_bytes)
        if self._boot_id and request.boot_id == self._boot_id:
            grant = partition.reader.grant(*position, read_committed=read_committed)
            if len(grant.runs) <= EXTENTS_MAX:
                headers: list[Buffer] = [pack_header(header) for run in grant.runs for header in run.headers]
                return _answer(wanted, grant.read, headers, [_extent(run) for run in grant.runs]), headers
        read = partition.reader.read(*position, read_committed=read_committed)
        if columns is not None:
            frames = project_frames(read.frames, partition.topic, columns, max_bytes)
            if len(frames) < len(read.frames):
                last = frames[-1].header
                read = replace(read, next_offset=last.next_offset, next_epoch=last.leader_epoch)
            read = replace(read, frames=frames)
        payload = encode_frames(read.frames)
        return _answer(wanted, read, payload, []), payload


def _answer(
    wanted: FetchPartition, read: PartitionRead, payload: list[Buffer], extents: list[FileExtent]
) -> FetchedPartition:
    return FetchedPartition(
        topic_id=wanted.topic_id,
        partition=wanted.partition,
        error_code=0,
        leader_epoch=read.leader_epoch,
        high_watermark=read.high_watermark,
        log_start_offset=read.log_start_offset,
        length=sum(len(part) for part in payload),
        next_offset=read.next_offset,
        next_epoch=read.next_epoch,
        extents=extents,
    )


def _extent(run: StoredRun) -> FileExtent:
    return FileExtent(str(run.path), *run.file_id, run.position, run.length)


def refused(wanted: FetchPartition, error: SparkBrokerError, log_start: int = -1) -> FetchedPartition:
    """The answer about a partition that cannot be read."""
    key = (wanted.topic_id, wanted.partition)
    if not isinstance(error, LogTruncationError):
        return FetchedPartition(*key, error.code, error.message[:1000], log_start_offset=log_start)
    return FetchedPartition(
        *key,
        error.code,
        error.message[:1000],
        diverging_epoch=error.diverging_epoch,
        diverging_end_offset=error.divergent_offset,
    )
