"""Whether this broker's disk has room. A refused write shows that it has none, or that no byte or no file is free.
The free bytes show that it has room again.

Heartbeats report it to the controller, which lets other brokers lead meanwhile (`controller/room.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from spark_broker.broker.clock import SYSTEM_CLOCK, Clock
from spark_broker.errors import StorageFullError
from spark_broker.storage.filesystem import FileSystem

logger = logging.getLogger(__name__)

QUIET_MS = 3000
"""A write that was refused within this time outweighs the free bytes, which do not show quotas. Followers repeat
refused writes every second."""

LOOK_MS = 1000
"""How often a full disk is looked at."""


class Room:
    """Safe from any thread, also under partitions' locks. `on_change` must not wait.

    Each change is one line in the log, however many partitions and attempts it stops.
    """

    def __init__(
        self,
        path: Path,
        fs: FileSystem,
        room_bytes: int,
        on_change: Callable[[], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """A process that begins with less than `room_bytes` free has no room. The process before it may have run out of
        it.
        """
        self._path = path
        self._fs = fs
        self._room_bytes = room_bytes
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._full = False
        self._refused_ms: int | None = None
        free_bytes = self._free_bytes()
        if 0 <= free_bytes < room_bytes:
            self._full = True
            self._warn(free_bytes, "so little is free")

    @property
    def full(self) -> bool:
        return self._full

    def refused(self, error: StorageFullError) -> None:
        """A write found no room."""
        with self._lock:
            self._refused_ms = self._clock.boottime_ms()
            if self._full:
                return
            self._full = True
        self._warn(self._free_bytes(), error.message)
        self._on_change()

    def look(self) -> None:
        """See whether the disk has room. Call this from time to time."""
        free_bytes = self._free_bytes()
        if not self._full:
            if free_bytes == 0:
                self.refused(StorageFullError("no byte is free, or no further file can be made"))
            return
        with self._lock:
            quiet = self._refused_ms is None or self._clock.boottime_ms() - self._refused_ms >= QUIET_MS
            if not quiet or free_bytes < self._room_bytes:
                return
            self._full = False
        logger.warning("%s has room again: %s bytes are free; this broker may lead again", self._path, free_bytes)
        self._on_change()

    def _free_bytes(self) -> int:
        """The free bytes; -1 when the disk does not say. Another part of the broker notices what is wrong with it."""
        try:
            return self._fs.free_bytes(self._path)
        except OSError as error:
            logger.info("how much of %s is free is not known: %s", self._path, error)
            return -1

    def _warn(self, free_bytes: int, why: str) -> None:
        logger.warning(
            "the disk of %s is full, %s bytes are free: %s. Others lead meanwhile where they can. Free space, or lower "
            "retention.bytes / retention.ms; with log.dir.room.bytes=%s free this broker may lead again",
            self._path,
            free_bytes,
            why,
            self._room_bytes,
        )
