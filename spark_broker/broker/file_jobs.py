"""What is to be done with replicas' files, in the order in which metadata asks for it.

Metadata is applied in the thread that reads the answers to heartbeats. Work on files takes as long as the disk takes,
so that thread only notes it here. Another one does it: `ReplicaFiles.work`.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.errors import SparkBrokerError
from spark_broker.storage.directory_names import PartitionName


@dataclass(frozen=True, slots=True)
class Opening:
    """Open the log of a replica, or make it."""

    key: PartitionKey


@dataclass(frozen=True, slots=True)
class Removal:
    """Stop a replica, if it is open, for this reason, and delete its files; `aside`: keep them, under another name."""

    key: PartitionKey
    topic: str
    reason: SparkBrokerError
    partition: Partition | None = None
    aside: bool = False

    @property
    def name(self) -> PartitionName:
        """Whose directory it is about."""
        return PartitionName(self.topic, self.key[1], self.key[0])


@dataclass(frozen=True, slots=True)
class Trim:
    """Remove records of a replica that it need not keep any more."""

    key: PartitionKey


Job = Opening | Removal


class FileJobs:
    """First in, first out: a topic that is created again gets the name of a directory that is deleted before. Safe from
    any thread.

    Nothing waits for trims, of which a replica has one at most, nor for directories that have left their names
    (`doomed`). They come when there is nothing else to do.
    """

    def __init__(self, doomed: Iterable[Path] = ()) -> None:
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._jobs: deque[Job] = deque()
        # Those that are not finished. One replica may have several: it was moved away and back, and away again, before
        # its files could be moved away once.
        self._removals: Counter[PartitionKey] = Counter()
        self._kept: list[Removal] = []  # of them, those that could not be carried out and wait for `retry`
        self._trims: dict[PartitionKey, Trim] = {}
        self._doomed: deque[Path] = deque(doomed)

    def __len__(self) -> int:
        return len(self._jobs) + len(self._trims) + len(self._doomed)

    def add(self, jobs: Iterable[Job | Trim]) -> None:
        with self._lock:
            for job in jobs:
                if isinstance(job, Trim):
                    self._trims.setdefault(job.key, job)
                    continue
                self._jobs.append(job)
                if isinstance(job, Removal):
                    self._removals[job.key] += 1

    def is_being_removed(self, key: PartitionKey) -> bool:
        """Whether files of this replica are still to be deleted."""
        return key in self._removals

    @property
    def is_due(self) -> bool:
        """Whether logs are to be opened, or names to be freed."""
        return bool(self._jobs)

    def retry(self) -> bool:
        """Try again what could not be carried out. Whether there is any."""
        with self._lock:
            kept, self._kept = self._kept, []
            self._jobs.extend(kept)
            return bool(kept)

    def take(self, limit: int) -> Sequence[Job]:
        """The next jobs, at most `limit`, all of one kind."""
        with self._lock:
            kind = type(self._jobs[0]) if self._jobs else Opening
            taken = list(takewhile(lambda job: isinstance(job, kind), islice(self._jobs, limit)))
            for _ in taken:
                self._jobs.popleft()
            return taken

    def removed(self, removals: Iterable[Removal], kept: Iterable[Removal], doomed: Iterable[Path]) -> None:
        """The names of the first ones are free, and `doomed` is what is left of them; the `kept` ones wait."""
        with self._lock:
            self._removals -= Counter(removal.key for removal in removals)
            self._kept.extend(kept)
            self._doomed.extend(doomed)

    def add_doomed(self, path: Path) -> None:
        """A directory that no replica's name leads to is to be removed, too."""
        with self._lock:
            self._doomed.append(path)

    def take_trims(self, limit: int) -> list[Trim]:
        """The next trims, at most `limit`, if there are no jobs."""
        with self._lock:
            if self._jobs:
                return []
            return [self._trims.pop(key) for key in list(islice(self._trims, limit))]

    def take_doomed(self, limit: int) -> list[Path]:
        """Directories to be removed, at most `limit`, if there is nothing else to do."""
        with self._lock:
            if self._jobs or self._trims:
                return []
            return [self._doomed.popleft() for _ in range(min(limit, len(self._doomed)))]
