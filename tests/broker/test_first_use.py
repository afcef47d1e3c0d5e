"""A broker's first append, group commit, transaction and fetch import nothing: other requests would wait for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from spark_broker import Admin, NewTopic
from tests.support.first_use import TOPIC
from tests.support.process_cluster import Place, ProcessCluster

IMPORT = "import time:"
"""The beginning of each line with which Python reports an import."""

OPERATIONS = (
    "append",
    "keyed append",
    "transaction",
    "consume",
    "commit",
    "committed",
    "end offsets",
    "offsets by time",
)


def test_a_brokers_first_operations_import_nothing(tmp_path: Path) -> None:
    place = Place(command=("env", "PYTHONPROFILEIMPORTTIME=1"))
    settings = {"offsets.topic.num.partitions": 1, "transaction.state.log.num.partitions": 1}
    with ProcessCluster(tmp_path, 2, settings, places=[place, place], output=tmp_path) as cluster:
        logs = [tmp_path / f"slot-{slot}.log" for slot in range(2)]
        at_start = [imports(log) for log in logs]
        assert all(at_start), "brokers say what they import"
        with Admin(cluster.bootstrap_servers) as admin:
            admin.create_topic(NewTopic(TOPIC, 2, 2))
        command = [sys.executable, "-m", "tests.support.first_use", cluster.bootstrap_servers, *OPERATIONS]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=60)
        late = [imports(log)[len(before) :] for log, before in zip(logs, at_start, strict=True)]
        assert late == [[], []]


def imports(log: Path) -> list[str]:
    """Modules in the order of their import."""
    lines = log.read_text(errors="replace").splitlines()
    return [line.rpartition("|")[2].strip() for line in lines if line.startswith(IMPORT)]
