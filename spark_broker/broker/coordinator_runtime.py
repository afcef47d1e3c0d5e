"""What coordinators have in common: the shards of an internal topic, one for each partition that this broker leads.

A shard is loaded when the broker begins to lead. It is unloaded when the leadership ends, or when nobody knows what
became of an append: the next one replays the log. Nothing here waits or starts a thread, so that simulated brokers run
the same class. When something happens elsewhere (an append is committed, another broker answers), a thread notes it as
an event, and wakes the owner to call `pump`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Generic, TypeVar

from spark_broker.broker.append import Append
from spark_broker.broker.clock import Clock
from spark_broker.broker.internal_records import Row, encode_rows
from spark_broker.broker.partition import Partition
from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.state_lock import StateLock
from spark_broker.controller.image import TopicState
from spark_broker.core.batch import NO_PRODUCER
from spark_broker.core.replica import ACKS_ALL
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    SparkBrokerError,
)
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.murmur2 import group_partition

logger = logging.getLogger(__name__)

READ_BYTES = 4_194_304

AGAIN_MS = 5000
"""A shard whose log cannot be read is tried again after this time."""

REFUSED_AGAIN_MS = 1000
"""A shard whose append was refused is loaded again after this time: its log may be long, and is read as a whole."""

FOR_EVER_MS = 2**62
"""An append has no deadline: it is committed, or the leadership ends."""

S = TypeVar("S")


class Led(Generic[S]):
    """A partition that this broker leads, and its shard, in one leadership.

    `appended`: how many appends there were; `committed`: how many of them, the first ones, are committed. `read_to`:
    the log was read up to this offset. Invariant: until it is unloaded, only the shard appends rows.
    """

    def __init__(self, number: int, partition: Partition, leader_epoch: int, shard: S) -> None:
        self.number = number
        self.partition = partition
        self.leader_epoch = leader_epoch
        self.shard = shard
        self.appended = 0
        self.committed = 0
        self.read_to = 0

    def is_current(self, partition: Partition) -> bool:
        """Whether the leadership that it was loaded for goes on."""
        return partition is self.partition and partition.leader_epoch() == self.leader_epoch

    def check_leadership(self) -> None:
        """Call this before an answer that needs no append. Raises NotLeaderOrFollowerError when the lease has ended."""
        self.partition.reader.offsets(self.leader_epoch)

    def check_takes(self) -> None:
        """Call this before a decision that is to be appended. Raises what refuses every append now, but for a disk."""
        check_takes(self.partition, self.leader_epoch)


def check_takes(partition: Partition, leader_epoch: int) -> None:
    """Raises what refuses every append to the partition now, but for a disk."""
    with partition.lock:
        partition.check_lease(writing=True)
        partition.replica.prepare_append(leader_epoch, ACKS_ALL, NO_PRODUCER, -1, -1)


class CoordinatorRuntime(ABC, Generic[S]):
    """`note`, `pump` and `tick` are safe from any thread.

    Replies run outside of the lock. The locks of this broker's partitions are taken under it, never the other way
    round: callbacks of a partition only note an event.
    """

    topic_name: ClassVar[str]

    def __init__(self, manager: ReplicaManager, *, wake: Callable[[], None], clock: Clock) -> None:
        self._manager = manager
        self._wake = wake
        self._clock = clock
        self._lock = StateLock()
        self._events: deque[Callable[[], None]] = deque()
        self._outbox: deque[Callable[[], None]] = deque()
        self._shards: dict[int, Led[S]] = {}  # by partition of the topic
        self._again_ms: dict[int, float] = {}  # when one that could not be read is read again

    # What a kind of coordinator adds. All of it runs under the lock.

    @abstractmethod
    def _new_shard(self, partition: Partition) -> S:
        """A shard that has seen nothing."""

    @abstractmethod
    def _replay(self, led: Led[S], frame: Frame) -> None:
        """Take a committed batch of the log into a shard that is being loaded."""

    @abstractmethod
    def _loaded(self, led: Led[S]) -> None:
        """The whole log is replayed: go on with what the last leader had decided."""

    @abstractmethod
    def _unloaded(self, led: Led[S]) -> None:
        """The leadership is over: everybody who waits for an answer must ask the next leader."""

    @abstractmethod
    def _committed(self, led: Led[S]) -> None:
        """More appends of the shard are committed: `led.committed`."""

    @abstractmethod
    def _time_passes(self) -> None:
        """Shards are loaded and unloaded as this broker leads; do what is due."""

    def _settle(self) -> None:
        """Called after events, before what results from them is sent."""

    # What it builds on.

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One event of a caller, after those that were noted. What results from it is sent at the end."""
        try:
            with self._lock:
                self._run_events()
                yield
        finally:
            self.pump()

    def note(self, event: Callable[[], None]) -> None:
        """Note an event. Called from any thread, perhaps under a partition's lock."""
        self._events.append(event)
        self._wake()

    def pump(self) -> None:
        """Handle the events, and send what results from them. Returns when nothing is left to do at once."""
        while True:
            with self._lock:
                self._run_events()
                self._settle()
                leaving, self._outbox = self._outbox, deque()
            if not leaving and not self._events:
                return
            self._send_out(leaving)

    def tick(self) -> None:
        """Time passes: load and unload shards, and do what is due."""
        with self._turn():
            self._follow_leadership()
            self._time_passes()

    def _run_events(self) -> None:
        while self._events:
            self._events.popleft()()

    def _send_out(self, leaving: deque[Callable[[], None]]) -> None:
        """Run what leaves this coordinator. An error ends the call in hand; what belongs to others is sent by the next
        one who pumps."""
        try:
            while leaving:
                leaving.popleft()()
        finally:
            if leaving:
                with self._lock:
                    self._outbox.extendleft(reversed(leaving))

    def _shard_of(self, key: str) -> Led[S]:
        """The shard of a group or transactional id, loaded. Raises the error that says why there is none."""
        topic = self._manager.image.topic(self.topic_name)
        if topic is None:
            raise CoordinatorNotAvailableError(f"{self.topic_name} does not exist yet")
        return self._led(topic, group_partition(key, len(topic.partitions)))

    def _led(self, topic: TopicState, number: int) -> Led[S]:
        """The shard of a partition that this broker leads, loaded. Raises the error that says why there is none."""
        partition = self._manager.partition(topic.topic_id, number)
        current = self._shards.get(number)
        if current is not None:
            if current.is_current(partition):
                return current
            self._unload(current)
        now_ms = self._clock.boottime_ms()
        if now_ms < self._again_ms.get(number, 0):
            raise CoordinatorNotAvailableError(f"{partition} could not be read or written, and is tried again soon")
        try:
            led = self._shards[number] = self._load(number, partition)
        except (NotLeaderOrFollowerError, CoordinatorNotAvailableError):
            raise  # It was not read.
        except SparkBrokerError:
            self._pause(number, AGAIN_MS)  # A part cannot be read: others would wait for each try.
            raise
        self._loaded(led)
        return led

    def _pause(self, number: int, pause_ms: int) -> None:
        self._again_ms[number] = self._clock.boottime_ms() + pause_ms

    def _load(self, number: int, partition: Partition) -> Led[S]:
        """Read the whole log. Raises NotLeaderOrFollowerError, or CoordinatorNotAvailableError while it is not known
        yet how much of the log is committed."""
        leader_epoch = partition.leader_epoch()
        try:
            position, high_watermark = partition.reader.offsets(leader_epoch)
        except OffsetNotAvailableError as error:
            raise CoordinatorNotAvailableError(error.message) from None
        # Appends of an earlier shard of the same leadership may not be committed yet.
        if high_watermark < partition.log.log_end_offset:
            raise CoordinatorNotAvailableError(f"{partition} has records that are not committed yet")
        led = Led(number, partition, leader_epoch, self._new_shard(partition))
        while position < high_watermark:
            read = partition.reader.read_all(leader_epoch, position, READ_BYTES, read_committed=False)
            if not read.frames:
                raise CoordinatorNotAvailableError(f"{partition} could not be read up to {high_watermark}")
            for frame in read.frames:
                self._replay(led, frame)
            led.read_to = position = read.next_offset
        return led

    def _follow_leadership(self) -> None:
        """Load the shards that this broker leads now, so that what was decided goes on. Unload the others."""
        topic = self._manager.image.topic(self.topic_name)
        states = topic.partitions if topic is not None else ()
        led_partitions = {number for number, state in enumerate(states) if state.leader == self._manager.broker_id}
        for number, led in list(self._shards.items()):
            if number not in led_partitions:
                self._unload(led)
        for number in sorted(led_partitions):
            try:
                if topic is not None:
                    self._led(topic, number)
            except SparkBrokerError as error:
                logger.debug("%s-%s is not loaded yet: %s", self.topic_name, number, error)

    def _unload(self, led: Led[S]) -> None:
        if self._shards.get(led.number) is led:
            del self._shards[led.number]
            self._unloaded(led)

    def _append(self, led: Led[S], rows: Sequence[Row]) -> AppendOfShard[S]:
        """Append one batch. When this raises a typed error, nothing is stored."""
        append = AppendOfShard(self, led, led.appended + 1)
        topic = led.partition.topic
        message = encode_rows(rows, topic.schemas[-1], topic.schema_id, self._clock.wall_ms())
        led.partition.append(Append(message, led.leader_epoch, ACKS_ALL, topic.schema_id, FOR_EVER_MS), append)
        led.appended += 1
        return append

    def append_committed(self, led: Led[S], count: int) -> None:
        """Event: so many appends of the shard are committed."""
        if self._shards.get(led.number) is led and count > led.committed:
            led.committed = count
            self._committed(led)

    def append_lost(self, led: Led[S], error: SparkBrokerError) -> None:
        """Event: it is not known whether an append will be committed. The shard is loaded again from its log."""
        if self._shards.get(led.number) is led:
            logger.info("%s is loaded anew: %s", led.partition, error.message)
            self._unload(led)


class AppendOfShard(Generic[S]):
    """An append to a shard's log, on its way; the `count`-th one. Called under the partition's lock."""

    def __init__(self, runtime: CoordinatorRuntime[S], led: Led[S], count: int) -> None:
        self._runtime = runtime
        self._led = led
        self._count = count
        self.base_offset = -1  # until it is committed

    def acknowledge(self, base_offset: int) -> None:
        self.base_offset = base_offset
        self._runtime.note(partial(self._runtime.append_committed, self._led, self._count))

    def refuse(self, error: SparkBrokerError) -> None:
        self._runtime.note(partial(self._runtime.append_lost, self._led, error))
