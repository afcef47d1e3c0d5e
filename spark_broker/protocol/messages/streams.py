"""Records on long-lived streams of opaque bytes: appends, consumers' fetches, followers' fetches."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from spark_broker.protocol.messages.common import (
    BrokerId,
    Epoch,
    ErrorCode,
    Int64,
    LogStart,
    Message,
    Milliseconds,
    Name,
    Offset,
    PartitionId,
    Size,
    Text,
    TopicId,
)


class AppendRequest(Message, frozen=True):
    """One micro-batch for one partition; the payload is the encapsulated Arrow message with its placeholders.

    acks: 0 (no response is sent), 1 or -1 (all).
    """

    correlation_id: Int64
    topic_id: TopicId
    partition: PartitionId
    leader_epoch: Epoch
    acks: Annotated[int, Meta(ge=-1, le=1)]
    timeout_ms: Milliseconds
    schema_id: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    transactional_id: Name = ""


class AppendResponse(Message, frozen=True):
    """Rows got offsets from `base_offset` on; -1 with an error.

    `newer_schema_id`: the topic's current schema, where the batch was of an older one; else -1. A segment has batches
    of one schema, so that a producer is to learn of the current one at once.
    """

    correlation_id: Int64
    error_code: ErrorCode
    error_message: Text = ""
    base_offset: Offset = -1
    append_time_ms: Int64 = -1
    log_start_offset: Offset = -1
    newer_schema_id: Int64 = -1


class FetchPartition(Message, frozen=True):
    """`last_fetched_epoch`: the leader epoch of the record before `read_to`, as the reader knows it (-1: it does not).

    The leader compares it with its log, and answers LOG_TRUNCATION where they diverge. `read_to`: end (exclusive) of
    what was read; -1: `offset`.
    """

    topic_id: TopicId
    partition: PartitionId
    leader_epoch: Epoch
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    max_bytes: Size
    last_fetched_epoch: Epoch = -1
    read_to: Offset = -1


class FileExtent(Message, frozen=True):
    """Whole messages: `length` bytes from `position` on, in the leader's file with this path, device and inode."""

    path: Annotated[str, Meta(max_length=4096)]
    device: Annotated[int, Meta(ge=0)]
    inode: Annotated[int, Meta(ge=0)]
    position: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    length: Size


class FetchRequest(Message, frozen=True):
    """Committed records from each partition's offset on; long-polls up to `max_wait_ms` for `min_bytes`.

    `columns`: only these columns, sliced by the broker; None: frames as they are stored. `read_committed`: no
    records of transactions that are undecided or aborted. `boot_id`: of the reader's machine; set if the reader prefers
    to read the leader's files itself. A leader on the same machine then answers with extents, and slices no columns.
    """

    correlation_id: Int64
    max_wait_ms: Milliseconds
    min_bytes: Size
    max_bytes: Size
    partitions: Annotated[list[FetchPartition], Meta(max_length=100_000)]
    columns: Annotated[list[Text], Meta(max_length=10_000)] | None = None
    read_committed: bool = True
    boot_id: Name = ""


class FetchedPartition(Message, frozen=True):
    """`length` bytes of the payload are this partition's frames.

    `next_offset`: where to read on, past batches that were left out (markers, aborted transactions); -1 with an error.
    `next_epoch`: the leader epoch of the batch before `next_offset`; -1: there is none. With LOG_TRUNCATION, the log
    and what was read diverge at the reader's own end of `diverging_epoch`, or at `diverging_end_offset`, whichever is
    smaller. With OFFSET_MOVED_TO_TIERED_STORAGE, `log_start_offset` is set. With `extents`, the payload has only the
    batches' headers. Their messages are in the files, in this order.
    """

    topic_id: TopicId
    partition: PartitionId
    error_code: ErrorCode
    error_message: Text = ""
    leader_epoch: Epoch = -1
    high_watermark: Offset = -1
    log_start_offset: Offset = -1
    length: Size = 0
    next_offset: Offset = -1
    next_epoch: Epoch = -1
    diverging_epoch: Epoch = -1
    diverging_end_offset: Offset = -1
    extents: Annotated[list[FileExtent], Meta(max_length=100_000)] = msgspec.field(default_factory=list)


class FetchResponse(Message, frozen=True):
    """The payload is the frames of all partitions, in order. `error_code` is an error of the whole request."""

    correlation_id: Int64
    partitions: Annotated[list[FetchedPartition], Meta(max_length=100_000)]
    error_code: ErrorCode = 0
    error_message: Text = ""


class ReplicaPartition(Message, frozen=True):
    """`fetch_offset`: the follower's log end; `last_fetched_epoch`: the leader epoch of the batch before it, or -1.

    `no_room`: the batches from `fetch_offset` on did not fit on the follower's disk when they were last sent.
    """

    topic_id: TopicId
    partition: PartitionId
    leader_epoch: Epoch
    fetch_offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    last_fetched_epoch: Epoch
    log_start_offset: Offset = 0
    no_room: bool = False


class ReplicaFetchRequest(Message, frozen=True):
    """A follower's fetch. The stream is the fetch session: `partitions` are those that are new or changed since its
    last request, `forgotten` those that the follower no longer follows. A partition in both is first forgotten and
    then added: what the session has said about it no longer counts. `session` grows with each session that the
    follower begins with this leader."""

    correlation_id: Int64
    broker_id: BrokerId
    broker_epoch: Epoch
    max_wait_ms: Milliseconds
    max_bytes: Size
    partitions: Annotated[list[ReplicaPartition], Meta(max_length=100_000)]
    forgotten: Annotated[list[tuple[TopicId, PartitionId]], Meta(max_length=100_000)] = msgspec.field(
        default_factory=list
    )
    session: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class ReplicaFetched(Message, frozen=True):
    """`diverging_epoch` >= 0: nothing was read; truncate to min(own end of that epoch, `diverging_end_offset`).

    `purge_offset`: deletions below it may be missing from the leader's log. A follower that lacks them begins again.
    """

    topic_id: TopicId
    partition: PartitionId
    error_code: ErrorCode
    error_message: Text = ""
    leader_epoch: Epoch = -1
    high_watermark: Offset = -1
    log_start_offset: LogStart = -1
    diverging_epoch: Epoch = -1
    diverging_end_offset: Offset = -1
    length: Size = 0
    purge_offset: LogStart = 0


class ReplicaFetchResponse(Message, frozen=True):
    """Partitions with news; the payload is their frames, in order."""

    correlation_id: Int64
    partitions: Annotated[list[ReplicaFetched], Meta(max_length=100_000)]
    error_code: ErrorCode = 0
    error_message: Text = ""
