"""The whole idea in two minutes: a log on Spark's executors, real data, a killed executor, and nothing is lost.

    make demo

Starts a cluster application and appends the flights of 2013. When a third of the rows is acknowledged, it kills the
executor that leads the most partitions. It then compares what is in the topic with what was sent. Status 0 only if both
are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

# `python jobs/demo.py` puts the script's own folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import demo_snapshot
from jobs.ack_log import Ack, AckTail, longest_gap_s
from jobs.compare_flights import Reading, Result
from jobs.demo_processes import DemoError, SparkProcess, kill
from jobs.demo_snapshot import Snapshot
from jobs.flights import read_flights
from jobs.produce_flights import TOPIC
from spark_broker.client.admin import Admin
from spark_broker.errors import SparkBrokerError
from spark_broker.model import BrokerInfo

MASTER = "local-cluster[3,2,1024]"
BROKERS = 3
START_TIMEOUT_S = 240.0
PRODUCE_TIMEOUT_S = 600.0
CONSUME_TIMEOUT_S = 300.0
ELECTION_TIMEOUT_S = 30.0
REJOIN_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.05
LOOK_S = 0.25


@dataclass
class Story:
    """What has happened so far."""

    began: float = field(default_factory=time.monotonic)
    acks: list[Ack] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    victim: BrokerInfo | None = None
    killed: float = 0.0
    killed_at_rows: int = 0
    elected_s: float = 0.0
    rejoined_s: float | None = None
    look_again: float = 0.0
    result: Result | None = None


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run the main job end to end, with a killed executor.")
    parser.add_argument("--rows", type=int, metavar="N", help="only the first N flights (default: all 336,776)")
    parser.add_argument("--rate", type=float, default=20_000, metavar="R", help="rows a second (default 20,000)")
    parser.add_argument("--keep", action="store_true", help="keep the directory with logs, segments and results")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = arguments(given)
    console = Console(highlight=False)
    # A terminated demo must end its children as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    directory = Path(tempfile.mkdtemp(prefix="spark-broker-demo-"))
    held = False
    try:
        held = run(options, directory, console)
    except (DemoError, SparkBrokerError) as error:
        console.print("[bold red]The demo failed:[/]", end=" ")
        console.print(str(error), markup=False)
    except KeyboardInterrupt:
        console.print("\ninterrupted")
    finally:
        if options.keep or not held:
            console.print(f"Logs and data are in {directory}", markup=False)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return 0 if held else 1


def run(options: argparse.Namespace, directory: Path, console: Console) -> bool:
    """The story from start to end; returns whether every comparison held."""
    total = read_flights(options.rows).num_rows
    story = Story()
    with cluster(directory, console) as bootstrap:
        with Admin(bootstrap) as admin:
            append_and_kill(options, bootstrap, admin, total, directory, console, story)
            await_rejoin(admin, console, story)
        compare(options, bootstrap, directory, console, story)
    tell(story, console)
    return story.result is not None and story.result.holds


@contextlib.contextmanager
def cluster(directory: Path, console: Console) -> Iterator[str]:
    """Run the cluster application; yields its bootstrap servers. It is ended in order, or by force where that fails."""
    ready = directory / "ready.json"
    settings = ["--set", f"log.dirs={directory / 'data'}"]
    arguments = ["--brokers", str(BROKERS), "--ready-file", str(ready), *settings]
    began = time.monotonic()
    with SparkProcess("cluster.py", arguments, directory / "cluster.log", master=MASTER) as process:
        with console.status(f"spark-submit jobs/cluster.py: {BROKERS} brokers on {MASTER} ..."):
            process.wait_until(ready.exists, "the brokers were live", START_TIMEOUT_S)
        description = json.loads(ready.read_bytes())
        say(console, f"{BROKERS} brokers are live on {BROKERS} executors", time.monotonic() - began)
        yield description["bootstrap_servers"]
        began = time.monotonic()
        with console.status("stopping the cluster in order ..."):
            process.terminate(description["driver_pid"])
            status = process.wait(STOP_TIMEOUT_S)
        if status != 0:
            raise DemoError(f"the cluster ended with status {status}; its log: {process.log}")
        say(console, "the cluster has stopped in order", time.monotonic() - began)


def append_and_kill(
    options: argparse.Namespace,
    bootstrap: str,
    admin: Admin,
    total: int,
    directory: Path,
    console: Console,
    story: Story,
) -> None:
    """Run the producer job; at a third of its rows, kill the executor that leads the most."""
    tail = AckTail(directory / "acks.jsonl")
    arguments = ["--bootstrap-servers", bootstrap, "--ack-log", str(directory / "acks.jsonl")]
    arguments += ["--rate", str(options.rate), "--rows", str(total)]
    began = time.monotonic()
    with (
        SparkProcess("produce_flights.py", arguments, directory / "produce.log") as process,
        bar(console, total) as show,
    ):

        def acknowledged(rows: int) -> Callable[[], bool]:
            return lambda: show(tail.read()) >= rows

        process.wait_until(acknowledged(1), "a row was acknowledged", PRODUCE_TIMEOUT_S)
        story.snapshots.append(demo_snapshot.take(admin, TOPIC, "before"))
        process.wait_until(acknowledged(total // 3), "a third of the rows was acknowledged", PRODUCE_TIMEOUT_S)
        kill_busiest(story, console)
        story.killed_at_rows = show(tail.read())
        if story.killed_at_rows >= total:
            raise DemoError("all rows were acknowledged before the kill: it proves nothing. Lower --rate")
        await_election(admin, story)
        done = acknowledged(total)

        def finished() -> bool:
            look_for_rejoin(admin, story)
            return done()

        process.wait_until(finished, "all rows were acknowledged", PRODUCE_TIMEOUT_S)
        if process.wait(STOP_TIMEOUT_S) != 0:
            raise DemoError(f"{process.job}: {process.last_line()} (its log: {process.log})")
    story.acks = tail.acks
    say(console, f"{total:,} rows are acknowledged; the producer went on by itself", time.monotonic() - began)


def kill_busiest(story: Story, console: Console) -> None:
    """`kill -9` the JVM of the executor whose broker leads the most partitions."""
    before = story.snapshots[0]
    victim = story.victim = before.busiest()
    story.killed = time.monotonic()
    kill(victim.executor_pid)
    console.print(
        f"[bold red]✗[/] kill -9 {victim.executor_pid}: executor {victim.executor_id} with broker {victim.id}, "
        f"which led {before.leads()[victim.id]} of {len(before.topic.partitions)} partitions"
    )


def await_election(admin: Admin, story: Story) -> None:
    """Wait until brokers that live lead every partition. Raises DemoError when that takes too long."""
    pause = threading.Event()
    while not _elected(during := demo_snapshot.take(admin, TOPIC, "during"), story.victim):
        if time.monotonic() - story.killed > ELECTION_TIMEOUT_S:
            raise DemoError(f"partitions are without a leader {ELECTION_TIMEOUT_S:g} s after the kill")
        pause.wait(POLL_S)
    story.elected_s = time.monotonic() - story.killed
    story.snapshots.append(during)


def _elected(now: Snapshot, victim: BrokerInfo | None) -> bool:
    """Whether live brokers lead everything and the victim is known to be gone (its successor may have its id)."""
    live = {broker.id for broker in now.brokers}
    gone = victim is not None and (victim.id, victim.epoch) not in {(broker.id, broker.epoch) for broker in now.brokers}
    return gone and all(partition.leader in live for partition in now.topic.partitions)


def look_for_rejoin(admin: Admin, story: Story) -> bool:
    """Whether every ISR is whole again; notes when that was first seen. Looks a few times a second."""
    now = time.monotonic()
    if story.rejoined_s is None and now >= story.look_again:
        after = demo_snapshot.take(admin, TOPIC, "after")
        story.look_again = time.monotonic() + LOOK_S
        if after.isr_is_whole():
            story.rejoined_s = time.monotonic() - story.killed
            story.snapshots.append(after)
    return story.rejoined_s is not None


def await_rejoin(admin: Admin, console: Console, story: Story) -> None:
    """Wait until the replacement is in sync, at most for `REJOIN_TIMEOUT_S`: nothing depends on it."""
    deadline = time.monotonic() + REJOIN_TIMEOUT_S
    pause = threading.Event()
    with console.status("waiting until the replacement has caught up ..."):
        while not look_for_rejoin(admin, story) and time.monotonic() < deadline:
            pause.wait(POLL_S)
    if story.rejoined_s is None:
        story.snapshots.append(demo_snapshot.take(admin, TOPIC, "after"))
        console.print("[yellow]![/] the replacement is not back in every ISR yet; nothing depends on it")
    else:
        console.print("[bold green]✓[/] the replacement has caught up: every ISR is whole again")


def compare(options: argparse.Namespace, bootstrap: str, directory: Path, console: Console, story: Story) -> None:
    """Run the consumer job, and read its result."""
    result = directory / "result.json"
    arguments = ["--bootstrap-servers", bootstrap, "--result-file", str(result)]
    if options.rows is not None:
        arguments += ["--rows", str(options.rows)]
    began = time.monotonic()
    with SparkProcess("compare_flights.py", arguments, directory / "compare.log", master="local[2]") as process:
        with console.status("spark-submit jobs/compare_flights.py: reading it back and comparing ..."):
            process.wait(CONSUME_TIMEOUT_S)
        if not result.exists():
            raise DemoError(f"compare_flights.py: {process.last_line()} (its log: {process.log})")
    story.result = msgspec.json.decode(result.read_bytes(), type=Result)
    say(console, "the topic was read back twice and compared with the source", time.monotonic() - began)


@contextlib.contextmanager
def bar(console: Console, total: int) -> Iterator[Callable[[int], int]]:
    """A bar of the acknowledged rows. Yields a function that shows a number of rows and returns it."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("spark-submit jobs/produce_flights.py: flights acknowledged", total=total)

        def show(rows: int) -> int:
            bars.update(task, completed=rows)
            return rows

        yield show


def say(console: Console, text: str, seconds: float) -> None:
    """Print a step that is done, and how long it took."""
    console.print(f"[bold green]✓[/] {text} [dim]({seconds:.1f} s)[/]")


def tell(story: Story, console: Console) -> None:
    """Print the results."""
    if story.result is None or story.victim is None:
        return
    console.print()
    console.print(demo_snapshot.table(story.snapshots, story.victim.id))
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("killed", f"broker {story.victim.id} with its executor, at row {story.killed_at_rows:,}")
    facts.add_row("every partition led again", f"{story.elected_s:.2f} s after kill -9")
    rejoined = "not yet" if story.rejoined_s is None else f"{story.rejoined_s:.1f} s after kill -9"
    facts.add_row("replacement in every ISR", rejoined)
    facts.add_row("longest time without an acknowledgement", f"{longest_gap_s(story.acks):.2f} s")
    for reading in (story.result.dataframe, story.result.consumer):
        facts.add_row(f"rows compared, {reading.comparison.reader}", _verdict(reading))
    facts.add_row("same row at every offset for both", "yes" if story.result.same_offsets else "[red]no[/]")
    facts.add_row("total time", f"{time.monotonic() - story.began:.0f} s")
    console.print(facts)
    console.print()
    for example in (*story.result.dataframe.comparison.examples, *story.result.consumer.comparison.examples):
        console.print(example, markup=False)
    if story.result.holds:
        console.print(
            Panel.fit("[bold green]Nothing lost, nothing twice, order kept per key.[/]", border_style="green")
        )
    else:
        console.print(Panel.fit("[bold red]What was read is not what was sent.[/]", border_style="red"))


def _verdict(reading: Reading) -> str:
    comparison = reading.comparison
    if comparison.holds:
        return f"{comparison.rows_read:,} of {comparison.rows_sent:,}, all equal"
    return (
        f"[red]{comparison.rows_read:,} of {comparison.rows_sent:,}: "
        f"{comparison.rows_lost:,} lost, {comparison.rows_extra:,} twice or changed, "
        f"{comparison.keys_out_of_order} keys out of order, {comparison.keys_split} in several partitions, "
        f"{comparison.offsets_broken} partitions with broken offsets[/]"
    )


if __name__ == "__main__":
    sys.exit(main())
