"""Transactions: calls to their coordinator, from clients and from leaders, and from it to the leaders.

The coordinator of a transactional id is the leader of partition `murmur2(id) mod n` of `__transaction_state`. A
transaction has one writer (Kafka's form: a producer with a transactional id) or many. With many, the id belongs to an
application, whose `version`s are committed one after the other.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from spark_broker.protocol.messages.calls import CommittedOffset
from spark_broker.protocol.messages.common import (
    Epoch,
    ErrorCode,
    Int64,
    Message,
    Milliseconds,
    Name,
    PartitionId,
    Text,
    TopicId,
)

ProducerId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ProducerEpoch = Annotated[int, Meta(ge=0, le=2**15 - 1)]
Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class EnsureTransactionsTopicRequest(Message, frozen=True):
    """Create `__transaction_state` if it does not exist."""


class InitTransactionsRequest(Message, frozen=True):
    """Asks for the producer id of a transactional id, in a new epoch. Answered with InitProducerIdResponse.

    Fences every earlier producer of the id, and aborts what it left open.
    """

    transactional_id: Name
    timeout_ms: Milliseconds


class AddPartitionToTransactionRequest(Message, frozen=True):
    """Leader to coordinator: the partition becomes part of the transaction (KIP-890).

    The leader sends this before it takes the transaction's first batch, and repeats it from time to time while batches
    come. A repetition renews the transaction's time-out. Answered with AddPartitionToTransactionResponse.
    """

    transactional_id: Name
    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    topic_id: TopicId
    partition: PartitionId


class AddPartitionToTransactionResponse(Message, frozen=True):
    """The partition is in the open transaction. The leader asks again if batches still come after `repeat_after_ms`:
    this renews the transaction's time-out."""

    repeat_after_ms: Milliseconds


class EndTransactionRequest(Message, frozen=True):
    """Commit or abort a producer's transaction. It is answered once every partition shows the outcome, with the
    InitProducerIdResponse of the producer's next transaction. A repetition gets the same answer."""

    transactional_id: Name
    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    committed: bool


class JoinTransactionRequest(Message, frozen=True):
    """A task attempt becomes a writer of an application's version. Answered with the attempt's InitProducerIdResponse.

    The first join opens the transaction. A join of a new execution aborts what older executions left open.
    `single_use`: the application has one version. Its name is forgotten `transaction.max.timeout.ms` after the end.
    """

    application: Name
    version: Version
    execution: Name
    timeout_ms: Milliseconds
    single_use: bool = False


class CommitTransactionRequest(Message, frozen=True):
    """Commit what `winners` (producer ids of joins) wrote for the version, and abort every other writer.

    Answered with EmptyResponse once every partition shows it. ALREADY_COMMITTED: the version is not above the last.
    """

    application: Name
    version: Version
    execution: Name
    winners: Annotated[list[ProducerId], Meta(max_length=100_000)]
    single_use: bool = False


class AbortTransactionRequest(Message, frozen=True):
    """Abort an application's open version, if this execution opened it. Later joins are refused."""

    application: Name
    version: Version
    execution: Name
    single_use: bool = False


class TransactionMarker(Message, frozen=True):
    """`producer_epoch` is the one that begins after the marker."""

    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    committed: bool
    partitions: Annotated[list[tuple[TopicId, PartitionId]], Meta(max_length=100_000)]


class WriteTransactionMarkersRequest(Message, frozen=True):
    """Coordinator to a leader: answered once the markers are committed."""

    markers: Annotated[list[TransactionMarker], Meta(max_length=100_000)]


class MarkerResult(Message, frozen=True):
    producer_id: ProducerId
    topic_id: TopicId
    partition: PartitionId
    error_code: ErrorCode
    error_message: Text = ""


class WriteTransactionMarkersResponse(Message, frozen=True):
    results: list[MarkerResult]


class TransactionalOffsetCommitRequest(Message, frozen=True):
    """To the group's coordinator: offsets that count once the producer's transaction is committed.

    The member is the one that has read the records (KIP-447), as in OffsetCommitRequest.
    """

    group_id: Name
    offsets: Annotated[list[CommittedOffset], Meta(max_length=10_000)]
    transactional_id: Name
    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    sequence: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    member_id: Name = ""
    member_epoch: Epoch = -1
    instance_id: Name = ""


class DescribeTransactionsRequest(Message, frozen=True):
    """To any broker: describe transactional ids that it coordinates (`None`: all of them).

    Only their coordinator describes ids that are named; another broker refuses. The answer lacks unknown ids.
    """

    transactional_ids: Annotated[list[Name], Meta(max_length=10_000)] | None = None


class TransactionDescription(Message, frozen=True):
    """`state`: Empty, Ongoing, PrepareCommit or PrepareAbort. `last_committed` -1: no version yet."""

    transactional_id: Name
    state: Name
    version: Int64
    execution: Name
    last_committed: Int64
    timeout_ms: Milliseconds
    idle_ms: Int64
    writers: list[tuple[Int64, Int64]]
    partitions: list[tuple[TopicId, PartitionId]]
    coordinator_epoch: Epoch = -1


class DescribeTransactionsResponse(Message, frozen=True):
    transactions: list[TransactionDescription]
