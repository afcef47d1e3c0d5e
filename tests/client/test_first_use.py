"""A client's first operations import nothing: pandas alone would cost seconds in the middle of an append."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.client.fake_broker import FakeCluster


@pytest.mark.parametrize(
    "operations",
    [
        ["append", "transaction", "consume", "commit", "committed", "end offsets"],
        ["send"],
        ["keyed append"],
    ],
    ids=", ".join,
)
def test_a_first_operation_imports_nothing(cluster: FakeCluster, operations: list[str]) -> None:
    cluster.create("first", 2)
    command = [sys.executable, "-m", "tests.support.first_use", cluster.bootstrap, *operations]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {name: [] for name in operations}
