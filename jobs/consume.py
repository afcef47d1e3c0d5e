"""Reads topics into files, a table or the console: all records, those since the last run, or new ones for ever.

    spark-submit jobs/consume.py --bootstrap-servers HOST:PORT --topic flights --to flights.parquet

With `--checkpoint DIR` a run takes the records that have come since the last one; `--follow` goes on until it is ended.
Ctrl-C or SIGTERM ends it in order, and it says how many records there were.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

# Runs from a checkout, too: spark-submit puts the script's own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs.submitted import FORMAT, add_pairs, exit_status, observed, records_until_end, session, wrong_arguments
from spark_broker.cli.output import counted
from spark_broker.driver.session import submitted_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CONSOLE_ROWS = 20
CONSOLE = "the console"
TIME_ZONE = "spark.sql.session.timeZone"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Read topics into files, a table or the console.")
    source = parser.add_argument_group("what is read")
    source.add_argument("--bootstrap-servers", required=True, metavar="HOST:PORT,...")
    source.add_argument("--topic", required=True, metavar="NAME,...", help="topics of equal schemas")
    add_pairs(source, "--option", "an option of the read, such as startingOffsets=latest")
    source.add_argument(
        "--select", action="append", default=[], metavar="EXPR", help='such as "CAST(value AS STRING)" (all columns)'
    )
    source.add_argument("--where", metavar="CONDITION", help='such as "delay > 15"')
    target = parser.add_argument_group("where it goes (default: the console)")
    target.add_argument("--to", metavar="PATH", help="files")
    target.add_argument("--table", metavar="NAME", help="a table of the catalog")
    target.add_argument("--format", metavar="NAME", help="parquet (the default), csv, json, orc, delta, ...")
    target.add_argument("--mode", choices=("append", "overwrite", "error"), help="where something is there (error)")
    target.add_argument("--rows", type=int, default=CONSOLE_ROWS, metavar="N", help="of the console (default 20)")
    add_pairs(target, "--write-option", "an option of the format, such as header=true")
    stream = parser.add_argument_group("again and again")
    stream.add_argument("--checkpoint", metavar="DIR", help="only records that came since the last run with this one")
    stream.add_argument("--follow", action="store_true", help="go on as records come, until the job is ended")
    stream.add_argument("--every", type=float, metavar="SECONDS", help="with --follow: how often (as soon as possible)")
    stream.add_argument("--group", metavar="NAME", help="publish the progress as this group's committed offsets")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Read it; returns the exit status."""
    options = arguments(given)
    return exit_status(lambda: run(options))


def check(options: argparse.Namespace) -> None:
    """Raises InvalidConfigError for arguments that do not go together."""
    if options.to is not None and options.table is not None:
        raise wrong_arguments("give --to or --table, not both")
    if is_stream(options) and options.mode is not None:
        raise wrong_arguments("--mode is for one run: with --checkpoint or --follow, records are appended")
    if options.every is not None and not options.follow:
        raise wrong_arguments("--every needs --follow")
    if options.group is not None and not is_stream(options):
        raise wrong_arguments("--group needs --checkpoint or --follow: one run over what there is has no progress")
    if options.follow and not options.checkpoint and (options.to or options.table):
        raise wrong_arguments("--follow into files or a table needs --checkpoint: a restart would write all again")


def is_stream(options: argparse.Namespace) -> bool:
    """Whether it is a streaming query."""
    return bool(options.checkpoint or options.follow)


def run(options: argparse.Namespace) -> None:
    """Read it, and print how many records there were."""
    check(options)
    with session(f"consume {options.topic}") as spark:
        if target_of(options) == CONSOLE:
            show_utc(spark)
        began = time.monotonic()
        records = stream(spark, options) if is_stream(options) else read_once(spark, options)
        took_s = time.monotonic() - began
        where = target_of(options)
        if where == CONSOLE:
            where += f", with times in {spark.conf.get(TIME_ZONE)},"
    print(f"{counted(records, 'record', 'records')} of {options.topic} went to {where} in {took_s:.1f} s")


def target_of(options: argparse.Namespace) -> str:
    """Where the records go, for people."""
    return options.to or options.table or CONSOLE


def show_utc(spark: SparkSession) -> None:
    """Show times as the command line does, unless the user has set a zone. Spark shows them without one."""
    if TIME_ZONE not in submitted_settings():
        spark.conf.set(TIME_ZONE, "UTC")


def read_options(options: argparse.Namespace) -> dict[str, str]:
    """The options of the read. Without other options, a stream reads from the first record on, as one run does."""
    return {
        "bootstrap.servers": options.bootstrap_servers,
        "subscribe": options.topic,
        "startingOffsets": "earliest",
        **({"group": options.group} if options.group else {}),
        **dict(options.option),
    }


def shaped(frame: DataFrame, options: argparse.Namespace) -> DataFrame:
    """The rows and columns that are selected."""
    if options.where:
        frame = frame.where(options.where)
    return frame.selectExpr(*options.select) if options.select else frame


def read_once(spark: SparkSession, options: argparse.Namespace) -> int:
    """Read all records that are there now; returns their number."""
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    frame = shaped(spark.read.format(FORMAT).options(**read_options(options)).load(), options)
    if options.to is None and options.table is None:
        frame.show(options.rows, truncate=False)
        return frame.count()
    observed = Observation()
    writer = frame.observe(observed, count(lit(1)).alias("records")).write.format(options.format or "parquet")
    writer = writer.mode(options.mode or "error").options(**dict(options.write_option))
    if options.table is not None:
        writer.saveAsTable(options.table)
    else:
        writer.save(options.to)
    return int(observed.get["records"])


def stream(spark: SparkSession, options: argparse.Namespace) -> int:
    """Read the new records, and with --follow those that come later; returns their number."""
    return records_until_end(spark, lambda: start(spark, options))


def start(spark: SparkSession, options: argparse.Namespace) -> StreamingQuery:
    """The query. Without a checkpoint of its own (the console), Spark makes one for this run."""
    frame = shaped(spark.readStream.format(FORMAT).options(**read_options(options)).load(), options)
    writer = observed(frame).writeStream.options(**dict(options.write_option))
    if options.checkpoint:
        writer = writer.option("checkpointLocation", options.checkpoint)
    if not options.follow:
        writer = writer.trigger(availableNow=True)
    elif options.every is not None:
        writer = writer.trigger(processingTime=f"{options.every:g} seconds")
    if options.table is not None:
        return writer.format(options.format or "parquet").toTable(options.table)
    if options.to is not None:
        return writer.format(options.format or "parquet").start(options.to)
    return writer.format("console").option("truncate", "false").option("numRows", str(options.rows)).start()


if __name__ == "__main__":
    sys.exit(main())
