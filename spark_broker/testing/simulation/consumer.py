"""Simulated consumers: fetches of committed records over streams to the leaders, in order, from offset 0 on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from spark_broker.errors import OffsetOutOfRangeError, SparkBrokerError
from spark_broker.model import TopicPartition
from spark_broker.protocol.frame import decode_frames
from spark_broker.protocol.messages import FetchedPartition, FetchPartition, FetchRequest, FetchResponse
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


@dataclass(slots=True, eq=False)
class _Stream:
    address: Address
    end: End
    timer: Timer
    busy: bool = False


class SimConsumer(Client):
    """Assigned every partition there is. `positions`: the next offset of each."""

    read_committed = True

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.positions: dict[Key, int] = {}
        self._names: dict[Key, TopicPartition] = {}
        self._streams: dict[int, _Stream] = {}
        self._requests = 0
        self._polls = 0

    def start(self) -> None:
        """Learn of the cluster, then poll."""
        self.want_metadata()
        self._poll_later()

    def _poll_later(self) -> None:
        self.world.scheduler.after(POLL_MS * (0.5 + self.world.client_rng.random()), self, "poll", self._poll)

    def refreshed(self) -> bool:
        for topic_id, tp in self.world.known_partitions(self.image):
            key = (topic_id, tp.partition)
            if key not in self.positions:
                self._names[key] = tp
                self._position(key, 0)
        return not self.positions

    def _position(self, key: Key, offset: int) -> None:
        self.positions[key] = offset
        self.world.history.positioned(self.name, self._names[key], offset)

    def _poll(self) -> None:
        self._polls += 1
        if self._polls % METADATA_AGE_POLLS == 0:
            self.want_metadata()  # there may be new partitions
        wanted: dict[int, list[FetchPartition]] = {}
        addresses: dict[int, Address] = {}
        for key, offset in self.positions.items():
            found = self.leader(*key)
            if found is None:
                self.want_metadata()
                continue
            broker_id, leader_epoch, addresses[broker_id] = found
            wanted.setdefault(broker_id, []).append(FetchPartition(*key, leader_epoch, offset, MAX_BYTES))
        for broker_id, partitions in wanted.items():
            self._fetch(broker_id, addresses[broker_id], partitions)
        self._poll_later()

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
            self._take(answer, memoryview(payload)[at : at + answer.length])
            at += answer.length

    def _take(self, answer: FetchedPartition, payload: memoryview) -> None:
        key = (answer.topic_id, answer.partition)
        if answer.error_code == OffsetOutOfRangeError.code:
            self._position(key, self.world.reset_offset(key, self.positions[key], answer.error_message))
        elif answer.error_code:
            self.want_metadata()
        else:
            transactional = self.world.transactional
            for header, data in decode_frames(payload):
                if transactional is not None and self.read_committed:
                    transactional.rules.handed_out(self.name, key, header)
                self._hand_out(key, header.base_offset, decoded(data))
            self.positions[key] = max(self.positions[key], answer.next_offset)

    def _hand_out(self, key: Key, base_offset: int, values: tuple[bytes, ...]) -> None:
        skipped = max(0, self.positions[key] - base_offset)  # a batch may begin before the position
        if skipped < len(values):
            self.world.history.polled(self.name, self._names[key], base_offset + skipped, values[skipped:])
            self.positions[key] = base_offset + len(values)

    def _broke(self, broker_id: int, stream: _Stream) -> None:
        if self._streams.get(broker_id) is stream:
            del self._streams[broker_id]
            self.want_metadata()

    def _timed_out(self, broker_id: int, stream: _Stream) -> None:
        stream.end.close()
        self._broke(broker_id, stream)
