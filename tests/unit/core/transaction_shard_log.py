"""The log of a transaction shard, and every log that compaction can leave of it."""

from __future__ import annotations

from dataclasses import replace

from spark_broker.core.transaction_changes import decode_any
from spark_broker.core.transaction_coordinator import TransactionShard
from spark_broker.core.transaction_log import Loading
from spark_broker.core.transaction_records import StoredRecord
from spark_broker.core.transaction_state import TransactionMetadata


def loaded(log: list[StoredRecord]) -> dict[str, TransactionMetadata]:
    """The ids that the records give."""
    loading = Loading()
    for record in log:
        loading.replay(decode_any(*record))
    return loading.transactions()


def live(shard: TransactionShard) -> dict[str, TransactionMetadata]:
    """The ids of a shard, without what is in no log."""
    return {name: replace(transaction, active_ms=0) for name, transaction in shard.transactions.items()}
