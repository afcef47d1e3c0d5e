"""The metadata log: numbered immutable files, each created exclusively, and snapshots.

Two controllers cannot both go on: when both create the same number, one finds it taken and is deposed. A writer acts on
nothing until it knows whether its file was created. A store that fails is tried again until it works.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from spark_broker.controller.image import EMPTY_IMAGE, MetadataImage
from spark_broker.controller.records import MetadataRecord
from spark_broker.controller.snapshot import image_from_snapshot, to_records
from spark_broker.driver.metadata_file import MetadataFile, decode_file, encode_file, file_name, file_number
from spark_broker.driver.metadata_store import MetadataStore, open_store
from spark_broker.driver.store_health import StoreHealth
from spark_broker.errors import (
    InconsistentClusterIdError,
    MetadataStoreError,
    StaleControllerEpochError,
    again,
    invariant,
)

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 1.0
START_PATIENCE_S = 15.0
"""How long a start tries to write. It then raises, because a user waits for it and sees the error."""


class MetadataLog:
    """The log and the image that it builds. One thread appends.

    `image` is the image of everything that is committed. `health` is the state of its store.
    A log that was deposed, or gave up, refuses everything from then on.
    """

    def __init__(
        self,
        store: MetadataStore,
        *,
        records_between_snapshots: int = 1000,
        snapshots_kept: int = 2,
        writer: str | None = None,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """`writer`: 32 hex digits that no other writer has; `wait` waits that many seconds before a retry."""
        self._store = store
        self._records_between_snapshots = records_between_snapshots
        self._snapshots_kept = snapshots_kept
        self._given_up = threading.Event()
        self._wait = wait if wait is not None else self._given_up.wait
        self.health = StoreHealth(str(store))
        self._failure: MetadataStoreError | StaleControllerEpochError | None = None
        self._snapshot_offset = 0
        self.writer = writer if writer is not None else uuid.uuid4().hex
        self.image: MetadataImage = EMPTY_IMAGE
        self.number = -1  # of the last file
        self._last = b""  # the bytes of that file
        self._guarded_replay()

    @classmethod
    def open(cls, url: str, *, records_between_snapshots: int = 1000, snapshots_kept: int = 2) -> MetadataLog:
        """Replay the log at a path or fsspec URL. Raises MetadataStoreError when it is damaged or cannot be used."""
        return cls(open_store(url), records_between_snapshots=records_between_snapshots, snapshots_kept=snapshots_kept)

    def __str__(self) -> str:
        return str(self._store)

    @property
    def empty(self) -> bool:
        return self.number < 0

    def _guarded_replay(self) -> None:
        try:
            self._replay()
        except OSError as error:
            raise MetadataStoreError(f"{self._store} cannot be read: {error}") from error

    def _replay(self) -> None:
        names = self._store.names()
        snapshot = self._newest_snapshot([n for name in names if (n := file_number(name, snapshot=True)) is not None])
        if snapshot is not None:
            self.image = image_from_snapshot(snapshot.records, snapshot.offset)
            self.number = snapshot.number
            self._last = self._bytes_of(file_name(snapshot.number))
            self._snapshot_offset = snapshot.offset
        for number in sorted(n for name in names if (n := file_number(name)) is not None and n > self.number):
            if number != self.number + 1:
                raise MetadataStoreError(f"{self._store}: {file_name(self.number + 1)} is missing")
            self._replay_file(number)

    def _newest_snapshot(self, numbers: Sequence[int]) -> MetadataFile | None:
        """The newest snapshot that can be read. Any kept one will do: the log files since the oldest of them are there,
        and one that is missing is an error. Raises what the newest one failed with when none is left.
        """
        failure: MetadataStoreError | OSError | None = None
        for number in sorted(numbers, reverse=True):
            try:
                return self._read(number, snapshot=True)
            except (MetadataStoreError, OSError) as error:  # a bad sector, or an object that the store refuses
                reason = error.message if isinstance(error, MetadataStoreError) else error
                logger.warning("%s is passed over: %s", file_name(number, snapshot=True), reason)
                failure = failure or error
        if failure is not None:
            raise failure
        return None

    def _read(self, number: int, *, snapshot: bool = False) -> MetadataFile:
        name = file_name(number, snapshot=snapshot)
        return decode_file(name, self._bytes_of(name))

    def _bytes_of(self, name: str) -> bytes:
        data = self._store.read(name)
        if data is None:
            raise MetadataStoreError(f"{self._store}: {name} is missing")
        return data

    def _replay_file(self, number: int) -> None:
        data = self._bytes_of(file_name(number))
        file = decode_file(file_name(number), data)
        if file.offset != self.image.next_offset:
            raise MetadataStoreError(f"{file.name} begins at {file.offset}, expected {self.image.next_offset}")
        self.image = self.image.apply(file.records)
        self.number, self._last = file.number, data

    def check_cluster_id(self, found: Collection[str]) -> None:
        """`found`: the cluster ids that log directories carry. Raises InconsistentClusterIdError, MetadataStoreError.

        A new cluster over old data would give the names of old topics to new ones, and the old data could not be read.
        """
        ids = {cluster_id for cluster_id in found if cluster_id}
        if not ids:
            return
        if not self.image.cluster_id:
            raise MetadataStoreError(
                f"{self._store} holds no metadata, but log.dirs carry the cluster {', '.join(sorted(ids))}: "
                "its metadata is elsewhere or lost"
            )
        if ids != {self.image.cluster_id}:
            others = ", ".join(sorted(ids - {self.image.cluster_id}))
            raise InconsistentClusterIdError(f"{self._store} is of {self.image.cluster_id}, log.dirs carry {others}")

    def append(self, records: Sequence[MetadataRecord], *, patience_s: float = math.inf) -> int:
        """Commit the records as the next file; returns the offset of the first. The image then includes them.

        A store that fails is tried again for `patience_s`, or until `give_up`. Raises StaleControllerEpochError when
        another controller has written the file (this one is deposed), and MetadataStoreError when the patience ends; in
        both cases the log takes nothing more.
        """
        invariant(bool(records), "an append of no records")
        with self._until_failure():
            offset = self.image.next_offset
            image = self.image.apply(records)
            invariant(image.controller_epoch >= 0, "the first append of a controller begins its epoch")
            file = MetadataFile(self.number + 1, image.controller_epoch, offset, self.writer, tuple(records))
            data = encode_file(file)
            self._commit(file.name, data, patience_s)
        self.image, self.number, self._last = image, file.number, data
        if image.next_offset - self._snapshot_offset >= self._records_between_snapshots:
            self._snapshot()
        return offset

    @contextmanager
    def _until_failure(self) -> Iterator[None]:
        """Nothing is done any more after the first failure: it is raised again."""
        if self._failure is not None:
            raise again(self._failure)
        try:
            yield
        except (MetadataStoreError, StaleControllerEpochError) as error:
            self._failure = error
            raise

    def give_up(self) -> None:
        """Try no longer, from any thread: an append that waits for its store raises MetadataStoreError."""
        self._given_up.set()

    def _commit(self, name: str, data: bytes, patience_s: float) -> None:
        """Create the file, or find out which controller did. Then check that the file before it is the one we know."""

        def attempt() -> None:
            # An earlier one may have succeeded all the same: this one answers "exists", and the file is then read.
            if not self._store.create(name, data):
                self._check_ours(name, data)
            self._check_last()

        self._persist(attempt, f"{name} could not be written", patience_s)

    def _persist(self, attempt: Callable[[], None], failure: str, patience_s: float) -> None:
        """Do it again while the store fails. Raises MetadataStoreError when the patience ends."""
        give_up_at_s, pause_s = time.monotonic() + patience_s, RETRY_FIRST_S
        while True:
            try:
                attempt()
            except OSError as error:
                self.health.fails(str(error))
                if self._given_up.is_set() or time.monotonic() >= give_up_at_s:
                    raise MetadataStoreError(f"{self._store}: {failure}: {error}") from error
            else:
                self.health.works()
                return
            self._wait(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _check_ours(self, name: str, data: bytes) -> None:
        existing = self._store.read(name)
        if existing is None:
            raise FileNotFoundError(f"{name} exists, and does not")
        if existing != data:
            other = decode_file(name, existing)
            raise StaleControllerEpochError(
                f"{name} was written by another controller, of epoch {other.controller_epoch} ({other.writer})"
            )

    def _check_last(self) -> None:
        """Check that the last file is still the one that this log knows.

        A writer that slept through a whole snapshot finds its next number free: another controller has used it and
        deleted the file. The file before it is then gone, or is one that another such writer has left.
        """
        if self.empty:
            return
        name = file_name(self.number)
        data = self._store.read(name)
        if data == self._last:
            return
        if data is not None or self._has_newer():
            raise StaleControllerEpochError(f"{name} is gone: another controller cleaned it up")
        raise FileNotFoundError(f"{name} is gone, and nothing newer is there: is this another directory?")

    def _has_newer(self) -> bool:
        """Whether there is a file that only another controller can have written: a snapshot, or one after our next."""
        return any(
            (file_number(name) or 0) > self.number + 1 or (file_number(name, snapshot=True) or 0) > self.number
            for name in self._store.names()
        )

    def check_current(self) -> None:
        """Check whether another controller has taken over. One that writes nothing would not notice it otherwise.

        Raises StaleControllerEpochError, after which the log takes nothing more. Where the store does not answer, the
        next check decides.
        """
        with self._until_failure():
            try:
                self._look()
            except OSError as error:
                self.health.fails(str(error))
            else:
                self.health.works()

    def ensure_current(self, *, patience_s: float = math.inf) -> None:
        """As `check_current`, but a store that does not answer is asked again, as `append` does. Raises as `append`."""
        with self._until_failure():
            self._persist(self._look, "it is not known whether another controller has taken over", patience_s)

    def _look(self) -> None:
        if self._store.read(file_name(self.number + 1)) is not None:
            raise StaleControllerEpochError(f"another controller has written after {file_name(self.number)}")
        self._check_last()

    def _snapshot(self) -> None:
        """Write a snapshot and delete files that are no longer needed. A failure is harmless: the log stays whole."""
        image = self.image
        snapshot = MetadataFile(
            self.number, image.controller_epoch, image.next_offset, self.writer, tuple(to_records(image)), snapshot=True
        )
        try:
            self._store.create(snapshot.name, encode_file(snapshot))
            self._clean_up()
        except OSError as error:
            logger.warning("no snapshot of %s was written, or files behind it stay: %s", self._store, error)
        self._snapshot_offset = image.next_offset  # after a failure, too: the next attempt is as many records away

    def _clean_up(self) -> None:
        """Delete files in ascending order, never the newest: a hole in the middle would look like a loss."""
        names = self._store.names()
        snapshots = sorted(n for name in names if (n := file_number(name, snapshot=True)) is not None)
        kept = snapshots[-self._snapshots_kept :]
        for number in sorted(n for name in names if (n := file_number(name)) is not None):
            if number < min(kept[0], self.number):
                self._store.delete(file_name(number))
        for number in snapshots[: -self._snapshots_kept]:
            self._store.delete(file_name(number, snapshot=True))
