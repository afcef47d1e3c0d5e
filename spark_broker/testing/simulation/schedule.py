"""One schedule from its seed to its verdict."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spark_broker.testing.silence import silent_brokers
from spark_broker.testing.simulation.ending import end
from spark_broker.testing.simulation.trace import Trace, TraceKind
from spark_broker.testing.simulation.violation import ViolationError
from spark_broker.testing.simulation.world import World

DEFAULT_EVENTS = 500
MAX_BOOT_EVENTS = 20_000
LENGTH_OF_COMPACTION = 2
"""How many times as many events there are with compaction: before it begins, segments have to fill."""
LENGTH_OF_TIERING = 5
"""The same with tiering, where steps of tierers and readers of tables are events, too."""
MAX_BEGIN_EVENTS = 200
"""Events within which the first transactions may begin, before there are faults."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The rule that a schedule broke."""

    rule: str
    message: str
    partition: str
    event: int


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """What became of one seed. `digest` is empty unless it was asked for; `counts`: what happened how often."""

    seed: int
    events: int
    virtual_ms: int
    acknowledged: int
    violation: Broken | None
    counts: Mapping[str, int] = field(default_factory=dict)
    digest: str = ""


def run_schedule(seed: int, events: int = DEFAULT_EVENTS, *, story: bool = False) -> tuple[ScheduleResult, Trace]:
    """Run a seed: start a cluster, run `events` events with faults, heal, and judge. `story`: with notes and digest."""
    with silent_brokers():  # the trace notes what they would log
        world = World(seed, keep_notes=story)
        violation = _run(world, events)
    result = ScheduleResult(
        seed=seed,
        events=world.scheduler.events,
        virtual_ms=world.scheduler.now_ms,
        acknowledged=world.history.acknowledged_count,
        violation=violation,
        counts=world.trace.counts,
        digest=world.trace.digest() if story else "",
    )
    return result, world.trace


def _run(world: World, events: int) -> Broken | None:
    try:
        world.start()
        while not world.is_up:
            if world.scheduler.events > MAX_BOOT_EVENTS:
                raise ViolationError("the cluster starts", "there is no topic yet")
            world.step()
        for producer in world.producers:
            producer.start()
        for consumer in world.consumers:
            consumer.start()
        if world.sharing is not None:
            world.sharing.start()
        if world.transactional is not None:
            world.transactional.start()
            patience = world.scheduler.events + MAX_BEGIN_EVENTS
            while not world.transactional.has_begun and world.scheduler.events < patience:
                world.step()
            events *= world.transactional.draw.length
        if world.tiering is not None:
            world.tiering.start()
            events *= LENGTH_OF_TIERING
        elif world.compactions.draw is not None:
            events *= LENGTH_OF_COMPACTION
        world.faults.start()
        last = world.scheduler.events + events
        while world.scheduler.events < last:
            world.step()
        end(world)
    except ViolationError as error:
        return _broken(world, error)
    except Exception as error:  # noqa: BLE001  # Else many schedules end with an error that names no seed.
        return _broken(world, ViolationError("a schedule runs to its end", _with_place(error)))
    return None


def _broken(world: World, error: ViolationError) -> Broken:
    world.trace.note("rules", TraceKind.VIOLATION, f"{error.rule}: {error.message}", error.partition)
    return Broken(error.rule, error.message, error.partition, world.scheduler.events)


def _with_place(error: Exception) -> str:
    """What an error says, and which line raised it."""
    *_, place = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
