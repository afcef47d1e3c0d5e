"""The fetches of a consumer: what it asks each leader next, and how the answers change the positions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from spark_broker.client.cluster_view import ClusterView, TopicView, address_of
from spark_broker.client.consumer_effects import BreakFetch, Effect, FollowLeader, LeaveLeader
from spark_broker.client.fetch_machine import Fetch, FetchAnswer, FetchMachine, FetchTarget, Meaning, meaning_of
from spark_broker.client.partition_position import PartitionPosition, Start
from spark_broker.client.settings import Address
from spark_broker.config import ConsumerConfig
from spark_broker.errors import NetworkError, OffsetOutOfRangeError, SparkBrokerError
from spark_broker.model import NO_EPOCH, TopicPartition

FULL_WAIT_MS = 20
"""Longest wait of a fetch that leaves out a partition because its buffer is full. Otherwise it would starve once its
buffer is empty.
"""

IDLE_WAIT_MAX_MS = 5000
"""Longest wait of a fetch when nothing has come for long. Each request costs both sides. News ends a wait at once."""


@dataclass(slots=True)
class _Leader:
    """A broker that leads partitions of the assignment. `wait_ms`: how long the next long poll waits.

    `broken`: the last fetch was broken off, so that the next one is short, and is let end.
    """

    address: Address
    wait_ms: int
    in_flight: Fetch | None = None
    broken: bool = False


class LeaderFetches:
    """All leaders of a consumer's partitions.

    `refresh_wanted`: an answer says that metadata is out of date. `effects`: what the next step returns.
    """

    def __init__(
        self, config: ConsumerConfig, fetch_machine: FetchMachine, partitions: dict[TopicPartition, PartitionPosition]
    ) -> None:
        self.machine = fetch_machine
        self.view = ClusterView()
        self.refresh_wanted = False
        self.effects: list[Effect] = []
        self.truncated: deque[PartitionPosition] = deque()
        """Whose log was truncated below what was read: `poll` has not raised it yet."""

        self._config = config
        self._partitions = partitions
        self._reset = Start(config.auto_offset_reset)
        self._leaders: dict[int, _Leader] = {}
        self._turns = 0
        self._closed = False

    @property
    def due_ms(self) -> float:
        """When the first fetch under way is answered, if its leader is well. Infinity: no fetch is under way."""
        in_flight = (leader.in_flight for leader in self._leaders.values())
        return min((fetch.due_ms for fetch in in_flight if fetch is not None), default=float("inf"))

    def learned(self, view: ClusterView) -> None:
        """Fetch from every live leader. A frozen leader that was fenced is left before its time-out.

        After `leave_all`, nothing is fetched: the metadata was asked for before.
        """
        before, self.view = self.view, view
        if self._closed:
            return
        addresses: dict[int, Address] = {}
        for tp in self._partitions:
            leader = self.view.leader(tp.topic, tp.partition)
            if leader is not None:
                addresses[leader[0].id] = address_of(leader[0])
        for broker_id, leader_left in list(self._leaders.items()):
            if addresses.get(broker_id) != leader_left.address:
                self._leave(broker_id)
        for broker_id, address in addresses.items():
            if broker_id not in self._leaders:
                self._leaders[broker_id] = _Leader(address, self._config.fetch_max_wait_ms)
                self.effects.append(FollowLeader(broker_id, address))
        for tp in self._partitions:
            if _leader_of(view, tp) != _leader_of(before, tp):
                self.break_fetch(tp)  # the new leader's long poll does not ask for it

    def _leave(self, broker_id: int) -> None:
        del self._leaders[broker_id]
        self.effects.append(LeaveLeader(broker_id))

    def leave_all(self) -> None:
        """Nothing is fetched any more."""
        self._closed = True
        for broker_id in list(self._leaders):
            self._leave(broker_id)

    def break_fetch(self, tp: TopicPartition) -> None:
        """A position has changed, so the long poll under way asks for the wrong offset.

        A caller may move one at each turn of its loop: of two fetches in a row, one is let end. Otherwise no answer
        would ever come, for any partition of this leader.
        """
        leader = self.view.leader(tp.topic, tp.partition)
        following = self._leaders.get(leader[0].id) if leader is not None else None
        if leader is None or following is None or following.in_flight is None or following.broken:
            return
        following.in_flight, following.broken = None, True
        self.effects.append(BreakFetch(leader[0].id))

    def next_fetch(self, broker_id: int, now_ms: float) -> Fetch | None:
        """The next request for this leader. None: there is nothing to ask, or a fetch is under way."""
        leader = self._leaders.get(broker_id)
        if leader is None or leader.in_flight is not None:
            return None
        targets, left_out = self._fetchable(broker_id, now_ms)
        if targets:
            wait_ms = min(FULL_WAIT_MS, leader.wait_ms) if left_out or leader.broken else leader.wait_ms
            leader.in_flight = self.machine.request(targets, max_wait_ms=wait_ms, now_ms=now_ms)
        return leader.in_flight

    def awaits(self, broker_id: int, fetch: Fetch) -> bool:
        """Whether this fetch is under way, and what it asks for is up to date."""
        leader = self._leaders.get(broker_id)
        return leader is not None and leader.in_flight is fetch

    def _fetchable(self, broker_id: int, now_ms: float) -> tuple[list[FetchTarget], bool]:
        """The partitions to ask of this broker, least recently served first: a leader answers in this order, as far as
        there is room. Also: whether one is left out that may have records.

        All topics of one request have the same columns: those of the partition that was asked longest ago.
        """
        view = self.view
        room = self._config.fetch_max_bytes - sum(p.buffered_bytes for p in self._partitions.values())
        wanted: list[tuple[PartitionPosition, TopicView, int]] = []
        left_out = False
        for position in sorted(self._partitions.values(), key=attrgetter("served")):
            tp = position.tp
            leader, topic = view.leader(tp.topic, tp.partition), view.topic(tp.topic)
            if leader is None or topic is None or leader[0].id != broker_id or topic.topic_id != position.topic_id:
                continue
            leader_epoch = leader[1].leader_epoch
            if not position.may_fetch(leader_epoch, now_ms):
                continue
            buffered = position.buffered_bytes
            if buffered and (room <= 0 or buffered >= self._config.max_partition_fetch_bytes):
                left_out = left_out or position.fetch_offset < position.high_watermark
                continue
            wanted.append((position, topic, leader_epoch))
        if not wanted:
            return [], left_out
        columns = self.machine.columns_of(min(wanted, key=lambda each: each[0].asked)[1])
        same = [each for each in wanted if self.machine.columns_of(each[1]) == columns]
        self._turns += 1
        return [self._target(*each) for each in same], left_out or len(same) < len(wanted)

    def _target(self, position: PartitionPosition, topic: TopicView, leader_epoch: int) -> FetchTarget:
        position.asked = self._turns
        return FetchTarget(
            topic,
            position.tp.partition,
            leader_epoch,
            position.fetch_offset,
            position.fetched_epoch,
            generation=position.generation,
        )

    def fetched(self, broker_id: int, fetch: Fetch, answers: Iterable[FetchAnswer], now_ms: float) -> bool:
        """The leader has answered. Returns whether that is news for a thread that waits."""
        leader = self._leaders.get(broker_id)
        if leader is not None and leader.in_flight is fetch:
            leader.in_flight, leader.broken = None, False
        self._turns += 1
        news = has_records = False
        for answer in answers:
            news = news or bool(answer.fetched or answer.error)
            if answer.response.length > 0:
                has_records = True
                self._note_served(answer.target)
            position = self._asking(answer.target)
            if position is not None:
                self._take(position, answer, now_ms)
        if leader is not None:
            leader.wait_ms = self._paced(leader.wait_ms, found=has_records)
        return news

    def fetch_failed(self, broker_id: int, fetch: Fetch, error: SparkBrokerError, now_ms: float) -> bool:
        """The exchange failed. Returns False when the consumer itself broke it off."""
        if not self.awaits(broker_id, fetch):
            return False
        leader = self._leaders[broker_id]
        leader.in_flight, leader.broken = None, False
        failure = error if error.retriable else NetworkError(f"{leader.address}: {error}")
        for target in fetch.targets.values():
            position = self._asking(target)
            if position is not None:
                self._failed(position, failure, now_ms)
        return True

    def _note_served(self, target: FetchTarget) -> None:
        """What was asked and had no room in the answer comes first next time. A caller may have moved the position."""
        position = self._partitions.get(TopicPartition(target.topic.name, target.partition))
        if position is not None:
            position.served = self._turns

    def _asking(self, target: FetchTarget) -> PartitionPosition | None:
        """The position, unless the caller has moved it meanwhile."""
        position = self._partitions.get(TopicPartition(target.topic.name, target.partition))
        if position is None or (position.generation, position.fetch_offset) != (target.generation, target.offset):
            return None
        return position

    def _paced(self, wait_ms: int, *, found: bool) -> int:
        """Wait longer while nothing comes. But if a fetch waits for more than one byte, records would wait with it."""
        longest_ms = self._config.fetch_max_wait_ms
        if found or self._config.fetch_min_bytes > 1:
            return longest_ms
        return max(longest_ms, min(2 * wait_ms, IDLE_WAIT_MAX_MS))

    def _take(self, position: PartitionPosition, answer: FetchAnswer, now_ms: float) -> None:
        if answer.error is None:
            position.high_watermark = answer.response.high_watermark
            position.add(answer.fetched)
        elif meaning_of(answer.error) is not Meaning.TRUNCATED:
            self._failed(position, answer.error, now_ms, answer.response.log_start_offset)
        elif position.buffer:
            # What was fetched before is handed out first. It was committed when it was read.
            self.back_off(position, now_ms)
        else:
            position.truncated(answer.diverging)
            self.truncated.append(position)

    def _failed(self, position: PartitionPosition, error: SparkBrokerError, now_ms: float, log_start: int = -1) -> None:
        """`log_start`: where the partition's log begins; -1: not known."""
        match meaning_of(error):
            case Meaning.OUT_OF_RANGE:
                self._out_of_range(position, error, now_ms)
            case Meaning.TIERED:
                self._turn_to_history(position, log_start, now_ms)
            case Meaning.RETRY:
                self.back_off(position, now_ms)
                self.refresh_wanted = self.refresh_wanted or error.refresh_metadata
            case _:
                position.error = error

    def back_off(self, position: PartitionPosition, now_ms: float) -> None:
        """The partition is fetched again later."""
        partition = self.view.partition(position.tp.topic, position.tp.partition)
        leader_epoch = NO_EPOCH if partition is None else partition.leader_epoch
        self.machine.back_off(position.retry, leader_epoch, now_ms)

    def _out_of_range(self, position: PartitionPosition, error: SparkBrokerError, now_ms: float) -> None:
        if position.buffer:
            # What was fetched before is in range. The position is judged when that is used up.
            self.back_off(position, now_ms)
        elif self._reset is Start.NONE:
            position.error = OffsetOutOfRangeError(f"{position.tp}: offset {position.fetch_offset}: {error.message}")
        else:
            self.refresh_wanted = True  # A deletion may be newer than what the view shows of the topic's history.
            position.find_start(self._reset)

    def _turn_to_history(self, position: PartitionPosition, log_start: int, now_ms: float) -> None:
        """Read the topic's table, once metadata shows that it has the offset."""
        topic = self.view.topic(position.tp.topic)
        start, end = (0, 0) if topic is None else topic.from_table(position.tp.partition, log_start)
        if start <= position.fetch_offset < end:
            position.history_end = end
        else:
            self.refresh_wanted = True
            self.back_off(position, now_ms)


def _leader_of(view: ClusterView, tp: TopicPartition) -> int | None:
    leader = view.leader(tp.topic, tp.partition)
    return leader[0].id if leader is not None else None
