"""What a command loads before it connects: no client, no Arrow, no simulator. A person waits for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MODULES_MAX = 400
"""With Arrow, numpy and the clients it would be more than 600."""

HEAVY = (
    *("pyarrow", "numpy", "pyspark", "py4j", "pandas", "rich.markdown", "spark_broker.client.admin"),
    *("spark_broker.testing.simulation.schedule", "spark_broker.testing.checker", "spark_broker.driver.session"),
)

PROGRAM = """
import json, sys
from spark_broker.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print()
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["topics", "create", "--help"],
        ["simulate", "--help"],
        ["consume"],
        ["topics", "list"],
        ["produce", "t", "--partition", "x"],
        ["perf", "produce"],
    ],
    ids=" ".join,
)
def test_a_command_loads_little_before_it_connects(arguments: list[str], tmp_path: object) -> None:
    environment = {"PATH": "", "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**environment, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    modules = set(json.loads(run.stdout.splitlines()[-1]))
    assert "spark_broker.cli.app" in modules
    assert modules.intersection(HEAVY) == set()
    assert len(modules) <= MODULES_MAX
