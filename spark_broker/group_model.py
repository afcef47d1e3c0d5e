"""Consumer groups as an administrator sees them: the values that `Admin` returns."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from spark_broker.errors import OffsetOutOfRangeError
from spark_broker.model import TopicPartition, html_table
from spark_broker.times import shown

GROUP_STATES = ("Empty", "Assigning", "Reconciling", "Stable")
"""A group without members; one whose partitions are being assigned; one whose members are on their way there; one whose
members have what they are to have.
"""


@dataclass(frozen=True, slots=True)
class GroupListing:
    """A group in a list. `state`: one of GROUP_STATES. `members`: how many.

    `coordinator`: the broker that keeps the group.
    """

    group_id: str
    state: str
    members: int
    coordinator: int


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member of a group.

    `instance_id`: of a static member; `rack`, `pattern`, `assignor`: what it has said; None where it has not. `host`,
    `client_id`: what it says about itself, for people.

    `kind`: stable (it has what it is to have), revoking (it was told to give partitions up), waiting (its next
    heartbeat moves it on, or another member still holds what it is to get), or away (a static member that has left and
    may come back). `epoch`: the group epoch that it has reached; -2: away.

    `assigned`: what it owns. `revoking`: told to be given up, and perhaps still read. `target`: what it is to own.
    `session_timeout`, `max_poll_interval`: seconds.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    rack: str | None
    kind: str
    epoch: int
    topics: tuple[str, ...]
    pattern: str | None
    assignor: str | None
    session_timeout: float
    max_poll_interval: float
    assigned: tuple[TopicPartition, ...]
    revoking: tuple[TopicPartition, ...]
    target: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class GroupRebalance:
    """Why an epoch of a group began. `time`: by the coordinator's clock, with the zone UTC."""

    epoch: int
    time: datetime
    reason: str

    def __str__(self) -> str:
        return f"epoch {self.epoch}, {shown(self.time)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group with its members, in order of their ids.

    `state`: as in `GroupListing`. `epoch` rises when members, subscriptions or partitions change; `target_epoch`: the
    one for which partitions were last assigned. `assignor`: who did that; None before the first member. `rebalances`:
    the last few, the newest last. A deleted topic shows as its id.
    """

    group_id: str
    state: str
    epoch: int
    target_epoch: int
    assignor: str | None
    members: tuple[MemberDescription, ...]
    rebalances: tuple[GroupRebalance, ...]
    coordinator: int
    coordinator_epoch: int

    def _repr_html_(self) -> str:
        columns = ("member", "instance", "client", "host", "epoch", "kind", "partitions")
        rows = [
            (m.member_id, m.instance_id, m.client_id, m.host, m.epoch, m.kind, (*m.assigned, *m.revoking))
            for m in self.members
        ]
        return html_table(f"group {self.group_id}: {self.state}, epoch {self.epoch}", columns, rows)


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """Where a group stands in one partition.

    `committed`: the next offset that it reads; None: nothing is committed. `leader_epoch`: of the last record read,
    where it is known. `metadata`: the note beside the commit. `start_offset`: the first record that there is, in the
    log or in the topic's table. `end_offset`: where a reader stands that has read everything that transactions have
    committed; `high_watermark` may be further. All three are None when the leader did not answer. `member_id`: whose
    partition it is; None: nobody's.
    """

    topic: str
    partition: int
    committed: int | None
    leader_epoch: int | None = None
    metadata: str = ""
    start_offset: int | None = None
    end_offset: int | None = None
    high_watermark: int | None = None
    member_id: str | None = None

    @property
    def lag(self) -> int | None:
        """Offsets up to the end; from the first record if nothing is committed. None: the leader did not answer."""
        return self.lag_at(self.committed)

    def lag_at(self, offset: int | None) -> int | None:
        """The lag if this offset were committed (None: nothing)."""
        position = self.start_offset if offset is None else offset
        return None if self.end_offset is None or position is None else max(0, self.end_offset - position)

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    def check(self, offset: int) -> None:
        """Raises OffsetOutOfRangeError for an offset that no record of the partition has, or will have next."""
        start, end = self.start_offset, self.high_watermark
        if start is None or end is None or start <= offset <= end:
            return
        where = f"beyond the end {end}" if offset > end else f"before the first record {start}"
        raise OffsetOutOfRangeError(
            f"{self.topic_partition}: the offset {offset} is {where}; nothing was changed",
            hint=f"Give an offset from {start} to {end}.",
        )
