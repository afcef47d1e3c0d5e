"""The admin client: topics, partitions, settings, brokers, transactions. Groups: `GroupAdmin`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, Unpack

from spark_broker.client import broker_calls, given, transaction_admin
from spark_broker.client.cluster_view import TopicView, address_of
from spark_broker.client.group_admin import GroupAdmin
from spark_broker.client.history_reader import offsets_with_history
from spark_broker.client.keywords import AdminSettings
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.offset_lookup import all_at, lookup_offsets, try_lookup_offsets
from spark_broker.client.one_process import OfOneProcess
from spark_broker.client.record_deletion import RecordDeletion
from spark_broker.client.reentry import refuse_within
from spark_broker.client.retry import UNKNOWN_TOPIC_GRACE_MS, Deadline, Rounds, call_with_retries, failure_of
from spark_broker.client.settings import Address, client_config
from spark_broker.client.topic_changes import creation_of, creations_of, settings_of
from spark_broker.client.topic_description import described
from spark_broker.client.topic_schema import arrow_schema
from spark_broker.config import AdminConfig
from spark_broker.errors import (
    ClosedError,
    InvalidPartitionsError,
    InvalidRequestError,
    LeaderNotAvailableError,
    RequestTimedOutError,
    SparkBrokerError,
    StorageFullError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
    error_from_code,
)
from spark_broker.model import (
    ClusterDescription,
    LogDirInfo,
    NewTopic,
    TopicDescription,
    TopicPartition,
    TransactionInfo,
)
from spark_broker.protocol.messages import (
    AlterTopicConfigRequest,
    AlterTopicSchemaRequest,
    CreatePartitionsRequest,
    DeleteTopicRequest,
    ElectLeadersRequest,
    ElectLeadersResponse,
    EmptyResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
    ReassignPartitionRequest,
    TopicMetadata,
)
from spark_broker.protocol.messages.common import known
from spark_broker.protocol.schema import normalize_schema, schema_to_bytes
from spark_broker.times import EARLIEST, LATEST, LogEdge, Moment
from spark_broker.visible import shown

_log = logging.getLogger(__name__)

DESCRIBE_OFFSETS_MS = 2000
"""How long a description waits for the leaders' offsets. A leader that has not answered by then gives none."""

KNOWN_MS = 2000
"""How long a call that creates, changes or deletes a topic waits until every live broker knows of the change."""

_NO_ROOM_GRACE_MS = 5_000
"""Full disks are full until somebody frees them, but what was just freed may not be noticed yet."""

_REFRESH_AGE_S = 1.0


Answer = TypeVar("Answer", bound=Message)


class Admin(GroupAdmin, OfOneProcess):
    """Administration through any broker. Safe for use by many threads.

    ```python
    with Admin(servers) as admin:
        print(admin.list_topics(), admin.describe_topic("greetings").partitions[0].high_watermark)
    ```
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[AdminSettings],
    ) -> None:
        self._config = client_config(AdminConfig, bootstrap_servers, config, settings)
        self._metadata = ClusterMetadata.connect(self._config)
        self._close_lock = threading.Lock()

    def create_topic(self, topic: NewTopic) -> None:
        """Create a topic; returns once every partition has a leader.

        Waits up to 2 s until every live broker knows of it. Raises TopicAlreadyExistsError (also when the first answer
        of a retried request was lost), InvalidTopicError, InvalidSchemaError, InvalidPartitionsError,
        InvalidReplicationFactorError, InvalidConfigError.
        """
        deadline, request = self._deadline(), creation_of(topic)
        self._change(request, deadline)
        self._await_leaders(request.name, 0, max(1, request.partitions), deadline)

    def create_topics(self, topics: Iterable[NewTopic]) -> dict[str, SparkBrokerError | None]:
        """Create several topics. Returns for each name None, or the reason why that topic was not created.

        Raises InvalidRequestError for two of one name that differ: no topic was tried then. Raises ClosedError and
        BootstrapUnreachableError: some topics were not tried then.
        """
        return {name: failure_of(self.create_topic, topic) for name, topic in creations_of(topics).items()}

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its records. Waits up to 2 s until every live broker knows of it.

        Raises UnknownTopicOrPartitionError, InvalidTopicError (internal topics).
        """
        deadline, name = self._deadline(), given.topic_name(name)
        topic = self._meant(name, deadline)
        self._change(DeleteTopicRequest(name, topic.topic_id), deadline)

        def shows_another(shown: TopicView | TopicMetadata | None) -> bool:
            return shown is None or shown.topic_id != topic.topic_id

        late = RequestTimedOutError(f"topic {name!r} was deleted, but brokers still show it")
        self._await(lambda: shows_another(self._metadata.fetch([name], deadline).topic(name)), deadline, late)
        self._await_brokers(name, shows_another, deadline)

    def delete_topics(self, names: Iterable[str]) -> dict[str, SparkBrokerError | None]:
        """Delete several topics. Returns for each name None, or the reason why that topic was not deleted.

        Raises ClosedError and BootstrapUnreachableError. Some topics were not tried then.
        """
        return {name: failure_of(self.delete_topic, name) for name in given.names(names, "names")}

    def list_topics(self, *, include_internal: bool = False) -> list[str]:
        """Names of topics, sorted."""
        return [topic.name for topic in self._topics(include_internal)]

    def describe_topics(self, *, include_internal: bool = False) -> list[TopicDescription]:
        """Every topic, sorted by name, as one broker shows it. No leader is asked, so partitions have no offsets."""
        return [described(topic, {}) for topic in self._topics(include_internal)]

    def _topics(self, include_internal: bool) -> list[TopicView]:
        deadline, internal_too = self._deadline(), given.flag(include_internal, "include_internal")
        topics = self._metadata.fetch(None, deadline).topics
        return [topic for _, topic in sorted(topics.items()) if internal_too or not topic.internal]

    def describe_topic(self, name: str, *, with_offsets: bool = True) -> TopicDescription:
        """The topic as it is now. A partition whose leader does not answer within 2 s has no offsets, and none has any
        with `with_offsets=False`, which asks no leader.

        Raises UnknownTopicOrPartitionError.
        """
        deadline, name = self._deadline(), given.topic_name(name)
        asks_leaders = given.flag(with_offsets, "with_offsets")
        topic = self._existing(name, deadline)
        if not asks_leaders:
            return described(topic, {})
        partitions = [TopicPartition(name, state.partition) for state in topic.partitions]
        listed, _ = try_lookup_offsets(
            self._metadata, all_at(partitions, LATEST), Deadline.after_ms(DESCRIBE_OFFSETS_MS)
        )
        # An election may have come meanwhile. Show the leaders that gave the offsets.
        topic = self._metadata.view.topic(name) or topic
        next_run_ms = self._next_tiering_ms(topic) if topic.settings.delta_path else -1
        return described(topic, listed, known(next_run_ms))

    def _next_tiering_ms(self, topic: TopicView) -> int:
        """Only the controller knows; -1 if it does not answer at once."""
        try:
            return self._metadata.as_recorded(topic, Deadline.after_ms(DESCRIBE_OFFSETS_MS)).next_tiering_ms
        except SparkBrokerError as error:
            if not error.retriable:
                raise
            return -1

    def create_partitions(self, name: str, total: int) -> None:
        """Raise the number of partitions to `total`. A key may have another partition from then on.

        Returns once every new partition has a leader. Raises InvalidPartitionsError where there are as many already,
        InconsistentTopicIdError where the topic was deleted and created again meanwhile.
        """
        deadline, name = self._deadline(), given.topic_name(name)
        total = given.whole_number(total, "total", given.INT32_BITS)
        topic = self._meant(name, deadline)
        before = len(topic.partitions)
        try:
            self._change(CreatePartitionsRequest(name, total, topic.topic_id), deadline)
        except InvalidPartitionsError:
            # A request that nobody answered was sent again: the first one may have done it.
            if before >= total or len(self._metadata.as_recorded(topic, deadline).partitions) != total:
                raise
        self._await_leaders(name, before, total, deadline)

    def _meant(self, name: str, deadline: Deadline) -> TopicView:
        """The topic that a change is for, before its first try: a later one, or a copy that comes late, must not change
        the next topic of the name. Raises UnknownTopicOrPartitionError.
        """
        topic = self._metadata.recorded(name, deadline)
        if topic is None:
            raise UnknownTopicOrPartitionError(f"topic {name!r} does not exist")
        return topic

    def alter_topic_config(self, name: str, values: Mapping[str, object]) -> None:
        """Set settings of a topic; None resets one to its default. Waits up to 2 s until every live broker knows.

        Raises InvalidConfigError, UnknownTopicOrPartitionError and InconsistentTopicIdError (the topic was deleted and
        created again meanwhile).
        """
        deadline, name, settings = self._deadline(), given.topic_name(name), settings_of(values)
        self._change(AlterTopicConfigRequest(name, settings, self._meant(name, deadline).topic_id), deadline)
        self._await_altered(name, lambda topic, altered: topic.config == dict(altered.config), deadline)

    def alter_topic_schema(self, name: str, schema: object) -> None:
        """Add columns to a typed topic, or widen types of its columns. Waits up to 2 s until every live broker knows.

        `schema`: the columns that change, or all, as in `NewTopic`. New columns come last, must be nullable, and are
        null in older records. Integers, floats and decimals (of one scale) can become wider. Columns that are not named
        stay. Raises UnknownTopicOrPartitionError, InconsistentTopicIdError (the topic was deleted and created again
        meanwhile), InvalidTopicError (internal topics) and InvalidSchemaError.
        """
        deadline, name = self._deadline(), given.topic_name(name)
        changes = schema_to_bytes(normalize_schema(arrow_schema(schema)))
        self._change(AlterTopicSchemaRequest(name, changes, self._meant(name, deadline).topic_id), deadline)
        self._await_altered(name, lambda topic, altered: len(topic.schemas) >= len(altered.schemas), deadline)

    def describe_cluster(self, *, include_fenced: bool = False) -> ClusterDescription:
        """The cluster with its live brokers, in order of id. `include_fenced`: fenced brokers are listed, too."""
        deadline, fenced_too = self._deadline(), given.flag(include_fenced, "include_fenced")
        view = self._metadata.fetch([], deadline)
        answer = MetadataResponse(
            view.cluster_id, view.controller_epoch, list(view.brokers.values()), [], view.controller
        )
        return answer.to_description(include_fenced=fenced_too)

    def elect_leaders(
        self, partitions: Iterable[TopicPartition] | None = None, *, unclean: bool = False
    ) -> dict[TopicPartition, SparkBrokerError | None]:
        """Give these partitions (None: all) back to their preferred leaders, where those are in sync.

        `unclean`: instead, let any live replica lead a partition that has no leader. It is the replica whose log
        reaches furthest, by the reports of the brokers. Acknowledged records that it lacks are lost; consumers get
        LogTruncationError. Returns for each partition None, or the reason why it stayed as it is; with
        `partitions=None`, only for those that needed an election. Raises UnknownTopicOrPartitionError and
        InconsistentTopicIdError (a topic was deleted and created again meanwhile).
        """
        wanted = None if partitions is None else [(tp.topic, tp.partition) for tp in given.topic_partitions(partitions)]
        is_unclean, deadline = given.flag(unclean, "unclean"), self._deadline()
        ids = {name: self._meant(name, deadline).topic_id for name in dict.fromkeys(name for name, _ in wanted or ())}
        answer = self._ask(ElectLeadersRequest(wanted, is_unclean, ids), ElectLeadersResponse, deadline)
        return {
            TopicPartition(result.topic, result.partition): error_from_code(result.error_code, result.error_message)
            if result.error_code
            else None
            for result in answer.results
        }

    def reassign_partition(self, partition: TopicPartition, replicas: Sequence[int]) -> None:
        """Move a partition's replicas to these brokers, preferred leader first. Returns once the move has begun.

        Raises UnknownTopicOrPartitionError, InconsistentTopicIdError (the topic was deleted and created again
        meanwhile) and InvalidReplicaAssignmentError.
        """
        tp, brokers = given.topic_partition(partition), given.items(replicas, "replicas", "broker ids")
        ids = [given.whole_number(broker, "a broker", given.INT32_BITS) for broker in brokers]
        deadline = self._deadline()
        topic_id = self._meant(tp.topic, deadline).topic_id
        self._change(ReassignPartitionRequest(tp.topic, tp.partition, ids, topic_id), deadline)

    def list_offsets(self, moments: Mapping[TopicPartition, datetime | LogEdge]) -> dict[TopicPartition, int | None]:
        """The log start (or that of the topic's table) for "earliest", the high watermark for "latest", or else the
        first record at or after a time. None: there is no such record. A time without a zone is UTC.
        """
        wanted = {tp: _moment_of(moment) for tp, moment in given.by_partition(moments, "moments").items()}
        listed = lookup_offsets(self._metadata, wanted, self._deadline(), read_committed=False)
        offsets = offsets_with_history(self._metadata.view, wanted, listed)
        return {tp: known(offset) for tp, offset in offsets.items()}

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records before these offsets (-1: all that are committed), in the log and in the topic's table.

        -1 means what is committed when the leader is first asked. What comes later stays, also where a leader is asked
        again, and so does another topic of the name. Readers no longer get the records once this returns. Segments go
        when all their records are deleted, rows of the table with the next tiering. Returns where each partition begins
        now. Raises OffsetOutOfRangeError for an offset that is not committed, UnknownTopicOrPartitionError,
        InconsistentTopicIdError (the topic was created again meanwhile), InvalidTopicError (internal topics).
        """
        offsets = {tp: offset.offset for tp, offset in given.offsets(offsets).items()}
        wrong = next((offset for offset in offsets.values() if offset < -1), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"records before offset {wrong} cannot be deleted",
                hint="Give the offset of the first record that stays; -1 deletes up to the high watermark.",
            )
        deadline = self._deadline()
        deletion = RecordDeletion(self._metadata, offsets)
        starts = deletion.run(deadline)
        for name in {tp.topic for tp in starts}:
            mine = {tp.partition: _recorded(offsets[tp], start) for tp, start in starts.items() if tp.topic == name}
            self._await_brokers(name, partial(_begins_at, deletion.topic_ids[name], mine), deadline)
        view = self._metadata.refresh(deadline) if starts else self._metadata.view
        for tp, start in starts.items():
            topic = view.topic(tp.topic)
            if topic is not None and topic.topic_id == deletion.topic_ids[tp.topic]:
                starts[tp] = topic.begins(tp.partition, start)
        return starts

    def describe_log_dirs(self) -> list[LogDirInfo]:
        """What each live broker has in its log directory, and what it has set aside there, in order of their ids."""
        return broker_calls.describe_log_dirs(self._metadata, self._deadline())

    def list_transactions(self) -> list[TransactionInfo]:
        """Every transactional id and application that a live broker coordinates, sorted by id."""
        return transaction_admin.list_transactions(self._metadata, self._deadline())

    def describe_transaction(self, transactional_id: str) -> TransactionInfo:
        """Raises InvalidProducerIdMappingError when the id is not known."""
        deadline, known_id = self._deadline(), given.text(transactional_id, "transactional_id")
        return transaction_admin.describe_transaction(self._metadata, known_id, deadline)

    def abort_transaction(self, transactional_id: str) -> None:
        """Abort what is open under the id, as its time-out would; returns once every partition shows it.

        Raises InvalidTxnStateError when nothing is open, and InvalidProducerIdMappingError when the id is not known.
        """
        deadline, known_id = self._deadline(), given.text(transactional_id, "transactional_id")
        transaction_admin.abort_transaction(self._metadata, known_id, deadline)

    def close(self) -> None:
        """Close the connections; calls that wait raise ClosedError."""
        with self._close_lock:
            if not self._metadata.closing.is_set():
                self._metadata.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deadline(self) -> Deadline:
        if self._metadata.closing.is_set():
            raise ClosedError("the admin client is closed")
        refuse_within(self)
        return Deadline.after_ms(self._config.default_api_timeout_ms)

    def _change(self, request: Message, deadline: Deadline) -> None:
        """Send a change to any broker, which passes it on to the controller."""
        self._ask(request, EmptyResponse, deadline)

    def _ask(self, request: Message, kind: type[Answer], deadline: Deadline) -> Answer:
        """Ask the controller, through any broker."""
        if self._metadata.age_s > _REFRESH_AGE_S:
            # A call to a frozen broker waits for a second at least. Fresh metadata does not list such a broker.
            self._metadata.refresh(deadline)
        no_room_believed = Deadline.after_ms(_NO_ROOM_GRACE_MS)

        def retry(error: SparkBrokerError) -> bool:
            # The controller knows every topic. A topic that it does not know does not exist.
            if isinstance(error, UnknownTopicOrPartitionError):
                return False
            return error.retriable and not (isinstance(error, StorageFullError) and no_room_believed.expired)

        answer = call_with_retries(
            lambda: self._metadata.call_any(request, deadline),
            deadline=deadline,
            backoff=self._metadata.backoff,
            closing=self._metadata.closing,
            retry=retry,
        )
        if not isinstance(answer, kind):
            raise UnknownServerError(f"{type(request).__name__} was answered with {type(answer).__name__}")
        return answer

    def _existing(self, name: str, deadline: Deadline) -> TopicView:
        """Ask a broker for the topic. The cache is not used."""
        given.topic_name(name)
        missing = UnknownTopicOrPartitionError(f"topic {name!r} does not exist")

        def exists() -> bool:
            return name in self._metadata.fetch([name], deadline).topics

        if not exists():  # The grace begins with the first answer.
            self._await(exists, Deadline.after_ms(UNKNOWN_TOPIC_GRACE_MS).or_sooner(deadline), missing)
        topic = self._metadata.view.topic(name)
        if topic is None:
            raise missing
        return topic

    def _await_leaders(self, name: str, first: int, partitions: int, deadline: Deadline) -> None:
        """Wait until there are so many partitions, and those from `first` on have leaders.

        Raises UnknownTopicOrPartitionError where the topic was deleted meanwhile.
        """

        def ready() -> bool:
            topic = self._metadata.fetch([name], deadline).topic(name)
            if topic is None:
                if self._metadata.recorded(name, deadline) is None:
                    raise UnknownTopicOrPartitionError(f"topic {name!r} was deleted meanwhile")
                return False
            return len(topic.partitions) >= partitions and all(p.leader >= 0 for p in topic.partitions[first:])

        self._await(ready, deadline, LeaderNotAvailableError(f"a partition of {name!r} has no leader yet"))
        self._await_brokers(name, lambda topic: topic is not None and len(topic.partitions) >= partitions, deadline)

    def _await_altered(self, name: str, has: Callable[[TopicMetadata, TopicView], bool], deadline: Deadline) -> None:
        """Wait until every live broker has what the controller has recorded of the topic. The change is made already:
        that the controller cannot be asked is no failure of it.
        """
        try:
            altered = self._metadata.recorded(name, Deadline.after_ms(min(KNOWN_MS, deadline.remaining_ms)))
        except SparkBrokerError as error:
            if not error.retriable:
                raise
            _log.info("it is not known which brokers have heard of the change of %r: %s", name, error)
            return
        if altered is not None:
            self._await_brokers(name, lambda topic: topic is None or has(topic, altered), deadline)

    def _await_brokers(self, name: str, knows: Callable[[TopicMetadata | None], bool], deadline: Deadline) -> None:
        """Wait up to KNOWN_MS until every live broker knows of a change of this topic. A client may ask any of them."""
        patience = Deadline.after_ms(min(KNOWN_MS, deadline.remaining_ms))
        lagging = [address_of(broker) for broker in self._metadata.view.brokers.values() if not broker.fenced]

        def all_know() -> bool:
            nonlocal lagging
            lagging = [address for address in lagging if not self._knows(address, name, knows, patience)]
            return not lagging

        with suppress(RequestTimedOutError):
            self._await(all_know, patience, RequestTimedOutError(f"a live broker lags behind a change of {name!r}"))

    def _knows(
        self, address: Address, name: str, knows: Callable[[TopicMetadata | None], bool], patience: Deadline
    ) -> bool:
        try:
            answer = self._metadata.call(address, MetadataRequest([name]), patience)
        except SparkBrokerError:
            return True  # a broker that does not answer misleads no client
        topics = answer.topics if isinstance(answer, MetadataResponse) else []
        return knows(next((topic for topic in topics if topic.name == name), None))

    def _await(self, condition: Callable[[], bool], deadline: Deadline, otherwise: SparkBrokerError) -> None:
        rounds, failure = Rounds(deadline, self._metadata.backoff, self._metadata.closing), None
        while True:
            try:
                if condition():
                    return
            except RequestTimedOutError as error:
                raise rounds.reason(error, failure) from None
            if not rounds.next():
                raise otherwise
            failure = otherwise


def _recorded(asked: int, start: int) -> int:
    """What the controller has recorded at least. The log may start later, because of its own retention."""
    return start if asked < 0 else min(asked, start)


def _begins_at(topic_id: str, starts: Mapping[int, int], topic: TopicMetadata | None) -> bool:
    """Whether the broker that shows this topic knows from where the partitions of the one with this id go on."""
    if topic is None or topic.topic_id != topic_id:
        return True
    known_starts = dict(enumerate(topic.log_starts))
    return all(known_starts.get(partition, 0) >= start for partition, start in starts.items())


def _moment_of(moment: object) -> Moment:
    if isinstance(moment, datetime):
        return given.moment_us(moment, "a moment")
    edges: tuple[LogEdge, ...] = (EARLIEST, LATEST)
    edge = next((edge for edge in edges if isinstance(moment, str) and moment == edge), None)
    if edge is None:
        raise InvalidRequestError(
            f"{shown(moment)} is neither a datetime nor 'earliest' nor 'latest'", hint="Give one of these."
        )
    return edge
