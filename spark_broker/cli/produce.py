"""`spark-broker produce`: lines of standard input as records."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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
from spark_broker.cli.streams import arrivals
from spark_broker.errors import InvalidDataError, SparkBrokerError
from spark_broker.interrupts import interruptible, uninterrupted
from spark_broker.model import RecordMetadata

CHUNK_BYTES = 1024 * 1024
LINE_BYTES_MAX = 16 * CHUNK_BYTES

SKIPPED_SHOWN = 10
"""How many skipped lines are shown; the others are only counted."""


def produce(
    topic: Topic,
    key_separator: Annotated[
        str, typer.Option(metavar="TEXT", help="What stands between key and value. Default: lines have no key.")
    ] = "",
    partition: Annotated[int | None, typer.Option(help="Send all of it here and not by key.")] = None,
    acks: Annotated[str, typer.Option(help="0, 1 or all.")] = "all",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out lines that do not fit the topic, and say which they are.")
    ] = False,
    config: Settings = None,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Append standard input: one record for each line; a topic with columns takes one JSON object a line.

    The first line that does not fit the topic ends the command. The lines before it are appended, and the error says
    so: mend that line, and go on with it.
    """
    servers = bootstrap_servers(bootstrap_server)
    with spark_broker.Admin(servers) as admin:
        schema = admin.describe_topic(topic, with_offsets=False).schema
    from spark_broker.cli.lines import RowMaker

    maker = RowMaker(schema, key_separator, skip_bad=skip_bad)
    if sys.stdin.isatty():
        note("Type records, one a line; Ctrl-D ends.")
    total = Tally("sent" if acks == "0" else "acknowledged")
    with (
        spark_broker.Producer(servers, acks=acks, config=parse_settings(config)) as producer,
        progress("appended") as tell,
        total.told_at_the_end(),
    ):
        for lines in whole_lines(sys.stdin.buffer):
            made = maker.rows(lines)
            append = None
            if made.table.num_rows:
                total.hand_on(maker.lines)
                append = producer.append(topic, made.table, partition=partition)
            total.wait_for(append, maker.lines)
            for refused in made.refused:
                total.refuse(refused, skip=skip_bad)
            tell(total.settle())
        total.settle(wait=True)
    if output is OutputFormat.JSON:
        skipped = {"skipped": total.skipped} if skip_bad else {}
        print_json({"topic": topic, "records": total.records, "batches": total.batches} | skipped)
    else:
        note(str(total))


class Tally:
    """Appends under way, oldest first, what is stored, and how many lines were left out. `stored`: the word for it."""

    def __init__(self, stored: str = "acknowledged") -> None:
        self.records = 0
        self.batches = 0
        self.skipped = 0
        self._lines = 0  # So many lines from the first on are stored or left out.
        self._handed_on = 0  # Any of the lines up to this number may be stored.
        self._stored = stored
        self._waiting: deque[tuple[Future[list[RecordMetadata]] | None, int]] = deque()

    def hand_on(self, lines: int) -> None:
        """The lines up to this number are about to be appended. Ctrl-C may end that when some of them are stored."""
        self._handed_on = lines

    def wait_for(self, future: Future[list[RecordMetadata]] | None, lines: int) -> None:
        """One more append, of the lines up to this number. None: there was nothing to append."""
        self._waiting.append((future, lines))

    def settle(self, *, wait: bool = False) -> int:
        """Count the appends that are done, or all with `wait`; returns the records so far. Raises an append's error."""
        while self._waiting and (wait or self._waiting[0][0] is None or self._waiting[0][0].done()):
            future, lines = self._waiting[0]
            with uninterrupted():  # Ctrl-C ends the wait alone: what was awaited is counted later, and once.
                with interruptible():
                    stored = [] if future is None else future.result()
                self._waiting.popleft()
                self.batches += len(stored)
                self.records += sum(batch.count for batch in stored)
                self._lines = lines
        return self.records

    def refuse(self, error: InvalidDataError, *, skip: bool) -> None:
        """A line does not fit. Raises its error unless such lines are skipped."""
        if not skip:
            raise InvalidDataError(error.message, hint=f"{error.hint} --skip-bad leaves such lines out.")
        self.skipped += 1
        if self.skipped <= SKIPPED_SHOWN:
            note(f"skipped: {error.message}")
        elif self.skipped == SKIPPED_SHOWN + 1:
            note("skipped: more lines")

    @contextmanager
    def told_at_the_end(self) -> Iterator[None]:
        """Whatever ends the block early: the user learns which lines are stored, and with which to go on."""
        try:
            try:
                yield
            except (InvalidDataError, KeyboardInterrupt):
                self.settle(wait=True)
                raise
        except InvalidDataError as error:
            onwards = f"Mend line {self._lines + 1:,} and go on with it: `tail -n +{self._lines + 1} FILE`."
            raise InvalidDataError(f"{error.message}; {self._before()}", hint=f"{error.hint} {onwards}") from None
        except SparkBrokerError as error:
            error.message += f"; {self._before()}"
            raise
        except KeyboardInterrupt:
            line = f"line {self._lines + 1:,}"
            onwards = f"going on with {line} may store them twice" if self._unsure else f"go on with {line}"
            note(f"{self._before()}: {onwards}")
            raise

    @property
    def _unsure(self) -> bool:
        """Whether lines are stored, perhaps, that nobody has acknowledged."""
        return self._handed_on > self._lines

    def _before(self) -> str:
        stored = f"{counted(self.records, 'record was', 'records were')} {self._stored} before"
        return f"{stored}, and some of the lines from {self._lines + 1:,} on may be" if self._unsure else stored

    def __str__(self) -> str:
        records, batches = counted(self.records, "record", "records"), counted(self.batches, "batch", "batches")
        skipped = f"; {counted(self.skipped, 'line was', 'lines were')} skipped" if self.skipped else ""
        return f"{records} in {batches} {self._stored}{skipped}"


def whole_lines(stream: BinaryIO) -> Iterator[list[bytes]]:
    """The lines of a stream without their ends, as they arrive: what is typed is not held back until a block is full.

    Raises InvalidDataError for a line that does not end.
    """
    rest, number = b"", 0
    for chunk in arrivals(stream, CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        number += len(lines)
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
        if len(rest) > LINE_BYTES_MAX:
            raise InvalidDataError(f"line {number + 1:,} has more than {LINE_BYTES_MAX:,} bytes")
    if rest:
        yield [rest]
