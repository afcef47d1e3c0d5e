"""Whether the session's executors are enough for the brokers: said early, with numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from pyspark import SparkContext

from spark_broker.config import ClusterConfig
from spark_broker.driver.executors import expected_executors, is_local
from spark_broker.errors import ClusterStartError, UnsupportedSparkError

SETTLE_S = 15.0
"""Executors of one application come within seconds of each other: a number that stays this long is the number."""

RESOURCE = "spark.executor.resource.broker.amount"


class ExecutorCount(Protocol):
    """What the wait needs of the launcher."""

    @property
    def needs_executors(self) -> bool:
        """False where all brokers share one executor."""

    def wait_executors(self, count: int, timeout_s: float) -> int:
        """Wait until `count` executors are alive; returns how many are."""


def check_executor_count(sc: SparkContext, brokers: int) -> None:
    """Raise ClusterStartError where the application's settings already say that there are too few executors."""
    if brokers < 1:
        raise ClusterStartError(f"{brokers} brokers: at least one is needed")
    expected = expected_executors(sc)
    if not is_local(sc.master) and expected is not None and expected < brokers:
        raise _too_few(brokers, f"{sc.master} has {expected}")


def check_resource(sc: SparkContext, config: ClusterConfig) -> None:
    """Raise UnsupportedSparkError where brokers are to ask for a resource that executors do not have."""
    if config.broker_executor_resource and not sc.getConf().get(RESOURCE):
        raise UnsupportedSparkError(
            f"broker.executor.resource is true, but {RESOURCE} is not set: no task that asks for it would ever run"
        )


def wait_for_executors(
    launcher: ExecutorCount,
    brokers: int,
    deadline: float,
    on_progress: Callable[[str, int, int], None],
    settle_s: float = SETTLE_S,
) -> None:
    """Wait until there are as many executors as brokers. Raises ClusterStartError once it is clear that there are not.

    `deadline` is on the monotonic clock.
    """
    if not launcher.needs_executors:
        return
    there, since = -1, time.monotonic()
    while there < brokers:
        now_there = launcher.wait_executors(max(there + 1, 1), min(1.0, settle_s))
        on_progress("executors", min(now_there, brokers), brokers)
        if now_there != there:
            there, since = now_there, time.monotonic()
        settled = there > 0 and time.monotonic() - since > settle_s
        if there < brokers and (settled or time.monotonic() > deadline):
            raise _too_few(brokers, f"the application has {there}")


def _too_few(brokers: int, there: str) -> ClusterStartError:
    return ClusterStartError(f"{brokers} brokers need {brokers} executors, one each; {there}")
