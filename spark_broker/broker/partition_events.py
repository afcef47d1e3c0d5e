"""What a partition tells the rest of its broker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_broker.core.effects import ProposeIsr
from spark_broker.errors import DamagedLogError, SparkBrokerError, StorageRefusedError

if TYPE_CHECKING:
    from spark_broker.broker.partition import Partition

PartitionKey = tuple[str, int]
"""Topic id and partition number."""


@dataclass(frozen=True, slots=True)
class PartitionEvents:
    """Callbacks, under the partition's lock.

    `propose_isr`: the leader wants this ISR. `on_storage_failure`: the disk failed. `on_damage`: damaged bytes were
    read; without it, damage is a failure. `on_refused`: a write was refused. `on_unusable`: the log must be opened
    anew. `on_wait`: an append waits here; it is called for each one. `lowering`: the log may come to end at this
    offset, below its high watermark (`SavedHighWatermarks.lowering`).
    """

    propose_isr: Callable[[PartitionKey, ProposeIsr], None]
    on_storage_failure: Callable[[PartitionKey, SparkBrokerError], None]
    on_damage: Callable[[Partition, DamagedLogError], None] | None = None
    on_refused: Callable[[StorageRefusedError], None] = lambda _: None
    on_unusable: Callable[[Partition, SparkBrokerError], None] = lambda *_: None
    on_wait: Callable[[Partition], None] = lambda _: None
    lowering: Callable[[PartitionKey, int], AbstractContextManager[None]] = lambda *_: nullcontext()
