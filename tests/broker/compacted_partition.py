"""A lone partition of a compacted topic, and what it should hold: the last record of each key, at its offset."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from spark_broker.broker.append import Append, AwaitedTransaction
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.compaction import PartitionCompaction, PassLimits
from spark_broker.errors import StorageFullError
from spark_broker.protocol.arrow_message import decode_batch, encode_batch, row_deltas
from spark_broker.protocol.frame import TRANSACTIONAL, BatchHeader
from spark_broker.protocol.schema import DEFAULT_SCHEMA
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.start_kind import StartKind
from tests.broker.lone_partition import LonePartition
from tests.broker.rig import Outcome

DAY_MS = 86_400_000
RowsOfKeys = list[tuple[bytes, bytes | None]]

SETTINGS = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.0",
    "segment.bytes": "4096",
    "retention.ms": "-1",
}


@dataclass
class Record:
    key: bytes
    value: bytes | None
    committed: bool = True


@dataclass
class Model:
    """Every record that was appended, by offset."""

    records: dict[int, Record] = field(default_factory=dict)

    def last(self) -> dict[bytes, tuple[int, bytes | None]]:
        """The last committed record of each key."""
        newest: dict[bytes, tuple[int, bytes | None]] = {}
        for offset, record in sorted(self.records.items()):
            if record.committed:
                newest[record.key] = (offset, record.value)
        return newest


class CompactedPartition(LonePartition):
    """`model` has what was appended. `compact` runs passes until none is due."""

    def __init__(
        self,
        directory: Path,
        config: dict[str, str] | None = None,
        *,
        fs: FileSystem = LOCAL,
        start: StartKind = StartKind.CLEAN,
        model: Model | None = None,
    ) -> None:
        """`model`: of what is in the directory."""
        super().__init__(directory, {**SETTINGS, **(config or {})}, fs=fs, start=start)
        self.model = model or Model()
        self.limits = PassLimits(1 << 20, 0)

    def put(
        self, *rows: tuple[bytes, bytes | None], pid: int = -1, epoch: int = 0, sequence: int = 0, txn: bool = False
    ) -> int:
        """Append these keys with their values (None: a tombstone) as one batch; returns its base offset."""
        offset = self._offer(list(rows), pid, epoch, sequence, txn)
        if isinstance(offset, AwaitedTransaction):
            self.partition.confirm(offset)
            offset = self._offer(list(rows), pid, epoch, sequence, txn)
        assert isinstance(offset, int)
        for at, (key, value) in enumerate(rows):
            self.model.records.setdefault(offset + at, Record(key, value, committed=not txn))
        return offset

    def put_uncommitted(self, *rows: tuple[bytes, bytes | None], pid: int, epoch: int, sequence: int) -> None:
        """Append without waiting for the other replicas. The model leaves it out."""
        self._offer(list(rows), pid, epoch, sequence, txn=False, acks=1)

    def _offer(
        self, rows: RowsOfKeys, pid: int, epoch: int, sequence: int, txn: bool, acks: int = -1
    ) -> int | AwaitedTransaction:
        batch = pa.RecordBatch.from_pylist([{"key": k, "value": v} for k, v in rows], schema=DEFAULT_SCHEMA)
        if pid < 0:
            epoch = sequence = -1
        attributes = TRANSACTIONAL if txn else 0
        message = encode_batch(
            batch, producer_id=pid, producer_epoch=epoch, base_sequence=sequence, attributes=attributes
        )
        outcome = Outcome()
        deadline_ms = SYSTEM_CLOCK.boottime_ms() + 30_000
        awaited = self.partition.append(Append(message, self.leader_epoch, acks, 0, deadline_ms), outcome)
        return awaited if awaited is not None else outcome.future.result(20)

    def finish(self, pid: int, epoch: int, *, committed: bool, offsets: list[int]) -> int:
        """End the transaction that wrote these offsets. `epoch` begins."""
        for offset in offsets:
            self.model.records[offset].committed = committed
        return self.end(epoch, committed=committed, pid=pid)

    def roll(self, filler: int = 0) -> None:
        """Seal the active segment, by a batch that does not fit: of a key that nothing else has."""
        self.put((b"filler-%d" % filler, bytes(2500)))
        self.put((b"filler-%d" % filler, bytes(2500)))

    def passes(self) -> PartitionCompaction:
        return PartitionCompaction(self.partition, self.limits, self.clock)

    def compact(self) -> int:
        """Returns how many passes it took."""
        count = 0
        while self.passes().due() is not None:
            for _ in self.passes().steps():
                pass
            count += 1
            assert count < 100, "passes without an end"
        return count

    def try_to_compact(self) -> bool:
        """Run a pass; returns whether there was no room for it."""
        try:
            self.compact()
        except StorageFullError:
            return True
        return False

    def headers(self) -> list[BatchHeader]:
        return list(self.partition.log.headers(0))

    def rows(self) -> list[tuple[int, bytes, bytes | None]]:
        """Offset, key and value of every row in the files."""
        log, offset = self.partition.log, self.partition.replica.log_start_offset
        rows: list[tuple[int, bytes, bytes | None]] = []
        while offset < log.log_end_offset:
            for header, message in log.read(offset, 1 << 20, log.log_end_offset):
                batch = decode_batch(message, DEFAULT_SCHEMA)
                offsets = (header.base_offset + row_deltas(header, message)).tolist()
                rows += zip(offsets, batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
                offset = header.next_offset
        return rows

    def consumed(self, *, read_committed: bool = True) -> list[tuple[int, bytes, bytes | None]]:
        """Offset, key and value of every row that a consumer is given."""
        offset = self.partition.replica.log_start_offset
        rows: list[tuple[int, bytes, bytes | None]] = []
        while True:
            read = self.partition.reader.read(self.leader_epoch, offset, 3000, read_committed=read_committed)
            for header, message in read.frames:
                batch = self.partition.reader.decode(read.frames[0]._replace(header=header, message=message))
                offsets = header.base_offset + row_deltas(header, message)
                at = int(np.searchsorted(offsets, offset))
                keys, values = batch["key"].to_pylist(), batch["value"].to_pylist()
                rows += list(zip(offsets.tolist(), keys, values, strict=True))[at:]
            if read.next_offset == offset:
                return rows
            offset = read.next_offset

    def check(self, *, deletions_may_be_gone: bool = False) -> None:
        """What readers see is what was appended, and includes the last record of each key."""
        log = self.partition.log
        headers = self.headers()
        assert all(a.next_offset == b.base_offset for a, b in pairwise(headers))
        assert not headers or headers[-1].next_offset == log.log_end_offset
        seen = self.consumed()
        assert [offset for offset, _, _ in seen] == sorted({offset for offset, _, _ in seen})
        for offset, key, value in seen:
            record = self.model.records[offset]
            assert (key, value, True) == (record.key, record.value, record.committed)
        by_key = {key: (offset, value) for offset, key, value in seen}
        stable = self.last_stable_offset()
        for key, (offset, value) in self.model.last().items():
            if offset < stable and not (value is None and deletions_may_be_gone):
                assert by_key[key] == (offset, value), key
        clean_to = log.cleaned.clean_to
        below = [key for offset, key, _ in self.rows() if offset < clean_to]
        assert len(below) == len(set(below)), "a key is twice in what is clean"
