"""Calls to a coordinator: the leader of the partition of an internal topic to which a group or transaction belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from spark_broker.client.cluster_view import ClusterView, TopicView, address_of
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.retry import Deadline, TopicGrace, call_with_retries
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InvalidConfigError,
    SparkBrokerError,
    StaleMemberEpochError,
    UnknownServerError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC, NAME_MAX, TRANSACTION_STATE_TOPIC
from spark_broker.protocol.messages import (
    BrokerMetadata,
    CallRequest,
    CallResponse,
    DeleteGroupOffsetsRequest,
    DeleteGroupRequest,
    EnsureOffsetsTopicRequest,
    EnsureTransactionsTopicRequest,
    OffsetCommitRequest,
    PartitionMetadata,
)
from spark_broker.protocol.murmur2 import group_partition

A = TypeVar("A", bound=CallResponse)
R = TypeVar("R")

_ENSURE: dict[str, CallRequest] = {
    CONSUMER_OFFSETS_TOPIC: EnsureOffsetsTopicRequest(),
    TRANSACTION_STATE_TOPIC: EnsureTransactionsTopicRequest(),
}

PATIENCE_MS = 2000
"""Limit of the first attempt at a request that may be repeated. Each further attempt may take twice as long."""


def coordinator_of(view: ClusterView, topic: str, key: str) -> tuple[BrokerMetadata, PartitionMetadata]:
    """The leader of the key's partition of an internal topic. Raises CoordinatorNotAvailableError."""
    internal = view.topic(topic)
    if internal is None:
        raise CoordinatorNotAvailableError(f"{topic} is being created")
    partition = group_partition(key, len(internal.partitions))
    leader = view.leader(topic, partition)
    if leader is None:
        raise CoordinatorNotAvailableError(f"{topic}-{partition} has no leader")
    return leader


def addressed(request: CallRequest, state: PartitionMetadata) -> CallRequest:
    """The request as it is sent to this leader of the key's partition: it must not count in a later leadership."""
    if isinstance(request, OffsetCommitRequest | DeleteGroupRequest | DeleteGroupOffsetsRequest):
        return msgspec.structs.replace(request, coordinator_epoch=state.leader_epoch)
    return request


class CoordinatorClient:
    """The coordinator of one key: a group's id in `__consumer_offsets`, a transactional id in `__transaction_state`.

    It creates the topic when it is missing. It finds a coordinator that has moved. The caller sees neither.
    """

    def __init__(self, metadata: ClusterMetadata, topic: str, key: str) -> None:
        """Raises InvalidConfigError for a key that no coordinator takes."""
        if not 1 <= len(key) <= NAME_MAX:
            what = "group.id" if topic == CONSUMER_OFFSETS_TOPIC else "transactional.id"
            raise InvalidConfigError(f"{what} has {len(key)} characters; coordinators take 1 to {NAME_MAX}")
        self._metadata = metadata
        self._topic = topic
        self._key = key
        metadata.use([topic])

    def ask(
        self,
        request: CallRequest,
        answer: type[A],
        deadline: Deadline,
        *,
        patient: bool = True,
        trying: Callable[[], None] = lambda: None,
    ) -> A:
        """The coordinator's answer. Raises its typed error, or the last retriable one at the deadline.

        Not `patient`: the request may be sent twice without harm. So a frozen coordinator is not waited for until
        request.timeout.ms. The request is sent again, to the broker that is the coordinator then. `trying` is called
        before each attempt: what a second one is answered says nothing of the first.
        """
        attempt = 0

        def once() -> CallResponse:
            nonlocal attempt
            attempt += 1
            trying()
            limit = deadline if patient else Deadline.after_ms(PATIENCE_MS << min(attempt - 1, 16))
            return self._ask_leader(request, limit.or_sooner(deadline), deadline)

        return self._checked(request, self._retried(once, deadline), answer)

    def ask_once(self, request: CallRequest, answer: type[A], deadline: Deadline) -> A:
        """The coordinator's answer to one attempt. Raises its typed error, also a retriable one. What is known of the
        cluster is looked up again then, if the error says so.
        """
        try:
            response = self._ask_leader(request, deadline, deadline)
        except SparkBrokerError as error:
            if error.refresh_metadata:
                self._metadata.refresh(Deadline.after_ms(PATIENCE_MS))
            raise
        return self._checked(request, response, answer)

    def _checked(self, request: CallRequest, response: CallResponse, answer: type[A]) -> A:
        if not isinstance(response, answer):
            raise UnknownServerError(f"{type(request).__name__} was answered with {type(response).__name__}")
        return response

    def partition(self, deadline: Deadline) -> int:
        """The key's partition of the internal topic. Waits until the topic is there, as `ask` does. Raises typed errors
        when no broker says how many partitions there are.
        """
        topic = self._retried(lambda: self._found_topic(deadline), deadline)
        return group_partition(self._key, len(topic.partitions))

    def _retried(self, action: Callable[[], R], deadline: Deadline) -> R:
        grace = TopicGrace()
        return call_with_retries(
            action,
            deadline=deadline,
            backoff=self._metadata.backoff,
            closing=self._metadata.closing,
            # The caller has to name another epoch.
            retry=lambda error: not isinstance(error, StaleMemberEpochError) and grace.retries(error),
            between=lambda error: self._look_again(error, deadline),
        )

    def _look_again(self, error: SparkBrokerError, deadline: Deadline) -> None:
        if error.refresh_metadata:
            self._metadata.refresh(deadline)

    def _ask_leader(self, request: CallRequest, limit: Deadline, deadline: Deadline) -> CallResponse:
        self._found_topic(deadline)
        broker, state = coordinator_of(self._metadata.view, self._topic, self._key)
        return self._metadata.call(address_of(broker), addressed(request, state), limit)

    def _found_topic(self, deadline: Deadline) -> TopicView:
        topic = self._metadata.view.topic(self._topic)
        if topic is None:
            self._metadata.use([self._topic])
            topic = self._metadata.refresh(deadline).topic(self._topic)
        if topic is None:
            self._metadata.call_any(_ENSURE[self._topic], deadline)
            topic = self._metadata.refresh(deadline).topic(self._topic)
        if topic is None:
            raise CoordinatorNotAvailableError(f"{self._topic} is being created")
        return topic
