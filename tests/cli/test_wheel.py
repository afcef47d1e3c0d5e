"""What a person has who installed the wheel with `[cli]`: no checkout, no Spark, and no Delta."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from spark_broker.cli.installed import JOBS

ROOT = Path(__file__).parents[2]

TIMEOUT_S = 100

Installed = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = [pytest.mark.slow, pytest.mark.full]


def closure(package: str, extras: frozenset[str]) -> set[str]:
    """The package's dependencies with these extras, and theirs."""
    found: set[str] = set()
    waiting = [(package, extras)]
    while waiting:
        name, wanted = waiting.pop()
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            applies = needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in (wanted or {""}))
            if applies and needed.name not in found:
                found.add(needed.name)
                waiting.append((needed.name, frozenset(needed.extras)))
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of a new virtual environment: the wheel, and links to what `[cli]` needs."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=TIMEOUT_S)
    (wheel,) = directory.glob("*.whl")
    venv.create(directory / "env")
    (packages,) = (directory / "env").glob("lib/python3*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    for name in closure("spark-broker", frozenset({"cli"})):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return packages


@pytest.fixture
def spark_broker(site: Path, tmp_path: Path) -> Installed:
    """`spark_broker("doctor")` in that environment, from an empty directory, with no Java."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(site.parents[2] / "bin" / "python"), "-m", "spark_broker.cli.main", *arguments]
        environment = {"PATH": "", "HOME": str(tmp_path)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    return run


def test_the_doctor_has_a_row_for_everything_that_is_missing(spark_broker: Installed) -> None:
    """Story: it ended with a traceback, because PySpark was missing."""
    ended = spark_broker("doctor", "-o", "json")
    assert (ended.returncode, ended.stderr) == (1, "")
    states = {finding["what"]: finding["state"] for finding in json.loads(ended.stdout)}
    assert states.pop("Python") == "ok"
    assert states == dict.fromkeys(("Java", "PySpark", "delta-spark", "Delta's JARs", "deltalake"), "missing")


@pytest.mark.parametrize(
    "arguments",
    [
        ("cluster", "start"),
        ("topics", "list"),
        ("dump-log", "nowhere"),
    ],
)
def test_a_command_says_in_one_line_what_it_lacks(spark_broker: Installed, arguments: tuple[str, ...]) -> None:
    ended = spark_broker(*arguments)
    assert ended.returncode == 1
    assert re.fullmatch(r"error: [^\n]+\n", ended.stderr)


def test_the_wheel_has_the_jobs_and_each_runs(spark_broker: Installed, site: Path) -> None:
    for name in JOBS:
        path = Path(spark_broker("jobs", "path", name).stdout.strip())
        assert path.is_relative_to(site)
        helped = subprocess.run(  # The interpreter with Spark; the wheel's package and the wheel's jobs.
            [sys.executable, str(path), "--help"],
            env={"PYTHONPATH": str(site), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        assert "--" in helped.stdout


def test_the_wheel_has_the_pages_and_what_they_link_to(spark_broker: Installed) -> None:
    for name in spark_broker("docs").stdout.split():
        page = Path(spark_broker("docs", name, "--path").stdout.strip())
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([\w/-]+\.md)", text):
            assert (page.parent / link).is_file(), f"{page.name} links to {link}"
