"""A client's process that says what each of its first operations imports: `python first_use.py <bootstrap> <name>...`.

It wants a topic `first` of two partitions. It writes a JSON object: what was imported between the construction of the
clients and the end of each operation, by the operation's name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from spark_broker import Consumer, Producer, TopicPartition

TOPIC = "first"
PARTITIONS = [TopicPartition(TOPIC, number) for number in range(2)]
TIMEOUT_S = 30.0


def operations(producer: Producer, writer: Producer, consumer: Consumer) -> Mapping[str, Callable[[], object]]:
    def append() -> None:
        row = {"value": b"value", "headers": [{"key": "name", "value": None}]}
        for partition in (0, 1):
            producer.append(TOPIC, [row], partition=partition).result(TIMEOUT_S)

    def keyed_append() -> None:
        producer.append(TOPIC, [{"key": str(number)} for number in range(20)]).result(TIMEOUT_S)

    def transaction() -> None:
        writer.begin_transaction()
        writer.append(TOPIC, [{"value": "text"}], partition=0)
        writer.commit_transaction()

    def consume() -> None:
        append()
        consumer.assign(PARTITIONS)
        while not consumer.poll(1.0):
            pass

    return {
        "append": append,
        "keyed append": keyed_append,
        "send": lambda: producer.send(TOPIC, b"value", partition=0).result(TIMEOUT_S),
        "transaction": transaction,
        "consume": consume,
        "commit": consumer.commit,
        "committed": lambda: consumer.committed(PARTITIONS[0]),
        "offsets by time": lambda: consumer.offsets_for_times({PARTITIONS[0]: datetime(2026, 1, 1, tzinfo=UTC)}),
        "end offsets": lambda: consumer.end_offsets(PARTITIONS),
    }


def main() -> None:
    bootstrap, *names = sys.argv[1:]
    imported = {}
    with (
        Producer(bootstrap) as producer,
        Producer(bootstrap, transactional_id="writer") as writer,
        Consumer(bootstrap, group_id="group", auto_offset_reset="earliest") as consumer,
    ):
        loaded_modules = set(sys.modules)
        for name in names:
            operations(producer, writer, consumer)[name]()
            imported[name] = sorted(set(sys.modules) - loaded_modules)
            loaded_modules |= set(sys.modules)
    json.dump(imported, sys.stdout)


if __name__ == "__main__":
    main()
