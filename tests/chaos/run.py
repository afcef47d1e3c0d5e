"""The nemesis: `make chaos`, or `python -m tests.chaos.run --help`.

Random faults on real clusters under load, then the judgement: nothing acknowledged lost, doubled, moved or reordered.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tests.chaos.clients import Load
from tests.chaos.nemesis import TOPIC, Outcome, Tell, torment
from tests.chaos.network import isolated
from tests.chaos.process_target import ProcessTarget
from tests.chaos.show import progress, summary
from tests.chaos.spark_target import SparkTarget

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS_MAX_FACTOR = 2
RECORDS_OF_A_FAULT = 20_000
"""Bounds the history of a run that is given no number of records to acknowledge."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests.chaos.run", description="Random faults on real clusters under load.")
    parser.add_argument("--faults", type=int, default=20, metavar="N", help="faults in all (default 20)")
    parser.add_argument("--seed", type=int, help="what the faults are drawn from (default: a new one, printed)")
    parser.add_argument(
        "--on", choices=("processes", "spark", "both"), default="both", help="which clusters; both share the faults"
    )
    parser.add_argument("--records", type=int, default=0, metavar="N", help="acknowledge at least so many in all")
    parser.add_argument("--rate", type=float, default=2000.0, metavar="N", help="records a second (default 2,000)")
    parser.add_argument("--rows", type=int, default=100, metavar="N", help="records of a micro-batch (default 100)")
    parser.add_argument(
        "--snapshot-seconds", type=float, default=20.0, metavar="S", help="between whole reads; 0: none"
    )
    parser.add_argument("--no-dataframe", action="store_true", help="whole reads by a consumer, without Spark")
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what to print on stdout")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="run in this directory, and keep it")
    options = parser.parse_args(given)
    if options.faults < 0 or options.rate <= 0 or options.rows < 1:
        parser.error("--faults, --rate and --rows are not negative")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1_000_000)
    return options


def main(given: list[str] | None = None) -> int:
    """Run, print, and return the exit status: 0 when nothing is wrong."""
    arguments_ = sys.argv[1:] if given is None else given
    options = arguments(arguments_)
    command = ["-m", "tests.chaos.run", *arguments_]
    if "--seed" not in arguments_:
        command += ["--seed", str(options.seed)]
    no_network = "not asked for" if options.on == "spark" else isolated(command)
    with working_directory(options.keep) as directory:
        outcomes = run(options, directory, no_network)
        ok = all(outcome.ok for outcome in outcomes)
        if ok and options.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
            for outcome in outcomes:
                outcome.history = ""
        if options.output == "json":
            sys.stdout.write(msgspec.json.encode(outcomes).decode() + "\n")
        else:
            summary(outcomes, f"python {' '.join(command)}")
    return 0 if ok else 1


@contextmanager
def working_directory(keep: Path | None) -> Iterator[Path]:
    """Where clusters have their files. The files of a run that found something stay there."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    yield Path(tempfile.mkdtemp(prefix="spark-broker-chaos-"))


def run(options: argparse.Namespace, directory: Path, no_network: str) -> list[Outcome]:
    """One run on each of the clusters that were asked for."""
    names = ("processes", "spark") if options.on == "both" else (options.on,)
    shares = [options.faults // len(names) + (at < options.faults % len(names)) for at in range(len(names))]
    outcomes = []
    with progress() as tell, data_frames(options) as spark:
        for name, faults in zip(names, shares, strict=True):
            place = directory / name
            place.mkdir()
            with closing(
                ProcessTarget(place, TOPIC, no_network=no_network) if name == "processes" else SparkTarget(place, TOPIC)
            ) as target:
                outcomes.append(_run_one(options, target, place, faults, len(names), spark, tell))
    return outcomes


def _run_one(
    options: argparse.Namespace,
    target: ProcessTarget | SparkTarget,
    directory: Path,
    faults: int,
    parts: int,
    spark: SparkSession | None,
    tell: Tell,
) -> Outcome:
    records = -(-options.records // parts)
    load = Load(
        rate=options.rate,
        rows=options.rows,
        records_max=max(RECORDS_MAX_FACTOR * records, RECORDS_OF_A_FAULT * max(faults, 10)),
        snapshot_s=options.snapshot_seconds,
    )
    return torment(
        target, directory, seed=options.seed, faults=faults, load=load, records=records, spark=spark, tell=tell
    )


@contextmanager
def data_frames(options: argparse.Namespace) -> Iterator[SparkSession | None]:
    """A session that reads topics as DataFrames; it hosts no brokers."""
    if options.no_dataframe:
        yield None
        return
    from pyspark.sql import SparkSession

    from spark_broker.driver.session import configure_spark

    builder = SparkSession.builder.master("local[1]").appName("chaos reader").config("spark.ui.enabled", "false")
    session = configure_spark(builder).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        session.stop()


if __name__ == "__main__":
    sys.exit(main())
