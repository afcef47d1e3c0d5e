"""metadata.dir from an older copy, or without its newest files: nothing is deleted because a record is absent."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.controller.lineage import NUMBERS_SPARED
from spark_broker.storage.checkpoints import write_checkpoint
from spark_broker.storage.clean_marker import CLEAN_FILE
from spark_broker.storage.directory_meta import META_FILE
from spark_broker.storage.strays import bring_back, strays_in
from tests.broker.test_unclean_election import meta_of
from tests.conftest import WaitUntil
from tests.support.live_copies import copy_live
from tests.support.process_cluster import LOOPBACK, Place, ProcessCluster

SETTINGS = {
    "broker.session.timeout.ms": 2000,
    "replica.high.watermark.checkpoint.interval.ms": 100,
    "auto.leader.rebalance.enable": False,
}
RECORDS = 300
SEEN = "metadata-seen.json"


class Site:
    """The directories of a cluster of three brokers, of which one cluster after the other makes use."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.metadata = base / "metadata"
        self.output = base / "output"
        self.output.mkdir()

    @contextmanager
    def cluster(
        self, *, live: int = 3, accept: bool = False, settings: Mapping[str, object] = SETTINGS
    ) -> Iterator[ProcessCluster]:
        places = [Place(LOOPBACK)] * 3
        with ProcessCluster(
            self.base, 3, settings, places=places, output=self.output, live=live, accept_older_metadata=accept
        ) as cluster:
            yield cluster

    def directories(self) -> list[Path]:
        return sorted((self.base / "logs").glob("slot-*/broker-*"))

    def copy_metadata(self, name: str) -> None:
        copy_live(self.metadata, self.base / name)

    def restore_metadata(self, name: str) -> None:
        shutil.rmtree(self.metadata)
        shutil.copytree(self.base / name, self.metadata)

    def said(self) -> str:
        return "".join(path.read_text() for path in self.output.glob("*.log"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def create(cluster: ProcessCluster, topic: str, min_insync_replicas: int = 2) -> None:
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(NewTopic(topic, 1, 3, config={"min.insync.replicas": min_insync_replicas}))


def append(cluster: ProcessCluster, topic: str) -> None:
    with Producer(cluster.bootstrap_servers) as producer:
        producer.append(topic, [{"value": b"%d" % n} for n in range(RECORDS)], partition=0).result(60)


def read_all(cluster: ProcessCluster, topic: str) -> int:
    with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        seen = 0
        while batches := consumer.poll(3.0):
            seen += sum(batch.data.num_rows for batch in batches)
        return seen


def test_brokers_that_have_seen_more_are_not_let_in_and_delete_nothing(site: Site, wait_until: WaitUntil) -> None:
    """Story: a controller on an older copy made every broker delete the topics that it did not know: 900 of 900."""
    with site.cluster() as cluster:
        site.copy_metadata("older")
        create(cluster, "t")
        append(cluster, "t")
        marks = [(path / SEEN).read_bytes() if (path / SEEN).exists() else b"" for path in site.directories()]
        create(cluster, "u")  # What is saved next has the creation of "t".
        for path, mark in zip(site.directories(), marks, strict=True):
            wait_until(partial(_has_changed, path / SEEN, mark), "the checkpoint")
    site.copy_metadata("newest")
    site.restore_metadata("older")
    with site.cluster(live=0) as cluster:
        wait_until(lambda: len(cluster.ended()) == 3, "the brokers to end")
    assert "[OLDER_METADATA]" in site.said()
    assert "--accept-older-metadata" in site.said()
    for path in site.directories():
        assert (path / "t-0").is_dir()
    site.restore_metadata("newest")
    with site.cluster() as cluster:
        assert read_all(cluster, "t") == RECORDS
        append(cluster, "t")


def _has_changed(path: Path, before: bytes) -> bool:
    return path.exists() and path.read_bytes() != before


@pytest.mark.full
def test_a_log_with_newer_leader_epochs_is_not_touched_though_nothing_was_saved(
    site: Site, wait_until: WaitUntil
) -> None:
    with site.cluster() as cluster:
        create(cluster, "t")
        append(cluster, "t")
        site.copy_metadata("older")
        cluster.restart_controller()  # Every leader gets a new epoch.
        append(cluster, "t")
    site.copy_metadata("newest")
    for path in site.directories():
        (path / SEEN).unlink(missing_ok=True)
    site.restore_metadata("older")
    with site.cluster(live=0) as cluster:
        wait_until(lambda: len(cluster.ended()) == 3, "the brokers to end")
    assert "its log has leader epoch" in site.said()
    site.restore_metadata("newest")
    for path in site.directories():
        (path / SEEN).unlink(missing_ok=True)
    with site.cluster() as cluster:
        assert read_all(cluster, "t") == 2 * RECORDS


@pytest.mark.full
def test_replicas_that_the_metadata_does_not_know_are_set_aside_and_can_be_brought_back(
    site: Site, wait_until: WaitUntil
) -> None:
    """The newest files are gone, and no broker had saved that it had seen them."""
    with site.cluster() as cluster:
        site.copy_metadata("older")
        create(cluster, "t")
        append(cluster, "t")
    site.copy_metadata("newest")
    for path in site.directories():
        (path / SEEN).unlink(missing_ok=True)
    for file in sorted(site.metadata.glob("*.log"))[-5:]:
        if not (site.base / "older" / file.name).exists():
            file.unlink()
    with site.cluster():
        wait_until(lambda: all(strays_in(path) for path in site.directories()), "the strays")
    strays = [stray for path in site.directories() for stray in strays_in(path)]
    assert {(stray.replica.topic, stray.replica.partition) for stray in strays} == {("t", 0)}
    site.restore_metadata("newest")
    for stray in strays:
        bring_back(stray)
    # The brokers may have seen records of the controller that ran meanwhile. The newest metadata does not have those.
    with site.cluster(accept=True) as cluster:
        assert read_all(cluster, "t") == RECORDS
        append(cluster, "t")


@pytest.mark.full
def test_an_operator_accepts_the_older_metadata(site: Site, wait_until: WaitUntil) -> None:
    with site.cluster() as cluster:
        create(cluster, "t")
        append(cluster, "t")
        site.copy_metadata("older")
        create(cluster, "later")
        append(cluster, "later")
        for slot in range(3):
            os.kill(cluster.pid(slot), signal.SIGKILL)
        wait_until(lambda: cluster.live_count() == 0, "all brokers to be fenced")
        for slot in range(3):
            cluster.launch(slot)
        cluster.await_live(3)
        append(cluster, "t")
        epoch = _leader_epoch(cluster, "t")
        for path in site.directories():
            before = (path / SEEN).read_bytes()
            create(cluster, f"mark-{path.parent.name}")
            wait_until(partial(_has_changed, path / SEEN, before), "the checkpoint")
    site.restore_metadata("older")
    with site.cluster(accept=True) as cluster:
        wait_until(lambda: _leader_epoch(cluster, "t") > epoch, "a leader in an epoch that was never given out")
        assert read_all(cluster, "t") == 2 * RECORDS
        append(cluster, "t")
        for path in site.directories():
            assert {stray.replica.topic for stray in strays_in(path)} >= {"later"}
        saved = [(path / SEEN).read_bytes() for path in site.directories()]
        create(cluster, "after")
        for path, before in zip(site.directories(), saved, strict=True):
            wait_until(partial(_has_changed, path / SEEN, before), "the checkpoint")
    with site.cluster() as cluster:  # The lineage is that of the metadata now.
        assert read_all(cluster, "t") == 3 * RECORDS


@pytest.mark.full
def test_a_copy_that_is_accepted_again_gives_no_epoch_twice_though_no_checkpoint_was_due(site: Site) -> None:
    """Story: brokers saved what they had seen every five seconds. Before that, an acceptance left no trace."""
    rarely = {**SETTINGS, "replica.high.watermark.checkpoint.interval.ms": 3_600_000}
    with site.cluster(settings=rarely) as cluster:
        create(cluster, "t")
        append(cluster, "t")
        site.copy_metadata("older")
    epochs = []
    for _ in range(2):
        site.restore_metadata("older")
        with site.cluster(settings=rarely, accept=True) as cluster:
            append(cluster, "t")
            epochs.append(_leader_epoch(cluster, "t"))
            for slot in range(3):
                os.kill(cluster.pid(slot), signal.SIGKILL)
    assert epochs[1] > epochs[0] > NUMBERS_SPARED
    site.restore_metadata("older")
    with site.cluster(settings=rarely, accept=True) as cluster:
        assert read_all(cluster, "t") == 3 * RECORDS


A = pa.schema([pa.field("a", pa.int64(), nullable=False)])


def _typed_topic_of_older_metadata(site: Site, config: Mapping[str, object] | None = None, keys: int = RECORDS) -> None:
    """The topic got a column after the copy was made, and then records. The copy is restored."""
    with site.cluster() as cluster, Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(NewTopic("t", 1, 3, schema=A, config={"min.insync.replicas": 2, **(config or {})}))
        site.copy_metadata("older")
        admin.alter_topic_schema("t", "b BIGINT")
        with Producer(cluster.bootstrap_servers) as producer:
            for first in range(0, RECORDS, 10):
                rows = [{"a": n % keys, "b": n} for n in range(first, first + 10)]
                producer.append("t", rows, partition=0).result(60)
    site.restore_metadata("older")


def _rows(cluster: ProcessCluster) -> list[dict[str, object]]:
    with Consumer(cluster.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition("t", 0)])
        rows: list[dict[str, object]] = []
        while batches := consumer.poll(3.0):
            rows += [row for batch in batches for row in batch.data.to_pylist()]
        return rows


@pytest.mark.full
@pytest.mark.parametrize("machine_crash", [False, True], ids=["stopped", "machine-crash"])
def test_records_of_a_schema_that_older_metadata_lacks_are_read_as_they_were_written(
    site: Site, machine_crash: bool
) -> None:
    """Story: the next schema got the id of the one that was lost. Every BIGINT of it was read as a DOUBLE, and after a
    crash of the machine no broker came up again.
    """
    _typed_topic_of_older_metadata(site)
    for directory in site.directories() if machine_crash else ():
        meta = replace(meta_of(directory), boot_id="another run of the machine")
        write_checkpoint(directory / META_FILE, asdict(meta))
        (directory / CLEAN_FILE).unlink(missing_ok=True)
    with site.cluster(accept=True) as cluster, Admin(cluster.bootstrap_servers) as admin:
        admin.alter_topic_schema("t", "c DOUBLE")
        before = [{"a": n, "b": n, "c": None} for n in range(RECORDS)]
        assert _rows(cluster) == before
        with Producer(cluster.bootstrap_servers) as producer:
            producer.append("t", [{"a": RECORDS, "b": 2, "c": 0.5}], partition=0).result(60)
    with site.cluster() as cluster:
        assert _rows(cluster) == [*before, {"a": RECORDS, "b": 2, "c": 0.5}]


@pytest.mark.full
def test_a_compacted_topic_with_a_schema_that_older_metadata_lacks_ends_no_broker(
    site: Site, wait_until: WaitUntil
) -> None:
    """Story: the first pass of the cleaner found a schema that was not there, and the broker ended, at each start."""
    compacted = {"cleanup.policy": "compact", "key.columns": "a", "min.cleanable.dirty.ratio": 0, "segment.bytes": 4096}
    _typed_topic_of_older_metadata(site, compacted, keys=10)
    with site.cluster(accept=True, settings={**SETTINGS, "log.cleaner.backoff.ms": 10}) as cluster:
        wait_until(lambda: "compacted up to" in site.said(), "a pass of compaction")
        assert {row["a"]: row["b"] for row in _rows(cluster)} == {key: RECORDS - 10 + key for key in range(10)}
        assert not cluster.ended()


def _leader_epoch(cluster: ProcessCluster, topic: str) -> int:
    with Admin(cluster.bootstrap_servers) as admin:
        state = admin.describe_topic(topic).partitions[0]
        return -1 if state.leader is None else state.leader_epoch
