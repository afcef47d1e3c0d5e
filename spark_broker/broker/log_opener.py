"""Opens replicas' logs, many at a time: a start opens every log that there is, and a new topic makes hundreds.

Syncs take most of the time: those of recovery after a crash, and those of new directories. They run in parallel, and
the names of all new directories are synced at once. Other logs are opened in one thread: there is nothing to wait for,
and threads that compete for Python's lock are slower.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from spark_broker.broker.high_watermarks import SavedHighWatermarks
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.topic import Topic
from spark_broker.controller.image import MetadataImage
from spark_broker.core.replica import RecoveredLog
from spark_broker.errors import (
    DamagedLogError,
    InvariantError,
    KafkaStorageError,
    LeaderNotAvailableError,
    OlderMetadataError,
    SparkBrokerError,
)
from spark_broker.process_limits import limit_reached
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.files import storage_error
from spark_broker.storage.loaded_indexes import LoadedIndexes
from spark_broker.storage.start_kind import StartKind

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

FEW = 8
"""Up to this many logs are opened without threads, because starting threads takes longer."""


class MapAll(Protocol):
    """Calls a function for each item, and returns what it returned, in the items' order."""

    def __call__(self, act: Callable[[T], R], items: Iterable[T]) -> list[R]: ...


def one_by_one(act: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`MapAll` without threads."""
    return [act(item) for item in items]


@dataclass(frozen=True, slots=True)
class InThreads:
    """`MapAll` with up to this many threads: the caller's, and others that end with the call."""

    threads: int

    def __call__(self, act: Callable[[T], R], items: Iterable[T]) -> list[R]:
        items = list(items)
        if len(items) <= FEW or self.threads == 1:
            return one_by_one(act, items)
        numbered, results = enumerate(items), dict[int, R]()

        def work() -> None:
            for at, item in numbered:  # A step of an enumerate is atomic: each item is taken once.
                results[at] = act(item)

        with ThreadPoolExecutor(self.threads - 1, thread_name_prefix="recovery") as pool:
            helpers = self._helpers(pool, work)
            work()  # In this thread, too: at a limit it is the only one.
            for helper in helpers:
                helper.result()
        return [results[at] for at in range(len(items))]

    def _helpers(self, pool: ThreadPoolExecutor, work: Callable[[], None]) -> list[Future[None]]:
        """Have other threads work, too: as many as the process can have."""
        helpers: list[Future[None]] = []
        try:
            for _ in range(self.threads - 1):
                helpers.append(pool.submit(work))
        except (RuntimeError, MemoryError) as error:
            limit = limit_reached(error)
            if limit is None:
                raise
            logger.warning("only %d of %d threads open logs: %s", 1 + len(helpers), self.threads, limit)
        return helpers


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """A log, and what its replica starts from. `lost_schemas`: those that it has, and the topic lacks."""

    log: ReplicaLog
    state: RecoveredLog
    lost_schemas: Mapping[int, bytes]

    def unfit(self, broker_id: int, image: MetadataImage, key: PartitionKey) -> SparkBrokerError | None:
        """Why the log may not be used now. Its epochs or schemas are ahead of the metadata, which would give them out
        twice. Or it led in the epoch that is to be led, and stopped: it may have lost its end since.
        """
        state, epoch = image.partition(*key), self.state.epochs.latest_epoch
        if state is not None and epoch > state.leader_epoch:
            return OlderMetadataError(f"its log has leader epoch {epoch}, and metadata.dir knows {state.leader_epoch}")
        if state is not None and epoch == state.leader_epoch and state.leader == broker_id:
            return LeaderNotAvailableError(f"it stopped while it led in epoch {epoch}: it leads in a later one only")
        next_id, newest = image.topics[key[0]].next_schema_id, max(self.lost_schemas, default=-1)
        ahead = f"its log has schema {newest}, and metadata.dir knows of none from {next_id} on"
        return OlderMetadataError(ahead) if newest >= next_id else None


@dataclass(frozen=True, slots=True)
class WantedLog:
    """A replica of this broker. `is_electable`: it is in the ISR or the ELR, where an empty log would do harm."""

    topic: Topic
    number: int
    is_electable: bool


class LogOpener:
    """Opens or creates logs in a broker's directory."""

    def __init__(self, directory: LogDirectory, high_watermarks: SavedHighWatermarks, map_all: MapAll) -> None:
        self._directory = directory
        self._high_watermarks = high_watermarks
        self._map_all = map_all
        self._indexes = LoadedIndexes()
        self._tried: set[PartitionKey] = set()

    def open(self, wanted: Mapping[PartitionKey, WantedLog]) -> dict[PartitionKey, OpenedLog | SparkBrokerError]:
        """Returns each log, or the error that says why it cannot be used. All names are durable by then."""
        slow = {key: log for key, log in wanted.items() if self._has_syncs(log)}
        quick = {key: log for key, log in wanted.items() if key not in slow}
        opened = dict(zip(slow, self._map_all(self._try_open, slow.values()), strict=True))
        opened.update(zip(quick, one_by_one(self._try_open, quick.values()), strict=True))
        try:
            self._directory.sync_names()
        except SparkBrokerError as error:
            for outcome in opened.values():
                if isinstance(outcome, OpenedLog):
                    outcome.log.close(clean=False)
            return dict.fromkeys(wanted, error)
        return {key: opened[key] for key in wanted}

    def forget(self, key: PartitionKey) -> None:
        """The replica is not here any more."""
        self._tried.discard(key)

    def _start_of(self, key: PartitionKey) -> StartKind:
        """How the log was left. The broker's last end says so the first time only: a log that is opened again may have
        been refused something half-way, in this process.
        """
        left, again = self._directory.start_kind, key in self._tried
        self._tried.add(key)
        return StartKind.PROCESS_CRASH if again and left is StartKind.CLEAN else left

    def _has_syncs(self, wanted: WantedLog) -> bool:
        crashed = self._directory.start_kind is not StartKind.CLEAN
        return crashed or not self._directory.may_have_partition(wanted.topic.name, wanted.number)

    def _try_open(self, wanted: WantedLog) -> OpenedLog | SparkBrokerError:
        """Whatever goes wrong concerns this replica only. A broken invariant ends the process, as everywhere."""
        what = f"cannot open {wanted.topic.name}-{wanted.number}"
        try:
            return self._open(wanted)
        except SparkBrokerError as error:
            return error
        except OSError as error:
            return storage_error(error, what)
        except InvariantError:
            raise
        except Exception as error:  # noqa: BLE001 (it is the replica's, and logged as such)
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(at.filename).name}:{at.lineno}"
            return limit_reached(error) or KafkaStorageError(f"{what}: {error!r} at {where}")

    def _open(self, wanted: WantedLog) -> OpenedLog:
        topic, number = wanted.topic, wanted.number
        key = (topic.topic_id, number)
        high_watermark = self._high_watermarks.last(key)
        if high_watermark and wanted.is_electable and not self._directory.has_partition(topic.name, number):
            # An empty log in its place might be elected, and every other replica would truncate to it.
            raise DamagedLogError(f"its directory was removed; it had committed up to offset {high_watermark}")
        path = self._directory.partition_directory(topic.name, topic.topic_id, number, sync=False)
        log = ReplicaLog(path, topic, self._start_of(key), fs=self._directory.fs, indexes=self._indexes)
        try:
            self._check_end(wanted, log.log_end_offset, high_watermark)
            reached = self._high_watermarks.reached(key, log.log_end_offset)
            return OpenedLog(log, log.state(high_watermark=reached), log.lost_schemas())
        except Exception:
            log.close(clean=False)
            raise

    def _check_end(self, wanted: WantedLog, log_end_offset: int, high_watermark: int) -> None:
        """A log may end below what it has committed after a crash of the machine, and its broker is in no ISR then.

        Otherwise files were deleted, cut or replaced by older ones. Elected, it would make every other replica follow.
        """
        crashed = self._directory.start_kind is StartKind.MACHINE_CRASH
        if wanted.is_electable and not crashed and log_end_offset < high_watermark:
            raise DamagedLogError(f"its log ends at {log_end_offset}; it had committed up to offset {high_watermark}")
