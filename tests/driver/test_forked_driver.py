"""A child that a driver forks, a pool's worker for one, ends: the cluster is its parent's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

DRIVER = """
import os, sys
from types import SimpleNamespace
from spark_broker.config import load_cluster_settings
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.driver.controller_client import ControllerClient
from spark_broker.driver.directories import choose_directories
from spark_broker.errors import ForkedProcessError
from tests.driver.running_host import RunningHost

class Link:
    cluster_id, earlier_launches = "c", -1
    def watch(self, failed): pass
    def stop_brokers(self, timeout_s): print("brokers leave", flush=True)
    def close(self): print("controller ends", flush=True)

settings = load_cluster_settings({"controlled.shutdown.timeout.ms": 1000, "log.dirs": sys.argv[1]})
session = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None, master="local[2]"))
cluster = BrokerCluster(session, settings, choose_directories(settings.cluster, "app"), Link(), RunningHost())
child = os.fork()
if child == 0:
    with cluster:
        pass
    cluster.stop()
    sys.exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print("child", status, "stopped", cluster.stopped, flush=True)
cluster.stop()
print("stopped", cluster.stopped, flush=True)
"""


def test_its_end_stops_no_broker(tmp_path: Path) -> None:
    """Story: its `atexit` handler asked all brokers to leave, and the parent's cluster was gone within a second."""
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "logs")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    said = ended.stdout.splitlines()
    assert said == ["child 7 stopped False", "brokers leave", "controller ends", "stopped True"], ended.stderr
