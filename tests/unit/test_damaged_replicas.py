"""A damaged replica is reported to the controller until it is in sync again, whenever its broker ends in between."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from spark_broker.broker.damaged import DamagedReplicas, Find, PartitionKey
from spark_broker.controller.image import PartitionRegistration
from spark_broker.errors import DamagedLogError, KafkaStorageError, StorageFullError
from spark_broker.protocol.messages import NO_INCARNATION
from spark_broker.storage.checkpoints import write_checkpoint
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.filesystem import FileSystem
from spark_broker.storage.quarantine import QUARANTINE_FILE, Replica, read_quarantine, write_quarantine
from spark_broker.testing.simulation.filesystem import SimFileSystem
from spark_broker.testing.simulation.operations import Operation

TOPIC_ID = "0" * 32
KEY = (TOPIC_ID, 0)
ME = 1


@pytest.fixture
def directory(tmp_path: Path) -> LogDirectory:
    log_directory = LogDirectory.claim(tmp_path, cluster_id="c", launch=1)
    log_directory.partition_directory("t", TOPIC_ID, 0)
    return log_directory


def partition(*, isr: tuple[int, ...] = (), elr: tuple[int, ...] = ()) -> PartitionRegistration:
    return PartitionRegistration(replicas=(ME, 2), isr=isr, leader=-1, leader_epoch=3, partition_epoch=3, elr=elr)


def heard(damaged: DamagedReplicas, newest: int) -> list[PartitionKey]:
    """The controller has heard of the damage up to this number, and the broker has worked on its files since."""
    damaged.heard(newest)
    return damaged.settle()


def test_a_replica_that_was_set_aside_is_named_by_the_next_process_too(directory: LogDirectory) -> None:
    DamagedReplicas(directory).quarantine(KEY, "t")
    assert [path.name for path in directory.path.glob("t-0*")] == ["t-0.0.damaged"]
    assert DamagedReplicas(directory).keys == [KEY]


def test_it_is_named_before_its_directory_is_moved_away(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process dies in between, the next one moves it: it must not take the damaged log for a rebuilt one.

    Simulator, seed 50018167: the damaged replica came back, fetched what was new, and joined the ISR.
    """

    def dies(topic: str, partition: int, suffix: str, **_: object) -> Path:
        raise KeyboardInterrupt(f"{topic}-{partition}{suffix}")

    monkeypatch.setattr(directory, "quarantine", dies)
    with pytest.raises(KeyboardInterrupt):
        DamagedReplicas(directory).quarantine(KEY, "t")
    monkeypatch.undo()
    for _ in range(2):
        assert DamagedReplicas(directory).keys == [KEY]
        assert [path.name for path in directory.path.glob("t-0*")] == ["t-0.0.damaged"]


def test_no_log_takes_its_place_while_a_full_disk_keeps_it_there(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(directory, "quarantine", _full_of_files)
        damaged = DamagedReplicas(directory)
        damaged.quarantine(KEY, "t")
        assert (heard(damaged, 1), damaged.is_unheard(KEY)) == ([], True)
        successor = DamagedReplicas(directory)
        assert (successor.keys, successor.is_unheard(KEY)) == ([KEY], True)
    assert (heard(successor, 0), successor.is_unheard(KEY)) == ([KEY], False)
    assert [path.name for path in directory.path.glob("t-0*")] == ["t-0.0.damaged"]


def test_a_log_is_not_moved_twice_though_a_full_disk_kept_the_list_from_saying_so(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a new log, perhaps the only complete one by then, would be moved away."""
    damaged = DamagedReplicas(directory)
    writes = iter([True, False, False, True])

    def write(path: Path, replicas: Iterable[Replica], unmoved: Mapping[Replica, str], *, fs: FileSystem) -> None:
        if not next(writes):
            _is_full()
        write_quarantine(path, replicas, unmoved, fs=fs)

    monkeypatch.setattr("spark_broker.broker.damaged.write_quarantine", write)
    damaged.quarantine(KEY, "t")
    assert (heard(damaged, 1), damaged.is_unheard(KEY)) == ([], True)
    assert (heard(damaged, 1), damaged.is_unheard(KEY)) == ([KEY], False)
    directory.partition_directory("t", TOPIC_ID, 0)
    assert DamagedReplicas(directory).keys == [KEY]
    assert (directory.path / "t-0").is_dir()


def test_a_list_of_an_earlier_version_is_read(directory: LogDirectory) -> None:
    write_checkpoint(directory.path / QUARANTINE_FILE, [KEY])
    assert read_quarantine(directory.path).replicas == {KEY}


@pytest.mark.parametrize("member", [partition(isr=(ME, 2)), partition(isr=(2,), elr=(ME,))])
def test_a_member_that_was_not_seen_to_be_out_is_one_whose_damage_has_not_been_heard_of(
    directory: LogDirectory, member: PartitionRegistration
) -> None:
    damaged = DamagedReplicas(directory)
    damaged.quarantine(KEY, "t")
    damaged.follow(KEY, member, ME)
    assert damaged.keys == [KEY]


def test_a_replica_that_is_let_in_again_is_forgotten_for_good(directory: LogDirectory) -> None:
    DamagedReplicas(directory).quarantine(KEY, "t")
    damaged = DamagedReplicas(directory)
    damaged.follow(KEY, partition(isr=(2,)), ME)
    assert damaged.keys == [KEY]
    damaged.follow(KEY, partition(isr=(ME, 2)), ME)
    assert (damaged.keys, damaged.reports) == ([], [])
    damaged.settle()
    assert DamagedReplicas(directory).keys == []


@pytest.mark.parametrize("known", [partition(isr=(2,)), partition(isr=(ME, 2))])
def test_what_this_process_set_aside_is_forgotten_only_once_the_controller_has_heard(
    directory: LogDirectory, known: PartitionRegistration
) -> None:
    """A live replica may be let in, and elected, while the report is under way."""
    damaged = DamagedReplicas(directory)
    damaged.quarantine(KEY, "t")
    damaged.follow(KEY, known, ME)
    damaged.follow(KEY, partition(isr=(ME, 2)), ME)
    assert (damaged.is_unheard(KEY), damaged.reports) == (True, [(*KEY, 1)])
    assert (heard(damaged, 0), heard(damaged, 1), heard(damaged, 1)) == ([], [KEY], [])
    assert not damaged.is_unheard(KEY)
    damaged.follow(KEY, partition(isr=(ME, 2)), ME)
    damaged.settle()
    assert damaged.keys == DamagedReplicas(directory).keys == []


def test_damage_that_is_found_again_has_another_number(directory: LogDirectory) -> None:
    damaged = DamagedReplicas(directory)
    damaged.quarantine(KEY, "t")
    heard(damaged, 1)
    directory.partition_directory("t", TOPIC_ID, 0)
    damaged.quarantine(KEY, "t")
    assert damaged.reports == [(*KEY, 2)]
    assert (heard(damaged, 1), damaged.is_unheard(KEY)) == ([], True)
    assert [path.name for path in sorted(directory.path.glob("t-0*"))] == ["t-0.0.damaged", "t-0.1.damaged"]


def test_on_a_full_disk_nothing_is_set_aside_and_nothing_forgotten(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = DamagedReplicas(directory)
    with monkeypatch.context() as patch:
        patch.setattr("spark_broker.broker.damaged.write_quarantine", _is_full)
        with pytest.raises(StorageFullError):
            damaged.quarantine(KEY, "t")
    assert (damaged.keys, (directory.path / "t-0").is_dir()) == ([], True)
    damaged.quarantine(KEY, "t")
    heard(damaged, 1)
    with monkeypatch.context() as patch:
        patch.setattr("spark_broker.broker.damaged.write_quarantine", _is_full)
        damaged.follow(KEY, partition(isr=(ME, 2)), ME)
        assert damaged.settle() == []
    assert DamagedReplicas(directory).keys == [KEY]
    assert heard(damaged, 1) == []
    assert damaged.keys == DamagedReplicas(directory).keys == []


def test_a_replica_that_could_not_leave_the_list_and_is_damaged_again_stays_on_it(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = DamagedReplicas(directory)
    damaged.quarantine(KEY, "t")
    heard(damaged, 1)
    with monkeypatch.context() as patch:
        patch.setattr("spark_broker.broker.damaged.write_quarantine", _is_full)
        damaged.follow(KEY, partition(isr=(ME, 2)), ME)
        damaged.settle()
    directory.partition_directory("t", TOPIC_ID, 0)
    damaged.quarantine(KEY, "t")
    assert heard(damaged, 1) == []
    assert (damaged.reports, damaged.is_unheard(KEY)) == ([(*KEY, 2)], True)


def _is_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _full_of_files(*_: object, **__: object) -> None:
    raise StorageFullError("No space left on device")


@pytest.mark.parametrize("gone", [None, PartitionRegistration((2,), (2,), 2, 3, 3)])
def test_a_replica_that_is_not_here_any_more_is_forgotten(
    directory: LogDirectory, gone: PartitionRegistration | None
) -> None:
    damaged = DamagedReplicas(directory)
    damaged.quarantine(KEY, "t")
    damaged.follow(KEY, gone, ME)
    damaged.settle()
    assert DamagedReplicas(directory).keys == []


def test_a_list_that_is_damaged_itself_is_an_error_and_not_an_empty_list(directory: LogDirectory) -> None:
    (directory.path / QUARANTINE_FILE).write_bytes(b"garbage")
    with pytest.raises(DamagedLogError):
        read_quarantine(directory.path)


def test_a_broker_that_has_lost_the_list_leads_nothing_before_its_replicas_were_compared(
    directory: LogDirectory,
) -> None:
    """Story: such a broker ended at each start, and with it the start of the cluster."""
    (directory.path / QUARANTINE_FILE).write_bytes(b"")
    for _ in range(2):
        assert directory.begin_incarnation("this")[1] == [NO_INCARNATION]
    damaged = DamagedReplicas(directory)
    assert damaged.keys == []
    damaged.replace_unreadable()
    assert read_quarantine(directory.path).replicas == frozenset()
    assert directory.begin_incarnation("next")[1] != [NO_INCARNATION]


COUNT = 50
KEYS = [(TOPIC_ID, number) for number in range(COUNT)]


@pytest.fixture
def disk() -> SimFileSystem:
    return SimFileSystem()


@pytest.fixture
def many(disk: SimFileSystem) -> LogDirectory:
    log_directory = LogDirectory.claim(Path("/log"), cluster_id="c", launch=1, fs=disk)
    for _, number in KEYS:
        log_directory.partition_directory("t", TOPIC_ID, number)
    return log_directory


def syncs_of(disk: SimFileSystem) -> list[Operation]:
    """The syncs from now on."""
    syncs: list[Operation] = []

    def note(operation: Operation) -> None:
        if operation.kind in ("fsync", "sync_directory"):
            syncs.append(operation)

    disk.on_operation = note
    return syncs


def test_many_replicas_that_are_damaged_and_come_back_together_cost_as_many_syncs_as_one(
    disk: SimFileSystem, many: LogDirectory
) -> None:
    """Story: each replica that came back was a write of its own, in the thread that keeps the lease."""
    damaged = DamagedReplicas(many)
    syncs = syncs_of(disk)
    damaged.quarantine_all([Find(key, "t") for key in KEYS])
    assert len(syncs) == 5, "the list, the names, the list"
    assert damaged.reports == [(*key, number) for number, key in enumerate(KEYS, start=1)]
    assert heard(damaged, COUNT) == KEYS
    syncs.clear()
    for state in (partition(isr=(2,)), partition(isr=(ME, 2))):
        for key in KEYS:
            damaged.follow(key, state, ME)
    damaged.heard(COUNT)
    assert syncs == [], "these belong to the thread that keeps the lease"
    assert damaged.settle() == []
    assert len(syncs) == 2
    assert damaged.settle() == []
    assert len(syncs) == 2
    assert damaged.keys == DamagedReplicas(many).keys == []


def test_one_directory_that_cannot_be_moved_keeps_no_other_replica_from_beginning_anew(
    many: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = DamagedReplicas(many)
    real = many.quarantine

    def quarantine(topic: str, number: int, suffix: str, *, sync: bool) -> Path:
        if number == 1:
            raise KafkaStorageError("Input/output error")
        return real(topic, number, suffix, sync=sync)

    monkeypatch.setattr(many, "quarantine", quarantine)
    damaged.quarantine_all([Find(key, "t") for key in KEYS[:3]])
    assert heard(damaged, 3) == [KEYS[0], KEYS[2]]
    assert [damaged.is_unheard(key) for key in KEYS[:3]] == [False, True, False]
    monkeypatch.undo()
    assert heard(damaged, 3) == [KEYS[1]]


def test_a_replica_that_is_moved_away_and_back_waits_for_nothing(many: LogDirectory) -> None:
    """It was forgotten at once, but the list on disk may be written later."""
    damaged = DamagedReplicas(many)
    damaged.quarantine(KEY, "t")
    damaged.follow(KEY, None, ME)
    assert (damaged.is_unheard(KEY), damaged.reports) == (False, [])
    damaged.follow(KEY, partition(isr=(ME, 2)), ME)
    assert (damaged.is_unheard(KEY), damaged.reports) == (False, [])
    damaged.settle()
    assert DamagedReplicas(many).keys == []


def test_a_replica_that_is_moved_away_while_its_damaged_directory_is_in_its_place_may_begin_once_that_is_moved(
    many: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next process would take the new log for the damaged one."""
    with monkeypatch.context() as patch:
        patch.setattr(many, "quarantine", _full_of_files)
        damaged = DamagedReplicas(many)
        damaged.quarantine(KEY, "t")
    damaged.follow(KEY, None, ME)
    assert damaged.is_unheard(KEY)
    assert damaged.settle() == [KEY]
    assert not damaged.is_unheard(KEY)


def test_what_an_earlier_process_could_not_move_begins_anew_once_it_is_moved(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is before the controller says what it has heard: no process of before is asked about it again."""
    with monkeypatch.context() as patch:
        patch.setattr(directory, "quarantine", _full_of_files)
        DamagedReplicas(directory).quarantine(KEY, "t")
        damaged = DamagedReplicas(directory)
    assert damaged.is_unheard(KEY)
    assert damaged.settle() == [KEY]
    assert not damaged.is_unheard(KEY)
    assert damaged.keys == [KEY]
