"""A real cluster of processes, without Spark, shared by a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.process_cluster import ProcessCluster


@pytest.fixture(scope="module")
def process_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    config = {
        "broker.session.timeout.ms": 3000,
        "offsets.topic.num.partitions": 4,
        "socket.request.max.bytes": 2_000_000,
    }
    with ProcessCluster(tmp_path_factory.mktemp("cluster"), 3, config) as cluster:
        yield cluster
