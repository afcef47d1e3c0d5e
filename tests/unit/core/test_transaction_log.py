"""What is stored of transactional ids: a log, and every log that compaction can leave of it, says the live state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import pytest

from spark_broker.core import transaction_coordinator, transaction_log
from spark_broker.core.transaction_changes import AnyChange, Ended, Settled, decode_any, encode_any
from spark_broker.core.transaction_log import Loading
from spark_broker.core.transaction_records import (
    ApplicationKey,
    ExecutionsKey,
    PartitionKey,
    ProducerKey,
    StoredRecord,
    TransactionRecord,
    WinnersKey,
    WriterKey,
)
from spark_broker.core.transaction_state import TransactionMetadata, TransactionState
from spark_broker.errors import InvariantError, SparkBrokerError
from spark_broker.protocol.messages import (
    AddPartitionToTransactionRequest,
    CommitTransactionRequest,
    EmptyResponse,
    EndTransactionRequest,
    InitProducerIdResponse,
    InitTransactionsRequest,
    JoinTransactionRequest,
)
from tests.unit.core.compacted_logs import compacted, in_any_order
from tests.unit.core.old_transaction_records import OldDriver, snapshot_of, stored_change
from tests.unit.core.transaction_driver import Driver, Log
from tests.unit.core.transaction_shard_log import live, loaded
from tests.unit.core.transaction_world import ViolationError, World, expect, run_schedule

SCHEDULES = 40
TOPIC = "cd" * 16
TIMEOUT_MS = 10_000


class LoggedWorld(World):
    """After every step, the log says the live state, whatever compaction has left of it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.looks = Random(f"{seed}/looks")
        self.looked_at = -1

    def step(self) -> None:
        super().step()
        records = self.driver.log.records
        if len(records) == self.looked_at:
            return
        self.looked_at = len(records)
        state = live(self.driver.shard)
        expect(loaded(records) == state, "the log says another state")
        expect(loaded(compacted(records, self.looks)) == state, "compaction changes what the log says")
        expect(loaded(in_any_order(records, self.looks)) == state, "the order of keys changes what the log says")


def finds(seeds: int = 200) -> bool:
    for seed in range(seeds):
        try:
            run_schedule(seed, world=LoggedWorld(seed))
        except (ViolationError, InvariantError):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("keys_max", [1, 2, 2000])
def test_every_log_that_compaction_leaves_says_the_live_state(monkeypatch: pytest.MonkeyPatch, keys_max: int) -> None:
    monkeypatch.setattr(Driver, "end_keys_max", keys_max)
    ended = 0
    for seed in range(SCHEDULES):
        ended += len(run_schedule(seed, world=LoggedWorld(seed)).fates)
    assert ended > SCHEDULES, "the schedules do too little to prove anything"


Records = Callable[[TransactionMetadata, Iterable[AnyChange]], list[TransactionRecord]]


def without(*keys: type, tombstones: bool = False) -> Records:
    """`records_of` that leaves out the values, or the tombstones, of these keys."""
    right = transaction_log.records_of

    def wrong(transaction: TransactionMetadata, changes: Iterable[AnyChange]) -> list[TransactionRecord]:
        records = right(transaction, changes)
        return [
            record for record in records if not (isinstance(record.key, keys) and (record.value is None) == tombstones)
        ]

    return wrong


@pytest.mark.parametrize("key", [ProducerKey, ApplicationKey, ExecutionsKey, WinnersKey, WriterKey, PartitionKey])
def test_a_record_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch, key: type) -> None:
    monkeypatch.setattr(transaction_coordinator, "records_of", without(key))
    assert finds()


@pytest.mark.parametrize("key", [PartitionKey, WriterKey])
def test_a_tombstone_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch, key: type) -> None:
    """A late batch's partition, or a writer, of an earlier transaction would be of the next one."""
    monkeypatch.setattr(transaction_coordinator, "records_of", without(key, tombstones=True))
    assert finds()


def test_an_end_that_is_not_the_last_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id would be at rest while the log still has writers, which the next transaction would inherit."""
    monkeypatch.setattr(TransactionMetadata, "end", lambda self, keys_max: Ended())
    right = transaction_log._of_writers

    def wrong(transaction: TransactionMetadata, change: AnyChange) -> list[TransactionRecord]:
        return right(transaction, change)[:1] if isinstance(change, Ended) else right(transaction, change)

    monkeypatch.setattr(transaction_log, "_of_writers", wrong)
    assert finds()


def written(driver: Driver) -> list[tuple[str, bool]]:
    """The records since the last call: kind of the key, and whether there is a value."""
    records = driver.log.records[:]
    driver.log.records.clear()
    return [(type(decode_any(*record)[0]).__name__, record.value is not None) for record in records]


def init(driver: Driver) -> InitProducerIdResponse:
    answer = driver.ask(InitTransactionsRequest("id", TIMEOUT_MS))
    assert isinstance(answer, InitProducerIdResponse)
    return answer


def join(driver: Driver, application: str = "app") -> int:
    answer = driver.ask(JoinTransactionRequest(application, 1, "run", TIMEOUT_MS))
    assert isinstance(answer, InitProducerIdResponse)
    return answer.producer_id


def add(driver: Driver, name: str, producer_id: int, partition: int, epoch: int = 0) -> None:
    answer = driver.ask(AddPartitionToTransactionRequest(name, producer_id, epoch, TOPIC, partition))
    assert not isinstance(answer, SparkBrokerError), answer


def test_a_transaction_of_one_writer_writes_a_record_for_each_partition_and_its_head_where_it_changes() -> None:
    driver = Driver()
    who = init(driver)
    assert written(driver) == [("ProducerKey", True)]
    for partition in range(3):
        add(driver, "id", who.producer_id, partition)
        head = [("ProducerKey", True)] if partition == 0 else []
        assert written(driver) == [("PartitionKey", True), *head]
    driver.ask(EndTransactionRequest("id", who.producer_id, 0, True))
    decided, ended = [("ProducerKey", True)], [("PartitionKey", False)] * 3 + [("ProducerKey", True)]
    assert written(driver) == [*decided, *ended]


def test_a_join_writes_a_record_of_its_own_however_many_writers_there_are() -> None:
    driver = Driver()
    join(driver)
    assert written(driver) == [("WriterKey", True), ("ExecutionsKey", True), ("ApplicationKey", True)]
    joined = [join(driver) for _ in range(1000)]
    assert written(driver) == [("WriterKey", True)] * 1000
    driver.ask(CommitTransactionRequest("app", 1, "run", joined))
    decided = [("WinnersKey", True), ("ApplicationKey", True)]
    assert written(driver) == [
        *decided,
        *[("WriterKey", False)] * 1001,
        ("WinnersKey", False),
        ("ApplicationKey", True),
    ]


@pytest.mark.parametrize("fails_over", [False, True])
def test_a_long_transaction_ends_in_parts_and_its_head_last(monkeypatch: pytest.MonkeyPatch, fails_over: bool) -> None:
    monkeypatch.setattr(Driver, "end_keys_max", 3)
    driver = Driver()
    joined = [join(driver) for _ in range(4)]
    for producer_id in joined:
        add(driver, "app", producer_id, 0)
    driver.auto = False
    request = CommitTransactionRequest("app", 1, "run", joined[:2])
    token = driver.send(request)
    driver.commit()
    *targets, last = driver.targets
    for target in targets:
        driver.run(driver.shard.marked(target))
    driver.targets.clear()
    right = driver.shard.appended

    def refusing(*arguments):  # type: ignore[no-untyped-def]
        effects = right(*arguments)
        driver.refusing = isinstance(arguments[0].changes[-1], Settled)  # the next part is refused
        return effects

    monkeypatch.setattr(driver.shard, "appended", refusing)
    driver.run(driver.shard.marked(last))
    transaction = driver.shard.transactions["app"]
    assert (transaction.state, len(transaction.writers)) == (TransactionState.PREPARE_COMMIT, 3)
    assert loaded(driver.log.records) == live(driver.shard)
    monkeypatch.undo()
    driver.refusing = False
    if fails_over:
        driver.commit()
        driver = driver.fail_over()
        token = driver.send(request)
    driver.tick(1)
    driver.settle()
    after = driver.shard.transactions["app"]
    assert (after.state, after.last_committed, after.writers) == (TransactionState.EMPTY, 1, {})
    assert loaded(driver.log.records) == live(driver.shard)
    assert fails_over or driver.answers[token] == EmptyResponse()


def test_a_forgotten_id_leaves_no_key() -> None:
    driver = Driver(id_expiration_ms=1000)
    driver.ask(CommitTransactionRequest("app", 1, "run", []))
    driver.ask(EndTransactionRequest("id", init(driver).producer_id, 0, False))
    driver.tick(5000)
    last = {record.key: record.value for record in driver.log.records}
    assert set(last.values()) == {None}
    assert loaded(driver.log.records) == {}


def test_what_a_log_says_of_no_id_counts_for_nothing() -> None:
    """Only after an unclean election: the records of the id are gone, those of its writers are not."""
    driver = Driver()
    add(driver, "app", join(driver), 0)
    who = init(driver)
    add(driver, "id", who.producer_id, 0)
    records = [
        record for record in driver.log.records if not isinstance(decode_any(*record)[0], ProducerKey | ApplicationKey)
    ]
    assert records
    assert Driver(Log(records)).shard.transactions == {}


def stored_anew(log: list[StoredRecord]) -> list[StoredRecord]:
    """What a shard appends when it has loaded this log."""
    loading = Loading()
    for record in log:
        loading.replay(decode_any(*record))
    return [encode_any(record) for record in loading.stored_anew(loading.transactions())]


class OldWorld(World):
    """The log is of an earlier version. After every step, this version takes it over."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, OldDriver)
        self.looks = Random(f"{seed}/looks")
        self.taken_over = 0

    def step(self) -> None:
        super().step()
        if self.looks.random() < 0.9:
            return
        old, state = self.driver.log.records[:], live(self.driver.shard)
        expect(loaded(old) == state, "records of an earlier version say another state")
        anew = stored_anew(old)
        expect(loaded(anew) == state, "what is stored anew says another state")
        for end in range(0, len(anew) + 1, 1 + len(anew) // 5):
            expect(loaded([*old, *anew[:end]]) == state, "an interrupted upgrade says another state")
        expect(sorted(stored_anew([*old, *anew])) == sorted(anew), "the old part could not go without losing something")
        left = compacted(anew, self.looks)
        expect(loaded(left) == state, "compaction changes what is stored anew")
        expect(not stored_anew(left), "it is stored anew once")
        driver = Driver(Log(old[:]), self.driver.ids, auto=False)
        expect(driver.log.records[len(old) :][: len(anew)] == anew, "it is stored anew before anything else")
        self.taken_over += len(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedules", [pytest.param(10, marks=pytest.mark.quick), pytest.param(SCHEDULES, marks=pytest.mark.full)]
)
def test_a_log_of_an_earlier_version_is_taken_over_with_every_open_transaction(schedules: int) -> None:
    taken_over = 0
    for seed in range(schedules):
        world = OldWorld(seed)
        run_schedule(seed, world=world)
        taken_over += world.taken_over
    assert taken_over > schedules * 10


def test_what_happens_after_an_upgrade_is_not_undone_by_records_of_the_earlier_version() -> None:
    """A log whose old part could not be removed yet."""
    old = Driver()
    add(old, "app", join(old), 0)
    before = old.shard.transactions["app"]
    driver = Driver(Log([stored_change("app", snapshot_of(before))]), old.ids)
    assert live(driver.shard) == live(old.shard)
    winner = next(iter(before.writers))
    assert driver.ask(CommitTransactionRequest("app", 1, "run", [winner])) == EmptyResponse()
    assert driver.fail_over().shard.transactions["app"].last_committed == 1


def test_an_id_that_an_earlier_version_forgot_stays_forgotten() -> None:
    loading = Loading()
    for key, value in ((b"id", b"\x94\x01\x05\x00\x64"), (b"id", b"\x91\x08")):
        loading.replay(decode_any(key, value))
    assert loading.transactions() == {}
    assert [record.transactional_id for record in loading.stored_anew({})] == ["id"]  # type: ignore[union-attr]
