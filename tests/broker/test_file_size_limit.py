"""`ulimit -f`: a limit of the process on the size of files is no failed disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_broker import Admin, Consumer, NewTopic, Producer, TopicPartition
from spark_broker.errors import SparkBrokerError
from tests.support.process_cluster import LOOPBACK, Place, ProcessCluster

LIMIT = 150_000
VALUE = b"x" * 10_000
RECORDS = 40
"""More than fit into one file."""
T0 = TopicPartition("t", 0)


def cluster(base: Path, limit: str) -> ProcessCluster:
    places = [Place(LOOPBACK, ("prlimit", f"--fsize={limit}"))] * 2
    return ProcessCluster(base, 2, {"broker.session.timeout.ms": 3000}, places=places, output=base)


def append_all(servers: str) -> int:
    """Returns how many are acknowledged before the first is refused."""
    with Producer(servers, delivery_timeout_ms=3000, request_timeout_ms=1000) as producer:
        for count in range(RECORDS):
            try:
                producer.append("t", [{"value": VALUE}], partition=0).result(30)
            except SparkBrokerError:
                return count
    return RECORDS


def read_all(servers: str) -> int:
    with Consumer(servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        count = 0
        while batches := consumer.poll(3.0):
            count += sum(batch.data.num_rows for batch in batches)
        return count


@pytest.mark.full
@pytest.mark.parametrize(("limit", "all_fit"), [(f"{LIMIT}:{LIMIT}", False), (f"{LIMIT}:unlimited", True)])
def test_a_limit_on_the_size_of_files_ends_no_broker(tmp_path: Path, limit: str, all_fit: bool) -> None:
    """Story: the first append that did not fit ended the leader and its followers, and nothing could be read."""
    with cluster(tmp_path, limit) as brokers:
        servers = brokers.bootstrap_servers
        with Admin(servers) as admin:
            admin.create_topic(NewTopic("t", 1, 2))
            admin.create_topic(NewTopic("u", 1, 2))
        acknowledged = append_all(servers)
        assert (acknowledged == RECORDS) == all_fit
        assert acknowledged >= 10
        assert brokers.ended() == []
        assert read_all(servers) >= acknowledged
        with Producer(servers) as producer:
            assert producer.append("u", [{"value": b"x"}]).result(30)
        said = "".join(path.read_text() for path in tmp_path.glob("slot-*.log"))
        assert ("RLIMIT_FSIZE (ulimit -f) allows 150,000 bytes a file" in said) == (not all_fit)
