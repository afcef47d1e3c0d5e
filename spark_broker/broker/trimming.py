"""Removes what a replica need not keep, when the metadata has said so: deleted records, or rows that the table has.

The metadata is applied in the thread that keeps the broker's lease. A topic may have hundreds of partitions, each of
which costs several syncs. So that thread only notes them (`file_jobs.Trim`). Readers see at once where a partition
begins; its files go later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spark_broker.broker.partition import Partition
from spark_broker.config import ClusterConfig
from spark_broker.errors import KafkaStorageError, NotLeaderOrFollowerError, StorageRefusedError


def clock_skew_max_ms(config: ClusterConfig) -> int:
    """Of two brokers that are not fenced, one clock may be behind by the limit, and the other ahead by it."""
    return 2 * config.controller_clock_skew_fence_ms


def trim(partition: Partition, config: ClusterConfig) -> None:
    """Apply retention, and drop what was deleted. What fails is tried again by the next run of retention."""
    unless_offline(partial(partition.apply_retention, clock_skew_max_ms(config)))


def unless_offline(action: Callable[[], None]) -> None:
    """Do this with a partition that may have gone offline, or whose disk may be full."""
    try:
        action()
    except (KafkaStorageError, NotLeaderOrFollowerError):
        # The partition has gone offline already, damaged or not, and the broker was notified.
        return
    except StorageRefusedError:
        # Nothing was changed, and `Room` has logged it. The next run tries again.
        return
