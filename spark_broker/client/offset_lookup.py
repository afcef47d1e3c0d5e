"""Offsets by time, from the partitions' leaders: earliest, latest, or the first at or after a moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spark_broker.client.cluster_view import address_of
from spark_broker.client.metadata import UNKNOWN_TOPIC_GRACE_MS, ClusterMetadata
from spark_broker.client.retry import Deadline
from spark_broker.errors import (
    BootstrapUnreachableError,
    ClosedError,
    LeaderNotAvailableError,
    RequestTimedOutError,
    SparkBrokerError,
    ThrottlingQuotaExceededError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    error_from_code,
)
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import BrokerMetadata, ListOffsets, OffsetInfo, Offsets, OffsetSpec

Failures = dict[TopicPartition, SparkBrokerError]


@dataclass(frozen=True)
class Reach:
    """Where a caller is, and how many stored bytes (0: it does not matter) it wants from there on."""

    start: int
    max_bytes: int = 0


NOWHERE = Reach(-1)


class _Lookup:
    """One lookup of many partitions: those that fail are asked for again, of whoever leads them then."""

    def __init__(
        self,
        metadata: ClusterMetadata,
        wanted: Mapping[TopicPartition, int],
        deadline: Deadline,
        read_committed: bool,
        reaches: Mapping[TopicPartition, Reach],
    ) -> None:
        self._metadata = metadata
        self._read_committed = read_committed
        self._deadline = deadline
        self._missing = dict(wanted)
        self._reaches = reaches
        self._grace = Deadline.after_ms(UNKNOWN_TOPIC_GRACE_MS)
        self.found: dict[TopicPartition, OffsetInfo] = {}
        self.failures: Failures = {}

    def run(self) -> None:
        """Until everything is found, has failed for good, or the deadline has passed."""
        self._metadata.use({tp.topic for tp in self._missing})
        attempt = 0
        while True:
            self.failures = {}
            for broker, specs in self._by_leader().items():
                self._ask(broker, specs)
            final = all(self._is_final(error) for error in self.failures.values())
            wait_s = self._metadata.backoff.wait_s(attempt)
            if not self._missing or final or wait_s > self._deadline.remaining_s:
                return
            attempt += 1
            if self._metadata.closing.wait(wait_s):
                raise ClosedError("the client was closed during the call")
            try:
                self._metadata.refresh(self._deadline)
            except (BootstrapUnreachableError, RequestTimedOutError, ThrottlingQuotaExceededError):
                # Asked with the last milliseconds: that nobody answered within them says nothing of the cluster.
                if not self._deadline.expired:
                    raise
                return

    def _is_final(self, error: SparkBrokerError) -> bool:
        if isinstance(error, UnknownTopicOrPartitionError):
            return self._grace.expired
        return not error.retriable

    def _by_leader(self) -> dict[BrokerMetadata, list[tuple[TopicPartition, OffsetSpec]]]:
        view = self._metadata.view
        if any(view.partition(tp.topic, tp.partition) is None for tp in self._missing):
            view = self._metadata.refresh(self._deadline)
        grouped: dict[BrokerMetadata, list[tuple[TopicPartition, OffsetSpec]]] = {}
        for tp, timestamp_ms in self._missing.items():
            topic, leader = view.topic(tp.topic), view.leader(tp.topic, tp.partition)
            if topic is None or tp.partition >= len(topic.partitions):
                self.failures[tp] = UnknownTopicOrPartitionError(f"{tp} does not exist")
            elif leader is None:
                self.failures[tp] = LeaderNotAvailableError(f"{tp} has no leader")
            else:
                epoch = leader[1].leader_epoch
                reach = self._reaches.get(tp, NOWHERE)
                where = (topic.topic_id, tp.partition, epoch)
                spec = OffsetSpec(*where, timestamp_ms, self._read_committed, reach.start, reach.max_bytes)
                grouped.setdefault(leader[0], []).append((tp, spec))
        return grouped

    def _ask(self, broker: BrokerMetadata, specs: list[tuple[TopicPartition, OffsetSpec]]) -> None:
        by_key = {(spec.topic_id, spec.partition): tp for tp, spec in specs}
        try:
            answer = self._metadata.call(address_of(broker), ListOffsets([spec for _, spec in specs]), self._deadline)
            if not isinstance(answer, Offsets):
                raise UnknownServerError(f"ListOffsets was answered with {type(answer).__name__}")
        except SparkBrokerError as error:
            self.failures.update(dict.fromkeys(by_key.values(), error))
            return
        for info in answer.partitions:
            tp = by_key.get((info.topic_id, info.partition))
            if tp is None:
                continue
            if info.error_code:
                self.failures[tp] = error_from_code(info.error_code, info.error_message)
            else:
                self.found[tp] = info
                self._missing.pop(tp, None)


def lookup_offsets(
    metadata: ClusterMetadata,
    wanted: Mapping[TopicPartition, int],
    deadline: Deadline,
    *,
    read_committed: bool = True,
    reaches: Mapping[TopicPartition, Reach] | None = None,
) -> dict[TopicPartition, OffsetInfo]:
    """OffsetInfo of every partition, by its timestamp (ms; -1 latest, -2 earliest). Raises the first failure.

    `read_committed`: the latest is the last stable offset, else the high watermark. `reaches`: for these partitions the
    answer says too what is stored from there to the offset.
    """
    lookup = _Lookup(metadata, wanted, deadline, read_committed, reaches or {})
    lookup.run()
    for error in lookup.failures.values():
        raise error
    return lookup.found


def try_lookup_offsets(
    metadata: ClusterMetadata, wanted: Mapping[TopicPartition, int], deadline: Deadline, *, read_committed: bool = True
) -> tuple[dict[TopicPartition, OffsetInfo], Failures]:
    """As `lookup_offsets`, but partitions that failed are returned beside those that were found."""
    lookup = _Lookup(metadata, wanted, deadline, read_committed, {})
    lookup.run()
    return lookup.found, lookup.failures


def at_time(partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
    return dict.fromkeys(partitions, timestamp_ms)
