"""What happens to one replica's files concerns that replica: it is offline and tried again, and the broker goes on."""

from __future__ import annotations

import dataclasses
import errno
import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from spark_broker.broker.append import Append
from spark_broker.broker.clock import SYSTEM_CLOCK
from spark_broker.broker.damaged import DamagedReplicas
from spark_broker.broker.fetch_session import FetcherSettings
from spark_broker.broker.lease import Lease
from spark_broker.broker.maintenance import Maintenance
from spark_broker.broker.notifier import Notifier
from spark_broker.broker.partition import Partition
from spark_broker.broker.partition_events import PartitionKey
from spark_broker.broker.replica_log import ReplicaLog
from spark_broker.broker.replica_manager import Outward, ReplicaManager
from spark_broker.config import ClusterConfig, ClusterSettings, TopicConfig
from spark_broker.controller.image import (
    EMPTY_IMAGE,
    BrokerState,
    MetadataImage,
    PartitionRegistration,
    TopicState,
)
from spark_broker.controller.tombstones import Tombstones
from spark_broker.core.epochs import EpochHistory
from spark_broker.core.events import Fetched
from spark_broker.errors import (
    DamagedLogError,
    KafkaStorageError,
    NotLeaderOrFollowerError,
    SparkBrokerError,
    StorageFullError,
    StorageRefusedError,
    SyncFailedError,
)
from spark_broker.protocol.arrow_message import assign, encode_batch
from spark_broker.protocol.frame import Frame
from spark_broker.protocol.messages import NO_INCARNATION, MetadataSeen
from spark_broker.protocol.schema import DEFAULT_SCHEMA, schema_to_bytes
from spark_broker.storage.checkpoints import HIGH_WATERMARKS_FILE, write_checkpoint
from spark_broker.storage.clean_marker import CLEAN_FILE
from spark_broker.storage.directory import SEEN_FILE, LogDirectory
from spark_broker.storage.log_state import LOG_STATE_FILE
from spark_broker.storage.quarantine import QUARANTINE_FILE
from spark_broker.storage.start_kind import StartKind
from spark_broker.testing.simulation.filesystem import SimFileSystem
from spark_broker.testing.simulation.operations import Fault, Operation
from tests.broker.rig import CLUSTER_ID, FAR_FUTURE_MS, Outcome, batch

OTHER = 1


class Followed:
    """A fetcher that only notes what it is to follow."""

    def __init__(self, address: tuple[str, int], settings: FetcherSettings) -> None:
        self.address = address
        self.settings = settings
        self.keys: frozenset[PartitionKey] = frozenset()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def follow(self, partitions: dict[PartitionKey, Partition], leader_epochs: dict[PartitionKey, int]) -> None:
        self.keys = frozenset(partitions)


class Broker:
    """Broker 0 on a simulated disk. The test is its controller, and says when it works on files.

    `topics`: by name, how many partitions; broker 0 leads them all, alone, unless `elsewhere` has the topic. It follows
    those of `led_elsewhere`, and is in no ISR of those that `led_elsewhere_alone` has, too. Those of `shared` have a
    follower, which fetches nothing.
    """

    def __init__(self, fs: SimFileSystem | None = None, before: Broker | None = None) -> None:
        """`before`: the process that had the directory before this one; its topics are there as they were."""
        self.fs = fs or SimFileSystem()
        self.topics: dict[str, int] = dict(before.topics) if before else {}
        self.ids: dict[str, int] = dict(before.ids) if before else {}
        self.elsewhere: set[str] = set()
        self.led_elsewhere: set[str] = set()
        self.led_elsewhere_alone: set[str] = set()
        self.shared: set[str] = set()
        self.fetcher: Followed | None = None
        self.deleted: list[str] = []  # ids of topics
        self.ahead_ms = 0  # of the wall clock
        self.fenced = False
        self.failures: list[SparkBrokerError] = []
        self.beats = 0
        self.asked_to_work = 0
        self.offset = 0
        self.epoch: int = before.epoch if before else 0
        self.directory = LogDirectory.claim(Path("/log"), cluster_id=CLUSTER_ID, launch=1, fs=self.fs)
        self.lease = Lease()
        self.lease.extend(SYSTEM_CLOCK.boottime_ms(), FAR_FUTURE_MS)
        settings = ClusterSettings(cluster=ClusterConfig(), topic=TopicConfig())
        outward = Outward(
            lambda *_: None, lambda _, error: self.failures.append(error), _raise, self._beat, self._beat, self._ask
        )
        self.manager = ReplicaManager(
            settings, self.directory, self.lease, outward, clock=self, new_fetcher=self._new_fetcher
        )
        self.manager.registered(0, 1)

    def boottime_ms(self) -> int:
        return SYSTEM_CLOCK.boottime_ms()

    def wall_ms(self) -> int:
        return SYSTEM_CLOCK.wall_ms() + self.ahead_ms

    def _beat(self) -> None:
        self.beats += 1

    def _new_fetcher(self, host: str, port: int, settings: FetcherSettings, _: Callable[..., None]) -> Followed:
        self.fetcher = Followed((host, port), settings)
        return self.fetcher

    def _ask(self) -> None:
        self.asked_to_work += 1

    def image(self) -> MetadataImage:
        topics = {}
        for name, count in self.topics.items():
            replicas = (OTHER,) if name in self.elsewhere else (OTHER, 0) if name in self.led_elsewhere else (0,)
            if name in self.shared and name not in self.elsewhere:
                replicas = (0, OTHER)
            isr = (OTHER,) if name in self.led_elsewhere_alone else replicas
            state = PartitionRegistration(
                replicas, isr, replicas[0], leader_epoch=self.epoch, partition_epoch=self.epoch
            )
            topic_id = self.id_of(name)
            schemas = (schema_to_bytes(DEFAULT_SCHEMA),)
            config = MappingProxyType(TopicConfig().to_dict())
            topics[topic_id] = TopicState(name, topic_id, config, schemas=schemas, partitions=(state,) * count)
        brokers = {id_: _broker_state(id_, fenced=self.fenced) for id_ in (0, OTHER)}
        return dataclasses.replace(
            EMPTY_IMAGE,
            cluster_id=CLUSTER_ID,
            next_offset=self.offset,
            tombstones=Tombstones(self.deleted),
            brokers=MappingProxyType(brokers),
            topics=MappingProxyType(topics),
            topic_ids=MappingProxyType({state.name: topic_id for topic_id, state in topics.items()}),
        )

    def id_of(self, name: str) -> str:
        return f"{self.ids.setdefault(name, len(self.ids) + 1):032x}"

    def key(self, name: str, number: int = 0) -> PartitionKey:
        return (self.id_of(name), number)

    def apply(self) -> None:
        """Apply the topics as they are now, in a new epoch."""
        self.offset += 1
        self.epoch += 1
        self.manager.apply(self.image())

    def work(self) -> None:
        while self.manager.work():
            pass

    def retry(self) -> None:
        self.manager.retry()
        self.work()

    def append(self, name: str, value: bytes) -> Outcome:
        outcome = Outcome()
        append = Append(encode_batch(batch(value)), self.epoch, -1, 0, SYSTEM_CLOCK.boottime_ms() + 30_000)
        self.manager.partition(*self.key(name)).append(append, outcome)
        return outcome

    def write(self, name: str, value: bytes) -> int:
        return self.append(name, value).future.result(0)

    def rows(self, name: str) -> int:
        partition = self.manager.partition(*self.key(name))
        return sum(frame.header.row_count for frame in partition.read_log(0, 1 << 20, partition.log.log_end_offset))

    def directories(self) -> list[str]:
        path = self.directory.path
        return [name for name in self.fs.list_directory(path) if self.fs.is_directory(path / name)]


def _broker_state(broker_id: int, *, fenced: bool = False) -> BrokerState:
    return BrokerState(
        id=broker_id,
        epoch=1,
        directory_id=str(broker_id),
        incarnation=str(broker_id),
        launch=1,
        host="h",
        port=1,
        rack=None,
        machine="m",
        executor_id=str(broker_id),
        executor_pid=0,
        pid=0,
        pid_start_time=0,
        start_kind="clean",
        fenced=fenced,
    )


def _raise(error: BaseException) -> None:
    raise error


@pytest.fixture
def broker() -> Broker:
    """It has a topic with one record."""
    broker = Broker()
    broker.topics["old"] = 1
    broker.apply()
    broker.write("old", b"a")
    return broker


def good_and_bad() -> Broker:
    """It has two topics of one record each, which are synced, and its id."""
    broker = Broker()
    broker.topics = {"good": 1, "bad": 1}
    broker.apply()
    for name in broker.topics:
        broker.write(name, b"a")
        broker.manager.partition(*broker.key(name)).flush()
    broker.directory.update(broker_id=0)
    return broker


def full(broker: Broker) -> Callable[[], None]:
    broker.fs.capacity_bytes = broker.fs.used_bytes
    return lambda: setattr(broker.fs, "capacity_bytes", None)


def no_inodes(broker: Broker) -> Callable[[], None]:
    def refuse(operation: Operation) -> Fault | None:
        return Fault(errno.ENOSPC) if operation.kind in ("create", "mkdir") else None

    broker.fs.on_operation = refuse
    return broker.fs.heal


def no_descriptors(broker: Broker) -> Callable[[], None]:
    def refuse(operation: Operation) -> Fault | None:
        return Fault(errno.EMFILE) if operation.kind in ("create", "open") else None

    broker.fs.on_operation = refuse
    return broker.fs.heal


def broken_directory(broker: Broker) -> Callable[[], None]:
    def refuse(operation: Operation) -> Fault | None:
        return Fault(errno.EIO) if "/new-" in operation.path else None

    broker.fs.on_operation = refuse
    return broker.fs.heal


TROUBLES = [full, no_inodes, no_descriptors, broken_directory]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_new_replica_that_cannot_be_made_is_offline_until_it_can(
    broker: Broker, trouble: Callable[[Broker], Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    end = trouble(broker)
    broker.topics["new"] = 3
    broker.apply()
    broker.work()
    assert broker.manager.offline == {broker.id_of("new"): [0, 1, 2]}
    assert broker.beats > 0, "the controller is told at once"
    with pytest.raises(KafkaStorageError, match="cannot use its replica, and tries again"):
        broker.manager.partition(*broker.key("new"))
    assert broker.rows("old") == 1, "reads go on"
    for _ in range(5):
        broker.retry()
    offline = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(offline) == 3, "each is named once, however often it is tried"
    end()
    broker.retry()
    assert broker.manager.offline == {}
    assert [broker.manager.partition(*broker.key("new", n)).replica.log_end_offset for n in range(3)] == [0, 0, 0]
    broker.write("new", b"b")
    assert broker.failures == []


def test_applying_metadata_does_not_wait_for_files(broker: Broker) -> None:
    broker.topics["new"] = 100
    operations: list[Operation] = []
    broker.fs.journal = operations
    broker.apply()
    del broker.topics["old"]
    broker.apply()
    assert operations == []
    assert broker.asked_to_work > 0
    with pytest.raises(NotLeaderOrFollowerError, match="is opening its replica of new-7"):
        broker.manager.partition(*broker.key("new", 7))
    broker.work()
    assert broker.manager.offline == {}
    assert broker.directories() == sorted(f"new-{number}" for number in range(100))


def test_what_is_opened_is_followed_also_if_only_removals_are_left_to_do(broker: Broker) -> None:
    """Seed 901059: it waited for further logs to be opened, and none came. The replica never joined the ISR."""
    for name in ("new1", "new2"):  # within the second in which replicas that are opened share one look at all
        broker.led_elsewhere.add(name)
        broker.topics[name] = 1
        broker.apply()
        if name == "new2":
            del broker.topics["old"]
            broker.epoch -= 1  # nothing else changes
            broker.apply()
        broker.work()
    assert broker.fetcher is not None
    assert broker.fetcher.keys == {broker.key("new1"), broker.key("new2")}


def test_a_leader_for_whose_fetcher_there_is_no_thread_is_followed_later(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: a new topic's leader was a broker that this one did not follow yet. At its limit of threads, it ended."""

    def refuse(_: Followed) -> None:
        raise RuntimeError("can't start new thread")

    broker.led_elsewhere.add("new")
    broker.topics["new"] = 1
    with monkeypatch.context() as patch:
        patch.setattr(Followed, "start", refuse)
        broker.apply()
        broker.work()
        broker.retry()
    fetcher = broker.fetcher
    assert fetcher is not None
    assert fetcher.keys == frozenset(), "it was not started"
    broker.retry()
    assert broker.fetcher is not None
    assert broker.fetcher.keys == {broker.key("new")}
    assert broker.write("old", b"b") == 1


def test_a_failed_fsync_of_a_new_replica_still_ends_the_broker(broker: Broker) -> None:
    """Known bug 27, also where the error is that of a full disk."""
    broker.fs.fail_next("fsync", errno.ENOSPC)
    broker.topics["new"] = 1
    broker.apply()
    broker.work()
    (failure,) = broker.failures
    assert isinstance(failure, SyncFailedError)


def test_a_sync_that_fails_while_a_replica_takes_its_assignment_keeps_no_other_from_its_own(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulator with seed 130004347: the error came out of the thread that opens logs, as if it were a bug
    of ours, and what was to be done after it was left undone.
    """
    broker.topics.update(first=1, second=1)
    broker.apply()
    broker.work()
    save = ReplicaLog.save_epochs

    def fails(self: ReplicaLog, history: EpochHistory) -> None:
        if self.directory.name == "first-0":
            raise SyncFailedError("the epoch history of first-0")
        save(self, history)

    monkeypatch.setattr(ReplicaLog, "save_epochs", fails)
    broker.apply()
    broker.work()
    (failure,) = broker.failures
    assert isinstance(failure, SyncFailedError)
    assert broker.manager.partition(*broker.key("second")).replica.assignment.leader_epoch == broker.epoch
    assert broker.write("second", b"a") == 0


def test_a_directory_that_could_not_be_read_at_the_start_is_found_later(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulator with seed 130006536: a broker started without descriptors, and did not see the directory
    of a topic that had been deleted. The topic that was created again under its name was never opened there.
    """
    broker.manager.stop(clean=True)
    later = Broker(broker.fs.crash_process(), broker)
    del later.topics["old"]
    later.deleted.append(later.id_of("old"))

    def out_of_descriptors(path: Path, **_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("spark_broker.storage.directory.read_partition", out_of_descriptors)
        later.apply()
        later.work()
    later.ids["old"] = 77
    later.topics["old"] = 1
    later.apply()
    later.work()
    for _ in range(2):
        later.retry()
    assert later.manager.offline == {}
    assert later.rows("old") == 0


@pytest.mark.parametrize("deleted", [False, True], ids=["moved away", "deleted"])
def test_who_waits_for_records_hears_at_once_that_there_will_be_none(broker: Broker, deleted: bool) -> None:
    """Found by the simulator with seed 130003816: it waited until the replica's files were worked on."""
    notifier = Notifier()
    broker.manager.partition(*broker.key("old")).listen(notifier, commits=True)
    if deleted:
        del broker.topics["old"]
    else:
        broker.elsewhere.add("old")
    broker.apply()
    assert notifier.take() == [broker.key("old")]


def test_an_append_that_waits_for_replicas_is_refused_at_once_when_its_own_is_moved_away(broker: Broker) -> None:
    broker.shared.add("new")
    broker.topics["new"] = 1
    broker.apply()
    broker.work()
    outcome = broker.append("new", b"a")
    assert not outcome.future.done()
    broker.elsewhere.add("new")
    broker.apply()
    with pytest.raises(NotLeaderOrFollowerError, match="moved"):
        outcome.future.result(0)
    broker.work()
    assert broker.directories() == ["old-0"]


def begins_anew(broker: Broker) -> None:
    """The replica is opened without its old records, and nothing else is there."""
    for _ in range(2):
        broker.retry()
    assert broker.manager.offline == {}
    assert broker.rows("old") == 0
    assert broker.directories() == ["old-0"]


def test_a_topic_is_deleted_and_made_again_while_its_files_cannot_be_deleted(broker: Broker) -> None:
    def refuse(operation: Operation) -> Fault | None:
        return Fault(errno.EIO) if operation.kind == "rename" and operation.path.endswith("/old-0") else None

    broker.fs.on_operation = refuse
    del broker.topics["old"]
    broker.apply()
    broker.ids["old"] = 77
    broker.topics["old"] = 1
    broker.apply()
    broker.work()
    assert broker.manager.offline == {broker.id_of("old"): [0]}
    broker.retry()
    assert broker.manager.offline == {broker.id_of("old"): [0]}
    broker.fs.heal()
    begins_anew(broker)


@pytest.mark.parametrize("works_between", [False, True], ids=["at once", "one by one"])
def test_a_replica_that_comes_and_goes_while_its_files_cannot_be_moved_away_is_opened_at_last(
    broker: Broker, works_between: bool
) -> None:
    """Found by the simulator with seed 120000093: of two removals of one replica that were carried out together, one
    was never called finished. The replica was not opened again before the broker's next start.
    """

    def refuse(operation: Operation) -> Fault | None:
        return Fault(errno.EMFILE) if operation.kind == "rename" and operation.path.endswith("/old-0") else None

    broker.fs.on_operation = refuse
    for _ in range(3):
        broker.elsewhere.add("old")
        broker.apply()
        if works_between:
            broker.work()
        broker.elsewhere.clear()
        broker.apply()
        if works_between:
            broker.work()
    broker.work()
    assert broker.manager.offline == {broker.id_of("old"): [0]}
    broker.fs.heal()
    begins_anew(broker)


@pytest.mark.parametrize("works_between", [False, True])
def test_a_replica_that_is_moved_away_and_back_begins_anew(broker: Broker, works_between: bool) -> None:
    broker.elsewhere.add("old")
    broker.apply()
    if works_between:
        broker.work()
    broker.elsewhere.clear()
    broker.apply()
    with pytest.raises(NotLeaderOrFollowerError):
        broker.rows("old")
    broker.work()
    assert broker.rows("old") == 0


def test_a_replica_that_is_moved_away_while_it_is_opened_is_closed(broker: Broker) -> None:
    """Its files are made by then; the next thing to do deletes them."""

    def move_away(operation: Operation) -> Fault | None:
        if operation.kind == "mkdir" and operation.path.endswith("/new-0"):
            broker.fs.on_operation = None
            broker.elsewhere.add("new")
            broker.apply()
        return None

    broker.fs.on_operation = move_away
    broker.topics["new"] = 1
    broker.apply()
    broker.work()
    assert broker.manager.find(*broker.key("new")) is None
    assert broker.directories() == ["old-0"]


def test_deletion_is_finished_by_the_next_process(broker: Broker) -> None:
    broker.topics["new"] = 2
    broker.apply()
    broker.work()
    del broker.topics["old"]
    broker.apply()
    broker.manager.work()
    assert [name for name in broker.directories() if name.endswith(".deleted")]
    again = Broker(broker.fs.crash_process(), broker)
    assert [name for name in again.directories() if name.endswith(".deleted")], "a start does not wait for it"
    again.apply()
    again.work()
    assert again.directories() == ["new-0", "new-1"]


def test_a_damaged_replica_that_cannot_be_set_aside_is_offline_until_it_can(broker: Broker) -> None:
    broker.manager.save_high_watermarks()
    partition = broker.manager.partition(*broker.key("old"))
    (arrow,) = (name for name in broker.fs.list_directory(partition.log.directory) if name.endswith(".arrow"))
    path = partition.log.directory / arrow
    broker.fs.flip_bit(path, broker.fs.size_of(path) - 100, 1)
    with pytest.raises(SparkBrokerError):
        broker.rows("old")
    end = full(broker)
    broker.manager.quarantine_damaged()
    assert broker.manager.offline == {broker.id_of("old"): [0]}
    assert broker.manager.damage_reports == []
    end()
    broker.manager.quarantine_damaged()
    assert broker.manager.offline == {}
    assert [report[:2] for report in broker.manager.damage_reports] == [broker.key("old")]
    assert broker.manager.high_watermarks.last(broker.key("old")) == 0, "the next log begins empty"


def test_a_broker_that_has_stopped_opens_no_log(broker: Broker) -> None:
    """Another one may have the directory then. What was still to be done is done by the next start."""
    broker.topics["late"] = 1
    broker.apply()
    broker.manager.stop(clean=True)
    broker.work()
    assert "late-0" not in broker.directories()
    broker.directory.release()
    again = Broker(broker.fs, broker)
    again.apply()
    assert again.write("late", b"a") == 0


def test_a_log_that_could_not_be_recovered_is_recovered_from_the_same_crash_by_the_next_process() -> None:
    first = good_and_bad()
    fs = first.fs.crash_machine(random.Random(1))

    def refuse(operation: Operation) -> Fault | None:
        return Fault(errno.EIO) if "/bad-0" in operation.path else None

    fs.on_operation = refuse
    second = Broker(fs, first)
    second.apply()
    assert second.manager.offline == {second.id_of("bad"): [0]}
    assert second.rows("good") == 1
    third = Broker(fs.crash_process(), second)
    third.fs.heal()
    assert third.directory.start_kind is StartKind.MACHINE_CRASH
    third.apply()
    assert third.rows("bad") == 1
    assert Broker(third.fs.crash_process()).directory.start_kind is StartKind.PROCESS_CRASH


def test_a_checkpoint_before_the_first_metadata_forgets_nothing(broker: Broker) -> None:
    """Simulator, seed 552478: then a log that had lost its segments was believed."""
    broker.manager.save_high_watermarks()
    second = Broker(broker.fs.crash_process(), broker)
    second.manager.save_high_watermarks()
    directory = second.directory.path / "old-0"
    for name in second.fs.list_directory(directory):
        if name.endswith((".arrow", ".index")):
            second.fs.unlink(directory / name)
    second.apply()
    assert second.manager.find(*second.key("old")) is None
    assert [report[:2] for report in second.manager.damage_reports] == [second.key("old")]


def test_the_high_watermark_of_a_replica_that_is_offline_is_kept(broker: Broker) -> None:
    broker.manager.save_high_watermarks()
    fs = broker.fs.crash_process()
    fs.on_operation = lambda operation: Fault(errno.EIO) if "/old-0" in operation.path else None
    second = Broker(fs, broker)
    second.apply()
    second.manager.save_high_watermarks()
    fs.heal()
    second.retry()
    assert second.manager.partition(*second.key("old")).replica.high_watermark == 1


def test_a_leader_that_stopped_leads_again_in_a_later_epoch_only(broker: Broker) -> None:
    """Found by the simulator with seed 950014: out of descriptors, a leader's log had to be opened anew. Its broker was
    cut off, so the controller had not heard of it, and the replica was to lead in the same epoch again.
    """
    partition, error = broker.manager.partition(*broker.key("old")), KafkaStorageError("out of descriptors")
    partition.stop(error)
    broker.manager._on_unusable(partition, error)
    broker.retry()
    assert broker.manager.find(*broker.key("old")) is None
    assert broker.manager.offline == {broker.id_of("old"): [0]}, "the controller hears of it"
    broker.retry()
    assert broker.manager.find(*broker.key("old")) is None
    broker.apply()
    broker.retry()
    assert broker.manager.offline == {}
    assert broker.rows("old") == 1
    assert broker.write("old", b"b") == 1


def test_a_follower_that_is_refused_half_an_answer_is_offline_and_follows_again(broker: Broker) -> None:
    """Found by the simulator with seed 3000777: out of descriptors, a follower could not move its log start. It had
    stopped, and went on with the batches of the same answer: a broken invariant ended the broker.
    """
    broker.topics["followed"] = 1
    broker.led_elsewhere.add("followed")
    broker.apply()
    broker.work()
    key = broker.key("followed")
    take(broker.manager.partition(*key), 0, high_watermark=0)
    take(broker.manager.partition(*key), 1, high_watermark=1)

    def refuse(operation: Operation) -> Fault | None:
        return Fault(errno.EMFILE) if operation.kind == "create" and LOG_STATE_FILE in operation.path else None

    broker.fs.on_operation = refuse
    take(broker.manager.partition(*key), 2, high_watermark=2, log_start=2)
    assert broker.manager.offline == {key[0]: [0]}
    broker.fs.heal()
    broker.retry()
    assert broker.manager.offline == {}
    again = broker.manager.partition(*key)
    take(again, again.replica.log_end_offset, high_watermark=2, log_start=2)
    assert (again.replica.log_start_offset, again.replica.log_end_offset) == (2, 3)
    assert broker.failures == []


def take(partition: Partition, offset: int, *, high_watermark: int, log_start: int = 0) -> None:
    """The leader's answer: one record at this offset."""
    position, epoch = partition.fetch_position(), partition.leader_epoch()
    assert position is not None
    header, message = assign(
        encode_batch(batch(b"x")),
        base_offset=offset,
        leader_epoch=epoch,
        append_time_ms=1,
        max_timestamp_us=0,
        first_of_segment=offset == 0,
        schema_id=0,
    )
    partition.apply(Fetched(position, epoch, high_watermark, log_start), [Frame(header, bytes(message))])


def fails_below(broker: Broker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done with this replica's directory fails, `stat`, too."""
    real, fs = broker.fs.is_directory, broker.fs

    def is_directory(path: Path) -> bool:
        if f"/{name}" in f"{path}":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(fs, "is_directory", is_directory)
    fs.on_operation = lambda operation: Fault(errno.EIO) if f"/{name}" in operation.path else None


@pytest.mark.parametrize("machine", [False, True], ids=["clean", "after a crash of the machine"])
def test_a_replica_whose_directory_cannot_be_looked_at_is_offline_and_no_other(
    machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: `stat` of one replica's directory failed with EIO, and its broker ended at each start."""
    first = good_and_bad()
    if not machine:
        first.manager.stop(clean=True)
        first.directory.mark_clean()
    fs = first.fs.crash_machine(random.Random(1)) if machine else first.fs.crash_process()
    second = Broker(fs, first)
    fails_below(second, "bad-0", monkeypatch)
    second.apply()
    for _ in range(3):
        second.retry()
    assert second.manager.offline == {second.id_of("bad"): [0]}
    assert (second.rows("good"), second.failures) == (1, [])
    monkeypatch.undo()
    fs.heal()
    second.retry()
    assert second.manager.offline == {}
    assert second.rows("bad") == 1


@pytest.mark.parametrize("file", [HIGH_WATERMARKS_FILE, QUARANTINE_FILE, SEEN_FILE, CLEAN_FILE])
def test_a_bad_sector_under_a_file_that_can_be_written_anew_keeps_no_broker_from_starting(file: str) -> None:
    """Story: such a broker ended at each start, though a file with zeros in it would have been passed over."""
    first = good_and_bad()
    first.manager.save_high_watermarks()
    first.directory.write_seen(MetadataSeen(1, 1, "w", 1, 1, 1))
    first.manager.stop(clean=True)
    first.directory.mark_clean()
    path = first.directory.path / file
    fs = first.fs.crash_process()
    if not fs.exists(path):
        write_checkpoint(path, [], fs=fs)
    tried: list[Operation] = []

    def refuse(operation: Operation) -> Fault | None:
        if operation.path != str(path) or operation.kind != "read_bytes":
            return None
        tried.append(operation)
        return Fault(errno.EIO)

    fs.on_operation = refuse
    second = Broker(fs, first)
    incarnation, earlier = second.directory.begin_incarnation("second")
    assert (earlier == [NO_INCARNATION]) == (file in (HIGH_WATERMARKS_FILE, QUARANTINE_FILE)), incarnation
    assert file != SEEN_FILE or second.directory.read_seen() is None
    second.apply()
    assert [second.rows(name) for name in ("good", "bad")] == [1, 1]
    assert second.failures == []
    assert tried


def test_an_error_of_a_read_that_passes_is_none(broker: Broker) -> None:
    broker.fs.fail_next("pread", errno.EIO, path="/old-0/")
    assert broker.rows("old") == 1
    assert (broker.failures, broker.manager.offline, broker.manager.damage_reports) == ([], {}, [])


def test_the_only_copy_serves_what_can_be_read_of_it(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """Story: a consumer repeated its fetch of a bad sector, and each time the broker ended with all its replicas."""
    broker.write("old", b"b")
    broker.write("old", b"c")
    partition = broker.manager.partition(*broker.key("old"))
    read: list[Operation] = []

    def note(operation: Operation) -> None:
        read.append(operation)

    broker.fs.on_operation = note
    partition.read_log(1, 1, 3)
    bad = read[-1]
    assert bad.kind == "pread"

    def refuse(operation: Operation) -> Fault | None:
        return Fault(errno.EIO) if operation == bad else None

    broker.fs.on_operation = refuse
    for _ in range(3):
        with pytest.raises(KafkaStorageError, match=r"read in .*Input/output error"):
            partition.read_log(1, 1, 3)
        assert [frame.header.base_offset for at in (0, 2) for frame in partition.read_log(at, 1, 3)] == [0, 2]
    assert broker.write("old", b"d") == 3
    assert (broker.failures, broker.manager.offline, broker.manager.damage_reports) == ([], {}, [])
    assert caplog.text.count("a part cannot be read, and no other replica has it") == 1


def test_a_write_that_cannot_read_what_it_needs_leaves_the_log_to_be_opened_anew(broker: Broker) -> None:
    """The log start is moved, and its last change is read for that. Then it is not known what the log has become."""
    partition = broker.manager.partition(*broker.key("old"))
    broker.fs.on_operation = lambda operation: Fault(errno.EIO) if LOG_STATE_FILE in operation.path else None
    with pytest.raises(KafkaStorageError):
        partition.advance_log_start(1)
    assert broker.manager.offline == {broker.id_of("old"): [0]}
    assert broker.failures == []
    broker.fs.heal()
    broker.retry()
    broker.apply()
    broker.retry()
    assert broker.manager.offline == {}
    assert broker.write("old", b"b") == 1


def test_a_directory_that_cannot_be_looked_at_is_not_gone(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of maintenance asks every few seconds, and its broker ended with it."""
    maintenance = Maintenance(broker.manager, ClusterConfig(), _raise)
    maintenance.begin(0.0)
    fails_below(broker, "old-0", monkeypatch)
    maintenance.run_due(10.0)
    assert broker.failures == []
    assert not broker.manager.partition(*broker.key("old")).log.is_gone
    monkeypatch.undo()
    broker.fs.heal()
    assert broker.rows("old") == 1


def test_a_stop_on_a_full_disk_closes_every_log_in_order(broker: Broker) -> None:
    broker.topics["new"] = 2
    broker.apply()
    broker.work()
    broker.write("new", b"a")
    broker.fs.capacity_bytes = broker.fs.used_bytes
    broker.manager.stop(clean=True)
    broker.directory.mark_clean()  # which the disk refuses
    later = Broker(broker.fs.crash_machine(random.Random(1)), broker)
    later.fs.heal()
    later.apply()
    assert (later.rows("old"), later.rows("new")) == (1, 1), "everything was synced"


def test_marks_that_a_crash_has_made_too_high_do_not_outlive_a_stop_in_order(broker: Broker) -> None:
    """A clean start takes a log that ends below its mark for a damaged one."""
    second = Broker(broker.fs.crash_machine(random.Random(1)), broker)
    second.fs.capacity_bytes = second.fs.used_bytes
    second.apply()
    with pytest.raises(StorageRefusedError):
        second.manager.stop(clean=True)


@pytest.mark.parametrize("machine", [False, True], ids=["process", "machine"])
def test_a_stop_in_order_does_not_hide_a_log_that_was_never_recovered(machine: bool) -> None:
    """Story: the limit of files kept a log from being opened after a crash. The operator stopped the broker to raise
    it, and the next start took the torn log for one that was closed in order.
    """
    first = good_and_bad()
    second = Broker(first.fs.crash_machine(random.Random(1)) if machine else first.fs.crash_process(), first)
    second.fs.on_operation = lambda operation: Fault(errno.EMFILE) if "/bad-0" in operation.path else None
    second.apply()
    assert second.manager.offline == {second.id_of("bad"): [0]}
    with pytest.raises(StorageRefusedError, match="not every replica"):
        second.manager.stop(clean=True)
    kind = StartKind.MACHINE_CRASH if machine else StartKind.PROCESS_CRASH
    third = Broker(second.fs.crash_process(), second)
    assert third.directory.start_kind is kind
    third.fs.heal()
    third.apply()
    assert (third.rows("good"), third.rows("bad")) == (1, 1)
    third.manager.stop(clean=True)


def test_a_stop_in_order_does_not_hide_a_log_that_was_let_go(broker: Broker) -> None:
    """It was closed without a sync, and the marker would say that everything is synced."""
    partition = broker.manager.partition(*broker.key("old"))
    broker.manager._on_unusable(partition, KafkaStorageError("half-way"))
    broker.fs.on_operation = lambda operation: Fault(errno.EMFILE) if "/old-0" in operation.path else None
    broker.retry()
    assert broker.manager.offline == {broker.id_of("old"): [0]}
    with pytest.raises(StorageRefusedError, match="not every replica"):
        broker.manager.stop(clean=True)


def test_a_log_that_was_left_half_way_is_no_log_that_was_closed_in_order(broker: Broker) -> None:
    """Simulator, seed 720000911: the broker had started after an end in order. What a full disk had refused half-way
    was taken for damage when the log was opened anew.
    """
    broker.topics["new"] = 1
    broker.apply()
    broker.work()

    def refuse(operation: Operation) -> Fault | None:
        half = operation.kind == "create" and operation.path.endswith(".index")
        return Fault(errno.ENOSPC) if "/new-0" in operation.path and (half or operation.kind == "rename") else None

    broker.fs.on_operation = refuse
    with pytest.raises(StorageFullError):
        broker.append("new", b"a")
    assert broker.manager.offline == {broker.id_of("new"): [0]}
    broker.fs.heal()
    broker.retry()
    assert (broker.manager.offline, broker.manager.damaged) == ({}, [])
    broker.apply()
    broker.write("new", b"a")
    assert broker.rows("new") == 1


def test_a_log_that_cannot_be_closed_keeps_no_other_from_being_closed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.topics["new"] = 1
    broker.apply()
    broker.work()
    broker.write("new", b"a")
    refused = broker.manager.partition(*broker.key("old"))

    def refuse(*, clean: bool) -> None:
        del clean
        raise StorageFullError("no room")

    monkeypatch.setattr(refused, "close", refuse)
    with pytest.raises(StorageFullError):
        broker.manager.stop(clean=True)
    later = Broker(broker.fs.crash_machine(random.Random(1)), broker)
    later.apply()
    assert later.rows("new") == 1


def test_damage_costs_the_thread_that_keeps_the_lease_no_work_of_the_disk(broker: Broker) -> None:
    """Nor does anything else that holds the lock which that thread needs."""
    broker.led_elsewhere.add("many")
    broker.topics["many"] = 5
    broker.apply()
    broker.work()
    for number in range(5):
        partition = broker.manager.partition(*broker.key("many", number))
        broker.manager._on_damage(partition, DamagedLogError("flipped"))
    held: list[tuple[str, bool]] = []

    def note(operation: Operation) -> None:
        held.append((operation.kind, broker.manager._lock._is_owned()))  # type: ignore[attr-defined]

    broker.fs.on_operation = note
    broker.manager.quarantine_damaged()
    assert len(broker.manager.damage_reports) == 5
    assert held
    assert not any(owned for kind, owned in held if kind != "close")
    held.clear()
    broker.led_elsewhere_alone.add("many")
    broker.apply()
    broker.manager.damage_heard(5)
    assert held == []
    broker.work()
    assert held
    assert broker.manager.find(*broker.key("many")) is not None
    held.clear()
    broker.led_elsewhere_alone.clear()
    broker.apply()  # They are in the ISR again.
    broker.manager.damage_heard(5)
    assert (held, broker.manager.damage_reports) == ([], [])
    broker.work()
    syncs = [kind for kind, _ in held if kind in ("fsync", "sync_directory")]
    assert len(syncs) == 2
    assert DamagedReplicas(broker.directory).keys == []


def test_damage_that_is_found_while_files_are_worked_on_waits_for_no_lock(broker: Broker) -> None:
    """The thread of maintenance has other things to do. Whoever works on the files sees to it then."""
    partition = broker.manager.partition(*broker.key("old"))
    broker.manager._on_damage(partition, DamagedLogError("flipped"))
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with broker.manager._work_lock:
            entered.set()
            leave.wait(30)
            broker.manager.work()

    worker = threading.Thread(target=work)
    worker.start()
    assert entered.wait(30)
    broker.manager.quarantine_damaged()
    assert broker.manager.damage_reports == []
    leave.set()
    worker.join(30)
    assert broker.manager.damage_reports == [(*broker.key("old"), 1)]


def test_a_stop_in_order_writes_down_what_is_in_sync_again(broker: Broker) -> None:
    """Else the next process would take it out of the ISR, where it may be the last one."""
    broker.led_elsewhere.add("many")
    broker.topics["many"] = 1
    broker.apply()
    broker.work()
    broker.manager._on_damage(broker.manager.partition(*broker.key("many")), DamagedLogError("flipped"))
    broker.manager.quarantine_damaged()
    broker.led_elsewhere_alone.add("many")
    broker.apply()
    broker.manager.damage_heard(1)
    broker.work()
    broker.led_elsewhere_alone.clear()
    broker.apply()
    broker.manager.stop(clean=True)
    assert DamagedReplicas(broker.directory).keys == []
