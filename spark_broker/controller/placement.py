"""Where the replicas of new partitions go: evenly, and on different failure domains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from spark_broker.controller.disks import ALL_WELL, Disks
from spark_broker.controller.image import BrokerState, MetadataImage
from spark_broker.errors import InvalidReplicationFactorError


@dataclass
class Loads:
    """How many replicas and preferred leaders each broker has, and how often it is second after each leader."""

    replicas: Counter[int] = field(default_factory=Counter)
    leaders: Counter[int] = field(default_factory=Counter)
    seconds: Counter[tuple[int, int]] = field(default_factory=Counter)  # by (leader, its successor): spreads a failover

    def add(self, replicas: Sequence[int]) -> None:
        self.replicas.update(replicas)
        self.leaders.update(replicas[:1])
        if len(replicas) > 1:
            self.seconds[replicas[0], replicas[1]] += 1


def loads_of(image: MetadataImage) -> Loads:
    """The loads once the reassignments that run are done."""
    loads = Loads()
    for _, _, state in image.partitions():
        loads.add(state.target_replicas)
    return loads


def place(brokers: Sequence[BrokerState], loads: Loads, partitions: int, replication_factor: int) -> list[list[int]]:
    """Replicas of each new partition, preferred leader first; `loads` is brought up to date.

    Deterministic. Raises InvalidReplicationFactorError with fewer live brokers than replicas.
    """
    if replication_factor < 1:
        raise InvalidReplicationFactorError(f"replication factor {replication_factor}")
    if replication_factor > len(brokers):
        raise InvalidReplicationFactorError(
            f"replication factor {replication_factor} is larger than the number of live brokers, {len(brokers)}"
        )
    return [_place_one(brokers, loads, replication_factor) for _ in range(partitions)]


def _place_one(brokers: Sequence[BrokerState], loads: Loads, replication_factor: int) -> list[int]:
    leader = min(brokers, key=lambda b: (loads.leaders[b.id], loads.replicas[b.id], b.id))
    chosen = [leader]
    while len(chosen) < replication_factor:
        rest = [b for b in brokers if b not in chosen]
        chosen.append(min(rest, key=lambda b: _follower_rank(b, chosen, loads)))
    replicas = [b.id for b in chosen]
    loads.add(replicas)
    return replicas


def _follower_rank(broker: BrokerState, chosen: Sequence[BrokerState], loads: Loads) -> tuple[object, ...]:
    leader = chosen[0].id
    behind = loads.seconds[leader, broker.id] if len(chosen) == 1 else 0
    # Ids above the leader's come first: equal brokers take turns instead of always following in the order of ids.
    return (*conflicts(broker, chosen), loads.replicas[broker.id], behind, broker.id < leader, broker.id)


def conflicts(broker: BrokerState, others: Iterable[BrokerState]) -> tuple[int, int, int]:
    """How many of the others share its rack, its machine and its executor: fewer is better, in this order."""
    others = list(others)
    return (
        sum(broker.rack == other.rack for other in others),
        sum(broker.machine == other.machine for other in others),
        sum((broker.machine, broker.executor_id) == (other.machine, other.executor_id) for other in others),
    )


def replacement(
    image: MetadataImage,
    keep: Collection[int],
    exclude: Collection[int],
    loads: Loads,
    *,
    leads: bool,
    disks: Disks = ALL_WELL,
) -> int | None:
    """The live broker with room that fits best beside the replicas `keep`; None when there is no other."""
    kept = [image.brokers[id_] for id_ in keep if id_ in image.brokers]
    no = {*keep, *exclude, *disks.full}
    candidates = [b for b in image.live_brokers() if b.id not in no]
    if not candidates:
        return None

    def rank(broker: BrokerState) -> tuple[object, ...]:
        leaders = loads.leaders[broker.id] if leads else 0
        return (*conflicts(broker, kept), leaders, loads.replicas[broker.id], broker.id)

    return min(candidates, key=rank).id
