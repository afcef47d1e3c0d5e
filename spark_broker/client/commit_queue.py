"""The commits of a consumer: one at a time, so that an older one never overwrites a newer one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_broker.client.consumer_effects import CommitOffsets, Offsets
from spark_broker.client.partition_position import PartitionPosition
from spark_broker.errors import OffsetOutOfRangeError, PolicyViolationError, SparkBrokerError, invariant
from spark_broker.model import OffsetAndMetadata, TopicPartition


@dataclass(slots=True)
class CommitQueue:
    """`known`: what the coordinator has, as far as the client knows. It has nothing of a partition whose commit is
    under way.
    """

    known: dict[TopicPartition, OffsetAndMetadata] = field(default_factory=dict)
    waiting: list[CommitOffsets] = field(default_factory=list)
    in_flight: CommitOffsets | None = None

    def changed(self, offsets: Offsets) -> dict[TopicPartition, OffsetAndMetadata]:
        """Those that the coordinator is not known to have, or would not have for long: others wait."""
        waiting = self._waiting_offsets()
        return {
            tp: offset
            for tp, offset in offsets.items()
            if self.known.get(tp) != offset or waiting.get(tp, offset) != offset
        }

    def new(self, offsets: Offsets) -> dict[TopicPartition, OffsetAndMetadata]:
        """Those that the coordinator would not have once all commits have ended. The same one would be sent for ever,
        where commits take longer than the time between two of them.
        """
        in_flight = self.in_flight.offsets if self.in_flight is not None else {}
        last = {**self.known, **in_flight, **self._waiting_offsets()}
        return {tp: offset for tp, offset in offsets.items() if last.get(tp) != offset}

    def _waiting_offsets(self) -> Offsets:
        """What is stored last, where several wait."""
        return {tp: offset for commit in self.waiting for tp, offset in commit.offsets.items()}

    def add(self, commit: CommitOffsets) -> None:
        """Leave out older offsets of the same partitions, unless a caller waits for them."""
        for older in self.waiting:
            if older.background:
                older.offsets = {tp: offset for tp, offset in older.offsets.items() if tp not in commit.offsets}
        self.waiting = [older for older in self.waiting if older.offsets or not older.background]
        self.waiting.append(commit)

    def next(self) -> CommitOffsets | None:
        if self.in_flight is not None or not self.waiting:
            return None
        self.in_flight = self.waiting.pop(0)
        for tp in self.in_flight.offsets:
            self.known.pop(tp, None)
        return self.in_flight

    @property
    def is_busy(self) -> bool:
        """Whether a commit is under way, or waits."""
        return self.in_flight is not None or bool(self.waiting)

    def ended(self, commit: CommitOffsets, error: SparkBrokerError | None) -> None:
        invariant(commit is self.in_flight, f"a commit of {commit.offsets} ended that was not under way")
        self.in_flight = None
        commit.done, commit.error = True, error
        if error is None:
            self.known.update(commit.offsets)


def check_commit(partitions: Mapping[TopicPartition, PartitionPosition], offsets: Offsets) -> None:
    """Raises OffsetOutOfRangeError and PolicyViolationError: a commit never passes records not handed out."""
    for tp, offset in offsets.items():
        position = partitions.get(tp)
        if offset.offset < 0:
            raise OffsetOutOfRangeError(f"{tp}: a commit of offset {offset.offset}")
        if position is not None and position.has_position and offset.offset > position.position:
            raise PolicyViolationError(
                f"{tp}: a commit of {offset.offset} would pass records from {position.position} on, "
                "which were not handed out"
            )
