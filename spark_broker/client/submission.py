"""Rows of one partition on their way to the sender: divided, encoded, and handed on once there is room."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from spark_broker.client.cluster_view import TopicView
from spark_broker.client.dividing import Complete, Divide, Divider, PieceResults, divided
from spark_broker.client.inputs import within_size
from spark_broker.client.lingering import OutOfTimeError
from spark_broker.client.outgoing import Outcome, OutgoingBatch
from spark_broker.client.retry import Deadline
from spark_broker.client.sender import Sender
from spark_broker.errors import BufferExhaustedError, SparkBrokerError
from spark_broker.interrupts import uninterrupted, wait_no_more
from spark_broker.model import TopicPartition
from spark_broker.protocol.arrow_message import encoded_batch


class Submission:
    """Of one producer. `note_failure`: is told of each batch that fails for good, before its Future is."""

    def __init__(self, sender: Sender, divider: Divider, note_failure: Callable[[SparkBrokerError], None]) -> None:
        self._sender = sender
        self._divider = divider
        self._note_failure = note_failure

    def submit(
        self,
        view: TopicView,
        partition: int,
        rows: pa.RecordBatch,
        complete: Callable[[Outcome], None],
        deadline: Deadline,
        divide: Divide | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        """Encode, wait for room, and hand the batches to the sender. Failures are reported to `complete`.

        `keeps`: that there was no room in time is none. Raises OutOfTimeError then.
        """
        attributes, compression = self._divider.attributes, self._divider.compression
        message = encoded_batch(rows, schema_id=view.schema_id, attributes=attributes, compression=compression)
        where = TopicPartition(view.name, partition)
        batch = OutgoingBatch(where, view.topic_id, view.schema_id, rows.num_rows, message, complete, divide)
        with uninterrupted():
            try:
                self._sender.reserve(batch.size_bytes, deadline)
                self._sender.enqueue(batch)
            except SparkBrokerError as error:
                if keeps and isinstance(error, BufferExhaustedError):
                    raise OutOfTimeError from error
                self._note_failure(error)
                complete(error)

    def records(
        self,
        view: TopicView,
        partition: int,
        rows: pa.RecordBatch,
        complete: Complete,
        deadline: Deadline,
        soon: Deadline | None,
    ) -> None:
        """The records of `send`. The limit of the topic may have become lower while they gathered. `soon`: when the
        caller's wait ends. Once a piece is handed on, so are the others.
        """
        pieces = divided(rows, view.settings.max_message_bytes)
        results = None if len(pieces) == 1 else PieceResults(pieces, complete)
        for place, piece in enumerate(pieces):
            done = complete if results is None else results.part(place)
            try:
                within_size(piece, view, divisible=False)
            except SparkBrokerError as error:
                self._note_failure(error)
                done(error)
            else:
                until, keeps = (deadline, False) if place or soon is None else (soon, True)
                self.submit(view, partition, piece, done, until, self._divider.of(done), keeps=keeps)
                wait_no_more()
