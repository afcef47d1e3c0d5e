"""Folders of executors on `local-cluster[...]`: where they are made, and when they go."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spark_broker.driver import work_folders
from spark_broker.driver.work_folders import KEPT_S, STARTS_S, WORK, clean, use_own_folder

NOW = time.time()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / WORK


def application(work: Path, name: str, age_s: float) -> Path:
    """The folder of an application whose last change was so long ago."""
    executor = work / name / "0"
    executor.mkdir(parents=True)
    for file in ("stderr", "delta.jar"):
        (executor / file).write_text("x")
    for path in (executor / "stderr", executor / "delta.jar", executor, work / name):
        os.utime(path, (NOW - age_s, NOW - age_s))
    return executor


def test_the_jars_of_an_ended_application_go_first_and_its_logs_after_a_week(work: Path) -> None:
    executor = application(work, "app-1", STARTS_S + 60)
    clean(work, NOW)
    assert [path.name for path in executor.iterdir()] == ["stderr"]
    clean(work, NOW + KEPT_S)
    assert list(work.iterdir()) == []


def test_an_application_that_begins_keeps_all(work: Path) -> None:
    executor = application(work, "app-1", STARTS_S - 60)
    clean(work, NOW)
    assert len(list(executor.iterdir())) == 2


def test_an_application_with_a_live_executor_keeps_all_however_old_it_is(work: Path) -> None:
    executor = application(work, "app-1", 10 * KEPT_S)
    code = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=executor, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        clean(work, NOW)
        process.communicate(b"\n")
    assert len(list(executor.iterdir())) == 2
    clean(work, NOW)
    assert list(work.iterdir()) == []


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    return work_folders.state_directory()


def test_the_own_home_has_all_of_spark_but_its_place_of_work(state: Path) -> None:
    for _ in range(2):  # the second time it is there already
        use_own_folder()
        home = Path(os.environ["SPARK_HOME"])
        assert home.is_relative_to(state)
        assert (home / "bin" / "spark-submit").is_file()
        assert (home / "jars").resolve().parent == (home / "bin").resolve().parent
        assert not (home / WORK).is_symlink()
        assert list((home / WORK).iterdir()) == []


def test_links_of_another_release_go(state: Path) -> None:
    use_own_folder()
    home = Path(os.environ["SPARK_HOME"])
    (home / "gone").symlink_to(state / "nowhere")
    (home / "jars").unlink()
    (home / "jars").symlink_to(state / "nowhere")
    use_own_folder()
    assert not (home / "gone").is_symlink()
    assert (home / "jars").is_dir()


def test_a_home_that_the_user_has_set_stays(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    use_own_folder()
    assert os.environ["SPARK_HOME"] == "/opt/spark"
    assert not state.exists()


def test_a_state_directory_that_cannot_be_written_leaves_executors_in_sparks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: a container whose home is read-only. Spark did not start, for the sake of where logs are put."""
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    use_own_folder()
    assert "SPARK_HOME" not in os.environ
    (record,) = caplog.records
    assert "stay in Spark's own directory" in record.getMessage()
    assert str(blocked) in record.getMessage()


def test_a_place_of_work_that_another_user_has_made_is_not_used(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No executor could make its folder there."""
    monkeypatch.setattr(os, "access", lambda path, mode: WORK not in str(path))
    use_own_folder()
    assert "SPARK_HOME" not in os.environ
    assert state.exists()


def test_a_user_without_a_home_starts_spark_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    use_own_folder()
    assert "SPARK_HOME" not in os.environ
    assert "the user has no home directory" in caplog.text


def test_what_cannot_be_removed_keeps_no_application_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: root had started a cluster in this home once, and no start of its user succeeded from then on."""
    now = time.time()
    other, mine = tmp_path / "app-1" / "0", tmp_path / "app-2" / "0"
    for executor in (other, mine):
        executor.mkdir(parents=True)
        (executor / "delta.jar").touch()
    (tmp_path / "a file").touch()
    for path in (tmp_path / "app-1", tmp_path / "app-2", tmp_path / "a file"):
        os.utime(path, (now - 2 * KEPT_S, now - 2 * KEPT_S))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.is_relative_to(other):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    clean(tmp_path, now)
    assert (other / "delta.jar").exists()
    assert not (mine / "delta.jar").exists()
    told = sorted(record.getMessage().partition(" stays: ")[0] for record in caplog.records)
    assert told == [str(tmp_path / "a file"), str(tmp_path / "app-1")]
