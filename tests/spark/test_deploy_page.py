"""`docs/deploy.md`: its standalone cluster runs as it is printed, and goes on after its driver was killed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.driver.test_ports import as_text, free_ports
from tests.spark.failover import wait_for
from tests.spark.standalone import StandaloneCluster

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
BIN = Path(sys.executable).parent
TIMEOUT_S = 200

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


class Recipe:
    """The page's blocks, with a master, a directory and ports of this machine in the place of the printed ones."""

    def __init__(self, directory: Path, master: str) -> None:
        ports = free_ports(6)
        self._directory = directory
        self._instead = {
            "spark://head:7077": master,
            "spark.driver.host=head": "spark.driver.host=127.0.0.1",
            "/srv/spark-broker": str(directory),
            "/opt/spark-broker/bin": str(BIN),
            "9092-9095": as_text(ports[:4]),
            "9100-9101": as_text(ports[4:]),
        }
        self.broker_ports = {*ports[:4]}
        (directory / "cluster.toml").write_text(self.block("toml"))

    def block(self, language: str) -> str:
        (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for printed, here in self._instead.items():
            text = text.replace(printed, here)
        return str(text)

    @property
    def environment(self) -> Mapping[str, str]:
        own = dict.fromkeys(("XDG_STATE_HOME", "XDG_DATA_HOME"), str(self._directory))
        return {**os.environ, **own, "PATH": f"{BIN}:{os.environ['PATH']}"}

    @contextmanager
    def driver(self) -> Iterator[subprocess.Popen[bytes]]:
        """What systemd starts, and starts again. It is killed at the end, if it runs."""
        command = re.search(r"ExecStart=((?:.*\\\n)*.*)", self.block("ini"))
        assert command is not None
        ready = self._directory / "spark-broker" / "cluster.json"
        ready.parent.mkdir(exist_ok=True)
        ready.unlink(missing_ok=True)
        with (self._directory / "driver.log").open("ab") as log:
            process = subprocess.Popen(
                shlex.split(command[1].replace("\\\n", " ")),
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        try:
            wait_for(lambda: ready.exists() or process.poll() is not None, "the brokers", TIMEOUT_S)
            assert ready.exists(), (self._directory / "driver.log").read_text()
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(TIMEOUT_S)

    def run(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def addresses(status: str) -> set[str]:
    """The brokers' addresses that `cluster status` shows."""
    (servers,) = re.findall(r"bootstrap.servers = (\S+)", status)
    return set(servers.split(","))


def test_the_standalone_cluster_of_the_page_runs_and_outlives_its_driver(tmp_path: Path) -> None:
    with StandaloneCluster(tmp_path, workers=2) as hosts:
        recipe = Recipe(tmp_path, hosts.master)
        with recipe.driver() as process:
            shown = recipe.run(recipe.block("sh"))
            assert sorted(re.findall(r'"value":"(\w+)"', shown)) == ["book", "lamp"]
            servers = addresses(shown)
            assert {int(address.rpartition(":")[2]) for address in servers} <= recipe.broker_ports
            os.kill(process.pid, signal.SIGKILL)
        with recipe.driver() as process:
            *_, consume = recipe.block("sh").strip().splitlines()
            assert sorted(re.findall(r'"value":"(\w+)"', recipe.run(consume))) == ["book", "lamp"]
            assert addresses(recipe.run("spark-broker cluster status")) == servers
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
