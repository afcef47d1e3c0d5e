"""Consume, transform, produce: copies a partition into another topic in transactions that carry the group's offsets.

Each record must have exactly one committed copy, whatever happens: `check_copies` checks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count

from spark_broker.client.consumer import Consumer
from spark_broker.client.producer import Producer
from spark_broker.errors import SparkBrokerError, TransactionAbortableError
from spark_broker.model import TopicPartition
from spark_broker.testing.client_thread import ClientThread
from spark_broker.testing.history import Run, rows_of
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.workload import record_outcome, record_poll, records_of

MARK = b"-of-"


class Copier(ClientThread):
    """Copies `source` to the partition `target`, a poll's batches in a transaction.

    After an error it starts again at the group's committed offset. A copy's value names the transaction that made it
    and the original's offset, which keeps values unique. The original's value follows after `-of-`.
    """

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        source: TopicPartition,
        target: TopicPartition,
        *,
        group: str,
        name: str = "copier",
        settings: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(name, pause_s=0.05)
        self._recorder = recorder
        self._bootstrap_servers = bootstrap_servers
        self._source, self._target = source, target
        self._group = group
        self._lives = count()
        self._life = name
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._new_producer = partial(Producer, bootstrap_servers, config=settings, transactional_id=name)

    def step(self) -> None:
        # The producer first: it ends the id's open transaction, which could still change the committed offset.
        if self._producer is None:
            self._producer = self._new_producer()
            self._producer.init_transactions()
        consumer = self._consumer or self._join()
        runs = record_poll(consumer, self._recorder, self._life)
        if not runs:
            return
        transaction = self._recorder.began(self.name, transactional_id=self.name)
        commit: int | None = None
        try:
            with self._producer.transaction():
                self._copy(self._producer, transaction, runs)
                reached = runs[-1].next_offset
                self._producer.send_offsets_to_transaction({self._source: reached}, self._group)
                self._recorder.offsets_committed(self._group, self._source, reached, transaction)
                commit = self._recorder.committing([transaction])
        except TransactionAbortableError as error:
            if commit is not None:
                self._recorder.commit_refused(commit, error)
            raise
        except SparkBrokerError as error:
            if commit is not None:
                self._recorder.commit_unknown(commit, error)
            raise
        self._recorder.committed(commit)

    def renew(self) -> None:
        for client in (self._producer, self._consumer):
            if client is not None:
                with suppress(SparkBrokerError):
                    client.close(5.0)
        self._producer = self._consumer = None

    def _join(self) -> Consumer:
        self._life = f"{self.name}-{next(self._lives)}"
        consumer = Consumer(
            self._bootstrap_servers, group_id=self._group, auto_offset_reset="earliest", enable_auto_commit=False
        )
        self._consumer = consumer
        self._recorder.opened(self._life, group=self._group)
        stored = consumer.committed(self._source)
        committed = None if stored is None else stored.offset
        self._recorder.offsets_fetched(self._group, self._source, committed)
        self._recorder.positioned(self._life, self._source, committed or 0)
        consumer.assign([self._source])
        return consumer

    def _copy(self, producer: Producer, transaction: int, runs: Sequence[Run]) -> None:
        name = self.name.encode()
        # The offset makes copies differ even where a value is, wrongly, there twice.
        copies = [b"%s-%d-%d%s%s" % (name, transaction, row.offset, MARK, row.value) for row in rows_of(runs)]
        operation = self._recorder.invoked(self.name, self._target, copies, transaction)
        future = producer.append(self._target.topic, records_of(copies), partition=self._target.partition)
        future.add_done_callback(partial(record_outcome, self._recorder, operation))


def check_copies(originals: Sequence[bytes], copies: Sequence[bytes]) -> Iterator[str]:
    """What is wrong with a partition's copies. In order, they must be the originals, each once, up to some point."""
    copied = [copy.partition(MARK)[2] for copy in copies]
    if len(copied) > len(originals):
        yield f"{len(copied)} copies of {len(originals)} records"
    for at, (due, copied_value) in enumerate(zip(originals, copied, strict=False)):
        if due != copied_value:
            yield f"copy {at} is of {copied_value!r}, where {due!r} is due"
            return
