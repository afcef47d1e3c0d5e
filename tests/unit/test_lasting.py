"""A table in a local directory is synced before the controller records it: brokers delete their copies then."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark.sql import SparkSession

from spark_broker.client.cluster_view import TopicView
from spark_broker.errors import TieringStoppedError
from spark_broker.history import lasting, spark_steps
from spark_broker.history.lasting import local_directory, make_lasting
from spark_broker.history.plan import HistoryState
from spark_broker.history.spark_steps import SparkSteps, Target
from spark_broker.history.steps import Confirm
from spark_broker.model import dead_letters_path


@pytest.mark.parametrize("prefix", ["", "file:", "file://"])
def test_a_local_table_is_synced(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(lasting, "sync_file_system", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    make_lasting(f"{prefix}{tmp_path}")
    assert synced == [tmp_path]


@pytest.mark.parametrize("path", ["s3a://bucket/lake", "hdfs:///lake", "lake", "/nowhere/lake", "file:///nowhere/lake"])
def test_a_table_elsewhere_is_not(path: str) -> None:
    assert local_directory(path) is None
    make_lasting(path)


def test_the_file_system_is_synced_in_truth(tmp_path: Path) -> None:
    make_lasting(str(tmp_path))
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        lasting.sync_file_system(-1)


def test_a_disk_that_cannot_sync_stops_tiering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(lasting, "sync_file_system", fail)
    with pytest.raises(TieringStoppedError, match="cannot be synced"):
        make_lasting(str(tmp_path))


def test_the_controller_hears_of_a_commit_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the power failed after brokers had deleted what was in the table. Its files were empty."""
    table = tmp_path / "lake"
    for path in (table, Path(dead_letters_path(str(table)))):
        path.mkdir()
    happened: list[str] = []
    monkeypatch.setattr(
        lasting, "sync_file_system", lambda fd: happened.append(Path(f"/proc/self/fd/{fd}").readlink().name)
    )
    monkeypatch.setattr(spark_steps, "confirmation", lambda *_: None)
    topic = cast("TopicView", SimpleNamespace(settings=SimpleNamespace(delta_path=str(table))))
    target = cast("Target", SimpleNamespace(topic=topic, app_id="app", controller_epoch=1))
    steps = SparkSteps(cast("SparkSession", None), target, [], lambda *_: [], lambda _: happened.append("told"))
    steps.carry_out(Confirm(cast("HistoryState", None), ()))
    assert happened == [table.name, Path(dead_letters_path(str(table))).name, "told"]
