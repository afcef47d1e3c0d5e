"""Simulated applications with many writers: a driver, task attempts that run twice, and versions, as Spark's sink does.

A driver belongs to one execution. A driver that was killed or frozen is followed by one of a new execution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.client.transaction_machine import Phase
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import AlreadyCommittedError, SparkBrokerError
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    CommitTransactionRequest,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EmptyResponse,
    InitProducerIdResponse,
    JoinTransactionRequest,
)
from spark_broker.testing.simulation.transactional_client import Answer, TransactionalClient

if TYPE_CHECKING:
    from spark_broker.testing.simulation.transactional import Transactional
    from spark_broker.testing.simulation.world import World

TASKS_MAX = 3
ATTEMPTS_MAX = 4
SECOND_ATTEMPT_SHARE = 0.3
REPORT_MS = 10.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """A task attempt that has appended everything."""

    transaction: int
    producer_id: int


@dataclass(slots=True)
class _Task:
    """One part of a version's work: the attempts that are under way, and those that are done."""

    attempts: int = 0
    running: int = 0
    done: list[Attempt] = field(default_factory=list)


Report = Callable[[Attempt | AlreadyCommittedError | None], None]


class SimTask(TransactionalClient):
    """One attempt: it joins, appends, and reports, as `client.transaction_group.JoinedProducer` does, but in events."""

    def __init__(
        self,
        world: World,
        transactional: Transactional,
        name: str,
        join: JoinTransactionRequest,
        driver: SimDriver,
        report: Report,
    ) -> None:
        super().__init__(world, transactional, name, join.application)
        self._join = join
        self._driver = driver
        self._report = report
        self._transaction = -1

    def start(self) -> None:
        """Join the transaction."""
        self.want_metadata()
        self.ask(self._join, self._joined)

    def replaced(self) -> None:
        self._reports(None)

    def _reports(self, attempt: Attempt | AlreadyCommittedError | None) -> None:
        report, self._report = self._report, _ignored
        delay_ms = REPORT_MS * self.rng.random()
        self.world.scheduler.after(delay_ms, self._driver, "task ended", partial(report, attempt))

    def _joined(self, answer: Answer) -> None:
        if not isinstance(answer, InitProducerIdResponse):
            self._fail(answer)
            return
        join = self._join
        self.transactional.rules.joined(answer.producer_id, join)
        self._transaction = self.world.history.began(
            self.name, app=join.application, version=join.version, execution=join.execution
        )
        self.take_identity(ProducerIdentity(answer.producer_id, answer.producer_epoch))
        self.state.begin()
        self._append_next(self.rng.randint(1, self.transactional.draw.appends_max))

    def _append_next(self, left: int) -> None:
        if self.state.phase is not Phase.OPEN:
            self._fail(self.state.cause)
            return
        left -= self.append_one(self._transaction)
        step_ms = self.transactional.draw.step_ms * (0.2 + 1.6 * self.rng.random())
        self.after(step_ms, "append", partial(self._append_next, left) if left else self._flush)

    def _flush(self) -> None:
        if self.state.phase is not Phase.OPEN:
            self._fail(self.state.cause)
        elif self.open_batches:
            self.look_later(self._flush)
        else:
            self._reports(
                Attempt(self._transaction, self.machine.identity.producer_id if self.machine.identity else -1)
            )
            self.quit("its work is done")

    def _fail(self, error: object) -> None:
        self._reports(error if isinstance(error, AlreadyCommittedError) else None)
        self.quit(f"failed: {error}")


class SimDriver(TransactionalClient):
    """One execution: version after version. With `single_use` it has one version, and the next driver another name."""

    def __init__(
        self,
        world: World,
        transactional: Transactional,
        application: str,
        execution: str,
        version: int | None,
        replace: Callable[[int | None], None],
        *,
        single_use: bool = False,
    ) -> None:
        super().__init__(world, transactional, f"{application}/{execution}", application)
        self.execution = execution
        self.version = version  # None: it asks which one was committed last
        self.busy = False
        self.begun = False
        self._replace = replace
        self._single_use = single_use
        self._tasks: list[_Task] = []
        self._committing = False
        self._names = 0

    def start(self) -> None:
        """Find out which version is next."""
        self.want_metadata()
        if self.version is None:
            self.ask(DescribeTransactionsRequest([self.transactional_id]), self._described)
        else:
            self._later(self._run_version)

    def replaced(self) -> None:
        """Begin the next execution. It remembers a version, as Spark's checkpoint does, or asks for it.

        The version that it remembers may be committed already.
        """
        replace, self._replace = self._replace, _nobody
        remembered = None if self.version is None else max(0, self.version - self.rng.randint(0, 1))
        replace(remembered if self.rng.random() < 0.6 else None)

    def _later(self, action: Callable[[], None]) -> None:
        self.after(self.transactional.draw.step_ms * (0.2 + 1.6 * self.rng.random()), "go on", action)

    def _described(self, answer: Answer) -> None:
        if not isinstance(answer, DescribeTransactionsResponse):
            self._restart(f"which version is committed is not known: {answer}")
            return
        mine = [
            transaction for transaction in answer.transactions if transaction.transactional_id == self.transactional_id
        ]
        self.version = mine[0].last_committed + 1 if mine else 0
        self._run_version()

    def _restart(self, reason: str) -> None:
        self.quit(reason)
        self.replaced()

    def _run_version(self) -> None:
        if self.stopped:
            self.busy = False
            return
        self.busy = self.begun = True
        self._committing = False
        self._tasks = [_Task() for _ in range(self.rng.randint(1, TASKS_MAX))]
        for task in self._tasks:
            for _ in range(1 + (self.rng.random() < SECOND_ATTEMPT_SHARE)):
                self._attempt(task)

    def _attempt(self, task: _Task) -> None:
        self._names += 1
        task.attempts += 1
        task.running += 1
        timeout_ms = self.transactional.draw.timeout_ms
        join = JoinTransactionRequest(
            self.transactional_id, self.version or 0, self.execution, timeout_ms, self._single_use
        )
        report = partial(self._reported, self.version, task)
        name = f"{self.name}/{self._names}"
        self.transactional.start_client(SimTask(self.world, self.transactional, name, join, self, report))

    def _reported(self, version: int | None, task: _Task, attempt: Attempt | AlreadyCommittedError | None) -> None:
        """An attempt has ended. The driver ignores attempts of earlier versions."""
        if version != self.version:
            return
        task.running -= 1
        if isinstance(attempt, AlreadyCommittedError):
            if not self._committing:
                self._next_version()  # another execution has done the work
            return
        if attempt is not None:
            task.done.append(attempt)
        elif not task.done and not task.running and not self._committing:
            if task.attempts < ATTEMPTS_MAX:
                self._attempt(task)
            else:
                self._give_up()
            return
        if not self._committing and all(each_task.done for each_task in self._tasks):
            self._committing = True
            if self.rng.random() < self.transactional.draw.idle_share:
                self.after(self.transactional.draw.timeout_ms * 1.5 * self.rng.random(), "was idle", self._commit)
            else:
                self._commit()

    def _give_up(self) -> None:
        self._committing = True
        request = AbortTransactionRequest(self.transactional_id, self.version or 0, self.execution, self._single_use)
        self.ask(request, self._aborted)

    def _aborted(self, answer: Answer) -> None:
        self._restart(f"aborted its version: {answer}")

    def _commit(self) -> None:
        winners = [self.rng.choice(task.done) for task in self._tasks]
        losers = [attempt for task in self._tasks for attempt in task.done if attempt not in winners]
        self._ask_commit(winners, partial(self._committed, winners, losers))

    def _ask_commit(self, winners: list[Attempt], answered: Callable[[int, Answer], None]) -> None:
        version = self.version or 0
        numbers = [attempt.transaction for attempt in winners]
        commit = self.world.history.committing(numbers, app=self.transactional_id, version=version)
        producer_ids = sorted(attempt.producer_id for attempt in winners)
        request = CommitTransactionRequest(
            self.transactional_id, version, self.execution, producer_ids, self._single_use
        )
        self.ask(request, partial(answered, commit))

    def _committed(self, winners: list[Attempt], losers: list[Attempt], commit: int, answer: Answer) -> None:
        history = self.world.history
        if isinstance(answer, EmptyResponse):
            self.world.trace.count("versions committed")
            history.committed(commit)
            for loser in losers:
                history.aborted(loser.transaction)
            if self.rng.random() < self.transactional.draw.repeat_share:
                self._ask_commit(winners, self._repeated)
            else:
                self._next_version()
        elif isinstance(answer, AlreadyCommittedError):
            history.commit_refused(commit, answer, already_committed=True)
            self._next_version()
        elif isinstance(answer, SparkBrokerError):
            history.commit_unknown(commit, answer)
            self._restart(f"what came of its commit is not known: {answer}")

    def _repeated(self, commit: int, answer: Answer) -> None:
        """The answer to a commit that was requested again after it had happened."""
        if isinstance(answer, AlreadyCommittedError):
            self.world.history.commit_refused(commit, answer, already_committed=True)
            self._next_version()
            return
        if isinstance(answer, EmptyResponse):
            self.world.history.committed(commit)
        elif isinstance(answer, SparkBrokerError):
            self.world.history.commit_unknown(commit, answer)
        self._restart(f"its second commit was answered with {answer}")

    def _next_version(self) -> None:
        if self._single_use:
            self._restart("its only version has ended")
            return
        self.version = (self.version or 0) + 1
        if not self.stopped and self.rng.random() < self.transactional.draw.restart_share:
            self._restart("the application is stopped, and begins again")
        else:
            self._later(self._run_version)


def _nobody(version: int | None) -> None:
    """The driver has been replaced already."""
    del version


def _ignored(attempt: Attempt | AlreadyCommittedError | None) -> None:
    """The attempt has been reported already."""
    del attempt
