"""The tree of commands."""

from __future__ import annotations

from typing import Annotated

import typer

import spark_broker
from spark_broker.cli import cluster, groups, log_dirs, topics, transactions
from spark_broker.cli.check_history import check_history_file
from spark_broker.cli.consume import consume
from spark_broker.cli.doctor import doctor
from spark_broker.cli.dump_log import dump_log
from spark_broker.cli.leader_election import leader_election
from spark_broker.cli.pages_and_jobs import docs, jobs
from spark_broker.cli.perf import perf
from spark_broker.cli.produce import produce
from spark_broker.cli.simulate import simulate

app = typer.Typer(
    help="A replicated, partitioned, append-only log whose brokers are Spark executors.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would load its Markdown, its highlighter and pydantic for every help text
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spark-broker {spark_broker.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What comes before the command."""


app.add_typer(cluster.cluster, name="cluster")
app.add_typer(topics.topics, name="topics")
app.add_typer(groups.groups, name="groups")
app.add_typer(transactions.transactions, name="transactions")
app.add_typer(log_dirs.log_dirs, name="log-dirs")
app.command()(produce)
app.command()(consume)
app.command()(leader_election)
app.command()(doctor)
app.command()(dump_log)
app.command("check-history")(check_history_file)
app.add_typer(perf, name="perf")
app.command()(simulate)
app.command()(docs)
app.add_typer(jobs, name="jobs")
