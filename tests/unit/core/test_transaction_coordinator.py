"""The transaction coordinator as in Kafka: a transactional id has one producer at a time."""

from __future__ import annotations

import pytest

from spark_broker.core.transaction_changes import Initialized, decode_any
from spark_broker.core.transaction_coordinator import ProducerIdPool
from spark_broker.core.transaction_decision import added
from spark_broker.core.transaction_log import records_of
from spark_broker.core.transaction_records import encode_record
from spark_broker.core.transaction_state import TransactionMetadata, TransactionState
from spark_broker.errors import (
    ConcurrentTransactionsError,
    CoordinatorNotAvailableError,
    CorruptMessageError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidRequestError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    NotLeaderOrFollowerError,
    RequestTimedOutError,
    SparkBrokerError,
)
from spark_broker.protocol.messages import (
    AddPartitionToTransactionRequest,
    AddPartitionToTransactionResponse,
    EndTransactionRequest,
    InitProducerIdResponse,
    InitTransactionsRequest,
    JoinTransactionRequest,
)
from tests.unit.core.transaction_driver import TIMEOUT_MAX_MS, Answer, Driver, Log

ID = "orders"
TOPIC = "ab" * 16
TIMEOUT_MS = 60_000


def init(driver: Driver, timeout_ms: int = TIMEOUT_MS) -> InitProducerIdResponse:
    answer = driver.ask(InitTransactionsRequest(ID, timeout_ms))
    assert isinstance(answer, InitProducerIdResponse), answer
    return answer


def add(driver: Driver, who: InitProducerIdResponse, partition: int = 0) -> Answer:
    return driver.ask(AddPartitionToTransactionRequest(ID, who.producer_id, who.producer_epoch, TOPIC, partition))


def ending(who: InitProducerIdResponse, committed: bool) -> EndTransactionRequest:
    return EndTransactionRequest(ID, who.producer_id, who.producer_epoch, committed)


def end(driver: Driver, who: InitProducerIdResponse, *, committed: bool = True) -> Answer:
    return driver.ask(ending(who, committed))


def next_epoch(who: InitProducerIdResponse, by: int = 1) -> InitProducerIdResponse:
    return InitProducerIdResponse(who.producer_id, who.producer_epoch + by)


def state(driver: Driver) -> TransactionState:
    return driver.shard.transactions[ID].state


@pytest.mark.parametrize("committed", [True, False])
def test_the_end_of_a_transaction_without_appends_raises_the_epoch(committed: bool) -> None:
    """Known bug 24: a batch that is still on its way must not open the next transaction."""
    driver = Driver()
    who = init(driver)
    assert end(driver, who, committed=committed) == next_epoch(who)
    assert isinstance(add(driver, who), InvalidProducerEpochError)
    assert state(driver) is TransactionState.EMPTY


@pytest.mark.parametrize("committed", [True, False])
def test_a_repeated_end_gets_the_same_answer(committed: bool) -> None:
    driver = Driver()
    who = init(driver)
    add(driver, who)
    first = end(driver, who, committed=committed)
    assert first == next_epoch(who)
    assert end(driver, who, committed=committed) == first
    assert isinstance(first, InitProducerIdResponse)
    add(driver, first)
    assert end(driver, who, committed=committed) == first, "also while the next transaction is under way"
    assert state(driver) is TransactionState.ONGOING


def test_a_repetition_joins_the_end_that_is_under_way() -> None:
    driver = Driver()
    who = init(driver)
    add(driver, who)
    driver.auto = False
    tokens = [driver.send(ending(who, True)) for _ in range(3)]
    other = driver.send(ending(who, False))
    assert not driver.answers.keys() & {*tokens, other}
    driver.settle()
    assert [driver.answers[token] for token in tokens] == [next_epoch(who)] * 3
    assert isinstance(driver.answers[other], InvalidTxnStateError), "it was committed"


def test_two_new_producers_at_once_get_two_epochs() -> None:
    driver = Driver()
    add(driver, init(driver))
    driver.auto = False
    tokens = [driver.send(InitTransactionsRequest(ID, TIMEOUT_MS)) for _ in range(2)]
    driver.settle()
    first, second = (driver.answers[token] for token in tokens)
    assert isinstance(first, InitProducerIdResponse)
    assert second == next_epoch(first)


def test_adding_again_renews_the_time_out_and_writes_nothing() -> None:
    driver = Driver()
    who = init(driver)
    answer = add(driver, who)
    assert isinstance(answer, AddPartitionToTransactionResponse)
    assert 0 < answer.repeat_after_ms < TIMEOUT_MS // 2, "the leader is told how often it must"
    length = len(driver.log.records)
    driver.tick(TIMEOUT_MS - 1)
    assert isinstance(add(driver, who), AddPartitionToTransactionResponse)
    assert len(driver.log.records) == length
    driver.tick(2 * TIMEOUT_MS - 2)
    assert state(driver) is TransactionState.ONGOING


def test_an_answer_that_rests_on_an_uncommitted_record_waits_for_it() -> None:
    driver = Driver()
    who = init(driver)
    driver.auto = False
    adding = AddPartitionToTransactionRequest(ID, who.producer_id, who.producer_epoch, TOPIC, 0)
    first, again = driver.send(adding), driver.send(adding)
    assert not driver.answers.keys() & {first, again}
    driver.commit()
    assert isinstance(driver.answers[again], AddPartitionToTransactionResponse)


def test_epochs_that_run_out_give_way_to_a_new_producer_id() -> None:
    initialized = Initialized(7, 2**15 - 3, TIMEOUT_MS)
    driver = Driver(
        Log([encode_record(record) for record in records_of(TransactionMetadata(ID, False), [initialized])])
    )
    who = InitProducerIdResponse(7, 2**15 - 3)
    add(driver, who)
    second = end(driver, who)
    assert second == InitProducerIdResponse(7, 2**15 - 2)
    driver.auto = False
    driver.send(AddPartitionToTransactionRequest(ID, 7, 2**15 - 2, TOPIC, 0))
    token = driver.send(ending(second, True))
    driver.commit()
    assert [target.producer_epoch for target in driver.targets] == [2**15 - 1], "markers fit into int16"
    driver.settle()
    third = driver.answers[token]
    assert isinstance(third, InitProducerIdResponse)
    assert third.producer_id != 7
    assert third.producer_epoch == 0
    driver.auto = True
    assert end(driver, second) == third
    assert isinstance(add(driver, second), InvalidProducerEpochError)


def test_without_producer_ids_a_request_changes_nothing_and_may_be_repeated() -> None:
    pool = ProducerIdPool()
    driver = Driver(ids=pool)
    answer = driver.ask(InitTransactionsRequest(ID, TIMEOUT_MS))
    assert isinstance(answer, CoordinatorNotAvailableError)
    assert answer.retriable
    assert not driver.log.records
    pool.refill(5, 2)
    assert len(pool) == 2
    assert init(driver) == InitProducerIdResponse(5, 0)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (InitTransactionsRequest("", 1), InvalidRequestError),
        (InitTransactionsRequest(ID, 0), InvalidTransactionTimeoutError),
        (InitTransactionsRequest(ID, TIMEOUT_MAX_MS + 1), InvalidTransactionTimeoutError),
        (AddPartitionToTransactionRequest("nobody", 1, 0, TOPIC, 0), InvalidProducerIdMappingError),
        (AddPartitionToTransactionRequest(ID, 1, 0, TOPIC, 0), InvalidProducerIdMappingError),
        (AddPartitionToTransactionRequest(ID, 1000, 1, TOPIC, 0), InvalidProducerEpochError),
        (EndTransactionRequest("nobody", 1, 0, True), InvalidProducerIdMappingError),
        (EndTransactionRequest(ID, 1000, 1, True), InvalidProducerEpochError),
        (JoinTransactionRequest(ID, 0, "run", 1000), InvalidTxnStateError),
    ],
)
def test_a_request_that_does_not_fit_is_refused_and_changes_nothing(
    request_: InitTransactionsRequest, error: type[SparkBrokerError]
) -> None:
    driver = Driver()
    assert init(driver) == InitProducerIdResponse(1000, 0)
    length = len(driver.log.records)
    assert type(driver.ask(request_)) is error
    assert len(driver.log.records) == length


def test_refused_appends_change_nothing_and_ends_are_appended_later() -> None:
    driver = Driver()
    who = init(driver)
    driver.refusing = True
    assert isinstance(add(driver, who), CoordinatorNotAvailableError)
    assert state(driver) is TransactionState.EMPTY
    driver.refusing = False
    add(driver, who)
    driver.auto = False
    token = driver.send(ending(who, True))
    driver.commit()
    driver.refusing = True
    driver.run(driver.shard.marked(driver.targets.popleft()))
    driver.tick(1)
    assert state(driver) is TransactionState.PREPARE_COMMIT
    driver.refusing = False
    driver.tick(2)
    driver.settle()
    assert driver.answers[token] == next_epoch(who)


def test_a_request_that_waits_too_long_is_told_so_and_its_end_goes_on() -> None:
    driver = Driver()
    who = init(driver)
    add(driver, who)
    driver.auto = False
    held = driver.send(
        AddPartitionToTransactionRequest(ID, who.producer_id, who.producer_epoch, TOPIC, 1), deadline_ms=40
    )
    late = driver.send(ending(who, True), deadline_ms=50)
    kept = driver.send(ending(who, True), deadline_ms=5000)
    driver.tick(50)
    assert isinstance(driver.answers[held], RequestTimedOutError)
    assert isinstance(driver.answers[late], RequestTimedOutError)
    driver.settle()
    assert driver.answers[kept] == next_epoch(who)


@pytest.mark.parametrize("committed", [True, False])
def test_the_next_leader_goes_on_with_what_was_decided(committed: bool) -> None:
    driver = Driver()
    who = init(driver)
    add(driver, who)
    driver.auto = False
    token = driver.send(ending(who, committed))
    driver.commit()
    after = driver.fail_over(kept=0, auto=False)
    assert isinstance(driver.answers[token], NotLeaderOrFollowerError)
    assert [(t.committed, t.producer_epoch) for t in after.targets] == [(committed, who.producer_epoch + 1)]
    again = after.send(ending(who, committed))
    after.settle()
    assert after.answers[again] == next_epoch(who)


def test_time_outs_begin_anew_with_a_new_leader() -> None:
    driver = Driver()
    who = init(driver)
    add(driver, who)
    after = driver.fail_over()
    after.tick(TIMEOUT_MS - 1)
    assert state(after) is TransactionState.ONGOING
    after.tick(TIMEOUT_MS)
    assert state(after) is TransactionState.EMPTY


def test_no_error_of_the_coordinator_asks_a_producer_to_wait_for_nothing() -> None:
    """CONCURRENT_TRANSACTIONS is never needed: the coordinator holds requests that must wait for an end."""
    driver = Driver()
    who = init(driver)
    add(driver, who)
    driver.auto = False
    tokens = [driver.send(ending(who, True)), driver.send(InitTransactionsRequest(ID, TIMEOUT_MS))]
    driver.settle()
    assert not any(isinstance(driver.answers[token], ConcurrentTransactionsError) for token in tokens)
    assert driver.answers[tokens[1]] == next_epoch(who, 2)


def test_idle_ids_are_forgotten_where_ids_expire_and_open_ones_never() -> None:
    driver = Driver(id_expiration_ms=100_000)
    driver.ask(InitTransactionsRequest("idle", TIMEOUT_MS))
    who = init(driver, TIMEOUT_MAX_MS)
    add(driver, who)
    driver.tick(99_000)
    assert driver.shard.transactions.keys() == {"idle", ID}
    driver.tick(300_000)
    assert driver.shard.transactions.keys() == {ID}
    assert driver.fail_over().shard.transactions.keys() == {ID}


def test_a_description_says_what_is_open() -> None:
    driver = Driver()
    who = init(driver)
    add(driver, who, 3)
    (description,) = driver.shard.describe(None, driver.now_ms + 5)
    assert (description.transactional_id, description.state, description.idle_ms) == (ID, "Ongoing", 5)
    assert description.writers == [(who.producer_id, who.producer_epoch)]
    assert description.partitions == [(TOPIC, 3)]
    assert driver.shard.describe(["nobody"], 0) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b""),
        (b"\x92\x63\xa1a", None),  # no type has the number 99
        (b"\x92\x01\xa1a", b"\x90"),
        (b"\x92\x01", b"\x90"),
        # of an earlier version
        (b"a", b"\xc1"),
        (b"\xff", b"\x91\x07"),
        (b"a", b"\x91\x63"),
    ],
)
def test_bytes_that_are_no_record_are_corrupt(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptMessageError):
        decode_any(key, value)


@pytest.mark.parametrize("timeout_ms", [1, 100, 1000, 2999, 60_000])
def test_a_leader_asks_again_within_the_time_out(timeout_ms: int) -> None:
    """Story: with a time-out of a second, a producer that appended all the time was aborted."""
    transaction = TransactionMetadata("x", False, TransactionState.ONGOING, timeout_ms)
    renewal_ms = added(transaction).repeat_after_ms
    assert 0 < renewal_ms <= max(timeout_ms // 2, 1)
