"""Groups whose members share the partitions: one owner at a time, and only its reads and commits count.

A member tells what it owns by its own events (`Assigned`, `Revoked`, `Gone`). One that the group has removed learns of
it late, and reads on until then; another member is handed these records again, from the committed offset on. Epochs
say which of two owners is the later one. A topic that is created again must have another name in the history.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from spark_broker.errors import InvalidDataError
from spark_broker.model import TopicPartition
from spark_broker.testing.checks.facts import Facts, Outcome
from spark_broker.testing.checks.violations import Violation, ViolationKind
from spark_broker.testing.history import Assigned, Gone, Isolation, OffsetsCommitted, Polled, ReaderOpened, Revoked


@dataclass(slots=True)
class _Ownership:
    """Of one partition by one member. `begins_at`: what the group had committed; nothing below is handed out again.

    `successor`: the member that was assigned the partition before this one gave it up; empty: none.
    """

    reader: str
    epoch: int
    begins_at: int = 0
    successor: str = ""
    has_ended: bool = False


@dataclass(slots=True)
class _Shared:
    """One partition of one group. `owners`: each latest owner, and from which event on (`since`)."""

    committed: int = 0
    committed_in_transactions: int = 0
    latest: _Ownership | None = None
    since: list[int] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)

    def owner_before(self, position: int) -> str | None:
        """The latest owner when there were so many events."""
        at = bisect_left(self.since, position) - 1
        return self.owners[at] if at >= 0 else None


def check_members(facts: Facts) -> Iterator[Violation]:
    """Judge every group in which a member was assigned partitions, in the order of events.

    Raises InvalidDataError for a member that was never opened as one of a group.
    """
    if Assigned in facts.kinds:
        yield from _Judge(facts).violations()


class _Judge:
    """Invariant: `owned[reader]` holds the ownerships of a reader that have not ended."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._shared: dict[tuple[str, TopicPartition], _Shared] = defaultdict(_Shared)
        self._owned: dict[str, dict[TopicPartition, _Ownership]] = defaultdict(dict)
        self._epochs: dict[str, int] = {}
        self._sharing = {self._member(event.reader).group for event in facts.events if isinstance(event, Assigned)}

    def _member(self, reader: str) -> ReaderOpened:
        opened = self._facts.readers.get(reader)
        if opened is None or not opened.group:
            raise InvalidDataError(f"{reader} was assigned partitions, and was not opened as a member of a group")
        return opened

    def _group_of(self, reader: str) -> str | None:
        """The reader's group, if its members share."""
        opened = self._facts.readers.get(reader)
        return opened.group if opened is not None and opened.group in self._sharing else None

    def violations(self) -> Iterator[Violation]:
        for position, event in enumerate(self._facts.events):
            match event:
                case Assigned():
                    yield from self._assigned(position, event)
                case Revoked():
                    yield from self._revoked(event)
                case Gone():
                    self._lose(event.reader, list(self._owned[event.reader]))
                    self._epochs.pop(event.reader, None)
                case Polled():
                    yield from self._polled(event)
                case OffsetsCommitted() if event.group in self._sharing:
                    yield from self._committed(event)
                case _:
                    pass
        for reader, owned in self._owned.items():
            for partition, ownership in owned.items():
                yield from self._two_owners(reader, partition, ownership)

    def _assigned(self, position: int, event: Assigned) -> Iterator[Violation]:
        group = self._member(event.reader).group
        before = self._epochs.get(event.reader, event.epoch)
        self._epochs[event.reader] = max(before, event.epoch)
        if event.epoch < before:
            detail = f"{event.reader} was in epoch {before}, and then in {event.epoch}"
            partition = event.partitions[0] if event.partitions else TopicPartition("", -1)
            yield Violation(ViolationKind.EPOCH_FELL, partition, self._place(group, partition), detail)
        for partition in event.partitions:
            if partition in self._owned[event.reader]:
                detail = f"{event.reader} was assigned what it owned already"
                yield Violation(ViolationKind.TOLD_WRONGLY, partition, self._place(group, partition), detail)
                continue
            ownership = _Ownership(event.reader, event.epoch)
            self._owned[event.reader][partition] = ownership
            self._succeed(position, group, partition, ownership)

    def _succeed(self, position: int, group: str, partition: TopicPartition, new: _Ownership) -> None:
        """A member that stands still may learn that it was assigned a partition after its successor has."""
        shared = self._shared[group, partition]
        latest = shared.latest
        if latest is not None and not latest.has_ended:
            if new.epoch < latest.epoch:
                new.successor = latest.reader
                return
            latest.successor = new.reader
        isolation = self._member(new.reader).isolation
        in_transactions = shared.committed_in_transactions if isolation is Isolation.READ_COMMITTED else 0
        new.begins_at = max(shared.committed, in_transactions)
        shared.latest = new
        shared.since.append(position)
        shared.owners.append(new.reader)

    def _revoked(self, event: Revoked) -> Iterator[Violation]:
        owned = self._owned[event.reader]
        for partition in event.partitions:
            if partition not in owned:
                detail = f"{event.reader} gave up what it did not own"
                place = self._place(self._group_of(event.reader), partition)
                yield Violation(ViolationKind.TOLD_WRONGLY, partition, place, detail)
            elif not event.lost:
                yield from self._two_owners(event.reader, partition, owned[partition])
        self._lose(event.reader, event.partitions)
        if event.lost:
            self._epochs.pop(event.reader, None)

    def _lose(self, reader: str, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            ownership = self._owned[reader].pop(partition, None)
            if ownership is not None:
                ownership.has_ended = True

    def _two_owners(self, reader: str, partition: TopicPartition, ownership: _Ownership) -> Iterator[Violation]:
        """The end of an ownership of a member that the group has not removed."""
        if ownership.successor:
            detail = f"{reader} owned it in epoch {ownership.epoch} when {ownership.successor} was assigned it"
            place = self._place(self._group_of(reader), partition)
            yield Violation(ViolationKind.TWO_OWNERS, partition, place, detail)

    def _polled(self, event: Polled) -> Iterator[Violation]:
        group = self._group_of(event.reader)
        if group is None:
            return
        ownership = self._owned[event.reader].get(event.partition)
        if ownership is None:
            detail = f"{event.reader} was handed {event.values[0]!r}" if event.values else f"{event.reader} polled it"
            yield Violation(ViolationKind.NOT_OWNED, event.partition, event.base_offset, detail)
        elif event.base_offset < ownership.begins_at and event.partition not in self._facts.unclean:
            detail = f"{event.reader} was assigned it after the group {group!r} had committed {ownership.begins_at}"
            yield Violation(ViolationKind.HANDED_OUT_TWICE, event.partition, event.base_offset, detail)

    def _committed(self, event: OffsetsCommitted) -> Iterator[Violation]:
        if event.transaction is None:
            shared = self._shared[event.group, event.partition]
            shared.committed = max(shared.committed, event.offset)
        elif self._facts.transactions[event.transaction].outcome is Outcome.COMMITTED:
            shared = self._shared[event.group, event.partition]
            shared.committed_in_transactions = max(shared.committed_in_transactions, event.offset)
        else:
            return
        owner = shared.owner_before(event.began)
        if event.reader and owner not in (None, event.reader):
            detail = f"{event.reader} began its commit of {event.offset} after {owner} was assigned the partition"
            yield Violation(ViolationKind.FENCED_COMMIT, event.partition, event.offset, detail)

    def _place(self, group: str | None, partition: TopicPartition) -> int:
        """Where the group is in the partition: the next owner begins there."""
        shared = self._shared.get((group or "", partition))
        return -1 if shared is None else max(shared.committed, shared.committed_in_transactions)
