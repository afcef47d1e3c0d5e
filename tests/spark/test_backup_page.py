"""The commands of docs/backup.md, run as they are printed: a backup, a restore, and metadata that is older."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "backup.md"
COMMAND_TIMEOUT_S = 240


class Shell:
    """A shell of somebody who follows the page, with a cluster of two brokers."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.metadata, self.backup, self.newer = base / "metadata", base / "backup", base / "newer"
        for directory in (self.backup, self.newer):
            directory.mkdir()
        config = base / "cluster.toml"
        config.write_text(
            f'[cluster]\nlog.dirs = "{base / "logs"}"\nmetadata.dir = "{self.metadata}"\n'
            "replica.high.watermark.checkpoint.interval.ms = 100\n"
        )
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(base / "state"),
            "LOG_DIRS": str(base / "logs"),
            "METADATA_DIR": str(self.metadata),
            "BACKUP": str(self.backup),
            "NEWER": str(self.newer),
            "CONFIG": str(config),
        }
        self._environment.pop("SPARK_BROKER_BOOTSTRAP_SERVERS", None)

    def __call__(self, commands: str, *, fails: bool = False) -> str:
        """Run the commands; returns what they say. A start is one of two brokers: the machine is small."""
        commands = commands.replace("cluster start", "cluster start --brokers 2")
        ended = subprocess.run(
            ["bash", "-euc", commands],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        said = ended.stdout + ended.stderr
        assert (ended.returncode != 0) is fails, said
        return said

    def produce(self, topic: str, *values: str) -> None:
        self(f"printf '%s\\n' {' '.join(values)} | spark-broker produce {topic}")

    def read(self, topic: str, count: int) -> str:
        return self(f"spark-broker consume {topic} --offset earliest --num {count} --output json")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell("spark-broker cluster stop || true")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_page_does_what_it_says(shell: Shell) -> None:
    back_up, restore, accept, bring_back = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    start = next(line for line in back_up.splitlines() if "cluster start" in line)
    shell(start)
    shell("spark-broker topics create t --partitions 1 --replication-factor 2")
    shell.produce("t", "first")

    shell(back_up)
    shell.produce("t", "lost")
    shell(restore)
    shell.produce("t", "second")
    said = shell.read("t", 2)
    assert "first" in said
    assert "second" in said
    assert "lost" not in said

    shell("spark-broker topics create later --partitions 1 --replication-factor 2")
    shell.produce("later", "kept")
    shell("spark-broker cluster stop")
    shutil.copytree(shell.metadata, shell.newer / "metadata")
    shutil.rmtree(shell.metadata)
    shutil.copytree(shell.backup / "metadata", shell.metadata)
    assert "[OLDER_METADATA]" in shell(start, fails=True)

    listed = shell(accept)
    assert listed.count("later-0") >= 2
    assert "stray" in listed
    shell.produce("t", "third")
    assert "third" in shell.read("t", 3)
    assert "broker 0" in shell("spark-broker doctor || true")

    shell(bring_back)
    assert "kept" in shell.read("later", 1)
    assert "third" in shell.read("t", 3)
