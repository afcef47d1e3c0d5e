"""A client that appends in transactions and records the outcome of each."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count

from spark_broker.client.producer import Producer
from spark_broker.errors import SparkBrokerError, TransactionAbortableError
from spark_broker.model import TopicPartition
from spark_broker.testing.client_thread import ClientThread
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.workload import keys_of, record_outcome, records_of


class _ChangedMindError(Exception):
    """Raised inside a transaction to abort it."""


class TransactionalWriter(ClientThread):
    """Transactions over several partitions, one after the other; a share of them is aborted on purpose.

    `keys`: how many keys the records of each topic have, for topics that are compacted; those of others have none.

    After an error it goes on with another producer of the same transactional id, which fences the one before.
    """

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        partitions: Sequence[TopicPartition],
        *,
        name: str,
        seed: int,
        rows: int = 5,
        pause_s: float = 0.05,
        abort_share: float = 0.2,
        keys: Mapping[str, int] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(name, pause_s)
        self._recorder = recorder
        self._partitions = tuple(partitions)
        self._rows = rows
        self._abort_share = abort_share
        self._keys = keys or {}
        self._random = random.Random(seed)
        self._numbers = count()
        self._producer: Producer | None = None
        self._new_producer = partial(Producer, bootstrap_servers, config=settings, transactional_id=name)

    def step(self) -> None:
        if self._producer is None:
            self._producer = self._new_producer()
        producer = self._producer
        transaction = self._recorder.began(self.name, transactional_id=self.name)
        commit: int | None = None
        try:
            with producer.transaction():
                self._append(producer, transaction)
                if self._random.random() < self._abort_share:
                    raise _ChangedMindError
                commit = self._recorder.committing([transaction])
        except _ChangedMindError as error:
            # `transaction()` notes on the error that the abort is not known to have happened.
            if not getattr(error, "__notes__", None):
                self._recorder.aborted(transaction)
        except TransactionAbortableError as error:
            if commit is not None:
                self._recorder.commit_refused(commit, error)
            raise
        except SparkBrokerError as error:
            if commit is not None:
                self._recorder.commit_unknown(commit, error)
            raise
        else:
            if commit is not None:
                self._recorder.committed(commit)

    def renew(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(SparkBrokerError):
                producer.close(5.0)

    def _append(self, producer: Producer, transaction: int) -> None:
        chosen = self._random.sample(self._partitions, self._random.randint(1, len(self._partitions)))
        for partition in chosen:
            number = next(self._numbers)
            values = [b"%s-%d-%d" % (self.name.encode(), number, row) for row in range(self._rows)]
            keys = keys_of(values, self._keys.get(partition.topic, 0))
            operation = self._recorder.invoked(self.name, partition, values, transaction, keys=keys)
            future = producer.append(partition.topic, records_of(values, keys), partition=partition.partition)
            future.add_done_callback(partial(record_outcome, self._recorder, operation))
