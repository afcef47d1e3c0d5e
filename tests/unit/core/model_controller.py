"""The controller in a few lines: election from ISR and ELR, and every change a compare-and-set on the epochs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from spark_broker.core.effects import ProposeIsr
from spark_broker.core.events import LeaderAndIsr
from spark_broker.errors import (
    FencedLeaderEpochError,
    IneligibleReplicaError,
    InvalidUpdateVersionError,
    SparkBrokerError,
    StaleBrokerEpochError,
)
from spark_broker.model import NO_LEADER


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata for a broker: the partition, every registered broker's epoch, and which brokers are live.

    `elr` is not in the ISR, but has every committed record (KIP-966).
    """

    assignment: LeaderAndIsr
    broker_epochs: Mapping[int, int]
    live: frozenset[int]
    elr: tuple[int, ...] = ()

    @property
    def live_epochs(self) -> dict[int, int]:
        return {broker: epoch for broker, epoch in self.broker_epochs.items() if broker in self.live}


@dataclass(slots=True)
class ModelController:
    """`history` is the metadata log; each broker has applied a prefix of it."""

    metadata: Metadata
    min_insync_replicas: int
    history: list[Metadata] = field(default_factory=list)

    @staticmethod
    def of(replicas: tuple[int, ...], min_insync_replicas: int) -> ModelController:
        assignment = LeaderAndIsr(replicas[0], 0, 0, replicas, replicas)
        metadata = Metadata(assignment, dict.fromkeys(replicas, 1), frozenset(replicas))
        return ModelController(metadata, min_insync_replicas, [metadata])

    @property
    def assignment(self) -> LeaderAndIsr:
        return self.metadata.assignment

    def is_live(self, broker: int) -> bool:
        return broker in self.metadata.live

    def fence(self, *gone: int, shrink: bool = True) -> None:
        """They leave the ISR if it has a live leader without them. `shrink=False` is for a restarted driver."""
        self._brokers(live=self.metadata.live - set(gone))
        leader, isr = self.assignment.leader, self.assignment.isr
        if leader in gone or leader == NO_LEADER:
            leader, isr = self._elect()
        if leader != NO_LEADER and shrink:
            isr = tuple(broker for broker in isr if broker not in gone)
        self._change(leader, isr)

    def register(self, broker: int, *, data_lost: bool) -> int:
        """A new incarnation, whose predecessor's leadership ends. Returns the broker epoch; it is not live yet."""
        epoch = max(self.metadata.broker_epochs.values()) + 1
        self._brokers(live=self.metadata.live - {broker}, epochs={**self.metadata.broker_epochs, broker: epoch})
        leader, isr = self.assignment.leader, self.assignment.isr
        if leader == broker:
            leader, isr = self._elect()
        self._change(leader, isr, lost=(broker,) if data_lost else ())
        return epoch

    def unfence(self, broker: int) -> None:
        """The broker is ready. It leads if there is no leader and it is in the ISR or in the ELR."""
        self._brokers(live=self.metadata.live | {broker})
        if self.assignment.leader == NO_LEADER:
            self._change(*self._elect())

    def elect_uncleanly(self, broker: int) -> None:
        """An operator accepts that what this replica lacks is lost."""
        elected = self._elected(broker, (broker,))
        self._publish(replace(self.metadata, assignment=replace(elected, unclean_epoch=elected.leader_epoch), elr=()))

    def move_leader(self, broker: int) -> bool:
        """Preferred-leader balance, which only moves to a live member of the ISR."""
        possible = broker != self.assignment.leader and broker in self.assignment.isr and self.is_live(broker)
        if possible:
            self._change(broker, self.assignment.isr)
        return possible

    def alter_isr(self, sender: int, broker_epoch: int, proposal: ProposeIsr) -> SparkBrokerError | None:
        """Take the proposal, or return the error that refuses it."""
        current = self.assignment
        if self.metadata.broker_epochs[sender] != broker_epoch:
            return StaleBrokerEpochError(f"broker {sender}")
        if (proposal.leader_epoch, current.leader) != (current.leader_epoch, sender):
            return FencedLeaderEpochError(f"leader epoch {proposal.leader_epoch}")
        if proposal.partition_epoch != current.partition_epoch:
            return InvalidUpdateVersionError(f"partition epoch {proposal.partition_epoch}")
        for broker, epoch in proposal.isr:
            if broker not in current.isr and self.metadata.live_epochs.get(broker) != epoch:
                return IneligibleReplicaError(f"broker {broker} of epoch {epoch}")
        self._change(current.leader, tuple(broker for broker, _ in proposal.isr), lost=proposal.lacking)
        return None

    @property
    def eligible(self) -> tuple[int, ...]:
        """Every broker that may be elected."""
        return (*self.assignment.isr, *self.metadata.elr)

    def _elect(self) -> tuple[int, tuple[int, ...]]:
        """Leader and ISR: a live member of the ISR, else an eligible replica, which leads alone."""
        isr = self.assignment.isr
        live = [broker for broker in self.assignment.replicas if self.is_live(broker)]
        members = [broker for broker in live if broker in isr]
        if members:
            return members[0], isr
        eligible = [broker for broker in live if broker in self.metadata.elr]
        return (eligible[0], (eligible[0],)) if eligible else (NO_LEADER, isr)

    def _change(self, leader: int, isr: tuple[int, ...], lost: Collection[int] = ()) -> None:
        isr = tuple(broker for broker in isr if broker not in lost)
        elr: tuple[int, ...] = ()
        if len(isr) < min(self.min_insync_replicas, len(self.assignment.replicas)):
            elr = tuple(broker for broker in self.eligible if broker not in (*isr, *lost))
        if (leader, isr, elr) != (self.assignment.leader, self.assignment.isr, self.metadata.elr):
            self._publish(replace(self.metadata, assignment=self._elected(leader, isr), elr=elr))

    def _elected(self, leader: int, isr: tuple[int, ...]) -> LeaderAndIsr:
        current = self.assignment
        return LeaderAndIsr(
            leader=leader,
            leader_epoch=current.leader_epoch + (leader != current.leader),
            partition_epoch=current.partition_epoch + 1,
            replicas=current.replicas,
            isr=isr,
            unclean_epoch=current.unclean_epoch,
        )

    def _brokers(self, *, live: frozenset[int], epochs: Mapping[int, int] | None = None) -> None:
        changed = replace(self.metadata, live=live, broker_epochs=epochs or self.metadata.broker_epochs)
        if changed != self.metadata:
            self._publish(changed)

    def _publish(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.history.append(metadata)
