"""Simulated producers with a transactional id: one transaction after the other, each committed or aborted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from spark_broker.client.transaction_machine import Phase
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import EndTransactionRequest, InitProducerIdResponse, InitTransactionsRequest
from spark_broker.testing.simulation.transactional_client import Answer, TransactionalClient

if TYPE_CHECKING:
    from spark_broker.testing.simulation.transactional import Transactional
    from spark_broker.testing.simulation.world import World


Replace = Callable[[], None]


class SimTransactionalProducer(TransactionalClient):
    """One instance of a transactional id, as `client.transactions`. `busy`: it has a transaction that is not ended.

    `begun`: it has, or had, a transaction."""

    def __init__(
        self, world: World, transactional: Transactional, name: str, transactional_id: str, replace: Replace
    ) -> None:
        super().__init__(world, transactional, name, transactional_id)
        self._replace = replace
        self.busy = False
        self.begun = False
        self._transaction = -1
        self._commit = -1

    def start(self) -> None:
        """Take the transactional id over, then work."""
        self.want_metadata()
        self.ask(InitTransactionsRequest(self.transactional_id, self.transactional.draw.timeout_ms), self._initialized)

    def replaced(self) -> None:
        replace, self._replace = self._replace, _nobody
        replace()

    def _give_way(self, error: SparkBrokerError | None) -> None:
        """Quit, and restart as another instance (in production: another Producer)."""
        self.quit(str(error))
        self.replaced()

    def _initialized(self, answer: Answer) -> None:
        if isinstance(answer, InitProducerIdResponse):
            self._ready(answer)
        elif isinstance(answer, SparkBrokerError):
            self._give_way(answer)

    def _ready(self, identity: InitProducerIdResponse) -> None:
        self.busy = False
        self.take_identity(ProducerIdentity(identity.producer_id, identity.producer_epoch))
        self._pause_then("begin", self._begin)

    def _pause_then(self, label: str, action: Callable[[], None]) -> None:
        self.after(self.transactional.draw.step_ms * (0.2 + 1.6 * self.rng.random()), label, action)

    def _begin(self) -> None:
        if self.stopped:
            return
        self.state.begin()
        self.busy = self.begun = True
        self._transaction = self.world.history.began(self.name, transactional_id=self.transactional_id)
        self.world.trace.count("transactions")
        self._append_next(self.rng.randint(1, self.transactional.draw.appends_max))

    def _append_next(self, left: int) -> None:
        if self._gives_up():
            return
        left -= self.append_one(self._transaction)
        if left:
            self._pause_then("append", partial(self._append_next, left))
        else:
            self._pause_then("end", self._decide)

    def _gives_up(self) -> bool:
        """Whether an append has failed. Then abort the transaction, or, if that is impossible, give way to another."""
        if self.state.phase is Phase.ABORTABLE:
            self._abort()
        elif self.state.phase is Phase.FAILED:
            self._give_way(self.state.cause)
        else:
            return False
        return True

    def _decide(self) -> None:
        if self._gives_up():
            return
        draw, chance = self.transactional.draw, self.rng.random()
        if chance < draw.abort_share:
            self._abort()
        elif chance < draw.abort_share + draw.idle_share and not self.stopped:
            self.after(draw.timeout_ms * (0.5 + self.rng.random()), "was idle", self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        """A commit is asked for only when every append is acknowledged."""
        if self._gives_up():
            return
        if self.state.phase is Phase.OPEN:
            self.state.close(committing=True)
        if self.open_batches:
            self.look_later(self._flush)
        else:
            self.state.end()
            self._commit = self.world.history.committing([self._transaction])
            self.ask(self._end_request(committed=True), self._committed)

    def _end_request(self, *, committed: bool) -> EndTransactionRequest:
        identity = self.machine.identity or ProducerIdentity(-1, -1)
        return EndTransactionRequest(self.transactional_id, identity.producer_id, identity.producer_epoch, committed)

    def _committed(self, answer: Answer) -> None:
        history = self.world.history
        if isinstance(answer, InitProducerIdResponse):
            history.committed(self._commit)
            self.world.trace.count("transactions committed")
            if self.rng.random() < self.transactional.draw.repeat_share:
                # For the coordinator this is as if its answer was lost.
                self.ask(self._end_request(committed=True), partial(self._repeated, answer))
            else:
                self._ready(answer)
        elif isinstance(answer, SparkBrokerError):
            self.state.refused(answer)
            if self.state.phase is Phase.ABORTABLE:
                history.commit_refused(self._commit, answer)
                self._abort()
            else:
                history.commit_unknown(self._commit, answer)
                self._give_way(answer)

    def _repeated(self, first: InitProducerIdResponse, answer: Answer) -> None:
        """The answer to the repeated request: the same one, unless another instance has taken over."""
        if isinstance(answer, InitProducerIdResponse):
            self.transactional.rules.repeated(self, first, answer)
            self._ready(first)
        elif isinstance(answer, SparkBrokerError):
            self._give_way(answer)

    def _abort(self) -> None:
        self.state.close(committing=False)
        self.discard()
        self.state.end()
        self.ask(self._end_request(committed=False), self._aborted)

    def _aborted(self, answer: Answer) -> None:
        if isinstance(answer, InitProducerIdResponse):
            self.world.history.aborted(self._transaction)
            self.world.trace.count("transactions aborted")
            self._ready(answer)
        elif isinstance(answer, SparkBrokerError):
            self.state.refused(answer)
            self._give_way(answer)


def _nobody() -> None:
    """The instance has been replaced already."""
