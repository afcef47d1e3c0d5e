"""The replicas' logs on disk, in a few lines: each record is the leader epoch that wrote it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from spark_broker.controller.image import MetadataImage, PartitionRegistration

CRASH_LOSES = 2

Log = tuple[int, ...]


def reach(log: Log) -> tuple[int, int]:
    """Of two logs after clean elections, the one that reaches further has every committed record of the other."""
    return (log[-1] if log else -1, len(log))


@dataclass
class Copies:
    """Every replica's log by (topic id, partition, broker), and the committed part of each partition."""

    logs: dict[tuple[str, int, int], Log] = field(default_factory=dict)
    committed: dict[tuple[str, int], Log] = field(default_factory=dict)
    elected: dict[tuple[str, int], int] = field(default_factory=dict)  # the newest leader epoch that was checked

    def log(self, topic_id: str, number: int, broker: int) -> Log:
        return self.logs.get((topic_id, number, broker), ())

    def ends(self, image: MetadataImage) -> dict[tuple[int, str, int], tuple[int, int]]:
        """The log ends of all replicas, also of empty ones."""
        return {
            (broker, topic.topic_id, number): reach(self.log(topic.topic_id, number, broker))
            for topic, number, state in image.partitions()
            for broker in state.replicas
        }

    def append(self, topic_id: str, number: int, state: PartitionRegistration, *, committed: bool) -> None:
        written = (*self.log(topic_id, number, state.leader), state.leader_epoch)
        for broker in state.isr if committed else (state.leader,):
            self.logs[topic_id, number, broker] = written
        if committed:
            self.committed[topic_id, number] = written

    def catch_up(self, topic_id: str, number: int, leader: int, followers: Collection[int]) -> None:
        for broker in followers:
            self.logs[topic_id, number, broker] = self.log(topic_id, number, leader)

    def crash(self, broker: int) -> None:
        """The machine crashes: what was not synced is lost."""
        for key in [key for key in self.logs if key[2] == broker]:
            self.logs[key] = self.logs[key][:-CRASH_LOSES]

    def delete_moved_away(self, topic_id: str, number: int, state: PartitionRegistration) -> None:
        for broker in [b for id_, n, b in self.logs if (id_, n) == (topic_id, number) and b not in state.replicas]:
            del self.logs[topic_id, number, broker]

    def check(self, topic_id: str, number: int, state: PartitionRegistration, unclean: Collection[int]) -> None:
        """`unclean`: the leader epochs that began with an unclean election."""
        key = (topic_id, number)
        self.delete_moved_away(*key, state)
        checked = self.elected.get(key, -1)
        if any(checked < epoch <= state.leader_epoch for epoch in unclean):
            chosen = state.leader if state.leader != -1 else (*state.isr, *state.elr)[0]
            self.committed[key] = self.log(*key, chosen)
        if checked < state.leader_epoch in unclean and state.leader != -1:
            others = [self.log(*key, broker) for broker in state.replicas]
            best = max(map(reach, others))
            assert reach(self.committed[key]) == best, "somebody had more than the replica that leads"
        self.elected[key] = state.leader_epoch
        for broker in (*state.isr, *state.elr):
            have, needed = self.log(*key, broker), self.committed.get(key, ())
            assert reach(have) >= reach(needed), f"broker {broker} is electable without what was committed"
