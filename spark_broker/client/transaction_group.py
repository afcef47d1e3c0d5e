"""Transactions with many writers: every task of a job joins one, and the driver names those whose records count.

    group = TransactionGroup(servers, "daily-load", version=7, execution=run_id)      # anywhere: a plain value
    with group.join() as writer:                                                      # in each task attempt
        writer.append("flights", batch)
        writer.flush()
        result = writer.producer_id                                                   # back to the driver
    group.commit(winners)                                                             # there, once all are in

An application's versions are committed one after the other, each at most once. A writer that is no winner (an attempt
that failed, was killed, or was run twice) needs no care: its records are aborted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from spark_broker.client import given
from spark_broker.client.coordinator import CoordinatorClient
from spark_broker.client.metadata import ClusterMetadata
from spark_broker.client.partition_queue import WRITE_AGAIN
from spark_broker.client.producer import Producer
from spark_broker.client.retry import Deadline
from spark_broker.client.settings import client_config
from spark_broker.client.transactions import TransactionManager, check_name
from spark_broker.config import ProducerConfig
from spark_broker.core.transaction_state import ProducerIdentity
from spark_broker.errors import (
    AlreadyCommittedError,
    InconsistentTopicIdError,
    InvalidConfigError,
    InvalidTxnStateError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.model import TRANSACTION_STATE_TOPIC
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    CallRequest,
    CallResponse,
    CommitTransactionRequest,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EmptyResponse,
    InitProducerIdResponse,
    JoinTransactionRequest,
)
from spark_broker.visible import shown

TIMEOUT_MS = 900_000
"""An attempt may be silent for this long before its transaction is aborted. Each join and each append restarts the
time.
"""

NO_VERSION = -1

A = TypeVar("A", bound=CallResponse)


@dataclass(frozen=True)
class TransactionGroup:
    """One execution of one version of an application. A value: it holds no connection and may be sent anywhere.

    `version` counts up from 0, and `execution` names one run (Spark's run id): a newer one aborts what older ones left
    open, and fences them. `config` has settings of a producer by dotted name. `single_use`: the application has this
    version only, and the cluster forgets its name `transaction.max.timeout.ms` after the end.
    """

    bootstrap_servers: str
    application: str
    version: int
    execution: str
    timeout_ms: int = TIMEOUT_MS
    config: Mapping[str, object] = field(default_factory=dict)
    single_use: bool = False

    def __post_init__(self) -> None:
        taken = {
            "application": given.text(self.application, "application"),
            "version": given.whole_number(self.version, "version", given.ANY_BITS),
            "execution": given.text(self.execution, "execution"),
            "timeout_ms": given.whole_number(self.timeout_ms, "timeout_ms", given.INT32_BITS),
            "single_use": given.flag(self.single_use, "single_use"),
        }
        for name, value in taken.items():
            object.__setattr__(self, name, value)  # The class is frozen.
        check_name("application", self.application)
        check_name("execution", self.execution)
        if not 0 <= self.version < 2**63:
            raise InvalidConfigError(f"version {shown(self.version)} is not from 0 to 2**63 - 1")
        client_config(ProducerConfig, self.bootstrap_servers, self.config, {})

    def join(self) -> JoinedProducer:
        """A producer that writes for this version; flush and close it before its `producer_id` is reported.

        Raises AlreadyCommittedError (the version's records are there: skip the work), ProducerFencedError when a newer
        execution has begun, and InvalidTxnStateError once the version was committed or aborted by this execution.
        """
        return JoinedProducer(self)

    def commit(self, winners: Iterable[int]) -> bool:
        """Commit what these producers appended, and abort every other writer. Returns once every partition shows it.

        False: the version was committed before, by this call's own first attempt or by another execution. Its records
        are there once. Raises InvalidTxnStateError when a winner has not joined or the transaction was aborted. Raises
        InconsistentTopicIdError when a topic that a winner wrote to was deleted: nothing is committed, and only `abort`
        is left. Raises ProducerFencedError. Raises RequestTimedOutError when the outcome is not known; call it again
        with the same winners.
        """
        ids = given.items(winners, "winners", "producer ids")
        producer_ids = sorted({given.whole_number(winner, "a winner") for winner in ids})
        request = CommitTransactionRequest(
            self.application, self.version, self.execution, producer_ids, self.single_use
        )
        try:
            self._ask(request, EmptyResponse)
        except AlreadyCommittedError:
            return False
        except InconsistentTopicIdError as error:
            raise InconsistentTopicIdError(error.message, hint=WRITE_AGAIN) from None
        return True

    def abort(self) -> None:
        """Abort what this execution has open; later joins of it are refused."""
        request = AbortTransactionRequest(self.application, self.version, self.execution, self.single_use)
        self._ask(request, EmptyResponse)

    def last_committed(self) -> int | None:
        """The application's last committed version, by any execution; None: there is none."""
        answer = self._ask(DescribeTransactionsRequest([self.application]), DescribeTransactionsResponse)
        versions = {state.transactional_id: state.last_committed for state in answer.transactions}
        version = versions.get(self.application, NO_VERSION)
        return None if version == NO_VERSION else version

    def _ask(self, request: CallRequest, answer: type[A]) -> A:
        config = client_config(ProducerConfig, self.bootstrap_servers, self.config, {})
        metadata = ClusterMetadata.connect(config)
        deadline = Deadline.after_ms(config.delivery_timeout_ms)
        try:
            coordinator = CoordinatorClient(metadata, TRANSACTION_STATE_TOPIC, self.application)
            return coordinator.ask(request, answer, deadline, patient=False)
        except SparkBrokerError as error:
            if not error.retriable:
                raise
            raise RequestTimedOutError(
                f"what came of {type(request).__name__} is not known: no coordinator said so within "
                f"{config.delivery_timeout_ms} ms ({error.name}: {error.message}); ask again"
            ) from error
        finally:
            metadata.close()


class JoinedProducer(Producer):
    """A producer of one version: it appends, and its driver commits or aborts. A context manager."""

    _ENDS_TRANSACTIONS = False

    def __init__(self, group: TransactionGroup) -> None:
        group = given.instance(group, TransactionGroup, "the group")
        super().__init__(group.bootstrap_servers, transactional_id=group.application, config=group.config)
        try:
            self.producer_id = self._join(group)
        except BaseException:
            super().close(0)
            raise

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything is acknowledged.

        Raises TransactionAbortableError when an append has failed (ProducerFencedError after a newer execution has
        begun). Then this attempt must not be a winner.
        """
        super().flush(timeout)
        self._check_appends()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. Without an exception it raises what `flush` raises."""
        try:
            if kind is None:
                self.flush()
        finally:
            super().__exit__(kind, error, trace)

    def _check_appends(self) -> None:
        if self._state is not None:
            self._state.check()

    def _transactional(self) -> TransactionManager:
        self._check_open()
        raise InvalidTxnStateError("the writer has joined a transaction that its driver commits or aborts")

    def _join(self, group: TransactionGroup) -> int:
        request = JoinTransactionRequest(
            group.application, group.version, group.execution, group.timeout_ms, group.single_use
        )
        coordinator = CoordinatorClient(self._metadata, TRANSACTION_STATE_TOPIC, group.application)
        deadline = Deadline.after_ms(self._config.max_block_ms)
        # A join too many is only one more loser, so a frozen coordinator need not be waited for.
        answer = coordinator.ask(request, InitProducerIdResponse, deadline, patient=False)
        self._sender.take_identity(ProducerIdentity(answer.producer_id, answer.producer_epoch))
        if self._state is not None:
            self._state.identified()
            self._state.begin()
        return answer.producer_id
