"""What an earlier version stored in `__transaction_state`: each change, under the transactional id, and snapshots."""

from __future__ import annotations

import msgspec

from spark_broker.core.transaction_changes import OldChange, Restored, Settled
from spark_broker.core.transaction_coordinator import AppendRecords, Effect, StoreAnew
from spark_broker.core.transaction_records import StoredRecord
from spark_broker.core.transaction_state import NOBODY, TransactionMetadata, TransactionOutcome
from tests.unit.core.transaction_driver import Driver


def stored_change(transactional_id: str, change: OldChange) -> StoredRecord:
    """A change as it was stored."""
    return StoredRecord(transactional_id.encode(), msgspec.msgpack.encode(change))


def snapshot_of(transaction: TransactionMetadata) -> Restored:
    """The whole state of an id in one record."""
    ended = transaction.last_outcome or TransactionOutcome(NOBODY, False)
    topic_ids = sorted({topic_id for writer in transaction.writers.values() for topic_id, _ in writer.partitions})
    index = {topic_id: at for at, topic_id in enumerate(topic_ids)}
    return Restored(
        transaction.grouped,
        transaction.state.value,
        transaction.timeout_ms,
        *transaction.identity,
        *transaction.next_identity,
        *ended.identity,
        ended.committed,
        transaction.version,
        transaction.execution,
        transaction.executions,
        transaction.last_committed,
        transaction.closed,
        tuple(sorted(transaction.winners)),
        tuple(topic_ids),
        tuple(
            (producer_id, writer.producer_epoch, tuple((index[id_], number) for id_, number in writer.partitions))
            for producer_id, writer in transaction.writers.items()
        ),
        transaction.single_use,
    )


class OldDriver(Driver):
    """It writes what the earlier version did: changes, and now and then a snapshot, after which its log begins."""

    snapshot_records = 40

    def run(self, effects: list[Effect]) -> None:
        super().run([effect for effect in effects if not isinstance(effect, StoreAnew)])

    def _append(self, append: AppendRecords) -> None:
        for change in append.changes:
            assert not isinstance(change, Settled)
            self.log.records.append(stored_change(append.transactional_id, change))
        self._ends.append(len(self.log.records))
        self.run(self.shard.appended(append, self.now_ms))

    def fail_over(self, **arguments) -> Driver:  # type: ignore[no-untyped-def]
        after = super().fail_over(**arguments)
        if len(after.log.records) >= self.snapshot_records:
            shard = after.shard
            after.log.records = [stored_change(id_, snapshot_of(state)) for id_, state in shard.transactions.items()]
            after.log.committed = len(after.log.records)
        return after
