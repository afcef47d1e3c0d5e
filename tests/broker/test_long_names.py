"""A topic may have the longest name that Kafka allows: everything that is done to a topic can be done to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.storage.directory import LogDirectory
from spark_broker.storage.directory_names import PartitionName
from spark_broker.testing.replicas import find_replicas
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

LONGEST = "x" * 249
LENGTHS = (208, 209, 240, 249)
"""Around where a directory's name with `.<uuid>.deleted` gets too long, and the longest."""


def claim(base: Path, launch: int) -> LogDirectory:
    return LogDirectory.claim(base, cluster_id="c", launch=launch)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_replica_of_a_topic_with_a_long_name_is_quarantined_again_and_again_and_deleted(
    tmp_path: Path, length: int
) -> None:
    directory, topic = claim(tmp_path, 1), "n" * length
    moved = []
    for _ in range(3):
        directory.partition_directory(topic, "id", 99_999)
        moved.append(directory.quarantine(topic, 99_999))
    assert len(set(moved)) == 3
    assert all(path.is_dir() and path.name.endswith(".damaged") for path in moved)
    directory.partition_directory(topic, "id", 99_999)
    doomed, kept = directory.unname_partitions([PartitionName(topic, 99_999, "id")])
    assert kept == {}
    directory.remove(doomed[0])
    assert directory.list_partitions() == []
    assert sorted(path.name for path in directory.path.iterdir() if path.is_dir()) == sorted(p.name for p in moved)
    directory.release()


def test_topics_whose_long_names_begin_alike_get_different_names_aside(tmp_path: Path) -> None:
    directory = claim(tmp_path, 1)
    moved = []
    for topic in ("n" * 248 + "a", "n" * 248 + "b"):
        directory.partition_directory(topic, topic, 0)
        moved.append(directory.quarantine(topic, 0))
    assert len(set(moved)) == 2
    assert all(path.is_dir() for path in moved)
    directory.release()


def test_a_start_deletes_what_a_crash_left_of_a_topic_with_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = claim(tmp_path, 1)
    directory.partition_directory(LONGEST, "id", 0)

    def die(path: Path) -> None:
        raise KeyboardInterrupt(str(path))

    with monkeypatch.context() as patch:
        patch.setattr(directory.fs, "remove_tree", die, raising=False)
        with pytest.raises(KeyboardInterrupt):
            directory.remove(directory.unname_partitions([PartitionName(LONGEST, 0, "id")])[0][0])
    directory.release()
    again = claim(tmp_path, 2)
    (left,) = again.unnamed()
    again.remove(left)
    assert [path for path in again.path.iterdir() if path.is_dir()] == []
    again.release()


@pytest.mark.full
def test_a_topic_with_the_longest_name_is_written_compacted_deleted_and_made_again(tmp_path: Path) -> None:
    """Story: its deletion ended every broker, and each of their next starts (ENAMETOOLONG)."""
    config = {"log.cleaner.backoff.ms": 50}
    with ProcessCluster(tmp_path, 2, config, output=tmp_path) as cluster, Admin(cluster.bootstrap_servers) as admin:
        compacted = {"cleanup.policy": "compact", "segment.bytes": 4096, "min.cleanable.dirty.ratio": 0.01}
        for round_number in range(2):
            admin.create_topic(NewTopic(LONGEST, 2, 2, config=compacted))
            with Producer(cluster.bootstrap_servers) as producer:
                for number in range(20):
                    row = {"key": b"k", "value": os.urandom(1000)}
                    producer.append(LONGEST, [row], partition=number % 2).result(30)
            with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
                consumer.assign([TopicPartition(LONGEST, 0)])
                eventually(lambda consumer=consumer: consumer.poll(1.0), what=f"records, round {round_number}")  # type: ignore[misc]
            admin.delete_topic(LONGEST)
            eventually(
                lambda: not find_replicas(cluster.log_dirs, TopicPartition(LONGEST, 0)), what="the end of its files"
            )
        assert cluster.launch_ended() == [], "a broker has ended"
        assert cluster.live_count() == 2
