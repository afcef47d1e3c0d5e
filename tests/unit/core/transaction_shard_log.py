"""The log of a transaction shard, and every log that compaction can leave of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from spark_broker.core.transaction_changes import decode_any
from spark_broker.core.transaction_coordinator import TransactionShard
from spark_broker.core.transaction_log import Loading
from spark_broker.core.transaction_records import StoredRecord
from spark_broker.core.transaction_state import TransactionMetadata


def compacted(log: list[StoredRecord], random: Random) -> list[StoredRecord]:
    """A pass may stop anywhere, and another one go on elsewhere: any record may be gone that a later one replaces.

    A tombstone may be gone once nothing is left before it that it deletes.
    """
    keep = random.choice([0.0, 0.3, 0.7])
    last = {record.key: at for at, record in enumerate(log)}
    left: set[bytes] = set()
    result: list[StoredRecord] = []
    for at, record in enumerate(log):
        superseded = last[record.key] != at
        gone = (superseded or (record.value is None and record.key not in left)) and random.random() >= keep
        if not gone:
            result.append(record)
            left.add(record.key)
    return result


def in_any_order(log: list[StoredRecord], random: Random) -> list[StoredRecord]:
    """The last value of each key, loaded in any order."""
    last = list({record.key: record for record in log}.values())
    random.shuffle(last)
    return last


def loaded(log: list[StoredRecord]) -> dict[str, TransactionMetadata]:
    """The ids that the records give."""
    loading = Loading()
    for record in log:
        loading.replay(decode_any(*record))
    return loading.transactions()


def live(shard: TransactionShard) -> dict[str, TransactionMetadata]:
    """The ids of a shard, without what is in no log."""
    return {name: replace(transaction, active_ms=0) for name, transaction in shard.transactions.items()}
