"""The cluster's own schedule: topics get into their tables without anybody's job."""

from __future__ import annotations

import os
import random
import signal
import threading
import zlib
from functools import partial
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from spark_broker import Admin, NewTopic, Producer
from spark_broker.errors import SparkBrokerError
from spark_broker.model import HistoryInfo
from tests.spark.application import TRACEBACK, Application
from tests.support.meanwhile import meanwhile
from tests.support.waiting import eventually

PARTITIONS = 2
BATCH = 50

PAUSE_S = 0.02
"""Between batches: two cores are to have time for Spark, too."""


def fill(servers: str, sent: dict[tuple[int, int], int], ended: threading.Event) -> None:
    """Append until the cluster answers no more. `sent`: what was acknowledged."""
    values = random.Random(len(sent))
    with Producer(servers, delivery_timeout_ms=10_000, request_timeout_ms=5_000) as producer:
        while not ended.wait(PAUSE_S):
            data = [values.randbytes(200) for _ in range(BATCH)]
            batch = pa.record_batch({"value": pa.array(data, pa.binary())})
            partition = values.randrange(PARTITIONS)
            try:
                (stored,) = producer.append("t", batch, partition=partition).result(30)
            except SparkBrokerError:
                return  # the cluster stops
            assert stored.base_offset is not None
            sent.update(
                {(partition, offset): zlib.crc32(value) for offset, value in enumerate(data, stored.base_offset)}
            )


def rows_in_history(admin: Admin) -> int:
    return sum(partition.history_end_offset or 0 for partition in admin.describe_topic("t").partitions)


def history_of(admin: Admin, topic: str = "t") -> HistoryInfo:
    history = admin.describe_topic(topic).history
    assert history is not None
    return history


def reaches_its_table_by_time_alone(admin: Admin, servers: str, directory: Path) -> None:
    """A record whose segment nothing seals, and to which none is added; unless the topic takes whole segments only."""
    for name, interval_ms in (("idle", 1000), ("whole", -1)):
        config = {"delta.path": str(directory / name), "delta.commit.interval.ms": str(interval_ms)}
        admin.create_topic(NewTopic(name, 1, replication_factor=1, config=config))
        with Producer(servers) as producer:
            producer.append(name, [{"value": b"alone"}]).result(30)
    eventually(lambda: admin.describe_topic("idle").partitions[0].history_end_offset == 1, 200, "the record is there")
    assert deltalake.DeltaTable(str(directory / "idle")).to_pyarrow_table()["value"].to_pylist() == [b"alone"]
    idle, whole = (partial(history_of, admin, name) for name in ("idle", "whole"))
    assert (idle().next_run_s or 0) <= 1
    assert "appends what is committed then" in idle().next_run_text
    # It is due, or a run is under way, while another topic's run takes long.
    eventually(lambda: 1 < (whole().next_run_s or 0) <= 20, 200, "the next run of the topic with whole segments")
    assert "appends what is sealed" in whole().next_run_text
    assert admin.describe_topic("whole").partitions[0].untiered == 1


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_is_committed_gets_into_the_table_by_time_and_once_until_the_cluster_stops_in_the_middle_of_it(
    tmp_path: Path,
) -> None:
    config = {"log.dirs": str(tmp_path / "logs"), "tiering.interval.ms": 20_000}
    table = str(tmp_path / "table")
    sent: dict[tuple[int, int], int] = {}
    with Application(tmp_path, "application", config, master="local-cluster[2,2,1024]", brokers=2) as started:
        started.await_ready()
        with Admin(started.bootstrap_servers) as admin:
            settings = {"delta.path": table, "segment.bytes": "16384", "delta.commit.interval.ms": "100"}
            admin.create_topic(NewTopic("t", PARTITIONS, replication_factor=2, config=settings))
            with meanwhile(partial(fill, started.bootstrap_servers, sent)):
                eventually(lambda: rows_in_history(admin) > 4 * BATCH, 400, "rows")  # of Delta's first run in a JVM
                tiered = rows_in_history(admin)
                assert history_of(admin).stopped is None
                reaches_its_table_by_time_alone(admin, started.bootstrap_servers, tmp_path)
                os.kill(started.driver_pids[0], signal.SIGTERM)
                started.await_end()
        assert "records of t into" in started.log
        assert not TRACEBACK.search(started.log)
    rows = deltalake.DeltaTable(table).to_pyarrow_table(columns=["_partition", "_offset", "value"]).to_pylist()
    found = {(row["_partition"], row["_offset"]): zlib.crc32(row["value"]) for row in rows}
    assert len(found) == len(rows) >= tiered, "each offset once"
    assert {key: sent.get(key, crc) for key, crc in found.items()} == found
    for partition in range(PARTITIONS):
        offsets = sorted(offset for p, offset in found if p == partition)
        assert offsets == list(range(len(offsets))), "without a gap"
