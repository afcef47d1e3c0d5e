"""The line of the controller's log about one change of one partition: what was, what is, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spark_broker.controller.image import PartitionRegistration
from spark_broker.model import NO_LEADER

ALWAYS = ("leader", "leader_epoch", "isr")
ONLY_CHANGED = ("elr", "last_known_elr", "damaged", "replicas", "adding", "removing", "partition_epoch")
NAMES = {"leader_epoch": "leader epoch", "partition_epoch": "partition epoch", "isr": "ISR", "elr": "ELR"}
NAMES |= {"last_known_elr": "last known ELR"}


@dataclass(frozen=True, slots=True)
class PartitionChanged:
    """`before`: None if the partition is new. `expected`: as in Note.

    Text and fields are computed only when the line is written: where INFO is off, a change costs only this object.
    """

    topic_partition: str
    before: PartitionRegistration | None
    after: PartitionRegistration
    why: str
    unclean: bool = False
    expected: bool = True

    @property
    def text(self) -> str:
        """`t-0: leader 0 -> 1, leader epoch 3 -> 4, ISR 0, 1 -> 1, ...: why`."""
        parts = [_part(name, self._was(name), getattr(self.after, name)) for name in self._shown()]
        made = "" if self.before is not None else "created: "
        unclean = "unclean election: " if self.unclean and self.after.leader != NO_LEADER else ""
        return f"{self.topic_partition}: {made}{unclean}{', '.join(parts)}: {self.why}"

    @property
    def fields(self) -> Mapping[str, object]:
        """The same for programs: each value, and its former value as `old_...` where it has changed."""
        fields: dict[str, object] = {"topic_partition": self.topic_partition, "why": self.why}
        for name in self._shown():
            value, was = getattr(self.after, name), self._was(name)
            fields[name] = value
            if was is not None and was != value:
                fields[f"old_{name}"] = was
        if self.unclean:
            fields["unclean"] = True
        return fields

    def _was(self, name: str) -> object:
        return None if self.before is None else getattr(self.before, name)

    def _shown(self) -> list[str]:
        before = self.before
        if before is None:
            return [*ALWAYS, "replicas"]
        return [*ALWAYS, *(n for n in ONLY_CHANGED if getattr(before, n) != getattr(self.after, n))]


def _part(name: str, was: object, value: object) -> str:
    shown = _shown_value(name, value)
    change = shown if was is None or was == value else f"{_shown_value(name, was)} -> {shown}"
    return f"{NAMES.get(name, name)} {change}"


def _shown_value(name: str, value: object) -> str:
    if isinstance(value, Iterable):
        return f"[{', '.join(map(str, value))}]"
    return "none" if name == "leader" and value == NO_LEADER else str(value)
