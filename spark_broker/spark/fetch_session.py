"""One stream of fetches to one leader, for one partition: a request is sent ahead while the last answer is used."""

from __future__ import annotations

from spark_broker.client.settings import Address
from spark_broker.config import ConsumerConfig
from spark_broker.errors import InvalidRequestError, error_from_code
from spark_broker.protocol.messages import FetchedPartition, FetchPartition, FetchRequest, FetchResponse
from spark_broker.spark.ranges import OffsetRange
from spark_broker.transport.client import Connection


class FetchSession:
    """Fetches from the leader at `address` under `leader_epoch`. After an error it is to be closed."""

    def __init__(
        self,
        address: Address,
        leader_epoch: int,
        part: OffsetRange,
        columns: list[str] | None,
        settings: ConsumerConfig,
    ) -> None:
        self._leader_epoch = leader_epoch
        self._part = part
        self._columns = columns
        self._settings = settings
        self._correlation_id = 0
        self._connection = Connection(address.host, address.port)
        self._stream = self._connection.open_stream("fetch")

    def request(self, offset: int) -> None:
        """Ask for the batches from this offset on. Raises NetworkError or RequestTimedOutError."""
        self._correlation_id += 1
        settings = self._settings
        wanted = FetchPartition(
            topic_id=self._part.topic_id,
            partition=self._part.partition,
            leader_epoch=self._leader_epoch,
            offset=offset,
            max_bytes=settings.max_partition_fetch_bytes,
            last_fetched_epoch=self._part.read_epoch,
            read_to=self._part.read_to,
        )
        request = FetchRequest(
            correlation_id=self._correlation_id,
            max_wait_ms=settings.fetch_max_wait_ms,
            min_bytes=settings.fetch_min_bytes,
            max_bytes=settings.fetch_max_bytes,
            partitions=[wanted],
            columns=self._columns,
            read_committed=settings.read_committed,
        )
        self._stream.send(request, timeout_ms=settings.request_timeout_ms)

    def answer(self, *, timeout_ms: int) -> tuple[FetchedPartition, memoryview]:
        """The answer to the request under way, and its frames: none, when there was nothing new to read within
        fetch.max.wait.ms, or nothing but markers and aborted batches, which `next_offset` is past.

        Raises the leader's typed error, NetworkError or RequestTimedOutError.
        """
        response, payload = self._stream.receive(timeout_ms=timeout_ms + self._settings.fetch_max_wait_ms)
        if not isinstance(response, FetchResponse) or response.correlation_id != self._correlation_id:
            raise InvalidRequestError("a leader did not answer the fetch that was sent")
        if response.error_code:
            raise error_from_code(response.error_code, response.error_message)
        found = next((one for one in response.partitions if one.topic_id == self._part.topic_id), None)
        if found is None:
            raise InvalidRequestError(f"a leader left {self._part.tp} out of its answer")
        if found.error_code:
            raise error_from_code(found.error_code, found.error_message)
        return found, payload

    def close(self) -> None:
        self._stream.close()
        self._connection.close()
