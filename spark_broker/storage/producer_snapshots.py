"""Snapshots of a partition's producer state. `<offset>.snapshot` is the state after all batches below the offset.

One is written at each roll: opening or cutting a log then replays one segment, not the whole log. One is written at the
log start: retention then removes records, but not what is known of their producers (KIP-360). A snapshot is a function
of the log below its offset, and is removed before that part of the log is cut. Only the snapshot at the log start
cannot be rebuilt from the log.

A file is `u32 version | u32 CRC-32C of the version and the rest | MessagePack`, written whole.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from bisect import bisect_right, insort
from pathlib import Path

import msgspec

from spark_broker.core.producers import ProducerEntry, ProducerStates, StoredBatch
from spark_broker.core.transaction_index import AbortedTransaction, TransactionIndex
from spark_broker.errors import DamagedLogError
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.storage.files import read_whole, write_atomically
from spark_broker.storage.filesystem import LOCAL, FileSystem, ReadError

SNAPSHOT_SUFFIX = ".snapshot"
VERSION = 1

_HEAD = struct.Struct("<II")
_VERSION = struct.Struct("<I")

logger = logging.getLogger(__name__)


class _Snapshot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`producers`: (id, epoch, last append ms, batches as (sequence, base offset, last offset)), sorted by id;
    `ongoing`: (producer id, first offset); `aborted`: (producer id, first offset, marker's offset)."""

    offset: int
    producers: list[tuple[int, int, int, list[tuple[int, int, int]]]]
    ongoing: list[tuple[int, int]]
    aborted: list[tuple[int, int, int]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Snapshot)


def encode_snapshot(offset: int, states: ProducerStates) -> bytes:
    """The bytes of a snapshot file."""
    snapshot = _Snapshot(
        offset,
        [
            (
                producer_id,
                entry.producer_epoch,
                entry.last_append_ms,
                [(batch.sequence, batch.base_offset, batch.last_offset) for batch in entry.batches],
            )
            for producer_id, entry in states.entries()
        ],
        states.transactions.ongoing(),
        [
            (transaction.producer_id, transaction.first_offset, transaction.last_offset)
            for transaction in states.transactions.aborted()
        ],
    )
    version, body = _VERSION.pack(VERSION), _encoder.encode(snapshot)
    return _HEAD.pack(VERSION, crc32c(version + body)) + body


def decode_snapshot(data: bytes) -> tuple[int, ProducerStates]:
    """The offset and the state of a snapshot file. Raises DamagedLogError."""
    if len(data) < _HEAD.size:
        raise DamagedLogError(f"a producer snapshot of {len(data)} bytes")
    version, crc = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if crc != crc32c(_VERSION.pack(version) + body):
        raise DamagedLogError("a producer snapshot fails its CRC")
    if version != VERSION:
        raise DamagedLogError(f"a producer snapshot of version {version}; this release reads {VERSION}")
    try:
        snapshot = _decoder.decode(body)
    except UNDECODABLE as error:
        raise DamagedLogError(f"a producer snapshot does not decode: {error}") from None
    entries = (
        (producer_id, ProducerEntry(epoch, tuple(StoredBatch(*batch) for batch in batches), last_append_ms))
        for producer_id, epoch, last_append_ms, batches in snapshot.producers
    )
    transactions = TransactionIndex(snapshot.ongoing, (AbortedTransaction(*values) for values in snapshot.aborted))
    return snapshot.offset, ProducerStates(entries, transactions)


class ProducerSnapshots:
    """The snapshot files of one partition's directory. Removals are durable when a method returns.

    Every method raises OSError. The caller holds the partition's lock.
    """

    def __init__(self, directory: Path, *, fs: FileSystem = LOCAL) -> None:
        self._fs = fs
        self._directory = directory
        names = (name for name in fs.list_directory(directory) if name.endswith(SNAPSHOT_SUFFIX))
        stems = (name.removesuffix(SNAPSHOT_SUFFIX) for name in names)
        self._offsets = sorted(int(stem) for stem in stems if stem.isdecimal())

    @property
    def offsets(self) -> tuple[int, ...]:
        """In ascending order."""
        return tuple(self._offsets)

    def write(self, offset: int, states: ProducerStates) -> None:
        """Write the state after all batches below `offset`. It replaces a snapshot of the same offset."""
        path, is_new = self._path(offset), offset not in self._offsets
        if is_new:
            insort(self._offsets, offset)
        try:
            write_atomically(self._fs, path, encode_snapshot(offset, states))
        except OSError:
            # It may be there all the same, and must then go with this part of the log.
            if is_new and not self._fs.exists(path):
                self._offsets.remove(offset)
            raise

    def read(self, offset: int) -> ProducerStates:
        """The state at `offset`. Raises DamagedLogError when the snapshot is missing or damaged."""
        path = self._path(offset)
        try:
            snapshot_offset, states = decode_snapshot(read_whole(self._fs, path))
        except FileNotFoundError:
            raise DamagedLogError(f"{path.name} is missing") from None
        if snapshot_offset != offset:
            raise DamagedLogError(f"{path.name} is of offset {snapshot_offset}")
        return states

    def newest(self, first: int, last: int) -> tuple[int, ProducerStates] | None:
        """The newest whole snapshot from offset `first` to `last`, both inclusive; None when there is none.

        One that is damaged, or cannot be read, is skipped: a replay of the log from an older one gives the same state.
        """
        for offset in reversed(self._offsets[: bisect_right(self._offsets, last)]):
            if offset < first:
                break
            try:
                return offset, self.read(offset)
            except (DamagedLogError, ReadError) as error:
                logger.warning("%s: %s; an older one is used", self._directory.name, error)
        return None

    def remove_above(self, offset: int) -> int:
        """Remove the snapshots above `offset`, before the log is cut there or after it was found to end there. Returns
        how many there were.
        """
        return self._remove([snapshot_offset for snapshot_offset in self._offsets if snapshot_offset > offset])

    def remove_below(self, offset: int) -> None:
        """Remove the snapshots below `offset`, after retention has removed the batches there.

        There is a snapshot at `offset`.
        """
        self._remove([snapshot_offset for snapshot_offset in self._offsets if snapshot_offset < offset])

    def remove_between(self, first: int, end: int) -> None:
        """Remove the snapshots above `first` and below `end`, before compaction changes the batches there.

        A replay from an older one gives the same state.
        """
        self._remove([snapshot_offset for snapshot_offset in self._offsets if first < snapshot_offset < end])

    def _remove(self, offsets: list[int]) -> int:
        for offset in offsets:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(self._path(offset))
            self._offsets.remove(offset)
        if offsets:
            self._fs.sync_directory(self._directory)
        return len(offsets)

    def _path(self, offset: int) -> Path:
        return self._directory / f"{offset:020d}{SNAPSHOT_SUFFIX}"
