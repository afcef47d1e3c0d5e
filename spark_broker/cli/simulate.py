"""`spark-broker simulate`: whole clusters in simulated time, one seed as a story or many on all cores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spark_broker.cli.options import OutputFormat, OutputOption
from spark_broker.cli.output import counted, fail, print_json, print_table, progress
from spark_broker.testing.simulation.trace import Trace, TraceKind, TraceNote

if TYPE_CHECKING:
    from rich.text import Text

    from spark_broker.testing.simulation.many import Finding, Summary
    from spark_broker.testing.simulation.schedule import ScheduleResult

STYLES = {
    TraceKind.FAULT: "bold yellow",
    TraceKind.PROCESS: "cyan",
    TraceKind.METADATA: "green",
    TraceKind.REPLICA: "",
    TraceKind.CLIENT: "magenta",
    TraceKind.VIOLATION: "bold red",
}
LAST_NOTES = 12
FINDINGS_SHOWN = 20


def _default_events() -> int:
    """Called when the command runs: the simulator is not loaded to print a help text."""
    from spark_broker.testing.simulation.schedule import DEFAULT_EVENTS

    return DEFAULT_EVENTS


def simulate(
    events: Annotated[
        int,
        typer.Option(
            help="Events of a schedule before it heals.", min=1, default_factory=_default_events, show_default=False
        ),
    ],
    seed: Annotated[int | None, typer.Option(help="Replay this one seed and print its story.")] = None,
    schedules: Annotated[int, typer.Option(help="Run this many seeds.", min=1)] = 1000,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    processes: Annotated[int | None, typer.Option(help="Processes; by default one for each core.", min=1)] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Simulate whole clusters with faults: the same seed gives the same story. Status 1 when a rule is broken."""
    if seed is not None:
        _replay(seed, events, output)
        return
    from spark_broker.testing.simulation.many import run_many

    with progress("schedules", schedules) as tell:
        summary = run_many(
            schedules, first_seed=first_seed, events=events, processes=processes, progress=tell, found=_tell_finding
        )
    if output is OutputFormat.JSON:
        print_json(_as_dict(summary))
    else:
        _print_summary(summary)
    if summary.findings:
        raise typer.Exit(1)


def _replay(seed: int, events: int, output: OutputFormat) -> None:
    from spark_broker.testing.simulation.schedule import run_schedule

    result, trace = run_schedule(seed, events, story=True)
    if output is OutputFormat.JSON:
        print_json({"result": result, "notes": trace.notes})
    else:
        _print_story(result, trace, events)
    if result.violation is not None:
        raise typer.Exit(1)


def _print_story(result: ScheduleResult, trace: Trace, events: int) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for note in trace.notes:
        console.print(_line(note))
    console.print(
        f"seed {result.seed}: {counted(result.events, 'event', 'events')} in {result.virtual_ms / 1000:.1f} virtual "
        f"seconds, {counted(result.acknowledged, 'append', 'appends')} acknowledged, trace {result.digest[:16]}"
    )
    if result.violation is None:
        console.print(Text("no rule was broken, and after healing everything was in its place", style="bold green"))
        return
    console.print(Text(f"broken: {result.violation.rule}", style="bold red"))
    console.print(Text(result.violation.message))
    about = [note for note in trace.notes if note.partition and note.partition == result.violation.partition]
    if about:
        console.print(Text(f"the last notes about {result.violation.partition}:", style="bold"))
        for note in about[-LAST_NOTES:]:
            console.print(_line(note))
    console.print(f"again: spark-broker simulate --seed {result.seed} --events {events}")


def _line(note: TraceNote) -> Text:
    from rich.text import Text

    line = Text(f"{note.time_us / 1000:10.1f} ms  ", style="dim")
    line.append(f"{note.who:<14}", style="bold")
    line.append(note.text, style=STYLES[note.kind])
    return line


def _as_dict(summary: Summary) -> dict[str, object]:
    return {
        "schedules": summary.schedules,
        "first_seed": summary.first_seed,
        "events_asked": summary.events_asked,
        "events": summary.events,
        "virtual_ms": summary.virtual_ms,
        "acknowledged": summary.acknowledged,
        "cpu_s": round(summary.cpu_s, 1),
        "wall_s": round(summary.wall_s, 1),
        "schedules_per_minute_and_core": round(summary.schedules_per_minute_and_core),
        "coverage": dict(sorted(summary.counts.items())),
        "findings": summary.findings,
    }


def _tell_finding(finding: Finding) -> None:
    """Print a finding at once, beside the progress bar: it can be examined before a long run ends."""
    typer.echo(f"seed {finding.seed} breaks a rule: {finding.rule}: {finding.message}", err=True)


def _print_summary(summary: Summary) -> None:
    print_table(["what happened", "how often"], sorted(summary.counts.items()), right=["how often"])
    last_seed = summary.first_seed + summary.schedules - 1
    typer.echo(
        f"{counted(summary.schedules, 'schedule', 'schedules')} (seeds {summary.first_seed} to {last_seed}), "
        f"{counted(summary.events, 'event', 'events')}, "
        f"{counted(summary.acknowledged, 'append', 'appends')} acknowledged, {summary.virtual_ms / 1000:,.0f} virtual s"
    )
    typer.echo(
        f"{summary.wall_s:.1f} s; {summary.schedules_per_minute_and_core:,.0f} schedules a minute and core of CPU time"
    )
    if not summary.findings:
        typer.echo("0 violations")
        return
    print_table(["seed", "rule", "what"], [(f.seed, f.rule, f.message) for f in summary.findings[:FINDINGS_SHOWN]])
    fail(f"{counted(len(summary.findings), 'violation', 'violations')}; see `spark-broker simulate --seed N`")
