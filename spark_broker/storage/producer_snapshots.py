"""Snapshots of what a partition remembers of its producers: `<offset>.snapshot` is the state after all batches below.

One is written at each roll and at the log start, so that opening or cutting a log replays a segment and not its whole
history, and retention takes records away but not what is known of their producers (KIP-360). They are a function of the
log below their offset, so one goes before the batch at its offset changes; the log start's alone cannot be made again.

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
from spark_broker.storage.files import TEMPORARY_SUFFIX, write_atomically
from spark_broker.storage.filesystem import LOCAL, FileSystem

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
    """The bytes of a file."""
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
    """Offset and state. Raises DamagedLogError."""
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

    Every method but `newest` raises OSError. The caller holds the partition's lock.
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
        """The state after all batches below `offset`; a snapshot that is there is replaced."""
        path = self._path(offset)
        try:
            write_atomically(self._fs, path, encode_snapshot(offset, states))
        except OSError:
            # On a full disk, the unfinished file would take room that the log needs.
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(path.with_name(path.name + TEMPORARY_SUFFIX))
            raise
        if offset not in self._offsets:
            insort(self._offsets, offset)

    def read(self, offset: int) -> ProducerStates:
        """Raises DamagedLogError when the snapshot is missing or damaged."""
        path = self._path(offset)
        try:
            found, states = decode_snapshot(self._fs.read_bytes(path))
        except FileNotFoundError:
            raise DamagedLogError(f"{path.name} is missing") from None
        if found != offset:
            raise DamagedLogError(f"{path.name} is of offset {found}")
        return states

    def newest(self, first: int, last: int) -> tuple[int, ProducerStates] | None:
        """The newest readable one from offset `first` to `last`, both inclusive; None: there is none.

        One that cannot be read is passed over: the log replays what it would have said.
        """
        for offset in reversed(self._offsets[: bisect_right(self._offsets, last)]):
            if offset < first:
                break
            try:
                return offset, self.read(offset)
            except DamagedLogError as error:
                logger.warning("%s: %s; an older one is used", self._directory.name, error.message)
        return None

    def remove_above(self, offset: int) -> None:
        """Before the log is cut at `offset`, or when it was found to end there."""
        self._remove([snapshot_offset for snapshot_offset in self._offsets if snapshot_offset > offset])

    def remove_below(self, offset: int) -> None:
        """After retention has removed the batches below `offset`, for which there is a snapshot."""
        self._remove([snapshot_offset for snapshot_offset in self._offsets if snapshot_offset < offset])

    def _remove(self, offsets: list[int]) -> None:
        for offset in offsets:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(self._path(offset))
            self._offsets.remove(offset)
        if offsets:
            self._fs.sync_directory(self._directory)

    def _path(self, offset: int) -> Path:
        return self._directory / f"{offset:020d}{SNAPSHOT_SUFFIX}"
