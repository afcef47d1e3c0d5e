"""The part of a log's state that its segments do not show, in a small file that is changed in place.

A change in place succeeds on a full disk. It must, because retention saves the log start before it deletes segments.
The file has two slots of one sector each. A slot is a CRC, then JSON with the number of the change. A change is written
to one slot and synced, and then to the other. A crash can therefore damage only one slot, and the other is whole. Both
slots are equal before the log does anything that depends on the change, so one damaged slot loses nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from spark_broker.core.compaction import Cleaned
from spark_broker.errors import DamagedLogError
from spark_broker.protocol.crc32c import crc32c
from spark_broker.protocol.wire import UNDECODABLE
from spark_broker.storage.files import opened, read_whole, write_atomically, write_fully
from spark_broker.storage.filesystem import LOCAL, FileSystem
from spark_broker.storage.start_kind import StartKind

LOG_STATE_FILE = "log-state.json"
SLOT_BYTES = 512
_SLOTS = 2


@dataclass(frozen=True, slots=True)
class LogState:
    """Everything below `recovery_point` is synced (a lower value is safe).

    `purge_offset` and `committed_to`: those of `Cleaned`, or lower ones. The file that says more of it may be lost.
    """

    log_start_offset: int = 0
    recovery_point: int = 0
    purge_offset: int = 0
    committed_to: int = 0

    def at(self, log_start_offset: int, recovery_point: int) -> LogState:
        """The same log, as compacted as before, with these bounds."""
        return replace(self, log_start_offset=log_start_offset, recovery_point=recovery_point)

    def knowing(self, cleaned: Cleaned) -> LogState:
        """The same log, compacted so far."""
        return replace(self, purge_offset=cleaned.purge_offset, committed_to=cleaned.committed_to)

    def knows_more_than(self, cleaned: Cleaned) -> bool:
        """Whether the log has been compacted further than this says."""
        return self.purge_offset > cleaned.purge_offset or self.committed_to > cleaned.committed_to


class _Slot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Earlier versions do not know the last two. A log that was never compacted leaves them out."""

    change: int
    log_start_offset: int
    recovery_point: int
    purge_offset: int = 0
    committed_to: int = 0

    def state(self) -> LogState:
        return LogState(self.log_start_offset, self.recovery_point, self.purge_offset, self.committed_to)


_decoder = msgspec.json.Decoder(_Slot)


def read_log_state(directory: Path, start: StartKind = StartKind.CLEAN, *, fs: FileSystem = LOCAL) -> LogState:
    """The state of a partition's log; all zero when none was written.

    After a crash, the state is made durable first: the process may have died between the two writes, or of a failed
    fsync. Raises DamagedLogError when neither slot is whole. Raises OSError.
    """
    slots = _read_slots(directory, fs)
    newest = _newest(slots)
    if newest is None:
        return LogState()
    if start is not StartKind.CLEAN and slots != [newest] * _SLOTS:
        _write_in_place(directory, newest, slots, fs)
    return newest.state()


def write_log_state(directory: Path, state: LogState, *, fs: FileSystem = LOCAL) -> None:
    """Save the state of a partition's log, durably. Raises OSError. A full disk can refuse only the first save."""
    slots = _read_slots(directory, fs)
    newest = _newest(slots)
    change = 0 if newest is None else newest.change + 1
    slot = _Slot(change, state.log_start_offset, state.recovery_point, state.purge_offset, state.committed_to)
    if newest is None:
        write_atomically(fs, directory / LOG_STATE_FILE, _encode(slot) * _SLOTS)
    else:
        _write_in_place(directory, slot, slots, fs)


def _write_in_place(directory: Path, slot: _Slot, slots: list[_Slot | None], fs: FileSystem) -> None:
    """Write both slots. The slot that is surely on the disk is written last.

    If one slot is damaged, this is the whole one. If both are whole and differ, it is the older one.
    """
    changes = [-1 if slot is None else slot.change for slot in slots]
    first = slots.index(None) if None in slots else changes.index(max(changes))
    with opened(fs, directory / LOG_STATE_FILE, os.O_WRONLY) as fd:
        for number in (first, 1 - first):
            write_fully(fs, fd, [_encode(slot)], number * SLOT_BYTES)
            fs.fsync(fd)


def _encode(slot: _Slot) -> bytes:
    text = json.dumps(msgspec.to_builtins(slot), separators=(",", ":")).encode()
    text = text.ljust(SLOT_BYTES - len(b"12345678\n\n"))
    return b"%08x\n%s\n" % (crc32c(text), text)


def _read_slots(directory: Path, fs: FileSystem) -> list[_Slot | None]:
    """Both slots, None for a damaged one; empty when there is no file."""
    try:
        data = read_whole(fs, directory / LOG_STATE_FILE)
    except FileNotFoundError:
        return []
    if len(data) != _SLOTS * SLOT_BYTES:
        raise DamagedLogError(f"{LOG_STATE_FILE} has {len(data)} bytes")
    return [_decode(data[at : at + SLOT_BYTES]) for at in range(0, len(data), SLOT_BYTES)]


def _newest(slots: list[_Slot | None]) -> _Slot | None:
    """The newest slot that is whole; None when nothing was written. Raises DamagedLogError when neither is whole."""
    whole = [slot for slot in slots if slot is not None]
    if slots and not whole:
        raise DamagedLogError(f"{LOG_STATE_FILE} fails its CRC, twice")
    return max(whole, key=lambda slot: slot.change, default=None)


def _decode(data: bytes) -> _Slot | None:
    crc, text = data[:8], data[9:-1]
    if data[8:9] + data[-1:] != b"\n\n" or crc != b"%08x" % crc32c(text):
        return None
    try:
        return _decoder.decode(text)
    except UNDECODABLE as error:
        raise DamagedLogError(f"{LOG_STATE_FILE} has its CRC and is not a state: {error}") from None
