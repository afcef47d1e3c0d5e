"""`spark-broker log-dirs` shows what brokers have set aside, and brings strays back."""

from __future__ import annotations

from pathlib import Path

from spark_broker.protocol.messages import ReplicaSetAside
from spark_broker.storage.checkpoints import write_checkpoint
from spark_broker.storage.directory_names import PARTITION_FILE
from spark_broker.storage.lock import DirectoryLock
from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster

STRAY = "t-0.20261126T114500000000Z.stray"
SET_ASIDE_MS = 1_795_693_500_000


def test_the_directories_of_all_brokers_are_described(run: Run, cluster: FakeCluster) -> None:
    cluster.create("t", 2)
    cluster.set_aside[2] = [ReplicaSetAside("old", 3, "stray", "/logs/broker-2/old-3.x.stray", SET_ASIDE_MS)]
    ended = run("log-dirs", "describe", "-b", cluster.bootstrap)
    assert ended.status == 0
    assert "/logs/broker-1" in ended.out
    assert "2026-11-26 11:45:00" in ended.out
    assert "/logs/broker-2/old-3.x.stray" in ended.out
    assert "t-1" in run("log-dirs", "describe", "--replicas", "-b", cluster.bootstrap).out


def test_a_script_gets_a_line_for_each_replica(run: Run, cluster: FakeCluster) -> None:
    cluster.create("t", 1)
    cluster.set_aside[0] = [ReplicaSetAside("t", 0, "damaged", "/logs/broker-0/t-0.0.damaged")]
    lines = run("log-dirs", "describe", "-b", cluster.bootstrap, "-o", "json").json
    kinds = [(line["broker_id"], line["kind"], line["size_bytes"], line["since"]) for line in lines]
    assert kinds == [(0, "replica", 100, None), (0, "damaged", None, None)] + [
        (b, "replica", 100, None) for b in (1, 2)
    ]


def stray_in(directory: Path, partition: int = 0) -> Path:
    path = directory / STRAY.replace("t-0", f"t-{partition}")
    path.mkdir(parents=True)
    write_checkpoint(path / PARTITION_FILE, ["t", "f" * 32, partition])
    return path


def test_a_stray_gets_its_name_back(run: Run, tmp_path: Path) -> None:
    path = stray_in(tmp_path / "broker-0")
    ended = run("log-dirs", "restore", path, path, path.parent / "." / STRAY)  # what is named again counts once
    assert (ended.status, ended.err.strip()) == (0, f"{STRAY} is t-0 again")
    assert [entry.name for entry in path.parent.iterdir()] == ["t-0"]
    assert run("log-dirs", "restore", path).status != 0


def test_no_stray_takes_the_place_of_a_replica_or_of_a_running_brokers(run: Run, tmp_path: Path) -> None:
    path = stray_in(tmp_path / "broker-0")
    lock = DirectoryLock.acquire(path.parent, launch=1)
    refused = run("log-dirs", "restore", path)
    assert refused.status != 0
    assert "stop the cluster first" in refused.err
    lock.release()
    (path.parent / "t-0").mkdir()
    refused = run("log-dirs", "restore", path)
    assert refused.status != 0
    assert "exists" in refused.err
    assert path.is_dir()


def test_what_cannot_be_restored_keeps_no_other_stray_from_its_name(run: Run, tmp_path: Path) -> None:
    """Story: the pattern on the page of backups also named a stray whose name was taken. All after it were left."""
    logs, locked = tmp_path / "broker-0", tmp_path / "broker-1"
    paths = [*(stray_in(logs, number) for number in range(4)), stray_in(locked, 4)]
    (logs / "t-1").mkdir()
    (paths[2] / PARTITION_FILE).write_text("no checkpoint")
    lock = DirectoryLock.acquire(locked, launch=1)
    ended = run("log-dirs", "restore", *paths)
    lock.release()
    assert ended.status == 1
    assert sorted(path.name for path in logs.iterdir() if path.suffix != ".stray") == ["t-0", "t-1", "t-3"]
    lines = ended.err.splitlines()
    assert {f"{paths[0].name} is t-0 again", f"{paths[3].name} is t-3 again"} < set(lines)
    assert lines[-1] == "2 of 5 are restored"
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 3
    assert f"{logs / 't-1'} exists" in errors[0]
    assert f"Move or delete {logs / 't-1'} first, or leave {paths[1].name} out" in errors[0]
    assert f"{paths[2]} is no replica that was set aside as a stray" in errors[1]
    assert f"a broker runs in {locked}" in errors[2]
