"""A consume-transform-produce loop in its own process, which a test kills: `copy_worker SERVERS FROM TO GROUP`."""

from __future__ import annotations

import sys

from spark_broker import Consumer, GroupMetadata, Producer, TopicPartition
from spark_broker.errors import TransactionAbortableError

RECORDS_MAX = 25
"""The records of one transaction: few, so that a kill finds one open."""


def copy(servers: str, source: str, target: str, group: str) -> None:
    """Copy each record once, in upper case, for ever; each commit is a line on standard output."""
    config = {
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "session.timeout.ms": 1000,
    }
    with (
        Producer(servers, transactional_id=group) as producer,
        Consumer(servers, topics=[source], config=config) as consumer,
    ):
        producer.init_transactions()  # decides what the killed process left open, before offsets are read
        while True:
            for batch in consumer.poll(1.0):
                for at in range(0, batch.data.num_rows, RECORDS_MAX):
                    rows = batch.data.slice(at, RECORDS_MAX)
                    end = batch.base_offset + at + rows.num_rows
                    values = [row["value"].upper() for row in rows.to_pylist()]
                    reached = {TopicPartition(source, batch.partition): end}
                    while not _copied(producer, target, batch.partition, values, reached, consumer.group_metadata()):
                        pass
                    sys.stdout.write(f"{batch.partition} {end}\n")
                    sys.stdout.flush()


def _copied(
    producer: Producer,
    target: str,
    partition: int,
    values: list[bytes],
    reached: dict[TopicPartition, int],
    group: GroupMetadata,
) -> bool:
    try:
        with producer.transaction():
            for value in values:
                producer.send(target, value, partition=partition)
            producer.send_offsets_to_transaction(reached, group)
    except TransactionAbortableError:
        return False
    return True


if __name__ == "__main__":
    copy(*sys.argv[1:])
