"""A Spark Connect session reads, writes and streams; only its server has the package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.spark.failover import wait_for
from tests.support.ports import free_port
from tests.support.process_cluster import ProcessCluster
from tests.support.processes import kill_all

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
CLIENT = Path(__file__).parents[1] / "support" / "connect_client.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """The port of a Connect server of two cores."""
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
    }
    command = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[2]", "--class", SERVER]
    command += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "spark-internal"], cwd=tmp_path, stdout=output, stderr=output)
    try:
        wait_for(lambda: "server started at" in log.read_text() or process.poll() is not None, "the server")
        assert process.poll() is None, log.read_text()
        yield port
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        kill_all(children)


def test_a_client_without_the_package_writes_reads_and_streams(server: int, tmp_path: Path) -> None:
    with ProcessCluster(tmp_path / "cluster", 1, {"offsets.topic.num.partitions": 1}) as brokers:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        client = subprocess.run(
            [sys.executable, "-P", str(CLIENT), str(server), brokers.bootstrap_servers, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
            env=environment,
        )
    assert client.returncode == 0, client.stderr
    result = json.loads(client.stdout.splitlines()[-1])
    assert result["read"] == [1000, 499_500, "name 999", 1000]
    assert result["copied"] == [1000, 499_500]
    assert "UNKNOWN_TOPIC_OR_PARTITION" in result["refusal"]
    assert result["imported"] == []
