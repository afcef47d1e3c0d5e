"""A partition's log in memory: what a replica's files keep over a crash, and what a restart rebuilds from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spark_broker.core.batch import BatchInfo
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.events import RecoveredLog
from spark_broker.core.producers import ProducerStates


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored batch; `value` stands for its rows and is unique among the batches that clients send."""

    info: BatchInfo
    value: int

    @property
    def base_offset(self) -> int:
        return self.info.base_offset


def replayed(entries: Sequence[Entry], states: ProducerStates) -> ProducerStates:
    """The producers' state after these batches: the definition that every replica is compared with."""
    states = states.copy()
    for entry in entries:
        states.replay(entry.info)
    return states


class MemoryLog:
    """Batches in order. It is truncated to the beginning of a batch, as files are."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.log_start_offset = 0
        self.log_end_offset = 0
        self.saved_epochs = EpochHistory()
        self.producers_at_start = ProducerStates()
        self.high_watermark_checkpoint = 0
        self._expected: tuple[ProducerStates, int] | None = None  # a state, and how many entries it covers

    def state(self) -> RecoveredLog:
        """What a new replica starts from."""
        return RecoveredLog(
            log_start_offset=self.log_start_offset,
            log_end_offset=self.log_end_offset,
            high_watermark=self.high_watermark_checkpoint,
            epochs=self.epochs(),
            producers=self.rebuilt_producers(),
        )

    def epochs(self) -> EpochHistory:
        """The saved history, completed by the batches."""
        history = self.saved_epochs.start_at(self.log_start_offset).truncate_to(self.log_end_offset)
        for entry in self.entries:
            if entry.info.leader_epoch > history.latest_epoch:
                history = history.assign(entry.info.leader_epoch, entry.base_offset)
        return history

    def rebuilt_producers(self) -> ProducerStates:
        return replayed(self.entries, self.producers_at_start)

    def expected_producers(self) -> ProducerStates:
        """The same state, which callers must not change. It is cheap as long as the log only grows."""
        states, count = self._expected or (self.producers_at_start.copy(), 0)
        for entry in self.entries[count:]:
            states.replay(entry.info)
        self._expected = states, len(self.entries)
        return states

    def append(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            assert entry.base_offset == self.log_end_offset, "a gap in the log"
            self.entries.append(entry)
            self.log_end_offset = entry.info.next_offset

    def read(self, offset: int, end_offset: int) -> list[Entry]:
        """Whole batches from the one that contains `offset` up to `end_offset`."""
        return [e for e in self.entries if e.info.next_offset > offset and e.info.next_offset <= end_offset]

    def truncate_to(self, offset: int) -> None:
        self._expected = None
        self.entries = [entry for entry in self.entries if entry.info.next_offset <= offset]
        self.log_end_offset = self.entries[-1].info.next_offset if self.entries else self.log_start_offset

    def advance_log_start(self, offset: int) -> None:
        self._expected = None
        gone = [entry for entry in self.entries if entry.info.next_offset <= offset]
        self.producers_at_start = replayed(gone, self.producers_at_start)
        self.producers_at_start.start_at(offset)
        self.entries = self.entries[len(gone) :]
        self.log_start_offset = offset

    def restart_at(self, log_start_offset: int, epochs: EpochHistory, producers: ProducerStates) -> None:
        """Drop everything and begin at the leader's log start."""
        self._expected = None
        self.entries = []
        self.log_start_offset = self.log_end_offset = log_start_offset
        self.producers_at_start = producers.copy()
        self.saved_epochs = EpochHistory(tuple(e for e in epochs.entries if e.start_offset <= log_start_offset))
