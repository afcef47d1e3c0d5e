"""`spark-broker transactions`: list, describe, abort."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from spark_broker.cli.options import Bootstrap, OutputFormat, OutputOption, open_admin
from spark_broker.cli.output import abridged, confirm, dashed, note, print_json, print_table
from spark_broker.model import TransactionInfo

transactions = typer.Typer(help="List, describe and abort transactions.", no_args_is_help=True)

TransactionalId = Annotated[
    str, typer.Option("--transactional-id", metavar="ID", help="A producer's transactional.id, or an application.")
]


class State(StrEnum):
    """Of a transactional id: `TransactionInfo.state`."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"


@transactions.command("list")
def list_transactions(
    state: Annotated[
        list[State] | None, typer.Option(case_sensitive=False, help="Only ids in this state. May be repeated.")
    ] = None,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the transactional ids that the cluster knows, and the state of each."""
    with open_admin(bootstrap_server) as admin:
        transactions = admin.list_transactions()
    transactions = [transaction for transaction in transactions if not state or transaction.state in state]
    if output is OutputFormat.JSON:
        print_json(transactions)
        return
    rows = [
        (
            transaction.transactional_id,
            transaction.state,
            dashed(transaction.version),
            dashed(transaction.last_committed),
            len(transaction.writers),
            len(transaction.partitions),
            f"{transaction.idle:,.1f}",
            transaction.coordinator,
        )
        for transaction in transactions
    ]
    columns = ("transactional id", "state", "version", "committed", "writers", "partitions", "idle s", "coordinator")
    print_table(columns, rows, title="transactions", right=columns[2:])
    if not transactions and sys.stdout.isatty():
        none = f"No transactional id is {' or '.join(state)}" if state else "There are no transactions"
        note(f"{none}: producers with a transactional.id make some.")


@transactions.command()
def describe(
    transactional_id: TransactionalId, bootstrap_server: Bootstrap = "", output: OutputOption = OutputFormat.TABLE
) -> None:
    """Show one transactional id: its state, its writers, and the partitions of the open transaction."""
    with open_admin(bootstrap_server) as admin:
        transaction = admin.describe_transaction(transactional_id)
    if output is OutputFormat.JSON:
        print_json(transaction)
    else:
        print_table(("", ""), _rows(transaction), title=f"transactional id {transactional_id}")


@transactions.command()
def abort(
    transactional_id: TransactionalId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap_server: Bootstrap = "",
) -> None:
    """Abort the open transaction of an id, before its time-out would. Asks first on a terminal."""
    confirm(f"Abort the open transaction of {transactional_id}?", yes=yes)
    with open_admin(bootstrap_server) as admin:
        admin.abort_transaction(transactional_id)
    note(f"aborted the transaction of {transactional_id}")


def _rows(transaction: TransactionInfo) -> list[tuple[str, object]]:
    writers = [f"{producer_id} (epoch {epoch})" for producer_id, epoch in transaction.writers]
    rows: list[tuple[str, object]] = [
        ("state", transaction.state),
        ("coordinator", f"broker {transaction.coordinator} (leader epoch {transaction.coordinator_epoch})"),
        ("time-out", f"{transaction.timeout:,g} s, idle for {transaction.idle:,.1f} s"),
        ("writers", abridged(writers)),
        ("partitions", abridged([str(partition) for partition in transaction.partitions])),
    ]
    if transaction.execution:
        rows[1:1] = [
            ("version", dashed(transaction.version)),
            ("execution", transaction.execution),
            ("last committed", dashed(transaction.last_committed)),
        ]
    return rows
