"""What is appended to a partition (clients' batches, coordinators' markers), and the token that takes the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from spark_broker.broker.topic import NewestTimestamp, Topic
from spark_broker.errors import (
    InvalidRecordError,
    MessageTooLargeError,
    RecordListTooLargeError,
    SparkBrokerError,
    UnknownTopicOrPartitionError,
)
from spark_broker.protocol.arrow_message import encode_marker, layout_of, validate
from spark_broker.protocol.keys import key_array, with_key_columns
from spark_broker.protocol.message_head import Head
from spark_broker.protocol.wire import Buffer


class AppendToken(Protocol):
    """Takes the outcome of an append. Called under the partition's lock, so it must not block."""

    def acknowledge(self, base_offset: int) -> None: ...

    def refuse(self, error: SparkBrokerError) -> None: ...


@dataclass(frozen=True, slots=True)
class ValidBatch:
    """What a leader has to know of a client's batch. Whatever looks at rows comes before the partition's lock.

    An error of ours there ends the call. Under the lock it would end the broker. The client would send the batch again,
    and so end the next leader.
    """

    head: Head
    newest: NewestTimestamp


@dataclass(frozen=True, slots=True)
class Append:
    """A batch from a client. `acks` is 0, 1 or -1; `deadline_ms` is on the boot-time clock."""

    message: Buffer
    leader_epoch: int
    acks: int
    schema_id: int
    deadline_ms: int

    def validated(self, topic: Topic) -> ValidBatch:
        """The batch, checked in full. Raises the error that refuses it."""
        limit = topic.config.max_message_bytes
        if len(self.message) > limit:
            raise MessageTooLargeError(f"a batch of {len(self.message)} bytes; {topic.name} takes {limit}")
        if len(self.message) > topic.config.segment_bytes:
            raise RecordListTooLargeError(f"a batch of {len(self.message)} bytes; a segment holds less")
        if not topic.knows_schema(self.schema_id):  # Clients of each version know this error, and try again.
            unknown = f"{topic.name} has no schema {self.schema_id} as far as this broker knows"
            raise UnknownTopicOrPartitionError(unknown)
        layout = layout_of(topic.schema_message(self.schema_id))
        parsed = validate(self.message, layout, max_uncompressed_bytes=limit)
        if topic.is_compacted:
            check_keys(parsed.batch, topic)
        return ValidBatch(parsed.head, topic.newest_timestamp(parsed))


def check_keys(batch: pa.RecordBatch, topic: Topic) -> None:
    """Check that each record has a key; rows of an older schema may lack its columns. Raises InvalidRecordError."""
    keyed = with_key_columns(batch, topic.key_columns, topic.schemas[-1])
    keyless = key_array(keyed, topic.key_columns).null_count
    if keyless:
        columns = ", ".join(topic.key_columns)
        raise InvalidRecordError(f"{keyless} of {batch.num_rows} records for {topic.name} have no key ({columns})")


@dataclass(frozen=True, slots=True)
class AwaitedTransaction:
    """A transactional batch waits for its coordinator.

    `leader_epoch` is the partition's. `asked_ms` is when the coordinator is asked, on the boot-time clock.
    """

    producer_id: int
    producer_epoch: int
    leader_epoch: int
    asked_ms: int


@dataclass(frozen=True, slots=True)
class Marker:
    """The end of a producer's transaction. `producer_epoch` begins after it. `deadline_ms`: on the boot-time clock."""

    producer_id: int
    producer_epoch: int
    committed: bool
    deadline_ms: int

    def message(self, topic: Topic) -> bytes:
        """A batch without rows, of the topic's current schema."""
        return encode_marker(
            topic.schemas[-1],
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            committed=self.committed,
            schema_id=topic.schema_id,
        )
