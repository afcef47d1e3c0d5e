"""`spark-broker produce`: lines of standard input as records."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Annotated, BinaryIO

import typer

import spark_broker
from spark_broker.cli.options import (
    Bootstrap,
    OutputFormat,
    OutputOption,
    Settings,
    Topic,
    bootstrap_servers,
    parse_settings,
)
from spark_broker.cli.output import counted, note, print_json, progress
from spark_broker.errors import InvalidDataError
from spark_broker.model import RecordMetadata

CHUNK_BYTES = 1024 * 1024
LINE_BYTES_MAX = 16 * CHUNK_BYTES


def produce(
    topic: Topic,
    key_separator: Annotated[
        str, typer.Option(metavar="TEXT", help="What stands between key and value. Default: lines have no key.")
    ] = "",
    partition: Annotated[int | None, typer.Option(help="Send all of it here and not by key.")] = None,
    acks: Annotated[str, typer.Option(help="0, 1 or all.")] = "all",
    config: Settings = None,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Append standard input: one record for each line; a topic with columns takes one JSON object a line."""
    servers = bootstrap_servers(bootstrap_server)
    with spark_broker.Admin(servers) as admin:
        schema = admin.describe_topic(topic).schema
    from spark_broker.cli.lines import RowMaker

    maker = RowMaker(schema, key_separator)
    if sys.stdin.isatty():
        note("Type records, one a line; Ctrl-D ends.")
    total = Tally()
    with (
        spark_broker.Producer(servers, acks=acks, config=parse_settings(config)) as producer,
        progress("appended") as tell,
    ):
        for lines in whole_lines(sys.stdin.buffer):
            total.wait_for(producer.append(topic, maker.rows(lines), partition=partition))
            tell(total.settle())
        total.settle(wait=True)
    if output is OutputFormat.JSON:
        print_json({"topic": topic, "records": total.records, "batches": total.batches})
    else:
        records = counted(total.records, "record", "records")
        note(f"{records} in {counted(total.batches, 'batch', 'batches')} acknowledged")


class Tally:
    """Appends under way, oldest first, and what has been acknowledged."""

    def __init__(self) -> None:
        self.records = 0
        self.batches = 0
        self._waiting: deque[Future[list[RecordMetadata]]] = deque()

    def wait_for(self, future: Future[list[RecordMetadata]]) -> None:
        """One more append."""
        self._waiting.append(future)

    def settle(self, *, wait: bool = False) -> int:
        """Count the appends that are done, or all with `wait`; returns the records so far. Raises an append's error."""
        while self._waiting and (wait or self._waiting[0].done()):
            stored = self._waiting.popleft().result()
            self.batches += len(stored)
            self.records += sum(batch.count for batch in stored)
        return self.records


def whole_lines(stream: BinaryIO) -> Iterator[list[bytes]]:
    """The lines of a stream without their ends, as they arrive: what is typed is not held back until a block is full.

    Raises InvalidDataError for a line that does not end.
    """
    read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
    rest = b""
    while chunk := read(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
        if len(rest) > LINE_BYTES_MAX:
            raise InvalidDataError(f"a line of more than {LINE_BYTES_MAX:,} bytes")
    if rest:
        yield [rest]
