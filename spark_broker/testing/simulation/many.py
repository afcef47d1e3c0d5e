"""Many schedules on all cores, and what they add up to."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from spark_broker.testing.simulation.schedule import DEFAULT_EVENTS, ScheduleResult, run_schedule
from spark_broker.threads import begin

CHUNK = 25
"""Schedules that a process runs before it reports."""

MAX_CHUNK_S = 600.0
"""A chunk that takes longer hangs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A seed that broke a rule."""

    seed: int
    rule: str
    message: str


@dataclass(slots=True)
class Summary:
    """What the schedules so far add up to. `cpu_s`: processor time of all processes together."""

    first_seed: int
    events_asked: int
    schedules: int = 0
    events: int = 0
    virtual_ms: int = 0
    acknowledged: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, result: ScheduleResult) -> None:
        self.schedules += 1
        self.events += result.events
        self.virtual_ms += result.virtual_ms
        self.acknowledged += result.acknowledged
        self.counts.update(result.counts)
        if result.violation is not None:
            self.findings.append(Finding(result.seed, result.violation.rule, result.violation.message))

    @property
    def schedules_per_minute_and_core(self) -> float:
        return self.schedules * 60 / self.cpu_s if self.cpu_s else 0.0


def run_many(
    schedules: int,
    *,
    first_seed: int = 0,
    events: int = DEFAULT_EVENTS,
    processes: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
    found: Callable[[Finding], None] = lambda _: None,
    stop_at_first: bool = False,
) -> Summary:
    """Run this many seeds from `first_seed` on. With `stop_at_first`, end soon after a seed that breaks a rule.

    While it runs, `progress` is called with the number of seeds done, and `found` with each seed that breaks a rule.
    """
    summary = Summary(first_seed, events)
    began = time.monotonic()
    for results, cpu_s in _chunks(range(first_seed, first_seed + schedules), events, processes or os.cpu_count() or 1):
        summary.cpu_s += cpu_s
        first_new = len(summary.findings)
        for result in results:
            summary.add(result)
        for finding in summary.findings[first_new:]:
            found(finding)
        progress(summary.schedules)
        if stop_at_first and summary.findings:
            break
    summary.findings.sort(key=lambda finding: finding.seed)
    summary.wall_s = time.monotonic() - began
    return summary


Chunk = tuple[list[ScheduleResult], float]


def _chunks(seeds: range, events: int, processes: int) -> Iterator[Chunk]:
    parts = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    if processes == 1 or len(parts) == 1:
        for part in parts:
            yield run_chunk(part, events)
        return
    # Spawned, not forked: a worker imports what a schedule needs, and has none of this process's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(parts)), mp_context=context, initializer=end_with_parent) as pool:
        yield from _pooled(pool, parts, events, processes)


def _pooled(pool: ProcessPoolExecutor, parts: list[range], events: int, processes: int) -> Iterator[Chunk]:
    """Keep every worker busy, without queueing more than can be thrown away."""
    left = iter(parts)
    pending: set[Future[Chunk]] = set()
    try:
        while True:
            for part in left:
                pending.add(pool.submit(run_chunk, part, events))
                if len(pending) >= 2 * processes:
                    break
            if not pending:
                return
            done, pending = wait(pending, MAX_CHUNK_S, return_when=FIRST_COMPLETED)
            if not done:
                raise TimeoutError(f"no schedule ended within {MAX_CHUNK_S:.0f} s")
            for future in done:
                yield future.result()
    finally:
        for future in pending:
            future.cancel()


def end_with_parent() -> None:
    """End this worker of a pool when its parent is gone. It would wait for its next task for ever."""
    parent = multiprocessing.parent_process()

    def wait_for_it() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    begin("parent", lambda _: os._exit(1), wait_for_it)


def run_chunk(seeds: range, events: int) -> Chunk:
    """Run these seeds in this process; returns their results and the processor time."""
    began = time.process_time()
    gc.disable()  # a schedule's objects are freed as a whole; looking for cycles all the time costs a fifth
    try:
        results = [run_schedule(seed, events)[0] for seed in seeds]
    finally:
        gc.enable()
        gc.collect()
    return results, time.process_time() - began
