"""A job that writes version after version, each with many writers, as Spark's sink does: some tasks run twice."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from spark_broker.client.transaction_group import JoinedProducer, TransactionGroup
from spark_broker.errors import SparkBrokerError
from spark_broker.model import TopicPartition
from spark_broker.testing.client_thread import ClientThread
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.workload import record_outcome, records_of

TIMEOUT_MS = 20_000
CLOSE_S = 5.0


@dataclass(frozen=True)
class Attempt:
    """A task attempt that has appended everything."""

    transaction: int
    producer_id: int


class ManyWritersJob(ClientThread):
    """Versions of one application, one after the other. After an error it goes on as a restarted driver would."""

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        partitions: Sequence[TopicPartition],
        *,
        application: str,
        seed: int,
        tasks: int = 3,
        rows: int = 5,
        pause_s: float = 0.2,
        second_attempt_share: float = 0.3,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(application, pause_s)
        self._recorder = recorder
        self._bootstrap_servers = bootstrap_servers
        self._partitions = tuple(partitions)
        self._tasks = tasks
        self._rows = rows
        self._second_attempt_share = second_attempt_share
        self._random = random.Random(seed)
        self._settings = dict(settings or {})
        self._executions = count()
        self._numbers = count()
        self._version: int | None = None

    def step(self) -> None:
        if self._version is None:
            committed = self._group(0).last_committed()
            self._version = 0 if committed is None else committed + 1
        version = self._version
        group = self._group(version)
        winners, losers = [], []
        for task in range(self._tasks):
            attempts = 1 + (self._random.random() < self._second_attempt_share)
            made = [self._attempt(group, f"{self.name}-task-{task}") for _ in range(attempts)]
            winner = self._random.choice(made)
            winners.append(winner)
            losers += [attempt for attempt in made if attempt is not winner]
        self._commit(group, winners, losers)
        self._version = version + 1

    def renew(self) -> None:
        """A driver that restarts knows nothing, and asks which version was committed last."""
        self._version = None

    def _group(self, version: int) -> TransactionGroup:
        execution = f"execution-{next(self._executions)}"
        return TransactionGroup(
            self._bootstrap_servers, self.name, version, execution, timeout_ms=TIMEOUT_MS, config=self._settings
        )

    def _attempt(self, group: TransactionGroup, writer: str) -> Attempt:
        with group.join() as producer:
            transaction = self._recorder.began(
                writer, app=group.application, version=group.version, execution=group.execution
            )
            for partition in self._random.sample(self._partitions, self._random.randint(1, len(self._partitions))):
                self._append(producer, transaction, writer, partition)
            producer.flush()
            return Attempt(transaction, producer.producer_id)

    def _append(self, producer: JoinedProducer, transaction: int, writer: str, partition: TopicPartition) -> None:
        number = next(self._numbers)
        values = [b"%s-%d-%d" % (writer.encode(), number, row) for row in range(self._rows)]
        operation = self._recorder.invoked(f"{writer}-{transaction}", partition, values, transaction)
        data = records_of(values)
        future = producer.append(partition.topic, data, partition=partition.partition)
        future.add_done_callback(partial(record_outcome, self._recorder, operation))

    def _commit(self, group: TransactionGroup, winners: Sequence[Attempt], losers: Sequence[Attempt]) -> None:
        commit = self._recorder.committing(
            [attempt.transaction for attempt in winners], app=group.application, version=group.version
        )
        try:
            happened = group.commit(attempt.producer_id for attempt in winners)
        except SparkBrokerError as error:
            self._recorder.commit_unknown(commit, error)
            raise
        if happened:
            self._recorder.committed(commit)
            for attempt in losers:
                self._recorder.aborted(attempt.transaction)
        else:
            self._recorder.commit_refused(commit, ValueError("committed before"), already_committed=True)
