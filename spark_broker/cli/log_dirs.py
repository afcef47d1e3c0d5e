"""`spark-broker log-dirs`: what brokers store and have set aside, and how a replica is brought back."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from spark_broker.cli.options import Bootstrap, OutputFormat, OutputOption, open_admin
from spark_broker.cli.output import note, print_error, print_json, print_table
from spark_broker.errors import InvalidDataError, KafkaStorageError, SparkBrokerError
from spark_broker.model import LogDirInfo, SetAside
from spark_broker.pages import page
from spark_broker.times import shown

if TYPE_CHECKING:
    from spark_broker.storage.strays import Stray

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

    The metadata must know their topics again: put the newest metadata.dir back first. Status 1 when one of them could
    not be restored; the others are.
    """
    chosen, restored = list(dict.fromkeys(path.resolve() for path in paths)), 0
    strays: dict[Path, list[Stray]] = {}  # of each directory, which is read once
    for path in chosen:
        try:
            name = _restored(path, strays).name
        except SparkBrokerError as error:
            print_error(str(error))
        except OSError as error:
            print_error(f"{error.filename or path}: {error.strerror}")
        else:
            restored += 1
            note(f"{path.name} is {name} again")
    if restored < len(chosen):
        note(f"{restored} of {len(chosen)} are restored")
        raise typer.Exit(1)


def _restored(path: Path, strays: dict[Path, list[Stray]]) -> Path:
    """Where the stray is now. Raises InvalidDataError, LogDirectoryLockedError, KafkaStorageError and OSError."""
    from spark_broker.storage.strays import bring_back, strays_in

    if path.parent not in strays:
        strays[path.parent] = strays_in(path.parent) if path.parent.is_dir() else []
    stray = next((stray for stray in strays[path.parent] if stray.replica.path == path), None)
    if stray is None:
        raise InvalidDataError(
            f"{path} is no replica that was set aside as a stray",
            hint="Give directories that end with `.stray`, of one of a broker's partitions.",
        )
    try:
        return bring_back(stray)
    except KafkaStorageError as error:
        taken = path.parent / f"{stray.replica.topic}-{stray.replica.partition}"
        raise KafkaStorageError(
            error.message, hint=f"Move or delete {taken} first, or leave {path.name} out."
        ) from error


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
