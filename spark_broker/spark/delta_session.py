"""What a Spark session needs for Delta: two JARs, an extension and a catalog. Nothing is resolved at run time."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_broker.driver.session import submitted_settings
from spark_broker.errors import MissingDependencyError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JARS = ("delta-spark_4.2_2.13-4.4.0.jar", "delta-storage-4.4.0.jar")
"""The JARs that fit PySpark 4.2. They are all that Delta needs."""

PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"
"""For --packages; it brings the other JAR."""

SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}

CHECK_PAGES = "parquet.page.verify-checksum.enabled"
"""Parquet keeps a checksum of each page. Without this setting, Spark hands out what a flipped bit has made of a row."""

FITTING = "4.4."
"""How a version of Delta begins that fits PySpark 4.2. Others fail somewhere inside of Spark."""

NAME = "delta-spark"

SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Spark sets this variable for a Python that spark-submit has started: the JVM runs already."""

HINT = (
    f"Put {JARS[0]} and {JARS[1]} on spark.jars, or start with --packages {PACKAGE}; "
    "in a checkout, `make setup` downloads them."
)


def configure_delta(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Set on a session's builder what Delta needs, and the user has not set. Files of tables are checked when read.

    The JARs are the user's (spark.jars, spark.jars.packages, or PySpark's directory of JARs), or those that
    `make setup` downloaded. Under spark-submit the JVM runs already, so they must be the user's. Raises
    MissingDependencyError where there are none.
    """
    explicit = {**submitted_settings(), **{k: str(v) for k, v in builder._options.items()}}
    if not has_jars(explicit):
        jars = downloaded_jars()
        if not jars:
            raise MissingDependencyError("Delta's JARs are missing", hint=HINT)
        if SUBMITTED in os.environ:
            raise MissingDependencyError(
                "spark-submit was started without Delta's JARs, and its JVM takes no more",
                hint=f"Submit with --jars {','.join(map(str, jars))}",
            )
        given = explicit.get("spark.jars", "")
        builder = builder.config("spark.jars", ",".join([*filter(None, [given]), *map(str, jars)]))
    extensions = explicit.get("spark.sql.extensions", "")
    if SETTINGS["spark.sql.extensions"] not in extensions.split(","):
        both = ",".join(filter(None, [extensions, SETTINGS["spark.sql.extensions"]]))
        builder = builder.config("spark.sql.extensions", both)
    pages = f"spark.hadoop.{CHECK_PAGES}"
    if pages not in explicit:
        builder = builder.config(pages, "true")
    catalog = "spark.sql.catalog.spark_catalog"
    return builder if catalog in explicit else builder.config(catalog, SETTINGS[catalog])


def configure_delta_where_there(builder: SparkSession.Builder) -> SparkSession.Builder:
    """`configure_delta`, but nothing where Delta's JARs are missing: the session is for more than Delta."""
    try:
        return configure_delta(builder)
    except MissingDependencyError as error:
        logger.info("this session has no Delta: %s", error)
        return builder


def has_jars(settings: Mapping[str, str]) -> bool:
    """Whether the user's settings, or PySpark's directory of JARs, bring Delta's JARs."""
    return NAME in settings.get("spark.jars", "") + settings.get("spark.jars.packages", "") or bool(installed_jars())


def installed_jars() -> list[Path]:
    """Delta's JARs in PySpark's own directory of JARs, where somebody has put them."""
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        return []
    return sorted((Path(pyspark.origin).parent / "jars").glob("delta-*.jar"))


def downloaded_jars() -> list[Path]:
    """The JARs that `make setup` put into the virtual environment; none if one is missing."""
    directory = Path(sys.prefix) / "share" / "spark-broker" / "jars"
    jars = [directory / name for name in JARS]
    return jars if all(jar.exists() for jar in jars) else []


def check_delta(spark: SparkSession) -> None:
    """Raise MissingDependencyError where the session lacks Delta's JARs, its extension or its catalog.

    So it does where Python lacks the package delta-spark, and where the JARs are of a Delta that does not fit Spark.
    """
    if importlib.util.find_spec("delta") is None:
        raise MissingDependencyError("this Python has no delta-spark", hint="pip install 'spark-broker[spark]'")
    jvm = spark._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()  # type: ignore[union-attr]
    if loader.getResource("org/apache/spark/sql/delta/DeltaLog.class") is None:
        raise MissingDependencyError("this session has no Delta: its JARs are missing", hint=HINT)
    version = str(jvm.io.delta.package.VERSION())  # type: ignore[union-attr]
    if not version.startswith(FITTING):
        raise MissingDependencyError(
            f"this session has Delta {version}, which does not fit Spark {spark.version}", hint=HINT
        )
    for name, value in SETTINGS.items():
        if value not in (spark.conf.get(name, "") or ""):
            raise MissingDependencyError(
                f"this session lacks {name} = {value}", hint="Build it with configure_delta(configure_spark(builder))."
            )


def delta_snapshot(spark: SparkSession, path: str) -> Any:
    """Delta's snapshot (a Java object) of the newest version of the table. Its version is negative: there is no table.

    Spark may have an older one in a cache, when another process has written since.
    """
    jvm = spark._jvm
    log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, path)  # type: ignore[union-attr]
    nothing = jvm.scala.Option.empty()  # type: ignore[union-attr]
    return log.update(False, nothing, nothing)


def why_incomplete(snapshot: Any) -> str:
    """Why a snapshot of Delta's (a Java object) lacks a commit: an entry of its log is empty. Empty text: none is.

    Delta takes such an entry for a commit of nothing. It writes none: each has the commit's own line at least.
    """
    entries = snapshot.logSegment().deltas()
    for index in range(entries.size()):
        if entries.apply(index).getLen() == 0:
            return f"the entry {entries.apply(index).getPath().getName()} of its log is empty"
    return ""


def transactions_of(snapshot: Any) -> dict[str, int]:
    """The newest transaction of each application, in a snapshot of Delta's (a Java object)."""
    transactions = snapshot.setTransactions()
    return {
        str(transactions.apply(index).appId()): int(transactions.apply(index).version())
        for index in range(transactions.size())
    }
