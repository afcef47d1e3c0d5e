"""A transaction coordinator that never fails: it decides, and writes markers until they are stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.unit.core.harness import Cluster, Outcome


@dataclass(slots=True)
class Transaction:
    """The producer's transaction of this epoch.

    `added`: the partition is in it. `ending`: the decision, while its marker is missing.
    """

    epoch: int = 0
    added: bool = False
    ending: bool | None = None
    markers: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SentMarker:
    """A marker that may arrive a second time, late."""

    producer_id: int
    producer_epoch: int
    committed: bool


class ModelCoordinator:
    """`decided`: by producer id and epoch, whether the transaction is committed. Others must not be shown."""

    def __init__(self) -> None:
        self.transactions: dict[int, Transaction] = {}
        self.decided: dict[tuple[int, int], bool] = {}
        self.sent: list[SentMarker] = []

    def transaction(self, producer_id: int) -> Transaction:
        return self.transactions.setdefault(producer_id, Transaction())

    def add(self, producer_id: int, producer_epoch: int) -> bool:
        """A leader asks whether the transaction is open; if so, the partition will get a marker."""
        transaction = self.transaction(producer_id)
        if transaction.epoch != producer_epoch or transaction.ending is not None:
            return False
        transaction.added = True
        return True

    def end(self, producer_id: int, producer_epoch: int, *, committed: bool) -> None:
        """The producer or its time-out ends the transaction. A late or repeated request does nothing."""
        transaction = self.transaction(producer_id)
        if transaction.epoch != producer_epoch or transaction.ending is not None:
            return
        self.decided[producer_id, producer_epoch] = committed and transaction.added
        if transaction.added:
            transaction.ending = committed
        else:
            transaction.epoch += 1  # It has no partition, so no marker is written.

    def ending(self) -> list[int]:
        """Producers whose marker is still to be written. Transactions with a committed marker are ended first."""
        for producer_id, transaction in self.transactions.items():
            if transaction.ending is not None and any(marker.base_offset is not None for marker in transaction.markers):
                self.sent.append(SentMarker(producer_id, transaction.epoch + 1, transaction.ending))
                self.transactions[producer_id] = Transaction(transaction.epoch + 1)
        return [pid for pid, transaction in self.transactions.items() if transaction.ending is not None]

    def write_marker(self, cluster: Cluster, broker: int, producer_id: int, value: int) -> None:
        """Try this leader; raises the error with which it refuses the marker."""
        transaction = self.transactions[producer_id]
        assert transaction.ending is not None
        outcome = cluster.append_marker(broker, value, producer_id, transaction.epoch + 1, committed=transaction.ending)
        transaction.markers.append(outcome)
