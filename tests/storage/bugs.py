"""Known bugs of storage, put back into production code: a patch each, which the torture must find (docs/known-bugs.md).

The numbers are those of docs/known-bugs.md; those without one were found here, by this torture, when it was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.core.batch import batch_info
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.producers import ProducerEntry, ProducerStates
from spark_broker.core.transaction_index import TransactionIndex
from spark_broker.errors import DamagedLogError
from spark_broker.protocol.frame import BatchHeader, Frame
from spark_broker.protocol.messages import ProducerStateEntry
from spark_broker.storage import checkpoints, log, log_state, producer_snapshots, recovery, segment
from spark_broker.storage.checkpoints import read_leader_epochs
from spark_broker.storage.files import TEMPORARY_SUFFIX, opened, write_fully
from spark_broker.storage.filesystem import FileSystem
from spark_broker.storage.log import PartitionLog
from spark_broker.storage.log_state import LogState, read_log_state
from spark_broker.storage.log_view import LogView
from spark_broker.storage.producer_snapshots import ProducerSnapshots, encode_snapshot
from spark_broker.storage.segment import Segment, segment_paths
from spark_broker.storage.start_kind import StartKind
from tests.storage import hunts
from tests.storage.hunts import Hunt

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class StorageBug:
    """`number` is that of docs/known-bugs.md, or empty for a bug found here. `quick`: found within about a second."""

    number: str
    name: str
    what: str
    put_in: Callable[[Patch], None]
    hunt: Hunt
    quick: bool


BUGS: dict[str, StorageBug] = {}


def bug(number: str, hunt: Hunt, *, quick: bool = True) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Registers a patch under its function's name."""

    def register(put_in: Callable[[Patch], None]) -> Callable[[Patch], None]:
        name = put_in.__name__
        BUGS[name] = StorageBug(number, name, (put_in.__doc__ or "").strip(), put_in, hunt, quick)
        return put_in

    return register


@bug("3", hunts.crashes_of_replicas)
def keep_epochs_past_the_end(patch: Patch) -> None:
    """KAFKA-10706: a log that opens keeps epochs that begin at or past its end."""

    def buggy(self: ReplicaLog) -> EpochHistory:
        history = EpochHistory.from_pairs(read_leader_epochs(self.directory, fs=self.fs))
        history = history.start_at(self._log.log_start_offset)
        for header in self._log.headers():
            if header.leader_epoch > history.latest_epoch:
                history = history.assign(header.leader_epoch, max(header.base_offset, self._log.log_start_offset))
        return history

    patch.setattr(ReplicaLog, "_epochs", buggy)


@bug("4", hunts.crashes_of_replicas)
def trust_a_sparse_history(patch: Patch) -> None:
    """KAFKA-7897, 7959: a history that lacks epochs is not completed from the batches."""

    def buggy(self: ReplicaLog) -> EpochHistory:
        saved = EpochHistory.from_pairs(read_leader_epochs(self.directory, fs=self.fs))
        return saved.start_at(self._log.log_start_offset).truncate_to(self._log.log_end_offset)

    patch.setattr(ReplicaLog, "_epochs", buggy)


@bug("19", hunts.crashes_of_replicas, quick=False)
def truncation_leaves_snapshots(patch: Patch) -> None:
    """KAFKA-5435: snapshots of what was cut off are taken for what follows."""
    patch.setattr(ProducerSnapshots, "remove_above", lambda self, offset: None)


@bug("19", hunts.crashes_of_replicas)
def replay_from_the_segments_beginning(patch: Patch) -> None:
    """KAFKA-5435: batches that the snapshot has already are replayed once more."""

    def buggy(self: ReplicaLog, newest: int, end_offset: int) -> ProducerStates:
        _, states = self._snapshots.newest(self._log.log_start_offset, newest) or (0, ProducerStates())
        for header in self._log.headers(0):
            if header.base_offset < end_offset:
                states.replay(batch_info(header))
        states.start_at(self._log.log_start_offset)
        return states

    patch.setattr(ReplicaLog, "_replay", buggy)


@bug("20", hunts.crashes_of_replicas)
def retention_erases_producers(patch: Patch) -> None:
    """KIP-360: what retention removes is forgotten, with its producers."""

    def buggy(self: ReplicaLog, offset: int) -> None:
        if offset > self._log.log_start_offset:
            self._snapshots.write(offset, ProducerStates())
            self._log.advance_log_start(offset)
            self._snapshots.remove_below(offset)

    patch.setattr(ReplicaLog, "advance_log_start", buggy)


@bug("22", hunts.crashes_of_replicas)
def snapshots_forget_offsets(patch: Patch) -> None:
    """A snapshot has the producers' epochs and not their batches: a retry gets no original offset."""

    def buggy(offset: int, states: ProducerStates) -> bytes:
        entries = ((p, ProducerEntry(e.producer_epoch, (), e.last_append_ms)) for p, e in states.entries())
        return encode_snapshot(offset, ProducerStates(entries, states.transactions))

    patch.setattr(producer_snapshots, "encode_snapshot", buggy)


@bug("24", hunts.crashes_of_replicas)
def snapshots_forget_transactions(patch: Patch) -> None:
    """Open and aborted transactions are not in the snapshot: aborted batches are shown, open ones not waited for."""

    def buggy(offset: int, states: ProducerStates) -> bytes:
        return encode_snapshot(offset, ProducerStates(states.entries(), TransactionIndex()))

    patch.setattr(producer_snapshots, "encode_snapshot", buggy)


@bug("", hunts.crashes_of_replicas)
def restart_cuts_below_the_log_start(patch: Patch) -> None:
    """A restart first cuts at the log start, within a batch: a crash then finds a start that has no snapshot."""

    def buggy(self: ReplicaLog, start: int, epochs: list[tuple[int, int]], producers: list[ProducerStateEntry]) -> None:
        self.truncate_to(self._log.log_start_offset)
        restart_at(self, start, epochs, producers)

    restart_at = ReplicaLog.restart_at
    patch.setattr(ReplicaLog, "restart_at", buggy)


@bug("25", hunts.lives_of_logs, quick=False)
def times_outlive_truncation(patch: Patch) -> None:
    """KAFKA-3163: a segment that was cut still claims the times of what was cut off."""
    cut = Segment.cut

    def buggy(self: Segment, count: int) -> Segment:
        made = cut(self, count)
        made.__dict__["claimed_us"] = self.max_timestamp_us
        return made

    def find(self: LogView, timestamp_us: int) -> tuple[int, BatchHeader] | None:
        claims = (s for s in self.segments if s.__dict__.get("claimed_us", s.max_timestamp_us) >= timestamp_us)
        claiming = next(claims, None)
        if claiming is None or claiming.max_timestamp_us >= timestamp_us:
            return find_timestamp(self, timestamp_us)
        return None

    find_timestamp = LogView.offset_for_timestamp
    patch.setattr(Segment, "cut", buggy)
    patch.setattr(LogView, "offset_for_timestamp", find)


@bug("26", hunts.disordered_ends)
def disorder_stops_the_start(patch: Patch) -> None:
    """KAFKA-3919: a batch out of order past what is synced is reported as damage."""
    _judge_order(patch, refuse=True)


@bug("26", hunts.disordered_ends)
def disorder_is_accepted(patch: Patch) -> None:
    """KAFKA-3919: recovery takes whatever whole batch comes next."""
    _judge_order(patch, refuse=False)


def _judge_order(patch: Patch, *, refuse: bool) -> None:
    batch_at = recovery._batch_at
    last: dict[tuple[FileSystem, int], int] = {}

    def buggy(fs: FileSystem, fd: int, position: int, size: int) -> BatchHeader | None:
        header = batch_at(fs, fd, position, size)
        if header is None:
            return None
        expected = last.setdefault((fs, fd), header.base_offset)
        if refuse and header.base_offset != expected:
            raise DamagedLogError(f"offset {header.base_offset} where {expected} is next")
        last[fs, fd] = expected + header.next_offset - header.base_offset
        return header._replace(base_offset=expected)

    patch.setattr(recovery, "_batch_at", buggy)


@bug("27", hunts.lives_with_failing_syncs)
def try_fsync_again(patch: Patch) -> None:
    """An fsync that fails is tried once more, and then believed."""
    sync = Segment.sync

    def buggy(self: Segment) -> None:
        try:
            sync(self)
        except OSError:
            sync(self)

    patch.setattr(Segment, "sync", buggy)


@bug("27", hunts.lives_with_failing_syncs)
def trust_the_page_cache(patch: Patch) -> None:
    """After a process that died of a failed fsync, the next one syncs what the kernel takes for written."""
    patch.setattr(recovery, "_write_again", lambda *_: None)


@bug("27", hunts.crashes_of_logs)
def leave_new_segments_unnamed(patch: Patch) -> None:
    """The directory is not synced after a segment's files were made."""
    patch.setattr(PartitionLog, "_sync", lambda self, segment: segment.sync())


@bug("27", hunts.crashes_of_logs)
def leave_renames_unsynced(patch: Patch) -> None:
    """The directory is not synced after a checkpoint took its place."""

    def buggy(fs: FileSystem, path: Path, data: bytes) -> None:
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        with opened(fs, temporary, 66) as fd:
            fs.ftruncate(fd, 0)
            write_fully(fs, fd, [data], 0)
            fs.fsync(fd)
        fs.rename(temporary, path)

    for module in (checkpoints, log_state, producer_snapshots, recovery):
        patch.setattr(module, "write_atomically", buggy)


@bug("27", hunts.crashes_of_logs)
def replace_before_syncing(patch: Patch) -> None:
    """A checkpoint takes its place before its content is synced."""

    def buggy(fs: FileSystem, path: Path, data: bytes) -> None:
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        with opened(fs, temporary, 66) as fd:
            fs.ftruncate(fd, 0)
            write_fully(fs, fd, [data], 0)
        fs.rename(temporary, path)
        fs.sync_directory(path.parent)

    for module in (checkpoints, log_state, producer_snapshots, recovery):
        patch.setattr(module, "write_atomically", buggy)


@bug("", hunts.crashes_of_logs)
def one_copy_of_the_state(patch: Patch) -> None:
    """The log's state is changed in place, and there is no second copy that a torn write leaves whole."""
    patch.setattr(log_state, "_SLOTS", 1)
    patch.setattr(log_state, "write_fully", lambda fs, fd, parts, _: write_fully(fs, fd, parts, 0))


@bug("", hunts.crashes_of_logs)
def seal_without_sync(patch: Patch) -> None:
    """A segment that is sealed counts as synced, and is not."""

    def buggy(self: PartitionLog, sealed: Segment) -> None:
        sealed.write_end_of_stream()
        sealed.seal()
        self._recovery_point = sealed.next_offset
        self._save_state()

    patch.setattr(PartitionLog, "_seal", buggy)


@bug("", hunts.lives_of_logs, quick=False)
def refused_batches_come_back(patch: Patch) -> None:
    """What did not fit on a full disk is cut off, and the cut is not synced."""
    patch.setattr(Segment, "_take_back", lambda self: self._cut_files(len(self.entries()), self.end))


@bug("", hunts.crashes_of_logs)
def remove_messages_first(patch: Patch) -> None:
    """Of a segment that goes, `.arrow` goes first: half a deletion looks like a lost file."""

    def buggy(fs: FileSystem, directory: Path, base_offset: int) -> None:
        for path in segment_paths(directory, base_offset):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(path)

    patch.setattr(segment, "remove_files", buggy)
    patch.setattr(recovery, "remove_files", buggy)


@bug("", hunts.crashes_of_logs)
def retention_saves_the_start_late(patch: Patch) -> None:
    """Segments are deleted before the log start is saved."""

    def buggy(self: PartitionLog, offset: int) -> list[int]:
        if offset <= self._log_start_offset:
            return []
        gone = [old_segment for old_segment in self._segments[:-1] if old_segment.next_offset <= offset]
        for old_segment in gone:
            old_segment.remove()
        self._fs.sync_directory(self.directory)
        self._segments, self._log_start_offset = self._segments[len(gone) :], offset
        self._save_state()
        return [old_segment.base_offset for old_segment in gone]

    patch.setattr(PartitionLog, "advance_log_start", buggy)


@bug("", hunts.lives_of_logs, quick=False)
def recovery_leaves_cuts_unsynced(patch: Patch) -> None:
    """What recovery cuts off, a crash of the machine may bring back."""

    def buggy(fs: FileSystem, path: Path, length: int) -> None:
        if fs.size_of(path) != length:
            fs.truncate(path, length)

    patch.setattr(recovery, "_truncate", buggy)


@bug("28", hunts.damage_at_rest)
def clean_damage_up(patch: Patch) -> None:
    """Recovery cuts at the first bad byte, whether or not that was synced."""

    def buggy(directory: Path, start: StartKind, *, fs: FileSystem) -> LogState:
        return LogState(read_log_state(directory, start, fs=fs).log_start_offset)

    patch.setattr(log, "read_log_state", buggy)


@bug("28", hunts.damage_while_open)
def serve_damage(patch: Patch) -> None:
    """What is read is not compared with its CRC."""

    def buggy(headers: list[BatchHeader], data: bytes) -> list[Frame]:
        frames, at = [], 0
        for header in headers:
            frames.append(Frame(header, memoryview(data)[at : at + header.length]))
            at += header.length
        return frames

    patch.setattr(segment, "verified_frames", buggy)


@bug("28", hunts.damage_while_open)
def load_indexes_unchecked(patch: Patch) -> None:
    """The index of a sealed segment is believed."""
    patch.setattr(segment, "check_chain", lambda *_: None)


@bug("28", hunts.damage_of_replicas)
def believe_snapshots(patch: Patch) -> None:
    """A producer snapshot is not compared with its CRC."""
    patch.setattr(producer_snapshots, "crc32c", lambda data: _Any())


class _Any(int):
    """A checksum that matches every content."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


@bug("28", hunts.damage_of_replicas)
def forget_a_lost_snapshot(patch: Patch) -> None:
    """Where the snapshot of the log start is damaged, nobody is known: sequence numbers begin anew (KIP-360)."""
    newest = ProducerSnapshots.newest

    def buggy(self: ProducerSnapshots, first: int, last: int) -> tuple[int, ProducerStates] | None:
        return newest(self, first, last) or (first, ProducerStates())

    patch.setattr(ProducerSnapshots, "newest", buggy)
    patch.setattr(ProducerSnapshots, "read", _read_or_nothing(ProducerSnapshots.read))


def _read_or_nothing(
    read: Callable[[ProducerSnapshots, int], ProducerStates],
) -> Callable[[ProducerSnapshots, int], ProducerStates]:
    def buggy(self: ProducerSnapshots, offset: int) -> ProducerStates:
        try:
            return read(self, offset)
        except DamagedLogError:
            return ProducerStates()

    return buggy
