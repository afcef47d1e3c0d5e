"""Which part of a topic's table a consumer reads next, and what becomes of its position. One read runs at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from spark_broker.client.cluster_view import ClusterView
from spark_broker.client.consumer_effects import ReadHistory
from spark_broker.client.partition_position import PartitionPosition, Prefetched
from spark_broker.config import ConsumerConfig
from spark_broker.errors import OffsetOutOfRangeError, SparkBrokerError


class HistoryTurns:
    """Without clock and threads, as the machine that it belongs to."""

    def __init__(self, config: ConsumerConfig) -> None:
        self._config = config
        self._under_way: ReadHistory | None = None
        self._parts = 0

    def next(self, positions: Iterable[PartitionPosition], view: ClusterView) -> ReadHistory | None:
        """The next part, if there is room for it: that of the partition which has waited longest."""
        if self._under_way is not None:
            return None
        positions = sorted(positions, key=attrgetter("read"))
        room = self._config.fetch_max_bytes - sum(position.buffered_bytes for position in positions)
        for position in positions:
            topic = view.topic(position.tp.topic)
            full = position.buffered_bytes >= self._config.max_partition_fetch_bytes or room <= 0
            if position.history_end < 0 or position.paused or position.error is not None or topic is None or full:
                continue
            self._parts += 1
            position.read = self._parts
            where = (position.generation, position.fetch_offset, position.history_end)
            self._under_way = ReadHistory(position.tp, topic, *where)
            return self._under_way
        return None

    def came(self, positions: Iterable[PartitionPosition], fetched: Sequence[Prefetched]) -> None:
        """A part, from the position's fetch offset on. `positions`: the one that was read for, unless it was moved."""
        self._under_way = None
        for position in positions:
            position.add_history(fetched)

    def failed(self, positions: Iterable[PartitionPosition], error: SparkBrokerError) -> list[PartitionPosition]:
        """The table cannot be read: poll raises why until a seek moves the position.

        Where the history begins later now, the leader refuses the offset, and the reset policy counts. After an error
        that passes, the leader says again that the table has the offset. Returns the positions that wait before that.
        """
        self._under_way = None
        waiting = []
        for position in positions:
            if isinstance(error, OffsetOutOfRangeError):
                position.history_end = -1
            elif error.retriable:
                position.history_end = -1
                waiting.append(position)
            else:
                position.error = error
        return waiting
