"""`spark-broker log-dirs`: what brokers store and have set aside, and how a replica is brought back."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from spark_broker.cli.options import Bootstrap, OutputFormat, OutputOption, open_admin
from spark_broker.cli.output import fail, note, print_json, print_table
from spark_broker.model import LogDirInfo, SetAside
from spark_broker.pages import page
from spark_broker.times import shown

log_dirs = typer.Typer(help="Look at brokers' log directories, bring replicas back.", no_args_is_help=True)


class ReplicaLine(msgspec.Struct, frozen=True):
    """A replica in JSON; `kind`: "replica", or how it was set aside. `size_bytes`: None where it was set aside."""

    broker_id: int
    topic: str
    partition: int
    kind: str
    path: str
    size_bytes: int | None = None
    since: datetime | None = None


@log_dirs.command()
def describe(
    replicas: Annotated[bool, typer.Option("--replicas", help="Each replica with its size, too.")] = False,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show each broker's log directory, and the replicas that brokers have set aside."""
    with open_admin(bootstrap_server) as admin:
        described = admin.describe_log_dirs()
    if output is OutputFormat.JSON:
        print_json([line for info in described for line in _lines(info)])
        return
    rows = [(info.broker_id, info.path, len(info.replicas), info.size_bytes, len(info.set_aside)) for info in described]
    columns = ("broker", "log directory", "replicas", "bytes", "set aside")
    print_table(columns, rows, title="log directories", right=columns[2:])
    if replicas:
        sizes = [(info.broker_id, str(tp), size) for info in described for tp, size in info.replicas.items()]
        print_table(("broker", "replica", "bytes"), sizes, title="replicas", right=("bytes",))
    aside = [found for info in described for found in info.set_aside]
    if aside:
        print_table(
            ("broker", "replica", "kind", "since", "path"),
            [(a.broker_id, str(a.topic_partition), a.kind, _shown(a.since), a.path) for a in aside],
            title="replicas that were set aside",
        )
        note(f"A stray is whole: `spark-broker log-dirs restore PATH` brings it back: {page('backup')}.")


@log_dirs.command()
def restore(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Directories that end with `.stray`.")],
) -> None:
    """Give strays their names again. Run this on the brokers' machine, while the cluster is stopped.

    The metadata must know their topics again: put the newest metadata.dir back first.
    """
    from spark_broker.storage.strays import bring_back, strays_in

    for path in dict.fromkeys(path.resolve() for path in paths):
        found = strays_in(path.parent) if path.parent.is_dir() else []
        stray = next((stray for stray in found if stray.replica.path == path), None)
        if stray is None:
            fail(f"{path} is no replica that was set aside as a stray")
        note(f"{path.name} is {bring_back(stray).name} again")


def _lines(info: LogDirInfo) -> list[ReplicaLine]:
    lines = [
        ReplicaLine(info.broker_id, tp.topic, tp.partition, "replica", info.path, size)
        for tp, size in info.replicas.items()
    ]
    return lines + [_line(found) for found in info.set_aside]


def _line(found: SetAside) -> ReplicaLine:
    tp = found.topic_partition
    return ReplicaLine(found.broker_id, tp.topic, tp.partition, found.kind, found.path, since=found.since)


def _shown(since: datetime | None) -> str:
    return "" if since is None else shown(since)
