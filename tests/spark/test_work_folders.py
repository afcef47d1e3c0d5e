"""Where executors on `local-cluster[...]` work in an environment as users have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 200

PROGRAM = """
import os
from pyspark.sql import SparkSession
from spark_broker import configure_spark

spark = configure_spark(SparkSession.builder.master("local-cluster[1,1,1024]")).getOrCreate()
print("works in", spark.sparkContext.parallelize([0], 1).map(lambda _: os.getcwd()).collect()[0])
"""


@pytest.mark.full
def test_executors_work_in_the_state_directory_and_not_in_site_packages(tmp_path: Path) -> None:
    """Story: half an hour left 56 MB in site-packages."""
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**environment, "XDG_STATE_HOME": str(tmp_path / "state")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("works in ")]
    assert Path(line.removeprefix("works in ")).is_relative_to(tmp_path / "state" / "spark-broker")
