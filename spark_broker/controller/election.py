"""Who leads a partition: only a member of its ISR."""

from __future__ import annotations

from collections.abc import Callable

from spark_broker.controller.image import PartitionState
from spark_broker.controller.records import PartitionChangeRecord
from spark_broker.model import NO_LEADER


def elect(state: PartitionState, electable: Callable[[int], bool]) -> int:
    """The first electable ISR member in order of preference; NO_LEADER when there is none (unclean election is off)."""
    candidates = (broker for broker in state.replicas if broker in state.isr and broker not in state.damaged)
    return next((broker for broker in candidates if electable(broker)), NO_LEADER)


def change(
    topic_id: str, partition: int, state: PartitionState, *, leader: int, isr: tuple[int, ...]
) -> PartitionChangeRecord | None:
    """The record for a new leader and ISR; None when nothing changes."""
    if leader == state.leader and isr == state.isr:
        return None
    return PartitionChangeRecord(
        topic_id,
        partition,
        leader=leader if leader != state.leader else None,
        isr=list(isr) if isr != state.isr else None,
    )
