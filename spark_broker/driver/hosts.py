"""The interface between the launcher and a host, which runs brokers. `KeeperHost` runs them on Spark's executors."""

from __future__ import annotations

from typing import Protocol

from spark_broker.broker.spec import BrokerOutcome, BrokerSpec
from spark_broker.driver.executors import Executor


class HostListener(Protocol):
    """What a host reports, from threads of its own. Calls return quickly."""

    def executors_changed(self) -> None:
        """`executors()` has a new answer."""

    def executor_lost(self, launch: int) -> None:
        """Spark no longer counts this launch's executor as alive; `run` returns soon."""

    def executor_leaving(self, launch: int) -> None:
        """Spark is about to take this launch's executor away: there is time to leave in order. Raises NoThreadError:
        it was not noted, and is to be said again.
        """

    def session_ended(self) -> None:
        """The Spark application is over: nothing can run any more."""


class BrokerHost(Protocol):
    """Runs brokers."""

    @property
    def shared_executor(self) -> bool:
        """Whether all brokers share one executor."""

    @property
    def trouble(self) -> str:
        """What last went wrong with the tasks that keep brokers; empty: nothing did."""

    def open(self, listener: HostListener) -> None:
        """Begin to watch executors. Raises NoThreadError."""

    def executors(self) -> list[Executor]:
        """The executors that are alive, and are to stay."""

    def run(self, executor: Executor, spec: BrokerSpec) -> BrokerOutcome:
        """Run one launch there; returns when it has ended, however it ended. Raises NoThreadError: nothing runs."""

    def close(self) -> None:
        """End everything that still runs, by force, and watch no longer."""
