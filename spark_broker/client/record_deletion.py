"""Deletes records before offsets, at the leaders of the partitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spark_broker.client.cluster_view import ClusterView, TopicView, address_of
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import OffsetLookup, all_at
from spark_broker.client.retry import Deadline, Rounds, TopicGrace
from spark_broker.errors import (
    InconsistentTopicIdError,
    LeaderNotAvailableError,
    RequestTimedOutError,
    SparkBrokerError,
    StaleMetadataError,
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
from spark_broker.times import LATEST


class RecordDeletion:
    """Deletes in rounds, until every partition has answered. A repetition deletes nothing more.

    Before its first round the controller says which topics are meant. Of each partition without an offset, the leader
    says once what is committed, before anything of it is deleted. Otherwise a later round would delete from the next
    topic of the name, or what was appended since an earlier round.
    """

    def __init__(self, metadata: ClusterMetadata, offsets: Mapping[TopicPartition, int]) -> None:
        self._metadata = metadata
        self._missing = dict(offsets)  # -1: what is committed is not known yet
        self._failures: dict[TopicPartition, SparkBrokerError] = {}
        self._starts: dict[TopicPartition, int] = {}
        self.topic_ids: dict[str, str] = {}

    def run(self, deadline: Deadline) -> dict[TopicPartition, int]:
        """Where each partition begins now. Raises the first failure that another try does not mend."""
        names = {tp.topic for tp in self._missing}
        self._metadata.use(names)
        self._note_topics(names, deadline)
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

    def _note_topics(self, names: Collection[str], deadline: Deadline) -> None:
        """Raises UnknownTopicOrPartitionError."""
        recorded = self._metadata.all_recorded(names, deadline)
        for tp in self._missing:
            if tp.topic not in recorded or tp.partition >= len(recorded[tp.topic].partitions):
                raise UnknownTopicOrPartitionError(f"{tp} does not exist")
        self.topic_ids = {name: topic.topic_id for name, topic in recorded.items()}

    def _round(self, view: ClusterView, deadline: Deadline, rounds: Rounds) -> None:
        earlier, self._failures = self._failures, {}
        view = view.only(self._shown(view, deadline))
        self._find_ends(view, deadline)
        specs: dict[BrokerMetadata, dict[TopicPartition, DeleteRecordsPartition]] = {}
        for tp, offset in self._missing.items():
            if tp in self._failures:
                continue
            leader = view.leader(tp.topic, tp.partition)
            if leader is None:
                self._failures[tp] = LeaderNotAvailableError(f"{tp} has no leader")
            else:
                broker, state = leader
                spec = DeleteRecordsPartition(self.topic_ids[tp.topic], tp.partition, state.leader_epoch, offset)
                specs.setdefault(broker, {})[tp] = spec
        for broker, asked in specs.items():
            self._ask(broker, asked, deadline)
        for tp, error in self._failures.items():
            self._failures[tp] = rounds.reason(error, earlier.get(tp))

    def _shown(self, view: ClusterView, deadline: Deadline) -> set[str]:
        """The names whose topics are those of the call. Each other one has failed: only the controller knows whether
        the view lags behind or the topic is gone.
        """
        names = {tp.topic for tp in self._missing}
        shown = {name for name in names if _id_of(view.topic(name)) == self.topic_ids[name]}
        recorded = self._metadata.all_recorded(names - shown, deadline)
        reasons = {name: self._why_not_shown(name, _id_of(recorded.get(name))) for name in names - shown}
        self._failures.update({tp: reasons[tp.topic] for tp in self._missing if tp.topic in reasons})
        return shown

    def _why_not_shown(self, name: str, recorded_id: str) -> SparkBrokerError:
        if recorded_id == self.topic_ids[name]:
            return StaleMetadataError(f"a broker lags behind what is recorded of topic {name!r}")
        if recorded_id:
            return InconsistentTopicIdError(
                f"topic {name!r} was deleted and created again during the call",
                hint="Records of the new topic were not deleted: nothing of it had been there when the call began.",
            )
        return UnknownTopicOrPartitionError(f"topic {name!r} was deleted during the call")

    def _find_ends(self, view: ClusterView, deadline: Deadline) -> None:
        """What is committed of partitions without an offset: so much is deleted, in whichever round that succeeds."""
        without = [tp for tp, offset in self._missing.items() if offset < 0 and tp not in self._failures]
        lookup = OffsetLookup(all_at(without, LATEST), read_committed=False)
        for broker, request in lookup.requests(view).items():
            try:
                lookup.answered(request, self._metadata.call(address_of(broker), request, deadline))
            except SparkBrokerError as error:
                lookup.answered(request, error)
        self._missing.update({tp: listed.offset for tp, listed in lookup.found.items()})
        self._failures.update(lookup.failures)

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


def _id_of(topic: TopicView | None) -> str:
    return "" if topic is None else topic.topic_id
