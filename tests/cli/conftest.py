"""The command line, run in this process against a fake cluster."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spark_broker.cli.main import main
from spark_broker.cli.options import BOOTSTRAP_VARIABLE
from tests.client.fake_broker import FakeCluster


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output as one document."""
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        """Its output: one document in each line."""
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("topics", "list", stdin=b"")`: one call of `spark-broker`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv(BOOTSTRAP_VARIABLE, raising=False)

    def call(*arguments: object, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        status = ended.value.code
        return Ended(status if isinstance(status, int) else 1 if status else 0, said.out, said.err)

    return call


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, run: Run) -> Iterator[FakeCluster]:
    """A fake cluster, whose addresses the environment names."""
    fake_cluster = FakeCluster(3)
    monkeypatch.setenv(BOOTSTRAP_VARIABLE, fake_cluster.bootstrap)
    yield fake_cluster
    fake_cluster.close()
