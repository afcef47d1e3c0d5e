"""Which replica is compacted next, and the thread that does it: one pass at a time, the dirtiest log first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.broker.compaction import AbandonedError, PartitionCompaction, PassLimits
from spark_broker.broker.internal_records import rows_of
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.topic import Topic
from spark_broker.config import ClusterConfig
from spark_broker.core.transaction_changes import is_old_change
from spark_broker.errors import (
    CorruptMessageError,
    KafkaStorageError,
    NotLeaderOrFollowerError,
    OffsetOutOfRangeError,
    SchemaMismatchError,
    StorageRefusedError,
    UnknownSchemaError,
)
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.process_limits import limit_reached
from spark_broker.threads import Worker

logger = logging.getLogger(__name__)

JOIN_S = 10.0
"""A pass ends between two reads or writes. A broker that stops waits for that no longer than this."""


class LogCleaner:
    """Without a thread: `steps` is one pass, which the simulator runs step by step, too."""

    def __init__(
        self,
        manager: ReplicaManager,
        config: ClusterConfig,
        clock: Clock = SYSTEM_CLOCK,
        pace: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._limits = PassLimits(config.log_cleaner_dedupe_buffer_size, config.log_dir_room_bytes, pace)
        self._unreadable: dict[Partition, Topic] = {}  # left alone while its topic is this one

    def next_pass(self, without: Collection[Partition] = ()) -> Partition | None:
        """The dirtiest replica for which it is time, but for those in `without`; None: there is none."""
        dirty: list[tuple[float, Partition]] = []
        partitions = list(self._manager.partitions())
        self._unreadable = {p: topic for p, topic in self._unreadable.items() if p in partitions and p.topic is topic}
        for partition in partitions:
            if partition.topic.is_compacted and partition not in self._unreadable and partition not in without:
                dirt = self._compaction(partition).due()
                with _stopped_by_the_disk(partition):
                    if dirt is not None and not has_changes_of_transactions(partition):
                        dirty.append((dirt.ratio, partition))
        return max(dirty, key=lambda one: one[0], default=(0.0, None))[1]

    def steps(self, partition: Partition) -> Generator[None]:
        """One pass over this replica. What stops it is logged, or stops the replica."""
        topic = partition.topic
        try:
            with _stopped_by_the_disk(partition):
                yield from self._compaction(partition).steps()
        except (CorruptMessageError, UnknownSchemaError, SchemaMismatchError) as error:
            # The next pass would meet them again. They are the producer's bytes: their checksums are right. Or the
            # columns of the key cannot be one: an earlier version accepted such.
            self._unreadable[partition] = topic
            logger.warning("%s is not compacted: it has rows that cannot be read: %s", partition, error.message)

    def _compaction(self, partition: Partition) -> PartitionCompaction:
        return PartitionCompaction(partition, self._limits, self._clock)


@contextmanager
def _stopped_by_the_disk(partition: Partition) -> Iterator[None]:
    """What stops work on a replica is logged, or stops the replica. Nothing was changed."""
    try:
        yield
    except (KafkaStorageError, NotLeaderOrFollowerError):
        return  # The replica has gone offline, damaged or not, and the broker was notified.
    except OffsetOutOfRangeError as error:
        logger.debug("%s is looked at later: the log start moved meanwhile: %s", partition, error)
    except StorageRefusedError as error:
        logger.warning("%s", error)
    except MemoryError as error:  # Under the partition's lock it would be an InvariantError.
        logger.warning("%s is compacted later: %s", partition, limit_reached(error))


def has_changes_of_transactions(partition: Partition) -> bool:
    """Whether the log begins with records of transactions of an earlier version. They say only what has changed, so
    that each is needed. They stay until the coordinator has stored anew what they say, and the log begins with that.
    """
    if partition.topic.name != TRANSACTION_STATE_TOPIC:
        return False
    replica = partition.replica
    frames = partition.read_log(replica.log_start_offset, 1, replica.log_end_offset)
    rows = (row for frame in frames[:1] if frame.header.row_count for row in rows_of(partition.reader.decode(frame)))
    return any(is_old_change(key, value) for key, value in rows)


class Pace:
    """Keeps a pass to so many bytes a second, and ends it when the broker stops."""

    def __init__(self, bytes_per_s: int, stopped: threading.Event) -> None:
        self._bytes_per_s = bytes_per_s
        self._stopped = stopped
        self._due_s = 0.0  # when the bytes so far are used up

    def __call__(self, size_bytes: int) -> None:
        """Wait until these bytes may be read or written. Raises AbandonedError when the broker stops."""
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s) + size_bytes / self._bytes_per_s
        # At full speed the wait is zero: the event is only looked at.
        if self._stopped.wait(max(0.0, self._due_s - now_s)):
            raise AbandonedError("the broker stops")


class LogCleanerThread(Worker):
    """Runs until `stop`."""

    def __init__(self, manager: ReplicaManager, config: ClusterConfig, on_bug: Callable[[BaseException], None]) -> None:
        super().__init__("log-cleaner", on_bug)
        self._stopped = threading.Event()
        pace = Pace(config.log_cleaner_io_max_bytes_per_second, self._stopped)
        self._cleaner = LogCleaner(manager, config, pace=pace)
        self._backoff_s = config.log_cleaner_backoff_ms / 1000
        self._enabled = config.log_cleaner_enable

    def stop(self) -> None:
        """End the pass that is under way."""
        self._stopped.set()
        if self.is_alive():
            self.join(JOIN_S)

    def work(self) -> None:
        while self._enabled and not self._stopped.wait(self._backoff_s):
            self._clean_all()

    def _clean_all(self) -> None:
        """Compact what is due, each replica at most once: one that cannot be compacted must not stop the others."""
        done: set[Partition] = set()
        while not self._stopped.is_set():
            partition = self._cleaner.next_pass(without=done)
            if partition is None:
                return
            done.add(partition)
            for _ in self._cleaner.steps(partition):
                if self._stopped.is_set():
                    return
