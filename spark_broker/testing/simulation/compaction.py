"""Compaction in a schedule: what a seed decides about it, and what must hold of a compacted log.

A replica's log is compared with what is committed batch by batch, as it was appended. So the rules see a compacted log
as it would be without compaction (`Compactions.as_committed`), and its own rules look at the rows that are left.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.broker.partition import Partition
from spark_broker.core.batch import NO_PRODUCER
from spark_broker.model import INTERNAL_PREFIX
from spark_broker.protocol.arrow_message import row_deltas
from spark_broker.protocol.frame import CONTROL, FIRST_OF_SEGMENT, ROW_OFFSETS, TRANSACTIONAL, BatchHeader, Frame
from spark_broker.storage.segment import Segment
from spark_broker.testing.simulation.batches import decoded, is_tombstone, key_of
from spark_broker.testing.simulation.shadow import CommittedLog, Key
from spark_broker.testing.simulation.swarm import Swarm
from spark_broker.testing.simulation.unclean import FAULT as UNCLEAN
from spark_broker.testing.simulation.violation import ViolationError

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess
    from spark_broker.testing.simulation.world import World

SHARE = 0.1
"""Share of the schedules without transactions whose topics are compacted."""

SHARE_OF_TRANSACTIONS = 0.3
"""The share of those with transactions, which have markers to be removed."""

STEP_MS = 25.0
"""About how long a step of a pass takes: something happens in between."""

FAULT = "leave a follower behind"

_FLAGS = FIRST_OF_SEGMENT | TRANSACTIONAL
"""Attributes that compaction may take off a batch whose records all stay."""


@dataclass(frozen=True, slots=True)
class CompactionDraw:
    """The draw of one seed. Times are virtual."""

    topic_config: Mapping[str, str]
    interval_ms: float
    dedupe_bytes: int
    behind_share: float

    @staticmethod
    def draw(seed: int, swarm: Swarm, *, transactional: bool) -> CompactionDraw | None:
        """None: the schedule has no compaction. One with unclean elections has none: nothing is committed for good."""
        rng = random.Random(f"{seed}/compaction draw")
        share = SHARE_OF_TRANSACTIONS if transactional else SHARE
        if rng.random() >= share or UNCLEAN in swarm.faults:
            return None
        config = {
            "cleanup.policy": "compact",
            "key.columns": "key",
            "timestamp.column": "at",
            "min.cleanable.dirty.ratio": rng.choice(["0.0", "0.0", "0.3"]),
            "delete.retention.ms": rng.choice(["0", "200", "2000"]),
        }
        interval_ms, dedupe_bytes = rng.choice([30.0, 150.0, 600.0]), rng.choice([1024, 1 << 20])
        return CompactionDraw(config, interval_ms, dedupe_bytes, behind_share=rng.choice([0.05, 0.2]))

    def adapt(self, swarm: Swarm) -> Swarm:
        """The schedule's other settings, with small segments: only sealed ones are compacted."""
        cluster = replace(
            swarm.settings.cluster, log_cleaner_dedupe_buffer_size=self.dedupe_bytes, log_dir_room_bytes=1
        )
        topic = replace(swarm.settings.topic, segment_bytes=2560)
        usual = sum(swarm.faults.values()) or 1.0
        return replace(
            swarm,
            settings=replace(swarm.settings, cluster=cluster, topic=topic),
            faults={**swarm.faults, FAULT: usual * self.behind_share},
            partitions=1,
        )


class Compactions:
    """The rules of compaction. Without a draw, logs are what was appended."""

    def __init__(self, world: World, draw: CompactionDraw | None) -> None:
        self._world = world
        self.draw = draw
        self._looked: dict[tuple[str, Key], tuple[int, tuple[Segment, ...]]] = {}

    def strike(self, rng: random.Random) -> str:
        """A follower does not fetch for a while, and then goes on: its leader may have forgotten deletions since."""
        leaders = {state.leader for _, _, state in self._world.invariants.image.partitions()}
        followers = [m for m in self._world.machines if m.running and m.broker_id not in leaders]
        if not followers:
            return ""
        machine, for_ms = rng.choice(followers), rng.choice([300, 1500, 4000]) * (0.5 + rng.random())
        faults = self._world.faults
        faults.pause_fetches(machine, for_ms)
        go_on = partial(faults.pause_fetches, machine, 0.0)  # The next fetch is the first after the pause.
        self._world.scheduler.after(for_ms / 2, self._world.operator, "the follower goes on", go_on)
        return f"{machine} does not fetch for {for_ms:.0f} ms"

    def as_committed(self, headers: Iterable[BatchHeader], committed: CommittedLog | None) -> list[BatchHeader]:
        """The batches of a log as they were before compaction. A batch that is no other than it was stays as it is."""
        if not self._world.cleaning_ms or committed is None:
            return list(headers)
        return [batch for header in headers for batch in _originals(header, committed)]

    def look(self, process: BrokerProcess, partition: Partition, committed: CommittedLog | None) -> None:
        """Check a replica whose segments were compacted, or that leads now."""
        if not partition.topic.is_compacted or not process.fs.alive:
            return
        _check_relied_on(process.name, partition)
        place, segments = (process.name, partition.key), partition.log.sealed_below(partition.replica.high_watermark)
        epoch, before = self._looked.get(place, (-1, ()))
        if partition.replica.assignment.leader_epoch == epoch and segments[: len(before)] == before:
            return
        self._looked[place] = partition.replica.assignment.leader_epoch, segments
        self.check(process.name, partition, committed)

    def check(self, who: str, partition: Partition, committed: CommittedLog | None) -> None:
        """What is left is what was appended, with the last record of each key, and nothing deleted comes back.

        What is left of an internal topic is judged by what its coordinators answer.
        """
        if committed is None or partition.topic.name.startswith(INTERNAL_PREFIX):
            return
        replica = partition.replica
        end = min(replica.last_stable_offset, committed.end_offset)
        rows = {offset: value for offset, value in rows_of(partition, end) if offset >= replica.log_start_offset}
        expected = self._records(partition, committed, replica.log_start_offset)
        who = f"{who}, {partition}"
        for offset, value in rows.items():
            if expected.get(offset, value) != value:
                raise ViolationError("compaction moves nothing", f"{who}: {value!r} is at {offset}", committed.name)
        _check_last(who, rows, expected, end, replica.purge_offset, committed.name)
        clean = [key_of(value) for offset, value in rows.items() if offset < partition.log.cleaned.clean_to]
        if len(clean) != len(set(clean)):
            clean_to = partition.log.cleaned.clean_to
            raise ViolationError("what is clean has each key once", f"{who}: {rows} below {clean_to}", committed.name)

    def _records(self, partition: Partition, committed: CommittedLog, start: int) -> dict[int, bytes]:
        """The committed records from an offset on, without those of transactions that were aborted or are open."""
        transactional = self._world.transactional
        return {
            base + at: value
            for base, values in committed.values.items()
            if transactional is None or transactional.rules.is_committed(partition.key, base)
            for at, value in enumerate(values)
            if start <= base + at
        }


def _check_relied_on(who: str, partition: Partition) -> None:
    """Records are gone because of later ones below `clean_to`. A restart must not forget that those are committed.

    Until it hears of that again, readers would find neither.
    """
    clean_to, high_watermark = partition.log.cleaned.clean_to, partition.replica.high_watermark
    if clean_to > high_watermark:
        raise ViolationError(
            "what a pass relied on stays committed",
            f"{who}, {partition}: clean to {clean_to}, committed to {high_watermark}",
            str(partition),
        )


def _check_last(
    who: str, rows: dict[int, bytes], expected: dict[int, bytes], end: int, purge_offset: int, name: str
) -> None:
    """A replica that is copying a log may lack a record because of a later one that it has not got yet."""
    left = {key_of(rows[offset]): offset for offset in sorted(rows) if offset in expected}
    last = {key_of(expected[offset]): offset for offset in sorted(expected) if offset < end}
    superseded = {key_of(value) for offset, value in expected.items() if offset >= end}
    for key, offset in last.items():
        purged = is_tombstone(expected[offset]) and offset < purge_offset
        if left.get(key, offset if purged else -1) != offset and key not in superseded:
            there = "nothing" if key not in left else f"{rows[left[key]]!r} at {left[key]}"
            raise ViolationError(
                "the last record of each key stays",
                f"{who}: of {key!r} {expected[offset]!r} at {offset} is the last, {there} is left (purged to "
                f"{purge_offset})",
                name,
            )


def rows_of(partition: Partition, end: int) -> Iterator[tuple[int, bytes]]:
    """Offset and value of each record of a replica's log below `end`."""
    offset = partition.replica.log_start_offset
    while offset < end:
        frames = partition.log.read(offset, 1 << 30, end)
        if not frames:
            return
        for frame in frames:
            yield from values_at(frame)
        offset = frames[-1].header.next_offset


def values_at(frame: Frame) -> Iterator[tuple[int, bytes]]:
    """The records of a stored batch with their offsets."""
    values = () if frame.header.attributes & CONTROL else decoded(frame.message)
    for delta, value in zip(row_deltas(*frame).tolist(), values, strict=True):
        yield frame.header.base_offset + delta, value


def _originals(header: BatchHeader, committed: CommittedLog) -> list[BatchHeader]:
    if header.base_offset >= committed.end_offset:
        return [header]
    original = committed.at(header.base_offset)
    if original == header:
        return [header]
    if not header.attributes & ROW_OFFSETS:
        return [original if original is not None and _is_restamped(header, original) else header]
    batches = committed.between(header.base_offset, header.next_offset)
    whole = batches and (batches[0].base_offset, batches[-1].next_offset) == (header.base_offset, header.next_offset)
    if not whole or any(batch.leader_epoch != header.leader_epoch for batch in batches):
        raise ViolationError("gaps are whole batches of one epoch", f"{header} in place of {batches}", committed.name)
    if header.producer_id != NO_PRODUCER and [_place(batch) for batch in batches] != [_place(header)]:
        raise ViolationError("places are kept", f"{header} in place of {batches}", committed.name)
    return batches


def _is_restamped(header: BatchHeader, original: BatchHeader) -> bool:
    """Whether only flags differ, and the checksum with them."""
    same = header._replace(attributes=original.attributes, message_crc=original.message_crc)
    return same == original and not (header.attributes ^ original.attributes) & ~_FLAGS


def _place(header: BatchHeader) -> tuple[int, ...]:
    return header.base_offset, header.producer_id, header.producer_epoch, header.base_sequence
