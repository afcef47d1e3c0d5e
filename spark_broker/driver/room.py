"""Checks early whether the session's executors have room for the brokers and for queries. The errors give numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pyspark import SparkContext

from spark_broker.config import ClusterConfig
from spark_broker.driver.executors import Executor, cores_of_executor, expected_executors, local_slots
from spark_broker.driver.master import is_local
from spark_broker.errors import ClusterStartError, UnsupportedSparkError
from spark_broker.pages import page

SETTLE_S = 15.0
"""Executors of one application come within seconds of each other: a count that stays this long is the final one."""

STOP_OTHERS = "Or stop a cluster that you do not need: BrokerCluster.running() lists them."

RESOURCE = "spark.executor.resource.broker.amount"


class ExecutorCount(Protocol):
    """What the wait needs of the launcher."""

    @property
    def needs_executors(self) -> bool:
        """False where all brokers share one executor."""

    def wait_executors(self, enough: Callable[[Sequence[Executor]], bool], timeout_s: float) -> list[Executor]:
        """Wait until the executors that are alive are enough; returns them, enough or not."""


def check_settings_for_room(sc: SparkContext, brokers: int, taken: int = 0) -> None:
    """Raise ClusterStartError where the settings already say that there are too few executors for the brokers.

    `taken`: task slots that the brokers of the session's other clusters take. Raises UnsupportedSparkError where the
    settings leave no slot for queries, which would then wait for ever.
    """
    if brokers < 1:
        raise ClusterStartError(f"{brokers} brokers: at least one is needed", hint="Ask for 1 or more.")
    if is_local(sc.master):
        _check_local_slots(sc, taken)
        return
    expected, cores = expected_executors(sc), cores_of_executor(sc)
    if expected is not None and expected < brokers:
        raise _too_few(brokers, f"{sc.master} has {expected}")
    if expected is not None and cores is not None:
        check_slots(sc, [cores] * expected, brokers, taken)


def _check_local_slots(sc: SparkContext, taken: int) -> None:
    """All brokers of a cluster take one slot."""
    slots = local_slots(sc) // task_cpus(sc)
    if slots >= taken + 2:
        return
    if taken == 0:
        raise UnsupportedSparkError(
            f"{sc.master} has one task slot, which the brokers take: every query would wait for ever",
            hint="Use local[2], or more.",
        )
    raise UnsupportedSparkError(
        f"{sc.master} has {slots} task slots, of which other clusters of this session take {taken}: with one more, "
        "every query would wait for ever",
        hint=f"Use local[{(taken + 2) * task_cpus(sc)}], or more. {STOP_OTHERS}",
    )


def check_slots(sc: SparkContext, cores: Sequence[int], brokers: int, taken: int = 0) -> None:
    """Raise UnsupportedSparkError where executors with so many cores have no slot left beside the brokers' tasks.

    `taken`: slots of the session's other clusters.
    """
    if has_free_slot(sc, cores, brokers + taken):
        return
    others = f" and {taken} of other clusters in this session" if taken else ""
    raise UnsupportedSparkError(
        f"{len(cores)} executors with {sum(cores)} cores in all have no task slot left beside {brokers} brokers"
        f"{others}: every query would wait for ever",
        hint=f"Give the executors one core more (spark.executor.cores, or "
        f"local-cluster[{brokers},{2 * task_cpus(sc)},1024]) or the application one executor more."
        + (f" {STOP_OTHERS}" if taken else ""),
    )


def has_free_slot(sc: SparkContext, cores: Sequence[int], brokers: int) -> bool:
    """Whether a query's task fits beside the brokers, each of which takes a slot."""
    return sum(number // task_cpus(sc) for number in cores) > brokers


def task_cpus(sc: SparkContext) -> int:
    """Cores that one task takes."""
    return int(sc.getConf().get("spark.task.cpus", "1") or 1)


def check_resource(sc: SparkContext, config: ClusterConfig) -> None:
    """Raise UnsupportedSparkError where brokers are to ask for a resource that executors do not have."""
    if config.broker_executor_resource and not sc.getConf().get(RESOURCE):
        raise UnsupportedSparkError(
            f"broker.executor.resource is true, but {RESOURCE} is not set: no task that asks for it would ever run",
            hint=f"Give the executors the resource, or leave broker.executor.resource out: {page('configuration')}.",
        )


def wait_for_executors(
    launcher: ExecutorCount,
    sc: SparkContext,
    brokers: int,
    deadline: float,
    on_progress: Callable[[str, int, int], None],
    settle_s: float = SETTLE_S,
    taken: int = 0,
) -> None:
    """Wait until there are as many executors as brokers, with a slot left for queries.

    Raises ClusterStartError or UnsupportedSparkError once it is clear that there are not. `deadline` is on the
    monotonic clock. `taken`: slots of the session's other clusters.
    """
    if not launcher.needs_executors:
        return
    there: list[Executor] = []
    since = time.monotonic()
    while not _is_enough(sc, there, brokers, taken):
        count = len(there)
        now_there = launcher.wait_executors(lambda alive: len(alive) > count, min(1.0, settle_s))  # noqa: B023
        on_progress("executors", min(len(now_there), brokers), brokers)
        if len(now_there) != len(there):
            since = time.monotonic()
        there = now_there
        settled = bool(there) and time.monotonic() - since > settle_s
        if settled or time.monotonic() > deadline:
            _refuse(sc, there, brokers, taken)


def _is_enough(sc: SparkContext, there: Sequence[Executor], brokers: int, taken: int) -> bool:
    return len(there) >= brokers and has_free_slot(sc, [executor.cores for executor in there], brokers + taken)


def _refuse(sc: SparkContext, there: Sequence[Executor], brokers: int, taken: int) -> None:
    if len(there) < brokers:
        raise _too_few(brokers, f"the application has {len(there)}")
    check_slots(sc, [executor.cores for executor in there], brokers, taken)


def _too_few(brokers: int, there: str) -> ClusterStartError:
    return ClusterStartError(
        f"{brokers} brokers need {brokers} executors, one each; {there}",
        hint="Ask for fewer brokers, or give the application more executors (local-cluster[N,...], "
        "spark.executor.instances, spark.cores.max); Spark's own UI shows those that it has.",
    )
