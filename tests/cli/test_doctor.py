"""`spark-broker doctor` finds what is missing, and says what to do."""

from __future__ import annotations

import importlib.metadata
import stat
from pathlib import Path
from typing import Any

import pytest

from spark_broker.errors import InvalidRequestError
from spark_broker.protocol.messages import (
    CallRequest,
    DescribeLogDirRequest,
    HistoryMetadata,
    ReplicaSetAside,
)
from spark_broker.spark import delta_session
from tests.cli.conftest import Run
from tests.client.fake_broker import FakeCluster

FENCED_BECAUSE = "the controller does not hear of it, its clock is wrong, or it still opens its logs"


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Java 17, as far as it says."""
    return _java(tmp_path, monkeypatch, 'openjdk version "17.0.9" 2023-10-17')


def _java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> Path:
    program = tmp_path / "java" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    return program


@pytest.fixture
def jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Delta's JARs where `make setup` puts them, and none in PySpark's directory."""
    directory = tmp_path / "share" / "spark-broker" / "jars"
    directory.mkdir(parents=True)
    for name in delta_session.JARS:
        (directory / name).touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr(delta_session, "installed_jars", list)
    return directory


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed packages; a test may change them."""
    versions = {"pyspark": "4.2.0", "delta-spark": "4.4.0", "deltalake": "1.6.6"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    return versions


def states(findings: list[dict[str, Any]]) -> dict[str, str]:
    return {finding["what"]: finding["state"] for finding in findings}


MISSABLE = ("PySpark", "delta-spark", "Delta's JARs", "deltalake")
HEALTHY = {"Python": "ok", "Java": "ok", "PySpark": "ok", "delta-spark": "ok", "Delta's JARs": "ok", "deltalake": "ok"}


@pytest.mark.usefixtures("java", "jars", "packages")
def test_nothing_is_missing(run: Run) -> None:
    ended = run("doctor", "-o", "json")
    assert (ended.status, states(ended.json)) == (0, HEALTHY)
    assert {finding["next"] for finding in ended.json} == {""}
    assert "Delta's JARs" in run("doctor").out


@pytest.mark.usefixtures("java")
def test_what_is_missing_is_named_with_what_to_do(run: Run, jars: Path, packages: dict[str, str]) -> None:
    packages.clear()
    (jars / delta_session.JARS[0]).unlink()
    ended = run("doctor", "-o", "json")
    assert ended.status == 1
    assert states(ended.json) == {**HEALTHY, **dict.fromkeys(MISSABLE, "missing")}
    assert all(finding["next"] for finding in ended.json if finding["state"] != "ok")


@pytest.mark.usefixtures("jars")
def test_versions_that_do_not_fit_are_wrong(
    run: Run, packages: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _java(tmp_path, monkeypatch, 'java version "1.8.0_301"')
    packages.update({"pyspark": "4.3.0", "delta-spark": "4.0.0"})
    other = tmp_path / "delta-spark_4.0_2.13-4.0.0.jar"
    monkeypatch.setattr(delta_session, "installed_jars", lambda: [other])
    ended = run("doctor", "-o", "json")
    assert ended.status == 1
    assert states(ended.json) == {**dict.fromkeys(HEALTHY, "wrong"), "Python": "ok", "deltalake": "ok"}
    assert next(f["found"] for f in ended.json if f["what"] == "Java").startswith("8 ")


@pytest.mark.usefixtures("jars", "packages")
def test_a_java_that_prints_bytes_that_are_no_text_is_found(run: Run, java: Path) -> None:
    """Story: JAVA_TOOL_OPTIONS had a path in another encoding. The command ended with a traceback."""
    java.write_bytes(java.read_bytes() + b"printf 'Picked up JAVA_TOOL_OPTIONS: -Dname=\\377\\n' >&2\n")
    assert states(run("doctor", "-o", "json").json) == HEALTHY


@pytest.mark.usefixtures("jars", "packages")
def test_a_java_that_is_not_there_is_missing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert states(run("doctor", "-o", "json").json) == {**HEALTHY, "Java": "missing"}


@pytest.mark.usefixtures("java", "jars", "packages")
def test_a_cluster_is_looked_at(run: Run, cluster: FakeCluster) -> None:
    cluster.create("fine", 2)
    cluster.create("t", 1, config={"delta.path": "/lake/t"})
    cluster.create("leaderless", 2)
    cluster.topics["t"].history = HistoryMetadata("a-table", 4, 7, [0], [5], "the table is gone")
    cluster.topics["leaderless"].partitions[1].leader = -1
    kinds = enumerate(("stray", "damaged", "stray"))
    cluster.set_aside[1] = [ReplicaSetAside("t", number, kind, "/logs/path") for number, kind in kinds]
    ended = run("doctor", "-b", cluster.bootstrap, "-o", "json")
    assert ended.status == 1
    wrong = {finding["what"]: finding["found"] for finding in ended.json if finding["state"] == "wrong"}
    assert wrong == {
        "topic t": "tiering has stopped: the table is gone",
        "topic leaderless": "partitions without a leader: 1",
        "broker 1": "replicas set aside: 1 damaged, 2 stray",
    }


@pytest.mark.usefixtures("java", "jars", "packages")
def test_a_broker_that_is_fenced_and_what_it_leaves_is_wrong(run: Run, cluster: FakeCluster) -> None:
    """Story: a broker had stood still for 14 seconds, and the doctor found nothing.

    Another one still opened its logs after a crash. The doctor said that the controller does not hear of it.
    """
    cluster.create("t", 2)
    cluster.create("strict", 1, config={"min.insync.replicas": "3"})
    cluster.kill(1)
    ended = run("doctor", "-b", cluster.bootstrap, "-o", "json")
    assert ended.status == 1
    wrong = [(finding["what"], finding["found"].split(" (")[0]) for finding in ended.json if finding["state"] != "ok"]
    assert wrong == [
        ("broker 1", f"fenced, so it leads nothing: {FENCED_BECAUSE}"),
        ("topic strict", "partitions under min.insync.replicas, which refuse acks=all: 0"),
        ("topic strict", "under-replicated partitions: 0"),
        ("topic t", "under-replicated partitions: 0, 1"),
    ]
    (advice,) = [finding["next"] for finding in ended.json if finding["what"] == "broker 1"]
    assert "do not end it while it opens its logs" in advice


@pytest.mark.usefixtures("java", "jars", "packages")
def test_a_question_that_is_not_answered_hides_no_other_answer(run: Run, cluster: FakeCluster) -> None:
    cluster.create("t", 1)
    cluster.fence(2)

    def refuse(broker: int, request: CallRequest) -> None:
        if isinstance(request, DescribeLogDirRequest):
            raise InvalidRequestError("no such call")

    cluster.call_hook = refuse
    ended = run("doctor", "-b", cluster.bootstrap, "-o", "json")
    assert ended.status == 1
    assert [finding["what"] for finding in ended.json if finding["state"] == "wrong"] == [
        *("broker 2", "topic t", "cluster"),
    ]


@pytest.mark.usefixtures("java", "jars", "packages")
def test_a_cluster_that_does_not_answer_is_missing(run: Run, unused_address: str) -> None:
    ended = run("doctor", "-b", unused_address, "-o", "json")
    assert (ended.status, states(ended.json)["cluster"]) == (1, "missing")


@pytest.fixture
def unused_address() -> str:
    return "127.0.0.1:1"
