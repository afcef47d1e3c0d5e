"""Simulated consumers: the production `ConsumerMachine`, with events for its threads and streams to the leaders.

It fetches when it polls. The leader answers at once with the records that it has, instead of a long poll. Some fetches
are those of a reader on the leader's machine, as a DataFrame's task is: it reads the leader's files itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from spark_broker.client.cluster_view import merge
from spark_broker.client.consumer_effects import (
    BreakFetch,
    Effect,
    FollowLeader,
    LeaveLeader,
    LookUpOffsets,
    ReadHistory,
    RefreshMetadata,
)
from spark_broker.client.consumer_machine import ConsumerMachine
from spark_broker.client.fetch_machine import Fetch, FetchedPart
from spark_broker.client.local_files import LocalFiles, UnusableExtentError
from spark_broker.client.membership import Membership
from spark_broker.client.offset_lookup import OffsetLookup
from spark_broker.client.partition_position import PartitionPosition
from spark_broker.client.retry import Backoff
from spark_broker.config import ConsumerConfig
from spark_broker.errors import (
    LogTruncationError,
    NetworkError,
    OffsetOutOfRangeError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.model import TopicPartition
from spark_broker.protocol.messages import (
    FetchRequest,
    FetchResponse,
    MetadataRequest,
    MetadataResponse,
)
from spark_broker.testing.history import Truncated
from spark_broker.testing.simulation.broker import LOG_DIRS
from spark_broker.testing.simulation.fetches import Record, SimFetches, Values
from spark_broker.testing.simulation.filesystem import SimFileSystem
from spark_broker.testing.simulation.lookups import look_up
from spark_broker.testing.simulation.network import Address, End, NetworkNode
from spark_broker.testing.simulation.scheduler import Timer
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.machine import SimulatedMachine
    from spark_broker.testing.simulation.world import World

POLL_MS = 90.0
FETCH_TIMEOUT_MS = 800
CALL_TIMEOUT_MS = 500

CONFIG = ConsumerConfig(
    auto_offset_reset="earliest",
    fetch_max_wait_ms=0,
    fetch_max_bytes=1 << 20,
    max_partition_fetch_bytes=1 << 20,
    retry_backoff_ms=40,
    retry_backoff_max_ms=400,
    metadata_max_age_ms=1350,
)

Key = tuple[str, int]

RECORDS_AT_ONCE = 5

LOCAL_EVERY = 2
"""Every so many fetches, the reader is on the leader's machine."""


class _LocalReads:
    """A process on each broker's machine, which reads a leader's files there. It meets no fault but their damage."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._processes: dict[Address, tuple[SimFileSystem, LocalFiles]] = {}

    def from_here(self, address: Address, request: FetchRequest) -> FetchRequest:
        """The request, from a reader on the machine with this address."""
        return msgspec.structs.replace(request, boot_id=self._machine(address).fs.boot_id())

    def completed(self, address: Address, part: FetchedPart) -> FetchedPart:
        """An answer with the batches that are in files. Raises UnusableExtentError."""
        if not part.response.extents:
            return part
        fs, files = self._processes.get(address) or (None, None)
        if fs is None or files is None or not fs.alive:  # It died with its machine.
            fs = self._machine(address).fs.another_process()
            files = LocalFiles(str(LOG_DIRS), fs)
            self._processes[address] = fs, files
        self._world.trace.count("answers read from leaders' files")
        with fs.undisturbed():
            return replace(part, local=files.frames(part.payload, part.response.extents))

    def _machine(self, address: Address) -> SimulatedMachine:
        return next(machine for machine in self._world.machines if machine.address == address)


@dataclass(slots=True, eq=False)
class _Stream:
    address: Address
    end: End
    timer: Timer
    fetch: Fetch | None = None


class SimConsumer(NetworkNode):
    """Subscribed to every topic there is; reads each partition from its start on."""

    def __init__(
        self, world: World, name: str, config: ConsumerConfig = CONFIG, membership: Membership | None = None
    ) -> None:
        super().__init__(name, name)
        self.world = world
        config = replace(config, fetch_max_wait_ms=world.swarm.reader_wait_ms)
        backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms, rng=world.client_rng)
        self.machine = ConsumerMachine(
            config, None, backoff, fetches=SimFetches(world, name, config, backoff), membership=membership
        )
        self._config = config
        self._topics: set[str] = set()  # the topics that it knows of
        self._addresses: dict[int, Address] = {}
        self._streams: dict[int, _Stream] = {}
        self._local_reads = _LocalReads(world)
        self._polls = 0
        self.bootstrap: SimulatedMachine | None = None  # the one to ask for metadata first; None: any

    keeps_its_place = True
    """Whether it reads on where it was, for as long as it lives."""

    def start(self) -> None:
        """Learn of the cluster, then poll."""
        self.machine.subscribe([self.world.first_topic])
        self.advance()
        self._poll_later()

    @property
    def now_ms(self) -> float:
        return self.world.scheduler.now_us / 1000

    def position(self, key: Key) -> int:
        """Offset of the next record to be handed out; -1: not known yet."""
        position = self.position_of(key)
        return -1 if position is None else position.position

    def position_of(self, key: Key) -> PartitionPosition | None:
        """What the consumer knows of a partition."""
        return next((p for p in self.machine.partitions.values() if self.key(p) == key), None)

    def key(self, position: PartitionPosition) -> Key:
        return position.topic_id, position.tp.partition

    def kept_position(self, key: Key) -> int:
        """The position that outlives a restart of this consumer."""
        return self.position(key)

    @property
    def unnotified(self) -> PartitionPosition | None:
        """A partition whose truncation the next poll will raise."""
        read = self.machine.partitions
        waiting = (p for p in self.machine.leaders.truncated if read.get(p.tp) is p and p.truncation is not None)
        return next(waiting, None)

    def noticed(self) -> None:
        """There is an `unnotified` partition."""

    def handed_out(self) -> None:
        """A position has moved."""

    def advance(self) -> None:
        """Carry out what the machine wants now. What is due later begins with a later poll, which is soon enough."""
        for effect in self.machine.step(self.now_ms):
            self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        """One effect of the machine."""
        match effect:
            case FollowLeader(broker_id, address):
                self._addresses[broker_id] = address
            case LeaveLeader(broker_id):
                del self._addresses[broker_id]
                self._drop_stream(broker_id)
            case BreakFetch(broker_id):
                self._drop_stream(broker_id)
            case RefreshMetadata():
                self._refresh()
            case LookUpOffsets():
                self._look_up(effect)
            case ReadHistory() if self.world.tiering is not None:
                self.world.tiering.read_history(self, effect)
            case _:
                raise ViolationError("consumers have no groups", f"{self}: {effect}")

    def _refresh(self) -> None:
        machine, self.bootstrap = self.bootstrap or self.world.client_rng.choice(self.world.machines), None
        self.world.network.call(
            self,
            machine.host,
            machine.address,
            MetadataRequest(),
            timeout_ms=CALL_TIMEOUT_MS,
            on_answer=self._metadata_came,
            on_error=self.round_failed,
        )

    def _metadata_came(self, answer: object) -> None:
        view = merge(self.machine.view, cast("MetadataResponse", answer), None)
        self._topics |= {partition.topic for _, partition in self.world.known_partitions(view)}
        if self._topics and self._topics != self.machine.topics:
            self.subscribe_again()
        self.machine.metadata_came(view, self.now_ms)
        self.refreshed()

    def subscribe_again(self) -> None:
        """There are other topics than those that are read."""
        self.machine.subscribe(self._topics)

    def refreshed(self) -> None:
        """New metadata is there."""
        self.advance()

    def round_failed(self, error: SparkBrokerError) -> None:
        self.machine.round_failed(error, self.now_ms)
        self.advance()

    def _look_up(self, asked: LookUpOffsets) -> None:
        lookup = OffsetLookup(asked.moments, read_committed=self._config.read_committed)
        done = partial(self._offsets_came, asked, lookup)
        look_up(self.world.network, self, lookup, self.machine.view, done, CALL_TIMEOUT_MS)

    def _offsets_came(self, asked: LookUpOffsets, lookup: OffsetLookup) -> None:
        self.machine.offsets_came(asked, lookup.found, lookup.failures, self.now_ms)
        self.positioned(asked.generations)
        if self.world.tiering is not None and self.keeps_its_place:
            for tp in asked.generations:
                position = self.machine.partitions.get(tp)
                if position is not None and position.has_position and position.generation == asked.generations[tp] + 1:
                    self.world.tiering.check_begin(self, tp, position.position)
        self.advance()

    def positioned(self, generations: Mapping[TopicPartition, int]) -> None:
        """Record those of these positions that were found, and are still read."""
        for tp, generation in generations.items():
            position = self.machine.partitions.get(tp)
            if position is not None and position.generation == generation + 1 and position.has_position:
                self.world.history.positioned(self.name, tp, position.position)

    def _poll_later(self) -> None:
        self.world.scheduler.after(POLL_MS * (0.5 + self.world.client_rng.random()), self, "poll", self._poll)

    def _poll(self) -> None:
        truncated = self.unnotified
        self._polls += 1
        try:
            moved = self._take_records() if self._polls % 3 == 0 else self._take_batches()
        except LogTruncationError as error:
            if truncated is None:
                raise
            self._notified(truncated, error)  # it goes on with the next poll
        except SparkBrokerError as error:
            if not error.retriable:
                raise
        else:
            if moved:
                self.handed_out()
            self._fetch()
        self.advance()
        self._poll_later()

    def _take_batches(self) -> bool:
        batches, moved = self.machine.poll()
        if not moved:
            self.machine.raise_error()
        for batch in cast("list[Values]", batches):
            self._polled(batch.tp, batch.base_offset, batch.values)
        return moved

    def _polled(self, tp: TopicPartition, base_offset: int, values: tuple[bytes, ...]) -> None:
        self.world.history.polled(self.name, tp, base_offset, values)
        if self.world.tiering is not None:
            self.world.tiering.has_read(self, tp, base_offset + len(values))

    def _take_records(self) -> bool:
        """Take a few records, one at a time. The position may then lie inside a batch until the next poll."""
        moved = False
        for _ in range(RECORDS_AT_ONCE):
            record, has_room = cast("tuple[Record | None, bool]", self.machine.next_record())
            if record is not None:
                self._polled(record.tp, record.offset, (record.value,))
            elif not has_room:
                break
            moved = True
        if not moved:
            self.machine.raise_error()
        return moved

    def _notified(self, position: PartitionPosition, error: LogTruncationError) -> None:
        self.world.unclean.told_of_a_cut(self.key(position), self.name, error)
        self.world.history.add(Truncated(self.name, position.tp, error.divergent_offset))
        self.handed_out()

    def _fetch(self) -> None:
        for broker_id, address in self._addresses.items():
            fetch = self.machine.leaders.next_fetch(broker_id, self.now_ms)
            if fetch is not None:
                stream = self._streams.get(broker_id) or self._open(broker_id, address)
                stream.fetch = fetch
                stream.timer.set(fetch.request.max_wait_ms + FETCH_TIMEOUT_MS)
                is_local = fetch.request.correlation_id % LOCAL_EVERY == 0
                stream.end.send(self._local_reads.from_here(address, fetch.request) if is_local else fetch.request)

    def _open(self, broker_id: int, address: Address) -> _Stream:
        end = self.world.network.open(self, address[0], address, "fetch")
        late = RequestTimedOutError("the fetch was not answered in time")
        timer = Timer(self.world.scheduler, self, "fetch timed out", lambda: self._broke(broker_id, stream, late))
        stream = self._streams[broker_id] = _Stream(address, end, timer)
        end.on_message = lambda message: self._received(broker_id, stream, message)
        end.on_break = lambda error: self._broke(broker_id, stream, error)
        return stream

    def _received(self, broker_id: int, stream: _Stream, message: object) -> None:
        fetch = stream.fetch
        if isinstance(message, SparkBrokerError):
            self._broke(broker_id, stream, message)
        elif fetch is not None:
            response, payload = cast("tuple[FetchResponse, bytes]", message)
            stream.fetch = None
            stream.timer.cancel()
            self._check_range(fetch, response)
            machine = self.machine.leaders.machine
            try:
                parts = machine.parts(fetch, response, memoryview(payload))
                completed = [self._local_reads.completed(stream.address, part) for part in parts]
            except UnusableExtentError as error:
                self.world.trace.count("files of leaders that were unusable")
                stream.fetch = fetch
                self._broke(broker_id, stream, NetworkError(str(error)))
                return
            answers = [machine.answer(part) for part in completed]
            self.machine.leaders.fetched(broker_id, fetch, answers, self.now_ms)
            if self.unnotified is not None:
                self.noticed()
            self.advance()

    def _check_range(self, fetch: Fetch, response: FetchResponse) -> None:
        """Only deleted records, or an unclean election, are a reason to be out of range."""
        for answer in response.partitions:
            key = (answer.topic_id, answer.partition)
            position = self.position_of(key)
            if position is None or answer.error_code != OffsetOutOfRangeError.code or position.buffer:
                continue
            target = fetch.targets[key]
            if (target.generation, target.offset) == (position.generation, position.fetch_offset):
                self.world.check_out_of_range(key, position.position, answer.error_message)

    def _broke(self, broker_id: int, stream: _Stream, error: SparkBrokerError) -> None:
        if self._streams.get(broker_id) is stream:
            self._drop_stream(broker_id)
            if stream.fetch is not None:
                self.machine.leaders.fetch_failed(broker_id, stream.fetch, error, self.now_ms)
            self.advance()

    def _drop_stream(self, broker_id: int) -> None:
        stream = self._streams.pop(broker_id, None)
        if stream is not None:
            stream.timer.cancel()
            stream.end.close()
