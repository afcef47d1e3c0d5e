"""What a `ConsumerMachine` wants done, and how its shell reports the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.membership import SendHeartbeat
from spark_broker.client.settings import Address
from spark_broker.errors import SparkBrokerError
from spark_broker.model import OffsetAndMetadata, TopicPartition
from spark_broker.times import Moment

Offsets = Mapping[TopicPartition, OffsetAndMetadata]
Generations = Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class RefreshMetadata:
    """Ask any broker about these topics; then `metadata_came` or `round_failed`."""

    topics: frozenset[str]


@dataclass(frozen=True, slots=True)
class ListTopics:
    """Ask any broker which topics there are; then `topics_listed` or `round_failed`."""


@dataclass(frozen=True, slots=True)
class FetchCommitted:
    """Ask the group's coordinator; then `committed_came` or `round_failed`. `generations`: of the positions."""

    generations: Generations


@dataclass(frozen=True, slots=True)
class LookUpOffsets:
    """Ask the leaders for the offsets at these moments; then `offsets_came` or `round_failed`."""

    moments: Mapping[TopicPartition, Moment]
    generations: Generations


Round = ListTopics | RefreshMetadata | FetchCommitted | LookUpOffsets
"""Lookups run one at a time. Each one uses what the one before it has found."""


@dataclass(slots=True, eq=False)
class CommitOffsets:
    """Have the group's coordinator store these offsets by `deadline_ms`; then `commit_ended`.

    `error`, once it is `done`: why they may not be stored. `background`: no caller waits for it. `life`: of the group's
    member that has read; a later one does not commit them.
    """

    offsets: Offsets
    deadline_ms: float
    background: bool
    topic_ids: Mapping[TopicPartition, str] = field(default_factory=dict)  # of the topics that were read
    life: int = 0
    done: bool = False
    error: SparkBrokerError | None = None


@dataclass(frozen=True, slots=True)
class BreakFetch:
    """What the fetch under way asks of this leader is out of date. Close its stream."""

    broker_id: int


@dataclass(frozen=True, slots=True)
class LeaveLeader:
    """Close the stream and the connection to this broker: it leads nothing here, or has another address."""

    broker_id: int


@dataclass(frozen=True, slots=True)
class FollowLeader:
    """From now on there are fetches for this broker (`next_fetch`)."""

    broker_id: int
    address: Address


@dataclass(frozen=True, slots=True)
class ReadHistory:
    """Read these offsets (`end` is exclusive) from the topic's Delta table, as many as are wanted at a time; then
    `history_came` or `history_failed`. One read runs at a time. `generation`: of the position.
    """

    tp: TopicPartition
    topic: TopicView
    generation: int
    start: int
    end: int


Effect = Round | SendHeartbeat | CommitOffsets | ReadHistory | BreakFetch | LeaveLeader | FollowLeader
