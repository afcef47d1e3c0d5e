"""The high watermarks of a broker's replicas, as they are saved: what is certainly committed.

A log that ends below its own saved high watermark has lost something that no crash of a process explains
(`log_opener`). For that, a saved mark must never be too high. So it is lowered, durably, before a log is made shorter
on purpose (`lowering`), and before recovery from a crash of the machine counts as done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from spark_broker.broker.partition_events import PartitionKey
from spark_broker.errors import DamagedLogError
from spark_broker.storage.directory import LogDirectory

logger = logging.getLogger(__name__)


class SavedHighWatermarks:
    """Safe from any thread. `lowering` is called under a partition's lock, and takes no other one within its own."""

    def __init__(self, directory: LogDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._saved = _read(directory)
        self._ceilings: dict[PartitionKey, int] = {}  # of logs that are being made shorter, or were half-way
        self._reached: dict[PartitionKey, int] = {}  # by logs that are to be opened again

    def last(self, key: PartitionKey) -> int:
        """The mark of this replica; 0: none was saved."""
        return self._saved.get(key, 0)

    def reached(self, key: PartitionKey, log_end_offset: int) -> int:
        """Where a log that is opened again, and ends there, begins to count: this process's marks do not fall.

        Where it was made shorter half-way, it has reached more than `last` says, and what is left of that is committed.
        """
        return max(self.last(key), min(self._reached.get(key, 0), log_end_offset))

    def forget(self, key: PartitionKey) -> None:
        """The log of this replica was set aside or deleted: the next one begins empty."""
        with self._lock:
            for marks in (self._saved, self._ceilings, self._reached):
                marks.pop(key, None)

    def remember(self, key: PartitionKey, high_watermark: int) -> None:
        """The log of this replica is to be opened again, with this mark or a lower one that was saved meanwhile."""
        with self._lock:
            self._saved[key] = min(high_watermark, self._ceilings.pop(key, high_watermark))
            self._reached[key] = high_watermark

    def save(self, marks: Callable[[], Mapping[PartitionKey, int]], keep: Callable[[PartitionKey], bool]) -> None:
        """Save the marks of all open replicas, and those that are saved of others where `keep` says so.

        Raises StorageRefusedError, KafkaStorageError.
        """
        with self._lock:
            kept = {key: mark for key, mark in self._saved.items() if keep(key)}
            open_now = {key: min(mark, self._ceilings.get(key, mark)) for key, mark in marks().items()}
            self._reached = {key: mark for key, mark in self._reached.items() if key not in open_now}
            self._write({**kept, **open_now})

    @contextmanager
    def lowering(self, key: PartitionKey, offset: int) -> Iterator[None]:
        """Within this block, a log may come to end at `offset`. No mark above it is saved until the block ends.

        Where the block raises, nobody knows where the log ends. The ceiling stays until the log is opened again.

        Raises StorageRefusedError, KafkaStorageError; the log must not be made shorter then.
        """
        with self._lock:
            self._ceilings[key] = offset
            try:
                if self._saved.get(key, 0) > offset:
                    self._write({**self._saved, key: offset})
            except BaseException:
                del self._ceilings[key]
                raise
        yield
        with self._lock:
            del self._ceilings[key]

    def _write(self, marks: dict[PartitionKey, int]) -> None:
        self._directory.write_high_watermarks(marks)
        self._saved = marks


def _read(directory: LogDirectory) -> dict[PartitionKey, int]:
    """A damaged file stops no replica, and the next checkpoint replaces it: nothing is known then."""
    try:
        return directory.read_high_watermarks()
    except DamagedLogError as error:
        logger.warning("%s: %s; the high watermarks are learned anew", directory.path, error.message)
        return {}
