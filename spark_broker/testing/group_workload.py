"""Clients that read and record: a member of a group that commits offsets, an observer of the latest offsets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from spark_broker.client.consumer import Consumer
from spark_broker.errors import SparkBrokerError
from spark_broker.model import TopicPartition
from spark_broker.testing.client_thread import ClientThread
from spark_broker.testing.history import Isolation
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.workload import record_poll


class GroupMember(ClientThread):
    """Reads its partitions for a group, commits, and leaves from time to time. Another member then takes its place.

    Every member of a group must have partitions of its own.
    """

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        group: str,
        partitions: Sequence[TopicPartition],
        *,
        name: str = "member",
        polls_between_commits: int = 5,
        commits_of_one_life: int = 20,
    ) -> None:
        super().__init__(name, pause_s=0.0)
        self._recorder = recorder
        self._bootstrap_servers = bootstrap_servers
        self._group = group
        self._partitions = tuple(partitions)
        self._polls_between_commits = polls_between_commits
        self._commits_of_one_life = commits_of_one_life
        self._lives = count()
        self._life = name
        self._commits = 0
        self._consumer: Consumer | None = None

    def step(self) -> None:
        consumer = self._consumer or self._join()
        for _ in range(self._polls_between_commits):
            record_poll(consumer, self._recorder, self._life)
        positions = {partition: consumer.position(partition) for partition in self._partitions}
        consumer.commit(positions)
        for partition, offset in positions.items():
            self._recorder.offsets_committed(self._group, partition, offset)
        self._commits += 1
        if self._commits >= self._commits_of_one_life:
            self.renew()

    def renew(self) -> None:
        consumer, self._consumer = self._consumer, None
        self._commits = 0
        if consumer is not None:
            with suppress(SparkBrokerError):
                consumer.close()

    def _join(self) -> Consumer:
        self._life = f"{self.name}-{next(self._lives)}"
        consumer = Consumer(
            self._bootstrap_servers, group_id=self._group, auto_offset_reset="earliest", enable_auto_commit=False
        )
        self._consumer = consumer
        self._recorder.opened(self._life, isolation=Isolation.READ_COMMITTED, group=self._group)
        for partition in self._partitions:
            stored = consumer.committed(partition)
            committed = None if stored is None else stored.offset
            self._recorder.offsets_fetched(self._group, partition, committed)
            self._recorder.positioned(self._life, partition, committed or 0)
        consumer.assign(self._partitions)
        return consumer


class LatestObserver(ClientThread):
    """Asks for the latest offsets again and again: for one observer they must never fall (KIP-207)."""

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        partitions: Sequence[TopicPartition],
        *,
        name: str = "observer",
        pause_s: float = 0.5,
    ) -> None:
        super().__init__(name, pause_s)
        self._recorder = recorder
        self._bootstrap_servers = bootstrap_servers
        self._partitions = tuple(partitions)
        self._consumer: Consumer | None = None

    def step(self) -> None:
        if self._consumer is None:
            self._consumer = Consumer(self._bootstrap_servers)
        for partition, offset in self._consumer.end_offsets(self._partitions).items():
            self._recorder.latest_shown(self.name, partition, offset)

    def renew(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
