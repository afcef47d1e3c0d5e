"""Which transactional batches of a partition are undecided, and which were aborted: a function of its log.

A batch belongs to the transaction that its producer's next marker ends. Readers of committed records stop at the last
stable offset, below which every transaction is decided by a marker that is itself committed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from spark_broker.errors import invariant


@dataclass(frozen=True, slots=True)
class AbortedTransaction:
    """Batches of `producer_id` from `first_offset` up to the marker at `last_offset` were aborted."""

    producer_id: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class EndedTransaction:
    """A transaction from its first batch to its marker. It counts as undecided while the marker is not committed."""

    first_offset: int
    marker_offset: int


class TransactionIndex:
    """The transactions of one partition.

    Invariants: a producer has at most one ongoing transaction; `_ongoing` is in order of first offsets, `_ended` in
    order of markers; each producer's aborted transactions are in order and do not overlap.
    """

    def __init__(self, ongoing: Iterable[tuple[int, int]] = (), aborted: Iterable[AbortedTransaction] = ()) -> None:
        """`ongoing`: producer ids with the offsets at which their transactions begin."""
        self._ongoing = dict(sorted(ongoing, key=lambda began: began[1]))
        self._ended: deque[EndedTransaction] = deque()  # Their markers may not be committed yet.
        self.swept_to = 0  # Below it, compaction has left no aborted batch, and no mark of a transaction on the others.
        self._aborted: dict[int, list[AbortedTransaction]] = {}
        for transaction in sorted(aborted, key=lambda transaction: transaction.last_offset):
            self._aborted.setdefault(transaction.producer_id, []).append(transaction)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TransactionIndex)
            and self._ongoing == other._ongoing
            and self.aborted() == other.aborted()
        )

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> TransactionIndex:
        other = TransactionIndex(self._ongoing.items(), self.aborted())
        other._ended = self._ended.copy()
        other.swept_to = self.swept_to
        return other

    def ongoing(self) -> list[tuple[int, int]]:
        """Producer ids with the offsets at which their open transactions begin, in order of these offsets."""
        return list(self._ongoing.items())

    def aborted(self) -> list[AbortedTransaction]:
        """In order of their markers."""
        aborted = (transaction for transactions in self._aborted.values() for transaction in transactions)
        return sorted(aborted, key=lambda transaction: transaction.last_offset)

    def began(self, producer_id: int, offset: int) -> None:
        """A transactional batch is at `offset`. It begins a transaction, unless the producer has an ongoing one."""
        self._ongoing.setdefault(producer_id, offset)

    def ended(self, producer_id: int, marker_offset: int, *, aborted: bool) -> None:
        """A marker is at `marker_offset`. It ends nothing if the producer has appended no batch since the last one."""
        first_offset = self._ongoing.pop(producer_id, -1)
        if first_offset < 0:
            return
        invariant(first_offset < marker_offset, "a marker at %d ends what begins at %d", marker_offset, first_offset)
        last = self._ended[-1].marker_offset if self._ended else -1
        invariant(last < marker_offset, "a marker at %d after one at %d", marker_offset, last)
        self._ended.append(EndedTransaction(first_offset, marker_offset))
        if aborted:
            transaction = AbortedTransaction(producer_id, first_offset, marker_offset)
            self._aborted.setdefault(producer_id, []).append(transaction)

    def first_offset(self, producer_id: int) -> int:
        """Where the producer's ongoing transaction begins; -1: it has none."""
        return self._ongoing.get(producer_id, -1)

    def committed(self, high_watermark: int) -> None:
        """Markers below the high watermark are committed: what they ended is decided."""
        while self._ended and self._ended[0].marker_offset < high_watermark:
            self._ended.popleft()

    def last_stable_offset(self, high_watermark: int) -> int:
        """Below it, every transaction is decided by a committed marker. Never above the high watermark."""
        undecided = (ended.first_offset for ended in self._ended if ended.marker_offset >= high_watermark)
        return min(high_watermark, next(iter(self._ongoing.values()), high_watermark), *undecided)

    def is_aborted(self, producer_id: int, offset: int) -> bool:
        """Whether a transactional batch below the last stable offset was aborted."""
        transactions = self._aborted.get(producer_id)
        if not transactions:
            return False
        at = bisect_left(transactions, offset, key=lambda transaction: transaction.last_offset)
        return at < len(transactions) and transactions[at].first_offset <= offset

    def start_at(self, log_start_offset: int) -> None:
        """Forget aborted transactions that retention has removed."""
        self._forget_aborted(log_start_offset)

    def swept(self, offset: int) -> None:
        """A pass of compaction has rewritten what is below this offset. Forget aborted transactions that ended there.

        Where nothing moves the log start, there would be more and more of them.
        """
        self.swept_to = max(self.swept_to, offset)
        self._forget_aborted(offset)

    def _forget_aborted(self, before: int) -> None:
        for producer_id, transactions in list(self._aborted.items()):
            kept = [transaction for transaction in transactions if transaction.last_offset >= before]
            if kept:
                self._aborted[producer_id] = kept
            else:
                del self._aborted[producer_id]
