"""Reads ranges of offsets from their leaders, one after the other, as the tasks of a Spark job do side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from spark_broker.client.cluster_view import ClusterView
from spark_broker.client.fetch_machine import Fetch, FetchAnswer, FetchTarget
from spark_broker.client.retry import Backoff
from spark_broker.errors import (
    LeaderNotAvailableError,
    NetworkError,
    OffsetNotAvailableError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.history.plan import TieringRange
from spark_broker.protocol.messages import FetchResponse
from spark_broker.testing.simulation.consumer import CONFIG, FETCH_TIMEOUT_MS
from spark_broker.testing.simulation.delta_table import Place, Row
from spark_broker.testing.simulation.fetches import SimFetches, Values
from spark_broker.testing.simulation.network import End
from spark_broker.testing.simulation.scheduler import Timer

if TYPE_CHECKING:
    from spark_broker.testing.simulation.client import Client

WAIT_MS = 20.0
WAITS_MAX = 50

Failed = Callable[[SparkBrokerError], None]


class RangeReads:
    """All ranges of one topic. It calls `done` with their rows, or `failed` with the first error."""

    def __init__(
        self,
        client: Client,
        topic: str,
        ranges: Sequence[TieringRange],
        done: Callable[[dict[Place, Row]], None],
        failed: Failed,
    ) -> None:
        self._client = client
        self._world = client.world
        self._view: ClusterView = client.view
        self._topic = topic
        self._ranges = list(ranges)
        self._done = done
        self._failed = failed
        self._rows: dict[Place, Row] = {}
        backoff = Backoff(CONFIG.retry_backoff_ms, CONFIG.retry_backoff_max_ms, rng=self._world.client_rng)
        self._fetches = SimFetches(self._world, client.name, CONFIG, backoff)
        self._timer = Timer(self._world.scheduler, client, "read timed out", self._timed_out)
        self._end: End | None = None
        self._fetch: Fetch | None = None
        self._position = 0
        self._waits = 0

    def start(self) -> None:
        self._next_range()

    def _next_range(self) -> None:
        self._close()
        if not self._ranges:
            self._done(self._rows)
            return
        asked = self._ranges[0]
        topic, leader = self._view.topic(self._topic), self._view.leader(self._topic, asked.partition)
        if topic is None or leader is None:
            self._fail(LeaderNotAvailableError(f"{self._topic}-{asked.partition} has no leader"))
            return
        broker, state = leader
        self._position = asked.start
        self._target = FetchTarget(topic, asked.partition, state.leader_epoch, asked.start)
        self._end = self._world.network.open(self._client, broker.host, (broker.host, broker.port), "fetch")
        self._end.on_message = self._received
        self._end.on_break = self._fail
        self._ask()

    def _ask(self) -> None:
        target = FetchTarget(self._target.topic, self._target.partition, self._target.leader_epoch, self._position)
        self._fetch = self._fetches.request([target])
        self._timer.set(FETCH_TIMEOUT_MS)
        if self._end is not None:
            self._end.send(self._fetch.request)

    def _received(self, message: object) -> None:
        if isinstance(message, SparkBrokerError) or self._fetch is None:
            self._fail(message if isinstance(message, SparkBrokerError) else NetworkError("unasked"))
            return
        response, payload = cast("tuple[FetchResponse, bytes]", message)
        try:
            (answer,) = self._fetches.read(self._fetch, response, memoryview(payload))
        except SparkBrokerError as error:
            self._fail(error)
            return
        if answer.error is not None:
            self._fail(answer.error)
        elif self._take(answer) >= self._ranges[0].end:
            self._ranges.pop(0)
            self._next_range()
        else:
            self._ask_again(self._fetch.targets[self._target.key].offset)

    def _ask_again(self, asked: int) -> None:
        """A new leader may not have the whole range below its high watermark yet."""
        if self._position > asked:
            self._waits = 0
            self._ask()
            return
        self._waits += 1
        if self._waits > WAITS_MAX:
            self._fail(OffsetNotAvailableError(f"offset {self._position} is not committed any more"))
            return
        self._timer.cancel()
        self._world.scheduler.after(WAIT_MS, self._client, "read again", self._ask)

    def _take(self, answer: FetchAnswer) -> int:
        """Keep what lies in the range. Returns how far it is read."""
        end, partition = self._ranges[0].end, self._target.partition
        for entry in answer.fetched:
            if entry.decode is None:
                continue
            values = cast("Values", entry.decode())
            for offset, value in zip(values.offsets, values.values, strict=True):
                if offset < end:
                    self._rows[Place(partition, offset)] = Row(value, entry.leader_epoch)
        self._position = max(self._position, answer.response.next_offset)
        return self._position

    def _timed_out(self) -> None:
        self._fail(RequestTimedOutError("a read was not answered in time"))

    def _fail(self, error: SparkBrokerError) -> None:
        if self._end is not None or self._ranges:
            self._close()
            self._ranges.clear()
            self._failed(error)

    def _close(self) -> None:
        self._timer.cancel()
        end, self._end = self._end, None
        if end is not None:
            end.close()
