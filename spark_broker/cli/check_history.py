"""`spark-broker check-history`: judges a history that a simulation or a chaos run has saved. Needs no cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from spark_broker.cli.options import OutputFormat, OutputOption
from spark_broker.cli.output import print_json

if TYPE_CHECKING:
    from spark_broker.testing.checker import CheckResult
    from spark_broker.testing.history import History, Stored

EVERYTHING = 1 << 62


class ViolationLine(msgspec.Struct, frozen=True):
    """A violation in JSON."""

    kind: str
    topic: str
    partition: int
    offset: int
    detail: str


class HistoryVerdict(msgspec.Struct, frozen=True):
    """What a history proves, in JSON."""

    acknowledged_values: int
    failed_values: int
    values_read: int
    committed_transactions: int
    aborted_transactions: int
    unknown_transactions: int
    violations: list[ViolationLine]


def check_history_file(
    path: Annotated[Path, typer.Argument(help="A saved history (history.jsonl).", exists=True, dir_okay=False)],
    log_dirs: Annotated[
        list[Path] | None,
        typer.Option(help="log.dirs of the brokers, to tell a lost value from one not delivered; may be repeated."),
    ] = None,
    column: Annotated[str, typer.Option(help="Column of the values in the segment files.")] = "value",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Judge a saved history and explain its first anomalies. Status 1 when there are any."""
    from spark_broker.testing.checker import check_history
    from spark_broker.testing.history_file import load_history
    from spark_broker.testing.report import explain

    history = load_history(path)
    result = check_history(history, _stored(history, log_dirs or [], column))
    if output is OutputFormat.JSON:
        print_json(_verdict(result))
    else:
        typer.echo(explain(history, result))
    if not result.ok:
        raise typer.Exit(1)


def _stored(history: History, log_dirs: list[Path], column: str) -> Iterator[Stored]:
    from spark_broker.testing.history import Invoked
    from spark_broker.testing.replicas import find_replicas, stored_values

    partitions = {event.partition for event in history.events if isinstance(event, Invoked)} if log_dirs else set()
    for partition in sorted(partitions):
        for replica in find_replicas(log_dirs, partition):
            yield from stored_values(replica, column, EVERYTHING)


def _verdict(result: CheckResult) -> HistoryVerdict:
    return HistoryVerdict(
        acknowledged_values=result.acknowledged_values,
        failed_values=result.failed_values,
        values_read=result.values_read,
        committed_transactions=result.committed_transactions,
        aborted_transactions=result.aborted_transactions,
        unknown_transactions=result.unknown_transactions,
        violations=[
            ViolationLine(
                violation.kind.name,
                violation.partition.topic,
                violation.partition.partition,
                violation.offset,
                violation.detail,
            )
            for violation in result.violations
        ],
    )
