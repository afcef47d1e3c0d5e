"""Every thread of spark-broker is a `Worker`, and says what its death means.

A thread that dies unnoticed leaves a process that looks alive and does not do its work: keepers are not accepted,
deadlines pass, a client's Futures never end. So what a worker's work raises is logged as an ERROR, and then its `Fate`
follows: its process ends, its client fails, or it begins again. `tests/unit/test_threads.py` finds threads that are
started in any other way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from spark_broker.errors import ClientEndedError
from spark_broker.interrupts import uninterrupted
from spark_broker.process_limits import limit_reached

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 1e9
"""Thirty years. Beyond a few hundred, the system's clocks overflow, and a wait is an error."""

PAUSE_S = 1.0
"""How long a worker pauses before it begins again."""

Fate = Callable[[BaseException], object]
"""Called once with what the work has raised, in the worker's thread, which then ends."""


class BeginAgain:
    """The fate of work that keeps no state between its rounds: it is begun again after a pause, until it returns.

    `unless`: it is over, so that nothing is begun again.
    """

    def __init__(self, unless: Callable[[], bool] = lambda: False) -> None:
        self.unless = unless

    def __call__(self, error: BaseException) -> None:
        """Nobody needs to be told."""


class Worker(threading.Thread):
    """A daemon thread that does its `work` once, or the `work` of a subclass."""

    def __init__(self, name: str, fate: Fate, work: Callable[[], object] | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._fate = fate
        self._given = work

    def work(self) -> None:
        """What the thread is there for. It ends when this returns."""
        if self._given is not None:
            self._given()

    def run(self) -> None:
        while (error := self._outcome()) is not None:
            with suppress(MemoryError):  # Its fate follows all the same.
                self._tell(error)
            self._fate(error)
            if not isinstance(self._fate, BeginAgain) or self._fate.unless():
                return
            threading.Event().wait(PAUSE_S)
            logger.error("thread %s begins again", self.name)

    def _tell(self, error: BaseException) -> None:
        limit = limit_reached(error)
        what = "an unexpected error" if limit is None else "a limit of the process"
        logger.error("thread %s ended on %s: %s", self.name, what, limit or repr(error), exc_info=error)

    def _outcome(self) -> BaseException | None:
        """What the work has raised. SystemExit ends a thread in silence (`native_calls`)."""
        try:
            self.work()
        except SystemExit:
            return None
        except BaseException as error:  # noqa: BLE001 (it is logged, and its fate follows)
            return error
        return None


def client_ended(error: BaseException) -> ClientEndedError:
    """What a client raises from now on: the thread that calls this has ended by this error."""
    limit, name = limit_reached(error), threading.current_thread().name
    if limit is not None:
        return ClientEndedError(f"{name} ended: {limit.message}", hint=f"{limit.hint} Then open a new client.")
    return ClientEndedError(f"{name} ended: {type(error).__name__}: {error}")


def begin(name: str, fate: Fate, work: Callable[[], object]) -> Worker:
    """Start a worker. Raises NoThreadError where the process can have no more threads.

    `Worker.start` raises RuntimeError then: where a process cannot do without the thread, no handler of typed errors
    may take it for a passing failure.
    """
    worker = Worker(name, fate, work)
    start(worker)
    return worker


def start(worker: Worker) -> None:
    """As `begin`, for a subclass. Whoever keeps the worker keeps it afterwards: a dead one does nothing, for ever."""
    try:
        # A handler that raised in `Thread.start` would leave its locks held, or the thread unknown.
        with uninterrupted():
            worker.start()
    except RuntimeError as error:
        raise limit_reached(error) or error from None


def ready_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool all of whose threads run already. Raises NoThreadError.

    A pool that is not ready starts a thread when it gets work. Whoever hands the work in would meet the limit then.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_run = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)
    except RuntimeError as error:
        all_run.abort()
        pool.shutdown(wait=False)
        raise limit_reached(error) or error from None
    all_run.wait()
    return pool
