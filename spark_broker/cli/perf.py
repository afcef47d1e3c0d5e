"""`spark-broker perf`: how fast this cluster is, from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import spark_broker
from spark_broker.cli.options import (
    Bootstrap,
    OutputFormat,
    OutputOption,
    Settings,
    bootstrap_servers,
    parse_settings,
    reading_settings,
)
from spark_broker.cli.output import note, print_json, print_table
from spark_broker.cli.partition_lists import partition_numbers
from spark_broker.errors import TopicAlreadyExistsError
from spark_broker.model import NewTopic, TopicPartition

if TYPE_CHECKING:
    from spark_broker.cli.measure import ConsumeFigures, ProduceFigures

perf = typer.Typer(help="Measure a producer and a consumer.", no_args_is_help=True)

TopicOption = Annotated[str, typer.Option(help="Topic of Kafka's record.")]


@perf.command("produce")
def perf_produce(
    topic: TopicOption = "perf",
    records: Annotated[int, typer.Option(min=1, help="Records to append.")] = 1_000_000,
    record_size: Annotated[int, typer.Option(min=0, help="Bytes of a value.")] = 100,
    batch_records: Annotated[int, typer.Option(min=1, help="Records in a micro-batch.")] = 10_000,
    acks: Annotated[str, typer.Option(help="0, 1 or all.")] = "all",
    warmup: Annotated[int, typer.Option(min=0, help="Records appended before the clock starts.")] = 100_000,
    partitions: Annotated[int, typer.Option(min=1, help="Where the topic is not there yet.")] = 3,
    replication_factor: Annotated[int | None, typer.Option(min=1, help="Where the topic is not there yet.")] = None,
    config: Settings = None,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Append random records as fast as they are acknowledged. Makes the topic if it is not there."""
    servers = bootstrap_servers(bootstrap_server)
    from spark_broker.cli.measure import measure_produce, random_records

    batch = random_records(min(batch_records, records), record_size)
    with spark_broker.Admin(servers) as admin:
        try:
            admin.create_topic(NewTopic(topic, partitions, replication_factor))
            note(f"created topic {topic}; `spark-broker topics delete {topic}` removes it")
        except TopicAlreadyExistsError:
            pass  # It is measured as it is.
    with spark_broker.Producer(servers, acks=acks, config=parse_settings(config)) as producer:
        figures = measure_produce(producer, topic, records, batch, warmup=warmup)
    if output is OutputFormat.JSON:
        print_json({"topic": topic, "acks": acks, "record_size": record_size, **_plain(figures)})
    else:
        print_produce(figures, f"{topic}: acks={acks}, {record_size}-byte records, {batch.num_rows:,} in a batch")


@perf.command("consume")
def perf_consume(
    topic: TopicOption = "perf",
    records: Annotated[int | None, typer.Option(min=1, help="Records to read. Default: all there are.")] = None,
    config: Settings = None,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Read a topic from its beginning."""
    servers = bootstrap_servers(bootstrap_server)
    from spark_broker.cli.measure import measure_consume

    with spark_broker.Admin(servers) as admin:
        chosen = [TopicPartition(topic, number) for number in partition_numbers(admin, topic)]
    with spark_broker.Consumer(servers, config=reading_settings(config), enable_auto_commit=False) as consumer:
        figures = measure_consume(consumer, chosen, records)
    if output is OutputFormat.JSON:
        print_json({"topic": topic, **_plain(figures)})
    else:
        rows = [("records", f"{figures.records:,}"), ("records/s", f"{figures.records_per_s:,}")]
        rows += [("MB/s", f"{figures.mb_per_s:,}"), ("seconds", f"{figures.seconds:.2f}")]
        print_table(("", topic), rows, right=[topic])


def print_produce(figures: ProduceFigures, title: str) -> None:
    """The figures as a table."""
    latency = figures.latency
    rows = [
        ("records", f"{figures.records:,}"),
        ("records/s", f"{figures.records_per_s:,}"),
        ("MB/s", f"{figures.mb_per_s:,}"),
        ("seconds", f"{figures.seconds:.2f}"),
        ("batches sent again", f"{figures.retries:,}"),
    ]
    for name in ("p50", "p95", "p99", "p999", "max"):
        rows.append(
            (f"latency of a batch {name.replace('p999', 'p99.9')}", f"{getattr(latency, name + '_ms'):,.2f} ms")
        )
    print_table(("", "value"), rows, title=title, right=["value"])


def _plain(figures: ProduceFigures | ConsumeFigures) -> dict[str, object]:
    return {name: getattr(figures, name) for name in figures.__struct_fields__}
