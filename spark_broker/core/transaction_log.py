"""What a log says of a transactional id: the records of its changes, and the state from the last value of each key.

A change is decided, its records are appended, and then it is applied. Loading does without the changes: a compacted log
shows no moment as it was. The records of an id:

    key                          value                          written                       tombstone
    ------------------------------------------------------------------------------------------------------------------
    ProducerKey, ApplicationKey  the head: all but the rest     when it changes               the id is forgotten
    ExecutionsKey                remembered executions          an execution begins           the id is forgotten
    WinnersKey                   who is committed               the decision, with winners    the transaction has ended
    WriterKey                    that it has joined             JoinTransaction               the transaction has ended
    PartitionKey                 that it was added              AddPartitionToTransaction     the transaction has ended

A long transaction has more tombstones than one append may have. Those that come first leave a decided transaction with
fewer markers to be written, which are written already. The head that says EMPTY is in the last append.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy

from spark_broker.core.transaction_changes import (
    AnyChange,
    AnyRecord,
    Ended,
    Forgotten,
    OldRecord,
    PartitionAdded,
    Settled,
    WriterJoined,
)
from spark_broker.core.transaction_records import (
    AnyKey,
    AnyValue,
    ApplicationKey,
    ApplicationValue,
    ExecutionsKey,
    ExecutionsValue,
    PartitionKey,
    PartitionValue,
    ProducerKey,
    ProducerValue,
    TransactionRecord,
    WinnersKey,
    WinnersValue,
    WriterKey,
    WriterValue,
)
from spark_broker.core.transaction_state import (
    JOIN_EPOCH,
    NOBODY,
    ProducerIdentity,
    TransactionMetadata,
    TransactionOutcome,
    TransactionState,
    Writer,
    apply_to,
)


class Loading:
    """What a log has said so far. Records may come in any order of their keys, each key's last value last."""

    def __init__(self) -> None:
        self._values: dict[str, dict[AnyKey, AnyValue]] = {}
        self._old: dict[str, TransactionMetadata] = {}  # what only records of an earlier version say
        self._old_ids: dict[str, None] = {}

    def replay(self, record: AnyRecord) -> None:
        """Take the next record."""
        if isinstance(record, OldRecord):
            self._replay_old(record)
            return
        key, value = record
        values = self._values.setdefault(key.transactional_id, {})
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value

    def _replay_old(self, record: OldRecord) -> None:
        transactional_id, change = record
        if change is None:
            self._old.pop(transactional_id, None)
        else:
            self._old_ids[transactional_id] = None
            apply_to(self._old, transactional_id, change)

    def transactions(self) -> dict[str, TransactionMetadata]:
        """The state that the log says.

        An id that was not stored anew to the end is still what the records of the earlier version say.
        """
        loaded = {transactional_id: transaction_of(transactional_id, v) for transactional_id, v in self._values.items()}
        return {id_: transaction for id_, transaction in loaded.items() if transaction is not None} | self._old

    def stored_anew(self, transactions: Mapping[str, TransactionMetadata]) -> Iterator[AnyRecord]:
        """Where the log has records of an earlier version: what is to be appended, so that everything before it may go.

        That is the whole state of every id, also of those that were stored anew before. Each id ends with the record
        that says that its old ones count no more.
        """
        if not self._old_ids:
            return
        for transactional_id, transaction in transactions.items():
            yield from whole(transaction)
            if transactional_id in self._old_ids:
                yield OldRecord(transactional_id, None)
        for transactional_id in self._old_ids:
            if transactional_id not in transactions:
                yield OldRecord(transactional_id, None)


def records_of(transaction: TransactionMetadata, changes: Iterable[AnyChange]) -> list[TransactionRecord]:
    """The records of the next changes, which are not applied yet.

    They leave out the head where it stays the same: most records of a transaction are of one writer or partition.
    """
    after = copy(transaction)
    records: list[TransactionRecord] = []
    gone: list[TransactionRecord] = []
    for change in changes:
        records += _of_writers(transaction, change)
        if isinstance(change, Forgotten):
            gone += [TransactionRecord(record.key, None) for record in whole(after)]
        after.advance(change)
    if gone:
        return records + gone
    if after.executions != transaction.executions:
        records.append(_executions(after))
    if after.winners and after.winners != transaction.winners:
        records.append(_winners(after))
    head = _head(after)
    return records if head == _head(transaction) else [*records, head]


def _of_writers(transaction: TransactionMetadata, change: AnyChange) -> list[TransactionRecord]:
    """The records of one change that concern the open transaction's keys, and not the id itself."""
    match change:
        case WriterJoined(producer_id):
            return [TransactionRecord(WriterKey(transaction.transactional_id, producer_id), WriterValue())]
        case PartitionAdded(producer_id, topic_id, partition):
            key = PartitionKey(transaction.transactional_id, producer_id, topic_id, partition)
            return [TransactionRecord(key, PartitionValue())]
        case Settled(keys):
            return [TransactionRecord(key, None) for key in keys]
        case Ended():
            winners = [WinnersKey(transaction.transactional_id)] if transaction.winners else []
            return [TransactionRecord(key, None) for key in (*transaction.open_keys(), *winners)]
        case _:
            return []


def whole(transaction: TransactionMetadata) -> Iterator[TransactionRecord]:
    """Records that say all of the state."""
    if transaction.executions:
        yield _executions(transaction)
    for key in transaction.open_keys():
        yield TransactionRecord(key, WriterValue() if isinstance(key, WriterKey) else PartitionValue())
    if transaction.winners:
        yield _winners(transaction)
    yield _head(transaction)


def _executions(transaction: TransactionMetadata) -> TransactionRecord:
    return TransactionRecord(ExecutionsKey(transaction.transactional_id), ExecutionsValue(transaction.executions))


def _winners(transaction: TransactionMetadata) -> TransactionRecord:
    winners = WinnersValue(tuple(sorted(transaction.winners)))
    return TransactionRecord(WinnersKey(transaction.transactional_id), winners)


def _head(transaction: TransactionMetadata) -> TransactionRecord:
    state, timeout_ms = transaction.state.value, transaction.timeout_ms
    if not transaction.grouped:
        ended = transaction.last_outcome or TransactionOutcome(NOBODY, False)
        identities = (*transaction.identity, *transaction.next_identity, *ended.identity)
        producer = ProducerValue(state, timeout_ms, *identities, ended.committed)
        return TransactionRecord(ProducerKey(transaction.transactional_id), producer)
    application = ApplicationValue(
        state,
        timeout_ms,
        transaction.version,
        transaction.execution,
        transaction.last_committed,
        transaction.closed,
        transaction.single_use,
    )
    return TransactionRecord(ApplicationKey(transaction.transactional_id), application)


def transaction_of(transactional_id: str, values: Mapping[AnyKey, AnyValue]) -> TransactionMetadata | None:
    """The state that the last values of the id's keys say, in any order. None: the id is not there.

    A log that lost records in an unclean election may say of a writer what it does not say of the id. That counts for
    nothing.
    """
    transaction: TransactionMetadata | None = None
    for value in values.values():
        if isinstance(value, ProducerValue):
            transaction = _producer(transactional_id, value)
        elif isinstance(value, ApplicationValue):
            transaction = _application(transactional_id, value)
    if transaction is None:
        return None
    _add_rest(transaction, values)
    transaction.check()
    return transaction


def _producer(transactional_id: str, value: ProducerValue) -> TransactionMetadata:
    transaction = TransactionMetadata(transactional_id, False, TransactionState(value.state), value.timeout_ms)
    transaction.identity = ProducerIdentity(value.producer_id, value.producer_epoch)
    transaction.next_identity = ProducerIdentity(value.next_producer_id, value.next_producer_epoch)
    ended = ProducerIdentity(value.ended_producer_id, value.ended_producer_epoch)
    if ended != NOBODY:
        transaction.last_outcome = TransactionOutcome(ended, value.ended_committed)
    return transaction


def _application(transactional_id: str, value: ApplicationValue) -> TransactionMetadata:
    transaction = TransactionMetadata(transactional_id, True, TransactionState(value.state), value.timeout_ms)
    transaction.version, transaction.execution = value.version, value.execution
    transaction.last_committed, transaction.closed = value.last_committed, value.closed
    transaction.single_use = value.single_use
    return transaction


def _add_rest(transaction: TransactionMetadata, values: Mapping[AnyKey, AnyValue]) -> None:
    is_open = transaction.state is not TransactionState.EMPTY
    for key, value in values.items():
        match key, value:
            case ExecutionsKey(), ExecutionsValue(executions):
                transaction.executions = executions
            case WinnersKey(), WinnersValue(winners) if transaction.committing:
                transaction.winners = frozenset(winners)
            case WriterKey(_, producer_id), _ if is_open:
                _writer(transaction, producer_id)
            case PartitionKey(_, producer_id, topic_id, partition), _ if is_open:
                if transaction.grouped or producer_id == transaction.identity.producer_id:
                    _writer(transaction, producer_id).partitions[topic_id, partition] = None
            case _:
                pass  # The head is known. What is of no open transaction counts for nothing.


def _writer(transaction: TransactionMetadata, producer_id: int) -> Writer:
    epoch = JOIN_EPOCH if transaction.grouped else transaction.identity.producer_epoch
    return transaction.writers.setdefault(producer_id, Writer(epoch))
