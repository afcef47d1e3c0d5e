"""`spark-broker topics`: create, list and describe topics, change and delete them, delete records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from spark_broker.cli.options import Bootstrap, OutputFormat, OutputOption, Settings, Topic, open_admin, parse_settings
from spark_broker.cli.output import confirm, counted, note, print_json, print_table
from spark_broker.config import TopicConfig
from spark_broker.errors import InvalidConfigError, TopicAlreadyExistsError
from spark_broker.model import HistoryInfo, NewTopic, TopicDescription, TopicPartition

topics = typer.Typer(help="Create, list, describe, change and delete topics.", no_args_is_help=True)


@topics.command()
def create(
    topic: Topic,
    partitions: Annotated[int | None, typer.Option(min=1, help="Default: num.partitions of the cluster.")] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Default: default.replication.factor, or else one on each broker, 3 at most.",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:TYPE",
            help="A column: `at:timestamp`, `price:decimal(10, 2)`, `tags:list<string>`, `id:int64 not null`; may be "
            "repeated (`spark-broker docs typed-topics`). None: Kafka's record.",
        ),
    ] = None,
    config: Settings = None,
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="Not an error when it exists.")] = False,
    bootstrap_server: Bootstrap = "",
) -> None:
    """Create a topic."""
    schema = None
    if column:
        from spark_broker.cli.columns import parse_schema

        schema = parse_schema(column)
    settings: dict[str, object] = dict(parse_settings(config))
    TopicConfig.parse(settings)
    with open_admin(bootstrap_server) as admin:
        try:
            admin.create_topic(NewTopic(topic, partitions, replication_factor, schema, settings))
        except TopicAlreadyExistsError:
            if not if_not_exists:
                raise
            note(f"topic {topic} exists")
        else:
            note(f"created topic {topic}: {_shape(admin.describe_topic(topic, with_offsets=False))}")


def _shape(topic: TopicDescription) -> str:
    replicas = counted(len(topic.partitions[0].replicas), "replica", "replicas")
    return f"{counted(len(topic.partitions), 'partition', 'partitions')}, {replicas} of each"


@topics.command("list")
def list_topics(
    internal: Annotated[bool, typer.Option("--internal", help="Internal topics, too.")] = False,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the topics, one name on a line."""
    with open_admin(bootstrap_server) as admin:
        names = admin.list_topics(include_internal=internal)
    if output is OutputFormat.JSON:
        print_json(list(names))
        return
    for name in names:
        typer.echo(name)
    if not names and sys.stdout.isatty():
        note("There are no topics yet: `spark-broker topics create NAME`.")


@topics.command()
def describe(topic: Topic, bootstrap_server: Bootstrap = "", output: OutputOption = OutputFormat.TABLE) -> None:
    """Show a topic's partitions: leader, replicas, ISR, offsets; its settings and columns."""
    with open_admin(bootstrap_server) as admin:
        description = admin.describe_topic(topic)
    if output is OutputFormat.JSON:
        print_json(to_json(description))
    else:
        print_description(description)


@topics.command()
def delete(
    topic: Topic,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap_server: Bootstrap = "",
) -> None:
    """Delete a topic and all its records. Asks first on a terminal."""
    confirm(f"Delete topic {topic} and all its records?", yes=yes)
    with open_admin(bootstrap_server) as admin:
        admin.delete_topic(topic)
    note(f"deleted topic {topic}")


@topics.command()
def add_partitions(
    topic: Topic,
    partitions: Annotated[int, typer.Option("--partitions", "-p", min=1, help="How many the topic is to have.")],
    bootstrap_server: Bootstrap = "",
) -> None:
    """Raise the number of partitions. Keys then go elsewhere: their order holds from here on, not across."""
    with open_admin(bootstrap_server) as admin:
        admin.create_partitions(topic, partitions)
    note(f"topic {topic} has {partitions} partitions")


@topics.command()
def alter_config(
    topic: Topic,
    config: Settings = None,
    reset: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A setting that gets the cluster's default; may be repeated."),
    ] = None,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Change settings of a topic. Those that are not named stay."""
    settings: dict[str, object] = dict(parse_settings(config))
    if not settings and not reset:
        raise InvalidConfigError("nothing is named to change", hint="Give --config NAME=VALUE, or --reset NAME.")
    defaults = TopicConfig().to_dict()
    for name in reset or ():
        if settings.get(name) is not None:
            raise InvalidConfigError(f"{name} is to be set and reset", hint="Nothing was changed. Name it once.")
        TopicConfig.parse({name: defaults.get(name, "")})
        settings[name] = None
    TopicConfig.parse({name: value for name, value in settings.items() if value is not None})
    with open_admin(bootstrap_server) as admin:
        admin.alter_topic_config(topic, settings)
        described = admin.describe_topic(topic, with_offsets=False)
    if output is OutputFormat.JSON:
        print_json(dict(described.config))
        return
    has = ", ".join(f"{name}={value}" for name, value in sorted(described.config.items()))
    note(f"topic {topic} has {has or 'the defaults of the cluster'}")


@topics.command()
def alter_schema(
    topic: Topic,
    column: Annotated[
        list[str],
        typer.Option(metavar="NAME:TYPE", help="A column to add, or one with its wider type; may be repeated."),
    ],
    bootstrap_server: Bootstrap = "",
) -> None:
    """Add columns to a typed topic, or widen their types. Older records have null in new columns."""
    from spark_broker.cli.columns import parse_schema

    with open_admin(bootstrap_server) as admin:
        admin.alter_topic_schema(topic, parse_schema(column))
        described = admin.describe_topic(topic, with_offsets=False)
    note(f"topic {topic} has schema {described.schema_id}: {', '.join(described.schema.names)}")


@topics.command()
def delete_records(
    topic: Topic,
    before: Annotated[
        list[str],
        typer.Option("--before", metavar="PARTITION=OFFSET", help="May be repeated. -1: all that are committed."),
    ],
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Delete the records before an offset, in the log and in the topic's table. Nothing brings them back."""
    offsets = _offsets(topic, before)
    with open_admin(bootstrap_server) as admin:
        starts = admin.delete_records(offsets)
    if output is OutputFormat.JSON:
        print_json([{"partition": tp.partition, "log_start_offset": start} for tp, start in sorted(starts.items())])
        return
    rows = [(tp.partition, start) for tp, start in sorted(starts.items())]
    print_table(("partition", "begins at"), rows, title=f"topic {topic}", right=["partition", "begins at"])


def _offsets(topic: str, before: Sequence[str]) -> dict[TopicPartition, int]:
    """Raises InvalidConfigError, also for a partition with two offsets."""
    offsets: dict[TopicPartition, int] = {}
    for partition, offset in map(_before, before):
        if offsets.setdefault(TopicPartition(topic, partition), offset) != offset:
            raise InvalidConfigError(
                f"--before names partition {partition} with two offsets",
                hint="Nothing was deleted. Name each partition once.",
            )
    return offsets


def _before(text: str) -> tuple[int, int]:
    partition, _, offset = text.partition("=")
    try:
        return int(partition), int(offset)
    except ValueError:
        raise InvalidConfigError(
            f"--before {text!r} is not PARTITION=OFFSET", hint="Write it like `--before 0=1000`."
        ) from None


def to_json(description: TopicDescription) -> dict[str, object]:
    """A description in JSON's terms; columns by name and type, as `--column` takes them."""
    from spark_broker.cli.columns import spelled

    return {
        "name": description.name,
        "topic_id": description.topic_id,
        "internal": description.internal,
        "partitions": description.partitions,
        "schema": {field.name: spelled(field) for field in description.schema},
        "schema_id": description.schema_id,
        "config": dict(description.config),
        "history": description.history,
    }


def _print_history(description: TopicDescription, history: HistoryInfo) -> None:
    version = "not begun" if history.table_version is None else f"table version {history.table_version}"
    rows = [
        (
            partition.partition,
            partition.history_text or "-",
            "-" if partition.sealed_offset is None else partition.sealed_offset,
            "-" if partition.untiered is None else partition.untiered,
        )
        for partition in description.partitions
    ]
    title = f"history in {history.path}: {version}"
    print_table(("partition", "offsets", "sealed up to", "not in the table"), rows, title=title, right=["partition"])
    if history.quarantined:
        refused = counted(history.quarantined, "record that the table refuses is", "records that the table refuses are")
        note(f"{refused} in {history.dead_letters}")
    if history.stopped:
        note(f"tiering has stopped: {history.stopped}")
    note(history.next_run_text)


def print_description(description: TopicDescription) -> None:
    """Partitions, then what differs from the defaults, then the columns."""
    from spark_broker.cli.columns import spelled
    from spark_broker.protocol.schema import DEFAULT_SCHEMA

    moving = any(partition.adding for partition in description.partitions)
    rows = [
        (
            partition.partition,
            "none" if partition.leader is None else partition.leader,
            partition.leader_epoch,
            ",".join(map(str, partition.replicas)),
            ",".join(map(str, partition.isr)),
            *([",".join(map(str, partition.adding))] if moving else []),
            ",".join(map(str, partition.elr)),
            ",".join(map(str, partition.last_known_elr)),
            "-" if partition.log_start_offset is None else partition.log_start_offset,
            "-" if partition.high_watermark is None else partition.high_watermark,
        )
        for partition in description.partitions
    ]
    brokers = ("replicas", "isr", *(["being added"] if moving else []), "elr", "last known elr")
    columns = ("partition", "leader", "epoch", *brokers, "log start", "high watermark")
    right = [name for name in columns if name not in brokers]
    print_table(columns, rows, title=f"topic {description.name}", right=right)
    if description.history is not None:
        _print_history(description, description.history)
    defaults = TopicConfig().to_dict()
    changed = {name: value for name, value in description.config.items() if defaults.get(name) != value}
    if changed:
        print_table(("setting", "value"), sorted(changed.items()))
    if not description.schema.equals(DEFAULT_SCHEMA):
        print_table(("column", "type"), [(field.name, spelled(field)) for field in description.schema])
