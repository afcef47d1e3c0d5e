"""The end of a schedule: everything heals, and then the cluster has to come to rest with everything in its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spark_broker.broker.partition import Partition
from spark_broker.controller.image import PartitionRegistration
from spark_broker.errors import OffsetOutOfRangeError, SparkBrokerError
from spark_broker.model import NO_EPOCH, NO_LEADER, TopicPartition
from spark_broker.protocol.frame import Frame
from spark_broker.testing.checker import check_history
from spark_broker.testing.history import Isolation, Stored
from spark_broker.testing.simulation.aside import is_aside
from spark_broker.testing.simulation.batches import decoded
from spark_broker.testing.simulation.shadow import Key
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.consumer import SimConsumer
    from spark_broker.testing.simulation.world import World

ENDING_EVENTS_MAX = 200_000
"""A hundred times what it takes. At this number some process acts again at once, for ever, and no time passes."""

QUIET_MS = 30_000
"""Virtual time within which everything has to be in its place again."""

LOOK_MS = 50


def end(world: World) -> None:
    """Heal, wait until all is quiet, compare the replicas, judge the history. Raises ViolationError."""
    world.faults.heal()
    for producer in world.producers:
        producer.stopped = True
    if world.transactional is not None:
        world.transactional.stop()
    if world.groups is not None:
        world.groups.stop()
    if world.sharing is not None:
        world.sharing.stop()
    deadline_us = world.scheduler.now_us + QUIET_MS * 1000
    events_max = world.scheduler.events + ENDING_EVENTS_MAX
    missing = _missing(world)
    while missing:
        if world.scheduler.now_us > deadline_us:
            raise ViolationError(
                "the cluster comes to rest", f"{QUIET_MS / 1000:.0f} s after everything healed: {missing}"
            )
        look_us = world.scheduler.now_us + LOOK_MS * 1000
        while world.scheduler.now_us < look_us:
            world.step()
            if world.scheduler.events > events_max:
                raise ViolationError("the cluster comes to rest", f"{ENDING_EVENTS_MAX:,} events while it healed")
        missing = _missing(world)
    _compare_all(world)
    world.older_metadata.check()
    if world.tiering is not None:
        world.tiering.check_all()
    _judge(world)


def _missing(world: World) -> str:
    """What is not in its place; empty when everything is."""
    image = world.invariants.image
    for machine in world.machines:
        process = machine.process
        if process is None or not process.alive:
            return f"{machine} runs no broker"
        if not process.registered or not image.is_live(machine.broker_id):
            return f"{process} is not live"  # No partition need have a replica there that would be missed.
    for producer in world.producers:
        if producer.open_batches:
            return f"{producer} waits for {producer.open_batches} batches"
    for topic, number, state in image.partitions():
        name, key = f"{topic.name}-{number}", (topic.topic_id, number)
        if state.leader == NO_LEADER:
            return f"{name} has no leader: {state}"
        if not _is_whole(state, len(world.machines)):
            return f"{name} is not in sync, or lacks replicas for which there are brokers: {state}"
        partitions = [_replica(world, broker, key) for broker in state.replicas]
        if any(partition is None or partition.log.is_unusable for partition in partitions):
            return f"{name} is not open everywhere"
        marks = {(p.replica.log_end_offset, p.replica.high_watermark) for p in partitions if p is not None}
        if len(marks) > 1 or any(end_offset != mark for end_offset, mark in marks):
            return f"{name}: log ends and high watermarks {sorted(marks)}"
        for consumer in world.consumers if not topic.internal and not is_aside(topic.name) else ():
            if consumer.position(key) != next(iter(marks))[1]:
                return f"{consumer} is at {consumer.position(key)} of {name}, which ends at {sorted(marks)}"
            # After an unclean election, a reader whose place is only in the table is not told.
            told = world.tiering is None or key not in world.unclean.released
            if told and not _has_read_this(consumer, key, partitions[0]):
                return f"{consumer} has not been told of a cut of {name}"
    missing = world.transactional.missing() if world.transactional is not None else ""
    missing = missing or (world.groups.missing() if world.groups is not None else "")
    missing = missing or (world.sharing.missing() if world.sharing is not None else "")
    missing = missing or (world.tiering.missing() if world.tiering is not None else "")
    return missing or world.older_metadata.missing() or world.bit_flips.missing()


def _is_whole(state: PartitionRegistration, brokers: int) -> bool:
    lacks = state.lacking and len(state.replicas) < brokers
    return not (lacks or state.reassigning or set(state.isr) != set(state.replicas))


def _has_read_this(consumer: SimConsumer, key: Key, partition: Partition | None) -> bool:
    """Whether the log that the consumer has read to its end is this one, and not an earlier one of the same length."""
    position = consumer.position_of(key)
    if position is None or partition is None or position.truncation is not None:
        return False
    if position.position <= partition.replica.log_start_offset:
        return True  # Nothing of what it has read is in this log, whatever stood there before it was deleted.
    epoch = partition.replica.epochs.epoch_at(position.position - 1)
    return NO_EPOCH in (position.last_epoch, epoch) or position.last_epoch == epoch


def _replica(world: World, broker_id: int, key: Key) -> Partition | None:
    machine = world.machine_of(broker_id)
    if machine is None or machine.process is None or not machine.process.alive:
        return None
    return machine.process.manager.find(*key)


def _compare_all(world: World) -> None:
    """All replicas of a partition hold the same bytes, or compacted ones what was appended."""
    for topic, number, state in world.invariants.image.partitions():
        key = (topic.topic_id, number)
        replicas = [p for broker in state.replicas if (p := _replica(world, broker, key)) is not None]
        start = max(partition.replica.log_start_offset for partition in replicas)
        for partition in replicas if replicas[0].topic.is_compacted else ():
            world.compactions.check("the end", partition, world.invariants.committed.get(key))
        contents = [_content(world, partition, start) for partition in replicas]
        if any(content != contents[0] for content in contents):
            ends = [partition.replica.log_end_offset for partition in replicas]
            raise ViolationError(
                "all replicas agree",
                f"the replicas on {list(state.replicas)} differ; they end at {ends}",
                str(replicas[0]),
            )


def _content(world: World, partition: Partition, start: int) -> list[tuple[object, bytes]]:
    """What must be the same in all replicas. Of a compacted topic, that is the batches before compaction."""
    if partition.topic.is_compacted:
        committed = world.invariants.committed.get(partition.key)
        headers = world.compactions.as_committed(partition.log.headers(start), committed)
        return [(header, b"") for header in headers if header.next_offset > start]
    return [(frame.header, bytes(frame.message)) for frame in _frames(partition, start)]


def _frames(partition: Partition, start: int) -> Iterable[Frame]:
    end_offset = partition.replica.log_end_offset
    try:
        while start < end_offset:
            frames = partition.log.read(start, 1 << 30, end_offset)
            if not frames:
                return
            yield from frames
            start = frames[-1].header.next_offset
    except (OffsetOutOfRangeError, SparkBrokerError) as error:
        raise ViolationError("logs can be read", str(error), str(partition)) from error


def _judge(world: World) -> None:
    """The history checker's verdict on what clients did and saw."""
    rows: list[Stored] = []
    aborted: list[Stored] = []
    for topic, number, state in world.invariants.image.partitions():
        if topic.internal:
            continue
        key = (topic.topic_id, number)
        tp = TopicPartition(topic.name, number)
        partition = _replica(world, state.leader, key)
        if partition is None:
            continue
        if partition.topic.is_compacted:
            rows += _removed(world, key, tp, partition.replica.log_end_offset)
            continue
        rows += _removed(world, key, tp, partition.replica.log_start_offset)
        for header, message in _frames(partition, partition.replica.log_start_offset):
            values = decoded(message)
            skip = max(0, partition.replica.log_start_offset - header.base_offset)
            stored = [Stored(tp, header.base_offset + at, value) for at, value in enumerate(values) if at >= skip]
            (aborted if _is_aborted(world, key, header.base_offset) else rows).extend(stored)
    world.history.snapshot_began("the end")
    world.history.snapshot("the end", rows)
    if world.transactional is not None:
        world.history.snapshot("all at the end", rows + aborted, isolation=Isolation.READ_UNCOMMITTED)
    result = check_history(world.history.history())
    if not result.ok:
        first = result.violations[0]
        raise ViolationError(f"history: {first.kind.name}", str(result), str(first.partition))


def _is_aborted(world: World, key: Key, base_offset: int) -> bool:
    return world.transactional is not None and world.transactional.rules.is_aborted(key, base_offset)


def _removed(world: World, key: Key, tp: TopicPartition, log_start: int) -> list[Stored]:
    """Records that were deleted on purpose, or may be compacted, as they were when they were committed."""
    committed = world.invariants.committed.get(key)
    if committed is None:
        return []
    return [
        Stored(tp, base + at, value)
        for base, values in sorted(committed.values.items())
        for at, value in enumerate(values)
        if base + at < log_start and not _is_aborted(world, key, base)
    ]
