"""A partition with one replica, which leads: real files and the real shell, without servers."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from spark_broker.broker.append import Append, AwaitedTransaction, Marker
from spark_broker.broker.clock import SYSTEM_CLOCK, SystemClock
from spark_broker.broker.lease import Lease
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionEvents
from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.topic import Topic
from spark_broker.controller.image import TopicState
from spark_broker.core.replica import LeaderAndIsr, Replica
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.arrow_message import encode_batch
from spark_broker.protocol.frame import TRANSACTIONAL
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.start_kind import StartKind
from tests.broker.rig import FAR_FUTURE_MS, KEY, TOPIC_ID, Outcome, batch

BIG = 1000
"""Bytes of a value; two such values fill a segment of 4096 bytes."""


class ShiftedClock(SystemClock):
    """The machine's clocks, but the wall clock is `ahead_ms` ahead."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms


class HeldClock(ShiftedClock):
    """Time goes on only by `passed_ms`."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_ms = 0
        self._began = (super().boottime_ms(), super().wall_ms())

    def boottime_ms(self) -> int:
        return self._began[0] + self.passed_ms

    def wall_ms(self) -> int:
        return self._began[1] + self.passed_ms + self.ahead_ms


class LonePartition:
    """It is open from the start; `reopen` ends the process and starts another in the next leader epoch."""

    def __init__(
        self,
        directory: Path,
        config: dict[str, str] | None = None,
        *,
        fs: FileSystem = LOCAL,
        start: StartKind = StartKind.CLEAN,
    ) -> None:
        """`start`: how what is in the directory came to be left there."""
        if not fs.exists(directory):
            fs.mkdir(directory)
        self.fs = fs
        self.directory = directory
        state = TopicState(
            "t", TOPIC_ID, MappingProxyType(config or {}), schemas=(schema_to_bytes(DEFAULT_SCHEMA),), partitions=()
        )
        self.topic = Topic.of(state)
        self.failures: list[SparkBrokerError] = []
        self.lease = Lease()
        self.lease.extend(SYSTEM_CLOCK.boottime_ms(), FAR_FUTURE_MS)
        self.clock = ShiftedClock()
        self.leader_epoch = -1
        self.partition = self._open(start, 0)

    def _open(self, start: StartKind, high_watermark: int) -> Partition:
        log = ReplicaLog(self.directory, self.topic, start, fs=self.fs)
        replica = Replica(0, log.state(high_watermark=high_watermark), min_insync_replicas=1, lag_max_ms=30_000)
        partition = Partition(
            KEY,
            self.topic,
            log,
            replica,
            self.lease,
            PartitionEvents(lambda *_: None, lambda _, error: self.failures.append(error)),
            self.clock,
        )
        self.leader_epoch = max(self.leader_epoch, replica.epochs.latest_epoch) + 1
        partition.assign(LeaderAndIsr(0, self.leader_epoch, self.leader_epoch, (0,), (0,)), self.topic, {0: 1})
        return partition

    def close(self, *, clean: bool = False) -> int:
        """End the process; returns its high watermark."""
        high_watermark = self.partition.replica.high_watermark
        self.partition.close(clean=clean)
        return high_watermark

    def reopen(self, start: StartKind, high_watermark: int | None = None) -> None:
        """Restart with this checkpointed high watermark (None: that of the ended process)."""
        last = self.close(clean=start is StartKind.CLEAN)
        self.partition = self._open(start, last if high_watermark is None else high_watermark)

    def offer(
        self, *values: bytes, pid: int = 7, epoch: int = 0, sequence: int = 0, transactional: bool = True
    ) -> int | AwaitedTransaction:
        """Append as a client does; returns the base offset, or that the coordinator must be asked."""
        outcome = Outcome()
        message = encode_batch(
            batch(*values),
            producer_id=pid,
            producer_epoch=epoch,
            base_sequence=sequence,
            attributes=TRANSACTIONAL if transactional else 0,
        )
        deadline_ms = SYSTEM_CLOCK.boottime_ms() + 30_000
        awaited = self.partition.append(Append(message, self.leader_epoch, -1, 0, deadline_ms), outcome)
        return awaited if awaited is not None else outcome.future.result(20)

    def write(self, *values: bytes, pid: int = 7, epoch: int = 0, sequence: int = 0, transactional: bool = True) -> int:
        """Append; whenever the coordinator is asked, it confirms that the partition is in the transaction."""
        offered = self.offer(*values, pid=pid, epoch=epoch, sequence=sequence, transactional=transactional)
        if isinstance(offered, AwaitedTransaction):
            self.partition.confirm(offered)
            offered = self.offer(*values, pid=pid, epoch=epoch, sequence=sequence, transactional=transactional)
        assert isinstance(offered, int)
        return offered

    def end(self, epoch: int, *, committed: bool, pid: int = 7) -> int:
        """Write the marker that begins `epoch`; returns its offset, or a later one if it was stored already."""
        outcome = Outcome()
        deadline_ms = SYSTEM_CLOCK.boottime_ms() + 30_000
        self.partition.append_marker(Marker(pid, epoch, committed, deadline_ms), outcome)
        return outcome.future.result(20)

    def read(self, *, read_committed: bool = True) -> list[bytes]:
        """Values from the log start on, as a consumer with this isolation level sees them."""
        offset, values = self.partition.replica.log_start_offset, []
        while True:
            read = self.partition.reader.read(self.leader_epoch, offset, 1 << 20, read_committed=read_committed)
            values += [
                v for frame in read.frames for v in self.partition.reader.decode(frame).column("value").to_pylist()
            ]
            if read.next_offset == offset:
                return values
            offset = read.next_offset

    def last_stable_offset(self) -> int:
        return self.partition.reader.offsets(self.leader_epoch, read_committed=True)[1]

    def snapshots(self) -> list[int]:
        return self._stems(".snapshot")

    def segments(self) -> list[int]:
        return self._stems(".arrow")

    def _stems(self, suffix: str) -> list[int]:
        names = self.fs.list_directory(self.directory)
        return [int(name.removesuffix(suffix)) for name in names if name.endswith(suffix)]
