"""Markers on their way to partitions' leaders. They are sent until they are written; without threads or waiting."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from spark_broker.broker.marker_writer import MARKERS_MAX
from spark_broker.controller.image import BrokerState, MetadataImage
from spark_broker.core.transaction_state import MarkerTarget
from spark_broker.errors import InvalidProducerEpochError, invariant
from spark_broker.protocol.messages import (
    Message,
    TransactionMarker,
    WriteTransactionMarkersRequest,
    WriteTransactionMarkersResponse,
)

logger = logging.getLogger(__name__)

BACKOFF_MS = 50
BACKOFF_MAX_MS = 1000
Shard = int
"""The partition of `__transaction_state` that a target belongs to."""


@dataclass(slots=True)
class _Waiting:
    """`due_ms`: not sent again before then. `in_flight`: the broker that has been asked."""

    shard: Shard
    attempts: int = 0
    due_ms: int = 0
    in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One request to one broker."""

    broker: BrokerState
    targets: tuple[MarkerTarget, ...]
    request: WriteTransactionMarkersRequest

    @property
    def broker_id(self) -> int:
        return self.broker.id


class MarkerQueue:
    """Not thread-safe. At most one request to each broker is under way; whatever waits shares the next one."""

    def __init__(self) -> None:
        self._waiting: dict[MarkerTarget, _Waiting] = {}
        self._busy: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, shard: Shard, targets: Iterable[MarkerTarget]) -> None:
        for target in targets:
            self._waiting.setdefault(target, _Waiting(shard))

    def drop(self, shard: Shard) -> None:
        """This broker coordinates the shard no longer: the next leader writes its markers."""
        self._waiting = {target: waiting for target, waiting in self._waiting.items() if waiting.shard != shard}

    def gone(self, image: MetadataImage) -> list[tuple[Shard, MarkerTarget]]:
        """Remove the targets whose topic was deleted, and return them: they count as done.

        This is sound because a partition is added only while the coordinator's image has its topic. Every later image,
        of this coordinator or of the next, is newer than the topic's creation: a topic that it lacks was deleted.
        """
        gone = [
            (waiting.shard, target) for target, waiting in self._waiting.items() if target.topic_id not in image.topics
        ]
        for _, target in gone:
            del self._waiting[target]
        return gone

    def next_rounds(self, image: MetadataImage, now_ms: int) -> list[Round]:
        """The requests to send now, each to the leader of its partitions as the image has it."""
        chosen: dict[int, list[MarkerTarget]] = {}
        for target, waiting in self._waiting.items():
            state = image.partition(target.topic_id, target.partition)
            # A marker in flight to a former leader is sent to the new one, too: a marker may be written twice.
            if state is None or waiting.in_flight == state.leader or waiting.due_ms > now_ms:
                continue
            targets = chosen.setdefault(state.leader, [])
            if state.leader not in self._busy and state.leader in image.brokers and len(targets) < MARKERS_MAX:
                targets.append(target)
                waiting.in_flight = state.leader
        rounds = [
            Round(image.brokers[leader], tuple(targets), _request(targets))
            for leader, targets in chosen.items()
            if targets
        ]
        self._busy.update(sent.broker_id for sent in rounds)
        return rounds

    def answered(self, sent: Round, answer: Message | Exception, now_ms: int) -> list[tuple[Shard, MarkerTarget]]:
        """The answer to a request: returns the targets that are done. The others are sent again after a while."""
        invariant(sent.broker_id in self._busy, "broker %d answers a round that is not under way", sent.broker_id)
        self._busy.discard(sent.broker_id)
        done = _done(answer) if isinstance(answer, WriteTransactionMarkersResponse) else set()
        if not isinstance(answer, WriteTransactionMarkersResponse):
            logger.info("markers for broker %s are sent again: %s", sent.broker_id, answer)
        finished: list[tuple[Shard, MarkerTarget]] = []
        for target in sent.targets:
            waiting = self._waiting.get(target)
            if waiting is None or waiting.in_flight != sent.broker_id:
                continue
            waiting.in_flight = None
            if (target.producer_id, target.topic_id, target.partition) in done:
                del self._waiting[target]
                finished.append((waiting.shard, target))
            else:
                waiting.due_ms = now_ms + min(BACKOFF_MS << min(waiting.attempts, 10), BACKOFF_MAX_MS)
                waiting.attempts += 1
        return finished


def _done(answer: WriteTransactionMarkersResponse) -> set[tuple[int, str, int]]:
    """Markers that are committed, or refused for an old epoch: nothing of the transaction is open there."""
    finished = (0, InvalidProducerEpochError.code)
    return {
        (result.producer_id, result.topic_id, result.partition)
        for result in answer.results
        if result.error_code in finished
    }


def _request(targets: list[MarkerTarget]) -> WriteTransactionMarkersRequest:
    """One request, in which the partitions of each marker are together."""
    markers: dict[tuple[int, int, bool], list[tuple[str, int]]] = {}
    for target in targets:
        key = (target.producer_id, target.producer_epoch, target.committed)
        markers.setdefault(key, []).append((target.topic_id, target.partition))
    return WriteTransactionMarkersRequest([TransactionMarker(*key, partitions) for key, partitions in markers.items()])
