"""How a reader fetches: what a request says, what an answer and its errors mean, how long to back off.

All of it works without thread, clock or socket. The consumer's threads, the DataFrame's range reader and the
simulator's consumer send these requests and hand in the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.fetch_decoder import Projection, decode_fetched
from spark_broker.client.partition_position import FetchRetry, Prefetched
from spark_broker.client.retry import Backoff
from spark_broker.config import ConsumerConfig
from spark_broker.core.divergence import Diverging
from spark_broker.errors import (
    CorruptMessageError,
    InvalidRequestError,
    LogTruncationError,
    OffsetMovedToTieredStorageError,
    OffsetOutOfRangeError,
    SchemaMismatchError,
    SparkBrokerError,
    error_from_code,
)
from spark_broker.model import NO_EPOCH
from spark_broker.protocol.frame import Frame, decode_frames
from spark_broker.protocol.messages import FetchedPartition, FetchPartition, FetchRequest, FetchResponse

Key = tuple[str, int]
"""Topic id and partition."""


class Meaning(Enum):
    """What an error means for a position."""

    TRUNCATED = "the log diverges from what was read"
    OUT_OF_RANGE = "the offset is not in the log"
    TIERED = "the offset is in the topic's table"
    DAMAGED = "the answer does not decode; another one may"
    RETRY = "another leader, or this one later, may answer otherwise"
    FATAL = "nobody will answer otherwise"


def meaning_of(error: SparkBrokerError) -> Meaning:
    """What a reader has to do after a fetch of a partition has failed."""
    match error:
        case LogTruncationError():
            return Meaning.TRUNCATED
        case OffsetOutOfRangeError():
            return Meaning.OUT_OF_RANGE
        case OffsetMovedToTieredStorageError():
            return Meaning.TIERED
        case CorruptMessageError():
            return Meaning.DAMAGED
        case SchemaMismatchError():
            return Meaning.FATAL
        case _:
            return Meaning.RETRY if error.retriable else Meaning.FATAL


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """A partition as a request asks for it. `read_to` and `read_epoch`: end (exclusive) and leader epoch of what was
    read before. The leader compares them with its log (KIP-320). `read_to` -1: the end is `offset`. `generation`: of
    the position."""

    topic: TopicView
    partition: int
    leader_epoch: int
    offset: int
    read_epoch: int = NO_EPOCH
    read_to: int = -1
    generation: int = 0

    @property
    def key(self) -> Key:
        return self.topic.topic_id, self.partition


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """One request to one leader. A healthy leader has answered it by `due_ms`."""

    request: FetchRequest
    targets: dict[Key, FetchTarget]
    due_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class FetchedPart:
    """One partition of a leader's answer. `payload` has its frames, or only their headers when they are in files.

    `local`: the frames that were read from the files.
    """

    target: FetchTarget
    response: FetchedPartition
    payload: memoryview
    local: list[Frame] | None = None


@dataclass(frozen=True, slots=True)
class FetchAnswer:
    """What a leader answered about one partition: an error, or batches up to `response.next_offset`."""

    target: FetchTarget
    response: FetchedPartition
    fetched: list[Prefetched] = field(default_factory=list)
    error: SparkBrokerError | None = None

    @property
    def diverging(self) -> Diverging:
        """With a LogTruncationError: where the log diverges from what was read."""
        return Diverging(self.response.diverging_epoch, self.response.diverging_end_offset)


class FetchMachine:
    """Makes the requests of one reader, and reads their answers."""

    def __init__(
        self, config: ConsumerConfig, columns: Sequence[str] | None, backoff: Backoff, *, boot_id: str = ""
    ) -> None:
        """`boot_id`: of this machine, for a reader that may read a leader's files (`FetchedPart.local`)."""
        self._boot_id = boot_id
        self._config = config
        self._columns = columns
        self._backoff = backoff
        self._correlation_id = 0

    def columns_of(self, topic: TopicView) -> list[str] | None:
        """The columns that are asked of a topic. All topics of one request have the same columns."""
        return Projection(topic, self._columns).asked

    def wanted_of(self, topic: TopicView) -> list[str] | None:
        """The columns that the user wants of a topic; None: all of them."""
        return Projection(topic, self._columns).wanted

    def request(self, targets: Iterable[FetchTarget], *, max_wait_ms: int | None = None, now_ms: float = 0.0) -> Fetch:
        """The next request. `max_wait_ms`: instead of fetch.max.wait.ms."""
        asked = {target.key: target for target in targets}
        config = self._config
        wait_ms = config.fetch_max_wait_ms if max_wait_ms is None else max_wait_ms
        self._correlation_id += 1
        request = FetchRequest(
            correlation_id=self._correlation_id,
            max_wait_ms=wait_ms,
            min_bytes=config.fetch_min_bytes,
            max_bytes=config.fetch_max_bytes,
            partitions=[
                FetchPartition(
                    topic_id=target.topic.topic_id,
                    partition=target.partition,
                    leader_epoch=target.leader_epoch,
                    offset=target.offset,
                    max_bytes=config.max_partition_fetch_bytes,
                    last_fetched_epoch=target.read_epoch,
                    read_to=target.read_to,
                )
                for target in asked.values()
            ],
            columns=self.columns_of(next(iter(asked.values())).topic),
            read_committed=config.read_committed,
            boot_id=self._boot_id,
        )
        return Fetch(request, asked, now_ms + wait_ms)

    def read(self, fetch: Fetch, response: object, payload: memoryview) -> list[FetchAnswer]:
        """What the leader answered. Raises the error that refuses the whole request."""
        return [self.answer(part) for part in self.parts(fetch, response, payload)]

    def parts(self, fetch: Fetch, response: object, payload: memoryview) -> list[FetchedPart]:
        """The answer by partition, not decoded. Raises the error that refuses the whole request."""
        if not isinstance(response, FetchResponse) or response.correlation_id != fetch.request.correlation_id:
            raise InvalidRequestError("the leader did not answer the fetch that was sent")
        if response.error_code:
            raise error_from_code(response.error_code, response.error_message)
        parts = []
        start = 0
        for partition in response.partitions:
            end = start + partition.length
            target = fetch.targets.get((partition.topic_id, partition.partition))
            if target is not None:
                parts.append(FetchedPart(target, partition, payload[start:end]))
            start = end
        return parts

    def answer(self, part: FetchedPart) -> FetchAnswer:
        """One partition's batches, or its error."""
        response = part.response
        if response.error_code:
            error = error_from_code(response.error_code, response.error_message)
            return FetchAnswer(part.target, response, error=error)
        try:
            return FetchAnswer(part.target, response, self.decode(part))
        except SparkBrokerError as error:
            return FetchAnswer(part.target, response, error=error)

    def decode(self, part: FetchedPart) -> list[Prefetched]:
        """The batches of an answer. Raises CorruptMessageError, and retriable errors."""
        projection = Projection(part.target.topic, self._columns, sliced=part.local is None)
        frames = decode_frames(part.payload) if part.local is None else part.local
        return decode_fetched(frames, projection, part.response, part.target.offset)

    def back_off(self, retry: FetchRetry, leader_epoch: int, now_ms: float) -> float:
        """The partition's fetch failed. Returns for how long (ms) its leader of this epoch is not asked."""
        wait_ms = self._backoff.wait_s(retry.failures) * 1000
        retry.failed(leader_epoch, now_ms, wait_ms)
        return wait_ms
