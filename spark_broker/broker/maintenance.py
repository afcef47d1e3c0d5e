"""A broker's periodic work: damaged replicas, ISR checks, room on the disk, snapshots, free memory, checkpoints,
retention, syncs, expired producers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from spark_broker.broker.memory import GIVE_BACK_S
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.room import LOOK_MS
from spark_broker.broker.trimming import clock_skew_max_ms, unless_offline
from spark_broker.config import ClusterConfig
from spark_broker.core.producers import ENDED_MS
from spark_broker.errors import KafkaStorageError, StorageRefusedError
from spark_broker.threads import Worker

logger = logging.getLogger(__name__)

TICK_S = 0.1
RETRY_S = 1.0
"""How often what was refused is tried again."""


@dataclass(slots=True)
class _Chore:
    interval_s: float
    run: Callable[[], None]
    due_s: float = 0.0


class Maintenance(Worker):
    """Runs until `stop`. A replica whose disk fails stops itself; the others are looked after as before."""

    def __init__(
        self,
        manager: ReplicaManager,
        config: ClusterConfig,
        on_bug: Callable[[BaseException], None],
        give_back_memory: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("maintenance", on_bug)
        self._manager = manager
        self._clock_skew_max_ms = clock_skew_max_ms(config)
        self._producer_id_expiration_ms = config.producer_id_expiration_ms + self._clock_skew_max_ms
        self._stray_retention_ms = config.log_stray_retention_ms
        self._stopped = threading.Event()
        self._chores = [
            _Chore(TICK_S, manager.quarantine_damaged),
            _Chore(TICK_S, self._expire_appends),
            _Chore(max(TICK_S, min(config.replica_lag_time_max_ms / 10_000, 1.0)), self._tick),
            _Chore(LOOK_MS / 1000, manager.room.look),
            _Chore(RETRY_S, manager.retry),
            _Chore(GIVE_BACK_S, give_back_memory),
            _Chore(config.replica_high_watermark_checkpoint_interval_ms / 1000, self._checkpoint),
            _Chore(config.log_retention_check_interval_ms / 1000, self._retain),
            _Chore(config.log_flush_interval_ms / 1000, self._flush),
            _Chore(config.producer_id_expiration_check_interval_ms / 1000, self._expire_producers),
        ]

    def stop(self) -> None:
        self._stopped.set()

    def work(self) -> None:
        self.begin(time.monotonic())
        while not self._stopped.wait(TICK_S):
            self.run_due(time.monotonic())

    def begin(self, now: float) -> None:
        """Every chore is due one interval from now (seconds of any clock)."""
        for chore in self._chores:
            chore.due_s = now + chore.interval_s

    def run_due(self, now: float) -> None:
        """Do what is due."""
        for chore in self._chores:
            if chore.due_s <= now:
                chore.due_s = now + chore.interval_s
                chore.run()

    def _expire_appends(self) -> None:
        """Tick only partitions in which appends wait: they are few, and this runs ten times a second."""
        epochs = self._manager.broker_epochs()
        for partition in self._manager.take_waiting():
            partition.tick(epochs)

    def _tick(self) -> None:
        """Tick only partitions that this broker leads: followers wait for nothing."""
        epochs = self._manager.broker_epochs()
        for partition in self._manager.partitions():
            if partition.replica.leadership is not None:
                partition.tick(epochs)

    def _checkpoint(self) -> None:
        """On a full disk the older checkpoint stays: a lower high watermark is safe, and the broker goes on serving.

        Directories that were removed under the live broker are noticed here. Without its own directory the broker ends;
        a partition without its directory is damaged.
        """
        try:
            self._manager.check_directory()
            self._manager.save_high_watermarks()
        except StorageRefusedError as error:
            self._manager.refused(error)
        except KafkaStorageError as error:
            self._manager.storage_failed(error)
            return
        for partition in self._manager.partitions():
            if partition.log.is_gone:
                unless_offline(partition.flush)

    def _retain(self) -> None:
        self._manager.delete_old_strays(self._stray_retention_ms)
        for partition in self._manager.partitions():
            unless_offline(partial(partition.apply_retention, self._clock_skew_max_ms))

    def _flush(self) -> None:
        for partition in self._manager.partitions():
            unless_offline(partition.flush)

    def _expire_producers(self) -> None:
        for partition in self._manager.partitions():
            partition.expire_producers(self._producer_id_expiration_ms, ENDED_MS + self._clock_skew_max_ms)
