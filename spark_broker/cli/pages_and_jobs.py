"""`spark-broker docs` and `spark-broker jobs`: what the package brings beside its modules."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_broker.cli.installed import JOBS, job_file, page_file, page_names, share

jobs = typer.Typer(help="Find the jobs for spark-submit.", no_args_is_help=True)


def docs(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A page, such as `hosting`. None: list them.")] = "",
    path: Annotated[bool, typer.Option("--path", help="Print where the file is instead of its text.")] = False,
) -> None:
    """Show a page of the documentation that belongs to this version."""
    if not name:
        typer.echo("\n".join(page_names()))
    elif path:
        typer.echo(page_file(name))
    else:
        typer.echo(page_file(name).read_text(encoding="utf-8"), nl=False)


@jobs.command("path")
def jobs_path(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help=f"One of {', '.join(JOBS)}. None: the directory of all.")
    ] = "",
) -> None:
    """Print where a job is: `spark-submit "$(spark-broker jobs path produce)" --help`."""
    typer.echo(job_file(name) if name else share() / "jobs")
