"""Spark finds the source by itself, and pays nothing for it until it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(code: str, cwd: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_an_installed_checkout_is_found_from_anywhere_as_spark_looks_for_it(tmp_path: Path) -> None:
    looked = "import pkgutil; print(*(m.name for m in pkgutil.iter_modules() if m.name.startswith('pyspark_')))"
    assert "pyspark_spark_broker" in run(looked, tmp_path)


def test_the_module_that_spark_imports_unguarded_loads_nothing_of_ours(tmp_path: Path) -> None:
    """An error in anything that it loaded would break every Python data source of the session."""
    loaded = (
        "import sys, pyspark_spark_broker; print(*(name for name in sys.modules if name.startswith('spark_broker')))"
    )
    assert run(loaded, tmp_path) == []


def test_the_source_itself_loads_no_grpc_before_it_connects(tmp_path: Path) -> None:
    """Spark's Python daemon may have loaded it already when it forks a worker."""
    modules = "spark_broker.spark.source, spark_broker.spark.writer"
    assert run(f"import sys, {modules}; print('pyarrow.flight' in sys.modules)", tmp_path) == ["False"]
