"""Simulated consumers: fetches over streams to the leaders, and the production `PartitionState` for what came of them.

What is fetched waits for the next poll, as in production: positions move when it is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from spark_broker.client.assignment import PartitionState, Prefetched, Start
from spark_broker.core.divergence import Diverging
from spark_broker.errors import LogTruncationError, OffsetOutOfRangeError, SparkBrokerError
from spark_broker.model import NO_EPOCH, ConsumedBatch
from spark_broker.protocol.frame import decode_frames
from spark_broker.protocol.messages import FetchedPartition, FetchPartition, FetchRequest, FetchResponse
from spark_broker.testing.history import Truncated
from spark_broker.testing.simulation.batches import decoded
from spark_broker.testing.simulation.client import Client
from spark_broker.testing.simulation.network import Address, End
from spark_broker.testing.simulation.scheduler import Timer

if TYPE_CHECKING:
    from spark_broker.testing.simulation.world import World

POLL_MS = 90.0
TIMEOUT_MS = 800
MAX_BYTES = 1 << 20
METADATA_AGE_POLLS = 15

Key = tuple[str, int]


class _Values(NamedTuple):
    """Stands in for a `ConsumedBatch`: decoding every batch into Arrow would take a tenth of a schedule."""

    base_offset: int
    values: tuple[bytes, ...]


class _Asked(NamedTuple):
    """What a fetch asked of a partition: an answer is taken only for the same generation and offset."""

    generation: int
    offset: int


@dataclass(slots=True, eq=False)
class _Stream:
    address: Address
    end: End
    timer: Timer
    asked: dict[Key, _Asked] = field(default_factory=dict)
    busy: bool = False


class SimConsumer(Client):
    """Assigned every partition there is; reads each from offset 0 on."""

    read_committed = True

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.states: dict[Key, PartitionState] = {}
        self._streams: dict[int, _Stream] = {}
        self._requests = 0
        self._polls = 0

    def start(self) -> None:
        """Learn of the cluster, then poll."""
        self.want_metadata()
        self._poll_later()

    def position(self, key: Key) -> int:
        """Offset of the next record to be handed out; -1: not known yet."""
        state = self.states.get(key)
        return -1 if state is None else state.position

    def kept_position(self, key: Key) -> int:
        """The position that outlives a restart of this consumer."""
        return self.position(key)

    # ---- for consumers of another kind -------------------------------------------------------------------------

    def begin(self, key: Key, state: PartitionState) -> None:
        """The partition was assigned: give it a position, now or later."""
        del key
        self.move(state, 0)

    def handed_out(self, key: Key) -> None:
        """The position of this partition has moved."""

    def move(self, state: PartitionState, offset: int, leader_epoch: int = NO_EPOCH) -> None:
        """Read on from there. `leader_epoch`: of the record before it, where that is known."""
        state.move_to(offset, leader_epoch)
        self.world.history.positioned(self.name, state.tp, offset)

    # ---- polls -------------------------------------------------------------------------------------------------

    def _poll_later(self) -> None:
        self.world.scheduler.after(POLL_MS * (0.5 + self.world.client_rng.random()), self, "poll", self._poll)

    def refreshed(self) -> bool:
        for topic_id, tp in self.world.known_partitions(self.image):
            key = (topic_id, tp.partition)
            if key not in self.states:
                state = self.states[key] = PartitionState(tp, Start.EARLIEST, Start.EARLIEST, topic_id)
                self.begin(key, state)
        return not self.states

    def _poll(self) -> None:
        self._polls += 1
        if self._polls % METADATA_AGE_POLLS == 0:
            self.want_metadata()  # there may be new partitions
        for key, state in self.states.items():
            if state.buffer:
                self._hand_out(key, state)
        self._fetch_all()
        self._poll_later()

    def _hand_out(self, key: Key, state: PartitionState) -> None:
        position = state.position
        for batch in cast("list[_Values]", state.take()):
            skipped = max(0, position - batch.base_offset)  # a batch may begin before the position
            if skipped < len(batch.values):
                position = batch.base_offset + len(batch.values)
                base_offset = batch.base_offset + skipped
                self.world.history.polled(self.name, state.tp, base_offset, batch.values[skipped:])
        self.handed_out(key)

    # ---- fetches -----------------------------------------------------------------------------------------------

    def _fetch_all(self) -> None:
        wanted: dict[int, list[FetchPartition]] = {}
        addresses: dict[int, Address] = {}
        now_s = self.world.scheduler.now_us / 1e6
        for key, state in self.states.items():
            found = self.leader(*key)
            if found is None or found[1] < state.last_epoch:
                self.want_metadata()
            if found is None or not state.may_fetch(found[1], now_s):
                continue
            broker_id, leader_epoch, addresses[broker_id] = found
            wanted.setdefault(broker_id, []).append(
                FetchPartition(*key, leader_epoch, state.fetch_offset, MAX_BYTES, state.fetched_epoch)
            )
        for broker_id, partitions in wanted.items():
            self._fetch(broker_id, addresses[broker_id], partitions)

    def _fetch(self, broker_id: int, address: Address, partitions: list[FetchPartition]) -> None:
        stream = self._streams.get(broker_id)
        if stream is None:
            end = self.world.network.open(self, address[0], address, "fetch")
            timer = Timer(self.world.scheduler, self, "fetch timed out", lambda: self._timed_out(broker_id, opened))
            stream = opened = self._streams[broker_id] = _Stream(address, end, timer)
            end.on_message = lambda message: self._received(broker_id, opened, message)
            end.on_break = lambda _: self._broke(broker_id, opened)
        if not stream.busy:
            stream.busy = True
            keys = [(one.topic_id, one.partition) for one in partitions]
            stream.asked = {key: _Asked(self.states[key].generation, self.states[key].fetch_offset) for key in keys}
            self._requests += 1
            request = FetchRequest(self._requests, 0, 1, MAX_BYTES, partitions, read_committed=self.read_committed)
            stream.end.send(request)
            stream.timer.set(TIMEOUT_MS)

    def _received(self, broker_id: int, stream: _Stream, message: object) -> None:
        if isinstance(message, SparkBrokerError):
            stream.end.close()
            self._broke(broker_id, stream)
            return
        response, payload = cast("tuple[FetchResponse, bytes]", message)
        stream.busy = False
        stream.timer.cancel()
        at = 0
        for answer in response.partitions:
            key = (answer.topic_id, answer.partition)
            state = self.states[key]
            if stream.asked.get(key) == (state.generation, state.fetch_offset):
                self._take(key, state, answer, memoryview(payload)[at : at + answer.length])
            at += answer.length

    def _take(self, key: Key, state: PartitionState, answer: FetchedPartition, payload: memoryview) -> None:
        match answer.error_code:
            case 0:
                state.add(self._fetched(key, state.fetch_offset, answer, payload))
            case OffsetOutOfRangeError.code if not state.buffer:  # what was fetched before is in range
                self.move(state, self.world.reset_offset(key, state.position, answer.error_message))
            case LogTruncationError.code if not state.buffer:
                self._truncated(key, state, Diverging(answer.diverging_epoch, answer.diverging_end_offset))
            case _:
                self.want_metadata()

    def _fetched(self, key: Key, offset: int, answer: FetchedPartition, payload: memoryview) -> Iterator[Prefetched]:
        """As `client.fetch_decoder` makes them."""
        transactional = self.world.transactional
        for header, data in decode_frames(payload):
            if transactional is not None and self.read_committed:
                transactional.rules.handed_out(self.name, key, header)
            decode = cast("Callable[[], ConsumedBatch]", partial(_Values, header.base_offset, decoded(data)))
            yield Prefetched(decode, header.next_offset, header.leader_epoch, header.length)
            offset = header.next_offset
        if answer.next_offset > offset:
            yield Prefetched(None, answer.next_offset, answer.next_epoch, 0)

    def _truncated(self, key: Key, state: PartitionState, diverging: Diverging) -> None:
        """Told of it at the next poll, as `Consumer.poll` does: it goes on where the log parts."""
        error = state.truncated(diverging)
        state.truncation = None
        self.world.unclean.told_of_a_cut(key, self.name, error)
        self.world.history.add(Truncated(self.name, state.tp, error.divergent_offset))
        self.handed_out(key)

    def _broke(self, broker_id: int, stream: _Stream) -> None:
        if self._streams.get(broker_id) is stream:
            del self._streams[broker_id]
            self.want_metadata()

    def _timed_out(self, broker_id: int, stream: _Stream) -> None:
        stream.end.close()
        self._broke(broker_id, stream)
