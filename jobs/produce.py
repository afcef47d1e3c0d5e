"""Writes what Spark can read (files, a table, a query) to a topic in one transaction, or each file of a directory once.

    spark-submit jobs/produce.py --bootstrap-servers HOST:PORT --topic flights --create --format csv flights/

With `--checkpoint DIR` a run takes the files that have come since the last one; `--follow` goes on until it is ended.
Ctrl-C or SIGTERM ends it in order, and it says how many rows there were.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# Runs from a checkout, too: spark-submit puts the script's own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs.submitted import FORMAT, add_pairs, exit_status, observed, records_until_end, session, wrong_arguments

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write files, a table or a query to a topic.")
    source = parser.add_argument_group("what is read")
    source.add_argument("paths", nargs="*", metavar="FILE", help="files or directories")
    source.add_argument("--table", metavar="NAME", help="instead of files: a table or view")
    source.add_argument("--query", metavar="SQL", help="instead of files: a query")
    source.add_argument("--format", default="parquet", help="of the files: csv, json, text, ... (default parquet)")
    source.add_argument("--schema", metavar="DDL", help='of the files: "dest STRING, delay INT" (default: as found)')
    add_pairs(source, "--option", "an option of the format, such as header=true")
    source.add_argument(
        "--select",
        action="append",
        default=[],
        metavar="EXPR",
        help='such as "CAST(id AS STRING) AS key" (all columns)',
    )
    topic = parser.add_argument_group("where it goes")
    topic.add_argument("--bootstrap-servers", required=True, metavar="HOST:PORT,...")
    topic.add_argument("--topic", metavar="NAME", help="default: each row names its own in the column topic")
    topic.add_argument("--create", action="store_true", help="create the topic with these columns if it does not exist")
    topic.add_argument("--partitions", metavar="N", help="of a topic to create")
    topic.add_argument("--replication-factor", metavar="N", help="of a topic to create")
    add_pairs(topic, "--topic-config", "a setting of a topic to create, such as key.columns=dest")
    add_pairs(topic, "--write-option", "an option of the write, such as compression.type=zstd")
    once = parser.add_argument_group("once only")
    once.add_argument("--app-id", metavar="NAME", help="with --app-version: this version is written once")
    once.add_argument("--app-version", metavar="N", help="a number that rises from run to run, such as a date")
    once.add_argument("--checkpoint", metavar="DIR", help="write only files that came since the last run with this one")
    once.add_argument("--follow", action="store_true", help="with --checkpoint: go on as files come")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Write it; returns the exit status."""
    options = arguments(given)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Write it, and print how many rows there were."""
    check(options)
    with session(f"produce {options.topic or 'by column'}") as spark:
        began = time.monotonic()
        rows = write_new_files(spark, options) if options.checkpoint else write_all(spark, options)
        took_s = time.monotonic() - began
    print(f"{rows:,} rows are in {options.topic or 'their topics'} after {took_s:.1f} s")


def check(options: argparse.Namespace) -> None:
    """Raises InvalidConfigError for arguments that do not go together."""
    sources = [bool(options.paths), options.table is not None, options.query is not None]
    if sum(sources) != 1:
        raise wrong_arguments("give files, --table or --query: one of them")
    if options.checkpoint and not options.paths:
        raise wrong_arguments("--checkpoint is for files: give one directory of them")
    if options.checkpoint and (len(options.paths) != 1 or options.app_id or options.app_version):
        raise wrong_arguments("--checkpoint takes one directory, and no --app-id: its files are written once anyway")
    if options.follow and not options.checkpoint:
        raise wrong_arguments("--follow needs --checkpoint")


def write_options(options: argparse.Namespace) -> dict[str, str]:
    """The options of the write."""
    named = {
        "bootstrap.servers": options.bootstrap_servers,
        "topic": options.topic,
        "createTopic": "true" if options.create else None,
        "topic.partitions": options.partitions,
        "topic.replication.factor": options.replication_factor,
        **{f"topic.{name}": value for name, value in options.topic_config},
        "txnAppId": options.app_id,
        "txnVersion": options.app_version,
        **dict(options.write_option),
    }
    return {name: value for name, value in named.items() if value is not None}


def selected(frame: DataFrame, expressions: Sequence[str]) -> DataFrame:
    """The columns to write."""
    return frame.selectExpr(*expressions) if expressions else frame


def write_all(spark: SparkSession, options: argparse.Namespace) -> int:
    """Write everything in one transaction; returns the number of rows."""
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    observed = Observation()
    frame = selected(read(spark, options), options.select).observe(observed, count(lit(1)).alias("rows"))
    frame.write.format(FORMAT).mode("append").options(**write_options(options)).save()
    return int(observed.get["rows"])


def read(spark: SparkSession, options: argparse.Namespace) -> DataFrame:
    """The rows to write."""
    if options.table is not None:
        return spark.table(options.table)
    if options.query is not None:
        return spark.sql(options.query)
    reader = spark.read.format(options.format).options(**dict(options.option))
    return (reader.schema(options.schema) if options.schema else reader).load(options.paths)


EVERY_AGE = {"maxFileAge": "36500d"}
"""Spark leaves out files that are a week older than the newest one it has seen: `mv`, `cp -p` and `tar` bring such."""


def write_new_files(spark: SparkSession, options: argparse.Namespace) -> int:
    """Write the files of the directory that were not written before; returns the number of rows."""
    # A stream of files does not look for its schema by itself.
    schema = options.schema or read(spark, options).schema
    reader = spark.readStream.format(options.format).options(**{**EVERY_AGE, **dict(options.option)}).schema(schema)
    stream = observed(selected(reader.load(options.paths[0]), options.select)).writeStream.format(FORMAT)
    stream = stream.options(**write_options(options)).option("checkpointLocation", options.checkpoint)
    return records_until_end(spark, (stream if options.follow else stream.trigger(availableNow=True)).start)


if __name__ == "__main__":
    sys.exit(main())
