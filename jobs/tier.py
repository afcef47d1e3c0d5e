"""Appends what is sealed of a topic to its Delta table (`delta.path`), in one commit. Runs again go on where it ended.

    spark-submit --jars delta-spark_4.2_2.13-4.4.0.jar,delta-storage-4.4.0.jar \\
        jobs/tier.py --bootstrap-servers HOST:PORT --topic flights

In a checkout they are in .venv/share/spark-broker/jars, and `python jobs/tier.py ...` finds them there.
Status 0: what was sealed of each topic is in its table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# Runs from a checkout, too: spark-submit puts the script's own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs.submitted import exit_status, session, told_in_a_line
from spark_broker.history.attempt import TieredTopic
from spark_broker.history.tierer import tier_topic
from spark_broker.model import dead_letters_path
from spark_broker.spark.delta_session import configure_delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Append what is sealed of topics to their Delta tables.")
    parser.add_argument("--bootstrap-servers", required=True, metavar="HOST:PORT,...")
    parser.add_argument("--topic", required=True, action="append", metavar="NAME", help="may be repeated")
    parser.add_argument(
        "--include-active-segments",
        action="store_true",
        help="all that is committed, not only segments that are sealed (segment.bytes, segment.ms)",
    )
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Tier the topics; returns the exit status."""
    options = arguments(given)
    statuses: list[int] = []
    statuses.append(exit_status(lambda: statuses.extend(run(options))))
    return max(statuses)


def run(options: argparse.Namespace) -> Iterator[int]:
    """Tier each topic, and print what went into its table. The status of each: one that fails holds up no other."""
    with session(f"tier {', '.join(options.topic)}", configured) as spark:
        for topic in options.topic:
            yield told_in_a_line(partial(tier, spark, topic, options))


def tier(spark: SparkSession, topic: str, options: argparse.Namespace) -> None:
    """Tier this topic, and print what went into its table."""
    began = time.monotonic()
    active = options.include_active_segments
    tiered = tier_topic(spark, topic, options.bootstrap_servers, include_active_segments=active)
    print(said_of(tiered, time.monotonic() - began))


def configured(builder: SparkSession.Builder) -> SparkSession.Builder:
    """With Delta; a person at a terminal sees Spark's bar of tasks."""
    return configure_delta(builder.config("spark.ui.showConsoleProgress", str(sys.stderr.isatty()).lower()))


def said_of(tiered: TieredTopic, took_s: float) -> str:
    """One line for people."""
    deleted = f"; records before offsets {tiered.log_starts} are deleted" if any(tiered.log_starts) else ""
    if tiered.table_version is None:
        return f"{tiered.topic}: nothing is sealed that is not in {tiered.path}{deleted}"
    if tiered.quarantined:
        deleted += f"; {tiered.quarantined:,} records that it refuses are in {dead_letters_path(tiered.path)}"
    size = f"{tiered.size_bytes / 1e6:,.1f} MB in {tiered.files} {'file' if tiered.files == 1 else 'files'}"
    return (
        f"{tiered.topic}: {tiered.records:,} records are in {tiered.path}, version {tiered.table_version} "
        f"({size}) after {took_s:.1f} s{deleted}"
    )


if __name__ == "__main__":
    sys.exit(main())
