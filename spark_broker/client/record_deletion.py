"""Deletes records before offsets, at the leaders of the partitions."""

from __future__ import annotations

from collections.abc import Mapping

from spark_broker.client.cluster_view import ClusterView, address_of
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline, Rounds, TopicGrace
from spark_broker.errors import (
    LeaderNotAvailableError,
    RequestTimedOutError,
    SparkBrokerError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    error_from_code,
)
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import (
    BrokerMetadata,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
)


class RecordDeletion:
    """Deletes in rounds, until every partition has answered. A repetition deletes nothing more."""

    def __init__(self, metadata: ClusterMetadata, offsets: Mapping[TopicPartition, int]) -> None:
        self._metadata = metadata
        self._missing = dict(offsets)
        self._failures: dict[TopicPartition, SparkBrokerError] = {}
        self._starts: dict[TopicPartition, int] = {}

    def run(self, deadline: Deadline) -> dict[TopicPartition, int]:
        """Where each partition begins now. Raises the first failure that another try does not mend."""
        self._metadata.use({tp.topic for tp in self._missing})
        grace, rounds = TopicGrace(), Rounds(deadline, self._metadata.backoff, self._metadata.closing)
        view = self._metadata.refresh(deadline)
        while True:
            self._round(view, deadline, rounds)
            if not self._missing:
                return self._starts
            for error in self._failures.values():
                if not grace.retries(error):
                    raise error
            failure = next(iter(self._failures.values()))
            if not rounds.next():
                raise failure
            try:
                view = self._metadata.refresh(deadline)
            except RequestTimedOutError as error:
                raise rounds.reason(error, failure) from None

    def _round(self, view: ClusterView, deadline: Deadline, rounds: Rounds) -> None:
        earlier, self._failures = self._failures, {}
        specs: dict[BrokerMetadata, dict[TopicPartition, DeleteRecordsPartition]] = {}
        for tp, offset in self._missing.items():
            topic, leader = view.topic(tp.topic), view.leader(tp.topic, tp.partition)
            if topic is None or tp.partition >= len(topic.partitions):
                self._failures[tp] = UnknownTopicOrPartitionError(f"{tp} does not exist")
            elif leader is None:
                self._failures[tp] = LeaderNotAvailableError(f"{tp} has no leader")
            else:
                broker, state = leader
                spec = DeleteRecordsPartition(topic.topic_id, tp.partition, state.leader_epoch, offset)
                specs.setdefault(broker, {})[tp] = spec
        for broker, asked in specs.items():
            self._ask(broker, asked, deadline)
        for tp, error in self._failures.items():
            self._failures[tp] = rounds.reason(error, earlier.get(tp))

    def _ask(
        self, broker: BrokerMetadata, asked: Mapping[TopicPartition, DeleteRecordsPartition], deadline: Deadline
    ) -> None:
        try:
            answer = self._metadata.call(address_of(broker), DeleteRecordsRequest(list(asked.values())), deadline)
            if not isinstance(answer, DeleteRecordsResponse):
                raise UnknownServerError(f"DeleteRecords was answered with {type(answer).__name__}")
        except SparkBrokerError as error:
            self._failures.update(dict.fromkeys(asked, error))
            return
        partitions = {(spec.topic_id, spec.partition): tp for tp, spec in asked.items()}
        for deleted in answer.partitions:
            tp = partitions.get((deleted.topic_id, deleted.partition))
            if tp is None:
                continue
            if deleted.error_code:
                self._failures[tp] = error_from_code(deleted.error_code, deleted.error_message)
            else:
                self._starts[tp] = deleted.log_start_offset
                self._missing.pop(tp, None)
