"""The clients that are at work while faults happen: writers, transactions, readers, groups, whole reads on the way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Self

from spark_broker.errors import SparkBrokerError
from spark_broker.model import TopicPartition
from spark_broker.testing.client_thread import ClientThread
from spark_broker.testing.copy_workload import Copier
from spark_broker.testing.group_workload import GroupMember, LatestObserver, Sharing, SharingMember
from spark_broker.testing.history import Isolation
from spark_broker.testing.many_writers_workload import ManyWritersJob
from spark_broker.testing.member_process import MemberProcess
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.transactional_workload import TransactionalWriter
from spark_broker.testing.workload import (
    RecordingReader,
    RecordingWriter,
    snapshot_with_consumer,
    snapshot_with_data_frame,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENT = {"delivery.timeout.ms": 600_000, "max.block.ms": 600_000}
"""The run looks for batches that are never acknowledged, not for slow ones."""

HASTY = {"delivery.timeout.ms": 3000, "request.timeout.ms": 2000, "max.block.ms": 3000}
"""Gives up in the middle of every fault: what it sent may be stored or not."""

TRANSACTIONAL: dict[str, object] = {"transaction.timeout.ms": 15_000}
KEYS = 60
"""Of the compacted topic: few, so that every pass has something to remove."""

GROUP = "chaos-group"
SHARING = "chaos-sharing"
STOP_S = 240.0


@dataclass(frozen=True)
class Load:
    """How much there is to do. `rate`: records a second of the steady writer, until `records_max` are acknowledged."""

    rate: float
    rows: int
    records_max: int
    snapshot_s: float


class Clients:
    """All clients of a run; started by `with`, stopped in order by `finish`.

    `partitions` are of the topic that everyone uses, `copies` is the copier's partition, `state` are of a topic that is
    compacted.
    """

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        partitions: list[TopicPartition],
        copies: TopicPartition,
        state: list[TopicPartition],
        load: Load,
        *,
        seed: int,
        spark: SparkSession | None,
    ) -> None:
        self.recorder = recorder
        self._bootstrap_servers = bootstrap_servers
        self._originals, self._copies = partitions[0], copies
        self._everything = [*partitions, copies, *state]
        self._topics = ",".join(sorted({partition.topic for partition in self._everything}))
        self._load = load
        self._spark = spark

        def writer(
            name: str, to: list[TopicPartition], rate: float, settings: dict[str, int], *, keys: int = 0
        ) -> RecordingWriter:
            return RecordingWriter(
                recorder,
                bootstrap_servers,
                to[0].topic,
                len(to),
                name=name,
                rows=load.rows,
                interval_s=load.rows / rate,
                keys=keys,
                settings=settings,
            )

        self.steady = writer("steady", partitions, load.rate, PATIENT)
        self._writers = [
            self.steady,
            writer("hasty", partitions, load.rate / 10, HASTY),
            writer("state", state, load.rate / 4, PATIENT, keys=KEYS),
            writer("hasty-state", state, load.rate / 10, HASTY, keys=KEYS),
        ]
        self._transactional = [
            TransactionalWriter(
                recorder,
                bootstrap_servers,
                [*partitions, *state],
                name=f"transactional-{n}",
                seed=seed + n,
                keys={state[0].topic: KEYS},
                settings=TRANSACTIONAL,
            )
            for n in range(2)
        ]
        self._readers = [
            RecordingReader(recorder, bootstrap_servers, self._everything, name=isolation.value, isolation=isolation)
            for isolation in Isolation
        ]
        self._others: list[ClientThread] = [
            GroupMember(recorder, bootstrap_servers, GROUP, partitions[n::2], name=f"member-{n}") for n in range(2)
        ]
        sharing = Sharing(SHARING, (partitions[0].topic,))
        self._others += [
            *(SharingMember(recorder, bootstrap_servers, sharing, name=f"sharing-{n}", seed=seed) for n in range(2)),
            MemberProcess(recorder, bootstrap_servers, sharing, name="sharing-process", seed=seed),
        ]
        self._others.append(
            ManyWritersJob(
                recorder, bootstrap_servers, partitions, application="job", seed=seed, settings={"max.block.ms": 10_000}
            )
        )
        self._others.append(LatestObserver(recorder, bootstrap_servers, self._everything))
        self._others.append(
            Copier(recorder, bootstrap_servers, self._originals, copies, group="copiers", settings=TRANSACTIONAL)
        )
        if load.snapshot_s > 0:
            self._others.append(WholeReads(self._whole_read, load.snapshot_s))
        self._running = ExitStack()

    def __enter__(self) -> Self:
        clients: list[RecordingWriter | RecordingReader | ClientThread] = [*self._writers, *self._readers]
        for client in [*clients, *self._transactional, *self._others]:
            self._running.enter_context(client)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def pace(self) -> None:
        """Slow down once enough is acknowledged: what a history may hold is bounded."""
        if self.recorder.acknowledged_values >= self._load.records_max:
            for writer in self._writers:
                writer.interval_s = 1.0
            for client in self._transactional:
                client.pause_s = 1.0

    def acknowledged_since(self, moment_s: float) -> bool:
        """Whether every partition has acknowledged an append of the steady writer since."""
        return all(last > moment_s for last in self.steady.last_acknowledged_s)

    def finish(self) -> dict[str, int]:
        """Stop every client and read everything. Returns how often each client was given each error."""
        for writer in self._writers:
            writer.stop(STOP_S)
        for client in self._transactional:
            client.stop(STOP_S)
        for other in self._others:
            other.stop(STOP_S)
        for isolation in Isolation:
            snapshot_with_consumer(
                self.recorder,
                self._bootstrap_servers,
                self._everything,
                name=f"{isolation} consumer",
                timeout_s=STOP_S,
                isolation=isolation,
            )
        if self._spark is not None:
            snapshot_with_data_frame(self.recorder, self._spark, self._bootstrap_servers, self._topics)
        for reader in self._readers:
            reader.stop()
        return dict(Counter(f"{c.name}: {e.name}" for c in (*self._transactional, *self._others) for e in c.errors))

    def _whole_read(self, name: str) -> None:
        if self._spark is None:
            snapshot_with_consumer(
                self.recorder, self._bootstrap_servers, self._everything, name=name, timeout_s=60.0, final=False
            )
        else:
            name = f"DataFrame {name}"
            snapshot_with_data_frame(
                self.recorder, self._spark, self._bootstrap_servers, self._topics, name=name, final=False
            )


class DataFrameReadError(SparkBrokerError):
    """A query failed while a fault lasted, as queries may."""


class WholeReads(ClientThread):
    """Reads everything from time to time; each time takes longer, so the pauses grow with it."""

    def __init__(self, read: Callable[[str], None], every_s: float) -> None:
        super().__init__("whole reads", every_s)
        self._read = read
        self._numbers = count()

    def step(self) -> None:
        from pyspark.errors import PySparkException

        began_s = time.monotonic()
        try:
            self._read(f"whole read {next(self._numbers)}")
        except PySparkException as error:
            raise DataFrameReadError(str(error).splitlines()[0]) from error
        self.pause_s = max(self.pause_s, 2 * (time.monotonic() - began_s))

    def renew(self) -> None:
        """Each read has a client of its own."""
