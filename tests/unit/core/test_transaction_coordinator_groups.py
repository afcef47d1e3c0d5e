"""The transaction coordinator, many writers: an application's versions, each committed at most once."""

from __future__ import annotations

import pytest

from spark_broker.core.transaction_log import whole
from spark_broker.core.transaction_records import encode_record
from spark_broker.core.transaction_state import REMEMBERED_EXECUTIONS, TransactionState
from spark_broker.errors import (
    AlreadyCommittedError,
    InconsistentTopicIdError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidRequestError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    ProducerFencedError,
    SparkBrokerError,
)
from spark_broker.protocol.messages import (
    AbortTransactionRequest,
    AddPartitionToTransactionRequest,
    CommitTransactionRequest,
    EmptyResponse,
    EndTransactionRequest,
    InitProducerIdResponse,
    InitTransactionsRequest,
    JoinTransactionRequest,
)
from tests.unit.core.transaction_driver import TIMEOUT_MAX_MS, Answer, Driver, Log

APP = "sink"
TOPIC = "cd" * 16
TIMEOUT_MS = 10_000


def join(driver: Driver, version: int, execution: str = "run-1") -> int:
    answer = driver.ask(JoinTransactionRequest(APP, version, execution, TIMEOUT_MS))
    assert isinstance(answer, InitProducerIdResponse), answer
    assert answer.producer_epoch == 0
    return answer.producer_id


def add(driver: Driver, producer_id: int, partition: int = 0) -> Answer:
    return driver.ask(AddPartitionToTransactionRequest(APP, producer_id, 0, TOPIC, partition))


def commit(driver: Driver, version: int, winners: list[int], execution: str = "run-1") -> Answer:
    return driver.ask(CommitTransactionRequest(APP, version, execution, winners))


def abort(driver: Driver, version: int, execution: str = "run-1") -> Answer:
    return driver.ask(AbortTransactionRequest(APP, version, execution))


def markers(driver: Driver) -> list[tuple[int, int, bool]]:
    """Producer id, partition and outcome of the markers that are to be written."""
    return [(target.producer_id, target.partition, target.committed) for target in driver.targets]


def last_committed(driver: Driver) -> int:
    return driver.shard.transactions[APP].last_committed


def test_a_version_is_committed_once() -> None:
    driver = Driver()
    won = join(driver, 5)
    add(driver, won)
    assert isinstance(commit(driver, 5, [won]), EmptyResponse)
    for version in (5, 4, 0):
        for execution in ("run-1", "run-2"):
            assert isinstance(commit(driver, version, [won], execution), AlreadyCommittedError)
            assert isinstance(commit(driver, version, [], execution), AlreadyCommittedError)
            assert isinstance(abort(driver, version, execution), AlreadyCommittedError)
            answer = driver.ask(JoinTransactionRequest(APP, version, execution, TIMEOUT_MS))
            assert isinstance(answer, AlreadyCommittedError)
    assert last_committed(driver) == 5


def test_an_identical_commit_joins_the_one_under_way_and_another_one_is_too_late() -> None:
    driver = Driver()
    winner, loser = join(driver, 1), join(driver, 1)
    add(driver, winner)
    driver.auto = False
    tokens = [
        driver.send(CommitTransactionRequest(APP, 1, "run-1", winners))
        for winners in ([winner], [winner], [winner, loser])
    ]
    driver.settle()
    first, same, other = (driver.answers[token] for token in tokens)
    assert isinstance(first, EmptyResponse)
    assert isinstance(same, EmptyResponse)
    assert isinstance(other, AlreadyCommittedError)


@pytest.mark.parametrize(("version", "execution"), [(1, "run-1"), (2, "run-1"), (1, "run-2"), (2, "run-2")])
def test_a_winner_that_has_not_joined_this_version_changes_nothing(version: int, execution: str) -> None:
    driver = Driver()
    won = join(driver, 1)
    add(driver, won)
    length = len(driver.log.records)
    stranger = won if (version, execution) != (1, "run-1") else won + 1
    assert isinstance(commit(driver, version, [stranger], execution), InvalidTxnStateError)
    assert len(driver.log.records) == length
    assert isinstance(commit(driver, 1, [won]), EmptyResponse)


def test_a_version_whose_winner_wrote_to_a_deleted_topic_is_not_committed() -> None:
    """Story: the rows of the winner were gone with the topic, the others were committed, and the job succeeded."""
    driver = Driver()
    elsewhere, won, lost = join(driver, 1), join(driver, 1), join(driver, 1)
    for producer_id, topic in ((elsewhere, "ef" * 16), (won, TOPIC), (lost, TOPIC)):
        driver.ask(AddPartitionToTransactionRequest(APP, producer_id, 0, topic, 0))
    driver.deleted.add(TOPIC)
    for _ in range(2):
        assert isinstance(commit(driver, 1, [elsewhere, won]), InconsistentTopicIdError)
    assert last_committed(driver) == -1
    assert isinstance(abort(driver, 1), EmptyResponse)
    retried = join(driver, 1, "run-2")
    assert isinstance(commit(driver, 1, [retried], "run-2"), EmptyResponse)


def test_what_only_losers_wrote_to_may_be_deleted_and_anything_after_the_decision() -> None:
    driver = Driver()
    won, lost = join(driver, 1), join(driver, 1)
    add(driver, won)
    driver.ask(AddPartitionToTransactionRequest(APP, lost, 0, "ef" * 16, 0))
    driver.deleted.add("ef" * 16)
    driver.auto = False
    token = driver.send(CommitTransactionRequest(APP, 1, "run-1", [won]))
    driver.deleted.add(TOPIC)
    again = driver.send(CommitTransactionRequest(APP, 1, "run-1", [won]))
    driver.settle()
    assert isinstance(driver.answers[token], EmptyResponse)
    assert isinstance(driver.answers[again], EmptyResponse)


def test_an_empty_batch_commits_its_version_without_a_writer() -> None:
    driver = Driver()
    assert isinstance(commit(driver, 0, []), EmptyResponse)
    assert last_committed(driver) == 0
    won = join(driver, 1)
    assert isinstance(commit(driver, 1, [won]), EmptyResponse)


def test_a_commit_without_winners_aborts_every_writer() -> None:
    driver = Driver()
    add(driver, join(driver, 3))
    driver.auto = False
    driver.send(CommitTransactionRequest(APP, 3, "run-1", []))
    driver.commit()
    assert [committed for _, _, committed in markers(driver)] == [False]
    driver.settle()
    assert last_committed(driver) == 3


@pytest.mark.parametrize("ended", ["abort", "time-out", "commit"])
def test_a_join_after_the_end_is_refused(ended: str) -> None:
    driver = Driver()
    add(driver, join(driver, 1))
    if ended == "abort":
        assert isinstance(abort(driver, 1), EmptyResponse)
        assert isinstance(abort(driver, 1), EmptyResponse), "a repetition"
    elif ended == "time-out":
        driver.tick(TIMEOUT_MS)
    else:
        commit(driver, 1, [])
    answer = driver.ask(JoinTransactionRequest(APP, 1, "run-1", TIMEOUT_MS))
    assert isinstance(answer, AlreadyCommittedError if ended == "commit" else InvalidTxnStateError)
    if ended != "commit":
        assert isinstance(commit(driver, 1, []), InvalidTxnStateError)
        assert last_committed(driver) == -1
    join(driver, 2)


def test_an_abort_before_the_first_join_keeps_late_tasks_out() -> None:
    driver = Driver()
    assert isinstance(abort(driver, 1), EmptyResponse)
    assert isinstance(driver.ask(JoinTransactionRequest(APP, 1, "run-1", TIMEOUT_MS)), InvalidTxnStateError)


def test_a_higher_version_aborts_a_lower_one_that_was_left_open() -> None:
    driver = Driver()
    old = join(driver, 1)
    new = join(driver, 2)
    assert isinstance(add(driver, old), InvalidProducerIdMappingError)
    assert isinstance(driver.ask(JoinTransactionRequest(APP, 1, "run-1", TIMEOUT_MS)), InvalidTxnStateError)
    assert isinstance(abort(driver, 1), EmptyResponse), "it is aborted"
    assert isinstance(commit(driver, 2, [new]), EmptyResponse)
    assert last_committed(driver) == 2


def test_a_writer_of_a_transaction_that_is_being_ended_is_refused() -> None:
    driver = Driver()
    won = join(driver, 1)
    add(driver, won)
    driver.auto = False
    driver.send(CommitTransactionRequest(APP, 1, "run-1", [won]))
    late = driver.send(AddPartitionToTransactionRequest(APP, won, 0, TOPIC, 1))
    driver.settle()
    assert isinstance(driver.answers[late], InvalidProducerEpochError)
    driver.auto = True
    assert isinstance(
        driver.ask(AddPartitionToTransactionRequest(APP, won, 1, TOPIC, 0)), InvalidProducerIdMappingError
    )


def test_joins_and_adds_renew_the_time_out() -> None:
    driver = Driver()
    first = join(driver, 1)
    driver.tick(TIMEOUT_MS - 1)
    second = join(driver, 1)
    driver.tick(2 * TIMEOUT_MS - 2)
    add(driver, second)
    driver.tick(3 * TIMEOUT_MS - 4)
    assert isinstance(commit(driver, 1, [first, second]), EmptyResponse)


def test_joins_at_once_wait_for_one_commit_of_the_log_each_and_not_for_each_other() -> None:
    driver = Driver(auto=False)
    tokens = [driver.send(JoinTransactionRequest(APP, 1, "run-1", TIMEOUT_MS)) for _ in range(50)]
    assert not driver.answers
    driver.commit()
    identities = {driver.answers[token] for token in tokens}
    assert len(identities) == 50


def test_the_last_executions_are_remembered() -> None:
    driver = Driver()
    for number in range(REMEMBERED_EXECUTIONS):
        join(driver, 1, f"run-{number}")
    for number in range(REMEMBERED_EXECUTIONS - 1):
        answer = driver.ask(JoinTransactionRequest(APP, 1, f"run-{number}", TIMEOUT_MS))
        assert isinstance(answer, ProducerFencedError)


def test_the_end_of_one_transaction_answers_nobody_who_waits_for_the_next() -> None:
    driver = Driver()
    add(driver, join(driver, 1))
    driver.auto = False
    driver.send(AbortTransactionRequest(APP, 1, "run-1"))
    driver.commit()
    driver.run(driver.shard.marked(driver.targets.popleft()))  # its end is in the log, not committed yet
    assert driver.shard.transactions[APP].state is TransactionState.EMPTY
    joined = driver.send(JoinTransactionRequest(APP, 2, "run-1", TIMEOUT_MS))
    position = driver.shard.appended_count
    aborted = driver.send(AbortTransactionRequest(APP, 2, "run-1"))
    driver.commit(position)
    assert isinstance(driver.answers[joined], InitProducerIdResponse)
    assert aborted not in driver.answers
    driver.settle()
    assert isinstance(driver.answers[aborted], EmptyResponse)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (JoinTransactionRequest("", 1, "run", 5), InvalidRequestError),
        (JoinTransactionRequest(APP, 1, "", 5), InvalidRequestError),
        (JoinTransactionRequest(APP, 1, "run-1", 0), InvalidTransactionTimeoutError),
        (JoinTransactionRequest(APP, 1, "run-1", TIMEOUT_MAX_MS + 1), InvalidTransactionTimeoutError),
        (InitTransactionsRequest(APP, TIMEOUT_MS), InvalidTxnStateError),
        (EndTransactionRequest(APP, 1000, 0, True), InvalidTxnStateError),
    ],
)
def test_a_request_of_the_other_form_or_without_sense_is_refused(
    request_: JoinTransactionRequest, error: type[SparkBrokerError]
) -> None:
    driver = Driver()
    join(driver, 1)
    length = len(driver.log.records)
    assert type(driver.ask(request_)) is error
    assert len(driver.log.records) == length


@pytest.mark.parametrize("stage", ["open", "fencing", "committing", "ended"])
def test_the_whole_state_is_said_by_its_records(stage: str) -> None:
    driver = Driver()
    winner, loser = join(driver, 4), join(driver, 4)
    add(driver, winner, 0)
    add(driver, loser, 1)
    driver.auto = False
    if stage == "fencing":
        driver.send(JoinTransactionRequest(APP, 4, "run-2", TIMEOUT_MS))
    elif stage != "open":
        driver.send(CommitTransactionRequest(APP, 4, "run-1", [winner]))
    if stage == "ended":
        driver.settle()
    expected = driver.shard.transactions[APP]
    rebuilt = Driver(Log([encode_record(record) for record in whole(expected)]), auto=False)
    transaction = rebuilt.shard.transactions[APP]
    transaction.active_ms = expected.active_ms
    assert transaction == expected
    assert list(rebuilt.targets) == ([] if stage in ("open", "ended") else expected.markers())


def test_last_committed_outlives_every_leader() -> None:
    driver = Driver()
    won = join(driver, 7)
    commit(driver, 7, [won])
    for _ in range(3):
        driver = driver.fail_over()
        assert isinstance(commit(driver, 7, [won]), AlreadyCommittedError)
    (description,) = driver.shard.describe([APP], 0)
    assert description.last_committed == 7


@pytest.mark.parametrize("ends", ["committed", "aborted", "empty"])
def test_an_application_with_one_version_is_forgotten_after_its_end_and_others_never(ends: str) -> None:
    driver = Driver()
    kept = join(driver, 0)
    commit(driver, 0, [kept])
    winners: list[int] = []
    if ends != "empty":
        answer = driver.ask(JoinTransactionRequest("once", 0, "run", TIMEOUT_MS, single_use=True))
        assert isinstance(answer, InitProducerIdResponse)
        winners = [answer.producer_id]
    if ends == "aborted":
        driver.tick(TIMEOUT_MS)
    else:
        driver.ask(CommitTransactionRequest("once", 0, "run", winners, single_use=True))
    driver = driver.fail_over()
    driver.tick(TIMEOUT_MAX_MS - 1)
    assert driver.shard.transactions.keys() == {APP, "once"}
    driver.tick(2 * TIMEOUT_MAX_MS)
    assert driver.shard.transactions.keys() == {APP}
    assert driver.fail_over().shard.transactions.keys() == {APP}


def test_a_late_attempt_of_a_forgotten_application_commits_nothing() -> None:
    driver = Driver()
    once = JoinTransactionRequest("once", 0, "run", TIMEOUT_MS, single_use=True)
    first = driver.ask(once)
    assert isinstance(first, InitProducerIdResponse)
    driver.ask(CommitTransactionRequest("once", 0, "run", [first.producer_id], single_use=True))
    driver.tick(2 * TIMEOUT_MAX_MS)
    assert not driver.shard.transactions
    late = driver.ask(once)
    assert isinstance(late, InitProducerIdResponse)
    driver.ask(AddPartitionToTransactionRequest("once", late.producer_id, 0, TOPIC, 0))
    repeated = driver.ask(CommitTransactionRequest("once", 0, "run", [first.producer_id], single_use=True))
    assert isinstance(repeated, InvalidTxnStateError)
    driver.tick(2 * TIMEOUT_MAX_MS + TIMEOUT_MS)
    aborted = driver.shard.transactions["once"]
    assert (aborted.state, aborted.last_committed) == (TransactionState.EMPTY, -1)
    driver.tick(4 * TIMEOUT_MAX_MS)
    assert not driver.shard.transactions
