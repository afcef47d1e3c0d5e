"""The soak: `make soak`, or `python -m tests.soak.run --help`.

Clients, topics, transactions, groups and failovers come and go for an hour; memory, threads and open files of two
brokers, the controller and the clients are to stay where they are. A third broker is killed again and again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from spark_broker.broker.hosting import FEW_ARENAS
from tests.soak import census
from tests.soak.samples import Growth, Line, Sample, growth
from tests.support.process_cluster import ProcessCluster

KILLED = 2
"""The slot of the broker that is killed."""

FORGETS_SOON = {
    "log.retention.check.interval.ms": 10_000,
    "producer.id.expiration.ms": 120_000,
    "producer.id.expiration.check.interval.ms": 10_000,
}
"""By default a cluster remembers every producer id for a day, as Kafka does; that must not look like a leak."""

SAMPLE_S = 5.0
END_S = 180.0


class Report(msgspec.Struct):
    """What a run found."""

    minutes: float
    kills: int
    growth: list[Growth]
    done: dict[str, int]
    samples: dict[str, list[Sample]]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests.soak.run", description="What grows when everything comes and goes.")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="how long (default 60)")
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="S", help="between kills (default 60)")
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what to print on stdout")
    return parser.parse_args(given)


def soak(directory: Path, minutes: float, kill_every_s: float) -> Report:
    """Run the soak."""
    samples: dict[str, list[Sample]] = {}
    kills = 0
    counts = directory / "census"
    counts.mkdir()
    os.environ[census.DIRECTORY] = str(counts)
    with ProcessCluster(directory, 3, FORGETS_SOON, entry="tests.soak.census:run_broker") as cluster:
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.soak.clients", cluster.bootstrap_servers, str(minutes * 60)]
        # As docs/reliability.md advises for a service: what glibc keeps in many arenas would hide what is ours.
        clients = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **FEW_ARENAS})
        watched = {f"broker {slot}": psutil.Process(cluster.pid(slot)) for slot in range(3) if slot != KILLED}
        watched |= {"controller": psutil.Process(cluster.controller.pid), "clients": psutil.Process(clients.pid)}
        pause, next_kill = threading.Event(), began + kill_every_s
        while not pause.wait(SAMPLE_S) and (at_s := time.monotonic() - began) < minutes * 60:
            for name, process in watched.items():
                samples.setdefault(name, []).append(Sample.of(process, round(at_s, 1)))
            if time.monotonic() >= next_kill:
                os.kill(cluster.pid(KILLED), signal.SIGKILL)
                kills, next_kill = kills + 1, next_kill + kill_every_s
            cluster.launch_ended()
        done = json.loads(clients.communicate(timeout=END_S)[0])
    growths = [growth(name, taken) for name, taken in samples.items()]
    return Report(minutes=minutes, kills=kills, growth=growths, done=done, samples=samples)


def show(report: Report) -> None:
    """Print the report as tables."""
    console = Console(width=120)
    table = Table(title=f"{report.minutes:g} minutes", caption="mean, and its growth an hour; threads and files: more")
    for heading in ("process", "memory, MB", "of that in use, MB", "Python objects", "threads", "open files"):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for process_growth in report.growth:
        lines = (_line(process_growth.memory), _line(process_growth.used), _line(process_growth.objects, digits=0))
        table.add_row(process_growth.name, *lines, f"{process_growth.threads:+d}", f"{process_growth.files:+d}")
    console.print(table)
    done = Table("done", "times", title=f"{report.kills} kills of a broker")
    for name, count in report.done.items():
        done.add_row(name, f"{count:,}")
    console.print(done)


def _line(line: Line | None, *, digits: int = 1) -> str:
    return "-" if line is None else f"{line.mean:,.{digits}f} ({line.percent_h:+.2f} %)"


def main(given: list[str] | None = None) -> int:
    """Run and print."""
    options = arguments(given)
    with tempfile.TemporaryDirectory(prefix="spark-broker-soak-") as directory:
        report = soak(Path(directory), options.minutes, options.kill_every)
    if options.output == "json":
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
