"""The rules of a streaming read, without I/O. They take what is read and what the logs hold, and give the end of the
next batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from spark_broker.errors import (
    InconsistentTopicIdError,
    LogTruncationError,
    OffsetOutOfRangeError,
    SparkBrokerError,
    UnknownTopicOrPartitionError,
    invariant,
)
from spark_broker.model import TopicPartition
from spark_broker.spark.limits import Limits, shares
from spark_broker.spark.ranges import OffsetRange
from spark_broker.spark.stream_offset import PartitionEnd, StreamOffset


@dataclass(frozen=True)
class LogRange:
    """What a partition holds: for this query, `start` to `end`. While transactions are open, `high_watermark` is later.

    `last_epoch`: leader epoch of the record before `end`. `position_epoch`: that of the record before the query's
    position. -1: not known.
    """

    topic_id: str
    start: int
    end: int
    high_watermark: int
    last_epoch: int = -1
    position_epoch: int = -1

    # Invariant: start <= end <= high_watermark.


Logs = Mapping[TopicPartition, LogRange]
Offsets = Mapping[TopicPartition, int]


class LossKind(Enum):
    """The fate of records that the query has not read."""

    DELETED = "deleted"
    TOPIC_GONE = "topic gone"
    TOPIC_RECREATED = "topic recreated"
    CUT = "cut"


@dataclass(frozen=True)
class Loss:
    """Records from `start` on that cannot be read any more. `end` (exclusive) -1: their number is not known."""

    kind: LossKind
    tp: TopicPartition
    start: int
    end: int = -1

    def __str__(self) -> str:
        match self.kind:
            case LossKind.DELETED:
                return f"{self.tp}: records {self.start} to {self.end} (exclusive) were deleted before they were read"
            case LossKind.TOPIC_GONE:
                return (
                    f"{self.tp}: it was deleted, or is not selected any more; records from {self.start} on, if any,"
                    " were not read"
                )
            case LossKind.TOPIC_RECREATED:
                return (
                    f"{self.tp}: the topic was deleted and created again; records of the old one from {self.start} on,"
                    " if any, were not read"
                )
            case LossKind.CUT:
                return (
                    f"{self.tp}: it was read up to {self.start}, and the log was cut below: an unclean election lost"
                    " records that were read, and others take their offsets"
                )


_ERRORS: Mapping[LossKind, type[SparkBrokerError]] = {
    LossKind.DELETED: OffsetOutOfRangeError,
    LossKind.TOPIC_GONE: UnknownTopicOrPartitionError,
    LossKind.TOPIC_RECREATED: InconsistentTopicIdError,
    LossKind.CUT: LogTruncationError,
}


def loss_error(losses: Sequence[Loss]) -> SparkBrokerError:
    """The error of a query that fails on data loss. It names every loss, and what to do next."""
    said = "; ".join(str(loss) for loss in losses)
    return _ERRORS[losses[0].kind](
        f"{said}. With failOnDataLoss=false the query goes on with what there is; a new checkpointLocation begins anew"
    )


def find_losses(position: StreamOffset, logs: Logs) -> list[Loss]:
    """The records that a query at `position` can never read from these logs."""
    losses = []
    for tp, offset in sorted(position.offsets.items()):
        log = logs.get(tp)
        if log is None:
            losses.append(Loss(LossKind.TOPIC_GONE, tp, offset))
        elif log.topic_id != position.topic_ids[tp.topic]:
            losses.append(Loss(LossKind.TOPIC_RECREATED, tp, offset))
        elif offset < log.start:
            losses.append(Loss(LossKind.DELETED, tp, offset, log.start))
        elif offset > log.high_watermark or _another_record_precedes(position, tp, log):
            losses.append(Loss(LossKind.CUT, tp, offset))
    # A partition that came while the query ran, or between two runs, is read from its first record on.
    new = sorted(tp for tp in logs if tp not in position.offsets and logs[tp].start > 0)
    return losses + [Loss(LossKind.DELETED, tp, 0, logs[tp].start) for tp in new if not _recreated(position, tp, logs)]


def _recreated(position: StreamOffset, tp: TopicPartition, logs: Logs) -> bool:
    return position.topic_ids.get(tp.topic, logs[tp].topic_id) != logs[tp].topic_id


def _another_record_precedes(position: StreamOffset, tp: TopicPartition, log: LogRange) -> bool:
    """KIP-320: the log was cut below the position, and has grown past it since."""
    read = position.ends.get(tp)
    if read is None or -1 in (read.leader_epoch, log.position_epoch):
        return False
    if read.offset == position.offsets[tp]:
        return read.leader_epoch != log.position_epoch
    # Epochs do not fall along a log: no record below `read.offset` had a later one.
    return read.offset > position.offsets[tp] and read.leader_epoch < log.position_epoch


def resumed(position: StreamOffset, logs: Logs) -> dict[TopicPartition, int]:
    """Where reading goes on in each existing partition. After a loss, it goes on with what is left."""
    begin = {}
    for tp, log in logs.items():
        offset = 0 if _recreated(position, tp, logs) else position.offsets.get(tp, 0)
        begin[tp] = log.end if offset > log.high_watermark else max(offset, log.start)
    return begin


class StreamPlanner:
    """Decides where each batch ends. For one thread. `now_ms` is any clock that does not go back."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._last_trigger_ms: int | None = None
        self._target: Logs | None = None

    def stop_at(self, logs: Logs) -> None:
        """Trigger.AvailableNow: the query reads what there is now, in as many batches as it needs, and ends."""
        self._target = logs

    def within_target(self, position: StreamOffset, logs: Logs) -> dict[TopicPartition, LogRange]:
        """The logs as far as the query may read them.

        Of what it has read and the target lacks, it reads nothing, and keeps the position: the broker that gave the
        target may have lagged behind.
        """
        target = self._target
        if target is None:
            return dict(logs)
        return {
            tp: _cut_at(log, target[tp]) if _is_in(target, tp, log) else _cut_at_position(log, position.offsets[tp])
            for tp, log in logs.items()
            if _is_in(target, tp, log) or (tp in position.offsets and position.topic_ids.get(tp.topic) == log.topic_id)
        }

    def is_delayed(self, backlog: int, now_ms: int) -> bool:
        """Whether the batch waits for minOffsetsPerTrigger. If not, it counts as begun.

        With Trigger.AvailableNow no batch waits. Otherwise the last records would never be read.
        """
        since = self._last_trigger_ms
        is_due = since is None or now_ms - since >= self._limits.max_delay_ms
        if backlog < self._limits.min_offsets and self._target is None and not is_due:
            return True
        self._last_trigger_ms = now_ms
        return False

    def limited(self, begin: Offsets, ends: Offsets) -> dict[TopicPartition, int]:
        """The ends, with no more than maxOffsetsPerTrigger before them."""
        if not self._limits.max_offsets:
            return dict(ends)
        sizes = shares(self._limits.max_offsets, {tp: end - begin[tp] for tp, end in ends.items()})
        return {tp: begin[tp] + sizes.get(tp, 0) for tp in ends}

    def byte_shares(self, sizes: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """How much of maxBytesPerTrigger each partition gets, in proportion to its waiting bytes."""
        return shares(self._limits.max_bytes, sizes)


def _cut_at(log: LogRange, target: LogRange) -> LogRange:
    return log if log.end <= target.end else replace(log, end=target.end, last_epoch=target.last_epoch)


def _is_in(target: Logs, tp: TopicPartition, log: LogRange) -> bool:
    return tp in target and target[tp].topic_id == log.topic_id


def _cut_at_position(log: LogRange, offset: int) -> LogRange:
    end = max(log.start, min(offset, log.end))
    return replace(log, end=end, last_epoch=log.position_epoch if end == offset else -1)


def limited_ends(logs: Logs, ends: Offsets) -> dict[TopicPartition, int]:
    """The ends before which a batch stops although the log has more."""
    return {tp: end for tp, end in ends.items() if end < logs[tp].end}


def end_of_batch(
    position: StreamOffset, logs: Logs, ends: Offsets, epochs: Mapping[TopicPartition, int], *, lossy: bool = False
) -> StreamOffset:
    """The end of a batch that reads up to `ends`. It is the position when nothing is read and nothing was lost.

    `epochs`: leader epochs of the records before the `limited_ends`; -1: not known.
    """
    if not lossy and all(end == position.offsets.get(tp, 0) for tp, end in ends.items()):
        return position
    return StreamOffset(
        offsets=dict(ends),
        topic_ids={tp.topic: logs[tp].topic_id for tp in ends},
        ends={tp: _known_end(logs[tp], end, epochs.get(tp, -1)) for tp, end in ends.items()},
    )


def _known_end(log: LogRange, end: int, epoch: int) -> PartitionEnd:
    """The end of the batch, if the epoch before it is known."""
    # A later epoch than that of the log's end: since then, the log was cut. The log's end shows that, and `end` not.
    return PartitionEnd(end, epoch) if 0 <= epoch <= log.last_epoch else PartitionEnd(log.end, log.last_epoch)


def first_position(end: StreamOffset, start: StreamOffset | None) -> StreamOffset:
    """The start of a batch. `start` None: the batch is the query's first, and its end holds the start."""
    position = end.first if start is None else start
    invariant(position is not None, "the end of a stream's first batch says where it started")
    return position or end


def batch_ranges(position: StreamOffset, end: StreamOffset) -> list[OffsetRange]:
    """What a batch between the two offsets reads, now or when it is repeated."""
    ranges = []
    for tp, offset in sorted(end.offsets.items()):
        topic_id = end.topic_ids[tp.topic]
        is_same = position.topic_ids.get(tp.topic) == topic_id
        start = position.offsets.get(tp, 0) if is_same else 0
        log_end = end.ends.get(tp, PartitionEnd(-1, -1))
        if start < offset:
            where = (tp.topic, topic_id, tp.partition)
            ranges.append(OffsetRange(*where, start, offset, log_end.offset, log_end.leader_epoch))
    return ranges


def still_there(ranges: Sequence[OffsetRange], logs: Logs) -> list[OffsetRange]:
    """The part that the logs still hold of ranges that an earlier run planned."""
    kept = []
    for part in ranges:
        log = logs.get(part.tp)
        if log is not None and log.topic_id == part.topic_id:
            kept.append(replace(part, start=max(part.start, log.start), end=min(part.end, log.high_watermark)))
    return [part for part in kept if part.size > 0]
