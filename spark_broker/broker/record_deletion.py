"""Deletes records on demand. The leader knows what is committed, and the controller remembers from where a partition
goes on: so what is deleted stays so, whichever replica leads later, and in the topic's table, too.
"""

from __future__ import annotations

from collections.abc import Callable

from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Answer, Reply
from spark_broker.broker.request_queue import GiveWay, keep_on, pieces
from spark_broker.errors import InvalidTopicError, SparkBrokerError
from spark_broker.protocol.messages import (
    DeletedRecords,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    Message,
    RaiseLogStartsRequest,
)

Key = tuple[str, int]


class RecordDeletion:
    """One request. Nothing waits here: `ask_controller` answers later, maybe in another thread.

    One topic after the other: the controller is asked about one at a time.
    """

    def __init__(
        self,
        manager: ReplicaManager,
        ask_controller: Callable[[Message, Reply], None],
        request: DeleteRecordsRequest,
        reply: Reply,
        give_way: GiveWay = keep_on,
    ) -> None:
        self._give_way = give_way
        self._manager = manager
        self._ask_controller = ask_controller
        self._request = request
        self._reply = reply
        self._results: dict[Key, DeletedRecords] = {}
        self._topics: list[tuple[str, list[tuple[int, int]]]] = []  # still to ask about: id, (partition, offset)

    def begin(self) -> None:
        """Check every partition, and ask the controller about those that may be deleted from."""
        starts: dict[str, list[tuple[int, int]]] = {}
        for spec in pieces(self._request.partitions, self._give_way):
            try:
                self._check_topic(spec.topic_id)
                partition = self._manager.partition(spec.topic_id, spec.partition)
                offset = partition.reader.records_to_delete(spec.leader_epoch, spec.offset)
            except SparkBrokerError as error:
                self._failed(spec.topic_id, spec.partition, error)
            else:
                starts.setdefault(spec.topic_id, []).append((spec.partition, offset))
        self._topics = list(starts.items())
        self._next()

    def _check_topic(self, topic_id: str) -> None:
        """Raises InvalidTopicError, as the controller does: no user can change the policy of such a topic."""
        topic = self._manager.image.topics.get(topic_id)
        if topic is not None and topic.internal:
            raise InvalidTopicError(f"records of the internal topic {topic.name} cannot be deleted")

    def _next(self) -> None:
        if not self._topics:
            self._reply(DeleteRecordsResponse([self._results[_key(spec)] for spec in self._request.partitions]))
            return
        topic_id, starts = self._topics.pop()

        def answered(answer: Answer) -> None:
            for number, offset in pieces(starts, self._give_way):
                if isinstance(answer, SparkBrokerError):
                    self._failed(topic_id, number, answer)
                else:
                    self._recorded(topic_id, number, offset)
            self._next()

        self._ask_controller(RaiseLogStartsRequest(topic_id, starts), answered)

    def _recorded(self, topic_id: str, number: int, offset: int) -> None:
        try:
            start = self._manager.partition(topic_id, number).records_deleted(offset)
        except SparkBrokerError:
            start = offset  # This broker has lost the partition meanwhile. The next leader has heard of the deletion.
        self._results[topic_id, number] = DeletedRecords(topic_id, number, 0, log_start_offset=start)

    def _failed(self, topic_id: str, number: int, error: SparkBrokerError) -> None:
        self._results[topic_id, number] = DeletedRecords(topic_id, number, error.code, error.message[:1000])


def _key(spec: DeleteRecordsPartition) -> Key:
    return spec.topic_id, spec.partition
