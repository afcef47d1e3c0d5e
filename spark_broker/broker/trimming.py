"""Removes what a replica need not keep, when the metadata has said so: deleted records, or rows that the table has.

The metadata is applied in the thread that keeps the broker's lease. A topic may have hundreds of partitions, each of
which costs several syncs. So that thread only notes them (`file_jobs.Trim`). Readers see at once where a partition
begins; its files go later.
"""

from __future__ import annotations

import logging

from spark_broker.broker.partition import Partition
from spark_broker.config import ClusterConfig
from spark_broker.errors import KafkaStorageError, NotLeaderOrFollowerError, StorageRefusedError

logger = logging.getLogger(__name__)


def clock_skew_max_ms(config: ClusterConfig) -> int:
    """Of two brokers that are not fenced, one clock may be behind by the limit, and the other ahead by it."""
    return 2 * config.controller_clock_skew_fence_ms


def trim(partition: Partition, config: ClusterConfig) -> None:
    """Apply retention, and drop what was deleted. What fails is tried again by the next run of retention."""
    try:
        partition.apply_retention(clock_skew_max_ms(config))
    except (KafkaStorageError, NotLeaderOrFollowerError, StorageRefusedError) as error:
        # A partition that has gone offline has reported why, and `Room` logs what a full disk refuses.
        logger.debug("%s keeps what may go: %s", partition, error)
