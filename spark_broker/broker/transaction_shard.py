"""A partition of `__transaction_state` that this broker leads: its state machine, and the log under it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from spark_broker.broker.append import Append, AppendToken
from spark_broker.broker.clock import Clock
from spark_broker.broker.internal_records import encode_rows, rows_of
from spark_broker.broker.partition import Partition
from spark_broker.core.replica import ACKS_ALL
from spark_broker.core.transaction_coordinator import Resources, TransactionShard
from spark_broker.core.transaction_records import StoredRecord, TransactionRecord, decode_record, encode_record
from spark_broker.errors import CoordinatorNotAvailableError, OffsetNotAvailableError

READ_BYTES = 4_194_304
SNAPSHOT_BATCH_BYTES = 1_048_576

FOR_EVER_MS = 2**62
"""An append has no deadline: it is committed, or the leadership ends."""


class LedShard:
    """The shard of one leadership. Invariant: until it is dropped, nothing else appends to the partition.

    `snapshot_first` is the token of a snapshot's first batch, until the last append (`snapshot_end`) is committed.
    """

    def __init__(
        self, number: int, partition: Partition, leader_epoch: int, shard: TransactionShard, clock: Clock
    ) -> None:
        self.number = number
        self.partition = partition
        self.leader_epoch = leader_epoch
        self.shard = shard
        self.appended_records = 0  # since the last snapshot
        self.snapshot_end = 0
        self.snapshot_first: SnapshotToken | None = None
        self._clock = clock

    @staticmethod
    def load(number: int, partition: Partition, resources: Resources, id_expiration_ms: int, clock: Clock) -> LedShard:
        """Read the whole log. Raises NotLeaderOrFollowerError, or CoordinatorNotAvailableError while it is not known
        yet how much of the log is committed."""
        leader_epoch = partition.leader_epoch()
        try:
            position, high_watermark = partition.reader.offsets(leader_epoch)
        except OffsetNotAvailableError as error:
            raise CoordinatorNotAvailableError(error.message) from None
        # Appends of an earlier shard of the same leadership may not be committed yet.
        if high_watermark < partition.log.log_end_offset:
            raise CoordinatorNotAvailableError(f"{partition} has records that are not committed yet")
        led_shard = LedShard(
            number,
            partition,
            leader_epoch,
            TransactionShard(resources, id_expiration_ms=id_expiration_ms, name=str(partition)),
            clock,
        )
        while position < high_watermark:
            read = partition.reader.read_all(leader_epoch, position, READ_BYTES, read_committed=False)
            if not read.frames:
                raise CoordinatorNotAvailableError(f"{partition} could not be read up to {high_watermark}")
            for frame in read.frames:
                for key, value in rows_of(partition.reader.decode(frame)):
                    led_shard.shard.replay(decode_record(key, value))
                    led_shard.appended_records += 1
            position = read.next_offset
        return led_shard

    def is_current(self, partition: Partition) -> bool:
        """Whether the leadership that it was loaded for goes on."""
        return partition is self.partition and partition.leader_epoch() == self.leader_epoch

    def check_leadership(self) -> None:
        """Call this before an answer that needs no append. Raises NotLeaderOrFollowerError when the lease has ended."""
        self.partition.reader.offsets(self.leader_epoch)

    def append(self, records: Iterable[TransactionRecord], token: AppendToken, *, snapshot: bool = False) -> None:
        """Append one batch; `token` is notified of the commit. When this raises a typed error, nothing is stored."""
        rows = [encode_record(record) for record in records]
        topic = self.partition.topic
        message = encode_rows(rows, topic.schemas[-1], topic.schema_id, self._clock.wall_ms())
        append = Append(message, self.leader_epoch, ACKS_ALL, topic.schema_id, FOR_EVER_MS)
        self.partition.append(append, token)
        if not snapshot:
            self.appended_records += len(rows)

    def snapshot_batches(self) -> Iterator[list[TransactionRecord]]:
        """The whole state as it is now, in batches of a moderate size."""
        batch: list[TransactionRecord] = []
        size_bytes = 0
        for record in list(self.shard.snapshot()):
            batch.append(record)
            size_bytes += _size_bytes(encode_record(record))
            if size_bytes >= SNAPSHOT_BATCH_BYTES:
                yield batch
                batch, size_bytes = [], 0
        if batch:
            yield batch


class SnapshotToken(Protocol):
    """Has the base offset of its batch, once that is acknowledged."""

    base_offset: int


def _size_bytes(record: StoredRecord) -> int:
    return len(record.key) + len(record.value)
