"""How tests start Spark's JVMs, which are many and end soon. `python -m tests.support.spark_jvms` writes an archive.

An archive of application class data (AppCDS) holds the classes that a start of Spark loads, parsed and verified. A JVM
that maps it takes half the processor time to start. A JVM whose class path differs ignores it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "share" / "spark-broker" / "spark-classes.jsa"

SPARK = Path(getattr(importlib.util.find_spec("pyspark"), "origin", "")).parent

SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Without the optimizing compiler and its collector, a JVM that ends soon takes half the processor time."""

QUIET = "-Xshare:auto -Xlog:disable -Xlog:all=error:stderr"
"""The launcher of Spark has another class path: it must not warn about the archive in its output, which Spark reads."""

WRITE_S = 300


def use() -> None:
    """Every JVM that this process or a child starts from now on starts fast. Options that a user has set stay."""
    archive = f' -XX:SharedArchiveFile="{ARCHIVE}" {QUIET}' if ARCHIVE.exists() else ""
    os.environ.setdefault("JDK_JAVA_OPTIONS", SHORT_LIVED + archive)
    # The archive is of this class path. In another SPARK_HOME, which applications get by default, it would not count.
    os.environ.setdefault("SPARK_HOME", str(SPARK))


def write() -> None:
    """Run an application that does what tests do, and keep what classes it loaded."""
    ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ARCHIVE.parent) as directory:
        written = Path(directory) / ARCHIVE.name
        options = f'{SHORT_LIVED} -XX:ArchiveClassesAtExit="{written}" -Xlog:disable -Xlog:all=error:stderr'
        environment = {**os.environ, "SPARK_SUBMIT_OPTS": options}
        environment.pop("JDK_JAVA_OPTIONS", None)
        command = [sys.executable, "-c", APPLICATION, directory]
        done = subprocess.run(command, env=environment, timeout=WRITE_S, check=False)
        if done.returncode != 0 or not written.exists():
            sys.exit(
                "no archive of Spark's classes was written: tests start Spark more slowly, and the next run tries again"
            )
        written.rename(ARCHIVE)


APPLICATION = """
import sys
from pyspark.sql import SparkSession
from spark_broker import configure_spark

builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = configure_spark(builder).getOrCreate()
jvm = spark.sparkContext._gateway.proc
table = sys.argv[1] + "/table"
spark.range(100).selectExpr("id % 7 a", "string(id) b").write.parquet(table)
frame = spark.read.parquet(table)
frame.groupBy("a").count().orderBy("a").join(frame.limit(5), "a").collect()
frame.toArrow()
spark.sparkContext.parallelize(range(6), 3).map(lambda n: n).collect()
query = spark.readStream.schema(frame.schema).parquet(table).writeStream.format("noop")
query.option("checkpointLocation", sys.argv[1] + "/checkpoint").trigger(availableNow=True).start().awaitTermination()
spark.stop()
jvm.stdin.close()
jvm.wait()
"""


if __name__ == "__main__":
    write()
