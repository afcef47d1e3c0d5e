"""Divides micro-batches of `send` that a topic does not take, so that each piece may be stored or refused by itself."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import pyarrow as pa

from spark_broker.client.inputs import fits, sliced
from spark_broker.client.outgoing import Outcome, OutgoingBatch
from spark_broker.errors import SparkBrokerError
from spark_broker.model import RecordMetadata
from spark_broker.protocol.arrow_message import decode_batch, encoded_batch
from spark_broker.protocol.schema import DEFAULT_SCHEMA


@dataclass(frozen=True, slots=True)
class Divided:
    """The outcomes of the pieces of a micro-batch, in order. `firsts`: the index of each piece's first row."""

    firsts: tuple[int, ...]
    outcomes: tuple[Outcome, ...]

    def of(self, index: int) -> Outcome:
        """The outcome of a row: what is stored has it at `base_offset + index`."""
        place = bisect_right(self.firsts, index) - 1
        outcome = self.outcomes[place]
        if isinstance(outcome, SparkBrokerError) or outcome.base_offset is None:
            return outcome
        return replace(outcome, base_offset=outcome.base_offset - self.firsts[place])


Result = Outcome | Divided
"""What comes of a micro-batch of `send`."""

Complete = Callable[[Result], None]

Divide = Callable[[OutgoingBatch, int], list[OutgoingBatch]]


class PieceResults:
    """Gathers the outcomes of the pieces of one micro-batch, and completes it with the last."""

    def __init__(self, pieces: Sequence[pa.RecordBatch], complete: Complete) -> None:
        self._firsts = [0, *accumulate(piece.num_rows for piece in pieces[:-1])]
        self._complete = complete
        self._lock = threading.Lock()
        self._results: list[Result | None] = [None] * len(pieces)
        self._missing = len(pieces)

    def part(self, place: int) -> Complete:
        """Where the piece at this place reports its outcome."""
        return partial(self._come, place)

    def _come(self, place: int, result: Result) -> None:
        with self._lock:
            self._results[place] = result
            self._missing -= 1
            if self._missing:
                return
        firsts, outcomes = zip(*self._flat(), strict=True)
        self._complete(Divided(firsts, outcomes))

    def _flat(self) -> Iterator[tuple[int, Outcome]]:
        """A piece may have been divided, too."""
        for first, result in zip(self._firsts, self._results, strict=True):
            if isinstance(result, Divided):
                yield from zip((first + inner for inner in result.firsts), result.outcomes, strict=True)
            elif result is not None:
                yield first, result


@dataclass(frozen=True)
class Divider:
    """Divides batches of Kafka's record that were refused. Each is encoded as the producer encodes its batches."""

    attributes: int
    compression: str | None

    def of(self, complete: Complete) -> Divide:
        """What divides the micro-batch that is completed so."""
        return partial(self._divide, complete)

    def _divide(self, complete: Complete, batch: OutgoingBatch, limit_bytes: int) -> list[OutgoingBatch]:
        rows = decode_batch(bytes(batch.message), DEFAULT_SCHEMA)
        # Who refused it may know of a smaller limit than this one.
        halves = [piece for half in _halves(rows) for piece in divided(half, limit_bytes)]
        results = PieceResults(halves, complete)
        return [self._piece(batch, piece, results.part(place)) for place, piece in enumerate(halves)]

    def _piece(self, batch: OutgoingBatch, rows: pa.RecordBatch, complete: Complete) -> OutgoingBatch:
        message = encoded_batch(
            rows, schema_id=batch.schema_id, attributes=self.attributes, compression=self.compression
        )
        tp, topic_id, schema_id = batch.topic_partition, batch.topic_id, batch.schema_id
        return OutgoingBatch(tp, topic_id, schema_id, rows.num_rows, message, complete, self.of(complete))


def divided(rows: pa.RecordBatch, limit_bytes: int) -> list[pa.RecordBatch]:
    """Pieces of the batch, each no larger than the limit, or of one row."""
    if rows.num_rows == 1 or fits(rows, limit_bytes):
        return [rows]
    return [piece for half in _halves(rows) for piece in divided(half, limit_bytes)]


def _halves(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    half = rows.num_rows // 2
    return sliced(rows, 0, half), sliced(rows, half, rows.num_rows - half)


def failures(result: Result, rows: int) -> Iterator[tuple[SparkBrokerError, range]]:
    """The errors in it, each with its rows."""
    if isinstance(result, SparkBrokerError):
        yield result, range(rows)
    elif isinstance(result, Divided):
        ends = (*result.firsts[1:], rows)
        for first, end, outcome in zip(result.firsts, ends, result.outcomes, strict=True):
            if not isinstance(outcome, RecordMetadata):
                yield outcome, range(first, end)
