"""Clients that read and record: members of groups that commit offsets, an observer of the latest offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from random import Random

from spark_broker.client.consumer import Consumer
from spark_broker.client.consumer_errors import MEMBER_IS_GONE
from spark_broker.client.group_offsets import GroupOffsets
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.rebalance_listener import RebalanceListener
from spark_broker.client.retry import Deadline
from spark_broker.client.settings import client_config
from spark_broker.config import ConsumerConfig
from spark_broker.errors import SparkBrokerError, UnknownMemberIdError
from spark_broker.model import GroupMetadata, OffsetAndMetadata, TopicPartition
from spark_broker.testing.client_thread import ClientThread
from spark_broker.testing.history import Isolation
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.workload import record_poll

LATE_COMMIT_MS = 2000


class GroupMember(ClientThread):
    """Reads its partitions for a group, commits, and leaves from time to time. Another member then takes its place.

    Every member of a group must have partitions of its own.
    """

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        group: str,
        partitions: Sequence[TopicPartition],
        *,
        name: str = "member",
        polls_between_commits: int = 5,
        commits_of_one_life: int = 20,
    ) -> None:
        super().__init__(name, pause_s=0.0)
        self._recorder = recorder
        self._bootstrap_servers = bootstrap_servers
        self._group = group
        self._partitions = tuple(partitions)
        self._polls_between_commits = polls_between_commits
        self._commits_of_one_life = commits_of_one_life
        self._lives = count()
        self._life = name
        self._commits = 0
        self._consumer: Consumer | None = None

    def step(self) -> None:
        consumer = self._consumer or self._join()
        for _ in range(self._polls_between_commits):
            record_poll(consumer, self._recorder, self._life)
        positions = {partition: consumer.position(partition) for partition in self._partitions}
        consumer.commit(positions)
        for partition, offset in positions.items():
            self._recorder.offsets_committed(self._group, partition, offset)
        self._commits += 1
        if self._commits >= self._commits_of_one_life:
            self.renew()

    def renew(self) -> None:
        consumer, self._consumer = self._consumer, None
        self._commits = 0
        if consumer is not None:
            with suppress(SparkBrokerError):
                consumer.close()

    def _join(self) -> Consumer:
        self._life = f"{self.name}-{next(self._lives)}"
        consumer = Consumer(
            self._bootstrap_servers, group_id=self._group, auto_offset_reset="earliest", enable_auto_commit=False
        )
        self._consumer = consumer
        self._recorder.opened(self._life, isolation=Isolation.READ_COMMITTED, group=self._group)
        for partition in self._partitions:
            stored = consumer.committed(partition)
            committed = None if stored is None else stored.offset
            self._recorder.offsets_fetched(self._group, partition, committed)
            self._recorder.positioned(self._life, partition, committed or 0)
        consumer.assign(self._partitions)
        return consumer


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the members of one group do. `leaves`: the share of commits after which a member leaves the group.
    `freezes`: the share of those before which it stands still for longer than `max_poll_interval_ms`.
    """

    group: str
    topics: tuple[str, ...]
    session_timeout_ms: int = 3000
    max_poll_interval_ms: int = 4000
    polls_between_commits: int = 5
    leaves: float = 0.05
    freezes: float = 0.03


class SharingMember(ClientThread):
    """Shares the partitions of topics with the other members of its group; what it owns, reads and commits is recorded.

    It commits by itself, also before it gives partitions up. It leaves, and comes back under another name. The last
    name is `life`. It also tries to commit what is not its own any more, as a zombie would: a consumer itself refuses
    that.
    """

    def __init__(
        self, recorder: HistoryRecorder, bootstrap_servers: str, sharing: Sharing, *, name: str, seed: int = 0
    ) -> None:
        super().__init__(name, pause_s=0.0)
        self.life = name
        self.lives = 0
        self._recorder = recorder
        self._bootstrap_servers = bootstrap_servers
        self._sharing = sharing
        self._rng = Random(f"{seed}/{name}")
        self._consumer: Consumer | None = None
        self._identity = GroupMetadata(sharing.group)
        self._owned: set[TopicPartition] = set()
        self._read: dict[TopicPartition, int] = {}  # the next offset, of what is not committed yet
        self._given_up: dict[TopicPartition, int] = {}  # what was committed of partitions that went to others
        self._gave_up_as = self._identity  # A later epoch may be one in which a partition has come back.

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """What it reads at the moment."""
        return frozenset(self._owned)

    def step(self) -> None:
        consumer = self._consumer or self._join()
        for _ in range(self._sharing.polls_between_commits):
            for run in record_poll(consumer, self._recorder, self.life):
                self._read[run.partition] = run.next_offset
        fate = self._rng.random()
        if fate < self._sharing.freezes:  # with records that are not committed
            self._stopping.wait(self._sharing.max_poll_interval_ms / 1000 + self._rng.uniform(0.0, 2.0))
            return
        try:
            self._commit(consumer, list(self._read))
            given_up, self._given_up = self._given_up, {}
            self._commit_late(given_up, self._gave_up_as)
        except MEMBER_IS_GONE as error:
            self.errors.append(error)  # The next poll tells the listener.
        if fate > 1 - self._sharing.leaves:
            self.renew()

    def renew(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            try:
                consumer.close()
            except SparkBrokerError as error:
                self.errors.append(error)

    def _join(self) -> Consumer:
        self.life = f"{self.name}-{self.lives}"
        self.lives += 1
        self._owned.clear()
        self._read.clear()
        self._given_up.clear()
        self._recorder.opened(self.life, group=self._sharing.group)
        self._consumer = Consumer(
            self._bootstrap_servers,
            group_id=self._sharing.group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=self._sharing.session_timeout_ms,
            max_poll_interval_ms=self._sharing.max_poll_interval_ms,
            default_api_timeout_ms=10_000,
            client_id=self.life,
        )
        self._consumer.subscribe(self._sharing.topics, listener=_Telling(self, self._consumer))
        return self._consumer

    def assigned(self, consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """The listener was told so."""
        with suppress(UnknownMemberIdError):  # The group has gone on meanwhile: it was the epoch before, or an older.
            self._identity = consumer.group_metadata()
        self._recorder.assigned(self.life, partitions, max(self._identity.member_epoch, 0))
        self._owned.update(partitions)
        for partition in partitions:
            self._given_up.pop(partition, None)
            begins: int | None = None
            began = self._recorder.event_count
            try:
                stored = consumer.committed(partition)
            except SparkBrokerError as error:
                self.errors.append(error)
            else:
                begins = 0 if stored is None else stored.offset
                found = None if stored is None else begins
                self._recorder.offsets_fetched(self._sharing.group, partition, found, began=began)
            self._recorder.positioned(self.life, partition, begins)

    def revoked(self, consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """The listener was told so."""
        lost = False
        offsets = {partition: self._read[partition] for partition in partitions if partition in self._read}
        try:
            self._gave_up_as = consumer.group_metadata()
            self._commit(consumer, partitions)
            self._given_up |= offsets
        except MEMBER_IS_GONE as error:
            self.errors.append(error)
            lost = True
        except SparkBrokerError as error:
            self.errors.append(error)
        self._gave_up(partitions, lost=lost)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """The listener was told so."""
        offsets = {partition: self._read[partition] for partition in partitions if partition in self._read}
        self._gave_up(partitions, lost=True)
        self._commit_late(offsets, self._identity)

    def _commit_late(self, offsets: Mapping[TopicPartition, int], member: GroupMetadata) -> None:
        """It is refused, unless the group does not know yet that these partitions are given up."""
        if not offsets:
            return
        began = self._recorder.event_count
        with closing(
            ClusterMetadata.connect(client_config(ConsumerConfig, self._bootstrap_servers, None, {}))
        ) as found:
            group = GroupOffsets(found, self._sharing.group)
            positions = {partition: OffsetAndMetadata(offset) for partition, offset in offsets.items()}
            try:
                group.commit(positions, Deadline.after_ms(LATE_COMMIT_MS), member=member)
            except SparkBrokerError as error:
                self.errors.append(error)
                return
        self._record_commit(offsets, began)

    def _gave_up(self, partitions: Sequence[TopicPartition], *, lost: bool) -> None:
        """Before anybody else is assigned them, unless they are lost."""
        self._recorder.revoked(self.life, partitions, lost=lost)
        self._owned.difference_update(partitions)
        for partition in partitions:
            self._read.pop(partition, None)

    def _commit(self, consumer: Consumer, partitions: Iterable[TopicPartition]) -> None:
        began = self._recorder.event_count
        offsets = {partition: self._read[partition] for partition in partitions if partition in self._read}
        if not offsets:
            return
        consumer.commit(offsets)
        for partition in offsets:
            self._read.pop(partition)
        self._record_commit(offsets, began)

    def _record_commit(self, offsets: Mapping[TopicPartition, int], began: int) -> None:
        for partition, offset in offsets.items():
            self._recorder.offsets_committed(self._sharing.group, partition, offset, reader=self.life, began=began)


class _Telling(RebalanceListener):
    """Of one consumer."""

    def __init__(self, member: SharingMember, consumer: Consumer) -> None:
        self._member, self._consumer = member, consumer

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._member.assigned(self._consumer, partitions)

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self._member.revoked(self._consumer, partitions)

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._member.lost(partitions)


class LatestObserver(ClientThread):
    """Asks for the latest offsets again and again: for one observer they must never fall (KIP-207)."""

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        partitions: Sequence[TopicPartition],
        *,
        name: str = "observer",
        pause_s: float = 0.5,
    ) -> None:
        super().__init__(name, pause_s)
        self._recorder = recorder
        self._bootstrap_servers = bootstrap_servers
        self._partitions = tuple(partitions)
        self._consumer: Consumer | None = None

    def step(self) -> None:
        if self._consumer is None:
            self._consumer = Consumer(self._bootstrap_servers)
        for partition, offset in self._consumer.end_offsets(self._partitions).items():
            self._recorder.latest_shown(self.name, partition, offset)

    def renew(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
