"""Finds offsets by time, at the leaders of the partitions: earliest, latest, or the first at or after a moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spark_broker.client.cluster_view import ClusterView, address_of
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline, Rounds, TopicGrace
from spark_broker.errors import (
    BootstrapUnreachableError,
    LeaderNotAvailableError,
    RequestTimedOutError,
    SparkBrokerError,
    StaleMetadataError,
    ThrottlingQuotaExceededError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    error_from_code,
)
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import (
    BrokerMetadata,
    ListedOffset,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
)
from spark_broker.times import Moment

Failures = dict[TopicPartition, SparkBrokerError]


@dataclass(frozen=True)
class Reach:
    """The offset where a caller stands, and how many stored bytes it wants from there on (0: any number)."""

    start: int
    max_bytes: int = 0


NOWHERE = Reach(-1)

EVERY_BYTE = 2**62
"""`Reach.max_bytes` of a caller who only wants to know how much is stored: the leader then reads no index in vain."""


class OffsetLookup:
    """One lookup of many partitions, in rounds: which leaders to ask, and what they answer. It has no thread and no
    clock.

    An answer counts only if the view shows as much of a topic's history as its leader knows: else the offsets between
    would look as if they were deleted. `missing`: partitions without an offset yet. `failures`: of the last round.
    """

    def __init__(
        self,
        wanted: Mapping[TopicPartition, Moment],
        *,
        read_committed: bool,
        reaches: Mapping[TopicPartition, Reach] | None = None,
    ) -> None:
        self._read_committed = read_committed
        self._reaches = reaches or {}
        self._keys: dict[tuple[str, int], TopicPartition] = {}
        self._view = ClusterView()  # of the last round
        self.missing = dict(wanted)
        self.found: dict[TopicPartition, ListedOffset] = {}
        self.failures: Failures = {}

    def requests(self, view: ClusterView) -> dict[BrokerMetadata, ListOffsetsRequest]:
        """A round: one request for each leader of missing partitions."""
        self.failures = {}
        self._view = view
        specs: dict[BrokerMetadata, list[ListOffsetsPartition]] = {}
        for tp, moment in self.missing.items():
            topic, leader = view.topic(tp.topic), view.leader(tp.topic, tp.partition)
            if topic is None or tp.partition >= len(topic.partitions):
                self.failures[tp] = UnknownTopicOrPartitionError(f"{tp} does not exist")
            elif leader is None:
                self.failures[tp] = LeaderNotAvailableError(f"{tp} has no leader")
            else:
                broker, state = leader
                self._keys[topic.topic_id, tp.partition] = tp
                reach = self._reaches.get(tp, NOWHERE)
                where = (topic.topic_id, tp.partition, state.leader_epoch)
                spec = ListOffsetsPartition(*where, moment, self._read_committed, reach.start, reach.max_bytes)
                specs.setdefault(broker, []).append(spec)
        return {broker: ListOffsetsRequest(of_broker) for broker, of_broker in specs.items()}

    def answered(self, request: ListOffsetsRequest, answer: object) -> None:
        """A leader's answer, or the error instead of an answer."""
        if not isinstance(answer, ListOffsetsResponse):
            unexpected = UnknownServerError(f"ListOffsets was answered with {type(answer).__name__}")
            error = answer if isinstance(answer, SparkBrokerError) else unexpected
            self.failures.update({self._keys[spec.topic_id, spec.partition]: error for spec in request.partitions})
            return
        for info in answer.partitions:
            tp = self._keys.get((info.topic_id, info.partition))
            if tp is None:
                continue
            if info.error_code:
                self.failures[tp] = error_from_code(info.error_code, info.error_message)
            elif info.history_end_offset > self._known_history_end(tp):
                self.failures[tp] = StaleMetadataError(f"{tp}: the history ends at {info.history_end_offset}")
            else:
                self.found[tp] = info
                self.missing.pop(tp, None)

    def _known_history_end(self, tp: TopicPartition) -> int:
        topic = self._view.topic(tp.topic)
        return 0 if topic is None else topic.history_of(tp.partition)[1]


def _run(lookup: OffsetLookup, metadata: ClusterMetadata, deadline: Deadline) -> None:
    """Ask in rounds until every offset is found, a partition has failed for good, or the deadline has passed."""
    metadata.use({tp.topic for tp in lookup.missing})
    grace, rounds = TopicGrace(), Rounds(deadline, metadata.backoff, metadata.closing)
    while True:
        earlier = lookup.failures
        view = metadata.view
        if any(view.partition(tp.topic, tp.partition) is None for tp in lookup.missing):
            view = metadata.refresh(deadline)
        requests = lookup.requests(view)
        order = metadata.suspects_last(map(address_of, requests))
        # One that does not answer uses up only its share of the time, and in the next round only what others leave.
        for asked, broker in enumerate(sorted(requests, key=lambda broker: order.index(address_of(broker)))):
            share = Deadline.after_ms(deadline.remaining_ms / (len(requests) - asked))
            lookup.answered(requests[broker], _ask(metadata, broker, requests[broker], share))
        for tp, error in lookup.failures.items():
            lookup.failures[tp] = rounds.reason(error, earlier.get(tp))
        final = not any(grace.retries(error) for error in lookup.failures.values())
        if not lookup.missing or final or not rounds.next():
            return
        try:
            metadata.refresh(deadline)
        except (BootstrapUnreachableError, RequestTimedOutError, ThrottlingQuotaExceededError):
            # Only milliseconds were left for an answer. Their end says nothing about the cluster.
            if not deadline.expired:
                raise
            return


def _ask(metadata: ClusterMetadata, broker: BrokerMetadata, request: ListOffsetsRequest, deadline: Deadline) -> object:
    try:
        return metadata.call(address_of(broker), request, deadline)
    except SparkBrokerError as error:
        return error


def lookup_offsets(
    metadata: ClusterMetadata,
    wanted: Mapping[TopicPartition, Moment],
    deadline: Deadline,
    *,
    read_committed: bool = True,
    reaches: Mapping[TopicPartition, Reach] | None = None,
) -> dict[TopicPartition, ListedOffset]:
    """OffsetInfo of every partition, at its moment. Raises the first failure.

    `read_committed`: the latest offset is the last stable offset instead of the high watermark. `reaches`: for these
    partitions the answer also says how much is stored from `start` to the offset found.
    """
    lookup = OffsetLookup(wanted, read_committed=read_committed, reaches=reaches)
    _run(lookup, metadata, deadline)
    for error in lookup.failures.values():
        raise error
    return lookup.found


def try_lookup_offsets(
    metadata: ClusterMetadata,
    wanted: Mapping[TopicPartition, Moment],
    deadline: Deadline,
    *,
    read_committed: bool = True,
) -> tuple[dict[TopicPartition, ListedOffset], Failures]:
    """Like `lookup_offsets`, but it returns the failures of partitions beside the offsets."""
    lookup = OffsetLookup(wanted, read_committed=read_committed)
    _run(lookup, metadata, deadline)
    return lookup.found, lookup.failures


def all_at(partitions: Iterable[TopicPartition], moment: Moment) -> dict[TopicPartition, Moment]:
    return dict.fromkeys(partitions, moment)
