"""Spark's archives of sources, compiled: Python takes the bytecode, whatever the hour is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.spark_zips import compile_in

SHOW = "import package, package.module; print(package.__file__, package.module.__file__, package.module.where())"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "sources.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as sources:
        sources.writestr("package/__init__.py", "")
        sources.writestr("package/module.py", "def where():\n    return where.__code__.co_filename\n")
        sources.writestr("package/data.json", "{}")
    return path


def imported(archive: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**os.environ, "PYTHONPATH": str(archive), "TZ": "Asia/Tokyo"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


def test_modules_are_imported_from_their_bytecode(archive: Path) -> None:
    assert imported(archive)[:2] == [f"{archive}/package/__init__.py", f"{archive}/package/module.py"]
    compile_in(archive)
    assert imported(archive) == [
        f"{archive}/package/__init__.pyc",
        f"{archive}/package/module.pyc",
        f"{archive}/package/module.py",
    ]


def test_all_that_was_there_stays_and_a_second_time_changes_nothing(archive: Path) -> None:
    """An installer shares the file with other environments by a link."""
    linked, sources = archive.with_name("linked.zip"), archive.read_bytes()
    linked.hardlink_to(archive)
    compile_in(archive)
    assert linked.read_bytes() == sources
    with zipfile.ZipFile(linked) as before, zipfile.ZipFile(archive) as after:
        assert {name: after.read(name) for name in before.namelist()} == {
            name: before.read(name) for name in before.namelist()
        }
        names = after.namelist()
    compile_in(archive)
    with zipfile.ZipFile(archive) as again:
        assert again.namelist() == names
