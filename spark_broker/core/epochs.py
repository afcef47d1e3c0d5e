"""The leader-epoch history of a partition: at which offset each leader epoch began to write.

Only this history decides where a log is truncated (KIP-101, KIP-279).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from spark_broker.errors import InvariantError, invariant

UNDEFINED_EPOCH = -1
UNDEFINED_OFFSET = -1


@dataclass(frozen=True, slots=True)
class EpochStart:
    """`epoch` wrote the records from `start_offset` (inclusive) on."""

    epoch: int
    start_offset: int


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The largest known epoch that is not above the one asked for, and its end (exclusive); -1 and -1: unknown."""

    epoch: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """Immutable; a change returns a new history.

    Invariant: epochs and start offsets both strictly increase.
    """

    entries: tuple[EpochStart, ...] = ()

    def __post_init__(self) -> None:
        for before, after in zip(self.entries, self.entries[1:], strict=False):
            if before.epoch >= after.epoch or before.start_offset >= after.start_offset:
                raise InvariantError(f"the epoch history does not increase: {before}, {after}")

    @staticmethod
    def from_pairs(pairs: list[tuple[int, int]]) -> EpochHistory:
        return EpochHistory(tuple(EpochStart(epoch, start) for epoch, start in pairs))

    def to_pairs(self) -> list[tuple[int, int]]:
        return [(entry.epoch, entry.start_offset) for entry in self.entries]

    @property
    def latest_epoch(self) -> int:
        return self.entries[-1].epoch if self.entries else UNDEFINED_EPOCH

    def assign(self, epoch: int, start_offset: int) -> EpochHistory:
        """`epoch` writes from `start_offset` on. An epoch that wrote nothing leaves no entry."""
        if self.entries and epoch == self.latest_epoch:
            return self
        invariant(epoch > self.latest_epoch, "epoch %d after %d", epoch, self.latest_epoch)
        kept = tuple(entry for entry in self.entries if entry.start_offset < start_offset)
        return EpochHistory((*kept, EpochStart(epoch, start_offset)))

    def only_lacks_the_newest_of(self, newer: EpochHistory, log_end_offset: int) -> bool:
        """Whether this history and the batches of a log that ends at `log_end_offset` are enough to rebuild `newer`.

        Batches carry their epochs, but opening a log reads only the batches from this history's last epoch on. `newer`
        cannot be rebuilt if this history has an epoch whose records were cut off, or belong to another epoch in
        `newer`: batches that are appended there would count as that epoch's. This history may have an epoch that begins
        at the log end, because its leader wrote nothing, if no batches of an older epoch can follow.
        """
        mine = {entry for entry in self.entries if entry.start_offset < log_end_offset}
        complete = {entry for entry in newer.entries if entry.start_offset < log_end_offset}
        if any(entry.start_offset > log_end_offset for entry in self.entries):
            return False
        if len(mine) == len(self.entries):
            return mine <= complete
        # If `newer` ends in an older epoch, this replica follows, and its leader may have more batches of that epoch.
        return mine == complete and newer.latest_epoch >= self.latest_epoch

    def end_of(self, epoch: int, log_end_offset: int) -> EpochEnd:
        """The end of `epoch` or, if it is not in the history, of the largest epoch below it."""
        if epoch == UNDEFINED_EPOCH or not self.entries or epoch > self.latest_epoch:
            return EpochEnd(UNDEFINED_EPOCH, UNDEFINED_OFFSET)
        if epoch == self.latest_epoch:
            return EpochEnd(epoch, log_end_offset)
        after = bisect_right(self.entries, epoch, key=lambda entry: entry.epoch)
        if after == 0:
            # Every known epoch is newer: what `epoch` wrote ends where this history begins.
            return EpochEnd(UNDEFINED_EPOCH, self.entries[0].start_offset)
        return EpochEnd(self.entries[after - 1].epoch, self.entries[after].start_offset)

    def epoch_at(self, offset: int) -> int:
        """The epoch that wrote `offset`; -1 when unknown."""
        after = bisect_right(self.entries, offset, key=lambda entry: entry.start_offset)
        return self.entries[after - 1].epoch if after else UNDEFINED_EPOCH

    def truncate_to(self, end_offset: int) -> EpochHistory:
        """Forget what begins at or past `end_offset`.

        KAFKA-10706: the history is truncated even if the log ends there already.
        """
        if not self.entries or self.entries[-1].start_offset < end_offset:
            return self
        return EpochHistory(tuple(entry for entry in self.entries if entry.start_offset < end_offset))

    def last(self, count: int) -> EpochHistory:
        """The newest `count` entries: what a reader remembers."""
        return self if len(self.entries) <= count else EpochHistory(self.entries[-count:])

    def start_at(self, log_start_offset: int) -> EpochHistory:
        """Forget epochs that end before the record that precedes `log_start_offset`.

        The epoch of that record stays. It identifies this log while it is empty, and a follower's log that ends here.
        """
        after = bisect_right(self.entries, log_start_offset - 1, key=lambda entry: entry.start_offset)
        return EpochHistory(self.entries[after - 1 :]) if after > 1 else self
