"""`spark-broker leader-election`: give partitions back to their preferred leaders, or any leader at all."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

from spark_broker.cli.options import Bootstrap, OutputFormat, OutputOption, open_admin
from spark_broker.cli.output import note, print_json, print_table
from spark_broker.cli.partition_lists import partition_numbers
from spark_broker.errors import ElectionNotNeededError, InvalidConfigError, SparkBrokerError
from spark_broker.model import TopicPartition


class ElectionType(StrEnum):
    """Kafka's names."""

    PREFERRED = "preferred"
    UNCLEAN = "unclean"


def leader_election(
    election_type: Annotated[
        ElectionType,
        typer.Option(
            help="preferred: the first replica, where it is in sync. unclean: any live replica of partitions that have "
            "no leader; records that it does not have are lost."
        ),
    ],
    topic: Annotated[str, typer.Option(help="Name of the topic.")] = "",
    partition: Annotated[int | None, typer.Option(min=0, help="Number of the partition. Default: all.")] = None,
    all_topic_partitions: Annotated[
        bool, typer.Option("--all-topic-partitions", help="Every partition of every topic.")
    ] = False,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Elect leaders. Status 1 when a partition that was named could not be given one."""
    if bool(topic) == all_topic_partitions or (partition is not None and not topic):
        raise InvalidConfigError(
            "nothing, or too much, is named to elect leaders of",
            hint="Give --topic (with or without --partition), or --all-topic-partitions.",
        )
    with open_admin(bootstrap_server) as admin:
        wanted = None
        if topic:
            numbers = partition_numbers(admin, topic)
            wanted = [TopicPartition(topic, n) for n in (numbers if partition is None else [partition])]
        results = admin.elect_leaders(wanted, unclean=election_type is ElectionType.UNCLEAN)
    _show(results, output)
    if any(error is not None and not isinstance(error, ElectionNotNeededError) for error in results.values()):
        raise typer.Exit(1)


def _show(results: Mapping[TopicPartition, SparkBrokerError | None], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json(
            [
                {
                    "topic": tp.topic,
                    "partition": tp.partition,
                    "error": None if error is None else error.name,
                    "message": "" if error is None else error.message,
                }
                for tp, error in sorted(results.items())
            ]
        )
    elif results:
        rows = [(tp.topic, tp.partition, "elected" if e is None else str(e)) for tp, e in sorted(results.items())]
        print_table(("topic", "partition", "result"), rows, right=("partition",))
    else:
        note("no partition needs an election")
