"""The coordinator of groups' committed offsets: the leader of a partition of `__consumer_offsets` keeps them in it.

Nothing here starts a thread, and only `confirm` waits, for a transaction's first commit. So simulated brokers run the
same class.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.confirmation import Confirm, no_coordinator
from spark_broker.broker.offsets_shard import OffsetsShard
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Reply
from spark_broker.broker.request_queue import GiveWay, keep_on, pieces
from spark_broker.core.group_offsets import offset_record
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    InconsistentTopicIdError,
    InvalidRequestError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from spark_broker.model import CONSUMER_OFFSETS_TOPIC
from spark_broker.protocol.messages import (
    CommittedOffset,
    EmptyResponse,
    Message,
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    TransactionalOffsetCommitRequest,
)
from spark_broker.protocol.murmur2 import group_partition

logger = logging.getLogger(__name__)


class GroupCoordinator:
    """Committed offsets are the only consumer state of brokers. They live in the log: a new leader reads them from it.

    `commit` and `fetch` are safe from any thread; `write_snapshots` belongs to one.
    """

    def __init__(
        self,
        manager: ReplicaManager,
        snapshot_records: int,
        confirm: Confirm = no_coordinator,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._manager = manager
        self._snapshot_records = snapshot_records
        self._confirm = confirm
        self._clock = clock
        self._lock = threading.Lock()
        self._shards: dict[int, OffsetsShard] = {}  # by partition of `__consumer_offsets`

    def commit(
        self,
        request: OffsetCommitRequest | TransactionalOffsetCommitRequest,
        deadline_ms: int,
        reply: Reply,
        give_way: GiveWay = keep_on,
    ) -> None:
        """Append the offsets; those of a transaction count once it is committed. `deadline_ms`: boot-time clock.

        `reply` gets EmptyResponse once the offsets are committed in the log, or the error. It may be called under a
        partition's lock, from any thread, so it must not block. Raises the error that the client gets when nothing was
        appended.
        """
        if not request.group_id:
            raise InvalidRequestError("a commit without a group id")
        if any(committed.offset < 0 for committed in request.offsets):
            raise InvalidRequestError("a commit of a negative offset")
        transaction = request if isinstance(request, TransactionalOffsetCommitRequest) else None
        if transaction is not None:
            self._check_partitions(transaction)
        records = [
            offset_record(request.group_id, self._identified(committed))
            for committed in pieces(request.offsets, give_way)
        ]
        shard = self._shard(request.group_id)  # Not sooner: this broker may lose the partition while it gives way.
        if not records:
            reply(EmptyResponse())
            return
        with _coordinator_errors():
            shard.append(records, _Answer(reply, EmptyResponse()), deadline_ms, transaction, self._confirm)

    def _identified(self, committed: CommittedOffset) -> CommittedOffset:
        """The offset with the id of its topic. Raises InconsistentTopicIdError for a topic that was deleted."""
        image = self._manager.image
        topic = image.topic(committed.topic)
        if not committed.topic_id:
            return committed if topic is None else msgspec.structs.replace(committed, topic_id=topic.topic_id)
        if committed.topic_id in image.tombstones:
            raise InconsistentTopicIdError(f"topic {committed.topic!r}, whose offset is committed, was deleted")
        if committed.topic_id not in image.topics:
            raise UnknownTopicIdError(f"this broker knows no topic {committed.topic!r} with id {committed.topic_id}")
        return committed

    def _check_partitions(self, request: TransactionalOffsetCommitRequest) -> None:
        """Refuse offsets of partitions that do not exist: they would be committed, and never be found again."""
        for offset in request.offsets:
            topic = self._manager.image.topic(offset.topic)
            if topic is None:
                raise UnknownTopicOrPartitionError(f"offsets in a transaction: topic {offset.topic!r} does not exist")
            if offset.partition >= len(topic.partitions):
                there = f"topic {topic.name!r} has {len(topic.partitions)} partitions"
                raise UnknownTopicOrPartitionError(f"offsets in a transaction: {there}, not {offset.partition + 1}")

    def fetch(self, request: OffsetFetchRequest, deadline_ms: int, reply: Reply) -> None:
        """Answer with what the group has committed, once it is certain that this broker still leads.

        A group's next member must not begin before what the last one has committed, nor before what a transaction may
        still commit (`require_stable`). `reply` and errors: as of `commit`, and UnstableOffsetCommitError.
        """
        with _coordinator_errors():
            shard = self._shard(request.group_id)
            deleted = self._manager.image.tombstones
            committed = shard.committed(request.group_id, request.partitions, require_stable=request.require_stable)
            answer = OffsetFetchResponse([offset for offset in committed if offset.topic_id not in deleted])
            shard.confirm_leadership(_Answer(reply, answer), deadline_ms)

    def write_snapshots(self) -> None:
        """Shorten logs that have grown, and drop shards that other brokers lead now. Call this from time to time."""
        for number, shard in list(self._shards.items()):
            if not shard.is_current(self._manager.find(*shard.partition.key)):
                with self._lock:
                    if self._shards.get(number) is shard:
                        del self._shards[number]
                continue
            try:
                shard.write_snapshot(self._snapshot_records, self._manager.image.tombstones)
            except SparkBrokerError as error:
                # A failed disk has stopped the partition already. After any other error the log only stays long for
                # now. Such an error may come ten times a second while replicas are missing.
                logger.debug("%s: the snapshot waits: %s", shard.partition, error)

    def _shard(self, group_id: str) -> OffsetsShard:
        topic = self._manager.image.topic(CONSUMER_OFFSETS_TOPIC)
        if topic is None:
            raise CoordinatorNotAvailableError(f"{CONSUMER_OFFSETS_TOPIC} does not exist yet")
        number = group_partition(group_id, len(topic.partitions))
        partition = self._manager.partition(topic.topic_id, number)
        with self._lock:
            shard = self._shards.get(number)
            if shard is None or not shard.is_current(partition):
                shard = self._shards[number] = OffsetsShard(partition, partition.leader_epoch(), self._clock)
        return shard


@contextmanager
def _coordinator_errors() -> Iterator[None]:
    try:
        yield
    except (NotLeaderOrFollowerError, NotEnoughReplicasError) as error:
        raise CoordinatorNotAvailableError(error.message) from None


class _Answer:
    """The answer that the client gets when what was appended for it is committed. Called under the partition's lock.

    A commit need not be read back before it is answered: `OffsetsShard.committed` first reads what was committed since.
    """

    def __init__(self, reply: Reply, answer: Message) -> None:
        self._reply = reply
        self._answer = answer

    def acknowledge(self, base_offset: int) -> None:
        del base_offset
        self._reply(self._answer)

    def refuse(self, error: SparkBrokerError) -> None:
        self._reply(error)
