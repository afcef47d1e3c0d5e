"""A damaged replica is named to the controller until it is in sync again, whenever its broker ends in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_broker.broker.damaged import DamagedReplicas
from spark_broker.controller.image import PartitionState
from spark_broker.errors import DamagedLogError
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.set_aside import SET_ASIDE_FILE, read_set_aside

TOPIC_ID = "0" * 32
KEY = (TOPIC_ID, 0)
ME = 1


@pytest.fixture
def directory(tmp_path: Path) -> LogDirectory:
    found = LogDirectory.claim(tmp_path, cluster_id="c", launch=1)
    found.partition_directory("t", TOPIC_ID, 0)
    return found


def partition(*, isr: tuple[int, ...] = (), elr: tuple[int, ...] = ()) -> PartitionState:
    return PartitionState(replicas=(ME, 2), isr=isr, leader=-1, leader_epoch=3, partition_epoch=3, elr=elr)


def test_a_replica_that_was_set_aside_is_named_by_the_next_process_too(directory: LogDirectory) -> None:
    DamagedReplicas(directory).set_aside(KEY, "t")
    assert [path.name for path in directory.path.glob("t-0*")] == ["t-0.0.damaged"]
    assert DamagedReplicas(directory).keys == [KEY]


def test_it_is_named_before_its_directory_is_moved_away(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies in between finds the damage again, or nothing: never an empty replica without a past."""

    def dies(topic: str, partition: int) -> Path:
        raise KeyboardInterrupt(f"{topic}-{partition}")

    monkeypatch.setattr(directory, "set_aside", dies)
    with pytest.raises(KeyboardInterrupt):
        DamagedReplicas(directory).set_aside(KEY, "t")
    assert DamagedReplicas(directory).keys == [KEY]


@pytest.mark.parametrize("member", [partition(isr=(ME, 2)), partition(isr=(2,), elr=(ME,))])
def test_a_member_that_was_not_seen_to_be_out_is_one_whose_damage_has_not_been_heard_of(
    directory: LogDirectory, member: PartitionState
) -> None:
    damaged = DamagedReplicas(directory)
    damaged.set_aside(KEY, "t")
    damaged.follow(KEY, member, ME)
    assert damaged.keys == [KEY]


def test_a_replica_that_is_let_in_again_is_forgotten_for_good(directory: LogDirectory) -> None:
    damaged = DamagedReplicas(directory)
    damaged.set_aside(KEY, "t")
    damaged.follow(KEY, partition(isr=(2,)), ME)
    assert damaged.keys == [KEY]
    damaged.follow(KEY, partition(isr=(ME, 2)), ME)
    assert damaged.keys == DamagedReplicas(directory).keys == []


@pytest.mark.parametrize("gone", [None, PartitionState((2,), (2,), 2, 3, 3)])
def test_a_replica_that_is_not_here_any_more_is_forgotten(directory: LogDirectory, gone: PartitionState | None) -> None:
    damaged = DamagedReplicas(directory)
    damaged.set_aside(KEY, "t")
    damaged.follow(KEY, gone, ME)
    assert DamagedReplicas(directory).keys == []


def test_a_list_that_is_damaged_itself_is_an_error_and_not_an_empty_list(directory: LogDirectory) -> None:
    (directory.path / SET_ASIDE_FILE).write_bytes(b"garbage")
    with pytest.raises(DamagedLogError):
        read_set_aside(directory.path)
